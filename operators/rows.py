r"""The entries of a Jacobian, a group of samples at a time, and the sums over them that need entries.

Row (i, r) is the centred gradient of number r of the output on sample i, without its weight. Over the real field the
numbers are real, first the real parts and then the imaginary parts of each output leaf, and a row runs over the real
parts of all parameters and then the imaginary parts of the complex ones. Over the complex field both are complex.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .base import Field, Vector
from .closure import ClosedFunction
from .structure import (
    Structure,
    common_dtype,
    is_complex,
    of_precision,
    ravel,
    real_dtype,
    size_of,
    split_real,
    structure_of,
)
from .tangent_sums import explains, mean_of_pulled, output_units

if TYPE_CHECKING:
    from .jacobian import Jacobian

# Entries held at a time.
_ENTRIES_AT_ONCE = 1 << 23


@eqx.filter_jit
def gram_matrix(jacobian: Jacobian) -> Inexact[Array, "P P"]:
    """The matrix of ``J^H J``, on rows' entries."""
    length, dtype = row_type(jacobian)
    return sum_over_rows(jacobian, _gram, jax.ShapeDtypeStruct((length, length), dtype))


def leaf_entries(structure: Structure, field: Field) -> list[Int[np.ndarray, " m"]]:
    """Which entries of a row belong to each leaf: over the real field those of imaginary parts too, after the real."""
    leaves = jax.tree.leaves(structure)
    starts = np.cumsum([0, *(size_of(s) for s in leaves)])
    entries = [np.arange(a, b) for a, b in itertools.pairwise(starts)]
    if field == "complex":
        return entries
    start = starts[-1]
    for i, s in enumerate(leaves):
        if is_complex(s):
            entries[i] = np.concatenate([entries[i], np.arange(start, start + size_of(s))])
            start += size_of(s)
    return entries


@eqx.filter_jit
def gram_blocks(jacobian: Jacobian, blocks: list[Int[np.ndarray, " m"]]) -> list[Inexact[Array, "m m"]]:
    """The blocks of the matrix of ``J^H J`` on some sets of entries, from one pass over the samples."""

    def products(rows, weights):
        return jnp.concatenate([_gram(rows[..., block], weights).reshape(-1) for block in blocks])

    sizes = [len(block) ** 2 for block in blocks]
    flat = sum_over_rows(jacobian, products, jax.ShapeDtypeStruct((sum(sizes),), row_type(jacobian)[1]))
    cut = jnp.split(flat, np.cumsum(sizes)[:-1])
    return [x.reshape(len(block), len(block)) for x, block in zip(cut, blocks, strict=True)]


def _gram(rows, weights):
    # Weights rather than their roots twice: these have no derivative at zero.
    left, right = jnp.conj(rows), weights[:, None, None] * rows
    return jnp.einsum("cnp,cnq->pq", left, right, precision="highest")


@eqx.filter_jit
def gram_diagonal(jacobian: Jacobian) -> Real[Array, " P"]:
    """The diagonal of ``J^H J``, on rows' entries."""

    def squares(rows, weights):
        return jnp.sum(weights[:, None, None] * (rows.real**2 + rows.imag**2), axis=(0, 1))

    length, dtype = row_type(jacobian)
    return sum_over_rows(jacobian, squares, jax.ShapeDtypeStruct((length,), real_dtype(dtype)))


@eqx.filter_jit
@explains
def all_rows(jacobian: Jacobian) -> Inexact[Array, "K c numbers P"]:
    """All rows, by chunks."""
    (length, wide), computed = row_type(jacobian), common_dtype(structure_of(jacobian.params))
    # Digits that the network does not compute, or that vectors do not have, are not worth their memory.
    dtype = min(wide, of_precision(wide, real_dtype(computed)), key=lambda dtype: dtype.itemsize)

    def of_chunk(parts, samples):
        return rows_by_groups(jacobian, parts, samples, dtype)

    chunks = jacobian.chunks
    rows = chunks.map(of_chunk, row_parts(jacobian, centred=False), chunks.samples)
    if not jacobian.center:
        return rows

    # The mean of rows that are there, rather than of rows made for it.
    def weighted_sum(_, rows, weights):
        rows = rows.astype(wide)
        total = jnp.matmul(weights.astype(real_dtype(wide)), rows.reshape(len(weights), -1), precision="highest")
        return total.reshape(rows.shape[1:])

    like, group = jax.ShapeDtypeStruct((number_count(jacobian), length), wide), group_size(jacobian, chunks.size)
    mean = chunks.sum(weighted_sum, like, None, rows, chunks.weights, group=group)
    return chunks.run(lambda mean, rows: (rows - mean).astype(dtype), mean, rows)


def rows_by_groups(
    jacobian: Jacobian, parts: RowParts, samples: PyTree, dtype: Any = None
) -> Inexact[Array, "c numbers P"]:
    """The rows of some samples, few at a time; in the dtype of sums, or another."""
    dtype = row_type(jacobian)[1] if dtype is None else dtype
    count = jax.tree.leaves(samples)[0].shape[0]
    group = group_size(jacobian, count)
    if group == count:
        return _rows(jacobian, parts, samples).astype(dtype)
    return jax.lax.map(lambda sample: row(jacobian, parts, sample).astype(dtype), samples, batch_size=group)


