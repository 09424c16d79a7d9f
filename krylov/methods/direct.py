"""Dense factorizations: references for small systems."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .recurrence import Direct


class Cholesky(Direct):
    r"""Dense Cholesky factorization of A, hermitian positive definite, with iterative refinement.

    Forms the matrix: n products to build it, :math:`n^2` numbers to hold it, :math:`n^3/3` operations.

    Reference: Golub & Van Loan, Matrix Computations, 4th ed. (2013), section 4.2.
    """

    name = "cholesky"
    needs_hermitian = True
    needs_positive = True

    def factorize(self, matrix: Array) -> Any:
        """The lower factor; not a number where the matrix is not positive definite."""
        return jnp.linalg.cholesky(matrix, symmetrize_input=True)

    def back_substitute(self, factors: Any, rhs: Array) -> Array:
        """Two triangular solves."""
        return jax.scipy.linalg.cho_solve((factors, True), rhs)


class LU(Direct):
    r"""Dense LU factorization of A, any square matrix, with iterative refinement.

    Forms the matrix: n products to build it, :math:`n^2` numbers to hold it, :math:`2n^3/3` operations.

    Reference: Golub & Van Loan, Matrix Computations, 4th ed. (2013), section 3.4.
    """

    name = "lu"

    def factorize(self, matrix: Array) -> Any:
        """The factors and the pivots."""
        return jax.scipy.linalg.lu_factor(matrix)

    def back_substitute(self, factors: Any, rhs: Array) -> Array:
        """Two triangular solves."""
        return jax.scipy.linalg.lu_solve(factors, rhs)
