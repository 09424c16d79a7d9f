"""The loop that all Krylov recurrences share: one product a round, which either advances or verifies."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from krylov.operators.base import LinearOperator, Vector, product

from .methods.recurrence import (
    CYCLE_CLOSED,
    ERROR_BOUNDED,
    LEAST_SQUARES,
    NEGATIVE_CURVATURE,
    RUNNING,
    ZERO_PIVOT,
    Recurrence,
)
from .packing import Packing
from .progress import report_progress
from .status import Status
from .units import Units, rescaled
from .vectors import RealScalar, Space, axpy, largest_entry, power_of_two, scale, select, subtract, zeros_like

# A recurrence aims a little below the tolerance: its own residual and the true one differ by rounding.
AIM = 0.95


class Controls(eqx.Module):
    """When to stop, and what to report on the way."""

    rtol: RealScalar
    atol: RealScalar
    maxiter: Int[Array, ""]
    history: int | None = eqx.field(static=True)
    progress: bool = eqx.field(static=True)


class Outcome(NamedTuple):
    """How a solve went, apart from the solution itself."""

    status: Int[Array, ""]
    iterations: Int[Array, ""]
    matvecs: Int[Array, ""]
    residual_norm: RealScalar
    rhs_norm: RealScalar
    history: Float[Array, " length"] | None
    error_bound: RealScalar | None = None


class _Loop(NamedTuple):
    x: Vector
    state: Any
    residual: RealScalar  # the true one, of x
    rounds: Int[Array, ""]  # products that advanced
    matvecs: Int[Array, ""]
    failures: Int[Array, ""]  # verifications in a row that found no progress
    unverified: Bool[Array, ""]  # x is a guess whose residual is not known yet
    overflowed: Bool[Array, ""]  # the recurrence ran out of range: x is looked at once more
    verified: Bool[Array, ""]  # some recurrence has been verified
    status: Int[Array, ""]
    done: Bool[Array, ""]
    history: Float[Array, " length"] | None
    error_bound: RealScalar | None  # of x
    units: Units


def iterate(
    method: Recurrence,
    op: LinearOperator,
    shift: Any,
    preconditioner: LinearOperator | None,
    rhs: Vector,
    guess: Vector,
    has_guess: Bool[Array, ""],
    controls: Controls,
) -> tuple[Vector, Outcome]:
    """Solve ``(A + shift) x = rhs``.

    The right-hand side is scaled by a power of two, so that its size changes no digit: its largest entry becomes one to
    two, and no square in a norm overflows or vanishes. So are the operator and the preconditioner where their first
    products show that they need it.
    """
    space = Space.of(op.in_structure(), op.field)
    packing = Packing(rhs)
    rhs, guess = packing.pack(rhs), packing.pack(guess)
    if not is_scalar(shift):
        shift = packing.pack_diagonal(shift)

    def times(operator: LinearOperator, vector: Vector) -> Vector:
        return packing.pack(product(operator, packing.unpack(vector)))

    unit = power_of_two(largest_entry(rhs, space.real_dtype))
    b, x = scale(1 / unit, rhs), scale(1 / unit, guess)
    b_norm = space.norm(b)
    rhs_norm = b_norm * unit
    target = jnp.maximum(controls.rtol * b_norm, controls.atol / unit)

    trivial = rhs_norm == 0
    finite = jnp.isfinite(rhs_norm)
    has_guess = has_guess & finite & ~trivial
    x = select(has_guess, x, zeros_like(x))
    b = select(finite, b, zeros_like(b))
    converged = trivial | (~has_guess & (b_norm <= target))
    state = method.allocate(space, b, preconditioner is not None)
    state = method.settle(space, method.start(space, state, b))
    nothing, no = jnp.asarray(0, jnp.int32), jnp.asarray(False)
    first = _Loop(
        x=x,
        state=state,
        residual=b_norm,
        rounds=nothing,
        matvecs=nothing,
        failures=nothing,
        unverified=has_guess,
        overflowed=no,
        verified=no,
        status=jnp.where(finite, Status.CONVERGED, Status.NONFINITE).astype(jnp.int32),
        done=converged | ~finite,
        history=new_history(controls, b_norm, space),
        error_bound=method.error_bound(state),
        units=Units.none(space),
    )

    def body(loop: _Loop) -> _Loop:
        direction = method.direction(loop.state)
        preconditioned, units = direction, loop.units
        if preconditioner is not None:
            preconditioned = times(preconditioner, scale(units.preconditioner, direction))
        state = prepared = method.prepare(space, loop.state, preconditioned)

        estimate, condition = method.residual_norm(state), method.condition(state)
        # A recurrence cannot shrink its residual by more than its digits: then it is verified whatever the tolerance.
        claims = estimate <= jnp.maximum(AIM * target, 0.01 * space.eps * loop.residual)
        iterations = loop.rounds // method.products
        out_of_iterations = iterations >= controls.maxiter
        diverges = ~(estimate <= loop.residual / space.eps)  # True for NaN
        condition = jnp.where(diverges & (condition == RUNNING), ZERO_PIVOT, condition)
        stops = claims | out_of_iterations | (condition != RUNNING)
        verify = loop.unverified | stops

        increment = method.increment(space, state, verify)
        candidate = select(loop.unverified, loop.x, axpy(units.operator, increment, loop.x))
        candidate = as_returned(unit, candidate)
        # Behind the barrier it is computed once: XLA may round the x that is kept otherwise than the one multiplied.
        probe = jax.lax.optimization_barrier(select(verify, candidate, scale(units.operator, method.probe(state))))
        multiplied = add_shift(shift, times(op, probe), probe)

        restarted = method.start(space, state, subtract(b, multiplied))
        advanced = method.advance(space, state, multiplied)
        state = method.settle(space, select(verify, restarted, advanced))
        units = rescaled(units, method.sizes(state, loop.residual), (loop.rounds == 0) & ~verify)
        again = units.differ(loop.units)
        state = select(again, method.forget(state), state)

        found = method.residual_norm(state)  # after verifying: the true residual
        ending = _judge(loop, found, estimate, target, condition, claims, out_of_iterations, method, space)
        accepted = verify & ending.accepted
        rounds = loop.rounds + jnp.where(verify | again, 0, 1).astype(jnp.int32)
        history = loop.history
        if history is not None:
            # The estimate is of the rounds before this one; a guess has none yet.
            index = (loop.rounds + method.products - 1) // method.products
            history = history.at[jnp.where(loop.unverified, history.size, index)].set(estimate, mode="drop")
        if controls.progress:
            report_progress(rounds // method.products, found / b_norm, verify & ending.done, controls.maxiter)
        # A guess that is not finite is given up for zero, whose residual is the right-hand side.
        given_up = loop.unverified & ~loop.overflowed & ~ending.accepted
        kept = select(given_up, zeros_like(loop.x), loop.x)
        return _Loop(
            x=select(accepted, probe, kept),
            state=state,
            residual=jnp.where(accepted, found, loop.residual),
            rounds=rounds,
            matvecs=loop.matvecs + 1,
            failures=jnp.where(verify, ending.failures, loop.failures),
            unverified=again | (verify & ending.overflowed),
            overflowed=verify & ending.overflowed,
            verified=loop.verified | (verify & ~loop.unverified),
            status=jnp.where(verify, ending.status, loop.status),
            done=verify & ending.done,
            history=history,
            error_bound=select(accepted, _bound(method, prepared, estimate, found), loop.error_bound),
            units=units,
        )

    last = jax.lax.while_loop(lambda loop: ~loop.done, body, first)
    iterations = (last.rounds + method.products - 1) // method.products
    residual = jnp.where(trivial, 0, last.residual)
    history = close_history(last.history, iterations, residual, unit)
    bound = None if last.error_bound is None else jnp.where(trivial, 0, last.error_bound) * unit
    outcome = Outcome(last.status, iterations, last.matvecs, residual * unit, rhs_norm, history, bound)
    return packing.unpack(scale(unit, last.x)), outcome


def _strayed(estimate: RealScalar, found: RealScalar) -> Bool[Array, ""]:
    """Whether the recurrence's residual is no longer the true one, so that no more is known of the error."""
    return ~(found <= 1.1 * estimate)


