"""Conjugate gradients."""

from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Int

from krylov.operators.base import Vector

from ..units import Sizes
from ..vectors import Flag, RealScalar, Space, axpy, divide, real_inner, select, zeros_like
from .recurrence import ERROR_BOUNDED, NEGATIVE_CURVATURE, RUNNING, ZERO_PIVOT, Recurrence


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
    radau: "Radau | None"


class Radau(NamedTuple):
    """The Gauss-Radau coefficient: times rho, the squared upper bound; and the energy gained, for a relative bound."""

    coefficient: RealScalar
    alpha: RealScalar
    energy: RealScalar


class CG(Recurrence):
    r"""Conjugate gradients for :math:`A x = b` with A hermitian positive definite.

    Minimises the energy norm :math:`\|x - x_*\|_A` over the Krylov space. One product, two inner products (three with a
    preconditioner) and three vector updates an iteration; stores three vectors beside x and b. Reports INDEFINITE where
    it meets a direction of negative curvature.

    With ``bounds`` the solution's ``error_bounds`` hold a lower and an upper bound of the energy norm of its error. The
    upper one is that of Gauss-Radau quadrature and costs a few numbers an iteration; it needs a lower bound of the
    spectrum. The lower one, the energy norm of the error's part along the residual, costs two more products at the end.

    Args:
        bounds: also bound the error.
        smallest: a positive lower bound of the spectrum of the operator, shift included; with a preconditioner, of the
            preconditioned operator. Default: the shift, where the operator claims to be positive and there is no
            preconditioner.
        energy_rtol: with ``bounds``, stop also where the upper bound is below this part of the solution's energy norm,
            and call that CONVERGED.

    Example:
        >>> import jax.numpy as jnp, krylov
        >>> sol = krylov.solve(jnp.diag(jnp.array([1.0, 2.0, 3.0])), jnp.ones(3), method=krylov.CG())
        >>> bool(sol.converged), int(sol.iterations)
        (True, 3)

    Reference: Hestenes & Stiefel (1952), doi:10.6028/jres.049.044. Bounds: Meurant & Tichy (2019),
    doi:10.1007/s11075-018-0634-8; Strakos & Tichy (2002), Electron. Trans. Numer. Anal. 13, 56-80.
    """

    bounds: bool = eqx.field(static=True, default=False)
    smallest: Any = None
    energy_rtol: Any = None
    name = "cg"
    needs_hermitian = True
    needs_positive = True
    vectors = 3
    minimises_energy = True

    def __check_init__(self):
        if not self.bounds and not (self.smallest is None and self.energy_rtol is None):
            raise ValueError("CG: smallest and energy_rtol are for bounds=True; add it.")

    def allocate(self, space: Space, rhs: Vector, preconditioned: bool) -> CGState:
        """Three vectors."""
        zero, nothing = zeros_like(rhs), jnp.zeros((), space.real_dtype)
        running = jnp.asarray(RUNNING, jnp.int32)
        radau = Radau(nothing, nothing, nothing) if self.bounds else None
        return CGState(zero, rhs, zero, nothing, nothing, nothing, nothing, running, radau)

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
        beta, fresh = divide(rho, state.rho), jnp.isinf(state.rho)
        return state._replace(
            radau=None if state.radau is None else self._bound(state.radau, fresh, beta),
            # What an abandoned recurrence left may not be finite, and times zero it would not be zero.
            p=select(fresh, z, axpy(beta, state.p, z)),
            rho=rho,
            weight=rho + beta**2 * state.weight,
            condition=jnp.where((rho < 0) & jnp.isfinite(rho), NEGATIVE_CURVATURE, state.condition),
        )

    def _bound(self, old: Radau, fresh: Flag, beta: RealScalar) -> Radau:
        """One step of the recurrence for the coefficient, which begins with the inverse of the smallest eigenvalue."""
        rest = old.coefficient - old.alpha
        stepped = divide(rest, self.smallest * rest + beta)
        return old._replace(coefficient=jnp.where(fresh, 1 / self.smallest, stepped))

    def error_bound(self, state: CGState) -> RealScalar | None:
        """By Gauss-Radau quadrature."""
        if state.radau is None:
            return None
        return jnp.sqrt(jnp.maximum(state.radau.coefficient * state.rho, 0))

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
            radau=None
            if state.radau is None
            else state.radau._replace(alpha=alpha, energy=state.radau.energy + alpha * state.rho),
            condition=jnp.where(curvature <= 0, trouble, state.condition).astype(jnp.int32),
        )

    def residual_norm(self, state: CGState) -> RealScalar:
        """Of the residual that the recurrence updates."""
        return state.norm

    def increment(self, space: Space, state: CGState, wanted: Flag) -> Vector:
        """Accumulated since the start."""
        return state.x

    def condition(self, state: CGState) -> Int[Array, ""]:
        """Whether a curvature was zero or negative, or the error is small enough."""
        bound = self.error_bound(state)
        if bound is None or state.radau is None or self.energy_rtol is None:
            return state.condition
        small = bound**2 <= self.energy_rtol**2 * (state.radau.energy + bound**2)
        return jnp.where(small & (state.condition == RUNNING), ERROR_BOUNDED, state.condition).astype(jnp.int32)

    def sizes(self, state: CGState, residual_norm: RealScalar) -> Sizes | None:
        """From Rayleigh quotients. Bounds and the smallest eigenvalue are in the units of the operator as it is."""
        if self.bounds:
            return None
        of_preconditioner = divide(state.rho / residual_norm, residual_norm)
        return Sizes(divide(state.largest, of_preconditioner), of_preconditioner)

    def forget(self, state: CGState) -> CGState:
        """The largest Rayleigh quotient."""
        return state._replace(largest=jnp.zeros_like(state.largest))
