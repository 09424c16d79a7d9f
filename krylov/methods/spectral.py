"""Dense eigenvalue and singular value decompositions: pseudo-inverses with a smooth cut-off."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Int

from ..vectors import Flag, divide
from .recurrence import Direct

# A value of half the cut-off is weighted by a seventieth, one of twice the cut-off by all but a seventieth.
_STEEPNESS = 6


class PseudoInverse(Direct):
    """A direct method that inverts what lies above a cut-off and leaves out the rest, with a smooth passage."""

    rcond: float | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        if self.rcond is not None and not 0 <= self.rcond < 1:
            raise ValueError(f"{type(self).__name__}: rcond must be at least 0 and less than 1, not {self.rcond!r}.")

    def _cut(self, values: Array) -> Array:
        """The cut-off for these eigenvalues or singular values."""
        # Zeros come as about n roundings, and their inverses must vanish under the weight: hence the power.
        default = len(values) ** 0.5 * float(jnp.finfo(values.dtype).eps) ** (2 / 3)
        rcond = default if self.rcond is None else self.rcond
        return rcond * jnp.max(jnp.abs(values), initial=0)

    def _inverse(self, values: Array) -> Array:
        weight = 1 / (1 + divide(self._cut(values), jnp.abs(values)) ** _STEEPNESS)
        return weight * divide(jnp.ones_like(values), values)

    def substitutions(self, factors: Any) -> Int[Array, ""]:
        """One where the weights matter: a refinement would give what was left out another share."""
        values = factors[0]
        return jnp.where(jnp.all(jnp.abs(values) > 4 * self._cut(values)), 4, 1).astype(jnp.int32)

    def deficient(self, factors: Any) -> Flag:
        """Whether a value lies below twice the cut-off."""
        values = factors[0]
        return jnp.any(jnp.abs(values) <= 2 * self._cut(values))


class Eigh(PseudoInverse):
    r"""Dense eigenvalue decomposition of A, hermitian, singular or not: the pseudo-inverse's solution.

    Each eigenvalue :math:`\lambda` is inverted with the weight :math:`1 / (1 + (c / |\lambda|)^6)`, c the cut-off: the
    solution depends smoothly on A where an eigenvalue passes it. INCONSISTENT where a residual is left because of that.
    Forms the matrix: n products to build it, :math:`2 n^2` numbers to hold, about :math:`9 n^3` operations.

    Args:
        rcond: the cut-off as a part of the largest eigenvalue; default :math:`\sqrt{n}\,
            \epsilon^{2/3}`, for :math:`\epsilon` the spacing of numbers at one.

    Raises:
        ValueError: ``rcond`` is negative, or one or more.

    Example:
        >>> import jax.numpy as jnp, krylov
        >>> sol = krylov.solve(jnp.diag(jnp.array([2.0, 1.0, 0.0])), jnp.ones(3), method=krylov.Eigh())
        >>> sol.status.name, [f"{abs(value):.2f}" for value in sol.x]
        ('INCONSISTENT', ['0.50', '1.00', '0.00'])

    Reference: Golub & Van Loan, Matrix Computations, 4th ed. (2013), section 8.3.
    """

    name = "eigh"
    needs_hermitian = True

    def factorize(self, matrix: Array) -> Any:
        """Eigenvalues and eigenvectors."""
        return jnp.linalg.eigh(matrix)

    def back_substitute(self, factors: Any, rhs: Array) -> Array:
        """The pseudo-inverse, applied."""
        values, vectors = factors
        coefficients = jnp.matmul(vectors.conj().T, rhs, precision="highest")
        return jnp.matmul(vectors, self._inverse(values) * coefficients, precision="highest")


class SVD(PseudoInverse):
    r"""Dense singular value decomposition of A, any square matrix, singular or not: the pseudo-inverse's solution.

    Each singular value :math:`\sigma` is inverted with the weight :math:`1 / (1 + (c / \sigma)^6)`, c the cut-off, as
    in `Eigh`. Forms the matrix: n products to build it, :math:`3 n^2` numbers to hold, about :math:`20 n^3` operations.

    Args:
        rcond: the cut-off as a part of the largest singular value; default :math:`\sqrt{n}\,
            \epsilon^{2/3}`, for :math:`\epsilon` the spacing of numbers at one.

    Raises:
        ValueError: ``rcond`` is negative, or one or more.

    Reference: Golub & Van Loan, Matrix Computations, 4th ed. (2013), section 8.6.
    """

    name = "svd"

    def factorize(self, matrix: Array) -> Any:
        """Singular values, and singular vectors from the left and from the right."""
        left, values, right = jnp.linalg.svd(matrix, full_matrices=False)
        return values, left, right

    def back_substitute(self, factors: Any, rhs: Array) -> Array:
        """The pseudo-inverse, applied."""
        values, left, right = factors
        coefficients = jnp.matmul(left.conj().T, rhs, precision="highest")
        return jnp.matmul(right.conj().T, self._inverse(values) * coefficients, precision="highest")
