r"""Sums over samples of products with derivatives of a network: the loops that every tangent operator runs.

Each function here is one scan over chunks whose body linearizes the network on its chunk. Bodies are checkpointed: a
derivative with respect to the parameters then keeps the chunk's inputs, not its activations, and memory stays flat.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .base import Vector, conjugate
from .linearization import explained
from .structure import Structure, is_complex, real_dtype, size_of

if TYPE_CHECKING:
    from .jacobian import Jacobian

# Up to this many real numbers of output per sample the mean rows are kept as vectors; beyond, the mean of each product
# is taken in a pass of its own.
MAX_MEAN_ROWS = 16


def _explains(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A network that cannot be linearized or transposed is named in the error, with the cure."""

    @functools.wraps(fun)
    def explained_fun(jacobian: Jacobian, *args: Any) -> Any:
        chunk = jacobian.chunks.chunk_structure
        with explained(jacobian.network, jacobian.params, chunk, name="Jacobian: f"):
            return fun(jacobian, *args)

    return explained_fun


@_explains
def push_forward(jacobian: Jacobian, vector: Vector) -> Vector:
    """``J v``: one row for each sample."""
    return jacobian.chunks.join(_products(jacobian, vector, safe_root))


@_explains
def pull_back(jacobian: Jacobian, cotangent: Vector) -> Vector:
    """``J^T y``, the transpose of `push_forward`."""
    return _pull(jacobian, jacobian.chunks.cut(cotangent), safe_root)


def _products(jacobian: Jacobian, vector: Vector, factor: Callable[[Array], Array]) -> Vector:
    """``O v``, centred, times a factor made of the weights, by chunks."""
    mean = _mean_of_product(jacobian, vector)

    def body(chunk, weights):
        _, out = jax.jvp(lambda p: jacobian.network(p, chunk), (jacobian.params,), (vector,))
        return _weigh(factor(weights), _subtract(out, mean))

    return _map_chunks(body, jacobian.chunks.samples, jacobian.chunks.weights)


def _pull(jacobian: Jacobian, cut: Vector, factor: Callable[[Array], Array]) -> Vector:
    """The transpose of `_products`."""
    chunks, total = jacobian.chunks, None
    if jacobian.center:
        total = jax.tree.map(lambda y: y.sum((0, 1)), jax.vmap(_weigh)(factor(chunks.weights), cut))

    def body(chunk, weights, y):
        y = _weigh(factor(weights), y)
        if total is not None:
            y = jax.tree.map(lambda y, s: y - _column(weights, y) * s, y, total)
        (out,) = jax.vjp(lambda p: jacobian.network(p, chunk), jacobian.params)[1](y)
        return out

    return _sum_chunks(body, jacobian.params, chunks.samples, chunks.weights, cut)


@_explains
def gram_product(jacobian: Jacobian, vector: Vector) -> Vector:
    r"""``J^H J v`` in one pass: each chunk is linearized once, pushed forward and pulled back.

    The mean over samples of the products is known beforehand, being a fixed linear functional of v. Subtracted from one
    of the two factors it would be enough in exact arithmetic, since the other then sums to zero against it. In floating
    point that sum is not zero, and a large mean would multiply it: it is summed up too, and its part taken away.
    """
    if jacobian.center and jacobian.mean_rows is None:
        # Weights rather than their roots twice: these have no derivative at zero.
        products = _products(jacobian, vector, jnp.ones_like)
        return conjugate(_pull(jacobian, conjugate(products), lambda weights: weights))
    mean = _mean_of_product(jacobian, vector)

    def body(chunk, weights):
        _, push = jax.linearize(lambda p: jacobian.network(p, chunk), jacobian.params)
        out = _weigh(weights, _subtract(push(vector), mean))
        (back,) = jax.linear_transpose(push, jacobian.params)(conjugate(out))
        return back, None if mean is None else jax.tree.map(lambda y: y.sum(0), out)

    chunks = jacobian.chunks
    back, rest = _sum_chunks(body, (jacobian.params, mean), chunks.samples, chunks.weights)
    back = conjugate(back)
    return back if rest is None else jax.tree.map(jnp.subtract, back, _adjoint_of_mean(jacobian, rest))


@eqx.filter_jit
@_explains
def mean_rows(jacobian: Jacobian) -> PyTree[Array] | None:
    r"""The vectors :math:`g_r` with which :math:`\mathrm{Re}\langle g_r, v\rangle` is component r of the mean product.

    One for each real number of output per sample, along a leading axis; None where these are too many to keep.
    """
    if sum(size_of(s) * (2 if is_complex(s) else 1) for s in jax.tree.leaves(_output_of_one(jacobian))) > MAX_MEAN_ROWS:
        return None
    units = output_units(jacobian)

    def body(chunk, weights):
        _, pull = jax.vjp(lambda p: jacobian.network(p, chunk), jacobian.params)

        def row(unit):
            spread = jax.tree.map(lambda u: jnp.broadcast_to(u, (weights.shape[0], *u.shape)), unit)
            return pull(_weigh(weights, conjugate(spread)))[0]

        return jax.vmap(row)(units)

    like = jax.tree.map(lambda p: jnp.zeros((len(jax.tree.leaves(units)[0]), *p.shape), p.dtype), jacobian.params)
    return conjugate(_sum_chunks(body, like, jacobian.chunks.samples, jacobian.chunks.weights))


