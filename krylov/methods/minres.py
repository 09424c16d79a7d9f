"""Minimal residuals for hermitian systems."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from krylov.operators.base import Vector

from ..units import Sizes, shown
from ..vectors import Flag, RealScalar, Space, axpy, divide, real_inner, scale, zeros_like
from .recurrence import LEAST_SQUARES, NEGATIVE_CURVATURE, RUNNING, ZERO_PIVOT, Recurrence


class MINRESState(NamedTuple):
    """Lanczos vectors ``r1``, ``r2`` (before the preconditioner) and ``v``; the QR factorization of the tridiagonal."""

    x: Vector
    w: Vector
    w_old: Vector
    v: Vector
    r1: Vector
    r2: Vector
    residual: Vector | None  # only with a preconditioner, where phi is not its norm
    norm: RealScalar
    settled: RealScalar
    alpha: RealScalar
    beta: RealScalar
    delta_bar: RealScalar
    epsilon: RealScalar
    phi: RealScalar
    cosine: RealScalar
    sine: RealScalar
    largest: RealScalar  # of the entries of the tridiagonal
    fresh: Flag
    condition: Int[Array, ""]


class MINRES(Recurrence):
    r"""Minimal residuals for :math:`A x = b` with A hermitian, definite or not.

    Minimises :math:`\|b - A x\|` over the Krylov space by a QR factorization of the Lanczos tridiagonal; with a
    hermitian positive definite preconditioner M the norm minimised is that of M. One product, two inner products (four
    with a preconditioner) and six vector updates an iteration; stores six vectors beside x and b, seven with a
    preconditioner.

    Example:
        >>> import jax.numpy as jnp, krylov
        >>> sol = krylov.solve(jnp.diag(jnp.array([1.0, -2.0, 3.0])), jnp.ones(3), method=krylov.MINRES())
        >>> bool(sol.converged), int(sol.iterations)
        (True, 3)

    Reference: Paige & Saunders (1975), doi:10.1137/0712047.
    """

    name = "minres"
    needs_hermitian = True
    vectors = 6

    def allocate(self, space: Space, rhs: Vector, preconditioned: bool) -> MINRESState:
        """Six vectors, and the residual with a preconditioner."""
        zero, nothing = zeros_like(rhs), jnp.zeros((), space.real_dtype)
        return MINRESState(
            x=zero,
            w=zero,
            w_old=zero,
            v=zero,
            r1=zero,
            r2=rhs,
            residual=zero if preconditioned else None,
            norm=nothing,
            settled=nothing,
            alpha=nothing,
            beta=nothing,
            delta_bar=nothing,
            epsilon=nothing,
            phi=nothing,
            cosine=nothing,
            sine=nothing,
            largest=nothing,
            fresh=jnp.asarray(True),
            condition=jnp.asarray(RUNNING, jnp.int32),
        )

    def start(self, space: Space, state: MINRESState, residual: Vector) -> MINRESState:
        """The first Lanczos vector is the residual."""
        zero, nothing = zeros_like(residual), jnp.zeros((), space.real_dtype)
        return state._replace(
            x=zero,
            w=zero,
            w_old=zero,
            r1=zero,
            r2=residual,
            residual=None if state.residual is None else residual,
            beta=nothing,
            delta_bar=nothing,
            epsilon=nothing,
            cosine=-jnp.ones((), space.real_dtype),
            sine=nothing,
            largest=nothing,
            fresh=jnp.asarray(True),
            condition=jnp.asarray(RUNNING, jnp.int32),
        )

    def settle(self, space: Space, state: MINRESState) -> MINRESState:
        """The length of the new Lanczos vector; after a start, the residual norm."""
        length = space.norm(state.r2)
        return state._replace(settled=length, norm=jnp.where(state.fresh, length, state.norm))

    def direction(self, state: MINRESState) -> Vector:
        """The new Lanczos vector."""
        return state.r2

    def prepare(self, space: Space, state: MINRESState, preconditioned: Vector) -> MINRESState:
        """Finish the last step, now that its off-diagonal entry is known, and normalise the Lanczos vector."""
        if preconditioned is state.r2:
            squared, beta = jnp.zeros((), space.real_dtype), state.settled
        else:
            squared = real_inner(state.r2, preconditioned).astype(space.real_dtype)
            beta = jnp.sqrt(jnp.abs(squared))
        state = self._rotate(space, state, beta)
        return state._replace(
            v=scale(divide(jnp.ones_like(beta), beta), preconditioned),
            beta=beta,
            phi=jnp.where(state.fresh, beta, state.phi),
            condition=jnp.where((squared < 0) & jnp.isfinite(squared), NEGATIVE_CURVATURE, state.condition).astype(
                jnp.int32
            ),
        )

    def _rotate(self, space: Space, state: Any, beta_next: RealScalar) -> Any:
        """One more column of the factorization of the tridiagonal, and the step it gives."""
        return _rotate(space, state, beta_next)

    def probe(self, state: MINRESState) -> Vector:
        """The normalised Lanczos vector."""
        return state.v

    def advance(self, space: Space, state: MINRESState, product: Vector) -> MINRESState:
        """One Lanczos step; ``x`` follows in `prepare`, when the next off-diagonal entry is known."""
        alpha = real_inner(state.v, product).astype(space.real_dtype)
        per_beta = divide(jnp.ones_like(alpha), state.beta)
        # `r1` and `r2` are the last two Lanczos vectors times their own betas.
        r2 = axpy(-alpha * per_beta, state.r2, axpy(-state.beta, state.r1, product))
        return state._replace(r1=scale(per_beta, state.r2), r2=r2, alpha=alpha, fresh=jnp.asarray(False))

    def residual_norm(self, state: MINRESState) -> RealScalar:
        """Phi of the QR factorization, or with a preconditioner the norm of the updated residual."""
        return state.norm

    def increment(self, space: Space, state: MINRESState, wanted: Flag) -> Vector:
        """Accumulated since the start."""
        return state.x

    def condition(self, state: MINRESState) -> Int[Array, ""]:
        """Whether the tridiagonal is singular or the preconditioner indefinite."""
        return state.condition

    def sizes(self, state: MINRESState, residual_norm: RealScalar) -> Sizes:
        """From the first column of the tridiagonal, and the length of the first Lanczos vector."""
        return Sizes(shown(jnp.maximum(jnp.abs(state.alpha), state.settled)), (state.phi / residual_norm) ** 2)

    def forget(self, state: Any) -> Any:
        """The column of the tridiagonal that is about to be factorized, and the largest one."""
        return state._replace(fresh=jnp.asarray(True), largest=jnp.zeros_like(state.largest))


def _rotate(space: Space, state: MINRESState, beta_next: RealScalar) -> MINRESState:
    """One more column of the QR factorization, and the step along its direction; nothing right after a start."""
    delta = state.cosine * state.delta_bar + state.sine * state.alpha
    gamma_bar = state.sine * state.delta_bar - state.cosine * state.alpha
    epsilon, delta_bar = state.sine * beta_next, -state.cosine * beta_next
    gamma = jnp.hypot(gamma_bar, beta_next)
    largest = jnp.maximum(state.largest, jnp.hypot(state.alpha, beta_next))
    # ||A r|| is phi times this: where it is nothing to rounding, r is what no x can mend. An inconsistent system gets
    # no closer than the root of the precision, and goes astray afterwards.
    normal = jnp.hypot(gamma_bar, delta_bar)
    solved = (normal <= space.eps**0.5 * largest) & ~state.fresh
    # A zero pivot with no next Lanczos vector: the operator is singular on the Krylov space.
    singular = ((gamma <= space.eps * largest) | solved) & ~state.fresh
    cosine = jnp.where(singular, 0, divide(gamma_bar, gamma))
    sine = jnp.where(singular, 1, divide(beta_next, gamma))
    phi_step, phi = cosine * state.phi, sine * state.phi
    per_gamma = jnp.where(singular, 0, divide(jnp.ones_like(gamma), gamma))
    w = scale(per_gamma, axpy(-delta, state.w, axpy(-state.epsilon, state.w_old, state.v)))
    stay = state.fresh
    # What an abandoned recurrence left may not be finite, and times zero it would not be zero.
    w = _keep(stay, state.w, w)
    new = state._replace(
        x=axpy(jnp.where(stay, 0, phi_step), w, state.x),
        w=w,
        w_old=_keep(stay, state.w_old, state.w),
        delta_bar=jnp.where(stay, state.delta_bar, delta_bar),
        epsilon=jnp.where(stay, state.epsilon, epsilon),
        cosine=jnp.where(stay, state.cosine, cosine),
        sine=jnp.where(stay, state.sine, sine),
        phi=jnp.where(stay, state.phi, phi),
        largest=jnp.where(stay, state.largest, largest),
        condition=jnp.where(solved, LEAST_SQUARES, jnp.where(singular, ZERO_PIVOT, state.condition)).astype(jnp.int32),
    )
    if state.residual is None:
        return new._replace(norm=jnp.where(stay, state.norm, jnp.abs(phi)))
    # r = sine^2 r_old - phi cosine v_next, in the space before the preconditioner.
    turn = -divide(phi * cosine, beta_next)
    residual = axpy(turn, state.r2, scale(sine**2, state.residual))
    residual = _keep(stay, state.residual, residual)
    return new._replace(residual=residual, norm=jnp.where(stay, state.norm, space.norm(residual)))


def _keep(stay, old, new):
    return jax.tree.map(lambda a, b: jnp.where(stay, a, b), old, new)
