"""A Jacobian kept as a matrix: real where the map is only R-linear, complex where it is holomorphic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .base import Vector, conjugate
from .rows import all_rows, at_once, by_numbers, from_numbers, group_size, row_type
from .storage import Storage
from .structure import is_complex, join_real, ravel, real_dtype, split_real, unravel
from .tangent_sums import safe_root

if TYPE_CHECKING:
    from .jacobian import Jacobian


class Dense(Storage):
    """Keeps all rows, centred: for each sample one for each number of the output, see `rows`."""

    rows: Inexact[Array, "K c numbers P"]
    name = "dense"

    @classmethod
    def of(cls, jacobian: Jacobian) -> Dense:
        """Differentiate the network on each sample."""
        return cls(all_rows(jacobian))

    @property
    def entries(self) -> Array:
        """All rows."""
        return self.rows

    def kept_by_chunk(self) -> Array:
        """All rows."""
        return self.rows

    def push_forward(self, jacobian: Jacobian, vector: Vector) -> Vector:
        """``J v``, one product with the matrix."""

        def body(flat, rows, weights):
            return _root(weights, flat) * _dot(rows.astype(flat.dtype), flat)

        chunks, flat = jacobian.chunks, _flatten(jacobian, vector)
        if at_once(jacobian, self.rows):
            numbers = chunks.run(body, flat, self.rows, chunks.weights)
        else:
            numbers = chunks.map(body, flat, self.rows, chunks.weights, group=group_size(jacobian, chunks.size))
        return from_numbers(jacobian, chunks.join(numbers))

    def pull_back(self, jacobian: Jacobian, cotangent: Vector) -> Vector:
        """``J^T y``, one product with its transpose."""
        if jacobian.field == "complex":
            return self._pull(jacobian, cotangent)
        return conjugate(self._pull(jacobian, conjugate(cotangent)))

    def _pull(self, jacobian, cotangent):
        wide = row_type(jacobian)[1]

        def body(_, rows, weights, numbers):
            return _dot_transposed(rows.astype(wide), _root(weights, numbers) * numbers)

        numbers = jacobian.chunks.cut(by_numbers(jacobian, cotangent).astype(wide))
        return self._sum(jacobian, body, None, numbers)

    def _sum(self, jacobian, body, shared, *stacks):
        chunks, (length, dtype) = jacobian.chunks, row_type(jacobian)
        stacks = (self.rows, chunks.weights, *stacks)
        if at_once(jacobian, self.rows):
            total = chunks.run(body, shared, *stacks, result="sum")
        else:
            like = jax.ShapeDtypeStruct((length,), dtype)
            total = chunks.sum(body, like, shared, *stacks, group=group_size(jacobian, chunks.size))
        return _unflatten(jacobian, total)

    def gram_product(self, jacobian: Jacobian, vector: Vector) -> Vector:
        """``J^H J v``, the matrix read twice."""

        # Weights rather than their roots twice: these have no derivative at zero.
        def body(flat, rows, weights):
            rows = rows.astype(flat.dtype)
            numbers = _column(weights, rows) * _dot(rows, flat)
            if not is_complex(rows):
                return _dot_transposed(rows, numbers)
            return jnp.conj(_dot_transposed(rows, jnp.conj(numbers)))

        return self._sum(jacobian, body, _flatten(jacobian, vector))


def _dot(rows, flat):
    return jnp.matmul(rows.reshape(-1, rows.shape[-1]), flat, precision="highest").reshape(rows.shape[:-1])


def _dot_transposed(rows, numbers):
    # The vector on the left: XLA multiplies with a transposed matrix ten times slower on CPUs.
    return jnp.matmul(numbers.reshape(-1), rows.reshape(-1, rows.shape[-1]), precision="highest")


def _column(weights, like):
    return weights.astype(real_dtype(like.dtype))[..., None]


def _root(weights, like):
    return _column(safe_root(weights), like)


def _flatten(jacobian, vector):
    return ravel(split_real(vector)) if jacobian.field == "real" else ravel(vector)


def _unflatten(jacobian, flat):
    structure = jacobian.in_structure()
    if jacobian.field == "complex":
        return unravel(flat, structure)
    return join_real(unravel(flat, split_real(structure)), structure)
