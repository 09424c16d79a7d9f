"""Time of an iteration at n = 1e6 with a diagonal operator, where the product costs nothing and all else shows."""

from functools import partial

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.sparse.linalg

import krylov
from krylov.operators import DiagonalOperator

N, ITERATIONS, ROUNDS = 1_000_000, 40, 5
# Too small to be reached, so that every solver does all its iterations.
TOLERANCE = 1e-30

peers = jax.scipy.sparse.linalg


def jax_scipy(solver, op, b):
    return solver(lambda x: op.entries * x, b, tol=TOLERANCE, maxiter=ITERATIONS)[0]


def jax_scipy_gmres(solve_method, op, b):
    cycles = ITERATIONS // 20
    product = lambda x: op.entries * x
    return peers.gmres(product, b, tol=TOLERANCE, restart=20, maxiter=cycles, solve_method=solve_method)[0]


def lineax_cg(op, b):
    return lx.linear_solve(op, b, lx.CG(TOLERANCE, 0.0, max_steps=ITERATIONS), throw=False).value


def scipy_minres(op, b):
    """On the host, in NumPy."""
    entries = np.asarray(op.entries)
    matrix = scipy.sparse.linalg.LinearOperator((N, N), matvec=lambda x: entries * x, dtype=entries.dtype)
    return scipy.sparse.linalg.minres(matrix, np.asarray(b), rtol=TOLERANCE, maxiter=ITERATIONS)[0]


PEERS = {
    "cg": {"jax.scipy": partial(jax_scipy, peers.cg), "lineax": lineax_cg},
    "bicgstab": {"jax.scipy": partial(jax_scipy, peers.bicgstab)},
    "gmres": {
        "jax.scipy batched": partial(jax_scipy_gmres, "batched"),
        "jax.scipy incremental": partial(jax_scipy_gmres, "incremental"),
    },
    "minres": {"jax.scipy cg": partial(jax_scipy, peers.cg), "scipy": scipy_minres},
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("method", PEERS)
def test_iteration(versus, method, dtype):
    op = DiagonalOperator(jnp.linspace(1, 1e4, N, dtype=dtype), positive=True)
    b = jax.random.normal(jax.random.key(0), (N,), dtype)
    chosen = krylov.GMRES(restart=20) if method == "gmres" else method
    solve = jax.jit(lambda op, b: krylov.solve(op, b, chosen, rtol=TOLERANCE, maxiter=ITERATIONS))
    assert int(solve(op, b).iterations) == ITERATIONS

    def of(function):
        return partial(function if function is scipy_minres else jax.jit(function), op, b)

    functions = {name: of(function) for name, function in PEERS[method].items()}
    versus(of(solve), functions, ROUNDS, per=ITERATIONS, target={"jax.scipy": 1.1} if method == "cg" else None)
