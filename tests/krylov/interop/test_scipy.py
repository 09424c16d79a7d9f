"""Operators to SciPy and back."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg

import krylov
from krylov.interop.scipy import from_scipy, to_scipy
from krylov.operators import MatrixOperator
from tests import networks, problems
from tests.problems import random_vector


def test_products_and_adjoint_products_are_those_of_the_matrix():
    A = random_vector("complex64", 4, 6)
    op = to_scipy(MatrixOperator(A))
    x, y = random_vector("complex64", 6), random_vector("complex64", 4)
    X, Y = random_vector("complex64", 6, 3), random_vector("complex64", 4, 3)
    assert op.shape == (4, 6) and op.dtype == np.complex64
    for got, right in ((op @ x, A @ x), (op.H @ y, A.conj().T @ y), (op @ X, A @ X), (op.H @ Y, A.conj().T @ Y)):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)


def test_a_real_operator_takes_complex_vectors():
    A = random_vector("float32", 4, 6)
    op = to_scipy(MatrixOperator(A))
    x, Y = random_vector("complex64", 6), random_vector("complex64", 4, 3)
    for got, right in ((op @ x, A @ x), (op.H @ Y, A.T @ Y)):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)


def test_r_linear_operators_act_on_real_and_imaginary_parts():
    params = networks.mixed_params()
    S = krylov.Jacobian(networks.mixed, params, networks.samples(20)).gram()
    op = to_scipy(S)
    x = random_vector(op.dtype, op.shape[1])
    np.testing.assert_allclose(op @ x, np.asarray(S.as_matrix()) @ x, rtol=1e-3, atol=1e-4)
    largest = scipy.sparse.linalg.eigsh(op, k=1, return_eigenvectors=False)[0]
    np.testing.assert_allclose(largest, np.linalg.eigvalsh(np.asarray(S.as_matrix(), float))[-1], rtol=1e-4)


def test_there_and_back():
    matrix = scipy.sparse.csr_array(problems.positive_tridiagonal("float32").matrix)
    A = from_scipy(matrix, positive=True)
    assert A.is_positive and A.is_hermitian
    b = np.ones(10, "float32")
    np.testing.assert_allclose(krylov.solve(A, b).x, scipy.sparse.linalg.spsolve(matrix.tocsc(), b), atol=1e-5)
    host = scipy.sparse.linalg.aslinearoperator(matrix)
    for claims in ({}, {"hermitian": True}, {"positive": True}):
        op = from_scipy(host, **claims)
        assert op.is_hermitian == bool(claims) and op.is_positive == ("positive" in claims)
        np.testing.assert_allclose(op @ jnp.asarray(b), matrix @ b, rtol=1e-5)
        np.testing.assert_allclose(op.rmv(jnp.asarray(b)), matrix @ b, rtol=1e-5)
    with pytest.raises(TypeError, match="from_scipy: got ndarray"):
        from_scipy(np.eye(3))
