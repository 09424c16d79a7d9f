"""Other libraries' operators, arrays and functions as operators, also handed straight to `krylov.solve`."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
from jax.experimental import sparse

import krylov
from krylov.operators import FunctionOperator, LinearOperator, MatrixOperator, as_operator
from tests.operators.zoo import normal

FLOAT, COMPLEX = np.dtype(jnp.result_type(float)), np.dtype(jnp.result_type(complex))
EPS = float(jnp.finfo(FLOAT).eps)
RTOL = 100 * EPS
SPD = np.array([[4.0, 1, 0, 0], [1, 3, 1, 0], [0, 1, 2, 0.5], [0, 0, 0.5, 1]])
HERMITIAN = SPD + 1j * np.array([[0, 0.5, 0, 0], [-0.5, 0, 0, 0.2], [0, 0, 0, 0], [0, -0.2, 0, 0]])
SKEW = SPD + np.triu(np.ones((4, 4)), 1)
B = np.array([1.0, -2, 3, 0.5])


def structure(dtype):
    return jax.ShapeDtypeStruct((4,), dtype)


def tridiagonal(a):
    return lx.TridiagonalLinearOperator(*(jnp.asarray(np.diagonal(a, k)) for k in (0, -1, 1)))


@pytest.mark.parametrize(
    "op, dense, hermitian, positive",
    [
        (SPD, SPD, False, False),
        (jnp.asarray(SPD), SPD, False, False),
        (SPD.tolist(), SPD, False, False),
        (scipy.sparse.csr_array(SPD), SPD, False, False),
        (sparse.BCOO.fromdense(jnp.asarray(SPD)), SPD, False, False),
        (sparse.BCSR.fromdense(jnp.asarray(HERMITIAN)), HERMITIAN, False, False),
        (scipy.sparse.linalg.aslinearoperator(SKEW), SKEW, False, False),
        (scipy.sparse.linalg.aslinearoperator(HERMITIAN), HERMITIAN, False, False),
        (lx.MatrixLinearOperator(jnp.asarray(SKEW)), SKEW, False, False),
        (lx.MatrixLinearOperator(jnp.asarray(SPD), lx.symmetric_tag), SPD, True, False),
        (lx.MatrixLinearOperator(jnp.asarray(SPD), lx.positive_semidefinite_tag), SPD, True, True),
        (lx.MatrixLinearOperator(jnp.asarray(HERMITIAN), lx.positive_semidefinite_tag), HERMITIAN, True, True),
        (lx.MatrixLinearOperator(jnp.asarray(-SPD), lx.negative_semidefinite_tag), -SPD, True, False),
        # A symmetric complex matrix is not hermitian.
        (lx.MatrixLinearOperator(jnp.asarray(SPD * (1 + 1j)), lx.symmetric_tag), SPD * (1 + 1j), False, False),
        (lx.DiagonalLinearOperator(jnp.asarray(B)), np.diag(B), True, False),
        (lx.IdentityLinearOperator(structure(FLOAT)), np.eye(4), True, True),
        (tridiagonal(SPD), np.triu(np.tril(SPD, 1), -1), False, False),
        (lx.FunctionLinearOperator(lambda x: SKEW @ x, structure(FLOAT)), SKEW, False, False),
        (lx.FunctionLinearOperator(lambda x: SPD @ x, structure(FLOAT), lx.positive_semidefinite_tag), SPD, True, True),
        (lx.JacobianLinearOperator(lambda x, _: SKEW @ jnp.sin(x), jnp.zeros(4)), SKEW, False, False),
        (lx.JacobianLinearOperator(lambda x, _: SKEW @ jnp.sin(x), jnp.zeros(4), jac="bwd"), SKEW, False, False),
        (lx.MatrixLinearOperator(jnp.asarray(SKEW)).T, SKEW.T, False, False),
        (2 * lx.MatrixLinearOperator(jnp.asarray(SKEW)) + tridiagonal(SPD), 2 * SKEW + SPD, False, False),
        (lx.TaggedLinearOperator(tridiagonal(SPD), lx.positive_semidefinite_tag), SPD, True, True),
    ],
)
def test_whatever_stands_for_a_linear_map(op, dense, hermitian, positive, rng):
    op = as_operator(op)
    dtype = COMPLEX if np.iscomplexobj(dense) else FLOAT
    assert isinstance(op, LinearOperator)
    assert (op.is_hermitian, op.is_positive) == (hermitian, positive)
    assert op.field == ("complex" if dtype == COMPLEX else "real")
    x, y = normal(rng, dtype, 4), normal(rng, dtype, 4)
    np.testing.assert_allclose(op @ x, dense @ x, rtol=RTOL, atol=RTOL * 10)
    np.testing.assert_allclose(op.H @ y, dense.conj().T @ y, rtol=RTOL, atol=RTOL * 10)
    np.testing.assert_allclose(op.as_matrix(), dense, rtol=RTOL)


@pytest.mark.parametrize(
    "make, method, dtype",
    [
        (np.asarray, "lu", FLOAT),
        (scipy.sparse.csr_array, "cg", FLOAT),
        pytest.param(scipy.sparse.csc_matrix, "bicgstab", COMPLEX, marks=pytest.mark.slow),
        pytest.param(lambda a: sparse.BCOO.fromdense(jnp.asarray(a)), "minres", COMPLEX, marks=pytest.mark.slow),
        (lambda a: sparse.BCSR.fromdense(jnp.asarray(a)), "cg", FLOAT),
        pytest.param(scipy.sparse.linalg.aslinearoperator, "auto", COMPLEX, marks=pytest.mark.slow),
        (scipy.sparse.linalg.aslinearoperator, "cg", FLOAT),
        (lambda a: lx.MatrixLinearOperator(jnp.asarray(a)), "lu", COMPLEX),
        pytest.param(
            lambda a: lx.MatrixLinearOperator(jnp.asarray(a), lx.positive_semidefinite_tag),
            "auto",
            COMPLEX,
            marks=pytest.mark.slow,
        ),
        (lambda a: lx.FunctionLinearOperator(lambda x: jnp.asarray(a) @ x, structure(a.dtype)), "lu", FLOAT),
        (lambda a: lx.JacobianLinearOperator(lambda x, _: jnp.asarray(a) @ x, jnp.zeros(4, a.dtype)), "cg", COMPLEX),
        (lambda a: lambda x: jnp.asarray(a) @ x, "cg", COMPLEX),
    ],
)
def test_solve_takes_them(make, method, dtype):
    dense = (HERMITIAN if dtype == COMPLEX else SPD).astype(dtype)
    b = B.astype(dtype)
    sol = krylov.solve(make(dense), b, method, rtol=1e3 * EPS)
    assert sol.converged
    assert sol.x.dtype == dtype
    np.testing.assert_allclose(sol.x, np.linalg.solve(dense, b), rtol=1e5 * EPS, atol=1e5 * EPS)


@pytest.mark.slow
def test_solve_takes_lineax_tags_and_tridiagonals():
    exact = np.linalg.solve(SPD, B)
    negative = lx.MatrixLinearOperator(jnp.asarray(-SPD), lx.negative_semidefinite_tag)
    sol = krylov.solve(negative, B, rtol=1e3 * EPS)
    assert sol.converged and sol.method == "minres"
    np.testing.assert_allclose(sol.x, -exact, rtol=1e5 * EPS)
    sol = krylov.solve(tridiagonal(SPD), B, rtol=1e3 * EPS)
    assert sol.converged and sol.method == "gmres"
    np.testing.assert_allclose(sol.x, exact, rtol=1e5 * EPS)
    tagged = lx.TaggedLinearOperator(tridiagonal(SPD), lx.positive_semidefinite_tag)
    assert krylov.solve(tagged, B).method == "cg"


def test_an_r_linear_operator_inside_one_of_lineax_stays_r_linear(rng):
    a, b = normal(rng, COMPLEX, 2, 2), normal(rng, COMPLEX, 2, 2)
    inner = FunctionOperator(lambda x: a @ x + b @ x.conj(), np.zeros(2, COMPLEX), field="real")
    op = as_operator(lx.MatrixLinearOperator(jnp.eye(2, dtype=COMPLEX) * 5) + inner)
    assert op.field == "real"
    expected = inner.as_matrix() + 5 * np.eye(4)
    np.testing.assert_allclose(op.as_matrix(), expected, rtol=RTOL)
    np.testing.assert_allclose(op.H.as_matrix(), expected.T, rtol=RTOL)
    rhs = normal(rng, COMPLEX, 2)
    sol = krylov.solve(op, rhs, "lu")
    assert sol.converged
    np.testing.assert_allclose(op @ sol.x, rhs, rtol=1e4 * EPS)


def test_a_scipy_operator_works_under_transformations(rng):
    a = normal(rng, FLOAT, 3, 4)
    op = as_operator(scipy.sparse.linalg.aslinearoperator(a))
    x, xs = normal(rng, FLOAT, 4), normal(rng, FLOAT, 2, 4)
    np.testing.assert_allclose(jax.jit(op.mv)(x), a @ x, rtol=RTOL)
    np.testing.assert_allclose(jax.vmap(op.mv)(xs), xs @ a.T, rtol=RTOL * 10)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(op @ x))(x), a.sum(0), rtol=RTOL * 10)
    np.testing.assert_allclose(op.as_matrix(), a)


def test_a_scipy_operator_of_functions():
    matvec = lambda x: 2 * x
    op = as_operator(scipy.sparse.linalg.LinearOperator((3, 3), matvec=matvec, rmatvec=matvec, dtype=np.float64))
    np.testing.assert_allclose(op @ np.ones(3, FLOAT), 2 * np.ones(3))
    np.testing.assert_allclose(op.H @ np.ones(3, FLOAT), 2 * np.ones(3))


@pytest.mark.parametrize(
    "op, structure, error, words",
    [
        (3.0, None, TypeError, ["float", "lineax operator", "SciPy"]),
        (None, None, TypeError, ["NoneType"]),
        ({"a": np.eye(2)}, None, TypeError, ["dict"]),
        (lambda x: x, None, ValueError, ["structure"]),
        ([1.0, 2.0], None, ValueError, ["vector of shape (2,)", "DiagonalOperator"]),
        (np.eye(2, dtype=int), None, TypeError, ["astype(float)"]),
        (scipy.sparse.linalg.aslinearoperator(np.eye(3, dtype=int)), None, TypeError, ["floating-point", "int"]),
    ],
)
def test_what_stands_for_none_is_refused(op, structure, error, words):
    with pytest.raises(error) as info:
        as_operator(op, structure)
    for word in words:
        assert word in str(info.value)


def test_operators_pass_through_and_functions_take_their_structure():
    op = MatrixOperator(np.eye(2))
    assert as_operator(op) is op
    made = as_operator(lambda x: {"a": 2 * x["a"]}, {"a": np.ones(2)})
    assert isinstance(made, FunctionOperator)
    assert made.field == "real"
    assert as_operator(lambda x: 2 * x, np.ones(2, COMPLEX)).field == "complex"


def test_a_jacobian_of_lineax_between_trees():
    def fn(x, args):
        return {"s": jnp.sin(x["a"]) * args, "t": jnp.sum(x["b"]) * jnp.ones(1)}

    x = {"a": jnp.zeros(2), "b": jnp.ones(3)}
    op = as_operator(lx.JacobianLinearOperator(fn, x, 2.0))
    assert op.shape == (3, 5)
    expected = np.array([[2.0, 0, 0, 0, 0], [0, 2, 0, 0, 0], [0, 0, 1, 1, 1]])
    np.testing.assert_allclose(op.as_matrix(), expected)
    np.testing.assert_allclose(op.H.as_matrix(), expected.T)
