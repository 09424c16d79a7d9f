"""The solution of least norm, by Golub-Kahan bidiagonalisation."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from krylov.operators.base import Vector

from ..vectors import Flag, RealScalar, Space, axpy, divide, select, zeros_like
from .least_squares import GolubKahan, LeastSquares
from .lsmr import LSMR
from .recurrence import RUNNING, ZERO_PIVOT, Method


class CRAIGState(NamedTuple):
    """The two newest Golub-Kahan vectors, and the weight ``zeta`` of the next step along ``v``."""

    process: GolubKahan
    x: Vector
    zeta: RealScalar
    norm: RealScalar
    gradient_norm: RealScalar
    largest: RealScalar
    condition: Int[Array, ""]


class CRAIG(LeastSquares):
    r"""The solution of least norm of a consistent system: :math:`\min \|x\|` with :math:`A x = b`.

    Minimises the error :math:`\|x - x_*\|` over the Krylov space of :math:`A^H A`, by forward substitution with the
    Golub-Kahan bidiagonal. For systems that have a solution: on others it reports BREAKDOWN or STAGNATED. One product
    with A and one with its adjoint, two norms and three vector updates an iteration; stores two vectors like x and one
    like b beside x and b, fewer than any other.

    Example:
        >>> import jax.numpy as jnp, krylov
        >>> A = jnp.array([[1.0, 0.0, 1.0], [0.0, 2.0, 0.0]])
        >>> sol = krylov.lstsq(A, jnp.array([2.0, 2.0]), method=krylov.CRAIG())
        >>> [f"{value:.3f}" for value in sol.x]
        ['1.000', '1.000', '1.000']

    Reference: Craig (1955), doi:10.1002/sapm195534164; Paige & Saunders (1982), doi:10.1145/355984.355989.
    """

    name = "craig"
    vectors = (2, 1)
    minimises_error = True

    @property
    def adjoint(self) -> Method:
        """Systems of derivatives need not have a solution."""
        return LSMR()

    def allocate(self, space: Space, left: Vector, right: Vector) -> CRAIGState:
        nothing = jnp.zeros((), space.real_dtype)
        process = GolubKahan.allocate(space, left, right)
        return CRAIGState(process, right, nothing, nothing, nothing, nothing, jnp.asarray(RUNNING, jnp.int32))

    def probe(self, state: CRAIGState) -> Vector:
        return state.process.v

    def left(self, state: CRAIGState, product: Vector) -> Vector:
        return state.process.left(product)

    def receive(self, space: Space, state: CRAIGState, left: Vector, fresh: Flag) -> CRAIGState:
        process = state.process.receive(space, left)
        return state._replace(
            process=process,
            x=select(fresh, zeros_like(state.x), axpy(state.zeta, state.process.v, state.x)),
            norm=process.beta * jnp.where(fresh, 1, jnp.abs(state.zeta)),
        )

    def right(self, state: CRAIGState) -> Vector:
        return state.process.u

    def right_norm(self, state: CRAIGState) -> RealScalar:
        return jnp.ones_like(state.zeta)

    def advance(self, space: Space, state: CRAIGState, product: Vector, fresh: Flag) -> CRAIGState:
        process = state.process.advance(space, product, fresh)
        newest = process.operator_norm(fresh)
        largest = jnp.maximum(newest, jnp.where(fresh, 0, state.largest))
        # No next right vector while a residual is left: it cannot be removed.
        stuck = (process.alpha <= 4 * space.eps * largest) & (process.beta > 0)
        condition = jnp.where(fresh, RUNNING, state.condition)
        return state._replace(
            process=process,
            zeta=-divide(process.beta, process.alpha) * jnp.where(fresh, -1, state.zeta),
            gradient_norm=state.norm * newest,
            largest=largest,
            condition=jnp.where(stuck, ZERO_PIVOT, condition).astype(jnp.int32),
        )

    def residual_norm(self, state: CRAIGState) -> RealScalar:
        return state.norm

    def gradient_norm(self, state: CRAIGState) -> RealScalar:
        return state.gradient_norm

    def operator_norm(self, state: CRAIGState) -> RealScalar:
        return state.largest

    def increment(self, state: CRAIGState) -> Vector:
        return state.x

    def condition(self, state: CRAIGState) -> Int[Array, ""]:
        return state.condition
