"""What a method for rectangular systems is: a recurrence with one product by A and one by its adjoint in each round."""

import abc
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from krylov.operators.base import Vector

from ..vectors import Flag, RealScalar, Space, axpy, divide, scale, select
from .recurrence import RUNNING, Method


class LeastSquares(Method):
    """A recurrence for ``min ||b - A x||``, in parts.

    The driver calls them in this order, with one product of each kind in a round::

        left  = left(state, A probe(state))           or, to verify, the residual b - A (x + increment(state))
        state = receive(state, left, fresh)
        state = advance(state, A^H right(state), fresh)

    ``fresh`` says that ``left`` is a true residual, from which the recurrence begins anew. A beginning is then a step
    without a past: each reduction is written, and computed, once. Vectors of both spaces are met in norms only, which
    are the same in the complex and in the real inner product.
    """

    vectors: ClassVar[tuple[int, int]]  # stored, like x and like b, apart from x and b themselves
    minimises_error: ClassVar[bool] = False  # its residual norm may rise while the error falls

    @abc.abstractmethod
    def allocate(self, space: Space, left: Vector, right: Vector) -> Any:
        """A state with all its buffers, for vectors like ``left`` and ``right``."""

    @abc.abstractmethod
    def probe(self, state: Any) -> Vector:
        """The vector to multiply with A next."""

    @abc.abstractmethod
    def left(self, state: Any, product: Vector) -> Vector:
        """The next vector of the left space, given the product with the probe."""

    @abc.abstractmethod
    def receive(self, space: Space, state: Any, left: Vector, fresh: Flag) -> Any:
        """Take in the left vector."""

    @abc.abstractmethod
    def right(self, state: Any) -> Vector:
        """The vector to multiply with the adjoint of A next."""

    @abc.abstractmethod
    def right_norm(self, state: Any) -> RealScalar:
        """Its norm."""

    @abc.abstractmethod
    def advance(self, space: Space, state: Any, product: Vector, fresh: Flag) -> Any:
        """Finish the step, given the adjoint product."""

    @abc.abstractmethod
    def residual_norm(self, state: Any) -> RealScalar:
        """The recurrence's own estimate of ``||b - A x||``; exact when fresh."""

    @abc.abstractmethod
    def gradient_norm(self, state: Any) -> RealScalar:
        """Its own estimate of ``||A^H (b - A x)||``; exact when fresh."""

    @abc.abstractmethod
    def operator_norm(self, state: Any) -> RealScalar:
        """A lower bound of the spectral norm of A, from the last products."""

    @abc.abstractmethod
    def increment(self, state: Any) -> Vector:
        """What to add to x."""

    def condition(self, state: Any) -> Int[Array, ""]:
        """RUNNING, or why the recurrence cannot go on."""
        del state
        return jnp.asarray(RUNNING, jnp.int32)


class GolubKahan(NamedTuple):
    r"""Golub-Kahan bidiagonalisation, :math:`A V_k = U_{k+1} B_k`, with the two newest vectors and entries.

    Reference: Golub & Kahan (1965), doi:10.1137/0702016.
    """

    u: Vector
    v: Vector
    alpha: RealScalar
    beta: RealScalar

    @classmethod
    def allocate(cls, space: Space, left: Vector, right: Vector) -> "GolubKahan":
        """One vector of each space."""
        nothing = jnp.zeros((), space.real_dtype)
        return cls(left, right, nothing, nothing)

    def left(self, product: Vector) -> Vector:
        """``A v - alpha u``, not normalised yet."""
        return axpy(-self.alpha, self.u, product)

    def receive(self, space: Space, left: Vector) -> "GolubKahan":
        """The next left vector, and its length before it was normalised."""
        beta = space.norm(left)
        return self._replace(u=scale(divide(jnp.ones_like(beta), beta), left), beta=beta)

    def advance(self, space: Space, product: Vector, fresh: Flag) -> "GolubKahan":
        """The next right vector, from ``A^H u``."""
        v = select(fresh, product, axpy(-self.beta, self.v, product))
        alpha = space.norm(v)
        return self._replace(v=scale(divide(jnp.ones_like(alpha), alpha), v), alpha=alpha)

    def operator_norm(self, fresh: Flag) -> RealScalar:
        """``||A^H u||``."""
        return jnp.hypot(self.alpha, jnp.where(fresh, 0, self.beta))
