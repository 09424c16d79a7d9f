"""Preconditioners against dense formulas, on every kind of vector, and what they save."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import krylov
from krylov.coordinates import coordinates_of
from krylov.operators import FunctionOperator, Jacobian, MatrixOperator
from tests import networks, problems
from tests.conftest import X64
from tests.krylov.test_recompilation import compiling
from tests.problems import DTYPES, eps, wide

DOUBLE = jnp.float64 if X64 else jnp.float32


def flat_matrix(op):
    """In the coordinates of the operator's field."""
    return wide(_columns(op).T)


@eqx.filter_jit
def _columns(op):
    coordinates = coordinates_of(op)
    column = lambda x: coordinates.flatten(op._product(coordinates.unflatten(x)))
    return jax.vmap(column)(jnp.eye(coordinates.size, dtype=coordinates.dtype))


def mixed_jacobian(count=60, **options):
    """R-linear, on real and complex leaves of some 30 real unknowns."""
    return Jacobian(networks.mixed, networks.mixed_params(DOUBLE), networks.samples(count, DOUBLE), **options)


def holomorphic_jacobian(count=60):
    to_complex = jnp.result_type(DOUBLE, jnp.complex64)
    params = {"w": jnp.asarray(problems.random_vector("complex128", 5, 3) / 2, to_complex)}
    f = lambda params, x: jnp.sum(jnp.tanh(x @ params["w"]), axis=-1)
    return Jacobian(f, params, networks.samples(count, DOUBLE), center=True, holomorphic=True, chunk_size=25)


def decaying(dtype, n=40):
    """Eigenvalues 1, 1/4, 1/9, ..."""
    return MatrixOperator(problems.hermitian(dtype, 1 / np.arange(1, n + 1) ** 2), positive=True)


FULL = {
    "nystrom": krylov.Nystrom(rank=1000, tolerance=0.0),
    "rows": krylov.SampleNystrom(rank=1000, tolerance=0.0),
    "woodbury": krylov.SampleWoodbury(samples=1000),
    "rows in blocks": krylov.SampleNystrom(rank=1000, tolerance=0.0, block_size=7),
}
JACOBIANS = {
    "mixed": functools.partial(mixed_jacobian, center=True),
    "weighted": functools.partial(mixed_jacobian, weights=np.linspace(0, 1, 60), chunk_size=13),
    "holomorphic": holomorphic_jacobian,
}


QUICK = [("nystrom", "mixed"), ("rows", "holomorphic")]
SLOW = [("woodbury", "mixed"), ("rows in blocks", "weighted")]


