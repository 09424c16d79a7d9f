"""What a method is: its mathematics, in the parts that the driver's loop calls."""

import abc
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Int

from krylov.operators.base import Vector

from ..units import Sizes
from ..vectors import Flag, RealScalar, Space

# What a recurrence can say of its own state, apart from its residual norm.
RUNNING, CYCLE_CLOSED, ZERO_PIVOT, NEGATIVE_CURVATURE, LEAST_SQUARES, ERROR_BOUNDED = 0, 1, 2, 3, 4, 5


class Method(eqx.Module):
    """A way to solve a square system, with its options."""

    name: ClassVar[str]
    needs_hermitian: ClassVar[bool] = False
    needs_positive: ClassVar[bool] = False

    @property
    def adjoint(self) -> "Method":
        """The method for the adjoint system."""
        return self


class Direct(Method):
    """A method that factorizes the dense matrix."""

    @abc.abstractmethod
    def factorize(self, matrix: Array) -> Any:
        """What `back_substitute` needs."""

    @abc.abstractmethod
    def back_substitute(self, factors: Any, rhs: Array) -> Array:
        """Solve with the factors."""

    def substitutions(self, factors: Any) -> Int[Array, ""]:
        """How many, the first and its refinements: those gain digits in one or two steps, or never."""
        del factors
        return jnp.asarray(4, jnp.int32)

    def deficient(self, factors: Any) -> Flag:
        """Whether the factors leave out a part of the matrix, so that a residual may be left for good."""
        del factors
        return jnp.asarray(False)


class Recurrence(Method):
    """A Krylov recurrence, in parts.

    The driver calls them in this order, with one product in each round::

        state = prepare(state, M direction(state))    after the preconditioner
        product = A probe(state)                      or, to verify, the residual b - A (x + increment(state))
        state = advance(state, product)               or, after verifying, start(state, residual)
        state = settle(state)                         the reductions over the new vectors

    ``start`` and ``advance`` only update vectors. The driver takes one or the other entry by entry, and ``settle`` then
    reduces what was taken: so each reduction is written, and computed, once.
    """

    vectors: ClassVar[int]  # vectors stored, apart from the driver's own: the solution and the right-hand side
    products: ClassVar[int] = 1  # products in one iteration
    minimises_energy: ClassVar[bool] = False  # its residual norm may rise while the error falls

    @abc.abstractmethod
    def allocate(self, space: Space, rhs: Vector, preconditioned: bool) -> Any:
        """A state with all its buffers, to be started."""

    @abc.abstractmethod
    def start(self, space: Space, state: Any, residual: Vector) -> Any:
        """Begin, or begin again, from a residual."""

    @abc.abstractmethod
    def settle(self, space: Space, state: Any) -> Any:
        """Reductions and scalars after `start` (whose `residual_norm` is then the true one) or `advance`."""

    @abc.abstractmethod
    def direction(self, state: Any) -> Vector:
        """The vector that the preconditioner is applied to."""

    @abc.abstractmethod
    def prepare(self, space: Space, state: Any, preconditioned: Vector) -> Any:
        """Take in ``M direction(state)`` (the direction itself without a preconditioner)."""

    @abc.abstractmethod
    def probe(self, state: Any) -> Vector:
        """The vector to multiply next."""

    @abc.abstractmethod
    def advance(self, space: Space, state: Any, product: Vector) -> Any:
        """One step, given the product with the probe."""

    @abc.abstractmethod
    def residual_norm(self, state: Any) -> RealScalar:
        """The recurrence's own estimate of the residual norm."""

    @abc.abstractmethod
    def increment(self, space: Space, state: Any, wanted: Flag) -> Vector:
        """What to add to x, if ``wanted``."""

    def condition(self, state: Any) -> Int[Array, ""]:
        """RUNNING, or why the recurrence cannot go on."""
        del state
        return jnp.asarray(RUNNING, jnp.int32)

    def error_bound(self, state: Any) -> RealScalar | None:
        """An upper bound of the energy norm of the error, for methods that have one."""
        del state
        return None

    def sizes(self, state: Any, residual_norm: RealScalar) -> Sizes | None:
        """Of the operator and the preconditioner as the first step from a residual of this norm showed them.

        None for a method that may not be given multiples of them.
        """
        del state, residual_norm
        return None

    def forget(self, state: Any) -> Any:
        """Drop what `start` would keep of a first step that was taken in vain, for its units were wrong."""
        return state
