"""Steps of stochastic reconfiguration: recycled CG beside dense Cholesky and CG as NetKet sets them, the same systems.

    python -m benchmarks.steps                        # 50 steps of both systems, all of their samples
    python -m benchmarks.steps --system rbm --steps 10 --samples 1024 --json steps.json

Two trained wave functions go on being optimised: a complex restricted Boltzmann machine on the Heisenberg chain of 20
sites and a vision transformer on the 6x6 J1-J2 model. Before each step the chains, which begin at the stored samples,
move on by one Metropolis proposal of an exchange for each site; the parameters move along the step of Cholesky. In each
step, in turns, in double precision, from parameters, samples and local energies to the step:

- ``recycled``: `krylov.natural_gradient` on parameters with a `krylov.Recycler`, at its default tolerance;
- ``cholesky``: all entries of the Jacobian, the smaller of S and T, its Cholesky factors, as in ``netket``'s SR and
  minSR;
- ``cg``: ``jax.scipy.sparse.linalg.cg`` with its default tolerance and iterations from the step before, as in
  ``netket.optimizer.SR(solver_restart=False)``, with krylov's products.

The residual is that of ``(S + shift) dp = F``, from all entries of the Jacobian in double precision. Nothing is
compiled in what is timed. Prints a table; ``--json FILE`` writes it and each step as soon as it is taken.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax.flatten_util import ravel_pytree

import krylov
from tests import networks

METHODS = ("recycled", "cholesky", "cg")


class System(NamedTuple):
    """A trained wave function and its Hamiltonian, sums of Pauli products on bonds."""

    log_psi: Callable
    trained: Callable
    bonds: np.ndarray  # (bonds, 2)
    diagonal: np.ndarray  # (bonds,) of sigma^z sigma^z
    exchange: np.ndarray  # (bonds,) of the exchange; Marshall's sign rule is in it
    shift: float
    samples: int
    holomorphic: bool


def heisenberg_chain(sites: int = 20) -> System:
    """1700 complex parameters, 4096 samples."""
    bonds = np.array([(i, (i + 1) % sites) for i in range(sites)])
    ones = np.ones(len(bonds))
    return System(networks.rbm, networks.trained_rbm, bonds, ones, -2 * ones, 1e-4, 4096, holomorphic=True)


def square_j1j2(side: int = 6, j2: float = 0.5) -> System:
    """18,848 real parameters, 2048 samples, complex output."""
    site = lambda x, y: (x % side) * side + y % side
    sites = list(itertools.product(range(side), repeat=2))
    near = [(site(x, y), site(x + dx, y + dy)) for x, y in sites for dx, dy in ((1, 0), (0, 1))]
    far = [(site(x, y), site(x + dx, y + dy)) for x, y in sites for dx, dy in ((1, 1), (1, -1))]
    diagonal = np.repeat([1.0, j2], [len(near), len(far)])
    exchange = 2 * np.repeat([-1.0, j2], [len(near), len(far)])
    bonds = np.array(near + far)
    return System(networks.vit, networks.trained_vit, bonds, diagonal, exchange, 1e-3, 2048, holomorphic=False)


SYSTEMS = {"rbm": heisenberg_chain, "vit": square_j1j2}


@partial(jax.jit, static_argnums=0)
def local_energies(log_psi, params, spins, bonds, diagonal, exchange):
    """Of all configurations, bond by bond."""
    amplitudes = log_psi(params, spins)

    def one(bond):
        (i, j), parallel, swap = bond
        first, second = spins[:, i], spins[:, j]
        ratio = jnp.exp(log_psi(params, spins.at[:, i].set(second).at[:, j].set(first)) - amplitudes)
        return parallel * first * second + jnp.where(first != second, swap * ratio, 0)

    return jax.lax.map(one, (bonds, diagonal, exchange)).sum(0)


@partial(jax.jit, static_argnums=0)
def resampled(log_psi, params, spins, key):
    """Each chain after one proposal for each site: an up and a down spin exchanged."""

    def move(chains, key):
        spins, amplitudes = chains
        pick, accept = jax.random.split(key)
        lottery = jax.random.uniform(pick, spins.shape)
        up, down = (jnp.argmax(lottery * (spins == s), 1) for s in (1, -1))
        rows = jnp.arange(len(spins))
        moved = spins.at[rows, up].set(-1).at[rows, down].set(1)
        proposed = log_psi(params, moved)
        accepted = jnp.log(jax.random.uniform(accept, up.shape)) < 2 * (proposed - amplitudes).real
        return (jnp.where(accepted[:, None], moved, spins), jnp.where(accepted, proposed, amplitudes)), None

    keys = jax.random.split(key, spins.shape[1])
    return jax.lax.scan(move, (spins, log_psi(params, spins)), keys)[0][0]


def dense_rows(system: System, params: Any, spins: jax.Array, energies: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Centred rows of the Jacobian and energies over the root of N, as real and imaginary parts unless holomorphic."""
    flat, unravel = ravel_pytree(params)
    real = not system.holomorphic

    def output(flat, x):
        out = system.log_psi(unravel(flat), x[None])[0]
        return jnp.stack([out.real, out.imag]) if real else out

    derivative = jax.jacrev(output) if real else jax.grad(output, holomorphic=True)
    rows = jax.lax.map(lambda x: derivative(flat, x), spins, batch_size=128)
    e = jnp.stack([energies.real, energies.imag], 1) if real else energies
    rows, e = ((x - x.mean(0)) / np.sqrt(len(spins)) for x in (rows, e))
    return rows.reshape(-1, flat.size), e.reshape(-1)


