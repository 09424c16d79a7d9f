"""Vectors of many leaves packed into one array for each dtype, so that a recurrence compiles to few operations."""

import jax
import jax.numpy as jnp
import numpy as np

from krylov.operators.base import Vector
from krylov.operators.structure import abstract

# XLA compiles each update of each leaf apart; below this many leaves copying saves nothing.
_FEWEST_LEAVES = 4


class Packing:
    """How vectors like a given one are packed; the identity for few leaves, and for leaves sharded by their types."""

    def __init__(self, vector: Vector):
        leaves, self._tree = jax.tree.flatten(vector)
        self._shapes = [leaf.shape for leaf in leaves]
        self._dtypes = [np.dtype(leaf.dtype) for leaf in leaves]
        sharded = any(abstract(leaf).sharding is not None for leaf in leaves)
        self._packs = len(leaves) >= _FEWEST_LEAVES and not sharded
        ends: dict[str, int] = {}
        self._starts = []
        for shape, dtype in zip(self._shapes, self._dtypes, strict=True):
            start = ends.get(dtype.name, 0)
            ends[dtype.name] = start + int(np.prod(shape))
            self._starts.append(np.uint32(start))

    def pack(self, vector: Vector) -> Vector:
        """One array for each dtype, in a dictionary by its name."""
        if not self._packs:
            return vector
        groups: dict[str, list] = {}
        for leaf, dtype in zip(jax.tree.leaves(vector), self._dtypes, strict=True):
            groups.setdefault(dtype.name, []).append(leaf.reshape(-1))
        return {name: jnp.concatenate(parts) for name, parts in groups.items()}

    def unpack(self, packed: Vector) -> Vector:
        """Inverse of `pack`."""
        if not self._packs:
            return packed
        # Starts that XLA does not know: then leaves of one shape share one kernel, where constants give each its own.
        starts = jax.lax.optimization_barrier(self._starts)
        leaves = []
        for start, shape, dtype in zip(starts, self._shapes, self._dtypes, strict=True):
            leaf = jax.lax.dynamic_slice(packed[dtype.name], (start,), (int(np.prod(shape)),))
            leaves.append(leaf.reshape(shape))
        return jax.tree.unflatten(self._tree, leaves)

    def pack_diagonal(self, shift: Vector) -> Vector:
        """A pytree diagonal packed as vectors are; leaves may be scalars, and real where the vectors are complex."""
        if not self._packs:
            return shift
        groups: dict[str, list] = {}
        for leaf, shape, dtype in zip(jax.tree.leaves(shift), self._shapes, self._dtypes, strict=True):
            groups.setdefault(dtype.name, []).append(jnp.broadcast_to(leaf, shape).reshape(-1))
        return {name: jnp.concatenate(parts) for name, parts in groups.items()}
