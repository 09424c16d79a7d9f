"""Every operator is an operator of lineax: its dispatch functions, its solvers, derivatives through them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

from krylov.operators import (
    BlockDiagonalOperator,
    DiagonalOperator,
    FunctionOperator,
    IdentityOperator,
    Jacobian,
    MatrixOperator,
    join_real,
    split_real,
)
from tests.operators import networks, zoo
from tests.operators.zoo import flat, is_complex, unflat, vector

FLOAT, COMPLEX = np.dtype(jnp.result_type(float)), np.dtype(jnp.result_type(complex))
EPS = float(jnp.finfo(FLOAT).eps)
slow = pytest.mark.slow


# One of them is of real dtypes only.
KINDS = [(build, dtype) for build in zoo.UNIFORM for dtype in (FLOAT, COMPLEX)]
KINDS.remove((zoo.real_on_complex, COMPLEX))


@pytest.mark.parametrize("build, dtype", KINDS, ids=lambda kind: getattr(kind, "__name__", str(kind)))
def test_predicates(build, dtype, rng):
    case = build(rng, dtype)
    op = case.op
    ins = op.in_structure()
    any_complex = any(map(is_complex, jax.tree.leaves(ins)))
    diagonal = isinstance(op, (DiagonalOperator, IdentityOperator)) or (
        isinstance(op, BlockDiagonalOperator) and all(isinstance(b, DiagonalOperator) for b in op.blocks)
    )
    for predicate in (lx.is_diagonal, lx.is_tridiagonal, lx.is_lower_triangular, lx.is_upper_triangular):
        assert predicate(op) == diagonal
    assert lx.is_symmetric(op) == (diagonal or (case.hermitian and not any_complex))
    assert lx.is_positive_semidefinite(op) == case.positive
    assert not lx.is_negative_semidefinite(op)
    assert lx.has_unit_diagonal(op) == isinstance(op, IdentityOperator)
    assert op.in_size() == op.shape[1] and op.out_size() == op.shape[0]


# Those that have an entry of their own in a dispatch function, and one that has none.
CHOSEN = [
    zoo.matrix,
    zoo.bcoo_matrix,
    zoo.matrix_on_trees,
    zoo.diagonal,
    zoo.identity,
    zoo.function,
    zoo.sum_of_three,
    zoo.composed,
]


@pytest.mark.parametrize(
    "build",
    [pytest.param(b, marks=[] if b in (zoo.matrix_on_trees, zoo.diagonal, zoo.function) else slow) for b in CHOSEN],
    ids=lambda b: b.__name__,
)
def test_dispatch_functions_that_return_entries_or_operators(build, rng):
    case = build(rng, COMPLEX)
    op = case.op
    n = op.shape[0]
    dense = case.matrix[:n, :n] + 1j * case.matrix[n:, :n]
    x = vector(rng, op.in_structure())

    def forms(op, x):
        linearised, materialised, conjugated = lx.linearise(op), lx.materialise(op), lx.conj(op)
        out = {
            "linearised": linearised.mv(x),
            "materialised": materialised.mv(x),
            "materialised matrix": materialised.as_matrix(),
            "conjugated": conjugated.as_matrix(),
            "transposed": op.transpose().as_matrix(),
        }
        if op.is_square:
            out["diagonal"] = lx.diagonal(op)
            out["tridiagonal"] = lx.tridiagonal(op)
        return out

    found = eqx.filter_jit(forms)(op, x)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=300 * EPS)
    close(flat(found["linearised"]), case.matrix @ flat(x))
    close(flat(found["materialised"]), case.matrix @ flat(x))
    close(found["materialised matrix"], dense)
    close(found["conjugated"], dense.conj())
    close(found["transposed"], dense.T)
    if op.is_square:
        close(found["diagonal"], np.diagonal(dense))
        for k, got in zip((0, -1, 1), found["tridiagonal"]):
            close(got, np.diagonal(dense, k))


def positive(dtype):
    return zoo.positive_matrix(np.random.default_rng(1), dtype).matrix


def general(dtype):
    matrix = zoo.matrix(np.random.default_rng(1), dtype).matrix
    return matrix + 4 * np.eye(len(matrix))


def on_tree(real_form, dtype, **claims):
    """An operator without a matrix, on a tree, whose real dense matrix this is."""
    n = zoo.N
    dense = real_form if dtype == FLOAT else real_form[:n, :n] + 1j * real_form[n:, :n]
    a = jnp.asarray(dense.astype(dtype))

    def fn(x):
        y = a @ jnp.concatenate([x["b"][0][None], x["w"][0]])
        return {"b": [y[0]], "w": y[None, 1:]}

    return FunctionOperator(fn, zoo.tree_of(dtype), **claims)


SOLVERS = {
    "cg": (lambda: lx.CG(rtol=1e3 * EPS, atol=1e3 * EPS), positive),
    "gmres": (lambda: lx.GMRES(rtol=1e2 * EPS, atol=1e2 * EPS), general),
    "bicgstab": (lambda: lx.BiCGStab(rtol=1e2 * EPS, atol=1e2 * EPS), general),
    "lu": (lx.LU, general),
    "qr": (lx.QR, general),
    "svd": (lx.SVD, general),
    "cholesky": (lx.Cholesky, positive),
}


@pytest.mark.parametrize(
    "name, dtype",
    [
        pytest.param(name, dtype, marks=[] if (name, dtype) in quick else slow)
        for quick in [[("cg", COMPLEX), ("gmres", COMPLEX), ("lu", COMPLEX), ("cholesky", COMPLEX), ("cg", FLOAT)]]
        for name in SOLVERS
        for dtype in (FLOAT, COMPLEX)
    ],
    ids=str,
)
def test_solvers_and_their_gradients_on_trees(name, dtype, rng):
    make_solver, make_matrix = SOLVERS[name]
    matrix = make_matrix(dtype)
    op = on_tree(matrix, dtype, positive=make_matrix is positive)
    b, c = vector(rng, op.out_structure()), vector(rng, op.in_structure())

    def loss(op, b):
        x = lx.linear_solve(op, b, make_solver()).value
        return sum(jnp.sum((w.conj() * v).real) for v, w in zip(jax.tree.leaves(x), jax.tree.leaves(c))), x

    def value_and_gradients(op, b):
        values, rest = eqx.partition(op, eqx.is_inexact_array)
        of = lambda values, b: loss(eqx.combine(values, rest), b)
        return jax.value_and_grad(of, (0, 1), has_aux=True)(values, b)

    (_, x), (of_op, of_b) = eqx.filter_jit(value_and_gradients)(op, b)
    inverse = np.linalg.inv(matrix)
    tolerance = 1e5 * EPS
    np.testing.assert_allclose(flat(x), inverse @ flat(b), atol=tolerance)
    conj = lambda tree: jax.tree.map(jnp.conj, tree)  # JAX's gradients are conjugate
    np.testing.assert_allclose(flat(conj(of_b)), inverse.T @ flat(c), atol=tolerance)
    # d<c, A^-1 b> = -<A^-H c, dA x>
    (of_a,) = (leaf for leaf in jax.tree.leaves(of_op) if leaf.ndim == 2)
    adjoint, solution = (unflat(v, zoo.tree_of(dtype)) for v in (inverse.T @ flat(c), inverse @ flat(b)))
    ravel = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
    np.testing.assert_allclose(np.conj(of_a), -np.outer(ravel(adjoint), ravel(solution).conj()), atol=tolerance)


@pytest.mark.parametrize(
    "op, solver",
    [
        (DiagonalOperator(np.array([1.0, 2, 4])), lx.Diagonal()),
        (DiagonalOperator({"d": np.array([1, 2j, 4])}), lx.Diagonal()),
        (BlockDiagonalOperator([DiagonalOperator(np.ones(2) * 3), IdentityOperator(np.zeros(1))]), lx.Diagonal()),
        (IdentityOperator((np.zeros(2), np.zeros(1))), lx.Diagonal()),
        (DiagonalOperator(np.array([1.0, 2, 4])), lx.Tridiagonal()),
        (DiagonalOperator(np.array([1.0, 2, 4])), lx.Triangular()),
        (DiagonalOperator(np.array([1.0, 2, 4])), lx.AutoLinearSolver(well_posed=True)),
        (MatrixOperator(np.diag([1.0, 2, 4]) + np.ones((3, 3)), positive=True), lx.AutoLinearSolver(well_posed=True)),
        (MatrixOperator(np.diag([1.0, 2, 4]) + np.tri(3)), lx.AutoLinearSolver(well_posed=True)),
    ],
)
def test_solvers_that_use_what_they_are_told(op, solver, rng):
    b = vector(rng, op.out_structure())
    x = lx.linear_solve(op, b, solver).value
    np.testing.assert_allclose(flat(op @ x), flat(b), atol=1e3 * EPS)


def test_least_squares_by_normal_equations_and_qr(rng):
    a = zoo.normal(rng, COMPLEX, 5, 3)
    b = zoo.normal(rng, COMPLEX, 5)
    op = FunctionOperator(lambda x: a @ x, np.zeros(3, COMPLEX), adjoint=lambda y: a.conj().T @ y)
    expected = np.linalg.lstsq(a, b)[0]
    for solver in (lx.QR(), lx.Normal(lx.CG(rtol=1e3 * EPS, atol=1e3 * EPS))):
        np.testing.assert_allclose(lx.linear_solve(op, b, solver).value, expected, atol=1e5 * EPS)


ITERATIVE = [lx.CG(1e-6, 1e-6), lx.GMRES(1e-6, 1e-6), lx.BiCGStab(1e-6, 1e-6)]
DENSE = [lx.LU(), lx.AutoLinearSolver(well_posed=True), lx.AutoLinearSolver(well_posed=None)]


@pytest.mark.parametrize("solver", [*ITERATIVE, *DENSE], ids=lambda s: type(s).__name__)
def test_r_linear_operators_on_complex_leaves_are_refused(solver, rng):
    case = zoo.mixed_positive_function(rng, COMPLEX)
    b = vector(rng, case.op.out_structure())
    with pytest.raises(ValueError, match="only R-linear but has complex leaves") as info:
        lx.linear_solve(case.op, b, solver)
    assert "op.as_real()" in str(info.value) and "krylov.solve" in str(info.value)


@pytest.mark.parametrize("solver", [lx.QR(), lx.SVD(), lx.Cholesky()], ids=lambda s: type(s).__name__)
def test_solvers_that_ask_nothing_find_no_matrix_of_their_shape(solver, rng):
    case = zoo.mixed_positive_function(rng, COMPLEX)
    b = vector(rng, case.op.out_structure())
    with pytest.raises((TypeError, ValueError)):
        lx.linear_solve(case.op, b, solver)


@pytest.mark.parametrize("build", zoo.MIXED, ids=lambda b: b.__name__)
def test_only_their_real_form_answers_questions(build, rng):
    case = build(rng, COMPLEX)
    real = case.op.as_real()
    assert lx.is_positive_semidefinite(real) == case.positive
    assert lx.is_symmetric(real) == case.hermitian
    assert lx.linearise(real) is real
    if case.op.as_real() is not case.op:
        for question in (lx.linearise, lx.materialise, lx.is_diagonal):
            with pytest.raises(ValueError, match="only R-linear but has complex leaves"):
                question(case.op)


def test_r_linear_diagonals_are_refused_too():
    op = DiagonalOperator(
        {"c": np.ones(2, FLOAT), "r": np.ones(2, FLOAT)}, {"c": np.ones(2, COMPLEX), "r": np.ones(2, FLOAT)}
    )
    for solver in (lx.Diagonal(), lx.Tridiagonal(), lx.Triangular(), lx.AutoLinearSolver(well_posed=True)):
        with pytest.raises(ValueError, match="only R-linear but has complex leaves"):
            lx.linear_solve(op, {"c": np.ones(2, COMPLEX), "r": np.ones(2, FLOAT)}, solver)


@pytest.mark.parametrize(
    "solver",
    [lx.CG(1e3 * EPS, 1e3 * EPS), lx.LU(), pytest.param(lx.GMRES(1e2 * EPS, 1e2 * EPS), marks=slow), lx.Cholesky()],
    ids=lambda s: type(s).__name__,
)
def test_their_real_form_is_solved_and_differentiated(solver, rng):
    case = zoo.mixed_positive_function(rng, COMPLEX)
    op = case.op + IdentityOperator(case.op.in_structure())
    matrix = case.matrix + np.eye(6)
    b, c = vector(rng, op.out_structure()), vector(rng, op.out_structure())

    def loss(b):
        x = join_real(lx.linear_solve(op.as_real(), split_real(b), solver).value, op.in_structure())
        return sum(jnp.sum((w.conj() * v).real) for v, w in zip(jax.tree.leaves(x), jax.tree.leaves(c))), x

    gradient, x = jax.jit(jax.grad(loss, has_aux=True))(b)
    np.testing.assert_allclose(flat(x), np.linalg.solve(matrix, flat(b)), atol=1e5 * EPS)
    gradient = jax.tree.map(jnp.conj, gradient)
    np.testing.assert_allclose(flat(gradient), np.linalg.solve(matrix.T, flat(c)), atol=1e5 * EPS)


@slow
@pytest.mark.parametrize("make", [networks.real, networks.holomorphic], ids=lambda m: m.__name__)
def test_gram_operators_in_lineax(make, rng):
    network = make()
    J = Jacobian(network.f, network.params, network.samples, center=True, chunk_size=3, **network.options)
    S = J.gram() + 0.5 * IdentityOperator(J.in_structure())
    b = vector(rng, S.in_structure())
    dense = np.asarray(networks.dense_jacobian(network, network.trained, network.samples, jnp.ones(7, FLOAT), True))
    expected = np.linalg.solve(dense.T @ dense + 0.5 * np.eye(dense.shape[1]), flat(b))
    for solver in (lx.CG(1e3 * EPS, 1e3 * EPS), lx.Cholesky()):
        np.testing.assert_allclose(flat(lx.linear_solve(S, b, solver).value), expected, atol=1e4 * EPS)


def test_operators_nest_in_operators_of_lineax(rng):
    a = zoo.normal(rng, FLOAT, 4, 4)
    op = MatrixOperator(a)
    x = zoo.normal(rng, FLOAT, 4)
    tagged = lx.TaggedLinearOperator(op, lx.positive_semidefinite_tag)
    assert lx.is_positive_semidefinite(tagged) and not lx.is_positive_semidefinite(op)
    combined = lx.MatrixLinearOperator(jnp.eye(4)) + op @ lx.IdentityLinearOperator(op.in_structure())
    np.testing.assert_allclose(combined.mv(x), x + a @ x, atol=300 * EPS)
    np.testing.assert_allclose((-combined).T.mv(x), -(x + a.T @ x), atol=300 * EPS)
    np.testing.assert_allclose(lx.materialise(lx.linearise(combined)).as_matrix(), np.eye(4) + a, atol=300 * EPS)


def test_no_new_values_are_traced():
    traces = []

    @eqx.filter_jit
    def solve(op, b):
        traces.append(None)
        return lx.linear_solve(op, b, lx.LU()).value

    for scale in (1.0, 2.0):
        x = solve(MatrixOperator(scale * np.eye(3)), np.ones(3))
        np.testing.assert_allclose(x, np.ones(3) / scale)
    assert len(traces) == 1
