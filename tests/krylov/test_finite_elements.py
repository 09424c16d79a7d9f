"""Finite elements, recirculating flow and the complex Helmholtz equation, from pyamg's gallery: problem 23 of the bank.

References are sparse direct solves, and beside ours run the methods of the same name of SciPy and pyamg.
"""

import functools

import jax
import numpy as np
import pyamg.krylov
import pytest
import scipy.sparse.linalg

import krylov
from krylov.operators import MatrixOperator
from tests import problems
from tests.krylov.test_bank import POSITIVE, member, solver
from tests.problems import assert_honest, norm, wide

SMALL = ("airfoil", "knot", "unit_cube")
SINGULAR = "unit_square"
N = 260
RTOL = 1e-4


@functools.cache
def small_systems(dtype):
    """Dense, and padded to one size, so that they compile once."""
    systems = {}
    for name in (*SMALL, SINGULAR):
        matrix, rhs = problems.pyamg_example(name, dtype)
        systems[name] = problems.padded(problems.System(matrix.toarray(), rhs), N)
    return systems


def distance(matrix, rhs):
    """The direct solution, and the norm of the inverse: how far from it a residual of norm one may lie."""
    factors = scipy.sparse.linalg.splu(scipy.sparse.csc_array(wide_sparse(matrix)))
    inverse = scipy.sparse.linalg.LinearOperator(
        matrix.shape, factors.solve, lambda x: factors.solve(x, "H"), dtype=factors.L.dtype
    )
    largest = scipy.sparse.linalg.svds(inverse, k=1, return_singular_vectors=False, rng=0)
    return factors.solve(wide(rhs)), float(largest[0])


def wide_sparse(matrix):
    return matrix.astype(np.complex128 if problems.is_complex(matrix.dtype) else np.float64)


def assert_close(sol, matrix, rhs, rtol):
    """As close to the direct solution as its residual says."""
    right, inverse_norm = distance(matrix, rhs)
    residual = norm(wide_sparse(matrix) @ wide(sol.x) - wide(rhs))
    slack = 10 * np.sqrt(len(rhs)) * problems.eps(sol.x.dtype) * norm(abs(matrix) @ np.abs(sol.x))
    assert residual <= 1.01 * rtol * norm(rhs) + slack, (residual, norm(rhs))
    assert norm(wide(sol.x) - right) <= inverse_norm * (1.01 * rtol * norm(rhs) + slack)


CASES = [pytest.param(method, "float32", marks=[] if method == "cg" else pytest.mark.slow) for method in POSITIVE]
DOUBLE = [pytest.mark.slow, pytest.mark.x64_only]
CASES += [pytest.param(method, "complex128", marks=DOUBLE) for method in ("cg", "gmres")]


@pytest.mark.parametrize("method, dtype", CASES)
def test_stiffness_matrices_are_solved_by_every_method(method, dtype):
    systems = small_systems(dtype)
    matrices, vectors = (np.stack([system[part] for system in systems.values()]) for part in (0, 1))
    batch = solver(method)(matrices, vectors, np.full(len(systems), RTOL, np.finfo(dtype).dtype))
    for i, (name, system) in enumerate(systems.items()):
        sol = member(batch, i)
        assert_honest(sol, *system, RTOL)
        if name != SINGULAR:
            assert sol.converged, (name, sol)
            assert_close(sol, scipy.sparse.csr_array(system.matrix), system.rhs, RTOL)
        elif method not in ("cholesky", "lu"):
            assert sol.converged, (name, sol)


LARGE = {
    "bar": ("cg", "cr", "minres"),
    "local_disc_galerkin_diffusion": ("cg", "minres", "bicgstab"),
    "recirc_flow": ("bicgstab", "bicgstabl"),
    "helmholtz_2D": ("gmres", "bicgstabl"),
}
SCIPY = {"cg": "cg", "minres": "minres", "gmres": "gmres", "bicgstab": "bicgstab"}
PYAMG = {"cg": "cg", "cr": "cr", "gmres": "gmres", "bicgstab": "bicgstab"}


def theirs(method, matrix, rhs, rtol, maxiter):
    """What SciPy and pyamg find, by name."""
    options = {"restart": 50} if method == "gmres" else {}
    cycles = max(1, maxiter // 50) if method == "gmres" else maxiter
    if method in SCIPY:
        call = getattr(scipy.sparse.linalg, SCIPY[method])
        yield "SciPy", call(matrix, rhs, rtol=rtol, maxiter=cycles, **options)[0]
    if method in PYAMG:
        call = getattr(pyamg.krylov, PYAMG[method])
        yield "pyamg", call(matrix, rhs, tol=rtol, maxiter=cycles, **options)[0]


@pytest.mark.slow
@pytest.mark.x64_only
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, method", [(name, method) for name in LARGE for method in LARGE[name]])
def test_what_others_solve_is_solved(name, method):
    """By true residuals: SciPy's minres claims 1e-6 on the bar and on the discontinuous elements, and is at 3e-5."""
    dtype = "complex128" if name == "helmholtz_2D" else "float64"
    matrix, rhs = problems.pyamg_example(name, dtype)
    rtol, maxiter = 1e-6, 3000
    op = MatrixOperator(matrix, positive=True) if name in ("bar", "local_disc_galerkin_diffusion") else matrix
    sol = jax.tree.map(np.asarray, krylov.solve(op, rhs, method, rtol=rtol, maxiter=maxiter))
    if sol.converged:
        assert_close(sol, matrix, rhs, rtol)
    for whose, x in theirs(method, matrix, rhs, rtol, maxiter):
        reached = norm(rhs - matrix @ x) / norm(rhs)
        assert sol.converged or not reached <= rtol, (name, method, whose, sol)
