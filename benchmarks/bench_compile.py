"""Time to trace, lower and compile a solve with a 4-block transformer's tangent operator.

Each round compiles a fresh function from empty caches. The peers are CG of jax.scipy, which multiplies in two places:
around our operator, whose product is traced once all the same, and around a product in plain JAX.
"""

import time
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp

import krylov
from benchmarks.networks import random_spins, random_vit, two_scans, vit

_SHIFT, _MAXITER, _CHUNK = 1e-2, 100, 64

PARAMS = random_vit(jax.random.key(0), depth=4, dtype=jnp.float32)
SPINS = random_spins(jax.random.key(1), 512, 36, jnp.float32)
RHS = jax.tree.map(jnp.ones_like, PARAMS)


def operator(params):
    return krylov.Jacobian(vit, params, SPINS, center=True, chunk_size=_CHUNK).gram()


def ours(S, b):
    return krylov.solve(S, b, "cg", shift=_SHIFT, maxiter=_MAXITER).x


def shifted(product, v):
    return jax.tree.map(lambda y, x: y + _SHIFT * x, product(v), v)


def jax_scipy(S, b):
    return jax.scipy.sparse.linalg.cg(partial(shifted, S.mv), b, maxiter=_MAXITER)[0]


def plain_jax(params, b):
    chunks = SPINS.reshape(-1, _CHUNK, SPINS.shape[-1])
    product = partial(two_scans, vit, params, chunks)
    return jax.scipy.sparse.linalg.cg(partial(shifted, product), b, maxiter=_MAXITER)[0]


def gradient(solve):
    """Of the sum of the solution's entries in the parameters, through solve and operator."""

    def total(params, b):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(solve(params, b)))

    return jax.grad(total)


def stages(function, *args):
    """Compile a function that JAX has not seen, and return how long each stage takes."""

    def run():
        clocks = [time.perf_counter()]
        cpu = time.process_time()
        stage = jax.jit(lambda *args: function(*args))
        for advance in ("trace", "lower", "compile"):
            stage = getattr(stage, advance)(*(args if advance == "trace" else ()))
            clocks.append(time.perf_counter())
        seconds = dict(zip(("trace", "lower", "compile"), (b - a for a, b in pairwise(clocks))))
        return {**seconds, "CPU time": time.process_time() - cpu}

    return run


def test_solve(versus):
    S = operator(PARAMS)
    peers = {"jax.scipy": stages(jax_scipy, S, RHS), "jax.scipy, plain JAX": stages(plain_jax, PARAMS, RHS)}
    versus(stages(ours, S, RHS), peers, rounds=3, setup=jax.clear_caches, figures=True, target={"jax.scipy": 0.75})


def test_gradient_through_the_solve(versus):
    peer = stages(gradient(lambda params, b: jax_scipy(operator(params), b)), PARAMS, RHS)
    own = stages(gradient(lambda params, b: ours(operator(params), b)), PARAMS, RHS)
    versus(own, {"jax.scipy": peer}, rounds=2, setup=jax.clear_caches, figures=True, warm=False)
