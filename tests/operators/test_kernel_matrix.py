"""The matrix of a neural tangent kernel is made of all rows, however many are held at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from krylov.operators import Jacobian, kernel_matrix, rows
from tests.operators import networks
from tests.operators.test_jacobian import CHUNKED, WEIGHTS, assert_close, jacobian, quick_jit, reference, slow

QUICK = (networks.not_holomorphic,)


@pytest.mark.parametrize(
    "make", [pytest.param(m, marks=[] if m in QUICK else slow) for m in networks.ALL], ids=lambda m: m.__name__
)
def test_the_matrix_of_every_storage_and_block_size(make, monkeypatch):
    network = make()
    dense = reference(network, WEIGHTS, True)
    expected = dense @ dense.T
    plain = jacobian(network, **CHUNKED)
    if plain.holomorphic:
        n = len(expected) // 2
        expected = expected[:n, :n] + 1j * expected[n:, :n]

    def matrices(network):
        J = jacobian(network, **CHUNKED)
        return [J.cogram().as_matrix(), J.with_storage("dense").cogram().as_matrix()]

    found = quick_jit(matrices, network)
    # Blocks of few rows, of which groups of fewer are differentiated at a time.
    monkeypatch.setattr(kernel_matrix, "_most_held", lambda jacobian: 3)
    monkeypatch.setattr(rows, "_ENTRIES_AT_ONCE", 1)
    not_compiled_before = kernel_matrix.cogram_matrix.__wrapped__
    found += quick_jit(lambda network: [not_compiled_before(jacobian(network, **CHUNKED))], network)
    for matrix in found:
        assert_close(matrix, expected)
        np.testing.assert_allclose(matrix, np.conj(matrix).T, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


@slow
def test_derivatives_of_the_matrix_are_those_of_the_products():
    network = networks.not_holomorphic()

    def size(params, kernel):
        return jnp.sum(kernel(Jacobian(network.f, params, network.samples, center=True, chunk_size=3)).as_matrix() ** 2)

    got, right = (
        jax.jit(jax.grad(size), static_argnums=1)(network.params, kernel)
        for kernel in (lambda J: J.cogram(), lambda J: J @ J.H)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(right), strict=True):
        assert_close(a, b)


def test_leaves_without_entries_take_no_part():
    def f(params, x):
        return {"some": jnp.tanh(x @ params["w"]), "none": jnp.zeros((len(x), 0)) * params["w"].sum()}

    params = {"w": jnp.full((3, 2), 0.1), "none": jnp.zeros((0, 4))}
    for storage in ("recompute", "linearized", "dense"):
        J = Jacobian(f, params, jnp.eye(5, 3), center=True, chunk_size=2, storage=storage)
        rows = J.as_matrix()
        assert rows.shape == (10, 6)
        assert_close(J.gram().as_matrix(), rows.T @ rows)
        assert_close(J.cogram().as_matrix(), rows @ rows.T)
        assert_close(J.gram().diagonal()["w"].ravel(), jnp.sum(rows**2, 0))