def _bound(method: Recurrence, state: Any, estimate: RealScalar, found: RealScalar) -> RealScalar | None:
    bound = method.error_bound(state)
    return None if bound is None else jnp.where(_strayed(estimate, found), jnp.inf, bound)


class _Ending(NamedTuple):
    accepted: Bool[Array, ""]
    failures: Int[Array, ""]
    status: Int[Array, ""]
    done: Bool[Array, ""]
    overflowed: Bool[Array, ""]


def _judge(loop, found, estimate, target, condition, claims, out_of_iterations, method, space) -> _Ending:
    """What a verification that found this true residual norm means."""
    finite = jnp.isfinite(found)
    # A recurrence whose first product was finite may have run out of range by itself. That of x then tells.
    overflowed = ~finite & ~loop.unverified & (loop.rounds > 1)
    worse = found > loop.residual
    # CG lowers the error while its residual may rise, within limits; once it has been verified that is rounding.
    tolerated = ~loop.verified & (found <= 1e3 * loop.residual) & method.minimises_energy
    accepted = finite & (loop.unverified | tolerated | ~worse)
    # The bound is of the candidate, which must be what is returned.
    bounded = (condition == ERROR_BOUNDED) & ~_strayed(estimate, found) & accepted & ~loop.unverified
    converged = (found <= target) | bounded
    # The end of a cycle is progress as long as the residual falls; a claim must come true by half at least.
    pausing = (condition == CYCLE_CLOSED) | (condition == LEAST_SQUARES)
    wanted = jnp.where(claims | ~pausing, 0.5, 1 - space.eps**0.5)
    progress = loop.unverified | (found <= wanted * loop.residual)
    failures = jnp.where(progress, 0, loop.failures + 1)
    broken = (condition == ZERO_PIVOT) & ~claims
    # From where x stays the recurrence would only take the same way again.
    interrupted = out_of_iterations & ~claims & (condition == RUNNING)
    stuck = ((failures >= 2) | ~accepted) & ~interrupted
    indefinite = (condition == NEGATIVE_CURVATURE) & ~loop.unverified
    # What looks like least squares may be the slow part of an ill-conditioned system: begun anew, it goes on. Where it
    # does not, what the second cycle added is null vectors.
    inconsistent = (condition == LEAST_SQUARES) & ~progress
    accepted = accepted & ~inconsistent
    reasons = [
        (converged, Status.CONVERGED),
        (~finite, Status.NONFINITE),
        (loop.overflowed, Status.BREAKDOWN),
        (indefinite, Status.INDEFINITE),
        (inconsistent, Status.INCONSISTENT),
        (stuck & broken, Status.BREAKDOWN),
        (stuck, Status.STAGNATED),
    ]
    conditions, statuses = zip(*reasons, strict=True)
    status = jnp.select(conditions, [jnp.asarray(s, jnp.int32) for s in statuses], Status.MAX_ITERATIONS)
    done = converged | ~finite | indefinite | inconsistent | stuck | out_of_iterations | loop.overflowed
    return _Ending(accepted, failures.astype(jnp.int32), status.astype(jnp.int32), done & ~overflowed, overflowed)


