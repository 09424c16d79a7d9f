"""The Jacobian of every kind of network against dense differentiation, its options, its errors, its compile counts."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import krylov
from krylov.operators import Jacobian, split_real
from krylov.operators.linearization import LinearizationError
from tests.operators import networks
from tests.operators.networks import COMPLEX, EPS, FLOAT, NUM_SAMPLES, array, dense_jacobian
from tests.operators.zoo import flat, is_complex, normal, vector

# What is compiled once and run once is not worth optimising.
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
WEIGHTS = np.array([0.5, 2, 0, 1, 3, 0, 0.25])
slow = pytest.mark.slow
CHUNKED = dict(weights=WEIGHTS, center=True, chunk_size=3)


def quick_jit(f, *args):
    dynamic, static = eqx.partition(args, eqx.is_array)
    return jax.jit(lambda dynamic: f(*eqx.combine(dynamic, static)), compiler_options=_QUICK)(dynamic)


def assert_close(got, expected, factor=1.0, name=""):
    """Flat vectors or matrices, to some thousand roundings of the largest entry."""
    got, expected = np.asarray(got), np.asarray(expected)
    tolerance = 1000 * factor * EPS * max(1e-3, np.max(np.abs(expected), initial=0))
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance, err_msg=name)


def jacobian(network, **options):
    return Jacobian(network.f, network.params, network.samples, **network.options, **options)


def reference(network, weights=None, center=False):
    weights = jnp.ones(NUM_SAMPLES, FLOAT) if weights is None else jnp.asarray(weights, FLOAT)
    dense = quick_jit(lambda p, x: dense_jacobian(network, p, x, weights, center), network.trained, network.samples)
    return np.asarray(dense, np.float64)


def signs(structure):
    """Of conjugation on `flat` vectors."""
    return np.sign(flat(jax.tree.map(lambda s: np.full(s.shape, 1 - 1j if is_complex(s) else 1), structure)))


QUICK = (networks.holomorphic, networks.not_holomorphic, networks.mixed_tree, networks.many_outputs)


@pytest.mark.parametrize("options", [pytest.param({}, id="plain", marks=slow), pytest.param(CHUNKED, id="chunked")])
@pytest.mark.parametrize(
    "make", [pytest.param(m, marks=[] if m in QUICK else slow) for m in networks.ALL], ids=lambda m: m.__name__
)
def test_all_products_of_every_network(make, options, rng):
    network = make()
    dense = reference(network, options.get("weights"), options.get("center", False))

    def forms(network, v, y):
        J = jacobian(network, **options)
        S, T = J.gram(), J.cogram()
        return {
            "J @ v": J @ v,
            "J.H @ y": J.H @ y,
            "J.T @ y": J.T @ y,
            "S @ v": S @ v,
            "T @ y": T @ y,
            "J.as_real() @ v": (J.as_real().as_matrix() if J.shape[1] < 12 else jnp.zeros(())),
            "S diagonal": S.diagonal(),
            "S matrix": S.as_matrix(),
        }

    J = jacobian(network)
    ins, outs = J.in_structure(), J.out_structure()
    v, y = vector(rng, ins), vector(rng, outs)
    found = quick_jit(forms, network, v, y)
    assert jax.tree.structure(found["J @ v"]) == jax.tree.structure(outs)
    assert jax.tree.structure(found["J.H @ y"]) == jax.tree.structure(ins)
    gram = dense.T @ dense
    plain = gram
    if J.holomorphic:
        n = len(gram) // 2
        plain = gram[:n, :n] + 1j * gram[n:, :n]
    for name, expected in {
        "J @ v": dense @ flat(v),
        "J.H @ y": dense.T @ flat(y),
        "J.T @ y": signs(ins) * (dense.T @ (signs(outs) * flat(y))),
        "S @ v": gram @ flat(v),
        "T @ y": dense @ (dense.T @ flat(y)),
    }.items():
        assert_close(flat(found[name]), expected, name=name)
    if J.shape[1] < 12:
        assert_close(found["J.as_real() @ v"], dense)
    assert_close(found["S matrix"], plain, name="S matrix")
    diagonal = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(found["S diagonal"])])
    assert_close(diagonal, np.diagonal(plain), name="S diagonal")
    splits = J.field == "real" and any(map(is_complex, jax.tree.leaves(ins)))
    assert jax.tree.structure(found["S diagonal"]) == jax.tree.structure(split_real(ins) if splits else ins)


@pytest.mark.parametrize("center", [pytest.param(False, marks=slow), True])
@pytest.mark.parametrize(
    "make", [networks.mixed_tree, pytest.param(networks.many_outputs, marks=slow)], ids=lambda m: m.__name__
)
def test_chunk_sizes_do_not_matter(make, center, rng):
    network = make()
    dense = reference(network, WEIGHTS, center)
    J = jacobian(network)
    v, y = vector(rng, J.in_structure()), vector(rng, J.out_structure())

    def products(network, v, y):
        out = []
        for chunk_size in (1, 2, NUM_SAMPLES, np.int64(4), 100):
            J = jacobian(network, weights=WEIGHTS, center=center, chunk_size=chunk_size)
            out.append((J @ v, J.H @ y, J.gram() @ v))
        return out

    for forward, backward, gram in quick_jit(products, network, v, y):
        assert_close(flat(forward), dense @ flat(v))
        assert_close(flat(backward), dense.T @ flat(y))
        assert_close(flat(gram), dense.T @ (dense @ flat(v)))


def test_eager_products_and_facts(rng):
    network = networks.mixed_tree()
    J = jacobian(network, **CHUNKED)
    dense = reference(network, WEIGHTS, True)
    v, y = vector(rng, J.in_structure()), vector(rng, J.out_structure())
    S, T = J.gram(), J.cogram()  # each product is compiled on its own here, as users run it
    assert J.shape == (NUM_SAMPLES, 9) and S.shape == (9, 9) and T.shape == (NUM_SAMPLES, NUM_SAMPLES)
    assert J.field == S.field == T.field == "real"
    assert S.is_positive and S.is_hermitian and T.is_positive and T.is_hermitian
    assert S.H is S and not J.is_hermitian
    for found, expected in [
        (J @ v, dense @ flat(v)),
        (J.rmv(y), dense.T @ flat(y)),
        (S @ v, dense.T @ (dense @ flat(v))),
        (T @ y, dense @ (dense.T @ flat(y))),
    ]:
        assert_close(flat(found), expected)


def test_ignored_leaves_are_none_and_modules_keep_their_kind():
    J = jacobian(networks.mixed_tree())
    structure = J.in_structure()
    assert {k for k, leaf in structure.items() if leaf is None} == {"frozen", "index", "power", "none", "activation"}
    model = jacobian(networks.module_as_params()).in_structure()
    assert isinstance(model, eqx.nn.MLP) and model.activation is None
    assert [leaf.shape for leaf in jax.tree.leaves(model)] == [(4, 3), (4,), (1, 4), (1,)]


@pytest.mark.parametrize(
    "make, center, wrt",
    [
        pytest.param(make, center, wrt, marks=[] if (make, center, wrt) in quick else slow)
        for quick in [
            [
                (networks.mixed_tree, True, "params"),
            ]
        ]
        for make in (networks.mixed_tree, networks.many_outputs)
        for center in (True, False)
        for wrt in ("params", "samples and weights")
    ],
    ids=lambda p: getattr(p, "__name__", None),
)
def test_derivatives_of_products_agree_with_dense_ones(make, center, wrt, rng):
    network = make()
    J = jacobian(network)
    v, y = vector(rng, J.in_structure()), vector(rng, J.out_structure())
    weights = jnp.asarray(WEIGHTS + 0.1, FLOAT)

    def values(forward, backward, gram, cogram):
        """A number that depends on all of all four products."""
        parts = [(forward, y), (backward, v), (gram, v), (cogram, y)]
        return sum(jnp.sum(networks.ravel_real(a) * jnp.cos(networks.ravel_real(b))) for a, b in parts)

    def of_operator(trained, samples, weights):
        params = eqx.combine(trained, network.params)
        J = Jacobian(network.f, params, samples, weights=weights, center=center, chunk_size=3, **network.options)
        return values(J @ v, J.H @ y, J.gram() @ v, J.cogram() @ y)

    def of_dense(trained, samples, weights):
        D = dense_jacobian(network, trained, samples, weights, center)
        flat_v, flat_y = networks.ravel_real(v), networks.ravel_real(y)
        products = D @ flat_v, D.T @ flat_y, D.T @ (D @ flat_v), D @ (D.T @ flat_y)
        return values(*products)

    argnums = (0,) if wrt == "params" else (1, 2)
    args = network.trained, network.samples, weights
    (value, got), (value_of_dense, expected) = (
        quick_jit(jax.value_and_grad(f, argnums), *args) for f in (of_operator, of_dense)
    )
    assert_close(value, value_of_dense)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        assert_close(a, b, factor=10)


@pytest.mark.parametrize("center", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize("make", [networks.real, networks.many_outputs], ids=lambda m: m.__name__)
def test_derivatives_with_respect_to_weights_that_are_zero(make, center, rng):
    # The roots of weights have no derivative there, but the weights in a gram product have.
    network = make()
    J = jacobian(network)
    v, weights = vector(rng, J.in_structure()), jnp.asarray(WEIGHTS, FLOAT)

    def of_operator(w):
        J = jacobian(network, weights=w, center=center, chunk_size=3)
        return jnp.vdot(networks.ravel_real(v), networks.ravel_real(J.gram() @ v))

    def variance(w):
        w = w / w.sum()
        _, products = jax.jvp(lambda p: network.at(p, network.samples), (network.trained,), (v,))
        flat_products = [o.reshape(NUM_SAMPLES, -1) for o in jax.tree.leaves(products)]
        squares = sum(jnp.sum(w @ jnp.abs(o) ** 2) for o in flat_products)
        return squares - center * sum(jnp.sum(jnp.abs(w @ o) ** 2) for o in flat_products)

    assert_close(quick_jit(jax.grad(of_operator), weights), quick_jit(jax.grad(variance), weights), factor=10)
    forces = jax.grad(lambda w: jnp.sum(jacobian(networks.real(), weights=w).sample_vector(jnp.ones(NUM_SAMPLES))))
    assert np.all(np.isfinite(quick_jit(forces, weights)))


@slow
def test_hessian_vector_products_through_the_gram_matrix(rng):
    network = networks.complex_output_of_real_params()
    trained, v = network.trained, jnp.asarray(normal(rng, FLOAT, 3, 2))
    weights = jnp.ones(NUM_SAMPLES, FLOAT)

    def of_operator(p):
        J = Jacobian(network.f, p, network.samples, center=True, chunk_size=2)
        return jnp.vdot(v, J.gram() @ v)

    def of_dense(p):
        return jnp.sum((dense_jacobian(network, p, network.samples, weights, True) @ v.ravel()) ** 2)

    def forward_over_reverse(f, p):
        return jax.jvp(jax.grad(f), (p,), (v,))[1]

    def reverse_over_reverse(f, p):
        return jax.grad(lambda p: jnp.vdot(jax.grad(f)(p), v))(p)

    expected = quick_jit(lambda p: forward_over_reverse(of_dense, p), trained)
    for transform in (forward_over_reverse, reverse_over_reverse):
        assert_close(quick_jit(lambda p, t=transform: t(of_operator, p), trained), expected, factor=10)


@pytest.mark.parametrize(
    "make", [networks.many_outputs, pytest.param(networks.mixed_tree, marks=slow)], ids=lambda m: m.__name__
)
def test_vmap_over_parameters_and_vectors(make, rng):
    network = make()
    J = jacobian(network)
    many = jax.tree.map(lambda p: jnp.stack([p, 1.5 * p]), network.trained)
    vs = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(vector(rng, J.in_structure()) for _ in range(2)))

    def product(trained, v):
        params = eqx.combine(trained, network.params)
        J = Jacobian(network.f, params, network.samples, **network.options, **CHUNKED)
        return J.gram() @ v, J.H @ (J @ v)

    batch = quick_jit(jax.vmap(product), many, vs)
    for i in range(2):
        trained, v = jax.tree.map(lambda x, i=i: x[i], (many, vs))
        dense = reference(network._replace(params=eqx.combine(trained, network.params)), WEIGHTS, True)
        for found in batch:
            assert_close(flat(jax.tree.map(lambda x, i=i: x[i], found)), dense.T @ (dense @ flat(v)))


def test_values_the_network_closes_over_are_seen_by_jit_grad_and_vmap(rng):
    x, p = networks.spins(), array(1, FLOAT, 3)
    v = jnp.asarray(normal(rng, FLOAT, 3))

    def energy(scale):
        J = Jacobian(lambda p, x: jnp.sin(scale * (x @ p)), p, x, center=True, chunk_size=3)
        return jnp.vdot(v, J.gram() @ v)

    def of_dense(scale):
        O = scale * jnp.cos(scale * (x @ p))[:, None] * x
        return jnp.sum(((O - O.mean(0)) @ v) ** 2) / len(x)

    scales = jnp.array([0.5, 1.5])
    expected = jax.vmap(jax.value_and_grad(of_dense))(scales)
    value, gradient = quick_jit(jax.vmap(jax.value_and_grad(energy)), scales)
    assert_close(value, expected[0])
    assert_close(gradient, expected[1])
    for scale, exact in zip((0.5, 1.5), expected[0]):  # eagerly: the second must not find the first one's program
        assert_close(energy(scale), exact)


@pytest.mark.parametrize(
    "trainable, chosen",
    [
        (None, [(4, 3), (4,), (1, 4), (1,)]),
        (True, [(4, 3), (4,), (1, 4), (1,)]),
        (lambda leaf: eqx.is_array(leaf) and leaf.ndim == 2, [(4, 3), (1, 4)]),
        (eqx.is_array, [(4, 3), (4,), (1, 4), (1,)]),
        ("last layer", [(1, 4), (1,)]),
        ("first weight", [(4, 3)]),
    ],
)
def test_trainable_may_be_a_predicate_a_mask_or_a_prefix(trainable, chosen, rng):
    network = networks.module_as_params()
    if trainable == "last layer":  # a mask that is itself a module, and can be called
        trainable = jax.tree.map(lambda _: False, network.params)
        trainable = eqx.tree_at(lambda m: m.layers[-1], trainable, jax.tree.map(lambda _: True, trainable.layers[-1]))
    if trainable == "first weight":
        trainable = jax.tree.map(lambda leaf: leaf is network.params.layers[0].weight, network.params)
    J = Jacobian(network.f, network.params, network.samples, trainable=trainable)
    assert [s.shape for s in jax.tree.leaves(J.in_structure())] == chosen


def test_a_prefix_mask_freezes_whole_branches():
    params = {"body": [jnp.ones(3), jnp.ones(3)], "head": (jnp.ones(3), jnp.ones(()))}
    f = lambda p, x: x @ p["body"][0] * (x @ p["body"][1]) + x @ p["head"][0] + p["head"][1]
    for trainable in ({"body": False, "head": True}, {"body": np.False_, "head": (True, True)}):
        J = Jacobian(f, params, networks.spins(), trainable=trainable)
        assert jax.tree.map(lambda s: s.shape, J.in_structure()) == {"body": [None, None], "head": ((3,), ())}


def test_numpy_parameters_and_samples_and_python_weights():
    f = lambda p, x: jnp.sin(x @ p["w"]) + p["b"]
    params = {"w": np.ones(3, FLOAT), "b": 2.0}  # a Python number is a constant
    J = Jacobian(f, params, np.ones((4, 3), FLOAT), weights=[1, 2, 3, 4])
    assert J.in_structure()["b"] is None
    assert (J @ {"w": np.ones(3, FLOAT), "b": None}).shape == (4,)
    same = Jacobian(f, params, np.ones((4, 3), FLOAT), weights=np.arange(1.0, 5) / 10)
    np.testing.assert_allclose(J.as_matrix(), same.as_matrix(), rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_weights_are_divided_by_their_sum_whatever_their_size(scale):
    network = networks.real()
    v = jax.tree.map(jnp.ones_like, network.params)
    expected = jacobian(network, weights=WEIGHTS, center=True) @ v
    found = jacobian(network, weights=scale * WEIGHTS, center=True) @ v
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.x64_only
@pytest.mark.parametrize("scale", [1e-100, 1e300])
def test_weights_that_single_precision_cannot_hold(scale):
    params, x = np.ones(3, np.float32), np.asarray(networks.spins(), np.float32)
    f = lambda p, x: jnp.sin(x @ p)
    found = Jacobian(f, params, x, weights=scale * WEIGHTS).chunks.flat_weights
    np.testing.assert_allclose(found, WEIGHTS / WEIGHTS.sum(), rtol=1e-6)


def test_sample_vectors_give_forces_and_covariances(rng):
    network = networks.not_holomorphic()
    energies = normal(rng, COMPLEX, NUM_SAMPLES)
    w = WEIGHTS / WEIGHTS.sum()
    for center in (True, False):
        J = jacobian(network, weights=WEIGHTS, center=center)
        shifted = energies - center * (w @ energies)
        assert_close(flat(J.sample_vector(energies)), flat(np.sqrt(w) * shifted))
    J = jacobian(network, weights=WEIGHTS, center=True)
    forces = quick_jit(lambda J, e: J.H @ J.sample_vector(e), J, jnp.asarray(energies))
    covariance = flat(np.sqrt(w) * (energies - w @ energies))
    assert_close(flat(forces), reference(network, WEIGHTS, False).T @ covariance)  # one centred factor is enough
    J = jacobian(network, weights=WEIGHTS)
    real = normal(rng, FLOAT, NUM_SAMPLES)
    assert_close(flat(J.sample_vector(real)), flat(np.sqrt(w) * real + 0j))
    trees = jacobian(networks.trees_in_and_out(), center=True, chunk_size=2)
    values = vector(rng, trees.out_structure())
    found = trees.sample_vector(values)
    expected = jax.tree.map(lambda e: (e - np.mean(e, 0)) / np.sqrt(NUM_SAMPLES), values)
    assert_close(flat(found), flat(expected))


@pytest.mark.parametrize("values", [np.ones(3), np.ones((NUM_SAMPLES, 1)), {"a": np.ones(NUM_SAMPLES)}])
def test_sample_vectors_that_do_not_match_are_refused(values):
    with pytest.raises(ValueError, match=r"Jacobian\.sample_vector: values"):
        jacobian(networks.real()).sample_vector(values)


@pytest.mark.parametrize(
    "make",
    [
        networks.complex_output_of_real_params,
        pytest.param(networks.not_holomorphic, marks=slow),
        pytest.param(networks.holomorphic, marks=slow),
        pytest.param(networks.trees_in_and_out, marks=slow),
        pytest.param(networks.many_outputs, marks=slow),
    ],
    ids=lambda m: m.__name__,
)
def test_three_routes_to_one_step(make, rng):
    network, shift = make(), 0.1
    J = jacobian(network, **CHUNKED)
    energies = J.sample_vector(vector(rng, J.out_structure()))
    options = dict(method="cg", shift=shift, rtol=30 * EPS)
    by_parameters = krylov.solve(J.gram(), J.H @ energies, **options)
    by_samples = krylov.solve(J.cogram(), energies, **options)
    assert by_parameters.converged and by_samples.converged
    dense = reference(network, WEIGHTS, True)
    step = np.linalg.solve(dense.T @ dense + shift * np.eye(dense.shape[1]), dense.T @ flat(energies))
    assert_close(flat(by_parameters.x), step, factor=10)
    assert_close(flat(J.H @ by_samples.x), step, factor=10)


@slow
def test_a_holomorphic_promise_changes_no_product(rng):
    promised = jacobian(networks.holomorphic(), **CHUNKED)
    careful = jacobian(networks.holomorphic_without_saying(), **CHUNKED)
    assert (promised.field, careful.field) == ("complex", "real")
    v, y = vector(rng, promised.in_structure()), vector(rng, promised.out_structure())
    products = lambda J, v, y: (J @ v, J.H @ y, J.gram() @ v)
    for a, b in zip(quick_jit(products, promised, v, y), quick_jit(products, careful, v, y)):
        assert_close(flat(a), flat(b))


# Precision.


def large_mean(ratio, n=200, p=5):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(n, p)) + ratio * rng.normal(size=p)).astype(np.float32)
    exact = x.astype(np.float64)
    centred = exact - exact.mean(0)
    return x, centred.T @ centred / n, rng.normal(size=p).astype(np.float32)


@pytest.mark.parametrize(
    "copies, chunk_size",
    [(1, 16), (20, None), pytest.param(1, None, marks=slow), pytest.param(20, 16, marks=slow)],
)
def test_a_mean_far_above_the_spread_costs_only_its_own_digits(chunk_size, copies):
    # With the mean subtracted from one factor alone the error would go with the square of the ratio.
    ratio = 1000
    x, exact, v = large_mean(ratio)
    f = lambda p, x: jnp.repeat((x @ p)[:, None], copies, 1)
    J = Jacobian(f, np.zeros(5, np.float32), x, center=True, chunk_size=chunk_size)
    expected = copies * exact @ v.astype(np.float64)
    error = np.linalg.norm(np.asarray(J.gram() @ v, np.float64) - expected) / np.linalg.norm(expected)
    assert error < 10 * ratio * float(jnp.finfo(np.float32).eps)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
def test_many_chunks_in_half_precision_still_add_up(dtype):
    # Sums kept in half precision would stop growing after some hundred chunks.
    n, p = 2000, 4
    x = 1 + np.random.default_rng(0).uniform(size=(n, p))
    f = lambda p, x: x.astype(p.dtype) @ p
    J = Jacobian(f, np.zeros(p, dtype), x.astype(np.float32), chunk_size=2)
    v = np.ones(p, dtype)
    assert (J.gram() @ v).dtype == (J @ v).dtype == dtype
    tolerance = 8 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(J.gram() @ v, np.float64), x.T @ x.sum(1) / n, rtol=tolerance)
    np.testing.assert_allclose(np.asarray(J.H @ np.ones(n, dtype), np.float64), x.sum(0) / np.sqrt(n), rtol=tolerance)
    np.testing.assert_allclose(np.asarray(J.gram().diagonal(), np.float64), (x**2).mean(0), rtol=tolerance)


@slow
def test_half_precision_parameters_in_a_centred_network():
    x = networks.spins().astype(jnp.bfloat16)
    f = lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"]
    params = {"w": array(1, FLOAT, 3, 4), "v": array(2, FLOAT, 4)}
    half, v = (jax.tree.map(lambda p: p.astype(jnp.bfloat16), params) for _ in range(2))
    J = Jacobian(f, half, x, **CHUNKED)
    exact = Jacobian(f, jax.tree.map(lambda p: p.astype(FLOAT), half), x.astype(FLOAT), **CHUNKED)
    expected = flat(quick_jit(lambda J, v: J.gram() @ v, exact, jax.tree.map(lambda p: p.astype(FLOAT), v)))
    found = quick_jit(lambda J, v: J.gram() @ v, J, v)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(found))
    assert np.linalg.norm(flat(found) - expected) < 0.05 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "precision, expected", [("highest", "HIGHEST"), ("bfloat16", "DEFAULT"), ("high", "HIGH,"), (None, None)]
)
def test_the_network_is_traced_under_the_precision_asked_for(precision, expected):
    J = Jacobian(lambda p, x: x @ p, np.ones(3, np.float32), np.ones((2, 3), np.float32), precision=precision)
    program = str(J.network.jaxpr)
    found = re.search(r"precision=(\(?[^\s]*)", program)
    if expected is None:
        assert found is None or "HIGH" not in found.group(1)
    else:
        assert expected.strip(",") in program.replace(",", "")
    backward = str(jax.make_jaxpr(J.rmv)(np.ones(2, np.float32)))
    assert ("HIGHEST" in backward) == (precision == "highest")


# Networks that can or cannot be differentiated.


def test_a_while_loop_can_be_pushed_forward_but_not_pulled_back():
    def f(p, x):
        h = x @ p
        return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, h))[1]

    x, p = networks.spins(), array(1, FLOAT, 3)
    J = Jacobian(f, p, x, chunk_size=3)
    dense = jax.jacfwd(lambda p: jnp.sin(jnp.sin(jnp.sin(x @ p))))(p) / np.sqrt(NUM_SAMPLES)
    assert_close(J @ p, dense @ p)
    for backward in (lambda: J.rmv(jnp.ones(NUM_SAMPLES)), lambda: J.gram() @ p):
        with pytest.raises(LinearizationError, match="while") as info:
            backward()
        assert "Jacobian: f" in str(info.value) and "scan" in str(info.value)


def test_random_keys_are_samples_like_any_other():
    keys = jax.random.split(jax.random.key(0), NUM_SAMPLES)

    def f(p, samples):
        x, key = samples
        keep = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, (3,)))(key)
        return (x * keep) @ p

    x, p = networks.spins(), array(1, FLOAT, 3)
    J = Jacobian(f, p, (x, keys), center=True, chunk_size=3)
    keep = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, (3,)))(keys)
    rows = np.asarray(x * keep, np.float64)
    assert_close(J @ p, (rows - rows.mean(0)) @ p / np.sqrt(NUM_SAMPLES))


def test_one_sample_one_parameter_one_chunk():
    J = Jacobian(lambda p, x: x * p**2, np.asarray(3.0, FLOAT), np.asarray([2.0], FLOAT), chunk_size=5)
    assert J.shape == (1, 1)
    np.testing.assert_allclose(J.as_matrix(), [[12.0]])
    np.testing.assert_allclose(J.gram().diagonal(), 144.0)
    centred = Jacobian(lambda p, x: x * p**2, np.asarray(3.0, FLOAT), np.asarray([2.0], FLOAT), center=True)
    np.testing.assert_allclose(centred.as_matrix(), [[0.0]], atol=1e-5)


# Samples that see each other.

SEEING = {
    "batch norm": lambda p, x: (lambda h: (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5))(jnp.tanh(x @ p)),
    "batch norm without epsilon": lambda p, x: (lambda h: (h - h.mean(0)) / h.std(0))(jnp.tanh(x @ p)),
    "mean subtracted": lambda p, x: jnp.tanh(x @ p) - jnp.tanh(x @ p).mean(),
    "mask by position": lambda p, x: jnp.where(jnp.arange(x.shape[0]) % 2 == 0, 1.0, 0.5) * jnp.tanh(x @ p),
    "noise by position": lambda p, x: jnp.tanh(x @ p) * jax.random.normal(jax.random.key(0), (x.shape[0],)),
    "attention over samples": lambda p, x: jax.nn.softmax(x @ x.T) @ jnp.tanh(x @ p),
    "cumulative sum": lambda p, x: jnp.cumsum(jnp.tanh(x @ p)),
}


@pytest.mark.parametrize("name, chunk_size", [*((name, 3) for name in SEEING), ("batch norm", 1), ("batch norm", None)])
def test_samples_that_see_each_other_are_refused_at_once(name, chunk_size):
    with pytest.raises(ValueError, match="depend on which samples are evaluated together") as info:
        Jacobian(SEEING[name], array(1, FLOAT, 3), networks.spins(), chunk_size=chunk_size)
    for words in ("outputs that differ by", "in chunks another system would be solved", "batch statistics"):
        assert words in str(info.value)


def test_a_mask_shaped_like_all_samples_fails_with_advice():
    mask = jnp.ones(NUM_SAMPLES).at[2].set(0)
    with pytest.raises(TypeError) as info:
        Jacobian(lambda p, x: mask * (x @ p), array(1, FLOAT, 3), networks.spins(), chunk_size=3)
    assert any("pass an array shaped like all samples as a sample leaf" in note for note in info.value.__notes__)


def test_noise_from_the_host_is_refused():
    def f(p, x):
        noise = jax.pure_callback(
            lambda: np.random.default_rng().normal(size=x.shape[0]).astype(FLOAT),
            jax.ShapeDtypeStruct((x.shape[0],), FLOAT),
        )
        return x @ p + noise

    with pytest.raises(ValueError, match="f does not give the same twice"):
        Jacobian(f, array(1, FLOAT, 3), networks.spins(), chunk_size=3)


def test_rounding_inside_the_network_is_no_dependence():
    # Large terms cancel, and their rounding differs between a matrix product and single rows.
    p, x = array(1, np.float32, 200), jnp.asarray(normal(np.random.default_rng(0), np.float32, 30, 200))

    def f(p, x):
        large = 1e4 * (x @ jnp.stack([p, -p], 1))
        return large.sum(1) + jnp.tanh(x[:, 0] * p[0])

    Jacobian(f, p, x, chunk_size=10)


def test_inside_jit_the_check_is_left_out():
    f = lambda p, x: jnp.tanh(x @ p) - jnp.tanh(x @ p).mean()
    x = networks.spins()
    found = jax.jit(lambda p: Jacobian(f, p, x, chunk_size=3) @ p)(array(1, FLOAT, 3))
    assert found.shape == (NUM_SAMPLES,)


# Errors.


@pytest.mark.parametrize(
    "changes, error, words",
    [
        (dict(f=3), TypeError, ["f must be a function", "int"]),
        (dict(chunk_size=0), ValueError, ["chunk_size must be a positive whole number", "got       0"]),
        (dict(chunk_size=-2), ValueError, ["chunk_size", "-2"]),
        (dict(chunk_size=2.0), ValueError, ["chunk_size", "2.0"]),
        (dict(chunk_size=True), ValueError, ["chunk_size", "True"]),
        (dict(weights=np.ones(3)), ValueError, ["one entry for each of the 7 samples", "[3]"]),
        (dict(weights=np.ones((7, 1))), ValueError, ["one entry for each of the 7 samples", "[7,1]"]),
        (dict(weights=1.0), ValueError, ["one entry for each"]),
        (dict(weights=-np.ones(7)), ValueError, ["not negative", "minimum -1.0"]),
        (dict(weights=np.zeros(7)), ValueError, ["not all zero", "sum 0.0"]),
        (dict(weights=np.full(7, np.nan)), ValueError, ["finite", "nan"]),
        (dict(weights=np.full(7, np.inf)), ValueError, ["finite", "inf"]),
        (dict(weights=1j * np.ones(7)), ValueError, ["weights must be real", "complex"]),
        (dict(samples=(np.ones((7, 3)), np.ones(6))), ValueError, ["same length", "[7,3]", "[6]"]),
        (dict(samples=(np.ones((7, 3)), 1.0)), ValueError, ["same length"]),
        (dict(samples=np.ones((0, 3))), ValueError, ["no samples"]),
        (dict(samples=()), ValueError, ["samples hold no array"]),
        (dict(params={"w": 1}), ValueError, ["no trainable floating-point array", "int 1"]),
        (dict(trainable=lambda _: False), ValueError, ["no trainable floating-point array"]),
        (dict(params={"w": np.ones((3, 0), FLOAT)}), ValueError, ["no trainable floating-point array", "[3,0]"]),
        (dict(trainable={"v": True}), ValueError, ["trainable must be", "prefix of params", "'v'"]),
        (dict(trainable={"w": 1.0}), ValueError, ["trainable must be", "1.0 is not a bool"]),
        (dict(f=lambda p, x: jnp.sum(x @ p["w"])), ValueError, ["first axis is the sample axis", "jax.vmap"]),
        (dict(f=lambda p, x: (x @ p["w"])[None]), ValueError, ["first axis is the sample axis", "[1,7]"]),
        (dict(f=lambda p, x: {}), ValueError, ["returns no number"]),
        (dict(f=lambda p, x: p["w"][0] * x[:, :0]), ValueError, ["returns no number", "[7,0]"]),
        (dict(f=lambda p, x: x[:, 0] > 0), ValueError, ["must return floating-point arrays", "bool[7]"]),
        (dict(holomorphic=True), ValueError, ["needs complex parameters and complex outputs", "Leave it out"]),
    ],
)
def test_bad_input_is_refused_with_what_came_and_what_to_do(changes, error, words):
    arguments = dict(f=lambda p, x: x @ p["w"], params={"w": np.ones(3, FLOAT)}, samples=np.ones((7, 3), FLOAT))
    with pytest.raises(error, match=r"^Jacobian: ") as info:
        Jacobian(**arguments | changes)
    for word in words:
        assert word in str(info.value)


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
def test_known_weights_are_looked_at_inside_jit(as_array):
    weights = as_array([-1.0, 1, 1, 1, 1, 1, 1])
    network = networks.real()
    with pytest.raises(ValueError, match="not negative"):
        jax.jit(lambda p: Jacobian(network.f, p, network.samples, weights=weights).gram() @ p)(network.params)


def test_negative_weights_that_are_traced_poison_the_products():
    network = networks.real()

    @jax.jit
    def products(weights):
        J = jacobian(network, weights=weights)
        return J @ network.params, J.gram() @ network.params

    for found in products(jnp.array([-1.0, 1, 1, 1, 1, 1, 1])):
        assert all(np.all(np.isnan(leaf)) for leaf in jax.tree.leaves(found))


# Compilation.


NETWORKS_TO_REPEAT = [
    networks.mixed_tree,
    networks.module_as_params,
    *(pytest.param(m, marks=slow) for m in (networks.control_flow, networks.many_outputs)),
]


@pytest.mark.parametrize("make", NETWORKS_TO_REPEAT, ids=lambda m: m.__name__)
def test_new_values_compile_nothing(make, count_compilations, rng):
    def step(network, weights):
        J = jacobian(network, weights=weights, center=True, chunk_size=3)
        return J.gram() @ network.trained

    network = make()
    step(network, WEIGHTS)
    other = network._replace(params=jax.tree.map(lambda p: 2 * p if eqx.is_inexact_array(p) else p, network.params))
    samples = jax.tree.map(lambda x: x[::-1], network.samples)
    other = jax.block_until_ready(other._replace(samples=samples))
    between = count_compilations()
    found = step(other, WEIGHTS[::-1].copy())
    assert count_compilations() == between
    dense = reference(other, WEIGHTS[::-1].copy(), True)
    assert_close(flat(found), dense.T @ (dense @ flat(other.trained)), factor=10)


def test_many_networks_in_turn_compile_nothing_anew(count_compilations):
    fs = [eval(f"lambda p, x: jnp.sin(x @ p) ** {k}") for k in range(1, 7)]
    x, p = networks.spins(), array(1, FLOAT, 3)
    before = count_compilations()
    for f in fs:
        Jacobian(f, p, x, chunk_size=3) @ p
    assert count_compilations() > before
    before = count_compilations()
    for f in fs:
        Jacobian(f, p, x, chunk_size=3) @ p
    assert count_compilations() == before


@pytest.mark.parametrize("storage", ["recompute", "linearized", "dense"])
def test_every_storage_names_the_operation_that_cannot_be_linearized(storage):
    def network(p, x):
        return jax.lax.reduce_window(x * p, 0.0, jax.lax.max, (1, 2), (1, 2), "VALID").sum(1)

    p, x = jnp.ones(4), jnp.ones((3, 4))
    with pytest.raises(
        LinearizationError, match=r"Jacobian: f cannot be linearized[\s\S]*initial value 0.0[\s\S]*max_pool"
    ):
        krylov.Jacobian(network, p, x, storage=storage).T @ jnp.ones(3)
