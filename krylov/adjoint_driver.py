"""The loop that methods with A and A^H share: one product of each kind a round, which advance or verify."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from krylov.operators.base import LinearOperator, Vector, adjoint_product, product

from .driver import AIM, Controls, as_returned, close_history, new_history
from .methods.least_squares import LeastSquares
from .methods.recurrence import RUNNING, ZERO_PIVOT
from .packing import Packing
from .progress import report_progress
from .status import Status
from .vectors import RealScalar, Space, axpy, divide, power_of_two, safe_norm, scale, select, subtract, zeros_like


class AdjointOutcome(NamedTuple):
    """How a least-squares solve went, apart from the solution itself."""

    status: Int[Array, ""]
    iterations: Int[Array, ""]
    matvecs: Int[Array, ""]
    residual_norm: RealScalar
    objective_norm: RealScalar
    gradient_norm: RealScalar
    operator_norm: RealScalar
    rhs_norm: RealScalar
    history: Float[Array, " length"] | None
    gradient_history: Float[Array, " length"] | None


class _Norms(NamedTuple):
    """Of the true residual of x, of its gradient, and of the part of the residual that is not damping."""

    residual: RealScalar
    gradient: RealScalar
    data: RealScalar


class _Loop(NamedTuple):
    x: Vector  # in units of the right-hand side
    state: Any  # in units of the right-hand side and of the operator
    norms: _Norms
    operator_unit: RealScalar
    operator_norm: RealScalar
    rounds: Int[Array, ""]  # those that advanced
    products: Int[Array, ""]
    failures: Int[Array, ""]  # verifications in a row that found no progress
    first: Bool[Array, ""]
    verified: Bool[Array, ""]  # some recurrence has been verified
    status: Int[Array, ""]
    done: Bool[Array, ""]
    history: Float[Array, " length"] | None
    gradient_history: Float[Array, " length"] | None


def iterate_with_adjoint(
    method: LeastSquares,
    op: LinearOperator,
    rhs: Vector,
    guess: Vector,
    has_guess: Bool[Array, ""],
    controls: Controls,
    *,
    damped: bool,
) -> tuple[Vector, AdjointOutcome]:
    """Minimise ``||rhs - A x||``.

    The right-hand side is scaled to a norm between one and two by a power of two, the operator to about one by its
    first product, so that the size of neither changes a digit. ``damped`` says that vectors of the left space are pairs
    whose second part is the damping.
    """
    space = _common(op)
    packs_left, packs_right = Packing(rhs), Packing(guess)

    def times(vector):
        return packs_left.pack(product(op, packs_right.unpack(vector)))

    def adjoint_times(vector):
        return packs_right.pack(adjoint_product(op, packs_left.unpack(vector)))

    rhs, guess = packs_left.pack(rhs), packs_right.pack(guess)
    rhs_norm = safe_norm(rhs, space.real_dtype)
    unit = power_of_two(rhs_norm)
    b_norm = rhs_norm / unit
    target = jnp.maximum(controls.rtol * b_norm, controls.atol / unit)
    trivial, finite = rhs_norm == 0, jnp.isfinite(rhs_norm)
    has_guess = has_guess & finite & ~trivial
    b = select(finite, scale(1 / unit, rhs), zeros_like(rhs))
    one, nothing = jnp.ones((), space.real_dtype), jnp.asarray(0, jnp.int32)
    first = _Loop(
        x=select(has_guess, scale(1 / unit, guess), zeros_like(guess)),
        state=method.allocate(space, b, zeros_like(guess)),
        norms=_Norms(b_norm, jnp.zeros_like(one), b_norm),
        operator_unit=one,
        operator_norm=jnp.zeros_like(one),
        rounds=nothing,
        products=nothing,
        failures=nothing,
        first=jnp.asarray(True),
        verified=jnp.asarray(False),
        status=jnp.where(finite, Status.CONVERGED, Status.NONFINITE).astype(jnp.int32),
        done=trivial | ~finite,
        history=new_history(controls, b_norm, space),
        gradient_history=new_history(controls, jnp.zeros_like(one), space),
    )

    def body(loop: _Loop) -> _Loop:
        residual, gradient = method.residual_norm(loop.state), method.gradient_norm(loop.state)
        condition = method.condition(loop.state)
        claims = (residual <= AIM * target) | (gradient <= AIM * controls.rtol * loop.operator_norm * residual)
        # A recurrence cannot shrink its norms by more than its digits: then it is verified whatever the tolerance.
        claims |= residual <= 0.01 * space.eps * loop.norms.residual
        claims |= gradient <= 0.01 * space.eps * loop.norms.gradient
        out_of_iterations = loop.rounds >= controls.maxiter
        diverges = ~(residual <= loop.norms.residual / space.eps)  # True for NaN
        condition = jnp.where(diverges & (condition == RUNNING), ZERO_PIVOT, condition)
        verify = loop.first | claims | out_of_iterations | (condition != RUNNING)

        per_unit = 1 / loop.operator_unit
        stepped = axpy(per_unit, method.increment(loop.state), loop.x)
        candidate = as_returned(unit, select(loop.first, loop.x, stepped))
        # Behind the barrier it is computed once: XLA may round the x that is kept otherwise than the one multiplied.
        probe = jax.lax.optimization_barrier(select(verify, candidate, method.probe(loop.state)))
        image = times(probe)
        stepping = method.left(loop.state, scale(per_unit, image))
        left = select(verify, subtract(b, image), stepping)
        state = method.receive(space, loop.state, left, verify)
        adjoint_image = adjoint_times(method.right(state))
        right_norm = method.right_norm(state)

        def look_at_size():
            """The norm of the operator as the first products show it; the residual of a good guess shows nothing."""
            of_image, of_guess, of_adjoint = (safe_norm(v, space.real_dtype) for v in (image, probe, adjoint_image))
            size = divide(of_image, of_guess)
            unit = power_of_two(jnp.maximum(size, divide(of_adjoint, right_norm)))
            return unit, size / unit

        operator_unit, operator_norm = jax.lax.cond(
            loop.first, look_at_size, lambda: (loop.operator_unit, loop.operator_norm)
        )
        state = method.advance(space, state, scale(1 / operator_unit, adjoint_image), verify)
        operator_norm = jnp.maximum(operator_norm, method.operator_norm(state))

        # After verifying, these are the true ones.
        residual = method.residual_norm(state)
        data = space.norm(packs_left.unpack(left)[0]) if damped else residual
        found = _Norms(residual, method.gradient_norm(state), data)
        slope = controls.rtol * operator_norm
        ending = _judge(loop, found, target, slope, condition, claims, out_of_iterations, method)
        accepted = verify & ending.accepted
        rounds = loop.rounds + jnp.where(verify, 0, 1).astype(jnp.int32)
        history, gradient_history = loop.history, loop.gradient_history
        if history is not None and gradient_history is not None:
            shown = select(verify & ~ending.accepted, loop.norms, found)
            history = history.at[rounds].set(shown.residual, mode="drop")
            gradient_history = gradient_history.at[rounds].set(shown.gradient, mode="drop")
        if controls.progress:
            report_progress(rounds, found.residual / b_norm, verify & ending.done, controls.maxiter)
        # A guess that is not finite is given up for zero, whose residual is the right-hand side.
        kept = select(loop.first & ~ending.accepted, zeros_like(loop.x), loop.x)
        return _Loop(
            x=select(accepted, probe, kept),
            state=state,
            norms=select(accepted, found, loop.norms),
            operator_unit=operator_unit,
            operator_norm=operator_norm,
            rounds=rounds,
            products=loop.products + 2,
            failures=jnp.where(verify, ending.failures, loop.failures),
            first=jnp.asarray(False),
            verified=loop.verified | (verify & ~loop.first),
            status=jnp.where(verify, ending.status, loop.status),
            done=verify & ending.done,
            history=history,
            gradient_history=gradient_history,
        )

    last = jax.lax.while_loop(lambda loop: ~loop.done, body, first)
    norms = select(trivial, _Norms(*[jnp.zeros_like(one)] * 3), last.norms)
    outcome = AdjointOutcome(
        status=last.status,
        iterations=last.rounds,
        matvecs=last.products,
        residual_norm=norms.data * unit,
        objective_norm=norms.residual * unit,
        gradient_norm=norms.gradient * last.operator_unit * unit,
        operator_norm=last.operator_norm * last.operator_unit,
        rhs_norm=rhs_norm,
        history=close_history(last.history, last.rounds, norms.residual, unit),
        gradient_history=close_history(last.gradient_history, last.rounds, norms.gradient, last.operator_unit * unit),
    )
    return packs_right.unpack(scale(unit, last.x)), outcome


def _common(op: LinearOperator) -> Space:
    """One space for scalars of both sides, in the coarser precision: no norm is known better."""
    left, right = (Space.of(s, op.field) for s in (op.out_structure(), op.in_structure()))
    return left if left.eps >= right.eps else right


class _Ending(NamedTuple):
    accepted: Bool[Array, ""]
    failures: Int[Array, ""]
    status: Int[Array, ""]
    done: Bool[Array, ""]


def _judge(loop, found, target, slope, condition, claims, out_of_iterations, method) -> _Ending:
    """What a verification that found these true norms means."""
    before = loop.norms
    finite = jnp.isfinite(found.residual) & jnp.isfinite(found.gradient)
    better = (found.residual <= before.residual) | (found.gradient < before.gradient)
    tolerated = ~loop.verified & (found.residual <= 1e3 * before.residual) & method.minimises_error
    accepted = finite & (loop.first | better | tolerated)
    # What went astray may have a gradient that is small beside its residual.
    converged = accepted & ((found.residual <= target) | (found.gradient <= slope * found.residual))
    progress = loop.first | (found.residual <= 0.5 * before.residual) | (found.gradient <= 0.5 * before.gradient)
    failures = jnp.where(progress, 0, loop.failures + 1).astype(jnp.int32)
    # From where x stays the recurrence would only take the same way again.
    interrupted = out_of_iterations & ~claims & (condition == RUNNING)
    stuck = ((failures >= 2) | ~accepted) & ~interrupted
    broken = (condition == ZERO_PIVOT) & ~claims
    reasons = [
        (converged, Status.CONVERGED),
        (~finite, Status.NONFINITE),
        (stuck & broken, Status.BREAKDOWN),
        (stuck, Status.STAGNATED),
    ]
    conditions, statuses = zip(*reasons, strict=True)
    status = jnp.select(conditions, [jnp.asarray(s, jnp.int32) for s in statuses], Status.MAX_ITERATIONS)
    return _Ending(accepted, failures, status.astype(jnp.int32), converged | ~finite | stuck | out_of_iterations)
