"""The driver of direct methods: factorize once, then refine until the true residual is within the tolerance."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from krylov.operators.algebra import shifted
from krylov.operators.base import LinearOperator, Vector, product
from krylov.operators.structure import has_complex, is_complex, join_real, ravel, size_of, split_real, unravel

from .coordinates import spread_like, whole
from .driver import Controls, Outcome, add_shift, as_returned, close_history, new_history
from .methods.recurrence import Direct
from .status import Status
from .vectors import Space, add, largest_entry, power_of_two, scale, select, subtract, zeros_like


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
    unit = power_of_two(largest_entry(rhs, space.real_dtype))
    b = scale(1 / unit, rhs)
    b_norm = space.norm(b)
    rhs_norm = b_norm * unit
    target = jnp.maximum(controls.rtol * b_norm, controls.atol / unit)
    splits, structure = op._needs_splitting, op.in_structure()
    factors = method.factorize(_matrix(op, shift, splits))

    def correction(residual: Vector) -> Vector:
        gathered = jax.tree.map(whole, residual)
        if splits:
            flat = method.back_substitute(factors, ravel(split_real(gathered)))
            found = join_real(unravel(flat, split_real(structure)), structure)
        else:
            found = unravel(method.back_substitute(factors, ravel(gathered)), structure)
        return spread_like(found, residual)

    def body(loop):
        x, r, norm, steps, _, broken, history = loop
        # Behind the barrier it is computed once: XLA may round the x that is kept otherwise than the one multiplied.
        candidate = jax.lax.optimization_barrier(as_returned(unit, add(x, correction(r))))
        r_new = subtract(b, add_shift(shift, product(op, candidate), candidate))
        found = space.norm(r_new)
        better = found < norm  # False for NaN
        if history is not None:
            history = history.at[steps + 1].set(jnp.where(better, found, norm), mode="drop")
        going = better & (found > target) & (steps + 1 < method.substitutions(factors))
        kept = select(better, (candidate, r_new, found), (x, r, norm))
        return *kept, steps + 1, going, broken | ~jnp.isfinite(found), history

    has_guess = has_guess & (rhs_norm > 0)
    x = select(has_guess, scale(1 / unit, guess), zeros_like(b))
    r = subtract(b, add_shift(shift, product(op, x), x))
    r_norm = space.norm(r)
    # Zero times an entry that is not finite is not finite either: without a guess this looks at the operator.
    finite = jnp.isfinite(r_norm)
    zero = jnp.asarray(0, jnp.int32)
    going = finite & (r_norm > target) & (controls.maxiter > 0)
    start = (x, r, r_norm, zero, going, jnp.asarray(False), new_history(controls, r_norm, space))
    x, _, norm, steps, _, broken, history = jax.lax.while_loop(lambda loop: loop[4], body, start)
    x = select(finite, x, zeros_like(x))
    failed = Status.INDEFINITE if method.needs_positive else Status.BREAKDOWN
    left = jnp.where(method.deficient(factors), Status.INCONSISTENT, Status.STAGNATED)
    status = jnp.where(broken, failed, left)
    status = jnp.where(controls.maxiter > 0, status, Status.MAX_ITERATIONS)
    status = jnp.where(norm <= target, Status.CONVERGED, status)
    status = jnp.where(finite, status, Status.NONFINITE).astype(jnp.int32)
    # Most operators are multiplied with each unit vector; some have better ways to give their matrix.
    columns = size_of(structure) * (2 if splits else 1) if type(op).as_matrix is LinearOperator.as_matrix else 0
    matvecs = steps + jnp.asarray(columns + 1, jnp.int32)
    history = close_history(history, steps, norm, unit)
    return scale(unit, x), Outcome(status, steps, matvecs, norm * unit, rhs_norm, history)


def _matrix(op: LinearOperator, shift: Any, splits: bool) -> Array:
    if splits and has_complex(shift):
        return shifted(op, shift).as_matrix()  # it turns real parts into imaginary ones: not diagonal
    matrix = whole(op.as_matrix())
    one = 1 + 1j if splits else 1
    ones = jax.tree.map(lambda s: jnp.full(s.shape, one if is_complex(s) else 1, s.dtype), op.in_structure())
    diagonal = add_shift(shift, zeros_like(ones), ones)
    return matrix + jnp.diag(whole(ravel(split_real(diagonal) if splits else diagonal, matrix.dtype)))
