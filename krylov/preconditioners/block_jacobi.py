"""Preconditioning by the diagonal blocks of the parameter leaves."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact

from krylov.operators.base import LinearOperator, Vector
from krylov.operators.gram import GramOperator
from krylov.operators.matrix import MatrixOperator
from krylov.operators.rows import gram_blocks, leaf_entries
from krylov.operators.structure import describe

from ..coordinates import Coordinates, coordinates_of, multiply_rows, spread_like
from .base import BuiltPreconditioner, Preconditioner, PreconditionerReport, not_estimated, positive_count
from .jacobi import positive


class BlockJacobi(Preconditioner):
    r"""The inverse of the blocks of A that couple a leaf of the vector with itself.

    Each block is diagonalised once, so that another shift costs nothing. Worth it where layers hardly couple. A gram
    gives its blocks in one pass over per-sample gradients, a matrix has them, another operator is multiplied with every
    unit vector. Costs :math:`m^3` operations and :math:`m^2` numbers for a leaf of m.

    Args:
        max_size: largest leaf allowed, real and imaginary parts counted apart over the real field.

    Raises:
        ValueError: on building, a leaf that is larger.

    Example:
        >>> op = krylov.operators.MatrixOperator(jnp.diag(10.0 ** jnp.arange(4)) + 0.1, positive=True)
        >>> int(krylov.solve(op, jnp.ones(4), preconditioner=krylov.BlockJacobi()).iterations)
        1

    Reference: Saad, Iterative Methods for Sparse Linear Systems, 2nd ed. (2003), section 4.1.1.
    """

    max_size: int

    def __init__(self, max_size: int = 4096):
        self.max_size = positive_count("BlockJacobi", "max_size", max_size)

    def _check(self, op: LinearOperator) -> None:
        largest = max((len(block) for block in _entries(coordinates_of(op))), default=0)
        if largest > self.max_size:
            raise ValueError(
                f"BlockJacobi.build: a leaf is too large to be diagonalised.\n  got       a block of {largest} in "
                f"{describe(op.in_structure())}\n  expected  at most {self.max_size}\n"
                "  Raise max_size if time and memory allow, or use Nystrom."
            )

    def _build(self, op: LinearOperator, key: Array, shift: Any) -> "BlockInverse":
        del key
        coordinates = coordinates_of(op)
        entries, matvecs = _entries(coordinates), 0
        if isinstance(op, GramOperator):
            blocks = gram_blocks(op.jacobian, entries)
        elif isinstance(op, MatrixOperator):
            matrix = op.as_matrix()
            blocks = [matrix[np.ix_(block, block)] for block in entries]
        else:
            blocks, matvecs = [_block(op, block, coordinates) for block in entries], coordinates.size
        values, vectors = [], []
        for block in blocks:
            w, v = jnp.linalg.eigh((block + jnp.conj(block.T)) / 2)
            values.append(w)
            vectors.append(v)
        return BlockInverse(
            vectors=vectors,
            values=values,
            shift=shift,
            matvecs=jnp.asarray(matvecs, jnp.int32),
            coordinates=coordinates,
        )


def _entries(coordinates: Coordinates) -> list[np.ndarray]:
    return leaf_entries(coordinates.structure, coordinates.field)


def _block(op: LinearOperator, block: np.ndarray, coordinates: Coordinates) -> Array:
    units = jnp.zeros((len(block), coordinates.size), coordinates.dtype).at[np.arange(len(block)), block].set(1)
    return multiply_rows(op, units)[:, block].T


class BlockInverse(BuiltPreconditioner):
    """The inverse of diagonal blocks plus a shift; made by `BlockJacobi`."""

    vectors: list[Inexact[Array, "m m"]]
    values: list[Float[Array, " m"]]
    shift: Float[Array, ""]
    matvecs: Any
    coordinates: Coordinates

    def _product(self, vector: Vector) -> Vector:
        flat = self.coordinates.flatten(vector)
        out = jnp.zeros_like(flat)
        for block, v, w in zip(_entries(self.coordinates), self.vectors, self.values, strict=True):
            turned = jnp.matmul(jnp.conj(v.T), flat[block], precision="highest") / positive(w + self.shift)
            out = out.at[block].set(jnp.matmul(v, turned, precision="highest"))
        return spread_like(self.coordinates.unflatten(out), vector)

    @property
    def report(self) -> PreconditionerReport:
        """No condition number is estimated."""
        return not_estimated(self.coordinates.size, self.matvecs, self.coordinates.real_dtype)
