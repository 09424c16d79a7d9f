"""Max pooling: the values of `lax.reduce_window`, and for every initial value the derivatives of a dense reference."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from krylov.operators import Jacobian
from krylov.operators.linearization import LinearizationError
from krylov.operators.pooling import max_pool, reduce_window_max
from tests.operators import transformations
from tests.operators.transformations import assert_close, assert_same, quick_jit, random_like

GEOMETRIES = {
    "non-overlapping": ((2, 4, 6, 2), dict(window_dimensions=(1, 2, 2, 1), window_strides=(1, 2, 2, 1))),
    "overlapping-same": (
        (2, 5, 6, 2),
        dict(window_dimensions=(1, 3, 3, 1), window_strides=(1, 2, 1, 1), padding="SAME"),
    ),
    # More entries than are searched one by one.
    "large": ((9, 8), dict(window_dimensions=(5, 6), window_strides=(2, 1), padding="SAME_LOWER")),
    "large-dilated": (
        (7, 2, 8),
        dict(
            window_dimensions=(4, 1, 5),
            padding=((2, 1), (0, 0), (0, 3)),
            base_dilation=(2, 1, 1),
            window_dilation=(1, 1, 2),
        ),
    ),
    # Axes that are pooled apart from each other, windows of padding only.
    "dilated": (
        (4, 3, 5),
        dict(
            window_dimensions=(2, 1, 2),
            window_strides=(1, 1, 2),
            padding=((3, 0), (0, 0), (1, 2)),
            base_dilation=(2, 1, 1),
            window_dilation=(1, 1, 3),
        ),
    ),
    "one-axis": ((6,), dict(window_dimensions=(3,))),
    "no-windows": ((3, 2), dict(window_dimensions=(4, 1))),
    "strides-only": ((5, 2), dict(window_dimensions=(1, 1), window_strides=(2, 1))),
}


def array(seed, *shape, dtype=float):
    return random_like(jax.ShapeDtypeStruct(shape, jnp.result_type(dtype)), seed)


def with_ties(seed, shape, dtype=float):
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, size=shape), jnp.result_type(dtype))


def window_table(
    shape, window_dimensions, window_strides=None, padding="VALID", base_dilation=None, window_dilation=None
):
    """Flat position in an array of each entry of each window, in row-major order; -1 for padding."""
    ones = (1,) * len(shape)
    strides, base, dilation = (x or ones for x in (window_strides, base_dilation, window_dilation))
    extent = [(w - 1) * d + 1 for w, d in zip(window_dimensions, dilation, strict=True)]
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(shape, extent, strides, padding)
    grid = np.full([(n - 1) * b + 1 + lo + hi for n, b, (lo, hi) in zip(shape, base, padding, strict=True)], -1)
    inner = tuple(slice(lo, lo + (n - 1) * b + 1, b) for n, b, (lo, _) in zip(shape, base, padding, strict=True))
    grid[inner] = np.arange(math.prod(shape)).reshape(shape)
    counts = [max((n - e) // s + 1, 0) for n, e, s in zip(grid.shape, extent, strides, strict=True)]
    table = np.empty((*counts, math.prod(window_dimensions)), int)
    for out in itertools.product(*map(range, counts)):
        for k, offset in enumerate(np.ndindex(*window_dimensions)):
            table[(*out, k)] = grid[
                tuple(o * s + a * d for o, s, a, d in zip(out, strides, offset, dilation, strict=True))
            ]
    return table


def dense_reference(shape, **geometry):
    """Pooling by writing all windows out, with the rules of the documentation."""
    table = window_table(shape, **geometry)

    def pool(x, init):
        init = jnp.asarray(init).astype(x.dtype)
        entries = x.reshape(-1)[jnp.maximum(table, 0)]
        known = lax.stop_gradient(entries)
        rank = jnp.where(table < 0, -jnp.inf, jnp.where(jnp.isnan(known), jnp.inf, known))
        # The first of the largest, and of these an entry rather than padding.
        best = (rank == rank.max(-1, keepdims=True)) & ((table >= 0) | (rank > -jnp.inf))
        chosen = jnp.argmax(best, -1)
        value = jnp.take_along_axis(entries, chosen[..., None], -1)[..., 0]
        nothing = (table < 0).all(-1)
        init_wins = nothing | (init > value) | (jnp.isnan(init) & ~jnp.isnan(value))
        return jnp.where(init_wins, init, value)

    return pool


@pytest.mark.parametrize("name", GEOMETRIES)
def test_value_is_that_of_lax_for_every_initial_value(name):
    shape, geometry = GEOMETRIES[name]
    x = with_ties(1, shape).at[(0,) * len(shape)].set(-jnp.inf)
    for init in (-np.inf, 0.0, 1.5):

        def both(x, init=init):
            return (
                reduce_window_max(x, init, **geometry),
                lax.reduce_window(x, np.asarray(init, x.dtype), lax.max, **geometry),
            )

        ours, theirs = quick_jit(both)(x)
        assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "uint8", "bool"])
def test_every_real_dtype_has_the_value_of_lax(dtype):
    x = jnp.asarray(np.random.default_rng(1).integers(0, 3, size=(4, 6)), dtype)
    geometry = dict(window_dimensions=(2, 3), window_strides=(2, 3))
    for init in (-math.inf, 1):
        lowest = reduce_window_max(x, init, **geometry)
        assert lowest.dtype == x.dtype
        expected = np.maximum(np.asarray(x, float).reshape(2, 2, 2, 3).max((1, 3)), init)
        np.testing.assert_array_equal(np.asarray(lowest, float), expected)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_gradient_agrees_with_the_dense_reference_also_at_ties(name):
    shape, geometry = GEOMETRIES[name]
    x, reference = with_ties(2, shape), dense_reference(shape, **geometry)
    y = random_like(jax.eval_shape(lambda x: reduce_window_max(x, 0.0, **geometry), x), 3)
    # Infinities and NaN among the entries and as the initial value.
    wild = x.reshape(-1).at[:3].set(jnp.array([jnp.nan, -jnp.inf, jnp.inf])[: x.size]).reshape(shape)

    def gradients(pool):
        return quick_jit(jax.vmap(lambda x, init: jax.vjp(pool, x, init)[1](y), (None, 0)))

    def ours(x, init):
        return reduce_window_max(x, init, **geometry)

    inits = jnp.array([-jnp.inf, 0, 1, jnp.nan, jnp.inf], x.dtype)
    for point in (x, wild):
        assert_close(gradients(ours)(point, inits), gradients(reference)(point, inits))


@pytest.mark.parametrize("name", ["non-overlapping", "overlapping-same", "large", "one-axis"])
def test_ties_are_broken_as_jax_breaks_them_at_minus_infinity(name):
    shape, geometry = GEOMETRIES[name]
    x = with_ties(2, shape)
    y = random_like(jax.eval_shape(lambda x: reduce_window_max(x, 0.0, **geometry), x), 3)

    def gradient(pool):
        return quick_jit(lambda x: jax.vjp(pool, x)[1](y)[0])(x)

    ours = gradient(lambda x: reduce_window_max(x, -math.inf, **geometry))
    assert_close(ours, gradient(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, **geometry)))


TRANSFORMATIONS = {
    "overlapping-same": [
        transformations.transpose_twice,
        transformations.linearize_then_vmap_then_transpose,
        transformations.vmap_grad,
        transformations.grad_of_checkpoint,
        transformations.reverse_over_reverse,
    ],
    "large-dilated": [transformations.vmap_then_transpose, transformations.forward_over_reverse],
}


@pytest.mark.parametrize(
    ("name", "transformation"),
    [(name, t) for name, those in TRANSFORMATIONS.items() for t in those],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_every_transformation_of_the_tangent_map_agrees_with_the_dense_reference(name, transformation):
    shape, geometry = GEOMETRIES[name]
    reference = dense_reference(shape, **geometry)

    def tangent(pool):
        def f(residuals, linear):
            return jax.jvp(lambda x, init: pool(jnp.sin(x), init * init), residuals, linear)[1]

        return f

    def ours(x, init):
        return reduce_window_max(x, init, **geometry)

    residuals, linear = (array(1, *shape), jnp.asarray(0.3)), (array(2, *shape), jnp.asarray(0.7))
    assert_same(transformation, tangent(ours), tangent(reference), residuals, linear)


INITIAL_VALUES = {
    "python": 0.0,
    "python-minus-infinity": -math.inf,
    "python-int": 0,
    "numpy-single": np.float32(0),
    "numpy-double": np.float64(0),
    "numpy-array": np.zeros(()),
    "array": lambda: jnp.zeros(()),
    "array-minus-infinity": lambda: jnp.asarray(-jnp.inf),
    "bfloat16-array": lambda: jnp.zeros((), jnp.bfloat16),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", INITIAL_VALUES)
def test_the_users_problem_linearizes_and_transposes_for_every_kind_of_initial_value(kind, jit):
    init = INITIAL_VALUES[kind]
    init = init() if callable(init) else init
    x, t, y = array(1, 1, 4, 4, 1), array(2, 1, 4, 4, 1), array(3, 1, 2, 2, 1)

    def pool(x):
        return max_pool(x, (2, 2), strides=(2, 2), init=init)

    f = jax.jit(pool) if jit else pool
    entries = np.asarray(x).reshape(2, 2, 2, 2).transpose(0, 2, 1, 3).reshape(4, 4)
    expected = np.maximum(entries.max(1), float(init))
    out, push = jax.linearize(f, x)
    assert_close(out.reshape(4), jnp.asarray(expected, x.dtype))
    mask = (entries == entries.max(1, keepdims=True)) & (entries > float(init))
    tangents = np.asarray(t).reshape(2, 2, 2, 2).transpose(0, 2, 1, 3).reshape(4, 4)
    assert_close(push(t).reshape(4), jnp.asarray((mask * tangents).sum(1), x.dtype))
    pulled = (mask * np.asarray(y).reshape(4, 1)).reshape(2, 2, 2, 2).transpose(0, 2, 1, 3).reshape(x.shape)
    assert_close(jax.linear_transpose(push, x)(y)[0], jnp.asarray(pulled, x.dtype))
    assert_close(jax.grad(lambda x: jnp.vdot(y, f(x)))(x), jnp.asarray(pulled, x.dtype))


def test_a_traced_initial_value_is_differentiable_and_vmappable():
    x = jnp.array([-3.0, -1.0, 2.0, 5.0])

    def total(x, init):
        return reduce_window_max(x, init, (2,), (2,)).sum()

    both = quick_jit(jax.vmap(jax.grad(total, (0, 1)), (None, 0)))
    of_x, of_init = both(x, jnp.array([0.0, -2.0, 9.0, 5.0]))
    assert_close(of_x, jnp.array([[0.0, 0, 0, 1], [0, 1, 0, 1], [0, 0, 0, 0], [0, 0, 0, 1]]))
    # A tie of an entry with the initial value goes to the entry.
    assert_close(of_init, jnp.array([1.0, 0.0, 2.0, 1.0]))


def test_the_tangent_map_keeps_one_integer_an_output():
    x = array(1, 8, 16, 16, 4)
    out, pull = quick_jit(lambda x: jax.vjp(lambda x: max_pool(x, (4, 4), strides=(4, 4), init=0.0), x))(x)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pull) if leaf.ndim)
    assert kept <= out.size * np.dtype(np.int32).itemsize


def test_a_sharded_batch_is_pooled_and_pulled_back_without_communication():
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("d"))
    x = jax.device_put(array(1, 2 * jax.device_count(), 6, 6, 2), sharding)
    y = jax.device_put(array(2, 2 * jax.device_count(), 2, 2, 2), sharding)

    def pull(x, y):
        return jax.vjp(lambda x: max_pool(x, (3, 3), strides=(3, 3), init=0.0), x)[1](y)[0]

    compiled = quick_jit(pull, out_shardings=sharding).lower(x, y).compile()
    assert not any(word in compiled.as_text() for word in ("all-gather", "all-reduce", "all-to-all", "collective"))
    assert_close(compiled(x, y), quick_jit(pull)(np.asarray(x), np.asarray(y)))


def test_inside_shard_map():
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))
    x = array(1, jax.device_count(), 4, 1)

    def loss(x, init):
        return jnp.sum(max_pool(x, (2,), init=init) ** 2)

    def local(x, init):
        return lax.psum(loss(x, init), "d")

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(P("d"), P()), out_specs=P())
    gradient = quick_jit(jax.grad(sharded, (0, 1)))(x, jnp.asarray(0.1))
    assert_close(gradient, quick_jit(jax.grad(loss, (0, 1)))(x, jnp.asarray(0.1)))


def test_max_pool_takes_any_number_of_batch_and_spatial_axes():
    x = array(1, 2, 3, 4, 6, 5)
    by_lax = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2, 1), (1, 1, 2, 3, 1), "SAME")
    assert_close(max_pool(x, (2, 2), (2, 3), "SAME"), by_lax)
    assert_close(
        max_pool(x, np.array([2, 2]), (2, 3), ((0, 0), (0, 1)))[0, 0], max_pool(x[0, 0], (2, 2), (2, 3), "SAME")
    )
    assert max_pool(x, (3, 4, 6)).shape == (2, 1, 1, 1, 5)
    assert max_pool(x[0, 0, 0, 0], ()).shape == (5,)
    assert max_pool(x[0, 0, 0], (2,)).shape == (5, 5)


def test_dtypes_of_less_than_single_precision_have_exact_derivatives():
    x = array(1, 4, 4).astype(jnp.bfloat16)
    y = array(2, 2, 2).astype(jnp.bfloat16)

    @quick_jit
    def gradient(x, y):
        return jax.vjp(lambda x: reduce_window_max(x, 0, (2, 2), (2, 2)), x)[1](y)[0]

    assert gradient(x, y).dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(gradient(x, y), np.float32), np.asarray(gradient(x.astype(jnp.float32), y.astype(jnp.float32)))
    )


def network(pool):
    """Convolution, pooling, dense: one complex output a sample."""

    def f(params, images):
        h = lax.conv_general_dilated(
            images, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        h = pool(jnp.tanh(h))
        h = h.reshape(h.shape[0], -1)
        return jnp.exp(1j * (h @ params["phase"])) * jnp.tanh(h @ params["size"])

    params = {"kernel": array(1, 3, 3, 1, 2), "phase": array(2, 18), "size": array(3, 18)}
    return f, params, array(4, 11, 6, 6, 1)


def test_a_convolutional_network_with_pooling_is_a_tangent_operator():
    init = 0.0
    f, params, images = network(lambda h: max_pool(h, (2, 2), strides=(2, 2), init=init))
    reference = network(lambda h: jnp.maximum(h.reshape(-1, 3, 2, 3, 2, 2).max((2, 4)), init))[0]
    J = Jacobian(f, params, images, chunk_size=4)
    v = random_like(params, 5)
    out, pulled = quick_jit(lambda v: (J.mv(v), J.gram().mv(v)))(v)

    @quick_jit
    def expected(v):
        weighted = lambda p: reference(p, images) / math.sqrt(11)
        dense = jax.jvp(weighted, (params,), (v,))[1]
        return dense, jax.tree.map(jnp.conj, jax.vjp(weighted, params)[1](dense.conj())[0])

    assert_close((out, pulled), expected(v))


@pytest.mark.parametrize(
    "init", [0.0, lambda: jnp.zeros(()), lambda: jnp.asarray(-jnp.inf)], ids=["python", "array", "array -inf"]
)
def test_a_network_that_pools_with_lax_gives_an_error_that_names_the_cause_and_the_cure(init):
    init = init() if callable(init) else np.asarray(init, jnp.result_type(float))
    f, params, images = network(lambda h: lax.reduce_window(h, init, lax.max, (1, 2, 2, 1), (1, 2, 2, 1)))

    def product():
        return Jacobian(f, params, images, chunk_size=4).gram().mv(params)

    with pytest.raises(LinearizationError, match=r"reduce_window[\s\S]*test_pooling.py[\s\S]*operators\.max_pool"):
        product()


BAD = {
    "complex": (lambda x: reduce_window_max(x * 1j, 0.0, (2, 2)), TypeError, "complex numbers have no maximum"),
    "complex init": (lambda x: reduce_window_max(x, 1j, (2, 2)), TypeError, r"init is not a real scalar[\s\S]*complex"),
    "init of a shape": (lambda x: reduce_window_max(x, jnp.zeros(2), (2, 2)), TypeError, r"got       float\d\d\[2\]"),
    "init of no kind": (lambda x: reduce_window_max(x, "0", (2, 2)), TypeError, r"got       '0'"),
    "float init": (lambda x: reduce_window_max(x.astype(int), 0.5, (2, 2)), TypeError, r"that int\d\d can hold"),
    "init out of range": (lambda x: reduce_window_max(x.astype(jnp.uint8), -1, (2, 2)), TypeError, r"got       -1"),
    "window length": (lambda x: reduce_window_max(x, 0, (2,)), ValueError, r"window_dimensions does not fit[\s\S]*2 "),
    "window zero": (lambda x: reduce_window_max(x, 0, (2, 0)), ValueError, r"got       \(2, 0\)"),
    "window float": (lambda x: reduce_window_max(x, 0, (2, 1.5)), TypeError, "must be a sequence of integers"),
    "window none": (lambda x: reduce_window_max(x, 0, None), TypeError, "must be a sequence of integers"),
    "window number": (lambda x: max_pool(x, 2), TypeError, "window_shape must be a sequence of integers"),
    "strides": (lambda x: max_pool(x, (2,), (1, 1)), ValueError, r"strides does not fit[\s\S]*each spatial axis"),
    "axes": (lambda x: max_pool(x, (2, 2)), ValueError, r"too few axes[\s\S]*x\[\.\.\., None\]"),
    "padding": (lambda x: max_pool(x, (2,), padding="FULL"), ValueError, r"unknown padding[\s\S]*'FULL'"),
    "pairs": (lambda x: reduce_window_max(x, 0, (2, 2), padding=((1, 1),)), ValueError, "2 pairs"),
    "negative": (lambda x: max_pool(x, (2,), padding=((-1, 0),)), ValueError, "padding does not fit"),
    "dilation": (lambda x: reduce_window_max(x, 0, (2, 2), window_dilation=(0, 1)), ValueError, "window_dilation"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_at_trace_time(name):
    call, kind, words = BAD[name]
    with pytest.raises(kind, match=words):
        jax.eval_shape(call, jnp.ones((4, 4)))
