"""The driver of direct methods: factorize once, then refine until the true residual is within the tolerance."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from krylov.operators.algebra import shifted
from krylov.operators.base import LinearOperator, Vector, product
from krylov.operators.structure import join_real, ravel, size_of, split_real, unravel

from .driver import Controls, Outcome, add_shift, as_returned, close_history, new_history
from .methods.recurrence import Direct
from .status import Status
from .vectors import Space, add, power_of_two, safe_norm, scale, select, subtract, zeros_like

# Refinement gains digits in one or two steps, or never.
_MAX_REFINEMENTS = 4


def factorize_and_refine(
    method: Direct,
    op: LinearOperator,
    shift: Any,
    rhs: Vector,
    guess: Vector,
    has_guess: Bool[Array, ""],
    controls: Controls,
) -> tuple[Vector, Outcome]:
    """Solve ``(A + shift) x = rhs`` with a dense factorization; iterations count back-substitutions."""
    space = Space.of(op.in_structure(), op.field)
    rhs_norm = safe_norm(rhs, space.real_dtype)
    unit = power_of_two(rhs_norm)
    b, b_norm = scale(1 / unit, rhs), rhs_norm / unit
    target = jnp.maximum(controls.rtol * b_norm, controls.atol / unit)
    splits, structure = op._needs_splitting, op.in_structure()
    factors = method.factorize(_matrix(op, shift, splits))

    def correction(residual: Vector) -> Vector:
        if splits:
            flat = method.back_substitute(factors, ravel(split_real(residual)))
            return join_real(unravel(flat, split_real(structure)), structure)
        return unravel(method.back_substitute(factors, ravel(residual)), structure)

    def body(loop):
        x, r, norm, steps, _, history = loop
        candidate = as_returned(unit, add(x, correction(r)))
        r_new = subtract(b, add_shift(shift, product(op, candidate), candidate))
        found = space.norm(r_new)
        better = found < norm  # False for NaN
        if history is not None:
            history = history.at[steps + 1].set(jnp.where(better, found, norm), mode="drop")
        going = better & (found > target) & (steps + 1 < _MAX_REFINEMENTS)
        kept = select(better, (candidate, r_new, found), (x, r, norm))
        return *kept, steps + 1, going, history

    has_guess = has_guess & (rhs_norm > 0)
    x = select(has_guess, scale(1 / unit, guess), zeros_like(b))
    r = subtract(b, add_shift(shift, product(op, x), x))
    r_norm = space.norm(r)
    # Zero times an entry that is not finite is not finite either: without a guess this looks at the operator.
    finite = jnp.isfinite(r_norm)
    zero = jnp.asarray(0, jnp.int32)
    going = finite & (r_norm > target) & (controls.maxiter > 0)
    start = (x, r, r_norm, zero, going, new_history(controls, r_norm, space))
    x, _, norm, steps, _, history = jax.lax.while_loop(lambda loop: loop[4], body, start)
    x = select(finite, x, zeros_like(x))
    factors_finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(f)) for f in jax.tree.leaves(factors)]))
    failed = Status.INDEFINITE if method.needs_positive else Status.BREAKDOWN
    status = jnp.where(factors_finite, Status.STAGNATED, failed)
    status = jnp.where(controls.maxiter > 0, status, Status.MAX_ITERATIONS)
    status = jnp.where(norm <= target, Status.CONVERGED, status)
    status = jnp.where(finite, status, Status.NONFINITE).astype(jnp.int32)
    matvecs = steps + jnp.asarray(size_of(structure) * (2 if splits else 1), jnp.int32)
    history = close_history(history, steps, norm, unit)
    return scale(unit, x), Outcome(status, steps, matvecs, norm * unit, rhs_norm, history)


def _matrix(op: LinearOperator, shift: Any, splits: bool) -> Array:
    if splits:
        return shifted(op, shift).as_matrix()
    matrix = op.as_matrix()
    ones = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), op.in_structure())
    return matrix + jnp.diag(ravel(add_shift(shift, zeros_like(ones), ones), matrix.dtype))