@pytest.mark.parametrize("recipe, jacobian", [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_of_full_rank_is_the_inverse_of_a_gram_at_every_shift(recipe, jacobian):
    S = JACOBIANS[jacobian]().gram()
    M, matrix = FULL[recipe].build(S), flat_matrix(S)
    one, largest = np.eye(len(matrix)), np.linalg.norm(matrix, 2)
    for part in (0.1, 1e-3) if X64 else (0.1,):
        shift = part * largest
        expected = np.linalg.inv(matrix + shift * one)
        error = np.linalg.norm(flat_matrix(M.with_shift(shift)) - expected, 2) * shift
        # The core is regularised by some ten roundings of the largest eigenvalue, and the union of the random blocks, a
        # square matrix here, has a condition of about its dimension squared.
        assert error <= 1e4 * eps(DOUBLE) / part
        solution = krylov.solve(S, S.jacobian.params, "cg", shift=shift, rtol=1e-4, preconditioner=M)
        assert bool(solution.converged) and int(solution.iterations) <= (2 if X64 else 4)


@pytest.mark.parametrize(
    "recipe, jacobian",
    [
        pytest.param("rows", "mixed", marks=pytest.mark.slow),
        pytest.param("nystrom", "holomorphic", marks=pytest.mark.slow),
    ],
)
def test_of_full_rank_is_the_inverse_of_a_cogram(recipe, jacobian):
    J = JACOBIANS[jacobian](20)
    T, shift = J.cogram(), 1e-2
    M = FULL[recipe].build(T, shift=shift)
    expected = np.linalg.inv(flat_matrix(T) + shift * np.eye(coordinates_of(T).size))
    assert np.linalg.norm(flat_matrix(M) - expected, 2) * shift <= (1e-8 if X64 else 1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_low_rank_of_a_matrix_is_what_its_report_says(dtype):
    op, shift = decaying(dtype), 1e-3
    M = krylov.Nystrom(rank=12, tolerance=0.0).build(op, jax.random.key(3), shift=shift)
    matrix, inverse = wide(op.matrix) + shift * np.eye(40), flat_matrix(M)
    assert np.linalg.norm(inverse - inverse.conj().T) <= 100 * eps(dtype) * np.linalg.norm(inverse)
    spectrum = np.linalg.eigvals(inverse @ matrix).real
    condition = spectrum.max() / spectrum.min()
    report = M.report
    assert (int(report.rank), int(report.matvecs)) == (12, 12)
    # Nystrom eigenvalues are a little low.
    assert float(report.condition_before) == pytest.approx(1 + 1 / shift, rel=5e-2)
    assert float(report.condition_after) == pytest.approx(condition, rel=0.5) and condition < 20
    # From below, as a Nystrom approximation has them.
    exact = 1 / np.arange(1, 13) ** 2
    assert np.all(np.asarray(M.eigenvalues) <= exact + 100 * eps(dtype)) and M.eigenvalues[2] >= 0.8 * exact[2]


def test_rank_adapts_to_the_shift():
    op = decaying("float32", 200)
    ranks = [int(krylov.Nystrom(100, block_size=10).build(op, shift=shift).report.rank) for shift in (1e-1, 3e-3, 1e-9)]
    # Eigenvalues are below the shift from 4, from 19 and never.
    assert ranks[0] == 10 and 20 <= ranks[1] <= 30 and ranks[2] == 100


def test_rank_stops_at_that_of_the_operator():
    op = MatrixOperator(problems.hermitian("float32", [3, 2, 1] + [0] * 57), positive=True)
    M = krylov.Nystrom(rank=50, tolerance=1e-3, block_size=8).build(op, shift=1e-1)
    assert int(M.report.rank) == 8
    inverse = np.linalg.inv(wide(op.matrix) + 0.1 * np.eye(60))
    assert np.linalg.norm(flat_matrix(M) - inverse, 2) <= 1e-3


@pytest.mark.parametrize("dtype", problems.slow_but(["complex64", "float32"], "complex64"))
def test_deflation_is_the_dense_formula_and_removes_the_space(dtype):
    op, shift, k = decaying(dtype), 1e-3, 5
    matrix = wide(op.matrix) + shift * np.eye(40)
    basis = problems.random_vector(dtype, k, 40)
    M = krylov.Deflation(basis).build(op, shift=shift)
    U = wide(basis).T
    Q = U @ np.linalg.solve(U.conj().T @ matrix @ U, U.conj().T)
    away = np.eye(40) - matrix @ Q
    expected = Q + away.conj().T @ away / (float(M.rest) + shift)
    assert np.linalg.norm(flat_matrix(M) - expected) <= 1e4 * eps(dtype) * np.linalg.norm(expected)
    assert np.linalg.norm(flat_matrix(M) @ matrix @ U - U) <= 1e4 * eps(dtype) * np.linalg.norm(U)
    top = np.linalg.eigh(wide(op.matrix))[1][:, -10:].T.astype(dtype)
    plain, deflated = (
        krylov.solve(op, np.ones(40, dtype), "cg", shift=shift, preconditioner=M) for M in (None, krylov.Deflation(top))
    )
    assert bool(deflated.converged) and 2 * int(deflated.iterations) <= int(plain.iterations)


@pytest.mark.parametrize("kind", problems.slow_but(["gram", "matrix", "function"], "gram"))
def test_jacobi_and_block_jacobi_are_the_dense_blocks(kind):
    S = mixed_jacobian(center=True).gram()
    op, matrix = S, flat_matrix(S)
    structure = S.in_structure()
    if kind == "matrix":
        op = MatrixOperator(matrix.astype(DOUBLE), positive=True)
        structure = op.in_structure()
    elif kind == "function":
        op = FunctionOperator(S.mv, structure, positive=True)
    # Leaves in the order of their names: complex (12), offset (1), real (20); then the imaginary parts of two.
    names = np.array([0] * 12 + [1] + [2] * 20 + [0] * 12 + [1]) if kind != "matrix" else np.zeros(len(matrix))
    shift = 0.01
    for recipe, kept in (
        (krylov.Jacobi(), np.eye(len(matrix))),
        (krylov.BlockJacobi(), names[:, None] == names[None]),
    ):
        expected = np.linalg.inv(matrix * kept + shift * np.eye(len(matrix)))
        got = flat_matrix(recipe.build(op, shift=shift))
        assert np.linalg.norm(got - expected) <= 1e4 * eps(DOUBLE) * np.linalg.norm(expected)


@pytest.mark.slow
def test_jacobi_follows_a_diagonal_shift():
    S = mixed_jacobian(center=True).gram()
    shift = jax.tree.map(lambda p: 0.1 + jnp.abs(p), S.jacobian.params)
    diagonal = flat_matrix(S).diagonal() + np.concatenate(
        [np.ravel(x) for x in jax.tree.leaves(shift)] + [np.ravel(shift[name]) for name in ("complex", "offset")]
    )
    M = krylov.Jacobi().build(S, shift=shift)
    assert np.allclose(flat_matrix(M), np.diag(1 / diagonal), rtol=1e-4)
    solution = krylov.solve(S, S.jacobian.params, shift=shift, preconditioner=krylov.Jacobi())
    assert bool(solution.converged)


def test_built_once_serves_every_shift_and_a_changed_operator():
    op = decaying("float32", 200)
    M = krylov.Nystrom(rank=60).build(op)
    b = np.ones(200, "float32")
    noise = problems.hermitian("float32", np.linspace(0, 1, 200), seed=4)
    changed = MatrixOperator(op.matrix + 0.02 * noise * np.abs(op.matrix), positive=True)
    for system in (op, changed):
        for shift in (1e-2, 3e-3, 1e-3):
            plain = krylov.solve(system, b, "cg", shift=shift, rtol=1e-4)
            solution = krylov.solve(system, b, "cg", shift=shift, rtol=1e-4, preconditioner=M)
            assert bool(solution.converged)
            assert problems.true_residual(wide(system.matrix) + shift * np.eye(200), solution.x, b) <= 1.1e-4 * 200**0.5
            assert 2 * int(solution.iterations) <= int(plain.iterations)


@pytest.mark.slow
def test_refreshed_is_better_than_stale_and_than_new():
    old = decaying("float32", 200)
    turn = wide(np.eye(200)) + 0.02 * wide(problems.random_vector("float32", 200, 200, seed=7)) / 200**0.5
    new = MatrixOperator((turn @ wide(old.matrix) @ turn.T).astype("float32"), positive=True)
    recipe, b = krylov.Nystrom(rank=40, tolerance=0.0), np.ones(200, "float32")
    stale = recipe.build(old)
    candidates = stale, recipe.build(new), recipe.refresh(new, stale)
    counts = [int(krylov.solve(new, b, shift=1e-4, preconditioner=M).iterations) for M in candidates]
    assert counts[2] <= min(counts[:2]) and counts[2] < counts[0]
    assert int(candidates[2].report.matvecs) == 40


def test_stays_positive_whatever_the_shift():
    M = krylov.Nystrom(rank=10).build(decaying("complex64"))
    for shift in (0.0, -0.25, -0.1, 1e30):
        matrix = flat_matrix(M.with_shift(shift))
        assert np.all(np.isfinite(matrix)) and np.all(np.linalg.eigvalsh(matrix) > 0)
    nothing = krylov.Nystrom(rank=4).build(MatrixOperator(np.zeros((6, 6), "float32")), shift=0.5)
    assert np.allclose(flat_matrix(nothing), 2 * np.eye(6))


def test_operator_that_is_not_finite_is_reported():
    op = MatrixOperator(np.diag([1.0, np.nan, 2.0, 3.0]).astype("float32"), positive=True)
    solution = krylov.solve(op, np.ones(4, "float32"), shift=0.1, preconditioner=krylov.Nystrom(rank=2))
    assert solution.status.name == "NONFINITE"


RECIPES = {
    "nystrom": krylov.Nystrom(rank=10, tolerance=0.0),
    "rows": krylov.SampleNystrom(rank=10, tolerance=0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_solves_are_transformed_as_without_it(name):
    """jit and vmap of the gradient in parameters, b and shift: a preconditioner changes no result."""
    x, params = networks.samples(30, DOUBLE), networks.mixed_params(DOUBLE)

    def everything(preconditioner):
        def loss(params, shift, scale):
            S = Jacobian(networks.mixed, params, x, center=True).gram()
            b = jax.tree.map(lambda p: scale * p, params)
            solution = krylov.solve(S, b, "cg", shift=shift, rtol=1e3 * eps(DOUBLE), preconditioner=preconditioner)
            return sum(jnp.sum(jnp.abs(leaf) ** 2) for leaf in jax.tree.leaves(solution.x))

        gradient = jax.grad(loss, (0, 1, 2))
        shifts = jnp.array([0.1, 0.3], DOUBLE)
        one = jnp.ones((), DOUBLE)
        return jax.vmap(gradient, (None, 0, None))(params, shifts, one)

    got, expected = jax.jit(lambda: (everything(RECIPES[name]), everything(None)))()
    for x_, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        assert np.linalg.norm(x_ - y) <= (1e-9 if X64 else 1e-2) * np.linalg.norm(y)


def test_second_solve_compiles_nothing():
    x = networks.samples(30)

    def solve(seed, shift):
        params = networks.mixed_params(seed=seed)
        S = Jacobian(networks.mixed, params, x + seed, center=True).gram()
        solution = krylov.solve(S, params, shift=shift, preconditioner=RECIPES["nystrom"])
        built = RECIPES["nystrom"].build(S, jax.random.key(seed))
        return solution, krylov.solve(S, params, shift=2 * shift, preconditioner=built)

    solve(1, 0.1)
    with compiling(0):
        solutions = solve(2, 0.2)
    assert all(bool(solution.converged) for solution in solutions)


@pytest.mark.slow
def test_complex_vectors_on_a_real_matrix():
    op = decaying("float32")
    b = problems.random_vector("complex64", 40)
    built = krylov.Nystrom(10).build(op)
    for M in (krylov.Nystrom(10), built):
        solution = krylov.solve(MatrixOperator(op.matrix, positive=True), b, shift=0.01, preconditioner=M)
        assert bool(solution.converged)


@pytest.mark.slow
def test_half_precision_and_minres_and_gmres():
    op = decaying("float32")
    half = MatrixOperator(op.matrix.astype(jnp.bfloat16), positive=True)
    b = jnp.ones(40, jnp.bfloat16)
    assert bool(krylov.solve(half, b, shift=0.1, preconditioner=krylov.Nystrom(10)).converged)
    for method in ("minres", "gmres"):
        plain, sol = (
            krylov.solve(op, np.ones(40, "float32"), method, shift=1e-3, preconditioner=M)
            for M in (None, krylov.Nystrom(20))
        )
        assert bool(sol.converged) and int(sol.iterations) < int(plain.iterations)


A = decaying("float32", 10)
ERRORS = {
    "rank zero": (lambda: krylov.Nystrom(0), ValueError, ["Nystrom", "rank", "0"]),
    "half a sample": (lambda: krylov.SampleWoodbury(0.5), ValueError, ["SampleWoodbury", "samples", "0.5"]),
    "negative tolerance": (lambda: krylov.SampleNystrom(tolerance=-1), ValueError, ["tolerance", "-1"]),
    "empty": (lambda: krylov.Nystrom(2).build(np.ones((0, 0), "float32")), ValueError, ["Nystrom.build", "empty"]),
    "not square": (lambda: krylov.Jacobi().build(np.ones((3, 2))), ValueError, ["Jacobi.build", "square"]),
    "rows of a matrix": (lambda: krylov.SampleNystrom(4).build(A), TypeError, ["SampleNystrom", "J.gram()", "Nystrom"]),
    "samples of a cogram": (
        lambda: krylov.SampleWoodbury(4).build(mixed_jacobian(4).cogram()),
        TypeError,
        ["SampleWoodbury", "J.gram()"],
    ),
    "complex shift": (
        lambda: krylov.Nystrom(4).build(decaying("complex64"), shift=1j),
        ValueError,
        ["Nystrom.build", "complex shift"],
    ),
    "diagonal shift": (
        lambda: krylov.solve(A, np.ones(10, "float32"), shift=np.ones(10, "float32"), preconditioner=krylov.Nystrom(4)),
        ValueError,
        ["Nystrom", "scalar", "Jacobi"],
    ),
    "large leaf": (lambda: krylov.BlockJacobi(max_size=9).build(A), ValueError, ["BlockJacobi", "10", "max_size"]),
    "basis of another length": (
        lambda: krylov.Deflation(np.ones((2, 9), "float32")).build(A),
        ValueError,
        ["Deflation", "float32[2,9]", "float32[10]"],
    ),
    "direct method": (
        lambda: krylov.solve(A, np.ones(10, "float32"), "cholesky", preconditioner=krylov.Nystrom(4)),
        ValueError,
        ["cholesky", "direct", "preconditioner"],
    ),
    "refresh of another recipe": (
        lambda: krylov.Nystrom(8).refresh(A, krylov.Nystrom(4).build(A)),
        ValueError,
        ["refresh", "8", "float32[10]"],
    ),
    "preconditioner of another space": (
        lambda: krylov.solve(A, np.ones(10, "float32"), preconditioner=krylov.Nystrom(4).build(decaying("float32", 9))),
        ValueError,
        ["preconditioner", "float32[9]", "float32[10]"],
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error_says_what_to_do(case):
    call, kind, words = ERRORS[case]
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


@pytest.fixture(scope="module")
def trained_rbm():
    """The gram of a trained wave function as a matrix, whose products are fast, and the forces."""
    params, samples, energies = networks.trained_rbm(4096)
    J = Jacobian(networks.rbm, jax.tree.map(jnp.asarray, params), samples, center=True, holomorphic=True)
    structure = J.in_structure()
    matrix = MatrixOperator(J.gram().as_matrix(), positive=True, in_structure=structure, out_structure=structure)
    return J, matrix, J.H @ J.sample_vector(energies)


SHIFTS, MOST = (1e-3, 1e-4, 1e-5), (20, 50, 130)


@pytest.mark.x64_only
@pytest.mark.parametrize("rows", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_iterations_on_a_trained_wave_function(trained_rbm, rows):
    """Plain CG takes 358, 897 and 2333."""
    J, S, F = trained_rbm
    M = krylov.SampleNystrom(rank=256).build(J.gram()) if rows else krylov.Nystrom(rank=256).build(S)
    b, norm = np.asarray(coordinates_of(S).flatten(F)), problems.norm
    for shift, most in zip(SHIFTS, MOST):
        solution = krylov.solve(S, F, "cg", shift=shift, rtol=1e-6, preconditioner=M)
        assert bool(solution.converged) and int(solution.iterations) <= (most if not rows else 0.85 * most)
        x = np.asarray(coordinates_of(S).flatten(solution.x))
        assert norm(b - np.asarray(S.matrix) @ x - shift * x) <= 1.001e-6 * norm(b)


def test_single_precision_reaches_its_tolerance_on_a_trained_wave_function():
    """The residual is that of the derivatives in double precision, written out."""
    params, samples, energies = networks.trained_rbm(4096)
    shift, rtol = 1e-4, 1e-5
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.complex64), params)
    J = Jacobian(networks.rbm, params, samples, center=True, holomorphic=True)
    F = J.H @ J.sample_vector(energies.astype("complex64"))
    solution = krylov.solve(J.gram(), F, "cg", shift=shift, rtol=rtol, preconditioner=krylov.Nystrom(rank=256))
    assert bool(solution.converged) and int(solution.iterations) <= 50
    spins = samples.astype(float)
    tanh = np.tanh(spins @ wide(params["Dense"]["kernel"]) + wide(params["Dense"]["bias"]))
    rows = np.concatenate([tanh, (spins[:, :, None] * tanh[:, None]).reshape(len(spins), -1), spins], axis=1)
    rows = (rows - rows.mean(0)) / np.sqrt(len(rows))
    b, x = (np.concatenate([wide(leaf).ravel() for leaf in jax.tree.leaves(v)]) for v in (F, solution.x))
    assert problems.norm(b - rows.conj().T @ (rows @ x) - shift * x) <= 1.5 * rtol * problems.norm(b)
