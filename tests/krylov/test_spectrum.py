"""Eigenpairs, densities, traces, determinants and shifts against dense spectra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import krylov
from krylov.coordinates import coordinates_of, multiply_rows
from krylov.operators import Jacobian, MatrixOperator
from tests import networks, problems
from tests.problems import DTYPES, eps, wide

WANTED = {"largest": lambda x: -x, "smallest": lambda x: x, "magnitude": lambda x: -abs(x)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_eigenpairs_of_a_matrix(dtype):
    exact = np.concatenate([np.linspace(-3, 2, 90), [2.5, 2.9, 3.05, -3.2, -3.4, 4]])
    A = problems.hermitian(dtype, exact)
    for which in WANTED if dtype == "complex64" else ["largest"]:
        found = krylov.eigsh(MatrixOperator(A, hermitian=True), 3, which)
        assert bool(found.converged)
        values, vectors = wide(found.values), wide(found.vectors).T
        assert np.allclose(values, sorted(exact, key=WANTED[which])[:3], atol=100 * eps(dtype))
        residuals = np.linalg.norm(wide(A) @ vectors - vectors * values, axis=0)
        assert np.allclose(residuals, found.residual_norms, atol=100 * eps(dtype))
        assert np.all(residuals <= eps(dtype) ** 0.5)
        assert np.linalg.norm(vectors.conj().T @ vectors - np.eye(3)) <= 100 * eps(dtype)
        assert int(found.matvecs) <= 300


def test_eigenpairs_on_mixed_leaves_under_jit():
    J = Jacobian(networks.mixed, networks.mixed_params(), networks.samples(40), center=True)
    found = jax.jit(lambda J: krylov.eigsh(J.gram(), 4))(J)
    c = coordinates_of(J)
    matrix = wide(multiply_rows(J.gram(), jnp.eye(c.size, dtype=c.dtype)))
    assert bool(found.converged)
    assert np.allclose(found.values, np.linalg.eigvalsh(matrix)[::-1][:4], rtol=1e-4)
    vector = jax.tree.map(lambda v: v[0], found.vectors)
    error = jax.tree.map(lambda a, v: a - found.values[0] * v, J.gram() @ vector, vector)
    assert np.linalg.norm(c.flatten(error)) <= 1e-3 * float(found.values[0])


def test_eigenpairs_in_small_and_degenerate_spaces():
    found = krylov.eigsh(np.diag([3.0, 3.0, 3.0, 1.0, 1.0]).astype("float32"), 4)
    assert bool(found.converged) and np.allclose(found.values, [3, 3, 3, 1], atol=1e-5)
    one = krylov.eigsh(np.array([[2.0]], "float32"), 1)
    assert bool(one.converged) and np.allclose(one.values, 2)
    nothing = krylov.eigsh(np.zeros((4, 4), "float32"), 2)
    assert bool(nothing.converged) and np.all(np.asarray(nothing.values) == 0)


def test_eigenvalues_not_reached_are_not_claimed():
    found = krylov.eigsh(problems.hermitian("float32", np.linspace(0, 1, 200)), 5, max_restarts=1)
    assert not bool(found.converged) and np.max(found.residual_norms) > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_density_trace_determinant_and_shift(dtype):
    exact = np.concatenate([np.linspace(0.5, 1, 150), np.linspace(4, 5, 50)])
    op = MatrixOperator(problems.hermitian(dtype, exact), positive=True)
    density = krylov.spectral_density(op, steps=40, vectors=10)
    # The fraction of the upper part: the standard deviation for a projector of rank 50, over the random vectors.
    deviation = np.sqrt(2 * 50 / 10) / 200
    assert abs(float(density.mean(lambda x: (x > 2).astype(x.dtype))) - 0.25) <= 4 * deviation
    grid = jnp.linspace(0, 6, 601)
    smooth = density(grid, 0.2)
    reference = np.mean(np.exp(-((np.asarray(grid)[:, None] - exact) ** 2) / 0.08), 1) / (0.2 * np.sqrt(2 * np.pi))
    assert np.sum(np.abs(smooth - reference)) * 0.01 <= 0.1
    trace = krylov.trace(op)
    assert abs(float(trace.value) - exact.sum()) <= 4 * float(trace.error) + 1e-3
    # Hutchinson's standard error from 20 vectors, with nothing taken out.
    assert 0 < float(trace.error) <= np.sqrt(2 * np.sum(exact**2) / 20)
    # Hutchinson's standard deviation of log A: the root of twice the sum of squares off the diagonal, over vectors.
    determinant = float(krylov.logdet(op, shift=0.1, vectors=40))
    assert abs(determinant - np.log(exact + 0.1).sum()) <= 4 * np.sqrt(2 * np.sum(np.log(exact + 0.1) ** 2) / 40)
    assert float(krylov.suggest_shift(op, 5.0, smallest=0.5, steps=100)) == pytest.approx((5 - 5 * 0.5) / 4, rel=1e-2)
    assert float(krylov.suggest_shift(op, 20.0, smallest=0.5)) == 0


def test_trace_is_exact_on_a_subspace_that_holds_it_and_for_any_square_operator():
    low = problems.hermitian("float32", [5, 3, 1] + [0] * 60)
    found = krylov.trace(low, rank=5, vectors=2)
    assert abs(float(found.value) - 9) <= 1e-4 and float(found.error) <= 1e-4
    general = problems.general("complex64", 40).matrix
    found = krylov.trace(general, vectors=200)
    assert abs(complex(found.value) - np.trace(general)) <= 5 * float(found.error)


def test_shift_keeps_its_promise_on_a_gram():
    J = Jacobian(networks.mixed, networks.mixed_params(), networks.samples(12), center=True)
    op = J.gram()
    shift = float(krylov.suggest_shift(op, 100.0))
    c = coordinates_of(op)
    matrix = wide(multiply_rows(op, jnp.eye(c.size, dtype=c.dtype)))
    assert 50 <= np.linalg.cond(matrix + shift * np.eye(c.size)) <= 105


def test_bad_input_is_named():
    square, oblong = np.eye(3, dtype="float32"), np.ones((3, 2), "float32")
    for call, words in (
        (lambda: krylov.eigsh(square, 4), "eigsh.*4.*3"),
        (lambda: krylov.eigsh(square, 1, "LM"), "which.*LM"),
        (lambda: krylov.trace(oblong), "trace.*square"),
        (lambda: krylov.suggest_shift(square, 1.0), "condition.*1.0"),
        (lambda: krylov.spectral_density(square, steps=0), "steps"),
    ):
        with pytest.raises(ValueError, match=f"(?s){words}"):
            call()


@pytest.mark.parametrize("n", [1, 2, 6])
def test_eigsh_finds_all_eigenpairs_where_all_are_asked_for(n):
    M = np.random.default_rng(n).normal(size=(n, n))
    A = M @ M.T + np.eye(n)
    found = krylov.eigsh(jnp.asarray(A), n, "smallest")
    V, values = np.asarray(found.vectors, float), np.asarray(found.values, float)
    assert found.converged
    np.testing.assert_allclose(values, np.linalg.eigvalsh(A), rtol=1e-4)
    np.testing.assert_allclose(V @ A, values[:, None] * V, atol=1e-4 * values.max())
    np.testing.assert_allclose(V @ V.T, np.eye(n), atol=1e-4)
