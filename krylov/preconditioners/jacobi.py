"""Preconditioning by the diagonal."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from krylov.operators.base import LinearOperator, Vector
from krylov.operators.structure import is_complex, ravel

from ..coordinates import Coordinates, coordinates_of, spread_like
from ..driver import is_scalar
from .base import BuiltPreconditioner, Preconditioner, PreconditionerReport, check_shift, not_estimated


class Jacobi(Preconditioner):
    r"""The inverse of the diagonal, :math:`(\mathrm{diag} A + s)^{-1}`.

    Worth it where parameters have very different scales and little correlation. Takes a diagonal shift too. Needs the
    diagonal: at hand for matrices, one pass over per-sample gradients for a gram, else a product for each unknown.

    Example:
        >>> op = krylov.operators.MatrixOperator(jnp.diag(10.0 ** jnp.arange(4)) + 0.1, positive=True)
        >>> int(krylov.solve(op, jnp.ones(4), preconditioner=krylov.Jacobi()).iterations) <= 4
        True

    Reference: Saad, Iterative Methods for Sparse Linear Systems, 2nd ed. (2003), section 10.2.
    """

    _takes_diagonal = True

    def _build(self, op: LinearOperator, key: Array, shift: Any) -> "DiagonalInverse":
        del key
        coordinates = coordinates_of(op)
        entries = ravel(op.diagonal()).real.astype(coordinates.real_dtype)
        return DiagonalInverse(entries=entries, shift=shift, coordinates=coordinates)


class DiagonalInverse(BuiltPreconditioner):
    """The inverse of a diagonal plus a shift; made by `Jacobi`."""

    entries: Float[Array, " n"]
    shift: Any
    coordinates: Coordinates

    def _product(self, vector: Vector) -> Vector:
        flat = self.coordinates.flatten(vector)
        out = self.coordinates.unflatten(flat / positive(self.entries + self._flat_shift()))
        return spread_like(out, vector)

    def _flat_shift(self) -> Array:
        if is_scalar(self.shift):
            return self.shift
        # Both parts of a complex entry are shifted.
        both = jax.tree.map(
            lambda d, s: d * (1 + 1j if is_complex(s) and self.field == "real" else 1) + jnp.zeros((), s.dtype),
            self.shift,
            self.coordinates.structure,
        )
        return self.coordinates.flatten(both).real

    def with_shift(self, shift: Any) -> "DiagonalInverse":
        """The same for another shift, a scalar or a diagonal like the vectors."""
        shift = check_shift("DiagonalInverse.with_shift", shift, self.coordinates, takes_diagonal=True)
        return DiagonalInverse(entries=self.entries, shift=shift, coordinates=self.coordinates)

    @property
    def report(self) -> PreconditionerReport:
        """No condition number is estimated."""
        return not_estimated(self.entries.size, 0, self.coordinates.real_dtype)


def positive(values: Array) -> Array:
    """Sizes of eigenvalues, kept above rounding."""
    sizes = jnp.abs(values)
    info = jnp.finfo(sizes.dtype)
    return jnp.maximum(sizes, jnp.maximum(info.eps * jnp.max(sizes, initial=0), info.tiny))
