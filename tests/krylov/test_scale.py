"""The size of the operator, of its preconditioner and of the right-hand side matters to no method."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import krylov
from krylov import Status
from krylov.operators import MatrixOperator
from tests import problems
from tests.problems import norm, true_residual

POSITIVE = ("cg", "fcg", "cr", "cholesky")
HERMITIAN = (*POSITIVE, "minres", "minres_qlp", "eigh")
ITERATIVE = ("cg", "fcg", "cr", "minres", "minres_qlp", "gmres", "bicgstab", "bicgstabl")
DIRECT = ("cholesky", "lu", "eigh", "svd")
FLOAT32 = [
    pytest.param(method, "float32", marks=[] if method in ("minres", "cr", "gmres") else [pytest.mark.slow])
    for method in (*ITERATIVE, *DIRECT)
]
COMPLEX64 = [pytest.param(method, "complex64", marks=pytest.mark.slow) for method in ("fcg", "minres_qlp", "bicgstab")]
SCALES = (1e-30, 1e-25, 1e-18, 1.0, 1e18, 1e25, 1e30)


def system(method, dtype):
    kind = problems.definite if method in POSITIVE else problems.indefinite if method in HERMITIAN else problems.general
    return kind(dtype)


def solve_scaled(method, preconditioned):
    """Over a batch of matrices, right-hand sides, guesses, shifts and preconditioners."""

    def solve(matrix, rhs, guess, shift, inverse):
        op = MatrixOperator(matrix, hermitian=method in HERMITIAN, positive=method in POSITIVE)
        inverse = MatrixOperator(inverse, positive=True) if preconditioned else None
        return krylov.solve(op, rhs, method, x0=guess, shift=shift, preconditioner=inverse)

    return jax.jit(jax.vmap(solve))


def assert_all_solved(method, dtype, batch, preconditioned=False):
    """Each member (size of A, of b, of the guess's error, of M times A) is solved as the first is."""
    A, b = system(method, dtype)
    of_op, of_rhs, of_guess, of_inverse = np.array(batch).T
    real = np.finfo(dtype).dtype
    shifts = (0.5 * of_op).astype(real)
    near = np.linalg.solve(problems.wide(A) + 0.5 * np.eye(10), problems.wide(b))
    guesses = (of_rhs / of_op * of_guess)[:, None] * near
    matrices = (of_op[:, None, None] * A).astype(dtype)
    vectors = (of_rhs[:, None] * b).astype(dtype)
    rough = np.diag(np.linspace(0.5, 1.5, 10))
    inverses = ((of_inverse / of_op)[:, None, None] * rough).astype(dtype)
    sol = solve_scaled(method, preconditioned)(matrices, vectors, guesses.astype(dtype), shifts, inverses)
    for i, member in enumerate(batch):
        assert sol.status_code[i] == Status.CONVERGED, (member, Status(int(sol.status_code[i])))
        shifted = problems.wide(matrices[i]) + np.diag(np.full(10, np.float64(shifts[i])))
        assert true_residual(shifted, sol.x[i], vectors[i]) <= 1.1e-5 * norm(vectors[i]), member
        assert np.all(np.isfinite(sol.x[i]))
    return sol


@pytest.mark.parametrize("method, dtype", [*FLOAT32, *COMPLEX64])
def test_size_of_the_operator_changes_the_size_of_x_alone(method, dtype):
    batch = [(size, rhs, guess, 1.0) for size in SCALES for rhs in (1.0, size) for guess in (0.0, 0.9)]
    sol = assert_all_solved(method, dtype, batch)
    iterations = np.asarray(sol.iterations).reshape(len(SCALES), 2, 2)
    np.testing.assert_allclose(iterations, np.broadcast_to(iterations[3], iterations.shape), atol=2)


@pytest.mark.parametrize("method", problems.slow_but(ITERATIVE, "cr", "minres"))
def test_nor_does_that_of_the_preconditioner(method):
    batch = [(size, 1.0, 0.0, inverse) for size in (1e-25, 1e-18, 1.0, 1e18, 1e25) for inverse in (1.0, size)]
    batch += [(1.0, 1.0, 0.0, 1e-20), (1.0, 1.0, 0.0, 1e20), (1.0, 1.0, 0.5, 1e20), (1e30, 1e30, 0.5, 1.0)]
    sol = assert_all_solved(method, "float32", batch, preconditioned=True)
    np.testing.assert_allclose(sol.iterations, int(sol.iterations[4]), atol=4)


@pytest.mark.parametrize("method", problems.slow_but(["minres", "cr", "bicgstab"], "minres"))
def test_a_power_of_two_in_the_operator_changes_no_digit(method):
    A, b = system(method, "float32")
    ones = np.ones(3, "float32")
    matrices = np.stack([A, A * np.float32(2.0**20), A * np.float32(2.0**-20)])
    guesses, inverses = np.zeros((3, 10), "float32"), np.stack([np.eye(10, dtype="float32")] * 3)
    sol = solve_scaled(method, False)(matrices, ones[:, None] * b, guesses, 0 * ones, inverses)
    assert np.all(np.asarray(sol.status_code) == Status.CONVERGED)
    assert len(set(np.asarray(sol.matvecs).tolist())) == 1
    np.testing.assert_array_equal(sol.x[1] * np.float32(2.0**20), sol.x[0])
    np.testing.assert_array_equal(sol.x[2] * np.float32(2.0**-20), sol.x[0])


def test_products_in_vain_are_counted_and_iterations_are_not():
    A, b = system("minres", "float32")
    plain = krylov.solve(MatrixOperator(A, hermitian=True), b, "minres", history=True)
    huge = krylov.solve(MatrixOperator(A * np.float32(2.0**80), hermitian=True), b, "minres", history=True)
    assert int(huge.iterations) == int(plain.iterations)
    assert int(huge.matvecs) == int(plain.matvecs) + 2
    np.testing.assert_array_equal(huge.x * np.float32(2.0**80), plain.x)
    np.testing.assert_array_equal(huge.history, plain.history)


def test_gradients_of_a_huge_system():
    A, b = system("minres", "float32")
    size = np.float32(2.0**80)

    def loss(scale, b):
        op = MatrixOperator(jnp.asarray(A) * scale, hermitian=True)
        return jnp.sum(krylov.solve(op, b, "minres", rtol=1e-6).x * scale)

    plain, huge = (jax.jit(jax.grad(loss, 1))(scale, b) for scale in (np.float32(1.0), size))
    np.testing.assert_allclose(huge, plain, rtol=1e-4)


def test_a_first_product_that_shows_nothing_does_no_harm():
    """The operator is of size one, the right-hand side nearly a null vector, or one."""
    for smallest in (0.0, 1e-20):
        A = np.diag(np.linspace(0, 1, 10) + smallest).astype("float32")
        b = np.eye(10, dtype="float32")[0] + np.float32(1e-20)
        for method in ("cg", "minres", "gmres"):
            hermitian = method != "gmres"
            sol = krylov.solve(MatrixOperator(A, hermitian=hermitian, positive=method == "cg"), b, method)
            problems.assert_honest(sol, A, b, 1e-5)
            assert sol.status is not Status.NONFINITE, sol
