"""Conjugate residuals and flexible conjugate gradients beside CG and MINRES."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import krylov
from krylov import Status
from krylov.operators import DiagonalOperator, FunctionOperator, MatrixOperator
from tests import problems
from tests.conftest import X64
from tests.problems import assert_honest, eps, norm, random_vector, wide

DOUBLE = "complex128" if X64 else "complex64"
DTYPES = [
    pytest.param(d, marks=([pytest.mark.x64_only] if eps(d) < 1e-10 else []) + ([] if quick else [pytest.mark.slow]))
    for d, quick in [("float32", False), ("complex64", not X64), ("float64", False), ("complex128", X64)]
]
NEW = ("cr", "fcg", krylov.FCG(memory=3))
N = 20


def member(batch, i):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[i], batch)


@functools.cache
def solver(method, **options):
    """Over matrices, right-hand sides and tolerances, with the diagonal as preconditioner or the identity."""

    def solve(A, b, rtol, diagonal):
        op = MatrixOperator(A, positive=True)
        M = DiagonalOperator(diagonal, b, positive=True)
        return krylov.solve(op, b, method, rtol=rtol, preconditioner=M, **options)

    return jax.jit(jax.vmap(solve))


def solve_each(method, systems, rtols, **options):
    matrices, vectors = (np.stack([system[part] for system in systems]) for part in (0, 1))
    real = np.finfo(matrices.dtype).dtype
    ones, jacobi = np.ones(vectors.shape, real), 1 / np.abs(np.diagonal(matrices, axis1=1, axis2=2)).astype(real)
    rtols = np.asarray(rtols, real)
    return [solver(method, **options)(matrices, vectors, rtols, d) for d in (ones, jacobi)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", problems.slow_but(NEW, "cr", "fcg"), ids=str)
def test_every_condition_and_tolerance_is_solved_or_honest(method, dtype):
    conditions, tolerances = 10.0 ** np.arange(1, 11, 2), [1e-14, 1e-10, 1e-6, 1e-4, 1e-2]
    systems = [problems.gram(dtype, c, N) for c in conditions] + [problems.strakos(dtype, N)]
    systems += [problems.padded(problems.positive_tridiagonal(dtype), N), problems.small_tridiagonal(dtype, N)]
    systems += [problems.System(systems[0].matrix, 0 * systems[0].rhs)]
    cases = [(system, rtol) for system in systems for rtol in tolerances]
    for batch in solve_each(method, [case[0] for case in cases], [case[1] for case in cases], maxiter=500):
        for i, (system, rtol) in enumerate(cases):
            sol = member(batch, i)
            assert_honest(sol, *system, rtol)
            well = any(system is s for s in (*systems[:2], *systems[6:]))
            assert sol.converged or not well or rtol < 1e3 * eps(dtype), (i, sol)


@pytest.mark.parametrize("method", problems.slow_but(NEW, "cr", "fcg"), ids=str)
def test_indefinite_operators_are_reported_or_solved(method):
    systems = [problems.indefinite("float32", N, seed) for seed in range(5)]
    batch = solve_each(method, systems, [1e-5] * 5)[0]
    for i, system in enumerate(systems):
        assert_honest(member(batch, i), *system, 1e-5)
    assert method == "cr" or np.all(np.asarray(batch.status) == Status.INDEFINITE)


def test_residuals_of_cr_never_rise_and_are_those_of_minres():
    A, b = problems.gram("float32", 1e2, N)
    op = MatrixOperator(A, positive=True)
    residuals, others = (krylov.solve(op, b, method, rtol=1e-4, history=True).history for method in ("cr", "minres"))
    assert np.all(np.diff(residuals) <= 0)
    count = min(len(residuals), len(others)) // 2
    np.testing.assert_allclose(residuals[:count], others[:count], rtol=1e-2)


@pytest.mark.x64_only
def test_flexible_cg_takes_a_preconditioner_that_is_itself_an_iteration():
    n = 100
    d = np.geomspace(1, 1e4, n)
    matrix = np.diag(d) + 0.3 * np.sqrt(np.outer(d, d)) * (np.eye(n, k=1) + np.eye(n, k=-1))
    A, jacobi, b = MatrixOperator(matrix, positive=True), DiagonalOperator(1 / d), np.ones(n)

    def inner(r):
        return krylov.solve(A, r, "cg", rtol=0.1, preconditioner=jacobi).x

    flexible, plain = (krylov.solve(A, b, method, rtol=1e-8, preconditioner=inner) for method in ("fcg", "cg"))
    assert flexible.converged and int(flexible.iterations) <= 8
    assert int(flexible.iterations) < int(plain.iterations)
    assert_honest(flexible, matrix, b, 1e-8)


@pytest.mark.slow
@pytest.mark.x64_only
@pytest.mark.parametrize("method", ["cr", "fcg"])
def test_derivatives(method):
    A, b = problems.definite("complex128")
    loss = lambda A, b: jnp.sum(jnp.abs(krylov.solve(MatrixOperator(A, positive=True), b, method, rtol=1e-12).x) ** 2)
    dense = lambda A, b: jnp.sum(jnp.abs(jnp.linalg.solve(A, b)) ** 2)
    for x, y in zip(*(jax.jit(jax.grad(f, (0, 1)))(A, b) for f in (loss, dense))):
        assert norm(x - y) <= 1e-9 * norm(y)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cr", "fcg"])
def test_two_hundred_thousand_unknowns_in_float32(method):
    values = np.random.default_rng(0).uniform(1e-3, 1, 200_000).astype("float32")
    b = random_vector("float32", 200_000)
    sol = krylov.solve(DiagonalOperator(values), b, method, rtol=1e-4)
    assert sol.converged
    assert norm(wide(b) - wide(values) * wide(sol.x)) <= 1.01e-4 * norm(b)


def test_memory_must_be_a_positive_whole_number():
    for memory in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="FCG: memory must be a positive whole number"):
            krylov.FCG(memory=memory)


@pytest.mark.x64_only
@pytest.mark.parametrize("condition", [1e4, pytest.param(1e6, marks=pytest.mark.slow)])
def test_mixed_precision_reaches_1e_minus_10_with_few_products_in_double(condition):
    """The operator in single precision inside, residuals and recurrence in double: no digit of the answer is lost."""
    A, b = problems.gram("float64", condition, 60)
    rough = MatrixOperator(A.astype("float32"), positive=True)

    def inner(r):
        return krylov.solve(rough, r.astype("float32"), "cg", rtol=1e-2).x.astype("float64")

    preconditioner = FunctionOperator(inner, b, positive=True)

    @jax.jit
    def solve(A, b):
        return krylov.solve(
            MatrixOperator(A, positive=True), b, krylov.FCG(), preconditioner=preconditioner, rtol=1e-10
        )

    sol = solve(A, b)
    alone = krylov.solve(rough, b.astype("float32"), "cg", rtol=1e-10)
    assert sol.converged and problems.true_residual(A, sol.x, b) <= 1.001e-10 * norm(b)
    assert int(sol.matvecs) <= 15
    assert not alone.converged and problems.true_residual(A, wide(alone.x), b) > 1e-6 * norm(b)
    gradient = jax.grad(lambda b: jnp.sum(solve(A, b).x))(b)
    right = np.linalg.solve(A, np.ones(60))
    assert norm(gradient - right) <= 1e-10 * condition * norm(right)
