"""Time to trace and compile a solve around a deep tangent operator, beside ``jax.scipy`` around the same operator.

JAX compiles every place where a loop multiplies: `krylov` multiplies in one, ``jax.scipy``'s CG in two.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import pytest

import krylov
from benchmarks.networks import random_spins, random_vit, vit

ROUNDS = 3


def tangent_system():
    params = random_vit(jax.random.key(0), 4, jnp.float32)
    spins = random_spins(jax.random.key(1), 512, 36, jnp.float32)
    return krylov.Jacobian(vit, params, spins, center=True, chunk_size=64).gram(), jax.tree.map(jnp.ones_like, params)


def seconds_to_compile(solve, S, b):
    jax.clear_caches()
    start = time.perf_counter()
    jax.jit(lambda S, b: solve(S, b)).lower(S, b).compile()
    return time.perf_counter() - start


@pytest.mark.benchmark(group="compile")
def test_compile_cg_around_a_transformer(benchmark):
    S, b = tangent_system()
    ours = lambda S, b: krylov.solve(S, b, "cg", maxiter=100).x
    theirs = lambda S, b: jax.scipy.sparse.linalg.cg(S.mv, b, maxiter=100)[0]
    theirs_seconds, ours_seconds = [], []

    def both():
        theirs_seconds.append(seconds_to_compile(theirs, S, b))
        ours_seconds.append(seconds_to_compile(ours, S, b))

    benchmark.pedantic(both, rounds=ROUNDS, warmup_rounds=1)
    ratios = [a / b for a, b in zip(ours_seconds[1:], theirs_seconds[1:], strict=True)]
    benchmark.extra_info.update(
        krylov_seconds=statistics.median(ours_seconds[1:]),
        jax_scipy_seconds=statistics.median(theirs_seconds[1:]),
        ratio=statistics.median(ratios),
    )
    print(f"\ntrace and compile: krylov / jax.scipy = {statistics.median(ratios):.2f}")
