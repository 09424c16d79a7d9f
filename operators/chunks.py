"""Samples and weights cut into equal chunks, and the loops over them.

The bodies of the loops are checkpointed: a derivative with respect to what they share keeps a chunk's inputs, not its
activations, and memory stays flat.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .sharding import Result, Spread, on_one_device, run_spread, spread_of
from .structure import Structure, describe, is_traced, of_precision


class Chunks(eqx.Module):
    """K chunks of c samples: the user's in order, the last one of each device filled up with ones of weight zero."""

    samples: PyTree[Array]
    weights: Float[Array, "K c"]
    num_samples: int = eqx.field(static=True)
    spread: Spread | None = eqx.field(static=True)
    accumulate: np.dtype | None = eqx.field(static=True)

    @property
    def size(self) -> int:
        """Samples in each chunk."""
        return self.weights.shape[1]

    @property
    def chunk_structure(self) -> Structure:
        """Shapes and dtypes of one chunk."""
        return self.structure(self.weights.shape[1])

    def structure(self, count: int) -> Structure:
        """Shapes and dtypes of some samples."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[2:]), x.dtype), self.samples)

    def first(self, count: int) -> PyTree[Array]:
        """Some samples, on one device."""
        # Only the chunks that they are in: all samples laid flat would be a copy of all.
        chunks = -(-count // self.weights.shape[1])
        return jax.tree.map(lambda x: _flat(x[:chunks])[:count], on_one_device(self.samples))

    @property
    def flat_weights(self) -> Float[Array, " N"]:
        """The weights of the user's samples."""
        return self.join(self.weights)

    def cut(self, vector: PyTree[Array]) -> PyTree[Array]:
        """A vector with one row for each sample, cut like the samples; rows of the filling are zero."""
        size = self.weights.shape[1]
        return self.run(lambda _, vector: _cut(vector, size, 0), None, vector)

    def join(self, vector: PyTree[Array]) -> PyTree[Array]:
        """Inverse of `cut`."""
        count = self.num_samples // (1 if self.spread is None else self.spread.num_parts)

        def whole(_, vector):
            return jax.tree.map(lambda y: _flat(y)[:count], vector)

        return self.run(whole, None, vector)

    def recut(self, size: int) -> "Chunks":
        """The same samples in chunks of at most another size."""
        if size == self.weights.shape[1]:
            return self
        count = self.num_samples // (1 if self.spread is None else self.spread.num_parts)
        size = -(-count // -(-count // size))

        def again(_, samples, weights):
            flat = jax.tree.map(lambda x: _flat(x)[:count], (samples, weights))
            return _cut(flat[0], size, 1), _cut(flat[1], size, 0)

        samples, weights = self.run(again, None, self.samples, self.weights)
        return Chunks(samples, weights, self.num_samples, self.spread, self.accumulate)

    def dtype_of_sums(self, dtype: Any) -> np.dtype:
        """What sums over samples are taken in, for a result of a dtype."""
        if self.accumulate is None:
            # A sum of many chunks in half precision stops growing once it is some hundred times larger than its terms.
            return np.dtype(jnp.promote_types(dtype, jnp.float32))
        return of_precision(dtype, self.accumulate)

    def run(self, fn: Callable[..., Any], shared: Any, *stacks: Any, result: Result = "parts") -> Any:
        """``fn(shared, *stacks)`` on the chunks of each device, see `run_spread`."""
        return run_spread(self.spread, fn, shared, *stacks, result=result)

    def map(self, body: Callable[..., Any], shared: Any, *stacks: Any, group: int | None = None) -> Any:
        """``body(shared, *chunk)`` for each chunk of the stacks, stacked; or for groups of a size that divides them."""
        size = self._divided(group)

        def loop(shared, *stacks):
            stacks = _regroup(stacks, size)
            if _is_single(stacks):
                out = jax.checkpoint(body)(shared, *jax.tree.map(lambda x: x[0], stacks))
                out = jax.tree.map(lambda x: x[None], out)
            else:
                checkpointed = jax.checkpoint(body, prevent_cse=False)
                out = jax.lax.scan(lambda _, chunk: (None, checkpointed(shared, *chunk)), None, stacks)[1]
            return _regroup(out, None if size is None else self.weights.shape[1])

        return self.run(loop, shared, *stacks)

    def sum(self, body: Callable[..., Any], like: Any, shared: Any, *stacks: Any, group: int | None = None) -> Any:
        """The sum of ``body(shared, *chunk)`` over chunks or groups; ``like`` has the shapes and dtypes of the sum."""
        size = self._divided(group)
        wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, self.dtype_of_sums(x.dtype)), like)

        def loop(shared, *stacks):
            stacks = _regroup(stacks, size)
            if _is_single(stacks):
                out = jax.checkpoint(body)(shared, *jax.tree.map(lambda x: x[0], stacks))
                return jax.tree.map(lambda x, w: x.astype(w.dtype), out, wide)
            checkpointed = jax.checkpoint(body, prevent_cse=False)

            def step(total, chunk):
                return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, checkpointed(shared, *chunk)), None

            return jax.lax.scan(step, jax.tree.map(lambda w: jnp.zeros(w.shape, w.dtype), wide), stacks)[0]

        total = self.run(loop, shared, *stacks, result="sum")
        return jax.tree.map(lambda t, x: t.astype(x.dtype), total, like)

    def _divided(self, group: int | None) -> int | None:
        return group if group is not None and self.weights.shape[1] % group == 0 else None


