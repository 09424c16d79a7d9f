"""What a Jacobian keeps changes no product: all storages against dense differentiation and against each other."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from krylov.operators import Jacobian, check_operator
from krylov.operators.storage import Linearized
from tests.operators import networks
from tests.operators.test_jacobian import CHUNKED, WEIGHTS, assert_close, jacobian, quick_jit, reference, slow
from tests.operators.zoo import flat, vector

STORAGES = ("recompute", "linearized", "dense")
KEPT = ("linearized", "dense")
QUICK = (networks.not_holomorphic, networks.many_outputs)


@pytest.mark.parametrize(
    "make", [pytest.param(m, marks=[] if m in QUICK else slow) for m in networks.ALL], ids=lambda m: m.__name__
)
def test_all_products_of_every_storage(make, rng):
    network = make()
    dense = reference(network, WEIGHTS, True)
    plain = jacobian(network)
    v, y = vector(rng, plain.in_structure()), vector(rng, plain.out_structure())

    def forms(network, v, y):
        out = {}
        for storage in KEPT:
            J = jacobian(network, storage=storage, **CHUNKED)
            S = J.gram()
            out[storage] = (J @ v, J.H @ y, S @ v, J.cogram() @ y, S.diagonal(), S.as_matrix())
        return out

    for storage, (forward, backward, gram, cogram, diagonal, matrix) in quick_jit(forms, network, v, y).items():
        assert_close(flat(forward), dense @ flat(v), name=storage)
        assert_close(flat(backward), dense.T @ flat(y), name=storage)
        assert_close(flat(gram), dense.T @ (dense @ flat(v)), name=storage)
        assert_close(flat(cogram), dense @ (dense.T @ flat(y)), name=storage)
        n = len(matrix)
        expected = dense.T @ dense
        expected = expected[:n, :n] + 1j * expected[n : 2 * n, :n] if plain.holomorphic else expected
        assert_close(matrix, expected, name=storage)
        found = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(diagonal)])
        assert_close(found, np.diagonal(expected), name=storage)


@pytest.mark.parametrize("storage", KEPT)
def test_derivatives_in_parameters_weights_and_samples(storage, rng):
    network = networks.not_holomorphic()
    J = jacobian(network)
    v, y = vector(rng, J.in_structure()), vector(rng, J.out_structure())

    def loss(params, samples, weights, storage):
        J = Jacobian(network.f, params, samples, weights=weights, center=True, chunk_size=3, storage=storage)
        step = J.gram() @ (J.H @ y)
        forward = J @ v
        return sum(jnp.sum(jnp.abs(x) ** 2) for x in jax.tree.leaves((step, forward)))

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)
    weights = jnp.asarray(WEIGHTS)
    expected = gradient(network.params, network.samples, weights, "recompute")
    found = gradient(network.params, network.samples, weights, storage)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(flat(a), flat(b))


@slow
@pytest.mark.parametrize("storage", KEPT)
def test_checks_pass_on_every_storage(storage):
    J = jacobian(networks.mixed_tree(), storage=storage, **CHUNKED)
    for op in (J, J.gram(), J.cogram()):
        check_operator(op, jax.random.key(0))


@pytest.mark.parametrize(
    "storage", [pytest.param("recompute", marks=slow), "linearized", pytest.param("dense", marks=slow)]
)
def test_several_products_are_those_of_each(storage, rng):
    J = jacobian(networks.mixed_tree(), storage=storage, **CHUNKED)
    vectors = [vector(rng, J.in_structure()) for _ in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *vectors)
    found = J.gram().mm(stacked)
    for i, v in enumerate(vectors):
        expected = flat(J.gram() @ v)
        assert_close(flat(jax.tree.map(lambda leaf, i=i: leaf[i], found)), expected)


@pytest.mark.parametrize("storage, evaluations", [("recompute", 4), pytest.param("linearized", 0, marks=slow)])
def test_several_products_share_one_linearization_of_each_chunk(storage, evaluations):
    counted = []

    def f(params, x):
        h = jnp.tanh(x @ params)
        jax.debug.callback(lambda _: counted.append(1), h[0, 0])
        return h.sum(-1)

    J = Jacobian(f, jnp.ones((3, 2)), jnp.ones((8, 3)), chunk_size=2, center=True, storage=storage)
    for op in (J.gram(), J, J.H):
        jax.effects_barrier()
        counted.clear()
        stack = jax.tree.map(lambda s: jnp.ones((5, *s.shape)), op.in_structure())
        jax.block_until_ready(jax.jit(lambda op, stack: op.mm(stack))(op, stack))
        jax.effects_barrier()
        assert len(counted) == evaluations, op


def test_storage_can_be_changed_and_comes_back():
    J = jacobian(networks.mixed_tree(), **CHUNKED)
    for storage in (*KEPT, "recompute"):
        other = J.with_storage(storage)
        assert other.storage.name == storage
        np.testing.assert_allclose(flat(other.gram() @ J.params), flat(J.gram() @ J.params), rtol=1e-4)


def test_an_unknown_storage_is_refused():
    with pytest.raises(ValueError, match="there is no such storage"):
        jacobian(networks.real(), storage="sparse")


def test_residuals_that_depend_on_no_sample_are_kept_once():
    """Parameters among the residuals of a deep network must not be stacked chunk by chunk."""
    width, count = 64, 32
    params = {"deep": [jnp.eye(width) + i for i in range(3)], "out": jnp.ones(width)}

    @jax.jit
    def f(params, x):
        for kernel in params["deep"]:
            x = jnp.tanh(jax.jit(lambda kernel, x: x @ kernel)(kernel, x))
        return x @ params["out"]

    samples = jnp.linspace(-1, 1, count * width).reshape(count, width)
    storage = Jacobian(f, params, samples, chunk_size=1, storage="linearized").storage
    assert isinstance(storage, Linearized)
    stacked = sum(leaf.size for leaf in storage.by_chunk)
    assert stacked <= 8 * count * width  # activations: a copy of the parameters would be 64 times as much
    assert sum(leaf.size for leaf in storage.once) <= 4 * width * width


@pytest.mark.parametrize("storage", KEPT)
def test_new_values_compile_nothing(storage, count_compilations):
    network = networks.mixed_tree()

    def step(network):
        J = jacobian(network, center=True, chunk_size=3, storage=storage)
        return jax.block_until_ready(J.gram() @ network.trained)

    step(network)
    doubled = jax.tree.map(lambda p: 2 * p if eqx.is_inexact_array(p) else p, network.params)
    other = jax.block_until_ready(network._replace(params=doubled))
    between = count_compilations()
    step(other)
    assert count_compilations() == between
