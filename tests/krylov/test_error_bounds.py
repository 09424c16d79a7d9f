"""The bounds of CG bracket the true energy norm of the error, and a run may stop on the upper one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import krylov
from krylov.operators import MatrixOperator
from tests import problems
from tests.conftest import X64
from tests.problems import eps, norm, wide

DOUBLE = "float64" if X64 else "float32"
DTYPES = problems.slow_but([DOUBLE, "complex128" if X64 else "complex64"], DOUBLE)
N = 40


@functools.cache
def solver(energy_rtol=None):
    def solve(A, b, shift, rtol):
        method = krylov.CG(bounds=True, energy_rtol=energy_rtol)
        return krylov.solve(MatrixOperator(A, positive=True), b, method, shift=shift, rtol=rtol, maxiter=2000)

    return jax.jit(jax.vmap(solve))


def energy(matrix, x):
    return float(np.sqrt(np.vdot(x, matrix @ x).real))


def systems(dtype):
    """The shift is half of the smallest eigenvalue that a gram has, and what makes the others definite enough."""
    yield from ((problems.gram(dtype, c, N), 0.5 / c) for c in (1e1, 1e2, 1e3, 1e4))
    yield problems.padded(problems.positive_tridiagonal(dtype), N), 0.5
    yield problems.padded(problems.small_tridiagonal(dtype), N), 1e-2
    yield problems.strakos(dtype, N), 1e-3
    yield problems.low_rank_plus_identity(dtype, N), 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_bracket_the_true_error_wherever_the_run_ends(dtype):
    tolerances = (0.3, 1e-2, 1e-4, 1e-6) if eps(dtype) < 1e-10 else (0.3, 1e-2, 1e-3)
    cases = [(system, shift, rtol) for system, shift in systems(dtype) for rtol in tolerances]
    matrices, vectors = (np.stack([case[0][part] for case in cases]) for part in (0, 1))
    shifts, rtols = (np.array([case[i] for case in cases], np.finfo(dtype).dtype) for i in (1, 2))
    batch = solver()(matrices, vectors, shifts, rtols)
    assert np.all(batch.converged)
    lower, upper = map(np.asarray, batch.error_bounds)
    for i, (system, _, _) in enumerate(cases):
        matrix = wide(system.matrix) + float(shifts[i]) * np.eye(N)
        error = energy(matrix, np.linalg.solve(matrix, wide(system.rhs)) - wide(batch.x[i]))
        rounding = 1e3 * eps(dtype) * energy(matrix, wide(batch.x[i]))
        assert lower[i] <= error * (1 + 1e-3) + rounding and error <= upper[i] * (1 + 1e-3) + rounding
        assert upper[i] <= norm(batch.residual_norm[i]) / np.sqrt(shifts[i]) * (1 + 1e-3)


def test_a_run_stops_on_the_upper_bound_and_the_error_is_below_it():
    cases = [*systems(DOUBLE)]
    matrices, vectors = (np.stack([case[0][part] for case in cases]) for part in (0, 1))
    shifts = np.array([case[1] for case in cases], DOUBLE)
    batch = solver(1e-2)(matrices, vectors, shifts, np.full(len(cases), 100 * eps(DOUBLE), DOUBLE))
    full = solver()(matrices, vectors, shifts, np.full(len(cases), 100 * eps(DOUBLE), DOUBLE))
    assert np.all(batch.converged)
    for i, shift in enumerate(shifts):
        matrix = wide(matrices[i]) + float(shift) * np.eye(N)
        right = np.linalg.solve(matrix, wide(vectors[i]))
        assert energy(matrix, right - wide(batch.x[i])) <= 1.01e-2 * energy(matrix, right)
    assert np.sum(batch.iterations) < 0.7 * np.sum(full.iterations)


@pytest.mark.slow
def test_bounds_hold_where_the_recurrence_has_strayed_from_the_true_residual():
    A, b = problems.gram("float32", 1e4, N)
    shift = np.float32(5e-5)
    sol = krylov.solve(MatrixOperator(A, positive=True), b, krylov.CG(bounds=True), shift=shift, rtol=1e-9)
    assert not sol.converged
    matrix = wide(A) + float(shift) * np.eye(N)
    error = energy(matrix, np.linalg.solve(matrix, wide(b)) - wide(sol.x))
    assert float(sol.error_bounds[0]) <= error <= float(sol.error_bounds[1])


def test_with_a_preconditioner_the_smallest_eigenvalue_is_that_of_the_preconditioned_operator():
    A, b = problems.gram("float32", 1e2, N)
    M = np.diag(1 / np.diag(A)).astype("float32")
    root = np.sqrt(wide(M))
    smallest = 0.9 * np.linalg.eigvalsh(root @ wide(A) @ root)[0]
    method = krylov.CG(bounds=True, smallest=smallest)
    sol = krylov.solve(MatrixOperator(A, positive=True), b, method, preconditioner=M, rtol=1e-3)
    error = energy(wide(A), np.linalg.solve(wide(A), wide(b)) - wide(sol.x))
    assert sol.converged and float(sol.error_bounds[0]) <= error <= float(sol.error_bounds[1])


@pytest.mark.slow
def test_scale_and_a_right_hand_side_of_zero_and_derivatives():
    A, b = problems.gram("float32", 1e1, N)
    solve = lambda b: krylov.solve(MatrixOperator(A, positive=True), b, krylov.CG(bounds=True), shift=0.1)
    plain, large, zero = map(solve, (b, b * np.float32(2.0**40), 0 * b))
    for bound, scaled in zip(plain.error_bounds, large.error_bounds):
        assert float(scaled) == float(bound) * 2.0**40
    assert [float(bound) for bound in zero.error_bounds] == [0, 0]
    gradient = jax.grad(lambda b: jnp.sum(solve(b).x))(b)
    right = np.linalg.solve(wide(A) + 0.1 * np.eye(N), np.ones(N))
    np.testing.assert_allclose(gradient, right, rtol=0, atol=1e-3 * norm(right))


def test_without_a_bound_of_the_spectrum_there_is_none_of_the_error():
    A, b = problems.gram("float32", 1e1, N)
    for op, options in (
        (MatrixOperator(A, hermitian=True), dict(shift=0.1)),
        (MatrixOperator(A, positive=True), dict(shift=0.1, preconditioner=np.eye(N, dtype="float32"))),
    ):
        with pytest.raises(ValueError, match="needs a lower bound of the spectrum"):
            krylov.solve(op, b, krylov.CG(bounds=True), **options)
    with pytest.raises(ValueError, match="needs a positive lower bound of the spectrum"):
        krylov.solve(MatrixOperator(A, positive=True), b, krylov.CG(bounds=True))
    with pytest.raises(ValueError, match="CG: smallest and energy_rtol are for bounds=True"):
        krylov.CG(energy_rtol=0.1)
