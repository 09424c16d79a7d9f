r"""Sums over samples of products with derivatives of a network: the loops that chunked tangent operators run.

Each function here is one loop over chunks. What a chunk's derivative is made of, samples or kept residuals, is the
storage's business.
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
from .linear_call import one_by_one
from .linearization import explained, refuse_reverse_only
from .sharding import context_of_parts
from .structure import Structure, is_complex, real_dtype, size_of

if TYPE_CHECKING:
    from .chunks import Chunks
    from .jacobian import Jacobian
    from .storage import Chunked

# Up to this many real numbers of output per sample the mean rows are kept as vectors; beyond, the mean of each product
# is taken in a pass of its own.
MAX_MEAN_ROWS = 16


def each(fun: Callable[..., Any], *linear: Any) -> Any:
    """``fun(*linear)``, linear; on CPUs with a batch of vectors one after the other.

    There jaxlib 0.10.2 gets some batched derivatives wrong, and those of an RBM take longer a vector.
    """
    return one_by_one(fun, *linear) if jax.default_backend() == "cpu" else fun(*linear)


def explains(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A network that cannot be linearized or transposed is named in the error, with the cure."""

    @functools.wraps(fun)
    def explained_fun(jacobian: Jacobian, *args: Any) -> Any:
        chunk = jacobian.chunks.chunk_structure
        with explained(jacobian.network, jacobian.params, chunk, name="Jacobian: f"):
            return fun(jacobian, *args)

    return explained_fun


@explains
def check_forward(jacobian: Jacobian) -> None:
    """Fail where the network has a derivative for reverse mode only, see `refuse_reverse_only`."""
    network, chunks = jacobian.network, jacobian.chunks
    with context_of_parts(chunks.spread):
        refuse_reverse_only(network, network.jaxpr, jacobian.params, chunks.chunk_structure)


@explains
def push_forward(jacobian: Jacobian, vector: Vector) -> Vector:
    """``J v``: one row for each sample."""
    check_forward(jacobian)
    return jacobian.chunks.join(_products(jacobian, vector, safe_root))


@explains
def pull_back(jacobian: Jacobian, cotangent: Vector) -> Vector:
    """``J^T y``, the transpose of `push_forward`."""
    return _pull(jacobian, jacobian.chunks.cut(cotangent), safe_root)


def _products(jacobian: Jacobian, vector: Vector, factor: Callable[[Array], Array]) -> Vector:
    """``O v``, centred, times a factor made of the weights, by chunks."""
    chunks, storage = jacobian.chunks, _chunked(jacobian)

    def body(shared, chunk, weights):
        of_storage, vector, mean = shared
        out = each(storage.tangent_map(of_storage, chunk), vector)
        return _weigh(factor(weights), _subtract(out, mean))

    shared = storage.shared(jacobian), vector, _mean_of_product(jacobian, vector)
    return chunks.map(body, shared, storage.stacked(jacobian), chunks.weights)


def _pull(jacobian: Jacobian, cut: Vector, factor: Callable[[Array], Array]) -> Vector:
    """The transpose of `_products`."""
    chunks, storage, total = jacobian.chunks, _chunked(jacobian), None
    if jacobian.center:
        like = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), jacobian.network.out_structure)

        def weighed(_, weights, y):
            return _sum(chunks, _weigh(factor(weights), y))

        total = chunks.sum(weighed, like, None, chunks.weights, cut)

    def body(shared, chunk, weights, y):
        of_storage, total = shared
        y = _weigh(factor(weights), y)
        if total is not None:
            y = jax.tree.map(lambda y, s: y - _column(weights, y) * s, y, total)
        return each(storage.cotangent_map(of_storage, chunk), y)

    shared = storage.shared(jacobian), total
    return chunks.sum(body, jacobian.in_structure(), shared, storage.stacked(jacobian), chunks.weights, cut)


@explains
def gram_product(jacobian: Jacobian, vector: Vector) -> Vector:
    r"""``J^H J v`` in one pass: each chunk is linearized once, pushed forward and pulled back.

    The mean over samples of the products is known beforehand, being a fixed linear functional of v. Subtracted from one
    of the two factors it would be enough in exact arithmetic, since the other then sums to zero against it. In floating
    point that sum is not zero, and a large mean would multiply it: it is summed up too, and its part taken away.
    """
    check_forward(jacobian)
    if jacobian.center and jacobian.mean_rows is None:
        # Weights rather than their roots twice: these have no derivative at zero.
        products = _products(jacobian, vector, jnp.ones_like)
        return conjugate(_pull(jacobian, conjugate(products), lambda weights: weights))
    chunks, storage = jacobian.chunks, _chunked(jacobian)
    mean = _mean_of_product(jacobian, vector)

    def body(shared, chunk, weights):
        of_storage, vector, mean = shared
        push = storage.tangent_map(of_storage, chunk)

        def there_and_back(vector, mean):
            out = _weigh(weights, _subtract(push(vector), mean))
            (back,) = jax.linear_transpose(push, vector)(conjugate(out))
            return conjugate(back), None if mean is None else _sum(chunks, out)

        return each(there_and_back, vector, mean)

    shared = storage.shared(jacobian), vector, mean
    back, rest = chunks.sum(body, (jacobian.in_structure(), mean), shared, storage.stacked(jacobian), chunks.weights)
    return back if rest is None else jax.tree.map(jnp.subtract, back, _adjoint_of_mean(jacobian, rest))