def output_units(jacobian: Jacobian, *, parts: bool = True) -> PyTree[Array]:
    """Unit vectors of the output of one sample along a leading axis, those of imaginary parts too if ``parts``."""
    leaves, tree = jax.tree.flatten(_output_of_one(jacobian))
    counts = [size_of(s) * (2 if parts and is_complex(s) else 1) for s in leaves]
    out, start = [], 0
    for s, count in zip(leaves, counts, strict=True):
        units = jnp.eye(size_of(s), dtype=s.dtype).reshape(-1, *s.shape)
        if count > size_of(s):
            units = jnp.concatenate([units, 1j * units]).astype(s.dtype)
        out.append(jnp.zeros((sum(counts), *s.shape), s.dtype).at[start : start + count].set(units))
        start += count
    return jax.tree.unflatten(tree, out)


def _output_of_one(jacobian: Jacobian) -> Structure:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), jacobian.network_of_one.out_structure)


def _mean_of_product(jacobian: Jacobian, vector: Vector) -> PyTree[Array] | None:
    """The weighted mean over samples of ``O_i v``, one output's worth; None where rows are not centred."""
    if not jacobian.center:
        return None
    if jacobian.mean_rows is None:

        def body(chunk, weights):
            _, out = jax.jvp(lambda p: jacobian.network(p, chunk), (jacobian.params,), (vector,))
            return jax.tree.map(lambda o: (_column(weights, o) * o).sum(0), out)

        like = jax.tree.map(lambda s: jnp.zeros(s.shape[1:], s.dtype), jacobian.network.out_structure)
        return _sum_chunks(body, like, jacobian.chunks.samples, jacobian.chunks.weights)
    pairs = zip(jax.tree.leaves(jacobian.mean_rows), jax.tree.leaves(vector), strict=True)
    first, *rest = (jax.vmap(_real_inner, (0, None))(rows, x) for rows, x in pairs)
    components = sum(rest, first)
    units = output_units(jacobian)
    return jax.tree.map(
        lambda u: jnp.tensordot(components.astype(real_dtype(u.dtype)), u, axes=1, precision="highest"), units
    )


def _adjoint_of_mean(jacobian: Jacobian, output: PyTree[Array]) -> Vector:
    """The adjoint of `_mean_of_product` where the mean rows are kept, of one output's worth."""
    units = jax.tree.leaves(output_units(jacobian))
    pairs = zip(units, jax.tree.leaves(output), strict=True)
    first, *rest = (jax.vmap(_real_inner, (0, None))(unit, y) for unit, y in pairs)
    components = sum(rest, first)
    return jax.tree.map(
        lambda row: jnp.tensordot(components.astype(real_dtype(row.dtype)), row, axes=1, precision="highest"),
        jacobian.mean_rows,
    )


def _real_inner(x: Array, y: Array) -> Array:
    if is_complex(x):
        return jnp.sum(x.real * y.real) + jnp.sum(x.imag * y.imag)
    return jnp.sum(x * y)


def _map_chunks(body, *stacks: Any) -> Any:
    if jax.tree.leaves(stacks)[0].shape[0] == 1:
        out = jax.checkpoint(body)(*jax.tree.map(lambda x: x[0], stacks))
        return jax.tree.map(lambda x: x[None], out)
    checkpointed = jax.checkpoint(body, prevent_cse=False)
    return jax.lax.scan(lambda _, chunk: (None, checkpointed(*chunk)), None, stacks)[1]


def _sum_chunks(body, like: Any, *stacks: Any) -> Any:
    """Sum of ``body`` over chunks; ``like`` has the shapes and dtypes of the sum."""
    if jax.tree.leaves(stacks)[0].shape[0] == 1:
        return jax.checkpoint(body)(*jax.tree.map(lambda x: x[0], stacks))
    checkpointed = jax.checkpoint(body, prevent_cse=False)

    def step(total, chunk):
        return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, checkpointed(*chunk)), None

    # A sum of many chunks in half precision stops growing once it is some hundred times larger than its terms.
    wide = jax.tree.map(lambda x: jnp.zeros_like(x, dtype=jnp.promote_types(x.dtype, jnp.float32)), like)
    total = jax.lax.scan(step, wide, stacks)[0]
    return jax.tree.map(lambda t, x: t.astype(x.dtype), total, like)


def safe_root(weights: Array) -> Array:
    """The square root of weights, with derivative zero at zero."""
    # The derivative of the root at zero is infinite; there the row is zero whatever the derivative. NaN stays NaN.
    return jnp.where(weights == 0, 0, jnp.sqrt(jnp.where(weights == 0, 1, weights)))


def _column(weights: Array, like: Array) -> Array:
    return weights.astype(real_dtype(like.dtype)).reshape(-1, *(1 for _ in like.shape[1:]))


def _weigh(weights: Array, vector: Vector) -> Vector:
    return jax.tree.map(lambda y: _column(weights, y) * y, vector)


def _subtract(vector: Vector, mean: PyTree[Array] | None) -> Vector:
    return vector if mean is None else jax.tree.map(lambda y, m: y - m, vector, mean)