def cholesky_step(system: System, params: Any, spins: jax.Array, energies: jax.Array) -> Any:
    """The step by the smaller of the two matrices."""
    rows, e = dense_rows(system, params, spins, energies)
    adjoint = rows.conj().T
    small = rows @ adjoint if rows.shape[0] < rows.shape[1] else adjoint @ rows
    factors = jax.scipy.linalg.cho_factor(small + system.shift * jnp.eye(len(small)))
    solved = lambda b: jax.scipy.linalg.cho_solve(factors, b)
    step = adjoint @ solved(e) if rows.shape[0] < rows.shape[1] else solved(adjoint @ e)
    return ravel_pytree(params)[1](step)


def residuals(system: System, params: Any, spins: jax.Array, energies: jax.Array, steps: list[Any]) -> jax.Array:
    """``||F - (S + shift) dp|| / ||F||`` of each step, from all entries."""
    rows, e = dense_rows(system, params, spins, energies)
    forces, x = e @ rows.conj(), jnp.stack([ravel_pytree(step)[0] for step in steps])
    left = forces - (x @ rows.T) @ rows.conj() - system.shift * x
    return jnp.linalg.norm(left, axis=1) / jnp.linalg.norm(forces)


class Run:
    """The three methods on one system."""

    def __init__(self, system: System, rank: int, storage: Any):
        self.system, self.products = system, 0
        self.recycler = krylov.Recycler(krylov.Nystrom(rank))
        self.jacobian = dict(holomorphic=system.holomorphic, storage=storage, chunk_size="auto")

        def recycled(params, spins, energies, state):
            options = dict(shift=system.shift, route="parameters", recycler=self.recycler, recycler_state=state)
            return krylov.natural_gradient(system.log_psi, params, spins, energies, **options, **self.jacobian)

        def plain_cg(params, spins, energies, before):
            J = krylov.Jacobian(system.log_psi, params, spins, center=True, **self.jacobian)
            S = J.gram()

            def product(v):
                jax.debug.callback(self._count)
                return jax.tree.map(lambda y, x: y + system.shift * x, S @ v, v)

            return jax.scipy.sparse.linalg.cg(product, J.H @ J.sample_vector(energies), x0=before)[0]

        self._recycled, self._cg = jax.jit(recycled), jax.jit(plain_cg)
        self._cholesky, self.residuals = (jax.jit(partial(f, system)) for f in (cholesky_step, residuals))

    def _count(self) -> None:
        self.products += 1

    def start(self, params: Any, spins: jax.Array) -> dict[str, Any]:
        """What the methods carry from step to step."""
        S = krylov.quantum_geometric_tensor(self.system.log_psi, params, spins, **self.jacobian)
        nothing = jax.tree.map(jnp.zeros_like, params)
        return {"recycled": self.recycler.start(S), "cholesky": None, "cg": nothing}

    def take(self, method: str, carried: Any, params: Any, spins: jax.Array, energies: jax.Array):
        """A step, what to carry on, and the counts."""
        if method == "recycled":
            step, solution = self._recycled(params, spins, energies, carried)
            counts = {"iterations": int(solution.iterations), "products": int(solution.matvecs)}
            return step, solution.recycler_state, counts
        if method == "cholesky":
            return jax.block_until_ready(self._cholesky(params, spins, energies)), None, {}
        self.products = 0
        step = jax.block_until_ready(self._cg(params, spins, energies, carried))
        jax.effects_barrier()
        # The first product is that of the guess.
        return step, step, {"iterations": self.products - 1, "products": self.products}


