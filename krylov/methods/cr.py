"""Conjugate residuals."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from krylov.operators.base import Vector

from ..units import Sizes
from ..vectors import Flag, RealScalar, Space, axpy, divide, real_inner, select, zeros_like
from .recurrence import RUNNING, ZERO_PIVOT, Recurrence


class CRState(NamedTuple):
    """``z`` is M r, ``image`` A z, ``q`` A p and ``mq`` M A p; the two with M are left out without a preconditioner."""

    x: Vector
    r: Vector
    z: Vector | None
    image: Vector
    p: Vector
    q: Vector
    mq: Vector | None
    rho: RealScalar
    beta: RealScalar
    norm: RealScalar
    z_norm: RealScalar
    fresh: Flag
    condition: Int[Array, ""]


class CR(Recurrence):
    r"""Conjugate residuals for :math:`A x = b` with A hermitian positive definite.

    Minimises :math:`\|b - A x\|` over the Krylov space as MINRES does, by a recurrence like that of CG: the residual
    falls monotonically, and there is one vector to store less than for MINRES. On indefinite operators it may meet a
    zero pivot; take MINRES there. One product, three inner products and four vector updates an iteration; stores five
    vectors beside x and b, seven with a preconditioner, in whose norm the residual is then minimised.

    Example:
        >>> import jax.numpy as jnp, krylov
        >>> sol = krylov.solve(jnp.diag(jnp.array([1.0, 2.0, 3.0])), jnp.ones(3), method=krylov.CR())
        >>> bool(sol.converged), int(sol.iterations)
        (True, 3)

    Reference: Stiefel (1955), doi:10.1007/BF02564277; Saad, Iterative Methods for Sparse Linear Systems, 2nd ed.
    (2003), section 6.8.
    """

    name = "cr"
    needs_hermitian = True
    vectors = 5

    def allocate(self, space: Space, rhs: Vector, preconditioned: bool) -> CRState:
        """Five vectors, seven with a preconditioner."""
        zero, nothing = zeros_like(rhs), jnp.zeros((), space.real_dtype)
        extra = zero if preconditioned else None
        fresh, running = jnp.asarray(True), jnp.asarray(RUNNING, jnp.int32)
        numbers = nothing, nothing, nothing, nothing
        return CRState(zero, rhs, extra, zero, zero, zero, extra, *numbers, fresh, running)

    def start(self, space: Space, state: CRState, residual: Vector) -> CRState:
        """Nothing to be conjugate to yet."""
        return state._replace(
            x=zeros_like(state.x),
            r=residual,
            fresh=jnp.asarray(True),
            condition=jnp.asarray(RUNNING, jnp.int32),
        )

    def settle(self, space: Space, state: CRState) -> CRState:
        """The residual norm of a start; of a step, how far its direction bends."""
        z = state.r if state.z is None else state.z
        rho = real_inner(z, state.image).astype(space.real_dtype)
        norm = space.norm(state.r)
        z_norm = norm if z is state.r else space.norm(z)
        lost = ~state.fresh & (jnp.abs(rho) <= space.eps * z_norm * space.norm(state.image))
        return state._replace(
            rho=jnp.where(state.fresh, jnp.inf, rho),
            beta=jnp.where(state.fresh | jnp.isinf(state.rho), 0, divide(rho, state.rho)),
            norm=norm,
            z_norm=z_norm,
            condition=jnp.where(lost, ZERO_PIVOT, state.condition).astype(jnp.int32),
        )

    def direction(self, state: CRState) -> Vector:
        """The residual at first; then the newest image, whose preconditioned form updates that of the residual."""
        return state.r if state.z is None else select(state.fresh, state.r, state.image)

    def prepare(self, space: Space, state: CRState, preconditioned: Vector) -> CRState:
        """One step along the direction conjugate to the last, which lowers the residual most."""
        fresh = state.fresh
        z_old = state.r if state.z is None else state.z
        p, q = axpy(state.beta, state.p, z_old), axpy(state.beta, state.q, state.image)
        mq = None if state.mq is None else axpy(state.beta, state.mq, preconditioned)
        # What an abandoned recurrence left may not be finite, and times zero it would not be zero.
        p, q, mq = select(fresh, zeros_like((p, q, mq)), (p, q, mq))
        mq = q if mq is None else mq
        alpha = jnp.where(fresh, 0, divide(state.rho, real_inner(q, mq).astype(space.real_dtype)))
        r = axpy(-alpha, q, state.r)
        z = None if state.z is None else select(fresh, preconditioned, axpy(-alpha, mq, state.z))
        return state._replace(
            x=axpy(alpha, p, state.x),
            r=r,
            z=z,
            p=p,
            q=q,
            mq=None if state.mq is None else mq,
            norm=jnp.where(fresh, state.norm, space.norm(r)),
        )

    def probe(self, state: CRState) -> Vector:
        """The preconditioned residual."""
        return state.r if state.z is None else state.z

    def advance(self, space: Space, state: CRState, product: Vector) -> CRState:
        """Keep the image; the step follows in `prepare`."""
        return state._replace(image=product, fresh=jnp.asarray(False))

    def residual_norm(self, state: CRState) -> RealScalar:
        """Of the residual that the recurrence updates."""
        return state.norm

    def increment(self, space: Space, state: CRState, wanted: Flag) -> Vector:
        """Accumulated since the start."""
        return state.x

    def condition(self, state: CRState) -> Int[Array, ""]:
        """Whether a pivot was lost."""
        return state.condition

    def sizes(self, state: CRState, residual_norm: RealScalar) -> Sizes:
        """From a Rayleigh quotient, and the preconditioned residual."""
        rayleigh = divide(jnp.abs(state.rho) / state.z_norm, state.z_norm)
        return Sizes(rayleigh, state.z_norm / residual_norm)

    def forget(self, state: CRState) -> CRState:
        """The image of the direction."""
        return state._replace(fresh=jnp.asarray(True))
