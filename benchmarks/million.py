"""A million parameters by a million samples: a product S v and a few iterations of CG, in one process.

    python -m benchmarks.million                # a real multilayer perceptron, float32
    python -m benchmarks.million --complex      # a complex restricted Boltzmann machine, complex64

S is the centred J^H J. Samples are int8 spins, cast chunk by chunk inside the network. Before and after each timed part
the machine multiplies two float32 matrices of the size that the network multiplies for a chunk; a product's rate, in
floating-point operations that it cannot do without, is held against the rate of that. Prints a table; ``--json FILE``
writes it too.
"""

import argparse
import json
import math
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import krylov
from benchmarks.networks import mlp, random_mlp, random_rbm_apart, rbm_apart

SHIFT = 1e-2


class Problem(NamedTuple):
    """A network on some sites, and what it multiplies."""

    network: Any
    params: Any
    sites: int
    flops: int  # of a product S v, for one sample
    shape: tuple[int, int]  # of the largest weight matrix
    chunk_size: int  # the fastest on two cores


def real_problem(parameters: int) -> Problem:
    """Two hidden layers of one width.

    A matrix product takes two operations an entry. The weights of the first layer are in 3 of them: evaluate, push v
    forward, sum the gradient. Those of the second are in 5: there the change of the layer's input is pushed and pulled
    through as well.
    """
    sites = 64 if parameters > 20_000 else 16
    width = math.ceil(math.sqrt(parameters + sites**2 / 4) - sites / 2)
    params = random_mlp(jax.random.key(0), (sites, width, width), jnp.float32)
    return Problem(mlp, params, sites, 6 * sites * width + 10 * width**2, (width, width), 1000)


def complex_problem(parameters: int) -> Problem:
    """One hidden layer about as wide as there are sites.

    Real spins multiply real and imaginary parts: 4 operations an entry, and 3 products as for the first layer above.
    """
    sites = 1024 if parameters > 20_000 else 32
    hidden = math.ceil(parameters / sites)
    params = random_rbm_apart(jax.random.key(0), sites, hidden, jnp.complex64)
    return Problem(rbm_apart, params, sites, 12 * sites * hidden, (sites, hidden), 1000)


@partial(jax.jit, static_argnums=(1, 2))
def random_samples(key, count, sites):
    """Spins, made in parts: random bits are four times as large."""
    parts = math.gcd(count, 1000)
    make = lambda key: jax.random.rademacher(key, (count // parts, sites), jnp.int8)
    return jax.lax.map(make, jax.random.split(key, parts)).reshape(count, sites)


@jax.jit
def local_energies(samples):
    """Numbers that depend on the samples, as those of a Hamiltonian do: bonds of a few sites."""
    return jnp.sum(samples[:, :8] * samples[:, 1:9], axis=1).astype(jnp.float32)


class Rate:
    """The rate of float32 matrix products of a chunk, in turns with what is timed."""

    def __init__(self, chunk_size, shape, seconds):
        keys = jax.random.split(jax.random.key(1))
        self.factors = [jax.random.normal(k, s) for k, s in zip(keys, ((chunk_size, shape[0]), shape))]
        self.flops, self.seconds = 2 * chunk_size * math.prod(shape), seconds
        self.product = jax.jit(partial(jnp.matmul, precision="highest"))
        self.found = []
        jax.block_until_ready(self.product(*self.factors))

    def measure(self) -> None:
        """For some time."""
        start, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - start) < self.seconds:
            jax.block_until_ready(self.product(*self.factors))
            count += 1
        self.found.append(count * self.flops / elapsed)

    def timed(self, function, *args):
        """The result and the seconds, between two measurements of the rate."""
        self.measure()
        start = time.perf_counter()
        result = jax.block_until_ready(function(*args))
        seconds = time.perf_counter() - start
        self.measure()
        return result, seconds


def peak_memory() -> int:
    """The most bytes that this process has had resident, 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def make(problem: Problem, count: int, chunk_size: int):
    """The Jacobian on random samples and local energies for them."""
    samples = random_samples(jax.random.key(2), count, problem.sites)
    energies = local_energies(samples)
    if jnp.iscomplexobj(jax.tree.leaves(problem.params)[0]):
        energies = energies.astype(jnp.complex64)
    return krylov.Jacobian(problem.network, problem.params, samples, center=True, chunk_size=chunk_size), energies


def run(problem: Problem, count: int, *, chunk_size=None, iterations=2, products=1, seconds=3.0) -> dict[str, Any]:
    """Make the system, multiply, solve; all figures."""
    chunk_size = min(count, chunk_size or problem.chunk_size)
    rate = Rate(chunk_size, problem.shape, seconds)
    start = time.perf_counter()
    J, energies = jax.block_until_ready(make(problem, count, chunk_size))
    making = time.perf_counter() - start
    v = jax.tree.map(lambda p: jnp.cos(jnp.arange(p.size)).astype(p.dtype).reshape(p.shape), problem.params)

    multiply = jax.jit(lambda J, v: J.gram() @ v).lower(J, v).compile()
    times = [rate.timed(multiply, J, v)[1] for _ in range(products)]
    product = statistics.median(times)
    flops = problem.flops * count
    figures = {
        "parameters": sum(p.size for p in jax.tree.leaves(problem.params)),
        "samples": count,
        "chunk size": chunk_size,
        "making the operator, s": making,
        "product S v, s": product,
        "floating-point operations": flops,
        "temporary bytes": multiply.memory_analysis().temp_size_in_bytes,
    }
    if iterations:
        forces = J.H @ J.sample_vector(energies)
        solve = jax.jit(lambda J, b: krylov.solve(J.gram(), b, "cg", shift=SHIFT, rtol=1e-6, maxiter=iterations))
        solution, solving = rate.timed(solve.lower(J, forces).compile(), J, forces)
        figures |= {
            "CG iterations": int(solution.iterations),
            "products of CG": int(solution.matvecs),
            "residual / rhs": float(solution.residual_norm / solution.rhs_norm),
            "solve, s": solving,
            "rate of the solve": int(solution.matvecs) * flops / solving,
        }
    gemm = statistics.median(rate.found)
    figures |= {
        "rate of a matrix product": gemm,
        "rate of S v": flops / product,
        "S v / matrix product": flops / product / gemm,
        "peak resident bytes": peak_memory(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    return figures


def _words(value) -> str:
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def main(arguments=None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--complex", action="store_true")
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--chunk-size", type=int)
    parser.add_argument("--iterations", type=int, default=2, help="of CG; 0 leaves it out")
    parser.add_argument("--products", type=int, default=1, help="to take the median of")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement of a matrix product's rate")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    chosen = parser.parse_args(arguments)
    problem = (complex_problem if chosen.complex else real_problem)(chosen.parameters)
    figures = run(
        problem,
        chosen.samples,
        chunk_size=chosen.chunk_size,
        iterations=chosen.iterations,
        products=chosen.products,
        seconds=chosen.seconds,
    )
    for name, value in figures.items():
        print(f"{name:26} {_words(value):>22}")
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
