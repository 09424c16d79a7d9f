"""Chosen rows of a Jacobian and the norms of all, for what picks samples that stand for the rest.

Rows, numbers of the output and the entries of a row are as in `rows`, but weighted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .rows import RowParts, row
from .structure import real_dtype
from .tangent_sums import explains, safe_root

if TYPE_CHECKING:
    from .jacobian import Jacobian

# Rows at a time.
_ROWS_AT_ONCE = 64


@explains
def row_norms(jacobian: Jacobian, parts: RowParts) -> Real[Array, "N numbers"]:
    """The squared norms of all rows."""

    def of_chunk(parts, samples, weights):
        def of_one(pair):
            sample, weight = pair
            rows = row(jacobian, parts, sample)
            return weight.astype(real_dtype(rows.dtype)) * jnp.sum(rows.real**2 + rows.imag**2, axis=-1)

        return jax.lax.map(of_one, (samples, weights), batch_size=min(_ROWS_AT_ONCE, len(weights)))

    chunks = jacobian.chunks
    return chunks.join(chunks.map(of_chunk, parts, chunks.samples, chunks.weights))


@explains
def adjoint_rows(
    jacobian: Jacobian, parts: RowParts, samples: Int[Array, " k"], numbers: Int[Array, " k"]
) -> Inexact[Array, "k P"]:
    """``J^H e`` for unit vectors e of the outputs: one number of one sample each."""
    everything, weights = jacobian.chunks.join(jacobian.chunks.samples), jacobian.chunks.flat_weights

    def of_one(pair):
        sample, number = pair
        unit = jax.tree.map(lambda u: u[number][None], parts.units)
        mean = None if parts.mean is None else parts.mean[number][None]
        one = jax.tree.map(lambda x: x[sample], everything)
        (chosen,) = row(jacobian, parts._replace(units=unit, mean=mean), one)
        return jnp.conj(chosen) * safe_root(weights[sample]).astype(real_dtype(chosen.dtype))

    return jax.lax.map(of_one, (samples, numbers), batch_size=min(_ROWS_AT_ONCE, len(samples)))
