"""The square operators of a Jacobian: algebra, diagonals and matrices from rows, transformations, flat memory."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from krylov.operators import IdentityOperator, Jacobian, rows, shifted, split_real
from tests.operators import networks
from tests.operators.networks import FLOAT, NUM_SAMPLES, array
from tests.operators.test_jacobian import CHUNKED, WEIGHTS, assert_close, jacobian, quick_jit, reference, slow
from tests.operators.zoo import flat, normal, vector


@pytest.mark.parametrize("dtype", [FLOAT, np.dtype(jnp.bfloat16)], ids=str)
@pytest.mark.parametrize("center", [False, True])
def test_rows_are_summed_in_groups_that_need_not_divide_the_samples(center, dtype, monkeypatch):
    n, p = 301, 3
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, p)).astype(np.float32) + 2
    weights = rng.uniform(size=n)
    J = Jacobian(lambda p, x: x.astype(p.dtype) @ p, np.zeros(p, dtype), x, weights=weights, center=center)
    w = weights / weights.sum()
    exact = x - center * (w @ x)
    exact = (exact * w[:, None]).T @ exact
    monkeypatch.setattr(rows, "_ENTRIES_AT_ONCE", 8 * p)
    S = J.gram()
    tolerance = 30 * float(jnp.finfo(dtype).eps) * np.abs(exact).max()
    assert S.as_matrix().dtype == S.diagonal().dtype == dtype
    np.testing.assert_allclose(np.asarray(S.as_matrix(), np.float64), exact, atol=tolerance)
    np.testing.assert_allclose(np.asarray(S.diagonal(), np.float64), np.diagonal(exact), atol=tolerance)


@pytest.mark.parametrize(
    "make", [networks.not_holomorphic, pytest.param(networks.real, marks=slow)], ids=lambda m: m.__name__
)
def test_the_dense_matrix_agrees_with_products_column_by_column(make):
    S = jacobian(make(), **CHUNKED).gram()
    by_rows, by_columns = quick_jit(lambda S: (S.as_matrix(), shifted(S, 0.0).as_matrix()), S)
    assert_close(by_rows, by_columns)


@pytest.mark.parametrize(
    "make", [networks.mixed_tree, pytest.param(networks.holomorphic, marks=slow)], ids=lambda m: m.__name__
)
def test_diagonal_blocks_are_those_of_the_matrix(make):
    S = jacobian(make(), **CHUNKED).gram()
    blocks, matrix = quick_jit(lambda S: (S.diagonal_blocks(), S.as_matrix()), S)
    leaves = jax.tree.leaves(S.in_structure())
    start, imaginary = 0, sum(s.size for s in leaves)
    for s, block in zip(leaves, jax.tree.leaves(blocks), strict=True):
        places = list(range(start, start + s.size))
        start += s.size
        if S.field == "real" and np.issubdtype(s.dtype, np.complexfloating):
            places += range(imaginary, imaginary + s.size)
            imaginary += s.size
        assert_close(block, matrix[np.ix_(places, places)])


def test_algebra_of_gram_operators(rng):
    network = networks.mixed_tree()
    J = jacobian(network, **CHUNKED)
    S = J.gram()
    dense = reference(network, WEIGHTS, True)
    gram = dense.T @ dense
    v, y = vector(rng, J.in_structure()), vector(rng, J.out_structure())
    regularised = S + 0.5 * IdentityOperator(S.in_structure())
    assert regularised.is_positive and regularised.field == "real"
    assert (J.H @ J).is_positive and (J @ J.H).is_positive and (2.0 * S).is_positive

    def forms(S, J, v, y):
        return {
            "shifted": (S + 0.5 * IdentityOperator(S.in_structure())) @ v,
            "composed": (J.H @ J) @ v,
            "cogram composed": (J @ J.H) @ y,
            "scaled": (2.0 * S) @ v,
            "square": (S @ S) @ v,
            "transpose": S.T @ v,
            "real": S.as_real() @ (S.as_real() @ split_real(v)),
            "diagonal": shifted(S, 0.5).diagonal(),
        }

    found = quick_jit(forms, S, J, v, y)
    assert_close(flat(found["shifted"]), gram @ flat(v) + 0.5 * flat(v))
    assert_close(flat(found["composed"]), gram @ flat(v))
    assert_close(flat(found["cogram composed"]), dense @ (dense.T @ flat(y)))
    assert_close(flat(found["scaled"]), 2 * gram @ flat(v))
    assert_close(flat(found["square"]), gram @ gram @ flat(v))
    assert_close(flat(found["real"]), gram @ gram @ flat(v))
    diagonal = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(found["diagonal"])])
    assert_close(diagonal, np.diagonal(gram) + 0.5)


def test_transposes_and_derivatives_in_the_vector(rng):
    network = networks.not_holomorphic()
    J = jacobian(network, **CHUNKED)
    gram = reference(network, WEIGHTS, True)
    gram = gram.T @ gram
    v, u = vector(rng, J.in_structure()), vector(rng, J.in_structure())

    def forms(S, v, u):
        inner = lambda v: jnp.vdot(networks.ravel_real(u), networks.ravel_real(S @ v))
        return {
            "transpose": jax.linear_transpose(S.mv, v)(u)[0],
            "pushed": jax.jvp(S.mv, (v,), (u,))[1],
            "gradient": jax.grad(inner)(v),
            "batch": jax.vmap(S.mv)(jax.tree.map(lambda a, b: jnp.stack([a, b]), v, u)),
        }

    found = quick_jit(forms, J.gram(), v, u)
    conj = lambda tree: jax.tree.map(jnp.conj, tree)
    assert_close(flat(conj(found["transpose"])), gram @ flat(conj(u)))
    assert_close(flat(found["pushed"]), gram @ flat(u))
    assert_close(flat(conj(found["gradient"])), gram @ flat(u))  # JAX's gradients are conjugate
    assert_close(flat(jax.tree.map(lambda x: x[1], found["batch"])), gram @ flat(u))


@slow
def test_diagonals_and_matrices_can_be_differentiated():
    x, p = networks.spins(), array(1, FLOAT, 3)
    f = lambda p, x: jnp.sin(x @ p)

    def of_operator(p):
        S = Jacobian(f, p, x, center=True, chunk_size=3).gram()
        return jnp.sum(jnp.sin(S.diagonal())) + jnp.sum(S.as_matrix() ** 2)

    def of_dense(p):
        rows = jnp.cos(x @ p)[:, None] * x
        rows = (rows - rows.mean(0)) / np.sqrt(NUM_SAMPLES)
        S = rows.T @ rows
        return jnp.sum(jnp.sin(jnp.diagonal(S))) + jnp.sum(S**2)

    assert_close(quick_jit(jax.grad(of_operator), p), jax.grad(of_dense)(p))


def test_both_pass_through_jit_as_arguments(rng):
    traces = []

    @eqx.filter_jit
    def product(op, v):
        traces.append(None)
        return op @ v

    v = jnp.asarray(normal(rng, FLOAT, 3))
    x = networks.spins()
    for scale in (1.0, 2.0):
        J = Jacobian(lambda p, x: jnp.sin(x @ p), scale * array(1, FLOAT, 3), x, center=True, chunk_size=3)
        rows = np.cos(x @ J.params)[:, None] * np.asarray(x)
        rows = (rows - rows.mean(0)) / np.sqrt(NUM_SAMPLES)
        assert_close(product(J.gram(), v), rows.T @ (rows @ v))
    assert len(traces) == 1


@slow
@pytest.mark.parametrize("center", [True, False])
def test_memory_stays_flat_in_every_derivative(center):
    chunks, size, width = 64, 32, 64
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(normal(rng, FLOAT, 8, width)), "v": jnp.asarray(normal(rng, FLOAT, width))}
    x = jnp.asarray(normal(rng, FLOAT, chunks * size, 8))
    vector = jax.tree.map(jnp.ones_like, params)

    def f(params, x):
        h = x @ params["w"]
        for _ in range(6):
            h = jnp.tanh(h) * params["v"]
        return h.sum(-1)

    def product(params, v):
        return Jacobian(f, params, x, center=center, chunk_size=size).gram() @ v

    def norm(params, v):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(product(params, v)))

    def temporary(f):
        return jax.jit(f).lower(params, vector).compile().memory_analysis().temp_size_in_bytes

    own = temporary(product)
    assert own < 0.2 * chunks * size * width * 6 * FLOAT.itemsize  # far from all activations
    for derivative in (
        lambda p, v: jax.linear_transpose(lambda v: product(p, v), v)(v),
        lambda p, v: jax.grad(norm, 1)(p, v),
        lambda p, v: jax.grad(norm, 0)(p, v),
    ):
        assert temporary(derivative) <= 2.5 * own


@slow
def test_precision_of_single_precision_grams():
    # The gram matrix of a network in single precision is symmetric to its rounding.
    network = networks.module_as_params()
    single = lambda tree: jax.tree.map(lambda x: x.astype(np.float32) if eqx.is_inexact_array(x) else x, tree)
    J = Jacobian(network.f, single(network.params), single(network.samples), center=True, chunk_size=2)
    columns = quick_jit(lambda S: shifted(S, 0.0).as_matrix(), J.gram())
    assert np.abs(columns - columns.T).max() < 20 * float(jnp.finfo(np.float32).eps) * np.abs(columns).max()


@pytest.mark.x64_only
def test_single_precision_agrees_with_double_where_a_layer_is_normalised():
    # jaxlib 0.10.2 makes wrong code of the batched pull-back of this network, in single precision on CPUs.
    rng = np.random.default_rng(0)
    params = {"embed": rng.normal(size=(4, 32)), "head": rng.normal(size=(32, 64)) / 6}
    samples = rng.choice([-1.0, 1.0], (256, 36))

    def f(params, x):
        h = x.reshape(-1, 9, 4) @ params["embed"]
        h = h - h.mean(-1, keepdims=True)
        h = h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6)
        out = h.mean(1) @ params["head"]
        return jnp.sum(out[:, 0::2] + 1j * out[:, 1::2], axis=-1)

    outputs = rng.normal(size=(2, 256)) + 1j * rng.normal(size=(2, 256))

    def products(dtype):
        cast = jax.tree.map(lambda x: jnp.asarray(x, dtype), (params, samples))
        J = Jacobian(f, *cast, center=True)
        batch = jnp.asarray(outputs, J.out_structure().dtype)
        return J.gram() @ cast[0], J.H.mm(batch), jax.vmap(lambda y: J.cogram() @ y)(batch)

    pairs = zip(jax.tree.leaves(products(np.float32)), jax.tree.leaves(products(np.float64)), strict=True)
    for single, double in pairs:
        np.testing.assert_allclose(single, double, atol=1e-5 * np.abs(double).max())
