"""Plain values per sample, local energies say, as vectors of the output space of a Jacobian."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .base import Vector
from .chunks import Chunks
from .structure import Structure, check_vector, is_complex, real_dtype
from .tangent_sums import safe_root


def weighed_values(chunks: Chunks, values: Any, expected: Structure, center: bool) -> Vector:
    """Values times the roots of the weights, their mean subtracted where ``center``; see `Jacobian.sample_vector`.

    Raises:
        ValueError: values do not match.
    """
    if jax.tree.structure(values) == jax.tree.structure(expected):
        values = jax.tree.map(_embed, values, expected)
    return _weigh(chunks, check_vector("Jacobian.sample_vector", "values", values, expected), center)


@eqx.filter_jit
def _weigh(chunks: Chunks, values: Vector, center: bool) -> Vector:
    weights = chunks.flat_weights

    def leaf(e):
        w = weights.astype(real_dtype(e.dtype)).reshape(-1, *(1 for _ in e.shape[1:]))
        if center:
            e = e - (w * e).sum(0, dtype=chunks.dtype_of_sums(e.dtype)).astype(e.dtype)
        return safe_root(w) * e

    return jax.tree.map(leaf, values)


def _embed(value, expected):
    """Real values are complex ones with no imaginary part; every other difference is left for the check to name."""
    value = jnp.asarray(value)
    if is_complex(expected) and value.dtype == real_dtype(expected.dtype):
        return value.astype(expected.dtype)
    return value