def as_returned(unit: RealScalar, x: Vector) -> Vector:
    """What is left of the scaled ``x`` once it is given back: entries may underflow or overflow there.

    Verified is this, not an ``x`` that only exists in the units of the loop.
    """
    return scale(1 / unit, scale(unit, x))


def add_shift(shift: Any, multiplied: Vector, vector: Vector) -> Vector:
    """``multiplied + shift vector``, for a scalar or a pytree diagonal."""
    if is_scalar(shift):
        return axpy(shift, vector, multiplied)
    return jax.tree.map(lambda d, x, y: (y + d * x).astype(y.dtype), shift, vector, multiplied)


def is_scalar(shift: Any) -> bool:
    """Whether a shift is one number rather than a pytree diagonal."""
    return jax.tree.structure(shift) == jax.tree.structure(0) and jnp.ndim(shift) == 0


def new_history(controls: Controls, norm: RealScalar, space: Space) -> Float[Array, " length"] | None:
    """Room for one residual norm per iteration, with the first in place; None where none is wanted."""
    if controls.history is None:
        return None
    return jnp.zeros(controls.history, space.real_dtype).at[0].set(norm)


def close_history(
    history: Float[Array, " length"] | None, iterations: Int[Array, ""], residual: RealScalar, unit: RealScalar
) -> Float[Array, " length"] | None:
    """The history in the units of the right-hand side; entries after the last iteration repeat the final residual."""
    if history is None:
        return None
    index = jnp.arange(history.shape[0])
    return jnp.where(index < iterations, history, residual) * unit
