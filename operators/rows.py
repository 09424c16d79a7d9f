r"""The entries of a Jacobian, a group of samples at a time, and the sums over them that need entries.

Row (i, r) is the weighted, centred gradient of number r of the output on sample i. Over the real field the numbers are
real, first the real parts and then the imaginary parts of each output leaf, and a row runs over the real parts of all
parameters and then the imaginary parts of the complex ones. Over the complex field numbers and rows are complex.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .linearization import explained
from .structure import common_dtype, ravel, real_dtype, size_of, split_real, structure_of
from .tangent_sums import output_units, safe_root

if TYPE_CHECKING:
    from .jacobian import Jacobian

# Entries held at a time.
_ENTRIES_AT_ONCE = 1 << 23


@eqx.filter_jit
def gram_matrix(jacobian: Jacobian) -> Inexact[Array, "P P"]:
    """The matrix of ``J^H J``, on rows' entries."""

    def product(rows):
        flat = rows.reshape(-1, rows.shape[-1])
        return jnp.matmul(jnp.conj(flat.T), flat, precision="highest")

    return _sum_over_rows(jacobian, product, 2)


@eqx.filter_jit
def gram_diagonal(jacobian: Jacobian) -> Real[Array, " P"]:
    """The diagonal of ``J^H J``, on rows' entries."""
    return _sum_over_rows(jacobian, lambda rows: jnp.sum(rows.real**2 + rows.imag**2, axis=(0, 1)), 1)


def _sum_over_rows(jacobian: Jacobian, summand: Callable[[Array], Array], dimensions: int) -> Array:
    """The sum of ``summand(rows)`` over groups of samples; each has ``dimensions`` axes of a row's length."""
    chunks = jacobian.chunks
    with explained(jacobian.network, jacobian.params, chunks.chunk_structure, name="Jacobian: f"):
        units = _units(jacobian)
        numbers = jax.tree.leaves(units)[0].shape[0]
        length, dtype = _row_type(jacobian)
        group = max(1, min(chunks.num_samples, _ENTRIES_AT_ONCE // max(1, numbers * length)))
        mean = _mean(jacobian, units, group) if jacobian.center else None

        def of_group(pair):
            samples, weights = pair
            rows = jax.vmap(lambda sample: _rows_of_one(jacobian, units, sample))(samples)
            if mean is not None:
                rows = rows - mean
            root = safe_root(weights).astype(real_dtype(rows.dtype))
            return summand(root[:, None, None] * rows)

        real = real_dtype(dtype) if dimensions == 1 else dtype
        return _over_groups(of_group, jacobian, group, jnp.zeros((length,) * dimensions, real))


def _mean(jacobian, units, group):
    """The weighted mean of each row over samples."""
    numbers = jax.tree.leaves(units)[0].shape[0]
    length, dtype = _row_type(jacobian)

    def weighted(pair):
        samples, weights = pair
        rows = jax.vmap(lambda sample: _rows_of_one(jacobian, units, sample))(samples)
        return jnp.tensordot(weights.astype(real_dtype(rows.dtype)), rows, axes=1, precision="highest")

    return _over_groups(weighted, jacobian, group, jnp.zeros((numbers, length), dtype))


def _rows_of_one(jacobian, units, sample):
    one = jax.tree.map(lambda x: x[None], sample)
    pull = jax.vjp(lambda params: jacobian.network_of_one(params, one), jacobian.params)[1]

    def row(unit):
        # The transpose, unconjugated: for a holomorphic network the row itself, else the conjugate of its gradient.
        (gradient,) = pull(jax.tree.map(lambda u: jnp.conj(u)[None], unit))
        if jacobian.field == "complex":
            return ravel(gradient)
        return ravel(split_real(jax.tree.map(jnp.conj, gradient)))

    return jax.vmap(row)(units)


def _units(jacobian: Jacobian) -> Any:
    """Unit outputs of one sample: real ones for complex numbers, else those of real and imaginary parts."""
    return output_units(jacobian, parts=jacobian.field == "real")


def _row_type(jacobian):
    params = structure_of(jacobian.params)
    if jacobian.field == "real":
        params = split_real(params)
    return size_of(params), common_dtype(params)


def _over_groups(of_group, jacobian, group, zero):
    """Sum over all samples, ``group`` at a time, and the rest that they leave."""
    chunks = jacobian.chunks
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: chunks.num_samples], chunks.samples)
    pairs = flat, chunks.flat_weights
    full, rest = divmod(chunks.num_samples, group)
    head = jax.tree.map(lambda x: x[: full * group].reshape(full, group, *x.shape[1:]), pairs)
    checkpointed = jax.checkpoint(of_group, prevent_cse=False)
    # A sum of many groups in half precision stops growing once it is some hundred times larger than its terms.
    wide = zero.astype(jnp.promote_types(zero.dtype, jnp.float32))
    total = jax.lax.scan(lambda total, pair: (total + checkpointed(pair).astype(wide.dtype), None), wide, head)[0]
    if rest:
        total = total + of_group(jax.tree.map(lambda x: x[full * group :], pairs)).astype(wide.dtype)
    return total.astype(zero.dtype)