def measure(
    name: str, steps: int, samples: int | None, rank: int, storage: Any, rate: float
) -> Iterator[dict[str, Any]]:
    """What each method took, after each step of a system."""
    system = SYSTEMS[name]()
    params, spins, _ = system.trained(samples or system.samples)
    params, spins = jax.tree.map(jnp.asarray, params), jnp.asarray(spins, jnp.float64)
    parameters = sum(p.size for p in jax.tree.leaves(params))
    facts = {"parameters": parameters, "samples": len(spins), "shift": system.shift, "rank": rank, "rate": rate}
    run = Run(system, rank, storage)
    carried, turns, found = run.start(params, spins), METHODS, []
    hamiltonian = jnp.asarray(system.bonds), jnp.asarray(system.diagonal), jnp.asarray(system.exchange)
    energies = local_energies(system.log_psi, params, spins, *hamiltonian)
    for method in METHODS:
        run.take(method, carried[method], params, spins, energies)  # compiles
    for i in tqdm.trange(steps, desc=name):
        spins = resampled(system.log_psi, params, spins, jax.random.key(i))
        energies = local_energies(system.log_psi, params, spins, *hamiltonian)
        record: dict[str, Any] = {"energy": float(energies.real.mean())}
        taken = {}
        for method in turns:
            jax.block_until_ready((params, spins, energies))
            begun = time.perf_counter()
            taken[method], carried[method], counts = run.take(method, carried[method], params, spins, energies)
            record[method] = {"seconds": time.perf_counter() - begun, **counts}
        left = run.residuals(params, spins, energies, [taken[method] for method in METHODS])
        for method, value in zip(METHODS, left, strict=True):
            record[method]["residual"] = float(value)
        found.append(record)
        turns = turns[1:] + turns[:1]
        params = jax.tree.map(lambda p, dp: p - rate * dp, params, taken["cholesky"])
        yield {"system": name, **facts, "storage": storage, "summary": summary(found), "steps": found}


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean, standard deviation and largest of each quantity over the steps."""

    def of(values):
        return {"mean": statistics.mean(values), "spread": statistics.pstdev(values), "largest": max(values)}

    return {method: {name: of([r[method][name] for r in found]) for name in found[0][method]} for method in METHODS}


def table(result: dict[str, Any]) -> str:
    """The figures for people."""
    first, last = (result["steps"][i]["energy"] for i in (0, -1))
    lines = [
        f"{result['system']}: {result['parameters']} parameters, {result['samples']} samples, shift {result['shift']}, "
        f"{len(result['steps'])} steps, energy {first:.3f} to {last:.3f}",
        f"  {'':9} {'iterations':>22} {'products':>10} {'seconds':>26} {'residual':>20}",
        f"  {'':9} {'mean +- spread (most)':>22} {'mean':>10} {'mean +- spread (most)':>26} {'mean (largest)':>20}",
    ]
    for method, row in result["summary"].items():
        counts, products = "-", "-"
        if "iterations" in row:
            it = row["iterations"]
            counts = f"{it['mean']:.1f} +- {it['spread']:.1f} ({it['largest']})"
            products = f"{row['products']['mean']:.1f}"
        s, r = row["seconds"], row["residual"]
        times = f"{s['mean']:.2f} +- {s['spread']:.2f} ({s['largest']:.2f})"
        lines.append(f"  {method:9} {counts:>22} {products:>10} {times:>26} {r['mean']:>9.1e} ({r['largest']:.1e})")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=SYSTEMS, action="append", help="default both")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--samples", type=int, help="fewer samples than are stored")
    parser.add_argument("--rank", type=int, default=256, help="of the recycled preconditioner")
    parser.add_argument("--storage", default="auto", help="of the Jacobian whose products the two CG take")
    parser.add_argument("--rate", type=float, default=0.01, help="learning rate")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    jax.config.update("jax_enable_x64", True)
    results = []
    for name in options.system or SYSTEMS:
        results.append({})
        each = measure(name, options.steps, options.samples, options.rank, options.storage, options.rate)
        for results[-1] in each:
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
        print(table(results[-1]), flush=True)


if __name__ == "__main__":
    main()