@explains
def sum_over_rows(jacobian: Jacobian, summand: Callable[[Array, Array], Array], like: jax.ShapeDtypeStruct) -> Array:
    """The sum of ``summand(rows, weights)`` over groups of samples."""
    chunks, kept = jacobian.chunks, jacobian.storage.entries
    wide = row_type(jacobian)[1]
    real = real_dtype(wide)
    if kept is not None and at_once(jacobian, kept):

        def of_kept(_, rows, weights):
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (rows, weights))
            return summand(flat[0], flat[1].astype(real))

        return chunks.run(of_kept, None, kept, chunks.weights, result="sum")
    if kept is not None:

        def of_part(_, rows, weights):
            return summand(rows.astype(wide), weights.astype(real))

        return chunks.sum(of_part, like, None, kept, chunks.weights, group=group_size(jacobian, chunks.size))

    def of_group(parts, samples, weights):
        return summand(_rows(jacobian, parts, samples), weights.astype(real))

    # Chunks of their own: what a product holds of a chunk says nothing of the size of its rows.
    chunks = chunks.recut(group_size(jacobian, chunks.num_samples))
    return chunks.sum(of_group, like, row_parts(jacobian), chunks.samples, chunks.weights)


def at_once(jacobian: Jacobian, rows: Array) -> bool:
    """Whether sums over kept rows need no loop: neither to widen few of them at a time, nor to add in more digits."""
    wide = row_type(jacobian)[1]
    return rows.dtype == wide and jacobian.chunks.accumulate in (None, real_dtype(wide))


def row_type(jacobian: Jacobian) -> tuple[int, Any]:
    """How many entries a row has, and the dtype of sums over rows: that of vectors."""
    params = jacobian.in_structure()
    if jacobian.field == "real":
        params = split_real(params)
    return size_of(params), common_dtype(params)


def number_count(jacobian: Jacobian) -> int:
    """The numbers of the output on one sample, real ones over the real field."""
    return jax.tree.leaves(_units(jacobian))[0].shape[0]


def group_size(jacobian: Jacobian, most: int) -> int:
    """How many samples' rows are computed at a time, of so many."""
    length, _ = row_type(jacobian)
    size = max(1, min(most, _ENTRIES_AT_ONCE // max(1, number_count(jacobian) * length)))
    # Groups of one size, where there is one not much smaller: a smaller last group is compiled for itself.
    return next((s for s in range(size, size // 2, -1) if most % s == 0), size)


class RowParts(NamedTuple):
    """What rows are made of, apart from samples."""

    network: ClosedFunction
    params: PyTree
    units: PyTree
    mean: Inexact[Array, "numbers P"] | None


def row_parts(jacobian: Jacobian, centred: bool = True) -> RowParts:
    """The network, its parameters, unit outputs of one sample, and the mean row of a centred Jacobian if wanted."""
    units, mean = _units(jacobian), None
    if jacobian.center and centred:
        mean = jax.vmap(lambda gradient: _flatten(jacobian, gradient))(mean_of_pulled(jacobian, units))
    return RowParts(jacobian.network_of_one, jacobian.params, units, mean)


def row(jacobian: Jacobian, parts: RowParts, sample: PyTree) -> Inexact[Array, "numbers P"]:
    """The rows of one sample, one for each number of its output."""
    network, params, units, mean = parts
    one = jax.tree.map(lambda x: x[None], sample)
    pull = jax.vjp(lambda p: network(p, one), params)[1]

    # The transpose, unconjugated: for a holomorphic network the row itself, else the conjugate of its gradient.
    def of_unit(unit):
        return _flatten(jacobian, pull(jax.tree.map(lambda u: jnp.conj(u)[None], unit))[0])

    rows = jax.vmap(of_unit)(units).astype(row_type(jacobian)[1])
    return rows if mean is None else rows - mean


def _rows(jacobian, parts, samples):
    return jax.vmap(lambda sample: row(jacobian, parts, sample))(samples)


def _flatten(jacobian, gradient):
    if jacobian.field == "complex":
        return ravel(gradient)
    return ravel(split_real(jax.tree.map(jnp.conj, gradient)))


def _units(jacobian: Jacobian) -> Any:
    """Unit outputs of one sample: real ones for complex numbers, else those of real and imaginary parts."""
    return output_units(jacobian, parts=jacobian.field == "real")


def by_numbers(jacobian: Jacobian, vector: Vector) -> Inexact[Array, "N numbers"]:
    """A vector of outputs with the numbers of each sample in a row."""
    columns = []
    for leaf in jax.tree.leaves(vector):
        flat = leaf.reshape(leaf.shape[0], -1)
        columns.extend([flat.real, flat.imag] if jacobian.field == "real" and is_complex(leaf) else [flat])
    return jnp.concatenate(columns, axis=1)


def from_numbers(jacobian: Jacobian, numbers: Inexact[Array, "N numbers"]) -> Vector:
    """Inverse of `by_numbers`."""
    start = 0

    def leaf(s: jax.ShapeDtypeStruct) -> Array:
        nonlocal start
        size = size_of(s) // s.shape[0]
        part = numbers[:, start : start + size]
        start += size
        if jacobian.field == "real" and is_complex(s):
            part = jax.lax.complex(part, numbers[:, start : start + size])
            start += size
        return part.reshape(s.shape).astype(s.dtype)

    return jax.tree.map(leaf, jacobian.out_structure())