def _is_single(stacks):
    return jax.tree.leaves(stacks)[0].shape[0] == 1


def _regroup(tree, size):
    return tree if size is None else jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[2:]), tree)


def _flat(x):
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _cut(tree, size, source):
    """Chunks of a size, the last one filled up with zeros (source 0) or with the first entries (source 1)."""

    # Real samples fill a chunk: a made-up one, all zero say, might be where the network is not finite.
    def leaf(x):
        count = -(-x.shape[0] // size)
        return _fill(x, count * size, source).reshape(count, size, *x.shape[1:])

    return jax.tree.map(leaf, tree)


def _fill(x, length, source):
    missing = length - x.shape[0]
    if missing == 0:
        return x
    filling = jnp.zeros((missing, *x.shape[1:]), x.dtype) if source == 0 else x[:missing]
    return jnp.concatenate([x, filling])


def split_samples(
    samples: PyTree, weights: Any, chunk_size: int | None, weight_dtype: Any, accumulate: np.dtype | None
) -> Chunks:
    """Cut samples and weights into chunks of about equal size, none larger than ``chunk_size``.

    Samples that are spread over a mesh stay where they are: each device has chunks of its own.

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
    spread = spread_of(samples)
    here = n // (1 if spread is None else spread.num_parts)
    count = 1 if chunk_size is None else -(-here // chunk_size)
    size = -(-here // count)
    weights = _normalised(weights, n, weight_dtype)

    def cut(_, samples, weights):
        return _cut(samples, size, 1), _cut(weights, size, 0)

    if spread is not None and not any(map(is_traced, (*leaves, weights))):
        cut_all = eqx.filter_jit(lambda *stacks: run_spread(spread, cut, None, *stacks, result="parts"))
    else:

        def cut_all(*stacks):
            return run_spread(spread, cut, None, *stacks, result="parts")

    samples, weights = cut_all(samples, weights)
    return Chunks(samples, weights, n, spread, accumulate)


def _normalised(weights, n, dtype):
    if weights is None:
        return jnp.full(n, 1 / n, dtype)
    # Looked at before JAX has them, which inside a jitted function would make known values unknown, and divided while
    # they have their own range: products of probabilities may be too small for single precision.
    values = _known(weights)
    if values is not None and values.dtype == np.float64 != jax.dtypes.canonicalize_dtype(np.float64):
        largest = values.max(initial=0)
        weights = values / largest if np.isfinite(largest) and largest > 0 else values
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
    # Where they are not known yet, a negative one still must not pass without a word.
    weights = jnp.where(weights < 0, jnp.nan, weights)
    weights = weights.astype(jnp.promote_types(weights.dtype, dtype))
    weights = weights / jax.lax.stop_gradient(weights.max())
    return (weights / weights.sum()).astype(dtype)


def _known(weights):
    leaves = jax.tree.leaves(weights)
    if any(is_traced(x) or (isinstance(x, jax.Array) and not x.is_fully_addressable) for x in leaves):
        return None
    return np.asarray(weights)


def check_chunk_size(chunk_size: Any) -> int | None:
    """A positive whole number, or None.

    Raises:
        ValueError: anything else.
    """
    if chunk_size is None:
        return None
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, (int, np.integer)) or chunk_size < 1:
        raise ValueError(
            "Jacobian: chunk_size must be a positive whole number, 'auto', or None for all samples at once.\n"
            f"  got       {chunk_size!r}"
        )
    return int(chunk_size)
