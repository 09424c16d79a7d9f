"""Stabilised bi-conjugate gradients."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from krylov.operators.base import Vector

from ..units import Sizes
from ..vectors import Flag, RealScalar, Scalar, Space, axpy, divide, select, zeros_like
from .recurrence import RUNNING, ZERO_PIVOT, Recurrence


class BiCGStabState(NamedTuple):
    """``half`` is False while the product with p is wanted, True while that with the half-step residual is."""

    x: Vector
    r: Vector
    shadow: Vector
    p: Vector
    v: Vector
    z: Vector
    rho: Scalar
    alpha: Scalar
    omega: Scalar
    norm: RealScalar
    shadow_norm: RealScalar
    half: Flag
    stepped: Flag  # a whole iteration is complete and p is due
    fresh: Flag
    condition: Int[Array, ""]


class BiCGStab(Recurrence):
    r"""Stabilised bi-conjugate gradients for :math:`A x = b` with any square A.

    Follows each bi-conjugate gradient step with one step that minimises the residual. Short recurrences: two products
    and about ten vector updates an iteration, six vectors stored beside x and b. The residual falls irregularly, and
    breakdowns begin it anew. The preconditioner is applied from the right.

    Example:
        >>> import jax.numpy as jnp, krylov
        >>> sol = krylov.solve(jnp.array([[2.0, 1.0], [-1.0, 3.0]]), jnp.ones(2), method=krylov.BiCGStab())
        >>> bool(sol.converged)
        True

    Reference: van der Vorst (1992), doi:10.1137/0913035.
    """

    name = "bicgstab"
    vectors = 6
    products = 2

    def allocate(self, space: Space, rhs: Vector, preconditioned: bool) -> BiCGStabState:
        """Six vectors."""
        zero, one = zeros_like(rhs), jnp.ones((), space.dtype)
        norm, no = jnp.zeros((), space.real_dtype), jnp.asarray(False)
        running = jnp.asarray(RUNNING, jnp.int32)
        return BiCGStabState(zero, rhs, rhs, rhs, zero, zero, one, one, one, norm, norm, no, no, ~no, running)

    def start(self, space: Space, state: BiCGStabState, residual: Vector) -> BiCGStabState:
        """The shadow residual and the first direction are the residual."""
        no = jnp.asarray(False)
        return state._replace(
            x=zeros_like(residual),
            r=residual,
            shadow=residual,
            p=residual,
            half=no,
            stepped=no,
            fresh=~no,
            condition=jnp.asarray(RUNNING, jnp.int32),
        )

    def settle(self, space: Space, state: BiCGStabState) -> BiCGStabState:
        """The residual norm and, after a whole iteration, the next direction."""
        norm = space.norm(state.r)
        shadow_norm = jnp.where(state.fresh, norm, state.shadow_norm)
        rho = space.inner(state.shadow, state.r)
        beta = divide(rho, state.rho) * divide(state.alpha, state.omega)
        p = axpy(beta, axpy(-state.omega, state.v, state.p), state.r)
        lost = ~state.half & ~state.fresh & (jnp.abs(rho) <= space.eps * shadow_norm * norm)
        return state._replace(
            p=select(state.stepped, p, state.p),
            rho=jnp.where(state.half, state.rho, rho),
            norm=norm,
            shadow_norm=shadow_norm,
            condition=jnp.where(lost, ZERO_PIVOT, state.condition).astype(jnp.int32),
        )

    def direction(self, state: BiCGStabState) -> Vector:
        """The direction p, then the half-step residual."""
        return select(state.half, state.r, state.p)

    def prepare(self, space: Space, state: BiCGStabState, preconditioned: Vector) -> BiCGStabState:
        """Keep the preconditioned direction: the solution moves along it."""
        return state._replace(z=preconditioned)

    def probe(self, state: BiCGStabState) -> Vector:
        """The preconditioned direction."""
        return state.z

    def advance(self, space: Space, state: BiCGStabState, product: Vector) -> BiCGStabState:
        """Half an iteration: along p as far as the shadow residual says, or along r as far as lowers its norm most."""
        against = select(state.half, product, state.shadow)
        numerator = jnp.where(state.half, space.inner(against, state.r), state.rho)
        denominator = space.inner(against, product)
        step = divide(numerator, denominator)
        pivot_lost = step == 0
        return state._replace(
            x=axpy(step, state.z, state.x),
            r=axpy(-step, product, state.r),
            v=select(state.half, state.v, product),
            alpha=jnp.where(state.half, state.alpha, step),
            omega=jnp.where(state.half, step, state.omega),
            half=~state.half,
            stepped=state.half,
            fresh=jnp.asarray(False),
            condition=jnp.where(pivot_lost, ZERO_PIVOT, state.condition).astype(jnp.int32),
        )

    def residual_norm(self, state: BiCGStabState) -> RealScalar:
        """Of the residual that the recurrence updates."""
        return state.norm

    def increment(self, space: Space, state: BiCGStabState, wanted: Flag) -> Vector:
        """Accumulated since the start."""
        return state.x

    def condition(self, state: BiCGStabState) -> Int[Array, ""]:
        """Whether a pivot was lost."""
        return state.condition

    def sizes(self, state: BiCGStabState, residual_norm: RealScalar) -> Sizes:
        """From the first pivot, a Rayleigh quotient of the preconditioned operator."""
        del residual_norm
        pivot = jnp.abs(divide(jnp.ones_like(state.alpha), state.alpha))
        return Sizes(pivot, jnp.ones_like(pivot))
