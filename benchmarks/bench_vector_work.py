"""CG on a diagonal operator with a million unknowns: what an iteration costs where the product costs nothing."""

import statistics
import time

import jax
import jax.numpy as jnp
import lineax as lx
import pytest

import krylov
from krylov.operators import DiagonalOperator

N, ITERATIONS, ROUNDS = 1_000_000, 50, 5


@pytest.mark.benchmark(group="vector work")
@pytest.mark.parametrize("method", ["cg", "minres", "bicgstab"])
def test_iteration_beside_jax_scipy(benchmark, method):
    entries = jnp.linspace(1, 1e4, N, dtype=jnp.float32)
    b = jnp.ones(N, jnp.float32)
    op = DiagonalOperator(entries)
    peer = {"bicgstab": jax.scipy.sparse.linalg.bicgstab}.get(method, jax.scipy.sparse.linalg.cg)
    runs = {
        "krylov": jax.jit(lambda op, b: krylov.solve(op, b, method, rtol=1e-30, maxiter=ITERATIONS).x),
        "jax.scipy": jax.jit(lambda op, b: peer(lambda x: op.entries * x, b, tol=0.0, maxiter=ITERATIONS)[0]),
    }
    if method == "cg":
        solver = lx.CG(rtol=1e-30, atol=0.0, max_steps=ITERATIONS, stabilise_every=None)
        runs["lineax"] = jax.jit(lambda op, b: lx.linear_solve(op, b, solver, throw=False).value)
    for run in runs.values():
        run(op, b).block_until_ready()
    seconds = {name: [] for name in runs}

    def interleaved():
        for name, run in runs.items():
            start = time.perf_counter()
            run(op, b).block_until_ready()
            seconds[name].append(time.perf_counter() - start)

    benchmark.pedantic(interleaved, rounds=ROUNDS)
    ratios = {
        name: statistics.median(a / b for a, b in zip(seconds["krylov"], seconds[name], strict=True)) for name in runs
    }
    benchmark.extra_info.update({f"krylov / {name}": ratio for name, ratio in ratios.items() if name != "krylov"})
    print(f"\n{method}: " + ", ".join(f"krylov / {name} = {r:.2f}" for name, r in ratios.items() if name != "krylov"))
