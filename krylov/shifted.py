"""Many shifts of one operator: the front door, and the loop that they share."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from krylov.operators.base import LinearOperator, Vector, product
from krylov.operators.structure import check_vector, common_dtype, is_complex, is_traced, real_dtype, structure_of

from .arguments import real_unknowns, right_hand_side, stopping
from .driver import AIM, Controls
from .implicit import solve_implicitly
from .methods import CG
from .methods.shifted_cg import ShiftedCG, ShiftedCGState, Shifts
from .packing import Packing
from .precision import promote_half
from .solution import Solution, finished
from .square_system import square_system
from .status import Status
from .vectors import Space, power_of_two, safe_norm, scale, select, zeros_like


def solve_shifted(
    op: Any,
    b: Vector,
    shifts: Any,
    *,
    preconditioner: None = None,
    rtol: Any = 1e-5,
    atol: Any = 0.0,
    maxiter: int | None = None,
    throw: bool = False,
) -> Solution:
    r"""Solve :math:`(A + s_i)\, x_i = b` for all shifts :math:`s_i`, at one product an iteration.

    A is hermitian, and the shifted operators positive definite; those that are not are found out one by one and
    reported as INDEFINITE. Takes as many iterations as the hardest shift alone, each shift up to its own tolerance.
    One more product for each shift then gives its true residual, which is what decides; a shift whose residual the
    shared recurrence has lost to rounding goes on alone. Works under jit, vmap and grad, as `solve` does; derivatives
    take one solve for each shift.

    Args:
        op: A, anything that `solve` takes, hermitian.
        b: right-hand side, a pytree of arrays.
        shifts: ``(n,)``, real.
        preconditioner: none, the message of the error says why.
        rtol: relative tolerance, one for all or ``(n,)``.
        atol: absolute tolerance, likewise.
        maxiter: most iterations; default ten times the number of real unknowns.
        throw: raise `ConvergenceError` unless all have converged; under a transformation, a runtime error.

    Returns:
        A `Solution` whose fields all have a leading axis for the shifts; ``matvecs`` is that of the whole call.

    Raises:
        ValueError: ``shifts`` is not a real vector, a preconditioner is given, or what `solve` raises.
        ConvergenceError: with ``throw``, not all converged.

    Example:
        >>> import jax.numpy as jnp, krylov
        >>> A = jnp.diag(jnp.array([1.0, 2.0, 3.0]))
        >>> sol = krylov.solve_shifted(A, jnp.ones(3), jnp.array([0.0, 1.0, -2.5]))
        >>> [krylov.Status(int(code)).name for code in sol.status]
        ['CONVERGED', 'CONVERGED', 'INDEFINITE']

    Reference: Frommer & Maass (1999), doi:10.1137/S1064827596313310.
    """
    if preconditioner is not None:
        raise ValueError(
            "solve_shifted: a preconditioner M makes of A + s the operator M A + s M, whose Krylov space changes with "
            f"s, and sharing one space is all that this does.\n  got       {type(preconditioner).__name__}\n"
            "  Leave it out; or build it once and solve each shift with it, which moves it to that shift:\n"
            "    M = krylov.Nystrom(rank=64).build(op)\n"
            "    jax.vmap(lambda s: krylov.solve(op, b, shift=s, preconditioner=M))(shifts)"
        )
    b = right_hand_side("solve_shifted", "b", b)
    op, _, _ = square_system("solve_shifted", op, None, structure_of(b), 0.0)
    b = check_vector("solve_shifted", "b", b, op.out_structure())
    op, _, b, _ = promote_half(op, None, b, b)
    dtype = real_dtype(common_dtype(op.out_structure()))
    shifts = jnp.asarray(shifts)
    if shifts.ndim != 1 or is_complex(shifts):
        raise ValueError(
            f"solve_shifted: shifts must be a real vector.\n  got       {shifts.dtype}{list(shifts.shape)}\n"
            "  For one shift or a complex one: krylov.solve(op, b, shift=...)."
        )
    count = shifts.shape[0]
    rtols, atols = (
        np.broadcast_to(t, (count,)) if not is_traced(t) else jnp.broadcast_to(t, (count,)) for t in (rtol, atol)
    )
    unknowns = real_unknowns(op.in_structure())
    controls = stopping("solve_shifted", 0.0, 0.0, maxiter, False, False, dtype, unknowns)
    for name, tolerances in (("rtol", rtols), ("atol", atols)):
        if not is_traced(tolerances) and not np.all(np.asarray(tolerances) >= 0):
            raise ValueError(f"solve_shifted: {name} must not be negative.\n  got       {tolerances}")
    shifts = shifts.astype(dtype)
    rtols, atols = jnp.asarray(rtols, dtype), jnp.asarray(atols, dtype)
    traced = any(map(is_traced, jax.tree.leaves((op, b, shifts, rtols, atols))))
    x, outcome = _solve_all(op, b, shifts, rtols, atols, controls, bool(throw) and traced)
    return finished(Solution, x, outcome, "shifted_cg", throw)


@eqx.filter_jit
def _solve_all(op, b, shifts, rtols, atols, controls, throw):
    guesses, indefinite, iterations = _iterate(*jax.lax.stop_gradient((op, b, shifts, rtols, atols, controls.maxiter)))
    limits = jnp.where(indefinite, 0, jnp.maximum(controls.maxiter - iterations, 0)).astype(jnp.int32)

    def verify(given):
        """The method for one shift, which begins with the true residual of the guess, and mostly ends there."""
        shift, rtol, atol, limit, guess = given
        own = Controls(rtol, atol, limit, None, False)
        return solve_implicitly(CG(), op, shift, None, b, guess, jnp.asarray(True), own, True, throw)

    x, outcome = jax.lax.map(verify, (shifts, rtols, atols, limits, guesses))
    status = jnp.where(indefinite & (outcome.status != Status.CONVERGED), Status.INDEFINITE, outcome.status)
    matvecs = jnp.max(iterations, initial=0) + jnp.sum(outcome.matvecs)
    return x, outcome._replace(
        status=status.astype(jnp.int32),
        iterations=iterations + outcome.iterations,
        matvecs=jnp.broadcast_to(matvecs, iterations.shape),
    )


def _iterate(
    op: LinearOperator, b: Vector, shifts: Shifts, rtols: Shifts, atols: Shifts, maxiter: Int[Array, ""]
) -> tuple[Vector, Array, Int[Array, " shifts"]]:
    """The shared recurrence: solutions not verified yet, which shifts are indefinite, and iterations of each."""
    space = Space.of(op.in_structure(), op.field)
    packing = Packing(b)
    b = packing.pack(b)
    norm = safe_norm(b, space.real_dtype)
    unit = power_of_two(norm)
    usable = jnp.isfinite(norm) & (norm > 0)
    b = select(usable, scale(1 / unit, b), zeros_like(b))
    targets = AIM * jnp.maximum(rtols * (norm / unit), atols / unit)
    # A recurrence cannot shrink its residual by more than its digits.
    targets = jnp.maximum(targets, 0.01 * space.eps)
    state = ShiftedCG.start(space, b, shifts)
    state = state._replace(done=(jnp.abs(state.weight) <= targets) | ~usable)

    def body(loop):
        state, count, iterations = loop
        multiplied = packing.pack(product(op, packing.unpack(state.v)))
        stepped: ShiftedCGState = ShiftedCG.advance(space, state, multiplied, shifts, targets)
        return stepped, count + 1, iterations + jnp.where(state.done, 0, 1)

    def going(loop):
        state, count, _ = loop
        return ~jnp.all(state.done) & (count < maxiter)

    nothing = jnp.zeros(shifts.shape[0], jnp.int32)
    state, _, iterations = jax.lax.while_loop(going, body, (state, jnp.asarray(0, jnp.int32), nothing))
    x = jax.vmap(lambda x: packing.unpack(scale(unit, x)))(state.x)
    return x, state.indefinite, iterations
