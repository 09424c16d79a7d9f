"""Chosen rows of a Jacobian and the norms of all, for what picks samples that stand for the rest.

Rows, numbers of the output and the entries of a row are as in `rows`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Int, Real

from .base import Vector
from .linearization import explained
from .rows import _mean, _over_groups, _row_type, _rows_of_one, _units
from .structure import is_complex, real_dtype
from .tangent_sums import safe_root

if TYPE_CHECKING:
    from .jacobian import Jacobian

# Entries held at a time.
_ENTRIES_AT_ONCE = 1 << 22


def mean_row(jacobian: Jacobian) -> Inexact[Array, "numbers P"] | None:
    """The weighted mean that centring subtracts; None without centring."""
    if not jacobian.center:
        return None
    units = _units(jacobian)
    with explained(jacobian.network, jacobian.params, jacobian.chunks.chunk_structure, name="Jacobian: f"):
        return _mean(jacobian, units, _group(jacobian, units))


def row_norms(jacobian: Jacobian, mean: Inexact[Array, "numbers P"] | None) -> Real[Array, "N numbers"]:
    """The squared norms of all rows."""
    units = _units(jacobian)
    with explained(jacobian.network, jacobian.params, jacobian.chunks.chunk_structure, name="Jacobian: f"):

        def norms(pair):
            sample, weight = pair
            rows = _rows_of_one(jacobian, units, sample)
            if mean is not None:
                rows = rows - mean
            return weight.astype(real_dtype(rows.dtype)) * jnp.sum(rows.real**2 + rows.imag**2, axis=-1)

        pairs = _samples(jacobian), jacobian.chunks.flat_weights
        return jax.lax.map(norms, pairs, batch_size=_group(jacobian, units))


def adjoint_rows(
    jacobian: Jacobian,
    mean: Inexact[Array, "numbers P"] | None,
    samples: Int[Array, " k"],
    numbers: Int[Array, " k"],
) -> Inexact[Array, "k P"]:
    """``J^H e`` for unit vectors e of the outputs: one number of one sample each."""
    units, everything = _units(jacobian), _samples(jacobian)
    with explained(jacobian.network, jacobian.params, jacobian.chunks.chunk_structure, name="Jacobian: f"):

        def one(pair):
            sample, number = pair
            unit = jax.tree.map(lambda u: u[number][None], units)
            (row,) = _rows_of_one(jacobian, unit, jax.tree.map(lambda x: x[sample], everything))
            if mean is not None:
                row = row - mean[number]
            root = safe_root(jacobian.chunks.flat_weights[sample])
            return jnp.conj(row) * root.astype(real_dtype(row.dtype))

        return jax.lax.map(one, (samples, numbers), batch_size=_group(jacobian, units))


def by_numbers(jacobian: Jacobian, vector: Vector) -> Inexact[Array, "N numbers"]:
    """A vector of outputs with the numbers of each sample in a row."""
    columns = []
    for leaf in jax.tree.leaves(vector):
        flat = leaf.reshape(leaf.shape[0], -1)
        columns.extend([flat.real, flat.imag] if jacobian.field == "real" and is_complex(leaf) else [flat])
    return jnp.concatenate(columns, axis=1)


def _samples(jacobian):
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: jacobian.chunks.num_samples], jacobian.chunks.samples)


def _group(jacobian, units):
    """Samples at a time."""
    numbers = jax.tree.leaves(units)[0].shape[0]
    length, _ = _row_type(jacobian)
    return max(1, min(jacobian.chunks.num_samples, _ENTRIES_AT_ONCE // max(1, numbers * length)))


def gram_blocks(jacobian: Jacobian, blocks: list[Int[np.ndarray, " m"]]) -> list[Inexact[Array, "m m"]]:
    """The blocks of the matrix of ``J^H J`` on some sets of entries, from one pass over the samples."""
    units, mean = _units(jacobian), mean_row(jacobian)
    with explained(jacobian.network, jacobian.params, jacobian.chunks.chunk_structure, name="Jacobian: f"):

        def of_group(pair):
            samples, weights = pair
            rows = jax.vmap(lambda sample: _rows_of_one(jacobian, units, sample))(samples)
            if mean is not None:
                rows = rows - mean
            rows = safe_root(weights).astype(real_dtype(rows.dtype))[:, None, None] * rows
            parts = [rows.reshape(-1, rows.shape[-1])[:, block] for block in blocks]
            return jnp.concatenate([jnp.matmul(jnp.conj(x.T), x, precision="highest").reshape(-1) for x in parts])

        sizes = [len(block) ** 2 for block in blocks]
        zero = jnp.zeros(sum(sizes), _row_type(jacobian)[1])
        flat = _over_groups(of_group, jacobian, _group(jacobian, units), zero)
    cut = jnp.split(flat, np.cumsum(sizes)[:-1])
    return [x.reshape(len(block), len(block)) for x, block in zip(cut, blocks, strict=True)]
