r"""The matrix of :math:`J J^H`, the neural tangent kernel on all samples, from blocks of rows of J."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .rows import from_numbers, group_size, number_count, row_parts, row_type, rows_by_groups
from .structure import ravel, real_dtype, split_real
from .tangent_sums import explains, safe_root

if TYPE_CHECKING:
    from .jacobian import Jacobian

# Entries of J held at a time, or as many as the matrix itself has.
_ENTRIES_HELD = 1 << 25


@eqx.filter_jit
@explains
def cogram_matrix(jacobian: Jacobian) -> Inexact[Array, "numbers numbers"]:
    """The matrix on ravelled outputs, see `LinearOperator.as_matrix`; of samples on one device.

    A block of rows is held, and multiplied with all rows, which are differentiated anew for each block.
    """
    count, held = jacobian.chunks.num_samples, _most_held(jacobian)
    kept = jacobian.storage.entries
    if kept is not None:
        weights = jacobian.chunks.flat_weights
        kept = kept.reshape(-1, *kept.shape[2:])[:count].astype(row_type(jacobian)[1])
        matrix = _square(_weighed(kept, weights))
    elif held >= count:
        samples = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], jacobian.chunks.samples)
        rows = rows_by_groups(jacobian, row_parts(jacobian), samples)
        matrix = _square(_weighed(rows, jacobian.chunks.flat_weights))
    else:
        matrix = _by_blocks(jacobian, held)
    order = functools.partial(_ravelled, jacobian)
    return jax.vmap(order, in_axes=2, out_axes=1)(jax.vmap(jax.vmap(order))(matrix))


def _most_held(jacobian: Jacobian) -> int:
    """How many samples' rows are held."""
    numbers, (length, _) = number_count(jacobian), row_type(jacobian)
    return max(1, max(_ENTRIES_HELD, (jacobian.chunks.num_samples * numbers) ** 2) // (numbers * length))


def _by_blocks(jacobian: Jacobian, held: int) -> Array:
    parts, chunks = row_parts(jacobian), jacobian.chunks
    outer, inner = chunks.recut(held), chunks.recut(group_size(jacobian, held))

    def of_block(shared, samples, weights):
        parts, others = shared
        left = _weighed(rows_by_groups(jacobian, parts, samples), weights)

        def with_group(shared, samples, weights):
            parts, left = shared
            right = _weighed(rows_by_groups(jacobian, parts, samples), weights)
            return _product(left, right)

        # (groups, rows of the block, rows of the group), each row a sample and a number of its output
        products = inner.map(with_group, (parts, left), *others)
        joined = jnp.moveaxis(products, 0, 2)
        return joined.reshape(*joined.shape[:2], -1, joined.shape[-1])[:, :, : chunks.num_samples]

    blocks = outer.map(of_block, (parts, (inner.samples, inner.weights)), outer.samples, outer.weights)
    return blocks.reshape(-1, *blocks.shape[2:])[: chunks.num_samples]


def _weighed(rows: Array, weights: Array) -> Array:
    return safe_root(weights).astype(real_dtype(rows.dtype))[:, None, None] * rows


def _square(rows: Array) -> Array:
    return _product(rows, rows)


def _product(left: Array, right: Array) -> Array:
    return jnp.einsum("imp,jnp->imjn", left, jnp.conj(right), precision="highest")


def _ravelled(jacobian: Jacobian, numbers: Array) -> Array:
    """Numbers of each sample's output in the order of `LinearOperator.as_matrix`."""
    vector = from_numbers(jacobian, numbers)
    return ravel(split_real(vector)) if jacobian.field == "real" else ravel(vector)
