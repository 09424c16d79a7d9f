"""Samples and weights cut into equal chunks, the last one filled up with samples of no weight."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .structure import Structure, describe, is_traced


class Chunks(eqx.Module):
    """K chunks of c samples: the first N are the user's, in order, the rest repeat the first with weight zero."""

    samples: PyTree[Array]
    weights: Float[Array, "K c"]
    num_samples: int = eqx.field(static=True)

    @property
    def chunk_structure(self) -> Structure:
        """Shapes and dtypes of one chunk."""
        return self.structure(self.weights.shape[1])

    def structure(self, count: int) -> Structure:
        """Shapes and dtypes of some samples."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[2:]), x.dtype), self.samples)

    def first(self, count: int) -> PyTree[Array]:
        """The first samples."""
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], self.samples)

    @property
    def flat_weights(self) -> Float[Array, " N"]:
        """The weights of the user's samples."""
        return self.weights.reshape(-1)[: self.num_samples]

    def cut(self, vector: PyTree[Array]) -> PyTree[Array]:
        """A vector with one row for each sample, cut like the samples; rows of the filling are zero."""
        count, size = self.weights.shape
        return jax.tree.map(lambda y: _fill(y, count * size, 0).reshape(count, size, *y.shape[1:]), vector)

    def join(self, vector: PyTree[Array]) -> PyTree[Array]:
        """Inverse of `cut`."""
        return jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:])[: self.num_samples], vector)


def _fill(x, length, source):
    missing = length - x.shape[0]
    if missing == 0:
        return x
    filling = jnp.zeros((missing, *x.shape[1:]), x.dtype) if source == 0 else x[:missing]
    return jnp.concatenate([x, filling])


def split_samples(samples: PyTree, weights: Any, chunk_size: int | None, weight_dtype: Any) -> Chunks:
    """Cut samples and weights into chunks of about equal size, none larger than ``chunk_size``.

    Raises:
        ValueError: no samples, unequal lengths, weights of another length, negative, not finite or all zero.
    """
    samples = jax.tree.map(jnp.asarray, samples)
    leaves = jax.tree.leaves(samples)
    if not leaves:
        raise ValueError("Jacobian: samples hold no array.")
    lengths = {leaf.shape[0] for leaf in leaves if leaf.ndim}
    if len(lengths) != 1 or any(leaf.ndim == 0 for leaf in leaves):
        raise ValueError(
            "Jacobian: all sample leaves must have the same length along the first axis.\n"
            f"  got       {describe(samples)}"
        )
    (n,) = lengths
    if n == 0:
        raise ValueError(f"Jacobian: there are no samples.\n  got       {describe(samples)}")
    count = 1 if chunk_size is None else -(-n // chunk_size)
    size = -(-n // count)
    # More chunks than this would hold nothing but filling.
    count = -(-n // size)
    weights = _normalised(weights, n, weight_dtype)
    return Chunks(
        # Real samples fill the last chunk: a made-up one, all zero say, might be where the network is not finite.
        samples=jax.tree.map(lambda x: _fill(x, count * size, 1).reshape(count, size, *x.shape[1:]), samples),
        weights=_fill(weights, count * size, 0).reshape(count, size),
        num_samples=n,
    )


def _normalised(weights, n, dtype):
    if weights is None:
        return jnp.full(n, 1 / n, dtype)
    # Looked at before JAX has them, which inside a jitted function would make known values unknown.
    values = None if any(map(is_traced, jax.tree.leaves(weights))) else np.asarray(weights)
    weights = jnp.asarray(weights)
    if weights.shape != (n,):
        raise ValueError(
            f"Jacobian: weights must have one entry for each of the {n} samples.\n  got       {describe(weights)}"
        )
    if jnp.issubdtype(weights.dtype, jnp.complexfloating):
        raise ValueError(f"Jacobian: weights must be real.\n  got       {describe(weights)}")
    if values is not None and (not np.all(np.isfinite(values)) or np.any(values < 0) or values.sum() == 0):
        raise ValueError(
            "Jacobian: weights must be finite, not negative, and not all zero; they are divided by their sum.\n"
            f"  got       minimum {values.min()}, sum {values.sum()}"
        )
    # Divided while they have their own range: products of probabilities may be too small for single precision.
    # Where they are not known yet, a negative one still must not pass without a word.
    weights = jnp.where(weights < 0, jnp.nan, weights)
    weights = weights.astype(jnp.promote_types(weights.dtype, dtype))
    weights = weights / jax.lax.stop_gradient(weights.max())
    return (weights / weights.sum()).astype(dtype)


def check_chunk_size(chunk_size: Any) -> int | None:
    """A positive whole number, or None.

    Raises:
        ValueError: anything else.
    """
    if chunk_size is None:
        return None
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, (int, np.integer)) or chunk_size < 1:
        raise ValueError(
            f"Jacobian: chunk_size must be a positive whole number, or None for all samples at once.\n"
            f"  got       {chunk_size!r}"
        )
    return int(chunk_size)
