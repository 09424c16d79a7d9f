"""Minimal residuals of least norm for singular hermitian systems."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from krylov.operators.base import Vector

from ..vectors import Flag, RealScalar, Space, axpy, divide, scale, select
from .minres import MINRES
from .recurrence import LEAST_SQUARES, RUNNING

# Below this many units of rounding a pivot is zero, and so is the gradient A r.
ROUNDINGS = 32


class Factors(NamedTuple):
    """The lower triangular factor's newest entries, and the weights of the newest directions.

    Of the row that the last step added: ``gamma`` on the diagonal, ``theta`` and ``eta`` one and two to its left; of
    the row above it the same with ``_old``, of the one above that with ``_older``. Section 3 of the paper.
    """

    gamma: RealScalar
    gamma_old: RealScalar
    theta: RealScalar
    theta_old: RealScalar
    eta: RealScalar
    eta_old: RealScalar
    tau: RealScalar
    tau_old: RealScalar
    mu: RealScalar
    mu_old: RealScalar
    mu_older: RealScalar
    mu_oldest: RealScalar


class MINRESQLPState(NamedTuple):
    """Lanczos vectors as in MINRES; ``x`` without the two newest directions ``w_old`` and ``w``."""

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
    largest: RealScalar  # of the entries of the tridiagonal, in all cycles
    steps: Int[Array, ""]
    patience: Int[Array, ""]  # steps after which a second look at a singular system is closed; zero in a first one
    normal: RealScalar  # ||A r|| is phi times this
    factors: Factors
    fresh: Flag
    condition: Int[Array, ""]


class MINRESQLP(MINRES):
    r"""Minimal residuals of least norm for :math:`A x = b` with A hermitian, singular or not.

    Minimises :math:`\|b - A x\|` over the Krylov space as MINRES does, and among the minimisers takes the one of least
    norm: on a singular system :math:`x = A^+ b`, whether b is in the range (CONVERGED) or not (INCONSISTENT). The
    tridiagonal is factorized from both sides, so that a pivot that is zero is left out and what it would have spoiled
    is not in x yet. One product, two inner products (four with a preconditioner, whose norm is then the one minimised)
    and eleven vector updates an iteration; stores six vectors beside x and b, seven with a preconditioner.

    Example:
        >>> import jax.numpy as jnp, krylov
        >>> A = jnp.diag(jnp.array([1.0, -2.0, 0.0]))
        >>> sol = krylov.solve(A, jnp.ones(3), method=krylov.MINRESQLP())
        >>> sol.status.name, [f"{abs(value):.3f}" for value in sol.x]
        ('INCONSISTENT', ['1.000', '0.500', '0.000'])

    Reference: Choi, Paige & Saunders (2011), doi:10.1137/100787921.
    """

    name = "minres_qlp"

    def allocate(self, space: Space, rhs: Vector, preconditioned: bool) -> Any:
        """Six vectors, and the residual with a preconditioner."""
        begun = super().allocate(space, rhs, preconditioned)
        factors = Factors(**dict.fromkeys(Factors._fields, jnp.zeros((), space.real_dtype)))
        normal, zero = jnp.zeros((), space.real_dtype), jnp.asarray(0, jnp.int32)
        return MINRESQLPState(steps=zero, patience=zero, normal=normal, factors=factors, **begun._asdict())

    def start(self, space: Space, state: Any, residual: Vector) -> Any:
        """The first Lanczos vector is the residual. After what looked like least squares, a second look.

        An inconsistent system gets no closer than the root of the precision; an ill-conditioned one comes as close on
        its way. So the first time that only ends a cycle. In the next one nothing but rounding counts, and having gone
        on for several times as long in vain: if that has not lowered the residual, nothing will.
        """
        patience = jnp.where(state.condition == LEAST_SQUARES, 4 * state.steps + 20, 0).astype(jnp.int32)
        begun = super().start(space, state, residual)
        factors = Factors(**dict.fromkeys(Factors._fields, jnp.zeros((), space.real_dtype)))
        return begun._replace(
            largest=state.largest,
            steps=jnp.zeros_like(state.steps),
            patience=patience,
            normal=jnp.full((), jnp.inf, space.real_dtype),
            factors=factors,
        )

    def advance(self, space: Space, state: Any, product: Vector) -> Any:
        """One Lanczos step; ``x`` follows in `prepare`, when the next off-diagonal entry is known."""
        return super().advance(space, state, product)._replace(steps=state.steps + 1)

    def _rotate(self, space: Space, state: Any, beta_next: RealScalar) -> Any:
        stepped = _step(space, state, beta_next)
        # Where A r has fallen to the root of the precision and rises again, the last x without its newest direction,
        # which is nearly null, is the least-squares solution.
        again = state.patience > 0
        passed = (state.normal <= 4 * space.eps**0.5 * stepped.largest) & (stepped.normal >= state.normal) & ~again
        shorter = state.factors._replace(mu=jnp.zeros_like(state.phi))
        ended = state._replace(factors=select(passed, shorter, state.factors), largest=stepped.largest)
        ended = ended._replace(condition=jnp.asarray(LEAST_SQUARES, jnp.int32))
        passed |= again & (state.steps >= state.patience)
        return select(state.fresh, state, select(passed, ended, stepped))

    def increment(self, space: Space, state: Any, wanted: Flag) -> Vector:
        """Accumulated since the start, and along the two newest directions."""
        return axpy(state.factors.mu_old, state.w_old, axpy(state.factors.mu, state.w, state.x))


def _step(space: Space, state: MINRESQLPState, beta_next: RealScalar) -> MINRESQLPState:
    """One more column of the factorization from both sides, and the step along its direction."""
    old = state.factors
    # From the left, as in MINRES.
    delta = state.cosine * state.delta_bar + state.sine * state.alpha
    gamma_bar = state.sine * state.delta_bar - state.cosine * state.alpha
    epsilon, delta_bar = state.sine * beta_next, -state.cosine * beta_next
    largest = jnp.maximum(state.largest, jnp.hypot(state.alpha, beta_next))
    negligible = ROUNDINGS * space.eps * largest
    cosine, sine, gamma = _reflection(gamma_bar, beta_next)
    normal = jnp.hypot(gamma_bar, delta_bar)

    # From the right: the new column against the one before the last, then against the last.
    c, s, gamma_older = _reflection(old.gamma_old, state.epsilon)
    theta_old, delta = c * old.theta + s * delta, s * old.theta - c * delta
    eta, gamma = s * gamma, -c * gamma
    w_older = axpy(s, state.v, scale(c, state.w_old))
    w_new = axpy(-c, state.v, scale(s, state.w_old))
    c, s, gamma_old = _reflection(old.gamma, delta)
    theta, gamma = s * gamma, -c * gamma
    w_old = axpy(s, w_new, scale(c, state.w))
    w_new = axpy(-c, w_new, scale(s, state.w))

    # Forward substitution: the weights of the two newest directions change until they are two steps old.
    tau, phi = cosine * state.phi, sine * state.phi
    mu_older = divide(old.tau_old - old.eta_old * old.mu_oldest - old.theta_old * old.mu_older, gamma_older)
    mu_old = divide(old.tau - old.eta * old.mu_older - theta_old * mu_older, gamma_old)
    singular = jnp.abs(gamma) <= negligible
    mu = jnp.where(singular, 0, divide(tau - eta * mu_older - theta * mu_old, gamma))
    factors = Factors(
        gamma=gamma,
        gamma_old=gamma_old,
        theta=theta,
        theta_old=theta_old,
        eta=eta,
        eta_old=old.eta,
        tau=tau,
        tau_old=old.tau,
        mu=mu,
        mu_old=mu_old,
        mu_older=mu_older,
        mu_oldest=old.mu_older,
    )
    ended = jnp.where((normal <= negligible) | singular, LEAST_SQUARES, RUNNING).astype(jnp.int32)
    new = state._replace(
        x=axpy(mu_older, w_older, state.x),
        w=w_new,
        w_old=w_old,
        delta_bar=delta_bar,
        epsilon=epsilon,
        cosine=cosine,
        sine=sine,
        phi=phi,
        largest=largest,
        normal=normal,
        factors=factors,
        condition=ended,
    )
    if state.residual is None:
        return new._replace(norm=jnp.where(singular, jnp.abs(state.phi), jnp.abs(phi)))
    turn = -divide(phi * cosine, beta_next)
    residual = select(singular, state.residual, axpy(turn, state.r2, scale(sine**2, state.residual)))
    return new._replace(residual=residual, norm=space.norm(residual))


def _reflection(a: RealScalar, b: RealScalar) -> tuple[RealScalar, RealScalar, RealScalar]:
    """Cosine, sine and length of the reflection that takes (a, b) to (length, 0)."""
    length = jnp.hypot(a, b)
    return jnp.where(length > 0, divide(a, length), 1), divide(b, length), length
