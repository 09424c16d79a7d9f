"""A Jacobian kept as a matrix: real where the map is only R-linear, complex where it is holomorphic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .base import Vector, conjugate
from .rows import all_rows, by_numbers, from_numbers
from .storage import Storage
from .structure import is_complex, join_real, ravel, real_dtype, split_real, structure_of, unravel
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
        chunks = jacobian.chunks
        flat = _flatten(jacobian, vector)

        def body(flat, rows, weights):
            return _root(weights, rows) * _dot(rows, flat)

        numbers = chunks.run(body, flat, self.rows, chunks.weights)
        return from_numbers(jacobian, chunks.join(numbers))

    def pull_back(self, jacobian: Jacobian, cotangent: Vector) -> Vector:
        """``J^T y``, one product with its transpose."""
        if jacobian.field == "complex":
            return self._pull(jacobian, cotangent)
        return conjugate(self._pull(jacobian, conjugate(cotangent)))

    def _pull(self, jacobian, cotangent):
        chunks = jacobian.chunks
        numbers = chunks.cut(by_numbers(jacobian, cotangent))

        def body(_, rows, weights, numbers):
            return _dot_transposed(rows, _root(weights, rows) * numbers)

        return _unflatten(jacobian, chunks.run(body, None, self.rows, chunks.weights, numbers, result="sum"))

    def gram_product(self, jacobian: Jacobian, vector: Vector) -> Vector:
        """``J^H J v``, the matrix read twice."""

        # Weights rather than their roots twice: these have no derivative at zero.
        def body(flat, rows, weights):
            numbers = _column(weights, rows) * _dot(rows, flat)
            if not is_complex(rows):
                return _dot_transposed(rows, numbers)
            return jnp.conj(_dot_transposed(rows, jnp.conj(numbers)))

        chunks, flat = jacobian.chunks, _flatten(jacobian, vector)
        return _unflatten(jacobian, chunks.run(body, flat, self.rows, chunks.weights, result="sum"))


def _dot(rows, flat):
    return jnp.matmul(rows.reshape(-1, rows.shape[-1]), flat, precision="highest").reshape(rows.shape[:-1])


def _dot_transposed(rows, numbers):
    # The vector on the left: XLA multiplies with a transposed matrix ten times slower on CPUs.
    return jnp.matmul(numbers.reshape(-1), rows.reshape(-1, rows.shape[-1]), precision="highest")


def _column(weights, rows):
    return weights.astype(real_dtype(rows.dtype))[..., None]


def _root(weights, rows):
    return _column(safe_root(weights), rows)


def _flatten(jacobian, vector):
    return ravel(split_real(vector)) if jacobian.field == "real" else ravel(vector)


def _unflatten(jacobian, flat):
    structure = structure_of(jacobian.params)
    if jacobian.field == "complex":
        return unravel(flat, structure)
    return join_real(unravel(flat, split_real(structure)), structure)
