"""Dense, sparse and diagonal operators: what they take, what they refuse, what they know."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax.experimental import sparse

from krylov.operators import DiagonalOperator, MatrixOperator

FLOAT = np.dtype(jnp.result_type(float))
DENSE = np.array([[2.0, 0, 1], [0, 0, 0], [1, 0, -3]])


@pytest.mark.parametrize(
    "make",
    [
        np.asarray,
        jnp.asarray,
        lambda a: a.astype(np.float32),
        np.asfortranarray,
        lambda a: a[::-1][::-1],
        scipy.sparse.csr_array,
        scipy.sparse.csc_matrix,
        scipy.sparse.coo_array,
        scipy.sparse.dia_array,
        scipy.sparse.lil_matrix,
        scipy.sparse.dok_array,
        scipy.sparse.bsr_array,
        lambda a: sparse.BCOO.fromdense(jnp.asarray(a)),
        lambda a: sparse.BCSR.fromdense(jnp.asarray(a)),
        lambda a: sparse.CSR.fromdense(jnp.asarray(a)),
        lambda a: sparse.COO.fromdense(jnp.asarray(a)),
        lambda a: sparse.BCOO.fromdense(jnp.asarray(a), nse=9),
    ],
)
def test_any_kind_of_matrix_is_taken(make):
    op = MatrixOperator(make(DENSE))
    x = np.array([1.0, 2, 3], op.in_structure().dtype)
    products = eqx.filter_jit(lambda op, x: (op @ x, op.H @ x, op.as_matrix(), op.diagonal()))
    for found, expected in zip(products(op, x), (DENSE @ x, DENSE.T @ x, DENSE, np.diagonal(DENSE))):
        np.testing.assert_allclose(found, expected)


def test_duplicate_and_unsorted_entries_of_a_sparse_matrix_add_up():
    data, rows, columns = [1.0, 2, 3, 4], [2, 0, 0, 2], [2, 1, 1, 2]
    dense = np.zeros((3, 3))
    np.add.at(dense, (rows, columns), data)
    by_scipy = scipy.sparse.coo_array((data, (rows, columns)), shape=(3, 3))
    by_jax = sparse.BCOO((jnp.array(data), jnp.array([rows, columns]).T), shape=(3, 3))
    for matrix in (by_scipy, by_jax):
        op = MatrixOperator(matrix)
        np.testing.assert_allclose(op @ np.ones(3, FLOAT), dense @ np.ones(3))
        np.testing.assert_allclose(op.rmv(np.ones(3, FLOAT)), dense.T @ np.ones(3))
        np.testing.assert_allclose(op.diagonal(), np.diagonal(dense))
        np.testing.assert_allclose(op.as_matrix(), dense)


@pytest.mark.parametrize("make", [scipy.sparse.csr_array, lambda a: sparse.BCOO.fromdense(jnp.asarray(a))])
def test_a_wide_sparse_matrix(make):
    op = MatrixOperator(make(DENSE[:2]))
    np.testing.assert_allclose(op @ np.ones(3, FLOAT), DENSE[:2].sum(1))
    np.testing.assert_allclose(op.H @ np.ones(2, FLOAT), DENSE[:2].sum(0))
    np.testing.assert_allclose(op.as_matrix(), DENSE[:2])


def test_an_empty_sparse_matrix():
    op = MatrixOperator(scipy.sparse.csr_array((3, 3)))
    np.testing.assert_array_equal(op @ np.ones(3, FLOAT), np.zeros(3))
    np.testing.assert_array_equal(op.diagonal(), np.zeros(3))


def test_vmap_over_the_entries_of_a_sparse_matrix():
    pattern = sparse.BCOO.fromdense(jnp.asarray(DENSE))
    x = np.ones(3, FLOAT)

    def product(data):
        return MatrixOperator(sparse.BCOO((data, pattern.indices), shape=(3, 3))) @ x

    found = jax.vmap(product)(jnp.stack([pattern.data, 2 * pattern.data]))
    np.testing.assert_allclose(found, [DENSE.sum(1), 2 * DENSE.sum(1)])


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: np.eye(3, dtype=int), TypeError, ["floating-point", "int", "astype"]),
        (lambda: scipy.sparse.csr_array(np.eye(3, dtype=int)), TypeError, ["floating-point", "int64", "astype"]),
        (lambda: sparse.BCOO.fromdense(jnp.eye(3, dtype=int)), TypeError, ["floating-point", "astype"]),
        (lambda: np.eye(3, dtype=bool), TypeError, ["floating-point", "bool"]),
        (lambda: np.ones(3), ValueError, ["two axes", "(3,)"]),
        (lambda: np.ones((2, 3, 3)), ValueError, ["two axes", "(2, 3, 3)"]),
        (lambda: sparse.BCOO.fromdense(jnp.ones((3, 3, 3))), ValueError, ["two axes"]),
        (lambda: sparse.BCOO.fromdense(jnp.ones((3, 3)), n_batch=1), ValueError, ["no batch"]),
        (lambda: sparse.BCOO.fromdense(jnp.ones((3, 3)), n_dense=1), ValueError, ["no dense"]),
    ],
)
def test_what_is_no_matrix_is_refused(make, error, words):
    with pytest.raises(error, match="MatrixOperator") as info:
        MatrixOperator(make())
    for word in words:
        assert word in str(info.value)


def test_structures_must_fit_the_matrix():
    with pytest.raises(ValueError, match=r"shape \(3, 3\) cannot map") as info:
        MatrixOperator(DENSE, in_structure=np.ones(4, np.float32))
    assert "float32[4]" in str(info.value)
    with pytest.raises(TypeError, match="in_structure must have real or complex floating-point"):
        MatrixOperator(DENSE, in_structure=np.ones(3, int))
    wide = MatrixOperator(DENSE[:2], in_structure={"a": np.ones((3, 1), FLOAT)})
    assert wide.out_structure().shape == (2,)


@pytest.mark.parametrize("claim", ["hermitian", "positive"])
def test_claims_need_a_square_matrix(claim):
    with pytest.raises(ValueError, match="maps a space to itself") as info:
        MatrixOperator(DENSE[:2], **{claim: True})
    assert f"{FLOAT}[3]" in str(info.value) and f"{FLOAT}[2]" in str(info.value)
    with pytest.raises(ValueError, match="maps a space to itself"):
        MatrixOperator(DENSE, out_structure={"a": np.ones(3, FLOAT)}, in_structure=np.ones(3, FLOAT), **{claim: True})


def test_between_real_vectors_only_the_real_part_of_a_complex_matrix_acts(rng):
    a = rng.normal(size=(2, 2)) + 1j * rng.normal(size=(2, 2))
    op = MatrixOperator(a, in_structure=np.ones(2, FLOAT))
    assert op.field == "real"
    np.testing.assert_allclose(op @ np.ones(2, FLOAT), a.real.sum(1), rtol=1e-6)
    np.testing.assert_allclose(op.rmv(np.ones(2, FLOAT)), a.real.sum(0), rtol=1e-6)
    np.testing.assert_allclose(op.as_matrix(), a.real, rtol=1e-6)
    np.testing.assert_allclose(op.diagonal(), np.diagonal(a).real, rtol=1e-6)


def test_full_precision_is_asked_for():
    op = MatrixOperator(np.eye(2, dtype=np.float32))
    jaxpr = str(jax.make_jaxpr(op.mv)(np.ones(2, np.float32)))
    assert "HIGHEST" in jaxpr


def test_diagonal_claims():
    assert DiagonalOperator(np.array([0.0, 1])).is_positive
    assert not DiagonalOperator(np.array([-1.0, 1])).is_positive
    assert DiagonalOperator(np.array([-1.0, 1])).is_hermitian
    assert not DiagonalOperator(np.array([np.nan, 1])).is_positive
    assert not DiagonalOperator(np.array([1j, 1])).is_hermitian
    assert DiagonalOperator([np.array([1.0]), np.array([2.0])]).is_positive
    assert not DiagonalOperator([np.array([1.0]), np.array([-2.0])]).is_positive


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
def test_known_entries_are_looked_at_inside_jit_and_traced_ones_are_not(as_array):
    entries, claims = as_array([1.0, 2.0]), []

    @jax.jit
    def known(x):
        op = DiagonalOperator(entries)
        claims.append(op.is_positive)
        return op @ x

    @jax.jit
    def traced(entries, x):
        op = DiagonalOperator(entries)
        claims.append(op.is_positive)
        claims.append(DiagonalOperator(entries, positive=True).is_positive)
        return op @ x

    x = jnp.ones(2)
    np.testing.assert_allclose(known(x), [1, 2])
    np.testing.assert_allclose(traced(entries, x), [1, 2])
    assert claims == [True, False, True]


@pytest.mark.parametrize(
    "entries, structure, options, words",
    [
        (np.ones(2), np.ones(3), {}, ["do not fit", "[2]", "[3]"]),
        (np.ones(2), {"a": np.ones(2)}, {}, ["do not fit"]),
        (np.ones(2, complex), np.ones(2), {}, ["do not fit", "complex diagonal needs complex vectors"]),
        (np.ones(2, complex), None, {"positive": True}, ["positive=True needs real entries"]),
    ],
)
def test_a_diagonal_that_does_not_fit_is_refused(entries, structure, options, words):
    with pytest.raises(ValueError, match="DiagonalOperator") as info:
        DiagonalOperator(entries, structure, **options)
    for word in words:
        assert word in str(info.value)


def test_a_diagonal_of_integers_is_refused():
    with pytest.raises(TypeError, match="entries must have real or complex floating-point leaves"):
        DiagonalOperator(np.arange(3))


def test_the_diagonal_comes_in_the_dtype_of_the_vectors():
    op = DiagonalOperator(np.array([1.0, 2], np.float32), np.zeros(2, np.complex64))
    assert op.diagonal().dtype == np.complex64
    assert (op @ np.ones(2, np.complex64)).dtype == np.complex64


def test_operators_are_arguments_of_jit_and_new_values_trace_nothing():
    traces = []

    @eqx.filter_jit
    def product(op, x):
        traces.append(op)
        return op @ x

    for scale in (1.0, 2.0):
        found = product(MatrixOperator(scale * DENSE, hermitian=True), jnp.ones(3))
        np.testing.assert_allclose(found, scale * DENSE.sum(1))
    assert len(traces) == 1
