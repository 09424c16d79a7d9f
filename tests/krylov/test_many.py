"""Many shifts of one operator, and many right-hand sides."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import krylov
from krylov import Status
from krylov.operators import MatrixOperator
from tests import networks, problems
from tests.conftest import X64
from tests.problems import assert_honest, eps, norm, random_vector, wide

DOUBLE = "complex128" if X64 else "complex64"
DTYPES = [
    pytest.param(d, marks=([pytest.mark.x64_only] if eps(d) < 1e-10 else []) + ([] if quick else [pytest.mark.slow]))
    for d, quick in [("float32", False), ("complex64", not X64), ("float64", False), ("complex128", X64)]
]
N = 30


def member(batch, i):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[i], batch)


@functools.cache
def shifted_solver():
    def solve(A, b, shifts, rtol):
        return krylov.solve_shifted(MatrixOperator(A, hermitian=True), b, shifts, rtol=rtol)

    return jax.jit(solve)


@functools.cache
def block_solver(shift=0.0):
    return jax.jit(lambda A, b, rtol: krylov.solve_many(MatrixOperator(A, positive=True), b, rtol=rtol, shift=shift))


def shifted_matrix(A, shift):
    return wide(A) + float(shift) * np.eye(len(A))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_shifts_in_the_products_of_the_hardest_and_one_more_each(dtype):
    A, b = problems.gram(dtype, 1e4, N)
    rtol = 1e-4 if eps(dtype) > 1e-10 else 1e-10
    shifts = np.array([0.01, 0.03, 0.1, 0.3, 1.0, 3.0])
    sol = shifted_solver()(A, b, shifts, rtol)
    alone = krylov.solve(MatrixOperator(A, positive=True), b, "cg", shift=shifts[0], rtol=rtol)
    assert np.all(sol.status == Status.CONVERGED) and np.all(sol.matvecs == sol.matvecs[0])
    assert abs(int(sol.iterations[0]) - int(alone.iterations)) <= 2
    assert int(sol.matvecs[0]) == int(sol.iterations[0]) + len(shifts)
    assert np.all(np.diff(sol.iterations) <= 0) and sol.iterations[-1] < sol.iterations[0] / 2
    for i, shift in enumerate(shifts):
        real = np.finfo(dtype).dtype.type(shift)
        residual = norm(wide(b) - shifted_matrix(A, real) @ wide(sol.x[i]))
        assert residual <= rtol * norm(b) * (1 + 1e-3)
        np.testing.assert_allclose(sol.residual_norm[i], residual, rtol=1e-2, atol=10 * eps(dtype) * norm(b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_indefinite_shifts_are_flagged_one_by_one_and_the_others_solved(dtype):
    A, b = problems.padded(problems.positive_tridiagonal(dtype), N)
    sol = shifted_solver()(A, b, np.array([-4.0, -3.0, 2.0, 1.0, -6.5, 6.0]), 1e-5)
    statuses = [Status(int(code)).name for code in sol.status]
    assert statuses == ["INDEFINITE", "INDEFINITE", "CONVERGED", "CONVERGED", "INDEFINITE", "CONVERGED"]
    for i, shift in enumerate([-4.0, -3.0, 2.0, 1.0, -6.5, 6.0]):
        assert_honest(member(sol, i), shifted_matrix(A, shift).astype(dtype), b, 1e-5)


def test_each_shift_may_have_its_own_tolerance_and_none_is_claimed_falsely():
    """Strakos: the shared recurrence loses its residual to rounding."""
    A, b = problems.strakos("float32", N)
    shifts, rtols = np.array([0.0, 1e-8, 1e-6, 1e-4, 1e-2, 1.0]), np.array([1e-7, 1e-3, 1e-5, 1e-2, 1e-4, 1e-6])
    sol = shifted_solver()(A, b, shifts, rtols)
    for i, shift in enumerate(shifts):
        assert_honest(member(sol, i), (A + np.float32(shift) * np.eye(N, dtype="float32")), b, rtols[i])
    assert np.all(sol.converged[4:])


def test_shifted_scale_zero_and_nan():
    A, b = problems.gram("float32", 1e2, N)
    shifts = np.array([0.1, 1.0, 2.0, 3.0, 4.0, 5.0])
    plain = shifted_solver()(A, b, shifts, 1e-5)
    for scale in (1e-30, 1e30):
        sol = shifted_solver()(A, b * np.float32(scale), shifts, 1e-5)
        assert np.all(sol.converged) and np.all(abs(sol.iterations - plain.iterations) <= 1)
    zero = shifted_solver()(A, 0 * b, shifts, 1e-5)
    assert np.all(zero.converged) and not np.any(zero.x) and not np.any(zero.iterations)
    b[3] = np.nan
    bad = shifted_solver()(A, b, shifts, 1e-5)
    assert np.all(bad.status == Status.NONFINITE) and np.all(np.isfinite(bad.x))


@pytest.mark.x64_only
@pytest.mark.slow
def test_derivatives_of_shifted_and_of_many_solves():
    A, b = problems.positive_tridiagonal("complex128")
    vectors, shifts = np.stack([b, 2 * b, random_vector("complex128", 10)]), np.array([0.5, 2.0])
    op = lambda A: MatrixOperator(A, positive=True)
    losses = [
        lambda A, b, s: jnp.sum(jnp.abs(krylov.solve_shifted(op(A), b[2], s, rtol=1e-12).x) ** 2),
        lambda A, b, s: jnp.sum(jnp.abs(krylov.solve_many(op(A), b, shift=s[0], rtol=1e-12).x) ** 2),
    ]
    eye = np.eye(10)
    dense = [
        lambda A, b, s: sum(jnp.sum(jnp.abs(jnp.linalg.solve(A + t * eye, b[2])) ** 2) for t in s),
        lambda A, b, s: jnp.sum(jnp.abs(jnp.linalg.solve(A + s[0] * eye, b.T)) ** 2),
    ]
    for loss, right in zip(losses, dense):
        for x, y in zip(*(jax.jit(jax.grad(f, (0, 1, 2)))(A, vectors, shifts) for f in (loss, right))):
            assert norm(x - y) <= 1e-9 * norm(y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dependent_columns_are_right_each_with_its_status(dtype):
    A, b = problems.gram(dtype, 1e3, N)
    columns = np.stack([b, b, 2 * b, 0 * b, random_vector(dtype, N, seed=9)])
    rtol = 1e-4 if eps(dtype) > 1e-10 else 1e-10
    sol = block_solver()(A, columns, rtol)
    assert np.all(sol.status == Status.CONVERGED), sol.status
    for i, column in enumerate(columns):
        assert_honest(member(sol, i), A, column, rtol)
    np.testing.assert_allclose(sol.x[0], sol.x[1], atol=100 * eps(dtype) * norm(sol.x[0]))
    np.testing.assert_allclose(2 * sol.x[0], sol.x[2], atol=200 * eps(dtype) * norm(sol.x[0]))
    assert not np.any(sol.x[3]) and sol.iterations[3] == 0
    alone = krylov.solve(MatrixOperator(A, positive=True), columns[4], "cg", rtol=rtol)
    assert int(sol.iterations[4]) < int(alone.iterations)
    columns[1, 2], columns[4] = np.nan, 1e-25 * columns[4].real
    sol = block_solver()(A, columns, rtol)
    codes = [Status(int(code)).name for code in sol.status]
    assert codes == ["CONVERGED", "NONFINITE", "CONVERGED", "CONVERGED", "CONVERGED"]


def test_five_columns_of_an_ill_conditioned_operator_are_never_claimed_falsely():
    A, b = problems.strakos("float32", N)
    columns = np.stack([b, *random_vector("float32", 4, N)])
    for rtol in (1e-2, 1e-4, 1e-6, 1e-8):
        sol = block_solver()(A, columns, rtol)
        for i, column in enumerate(columns):
            assert_honest(member(sol, i), A, column, rtol)
    indefinite = problems.indefinite("float32", N).matrix
    assert np.all(block_solver()(indefinite, columns, 1e-5).status == Status.INDEFINITE)


@pytest.mark.slow
def test_eight_right_hand_sides_of_a_tangent_operator_take_fewer_products_than_one_by_one():
    """The trained 20-site network, on fewer samples than parameters, with a shift."""
    params, samples, _ = networks.trained_rbm(300)
    S = krylov.Jacobian(networks.rbm, params, samples, center=True).gram()
    keys = jax.random.split(jax.random.key(0), 8)
    columns = jax.vmap(lambda key: S @ krylov.operators.structure.random_vector(key, S.in_structure()))(keys)
    rtol = 1e-4
    sol = krylov.solve_many(S, columns, shift=1e-3, rtol=rtol)
    alone = jax.vmap(lambda b: krylov.solve(S, b, "cg", shift=1e-3, rtol=rtol))(columns)
    assert np.all(sol.converged) and np.all(alone.converged)
    assert int(np.sum(sol.matvecs)) < 0.95 * int(np.sum(alone.matvecs))
    for x, y in zip(jax.tree.leaves(sol.x), jax.tree.leaves(alone.x), strict=True):
        assert x.shape == y.shape and norm(np.asarray(x) - np.asarray(y)) <= 0.05 * norm(y)


def test_many_take_recipes_and_move_what_was_built_to_their_shift():
    """As solve does: the same preconditioner in each column, and the products of building in the count."""
    A, b = problems.gram("float32", 1e4, N)
    op, columns, shift = MatrixOperator(A, positive=True), np.stack([b, b[::-1]]), 1e-2
    built = krylov.Nystrom(rank=10).build(op, shift=1.0)
    plain = krylov.solve_many(op, columns, shift=shift)
    moved = krylov.solve_many(op, columns, shift=shift, preconditioner=built)
    fresh = krylov.solve_many(op, columns, shift=shift, preconditioner=krylov.Nystrom(rank=10))
    exact = krylov.solve_many(op, columns, shift=shift, preconditioner=built.with_shift(shift))
    np.testing.assert_array_equal(moved.x, exact.x)
    np.testing.assert_array_equal(fresh.matvecs, moved.matvecs + built.report.matvecs)
    for sol in (moved, fresh):
        assert np.all(sol.status == Status.CONVERGED) and np.all(sol.iterations < plain.iterations)
        for x, rhs in zip(sol.x, columns, strict=True):
            assert norm(rhs - shifted_matrix(A, shift) @ wide(x)) <= 1.01e-5 * norm(rhs)


def test_bad_input_is_named():
    A = np.eye(4, dtype="float32")
    with pytest.raises(ValueError, match="solve_shifted: shifts must be a real vector"):
        krylov.solve_shifted(A, np.ones(4, "float32"), 1.0)
    with pytest.raises(ValueError, match="solve_shifted: rtol must not be negative"):
        krylov.solve_shifted(A, np.ones(4, "float32"), np.ones(2), rtol=np.array([1.0, -1.0]))
    with pytest.raises(ValueError, match="solve_shifted: the operator is not square"):
        krylov.solve_shifted(A[:3], np.ones(3, "float32"), np.ones(2))
    with pytest.raises(ValueError, match="solve_many: every leaf of b must have a leading axis"):
        krylov.solve_many(A, {"a": np.ones((2, 4), "float32"), "b": np.ones((3, 4), "float32")})
    with pytest.raises(ValueError, match="solve_many: every leaf of b must have a leading axis"):
        krylov.solve_many(A, np.ones((0, 4), "float32"))
    with pytest.raises(TypeError, match="solve_many: preconditioner must be an object, not a class"):
        krylov.solve_many(A, np.ones((2, 4), "float32"), preconditioner=krylov.Jacobi)
    with pytest.raises(ValueError, match="solve_many: the preconditioner's input"):
        krylov.solve_many(A, np.ones((2, 4), "float32"), preconditioner=A[:3, :3])
    with pytest.raises(ValueError, match="solve_many: a complex shift"):
        krylov.solve_many(A, np.ones((2, 4), "float32"), shift=1j)
    with pytest.raises(ValueError, match="solve_many: b does not match"):
        krylov.solve_many(A, np.ones((2, 5), "float32"))
    with pytest.raises(krylov.ConvergenceError):
        krylov.solve_many(A - 2 * np.eye(4, dtype="float32"), np.ones((2, 4), "float32"), throw=True)