@eqx.filter_jit
@explains
def mean_rows(jacobian: Jacobian) -> PyTree[Array] | None:
    r"""The vectors :math:`g_r` with which :math:`\mathrm{Re}\langle g_r, v\rangle` is component r of the mean product.

    One for each real number of output per sample, along a leading axis; None where these are too many to keep.
    """
    if sum(size_of(s) * (2 if is_complex(s) else 1) for s in jax.tree.leaves(_output_of_one(jacobian))) > MAX_MEAN_ROWS:
        return None
    return conjugate(mean_of_pulled(jacobian, output_units(jacobian)))


def mean_of_pulled(jacobian: Jacobian, units: PyTree[Array]) -> PyTree[Array]:
    """The weighted mean over samples of the conjugate of each unit output, pulled back."""
    chunks, storage = jacobian.chunks, _chunked(jacobian)

    def body(shared, chunk, weights):
        of_storage, units = shared
        pull = storage.cotangent_map(of_storage, chunk)

        def row(unit):
            spread = jax.tree.map(lambda u: jnp.broadcast_to(u, (weights.shape[0], *u.shape)), unit)
            return pull(_weigh(weights, conjugate(spread)))

        # One after the other: from the batched pull-back of a normalised layer in single precision XLA of jaxlib 0.10.2
        # makes wrong code on CPUs.
        return jax.lax.map(row, units)

    count = jax.tree.leaves(units)[0].shape[0]
    like = jax.tree.map(lambda p: jax.ShapeDtypeStruct((count, *p.shape), p.dtype), jacobian.in_structure())
    return chunks.sum(body, like, (storage.shared(jacobian), units), storage.stacked(jacobian), chunks.weights)


def output_units(jacobian: Jacobian, *, parts: bool = True) -> PyTree[Array]:
    """Unit vectors of the output of one sample along a leading axis, those of imaginary parts too if ``parts``."""
    leaves, tree = jax.tree.flatten(_output_of_one(jacobian))
    counts = [size_of(s) * (2 if parts and is_complex(s) else 1) for s in leaves]
    out, start = [], 0
    for s, count in zip(leaves, counts, strict=True):
        units = jnp.eye(size_of(s), dtype=s.dtype).reshape(size_of(s), *s.shape)
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
        chunks, storage = jacobian.chunks, _chunked(jacobian)

        def body(shared, chunk, weights):
            of_storage, vector = shared
            out = each(storage.tangent_map(of_storage, chunk), vector)
            return _sum(chunks, _weigh(weights, out))

        like = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), jacobian.network.out_structure)
        return chunks.sum(body, like, (storage.shared(jacobian), vector), storage.stacked(jacobian), chunks.weights)
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


def _chunked(jacobian: Jacobian) -> Chunked:
    """The storage that loops over chunks; what needs a loop on a dense Jacobian evaluates the network."""
    from .storage import Chunked, Recomputed

    return jacobian.storage if isinstance(jacobian.storage, Chunked) else Recomputed()


def safe_root(weights: Array) -> Array:
    """The square root of weights, with derivative zero at zero."""
    # The derivative of the root at zero is infinite; there the row is zero whatever the derivative. NaN stays NaN.
    return jnp.where(weights == 0, 0, jnp.sqrt(jnp.where(weights == 0, 1, weights)))


def _column(weights: Array, like: Array) -> Array:
    return weights.astype(real_dtype(like.dtype)).reshape(-1, *(1 for _ in like.shape[1:]))


def _weigh(weights: Array, vector: Vector) -> Vector:
    return jax.tree.map(lambda y: _column(weights, y) * y, vector)


def _sum(chunks: Chunks, vector: Vector) -> PyTree[Array]:
    """The sum over the samples of a chunk."""
    return jax.tree.map(lambda y: y.sum(0, dtype=chunks.dtype_of_sums(y.dtype)), vector)


def _subtract(vector: Vector, mean: PyTree[Array] | None) -> Vector:
    return vector if mean is None else jax.tree.map(lambda y, m: y - m, vector, mean)
