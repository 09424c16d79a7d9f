"""The transformations of JAX as one table, to hold a function of (residuals, linear) against a reference.

Each entry maps a function to one of ``(residuals, linear, seed)`` whose results must agree with those of the same
transformation of a plain JAX function that computes the same.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

BATCH = 3
# Compile in a third of the time; nothing here is measured.
quick_jit = partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)


def is_inexact(x):
    return jnp.issubdtype(x.dtype, jnp.inexact)


def random_like(tree, seed):
    """Normal entries; constants to JAX, whose own generator takes long to compile."""
    rng = np.random.default_rng(seed)

    def leaf(x):
        values = rng.normal(size=x.shape)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            values = values + 1j * rng.normal(size=x.shape)
        return jnp.asarray(values, x.dtype)

    return jax.tree.map(leaf, tree)


def split(tree):
    """The inexact leaves of a tree, and a function that puts others in their place."""
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if is_inexact(leaf)]

    def join(values):
        merged = list(leaves)
        for i, value in zip(places, values, strict=True):
            merged[i] = value
        return jax.tree.unflatten(treedef, merged)

    return [leaves[i] for i in places], join


def batched(tree, seed):
    """A batch of trees of which the first is the given one; other than inexact leaves are repeated."""

    def leaf(x, i):
        if not is_inexact(x):
            return jnp.stack([x] * BATCH)
        noise = random_like(jax.ShapeDtypeStruct((BATCH - 1, *x.shape), x.dtype), i)
        return jnp.concatenate([x[None], noise])

    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, [leaf(x, seed + i) for i, x in enumerate(leaves)])


def loss_of(f):
    """A real function of the inexact residuals and the linear input, cubic in the latter."""

    def loss(values, linear, join):
        out = jax.tree.leaves(f(join(values), linear))
        return sum(jnp.sum(jnp.abs(y) ** 2) + jnp.sum(y.real) ** 3 for y in out)

    return loss


def evaluate(f, residuals, linear, seed):
    return f(residuals, linear)


def vmap_linear(f, residuals, linear, seed):
    return jax.vmap(f, (None, 0))(residuals, batched(linear, seed))


def vmap_residuals(f, residuals, linear, seed):
    return jax.vmap(f, (0, None))(batched(residuals, seed), linear)


def vmap_both(f, residuals, linear, seed):
    return jax.vmap(f, (0, 0))(batched(residuals, seed), batched(linear, seed + 50))


def jvp_both(f, residuals, linear, seed):
    values, join = split(residuals)
    return jax.jvp(lambda v, x: f(join(v), x), (values, linear), (random_like(values, seed), random_like(linear, seed)))


def transpose(f, residuals, linear, seed):
    cotangent = random_like(f(residuals, linear), seed)
    return jax.linear_transpose(lambda x: f(residuals, x), linear)(cotangent)


def transpose_twice(f, residuals, linear, seed):
    cotangent = random_like(f(residuals, linear), seed)

    def transposed(y):
        return jax.linear_transpose(lambda x: f(residuals, x), linear)(y)[0]

    return jax.linear_transpose(transposed, cotangent)(linear)


def vmap_then_transpose(f, residuals, linear, seed):
    many = batched(residuals, seed)
    cotangent = random_like(jax.vmap(f, (0, None))(many, linear), seed)
    return jax.linear_transpose(lambda x: jax.vmap(f, (0, None))(many, x), linear)(cotangent)


def transpose_then_vmap(f, residuals, linear, seed):
    return jax.vmap(lambda r, x: transpose(f, r, x, seed))(batched(residuals, seed), batched(linear, seed))


def grad(f, residuals, linear, seed):
    values, join = split(residuals)
    return jax.grad(loss_of(f), (0, 1))(values, linear, join)


def vmap_grad(f, residuals, linear, seed):
    return jax.vmap(lambda r, x: grad(f, r, x, seed))(batched(residuals, seed), batched(linear, seed))


def grad_of_checkpoint(f, residuals, linear, seed):
    return grad(jax.checkpoint(f), residuals, linear, seed)


def linearize_then_vmap_then_transpose(f, residuals, linear, seed):
    values, join = split(residuals)

    def push(linear, tangents):
        return jax.linearize(lambda v, x: f(join(v), x), values, linear)[1](*tangents)

    def many(tangents):
        return jax.vmap(push, (0, None))(batched(linear, seed), tangents)

    tangents = (random_like(values, seed), random_like(linear, seed))
    out = many(tangents)
    return out, jax.linear_transpose(many, tangents)(random_like(out, seed))


def forward_over_reverse(f, residuals, linear, seed):
    values, join = split(residuals)
    gradient = jax.grad(loss_of(f), (0, 1))
    dots = (random_like(values, seed), random_like(linear, seed))
    return jax.jvp(lambda v, x: gradient(v, x, join), (values, linear), dots)[1]


def reverse_over_reverse(f, residuals, linear, seed):
    values, join = split(residuals)

    def norm(v, x):
        return sum(jnp.sum(jnp.abs(g) ** 2) for g in jax.tree.leaves(jax.grad(loss_of(f), (0, 1))(v, x, join)))

    return jax.grad(norm, (0, 1))(values, linear)


ALL = [
    evaluate,
    vmap_linear,
    vmap_residuals,
    vmap_both,
    jvp_both,
    transpose,
    transpose_twice,
    vmap_then_transpose,
    transpose_then_vmap,
    grad,
    vmap_grad,
    grad_of_checkpoint,
    linearize_then_vmap_then_transpose,
    forward_over_reverse,
    reverse_over_reverse,
]

# Those that see more of a linear map than of its derivatives: enough where a thin layer is tested.
OF_LINEAR = [evaluate, vmap_both, transpose, transpose_twice, vmap_then_transpose, grad]


def assert_close(got, expected, factor=1.0):
    """Equal trees, shapes and dtypes, and values to a few hundred roundings of the largest."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        x, y = np.asarray(x), np.asarray(y)
        if x.size == 0 or not is_inexact(y):
            np.testing.assert_array_equal(x, y)
            continue
        finite = np.isfinite(y)
        np.testing.assert_array_equal(x[~finite], y[~finite])
        x, y = x[finite], y[finite]
        tolerance = 500 * factor * float(jnp.finfo(x.dtype).eps)
        assert np.max(np.abs(x - y), initial=0) <= tolerance * max(1, np.max(np.abs(y), initial=0))


def assert_same(transformation, f, reference, residuals, linear, jit=True, factor=1.0):
    """The transformation of ``f`` agrees with that of ``reference``."""

    def run(g):
        call = lambda r, x: transformation(g, r, x, 7)
        return (quick_jit(call) if jit else call)(residuals, linear)

    assert_close(run(f), run(reference), factor)
