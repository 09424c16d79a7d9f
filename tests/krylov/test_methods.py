"""What each method does on systems whose answer is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import krylov
from krylov import Status
from krylov.operators import DiagonalOperator, FunctionOperator, MatrixOperator
from tests import problems
from tests.conftest import X64
from tests.problems import (
    HERMITIAN_METHODS,
    ITERATIVE,
    METHODS,
    RECURRENCES,
    assert_honest,
    eps,
    norm,
    random_vector,
    wide,
)

# Solving compiles once for each method, size and dtype: one dtype in every run, and ten unknowns wherever they do.
SOME_DTYPES = problems.slow_but(["float32", "complex128" if X64 else "complex64"], "float32")


def operator(method, matrix):
    return MatrixOperator(matrix, hermitian=method in HERMITIAN_METHODS, positive=method in ("cg", "cholesky"))


def solve(system, method, rtol=1e-5, **options):
    return krylov.solve(operator(method, system.matrix), system.rhs, method, rtol=rtol, **options)


def assert_solved(sol, system, rtol=1e-5):
    assert sol.status is Status.CONVERGED, sol
    assert_honest(sol, *system, rtol)


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize("method", [*METHODS, pytest.param("bicgstabl", marks=pytest.mark.slow)])
def test_small_tridiagonal_is_solved_by_every_method(method, dtype):
    system = problems.small_tridiagonal(dtype, n=10)
    rtol = 10 * eps(dtype)
    sol = solve(system, method, rtol)
    assert_solved(sol, system, rtol)
    assert sol.x.dtype == dtype and sol.method == method
    assert norm(wide(sol.x) - system.solution) <= 2 * rtol * norm(system.rhs)


@pytest.mark.parametrize("dtype", SOME_DTYPES)
def test_cg_takes_at_most_n_iterations(dtype):
    system = problems.positive_tridiagonal(dtype)
    sol = solve(system, "cg")
    assert_solved(sol, system)
    assert int(sol.iterations) <= 10
    np.testing.assert_allclose(sol.x, np.arange(1, 11), rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize("shift", [0.0, 5.0, 10.0])
def test_minres_solves_what_cg_reports_indefinite(dtype, shift):
    system = problems.shifted_tridiagonal(dtype, shift)
    assert_solved(solve(system, "minres"), system)
    refused = solve(system, "cg")
    assert refused.status is Status.INDEFINITE
    assert_honest(refused, *system, 1e-5)
    assert solve(system, "cholesky").status is Status.INDEFINITE


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize("shift", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -4.0, -3.0])
def test_shifted_systems_are_solved_or_flagged_one_by_one(dtype, shift):
    matrix, rhs = problems.positive_tridiagonal(dtype)
    shifted = problems.System(matrix + np.asarray(shift, dtype) * np.eye(10, dtype=dtype), rhs)
    op = operator("cg", matrix)
    sol = krylov.solve(op, rhs, "cg", shift=shift)
    if shift > 0:
        assert_solved(sol, shifted)
        assert norm(wide(sol.x) - shifted.solution) <= 1e-4 * norm(shifted.solution)
    else:
        assert sol.status is Status.INDEFINITE
        assert_solved(krylov.solve(operator("minres", matrix), rhs, "minres", shift=shift), shifted)


@pytest.mark.parametrize("dtype", SOME_DTYPES)
def test_negative_curvature_is_flagged_and_the_next_solve_is_clean(dtype):
    before = solve(problems.positive_tridiagonal(dtype), "cg")
    assert solve(problems.padded(problems.one_negative_eigenvalue(dtype)), "cg").status is Status.INDEFINITE
    after = solve(problems.positive_tridiagonal(dtype), "cg")
    assert after.status is Status.CONVERGED
    np.testing.assert_array_equal(after.x, before.x)


@pytest.mark.parametrize("dtype", problems.REAL_DTYPES)
@pytest.mark.slow
def test_three_dimensional_laplacian_and_its_almost_singular_shift(dtype):
    matrix, rhs = problems.divergence_gradient(dtype)
    positive = krylov.solve(MatrixOperator(matrix, positive=True), rhs, "cg", rtol=1e-4)
    assert positive.status is Status.CONVERGED and int(positive.iterations) <= 60
    assert norm(wide(rhs) - matrix.astype(float) @ wide(positive.x)) <= 1.01e-4 * norm(rhs)
    shifted = krylov.solve(MatrixOperator(matrix, hermitian=True), rhs, "minres", shift=-5.0, rtol=1e-4)
    assert shifted.status is Status.CONVERGED
    residual = wide(rhs) - matrix.astype(float) @ wide(shifted.x) + 5 * wide(shifted.x)
    assert norm(residual) <= 1.01e-4 * norm(rhs)


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_singular_consistent_system_gets_a_finite_solution(method, dtype):
    system = problems.singular_consistent(dtype)
    sol = solve(system, method)
    assert_honest(sol, *system, 1e-5)
    if method in ITERATIVE:
        assert sol.status is Status.CONVERGED


@pytest.mark.parametrize("method", METHODS)
def test_zero_pivot_is_passed_or_reported(method):
    system = problems.padded(problems.swap("float32"))
    sol = solve(system, method)
    if method in ("minres", "gmres", "lu"):
        assert_solved(sol, system)
        np.testing.assert_allclose(sol.x[:2], [0, 1], atol=1e-6)
    else:
        assert sol.status in (Status.BREAKDOWN, Status.INDEFINITE)
        assert_honest(sol, *system, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dimensions", [1, 2])
def test_poisson_of_both_signs(dimensions):
    positive, negative = (problems.poisson("float32", dimensions, sign) for sign in (1, -1))
    # In one dimension x is 155 times as large as b: the rounding of A x alone may be 4e-5 of b.
    rtol = 1e-4
    assert_solved(solve(positive, "cg", rtol), positive, rtol)
    assert_solved(solve(positive, "minres", rtol), positive, rtol)
    assert_solved(solve(negative, "minres", rtol), negative, rtol)
    assert solve(negative, "cg", rtol).status is Status.INDEFINITE


@pytest.mark.parametrize("dtype", SOME_DTYPES)
def test_minres_takes_as_many_iterations_as_there_are_eigenvalues(dtype):
    system = problems.indefinite_diagonal(dtype)
    sol = solve(system, "minres")
    assert_solved(sol, system)
    assert int(sol.iterations) <= 10 + (dtype in ("float32", "complex64"))  # rounding may take one more


@pytest.mark.slow
@pytest.mark.x64_only
@pytest.mark.parametrize("method", [*METHODS, "bicgstabl"])
def test_condition_of_a_million(method):
    """Singular values from 1e-6 to 1, and the solution still has half of the digits."""
    n, dtype = 10, "complex128"
    if method == "minres":
        matrix = problems.hermitian(dtype, np.geomspace(1e-6, 1, n) * (-1.0) ** np.arange(n))
    elif method in ("bicgstab", "bicgstabl"):
        matrix = np.diag(np.geomspace(1e-6, 1, n)) + np.triu(random_vector(dtype, n, n), 1) * 1e-7
    elif method in ("gmres", "lu"):
        matrix = problems.unitary(dtype, n, 1) * np.geomspace(1e-6, 1, n) @ problems.unitary(dtype, n, 2)
    else:
        matrix = problems.gram(dtype, 1e6, n).matrix
    assert np.linalg.cond(matrix) > 0.99e6
    x = random_vector(dtype, n)
    system = problems.System(matrix, matrix @ x)
    sol = solve(system, method, 1e-13, maxiter=2000)
    assert_solved(sol, system, 1e-13)
    assert norm(sol.x - x) <= 1e-6 * norm(x)


def convection_diffusion(x):
    """Tridiagonal and not symmetric, with a condition of about 5 at any size."""
    return 3.0 * x - 1.3 * jnp.pad(x[:-1], (1, 0)) - 0.7 * jnp.pad(x[1:], (0, 1))


def diffusion(x):
    return 2.5 * x - jnp.pad(x[:-1], (1, 0)) - jnp.pad(x[1:], (0, 1))


def waves(x):
    """Symmetric with eigenvalues of both signs, none near zero."""
    even, odd = x[0::2], x[1::2]
    rolled = jnp.roll(even, 1) + jnp.roll(even, -1)
    return jnp.stack([0.5 * even + 2 * odd + 0.1 * rolled, 2 * even - 0.5 * odd], 1).ravel()


@pytest.mark.parametrize("method", problems.slow_but(RECURRENCES, "cg"))
def test_two_hundred_thousand_unknowns_in_float32(method):
    fn = {"cg": diffusion, "minres": waves}.get(method, convection_diffusion)
    b = random_vector("float32", 200_000)
    op = FunctionOperator(fn, b, hermitian=method in HERMITIAN_METHODS)
    chosen = krylov.GMRES(restart=10) if method == "gmres" else method
    sol = krylov.solve(op, b, chosen, rtol=1e-4)
    assert sol.status is Status.CONVERGED
    with jax.enable_x64(True):
        residual = wide(b) - np.asarray(fn(jnp.asarray(wide(sol.x))))
    assert norm(residual) <= 1.01e-4 * norm(b)


@pytest.mark.slow
@pytest.mark.parametrize("method", RECURRENCES)
def test_jacobi_cures_bad_scaling(method):
    n = 60
    inner = problems.suited("cg" if method == "minres" else method, "float32", n).matrix
    scales = np.geomspace(1e-2, 1e2, n, dtype="float32")
    matrix = scales[:, None] * inner * scales
    system = problems.System(matrix, matrix @ np.ones(n, "float32"))
    plain = solve(system, method, 1e-4)
    helped = solve(system, method, 1e-4, preconditioner=DiagonalOperator(1 / np.abs(np.diag(matrix))))
    assert_honest(plain, *system, 1e-4)
    assert_solved(helped, system, 1e-4)
    assert int(plain.iterations) > 1.5 * int(helped.iterations)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize("method", problems.slow_but(RECURRENCES, *ITERATIVE))
def test_exact_inverse_takes_three_products_whatever_its_scale(method, scale):
    system = problems.suited("cg" if method == "minres" else method, "float32")
    inverse = np.linalg.inv(wide(system.matrix)).astype("float32") * np.float32(scale)
    sol = solve(system, method, preconditioner=operator(method, inverse))
    assert_solved(sol, system)
    # BiCGStab takes two in an iteration.
    assert int(sol.matvecs) <= 3


@pytest.mark.slow
def test_preconditioner_may_be_a_function_or_another_solve():
    system = problems.general("float32")
    inverse = np.linalg.inv(wide(system.matrix)).astype("float32")
    sol = solve(system, "gmres", preconditioner=lambda x: jnp.asarray(inverse) @ x)
    assert_solved(sol, system)
    inner = FunctionOperator(lambda x: krylov.solve(jnp.asarray(system.matrix), x, "gmres", rtol=1e-2).x, system.rhs)
    sol = solve(system, "gmres", preconditioner=inner)
    assert_solved(sol, system)
    assert int(sol.iterations) <= 4


@pytest.mark.parametrize("method", problems.slow_but(["cg", "gmres", "lu"], "cg"))
def test_shift_is_a_scalar_or_a_diagonal_on_any_tree(method):
    matrix, rhs = problems.suited(method, "float32")
    tree = {"a": rhs[:6].reshape(2, 3), "b": rhs[6:]}
    op = MatrixOperator(
        matrix,
        hermitian=method in HERMITIAN_METHODS,
        positive=method in ("cg", "cholesky"),
        in_structure=tree,
        out_structure=tree,
    )
    diagonal = {"a": np.arange(1.0, 7, dtype="float32").reshape(2, 3) / 9, "b": np.float32(0.5)}
    spread = np.concatenate([diagonal["a"].ravel(), np.full(4, 0.5)])
    for shift, full in ((0.25, np.full(10, 0.25)), (diagonal, spread)):
        sol = krylov.solve(op, tree, method, shift=shift)
        assert sol.status is Status.CONVERGED
        x = np.concatenate([np.ravel(sol.x["a"]), sol.x["b"]])
        dense = np.linalg.solve(wide(matrix) + np.diag(full), wide(rhs))
        assert norm(x - dense) <= 1e-4 * norm(dense)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_imaginary_spectra_are_solved_by_minimising_over_two_dimensions_or_more(degree):
    """Skew blocks, on the imaginary axis and near it: real steps of one dimension are short there, or none."""
    blocks = np.kron(np.diag(np.linspace(0.2, 1, 20)), [[0.0, 1.0], [-1.0, 0.0]])
    b = random_vector("float32", 40)
    for real_part, most in ((0.0, 70), (0.2, 45)):
        system = problems.System((blocks + real_part * np.eye(40)).astype("float32"), b)
        sol = solve(system, krylov.BiCGStabL(degree=degree), 1e-4, maxiter=200)
        assert_honest(sol, *system, 1e-4)
        if degree > 1:
            assert sol.status is Status.CONVERGED and int(sol.matvecs) <= most, sol
        else:
            assert not sol.converged or int(sol.matvecs) > most


@pytest.mark.slow
def test_bicgstabl_on_a_map_that_is_only_real_linear():
    b = random_vector("complex64", 12)
    d = np.linspace(1, 3, 12, dtype="float32") * np.exp(0.5j).astype("complex64")
    op = FunctionOperator(lambda x: d * x + 0.7j * jnp.conj(jnp.roll(x, 1)), b, field="real")
    sol = krylov.solve(op, b, "bicgstabl", rtol=1e-5)
    assert sol.status is Status.CONVERGED
    x = wide(sol.x)
    assert norm(d * x + 0.7j * np.roll(x, 1).conj() - b) <= 1.1e-5 * norm(b)


@pytest.mark.parametrize("method", problems.slow_but(["gmres", "bicgstab", "lu"], "bicgstab"))
def test_complex_shift_of_a_general_method(method):
    matrix, rhs = problems.indefinite("complex64")
    sol = krylov.solve(matrix, rhs, method, shift=0.3 + 1.5j)
    assert_honest(sol, matrix + np.complex64(0.3 + 1.5j) * np.eye(10, dtype="complex64"), rhs, 1e-5)
    assert sol.status is Status.CONVERGED


@pytest.mark.slow
def test_auto_takes_the_cheapest_method_that_the_claims_allow():
    (A, b), (C, c) = problems.definite("float32"), problems.definite("complex64")
    positive, hermitian = MatrixOperator(A, positive=True), MatrixOperator(A, hermitian=True)
    choices = [
        (positive, b, 0.0, "cg"),
        (positive, b, 1e-3, "cg"),
        (positive, b, -1e-3, "minres"),
        (hermitian, b, 0.0, "minres"),
        (A, b, 0.0, "gmres"),
        (MatrixOperator(C, positive=True), c, 0.5j, "gmres"),
    ]
    for op, rhs, shift, expected in choices:
        sol = krylov.solve(op, rhs, shift=shift)
        assert sol.method == expected and bool(sol.converged)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "method, kind",
    [
        *((method, "matrix") for method in METHODS),
        ("cg", "diagonal"),
        pytest.param("cg", "function", marks=pytest.mark.slow),
        pytest.param("lu", "function", marks=pytest.mark.slow),
    ],
)
def test_half_precision_vectors_are_solved_in_float32(method, kind, dtype):
    matrix, rhs = (jnp.asarray(x, dtype) for x in problems.suited(method, "float32"))
    diagonal = jnp.arange(1, 11, dtype=dtype)
    op = {
        "matrix": lambda: operator(method, matrix),
        "diagonal": lambda: DiagonalOperator(diagonal),
        "function": lambda: FunctionOperator(lambda x: diagonal * x, rhs, positive=True),
    }[kind]()
    # A function computes in half precision, and that is then the precision of the residual.
    rtol = 0.05 if kind == "function" else 1e-5
    sol = krylov.solve(op, rhs, method, rtol=rtol)
    assert sol.status is Status.CONVERGED, sol
    assert sol.x.dtype == jnp.float32
    promoted = matrix if kind == "matrix" else jnp.diag(diagonal)
    assert problems.true_residual(promoted.astype("float32"), sol.x, rhs.astype("float32")) <= 1.1 * rtol * norm(
        rhs.astype("float32")
    )


@pytest.mark.parametrize("method", problems.slow_but(["cg", "gmres", "lu"], "lu"))
def test_real_matrix_takes_a_complex_right_hand_side(method):
    matrix, _ = problems.suited(method, "float32")
    rhs = random_vector("complex64", 10)
    options = {} if method not in ITERATIVE else {"preconditioner": MatrixOperator(np.eye(10, dtype="float32"))}
    sol = krylov.solve(operator(method, matrix), rhs, method, **options)
    assert sol.status is Status.CONVERGED and sol.x.dtype == jnp.complex64
    assert_honest(sol, matrix, rhs, 1e-5)


@pytest.mark.slow
def test_operator_may_be_a_matrix_of_any_library_or_a_function():
    import lineax
    import scipy.sparse

    matrix, rhs = problems.general("float32")
    for op in (
        matrix,
        jnp.asarray(matrix),
        matrix.tolist() if not X64 else np.asarray(matrix),
        sparse.BCOO.fromdense(matrix),
        scipy.sparse.csr_array(matrix),
        scipy.sparse.linalg.aslinearoperator(matrix),
        lineax.MatrixLinearOperator(jnp.asarray(matrix)),
        lambda x: jnp.asarray(matrix) @ x,
    ):
        sol = krylov.solve(op, rhs)
        assert sol.method == "gmres"
        assert_solved(sol, problems.System(matrix, rhs))


@pytest.mark.parametrize("method", problems.slow_but(ITERATIVE, "cg"))
def test_tolerance_is_met_for_every_pair_whatever_the_scale_of_the_preconditioner(method):
    """Problem 15, and each member of a batch keeps its own tolerance."""
    system = problems.low_rank_plus_identity("float32")
    values = [0, *(10.0**k for k in range(-9, 3)), np.inf]
    rtols, atols, scales = (np.ravel(x) for x in np.meshgrid(values, values, [1e-6, 1e6]))

    @jax.jit
    def solve_all(matrix, rhs):
        def one(rtol, atol, scale):
            preconditioner = DiagonalOperator(jnp.full(len(rhs), scale, rhs.dtype))
            return krylov.solve(
                operator(method, matrix), rhs, method, rtol=rtol, atol=atol, preconditioner=preconditioner
            )

        return jax.vmap(one)(rtols, atols, scales)

    batch = jax.tree.map(np.asarray, solve_all(*system))
    for i, (rtol, atol) in enumerate(zip(rtols, atols)):
        assert_honest(member(batch, i), *system, rtol, atol)
    loose = (rtols >= 1e-5) | (atols >= 1e-5 * norm(system.rhs))
    assert np.all(batch.converged[loose])
    at_once = (rtols >= 1) | (atols >= norm(system.rhs))
    assert not np.any(batch.x[at_once]) and not np.any(batch.iterations[at_once])


def member(batch, i):
    return jax.tree.map(lambda leaf: leaf[i], batch)
