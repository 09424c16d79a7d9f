"""Deflation of a given space."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from krylov.operators.base import LinearOperator, Vector
from krylov.operators.structure import describe, structure_of

from ..coordinates import Coordinates, combine, coordinates_of, multiply_rows, orthonormalise, overlaps, spread_like
from .base import BuiltPreconditioner, Preconditioner, PreconditionerReport, not_estimated
from .jacobi import positive


class Deflation(Preconditioner):
    r"""Solves exactly in the span of given vectors U, and keeps the rest of the system away from it.

    With :math:`A_s = A + s` and :math:`Q = U (U^H A_s U)^{-1} U^H` it is the balanced form
    :math:`Q + (1 - Q A_s)\,(1 - A_s Q) / \tau`, hermitian and positive for any U, which need not be eigenvectors: the
    coupling of their span with the rest is taken care of. Use it for directions known to be hard: approximate
    eigenvectors, the solution before, symmetries. Costs one product for each vector and one more; stores two vectors
    for each.

    Args:
        basis: the vectors along a leading axis of each leaf.

    Raises:
        ValueError: on building, a basis that does not fit the operator.

    Example:
        >>> op = krylov.operators.MatrixOperator(jnp.diag(jnp.array([1e4, 1e3, 1.0, 2.0, 3.0])), positive=True)
        >>> M = krylov.Deflation(jnp.eye(2, 5)).build(op)
        >>> int(krylov.solve(op, jnp.ones(5), preconditioner=M).iterations) <= 4
        True

    Reference: Tang, Nabben, Vuik & Erlangga (2009), doi:10.1007/s10915-009-9272-6.
    """

    basis: Vector

    def __init__(self, basis: Vector):
        self.basis = jax.tree.map(jnp.asarray, basis)

    def _check(self, op: LinearOperator) -> None:
        expected = op.in_structure()
        counts = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(self.basis)}
        got = structure_of(self.basis)
        fits = len(counts) == 1 and jax.tree.structure(got) == jax.tree.structure(expected)
        fits = fits and all(
            u.shape[1:] == s.shape and u.dtype == s.dtype
            for u, s in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
        )
        if not fits or not 0 < min(counts) <= Coordinates(expected, op.field).size:
            raise ValueError(
                "Deflation.build: the basis does not fit the operator.\n"
                f"  got       {describe(self.basis)}\n  expected  vectors {describe(expected)}, with one more axis in "
                "front of each leaf that counts them, no more than their dimension"
            )

    def _build(self, op: LinearOperator, key: Array, shift: Any) -> "DeflatedInverse":
        coordinates = coordinates_of(op)
        rows = orthonormalise(jax.vmap(coordinates.flatten)(self.basis))
        # A random vector beside them shows how large the rest of the operator is.
        probe = orthonormalise(coordinates.random(key, 1), rows)
        products = multiply_rows(op, jnp.concatenate([rows, probe]))
        products, probed = products[:-1], products[-1:]
        core = overlaps(rows, products)
        values, vectors = jnp.linalg.eigh((core + jnp.conj(core.T)) / 2)
        rest = overlaps(probe, probed)[0, 0].real.astype(coordinates.real_dtype)
        return DeflatedInverse(
            basis=combine(vectors.T, rows),
            products=combine(vectors.T, products),
            values=values,
            rest=jnp.maximum(rest, 0),
            shift=shift,
            matvecs=jnp.asarray(rows.shape[0] + 1, jnp.int32),
            coordinates=coordinates,
        )


class DeflatedInverse(BuiltPreconditioner):
    """Balanced deflation in a basis of Ritz vectors; made by `Deflation`."""

    basis: Inexact[Array, "k n"]
    products: Inexact[Array, "k n"]
    values: Float[Array, " k"]
    rest: Float[Array, ""]
    shift: Float[Array, ""]
    matvecs: Int[Array, ""]
    coordinates: Coordinates

    def _product(self, vector: Vector) -> Vector:
        flat = self.coordinates.flatten(vector)
        inverse = 1 / positive(self.values + self.shift)
        shifted = self.products + self.shift * self.basis
        coarse = inverse * overlaps(self.basis, flat)
        left = (flat - combine(coarse, shifted)) / positive(self.rest + self.shift)
        out = left + combine(coarse - inverse * overlaps(shifted, left), self.basis)
        return spread_like(self.coordinates.unflatten(out.astype(flat.dtype)), vector)

    @property
    def report(self) -> PreconditionerReport:
        """No condition number is estimated."""
        return not_estimated(self.values.size, self.matvecs, self.coordinates.real_dtype)
