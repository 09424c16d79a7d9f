"""Flexible conjugate gradients."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from krylov.operators.base import Vector

from ..units import Sizes
from ..vectors import Flag, RealScalar, Space, axpy, divide, real_inner, scale, subtract, zeros_like
from .gmres import combine, overlaps
from .recurrence import NEGATIVE_CURVATURE, RUNNING, ZERO_PIVOT, Recurrence


class FCGState(NamedTuple):
    """The last directions and their images, row by row along a leading axis, each of unit curvature."""

    x: Vector
    r: Vector
    p: Vector
    directions: Vector
    images: Vector
    steps: Int[Array, ""]
    norm: RealScalar
    length: RealScalar  # of the last direction
    curvature: RealScalar  # along it
    condition: Int[Array, ""]


class FCG(Recurrence):
    r"""Flexible conjugate gradients for :math:`A x = b` with A hermitian positive definite.

    Makes each direction conjugate to the last ``memory`` ones explicitly, so that the preconditioner may change from
    iteration to iteration: an inner iteration, a multigrid cycle, single precision. With a fixed preconditioner it does
    what CG does, more robustly. One product, ``memory + 2`` inner products and ``2 memory + 3`` vector updates an
    iteration; stores ``2 memory + 3`` vectors beside x and b.

    Args:
        memory: how many directions are kept.

    Raises:
        ValueError: ``memory`` is not a positive whole number.

    Example:
        >>> import jax.numpy as jnp, krylov
        >>> A = krylov.operators.MatrixOperator(jnp.diag(jnp.array([1.0, 2.0, 3.0])), positive=True)
        >>> inner = lambda r: krylov.solve(A, r, "cg", rtol=0.3).x
        >>> bool(krylov.solve(A, jnp.ones(3), krylov.FCG(), preconditioner=inner).converged)
        True

    Reference: Notay (2000), doi:10.1137/S1064827599362314.
    """

    memory: int = eqx.field(static=True, default=1)
    name = "fcg"
    needs_hermitian = True
    needs_positive = True
    vectors = 5
    minimises_energy = True

    def __check_init__(self):
        if isinstance(self.memory, bool) or not isinstance(self.memory, int) or self.memory < 1:
            raise ValueError(f"FCG: memory must be a positive whole number, not {self.memory!r}.")

    def allocate(self, space: Space, rhs: Vector, preconditioned: bool) -> FCGState:
        """The directions and their images."""
        zero = zeros_like(rhs)
        rows = jax.tree.map(lambda x: jnp.broadcast_to(jnp.zeros_like(x), (self.memory, *x.shape)), rhs)
        none, running = jnp.asarray(0, jnp.int32), jnp.asarray(RUNNING, jnp.int32)
        nothing = jnp.zeros((), space.real_dtype)
        return FCGState(zero, rhs, zero, rows, rows, none, nothing, nothing, nothing, running)

    def start(self, space: Space, state: FCGState, residual: Vector) -> FCGState:
        """Nothing to be conjugate to yet."""
        return state._replace(
            x=zeros_like(state.x),
            r=residual,
            directions=zeros_like(state.directions),
            images=zeros_like(state.images),
            condition=jnp.asarray(RUNNING, jnp.int32),
        )

    def settle(self, space: Space, state: FCGState) -> FCGState:
        """The residual norm."""
        return state._replace(norm=space.norm(state.r))

    def direction(self, state: FCGState) -> Vector:
        """The residual."""
        return state.r

    def prepare(self, space: Space, state: FCGState, preconditioned: Vector) -> FCGState:
        """The next direction, conjugate to those kept."""
        weights = overlaps(space, state.images, preconditioned)
        return state._replace(p=subtract(preconditioned, combine(state.directions, weights)))

    def probe(self, state: FCGState) -> Vector:
        """The direction."""
        return state.p

    def advance(self, space: Space, state: FCGState, product: Vector) -> FCGState:
        """The minimum of the energy along the direction, which takes the place of the oldest."""
        curvature = real_inner(state.p, product).astype(space.real_dtype)
        slope = real_inner(state.p, state.r).astype(space.real_dtype)
        length = space.norm(state.p)
        rounding = 32 * space.eps * length * space.norm(product)
        trouble = jnp.where(curvature < -rounding, NEGATIVE_CURVATURE, ZERO_PIVOT)
        stop = curvature <= 0
        alpha = jnp.where(stop, 0, divide(slope, curvature))
        unit = jnp.where(stop, 0, divide(jnp.ones_like(curvature), jnp.sqrt(jnp.abs(curvature))))
        place = state.steps % self.memory

        def put(rows, vector):
            return jax.tree.map(lambda v, x: v.at[place].set(x, mode="drop"), rows, scale(unit, vector))

        return state._replace(
            x=axpy(alpha, state.p, state.x),
            r=axpy(-alpha, product, state.r),
            directions=put(state.directions, state.p),
            images=put(state.images, product),
            steps=state.steps + 1,
            length=length,
            curvature=curvature,
            condition=jnp.where(stop, trouble, state.condition).astype(jnp.int32),
        )

    def residual_norm(self, state: FCGState) -> RealScalar:
        """Of the residual that the recurrence updates."""
        return state.norm

    def increment(self, space: Space, state: FCGState, wanted: Flag) -> Vector:
        """Accumulated since the start."""
        return state.x

    def condition(self, state: FCGState) -> Int[Array, ""]:
        """Whether a curvature was zero or negative."""
        return state.condition

    def sizes(self, state: FCGState, residual_norm: RealScalar) -> Sizes:
        """From a Rayleigh quotient, and the first direction."""
        rayleigh = divide(jnp.abs(state.curvature) / state.length, state.length)
        return Sizes(rayleigh, state.length / residual_norm)
