"""Conjugate gradients."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from krylov.operators.base import Vector

from ..vectors import Flag, RealScalar, Space, axpy, divide, real_inner, zeros_like
from .recurrence import NEGATIVE_CURVATURE, RUNNING, ZERO_PIVOT, Recurrence


class CGState(NamedTuple):
    """``weight`` is p^H M^-1 p, with which the curvature becomes a Rayleigh quotient of the preconditioned operator."""

    x: Vector
    r: Vector
    p: Vector
    rho: RealScalar
    norm: RealScalar
    weight: RealScalar
    largest: RealScalar
    condition: Int[Array, ""]


class CG(Recurrence):
    r"""Conjugate gradients for :math:`A x = b` with A hermitian positive definite.

    Minimises the energy norm :math:`\|x - x_*\|_A` over the Krylov space. One product, two inner products (three with a
    preconditioner) and three vector updates an iteration; stores three vectors beside x and b. Reports INDEFINITE where
    it meets a direction of negative curvature.

    Example:
        >>> import jax.numpy as jnp, krylov
        >>> sol = krylov.solve(jnp.diag(jnp.array([1.0, 2.0, 3.0])), jnp.ones(3), method=krylov.CG())
        >>> bool(sol.converged), int(sol.iterations)
        (True, 3)

    Reference: Hestenes & Stiefel (1952), doi:10.6028/jres.049.044.
    """

    name = "cg"
    needs_hermitian = True
    needs_positive = True
    vectors = 3
    minimises_energy = True

    def allocate(self, space: Space, rhs: Vector, preconditioned: bool) -> CGState:
        """Three vectors."""
        zero, nothing = zeros_like(rhs), jnp.zeros((), space.real_dtype)
        running = jnp.asarray(RUNNING, jnp.int32)
        return CGState(zero, rhs, zero, nothing, nothing, nothing, nothing, running)

    def start(self, space: Space, state: CGState, residual: Vector) -> CGState:
        """The first direction is the preconditioned residual: an infinite rho makes beta zero."""
        return state._replace(
            x=zeros_like(state.x),
            r=residual,
            rho=jnp.full((), jnp.inf, space.real_dtype),
            weight=jnp.zeros((), space.real_dtype),
            condition=jnp.asarray(RUNNING, jnp.int32),
        )

    def settle(self, space: Space, state: CGState) -> CGState:
        """The residual norm."""
        return state._replace(norm=space.norm(state.r))

    def direction(self, state: CGState) -> Vector:
        """The residual."""
        return state.r

    def prepare(self, space: Space, state: CGState, preconditioned: Vector) -> CGState:
        """The next direction, conjugate to the ones before."""
        z = preconditioned
        rho = state.norm**2 if z is state.r else real_inner(state.r, z).astype(space.real_dtype)
        beta = divide(rho, state.rho)
        return state._replace(
            p=axpy(beta, state.p, z),
            rho=rho,
            weight=rho + beta**2 * state.weight,
            condition=jnp.where((rho < 0) & jnp.isfinite(rho), NEGATIVE_CURVATURE, state.condition),
        )

    def probe(self, state: CGState) -> Vector:
        """The direction."""
        return state.p

    def advance(self, space: Space, state: CGState, product: Vector) -> CGState:
        """The minimum of the energy along the direction."""
        curvature = real_inner(state.p, product).astype(space.real_dtype)
        rayleigh = divide(curvature, state.weight)
        largest = jnp.maximum(state.largest, jnp.abs(rayleigh))
        # Rounding alone can turn a null direction slightly negative; below this it is taken for zero.
        trouble = jnp.where(rayleigh < -32 * space.eps * largest, NEGATIVE_CURVATURE, ZERO_PIVOT)
        stop = (curvature <= 0) | (state.condition != RUNNING)
        alpha = jnp.where(stop, 0, divide(state.rho, curvature))
        return state._replace(
            x=axpy(alpha, state.p, state.x),
            r=axpy(-alpha, product, state.r),
            largest=largest,
            condition=jnp.where(curvature <= 0, trouble, state.condition).astype(jnp.int32),
        )

    def residual_norm(self, state: CGState) -> RealScalar:
        """Of the residual that the recurrence updates."""
        return state.norm

    def increment(self, space: Space, state: CGState, wanted: Flag) -> Vector:
        """Accumulated since the start."""
        return state.x

    def condition(self, state: CGState) -> Int[Array, ""]:
        """Whether a curvature was zero or negative."""
        return state.condition
