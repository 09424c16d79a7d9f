r"""The entries of a Jacobian, a group of samples at a time, and the sums over them that need entries.

Row (i, r) is the centred gradient of number r of the output on sample i, without its weight. Over the real field the
numbers are real, first the real parts and then the imaginary parts of each output leaf, and a row runs over the real
parts of all parameters and then the imaginary parts of the complex ones. Over the complex field both are complex.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

from .structure import common_dtype, ravel, real_dtype, size_of, split_real, structure_of
from .tangent_sums import explains, mean_of_pulled, output_units

if TYPE_CHECKING:
    from .jacobian import Jacobian

# Entries held at a time.
_ENTRIES_AT_ONCE = 1 << 23


@eqx.filter_jit
def gram_matrix(jacobian: Jacobian) -> Inexact[Array, "P P"]:
    """The matrix of ``J^H J``, on rows' entries."""

    # Weights rather than their roots twice: these have no derivative at zero.
    def product(rows, weights):
        weighted = weights[:, None, None] * rows
        left, right = (x.reshape(-1, x.shape[-1]) for x in (jnp.conj(rows), weighted))
        return jnp.matmul(left.T, right, precision="highest")

    return _sum_over_rows(jacobian, product, 2)


@eqx.filter_jit
def gram_diagonal(jacobian: Jacobian) -> Real[Array, " P"]:
    """The diagonal of ``J^H J``, on rows' entries."""

    def squares(rows, weights):
        return jnp.sum(weights[:, None, None] * (rows.real**2 + rows.imag**2), axis=(0, 1))

    return _sum_over_rows(jacobian, squares, 1)


@eqx.filter_jit
@explains
def all_rows(jacobian: Jacobian) -> Inexact[Array, "K c numbers P"]:
    """All rows, by chunks."""
    size = jacobian.chunks.weights.shape[1]
    group = _group_size(jacobian, size)

    def of_chunk(shared, samples):
        if group == size:
            return _rows(jacobian, shared, samples)
        return jax.lax.map(lambda sample: _row(jacobian, shared, sample), samples, batch_size=group)

    return jacobian.chunks.map(of_chunk, _shared(jacobian), jacobian.chunks.samples)


def row_type(jacobian: Jacobian) -> tuple[int, Any]:
    """How many entries a row has, and their dtype."""
    params = structure_of(jacobian.params)
    if jacobian.field == "real":
        params = split_real(params)
    return size_of(params), common_dtype(params)


@explains
def _sum_over_rows(jacobian: Jacobian, summand: Callable[[Array, Array], Array], dimensions: int) -> Array:
    """The sum of ``summand(rows, weights)`` over groups of samples; each has ``dimensions`` axes of a row's length."""
    chunks, kept = jacobian.chunks, jacobian.storage.entries
    length, dtype = row_type(jacobian)
    real = real_dtype(dtype)
    if kept is not None:

        def flat(x):
            return x.reshape(-1, *x.shape[2:])

        def body(_, rows, weights):
            return summand(flat(rows), flat(weights).astype(real))

        return chunks.run(body, None, kept, chunks.weights, result="sum")
    like = jax.ShapeDtypeStruct((length,) * dimensions, real if dimensions == 1 else dtype)
    # Chunks of their own: what a product holds of a chunk says nothing of the size of its rows.
    chunks = chunks.recut(_group_size(jacobian, chunks.num_samples))

    def body(shared, samples, weights):
        return summand(_rows(jacobian, shared, samples), weights.astype(real))

    return chunks.sum(body, like, _shared(jacobian), chunks.samples, chunks.weights)


def _group_size(jacobian, most):
    length, _ = row_type(jacobian)
    numbers = jax.tree.leaves(_units(jacobian))[0].shape[0]
    return max(1, min(most, _ENTRIES_AT_ONCE // max(1, numbers * length)))


def _shared(jacobian):
    """What rows are made of, apart from samples: network, parameters, unit outputs and the mean row."""
    units = _units(jacobian)
    mean = None
    if jacobian.center:
        mean = jax.vmap(lambda gradient: _flatten(jacobian, gradient))(mean_of_pulled(jacobian, units))
    return jacobian.network_of_one, jacobian.params, units, mean


def _rows(jacobian, shared, samples):
    return jax.vmap(lambda sample: _row(jacobian, shared, sample))(samples)


def _row(jacobian, shared, sample):
    network, params, units, mean = shared
    one = jax.tree.map(lambda x: x[None], sample)
    pull = jax.vjp(lambda p: network(p, one), params)[1]

    # The transpose, unconjugated: for a holomorphic network the row itself, else the conjugate of its gradient.
    def of_unit(unit):
        return _flatten(jacobian, pull(jax.tree.map(lambda u: jnp.conj(u)[None], unit))[0])

    rows = jax.vmap(of_unit)(units)
    return rows if mean is None else rows - mean


def _flatten(jacobian, gradient):
    if jacobian.field == "complex":
        return ravel(gradient)
    return ravel(split_real(jax.tree.map(jnp.conj, gradient)))


def _units(jacobian: Jacobian) -> Any:
    """Unit outputs of one sample: real ones for complex numbers, else those of real and imaginary parts."""
    return output_units(jacobian, parts=jacobian.field == "real")
