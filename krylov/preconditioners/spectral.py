"""Approximate inverses from a few eigenvalues, and the sums of rows they come from."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from krylov.operators.base import Vector

from ..coordinates import Coordinates, combine, overlaps, spread_like
from .base import BuiltPreconditioner, PreconditionerReport


class SpectralInverse(BuiltPreconditioner):
    r"""The inverse of :math:`U \Lambda U^H + \rho\,(1 - U U^H) + s`, with few orthonormal columns in U.

    Another shift changes only k numbers. Applying it costs two products with U.

    Attributes:
        basis: the columns of U as rows, in `Coordinates`.
        eigenvalues: descending; those beyond ``rank`` are ``rest``.
        rest: what stands for all other eigenvalues.
    """

    basis: Inexact[Array, "k n"]
    eigenvalues: Float[Array, " k"]
    rest: Float[Array, ""]
    shift: Float[Array, ""]
    rank: Int[Array, ""]
    matvecs: Int[Array, ""]
    coordinates: Coordinates

    def _product(self, vector: Vector) -> Vector:
        flat = self.coordinates.flatten(vector)
        other = self._inverse(self.rest)
        coefficients = (self._inverse(self.eigenvalues) - other) * overlaps(self.basis, flat)
        out = (other * flat + combine(coefficients, self.basis)).astype(flat.dtype)
        return spread_like(self.coordinates.unflatten(out), vector)

    def _inverse(self, eigenvalues: Array) -> Array:
        """One over the shifted eigenvalues: positive whatever the shift, and finite."""
        largest = jnp.max(self.eigenvalues, initial=0)
        smallest = jnp.maximum(self.coordinates.eps * largest, jnp.finfo(largest.dtype).tiny)
        return 1 / jnp.maximum(jnp.abs(eigenvalues + self.shift), smallest)

    @property
    def report(self) -> PreconditionerReport:
        """See `PreconditionerReport`; the largest eigenvalue left out is taken to be ``rest``."""
        before = 1 + jnp.max(self.eigenvalues, initial=0) / self.shift
        after = 1 + 2 * self.rest / self.shift
        return PreconditionerReport(self.rank, before, after, self.matvecs)


def absorb(
    factor: Inexact[Array, "k n"],
    tests: Inexact[Array, "b n"],
    products: Inexact[Array, "b n"],
    ridge: Float[Array, ""],
) -> Inexact[Array, "b n"]:
    r"""New rows for the factor B of :math:`A + \nu \approx B^T \bar B`, from products with test vectors.

    One block step of a Cholesky factorization of :math:`A + \nu` on the test vectors. The ridge nu keeps rounding from
    making the core indefinite; directions in which it still is less than nu are cut at nu.
    """
    left = products + ridge * tests - combine(overlaps(factor, tests).T, factor)
    core = overlaps(tests, left)
    values, vectors = jnp.linalg.eigh((core + jnp.conj(core.T)) / 2)
    return combine((vectors / jnp.sqrt(jnp.maximum(values, ridge))).T, left)


def left_over(rows: Inexact[Array, "b n"]) -> Float[Array, ""]:
    """An estimate of the largest eigenvalue that a new block of the factor has left: twice the least that it found."""
    gram = overlaps(rows, rows)
    return 2 * jnp.maximum(jnp.linalg.eigvalsh((gram + jnp.conj(gram.T)) / 2)[0], 0)


def stabilising_ridge(products: Inexact[Array, "b n"], coordinates: Coordinates) -> Float[Array, ""]:
    """A ridge a little above the rounding of products with orthonormal vectors."""
    largest = jnp.max(jnp.abs(products))
    size = jnp.linalg.norm(products / jnp.where(largest > 0, largest, 1)) * largest
    info = jnp.finfo(coordinates.real_dtype)
    return jnp.maximum(10 * info.eps * size, info.tiny / info.eps).astype(info.dtype)


def from_factor(
    factor: Inexact[Array, "k n"],
    ridge: Float[Array, ""] | float,
    rank: Int[Array, ""],
    shift: Float[Array, ""],
    matvecs: Int[Array, ""],
    coordinates: Coordinates,
) -> SpectralInverse:
    r"""From rows B with :math:`A + \nu \approx B^T \bar B`, of which ``rank`` are not zero: their singular vectors."""
    q, r = jnp.linalg.qr(factor.T)
    left, values, _ = jnp.linalg.svd(r, full_matrices=False)
    eigenvalues = jnp.maximum(values.astype(coordinates.real_dtype) ** 2 - ridge, 0)
    basis = combine(left.T, q.T)
    index = jnp.arange(eigenvalues.size)
    rest = jnp.max(jnp.where(index == rank - 1, eigenvalues, 0), initial=0)
    used = index < rank
    return SpectralInverse(
        basis=jnp.where(used[:, None], basis, 0),
        eigenvalues=jnp.where(used, eigenvalues, rest),
        rest=rest,
        shift=shift,
        rank=rank,
        matvecs=matvecs,
        coordinates=coordinates,
    )
