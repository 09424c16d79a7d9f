"""The solve as JAX sees it: a linear map of the right-hand side with a transpose, differentiable in the operator."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from krylov.operators.base import LinearOperator, Vector, conjugate, product
from krylov.operators.linearization import LinearizationError, linear_transpose
from krylov.operators.structure import abstract

from .dense import factorize_and_refine
from .driver import Controls, Outcome, add_shift, iterate
from .methods import Direct, Method, Recurrence
from .status import Status
from .vectors import select, zeros_like


# Jitted, so that a system and its adjoint, where they are the same, are traced once.
@eqx.filter_jit
def run(
    method: Method,
    op: LinearOperator,
    shift: Any,
    preconditioner: LinearOperator | None,
    rhs: Vector,
    guess: Vector,
    has_guess: Bool[Array, ""],
    controls: Controls,
) -> tuple[Vector, Outcome]:
    """Solve one system; not differentiable."""
    if isinstance(method, Direct):
        return factorize_and_refine(method, op, shift, rhs, guess, has_guess, controls)
    assert isinstance(method, Recurrence)
    return iterate(method, op, shift, preconditioner, rhs, guess, has_guess, controls)


@eqx.filter_jit
def solve_implicitly(
    method: Method,
    op: LinearOperator,
    shift: Any,
    preconditioner: LinearOperator | None,
    rhs: Vector,
    guess: Vector,
    has_guess: Bool[Array, ""],
    controls: Controls,
    own_terms: bool,
    throw: bool,
) -> tuple[Vector, Outcome]:
    r"""Solve :math:`(A + s) x = b` with :math:`\dot x = (A + s)^{-1}(\dot b - (\dot A + \dot s) x)`.

    Tangent and cotangent systems start from zero and are solved to ``rtol`` of their own right-hand sides (to
    :math:`\epsilon^{3/4}` where it is zero). ``own_terms`` says that there is a guess or an absolute tolerance: those
    belong to ``rhs`` alone. With ``throw`` a system that does not converge raises from inside the solve, those of
    derivatives too, whose status has nowhere else to go.
    """
    guess, preconditioner, controls = _without_derivatives((guess, preconditioner, controls))
    eps = jnp.finfo(controls.rtol.dtype).eps
    relative = jnp.where(controls.rtol > 0, controls.rtol, eps**0.75)
    of_others = eqx.tree_at(lambda c: (c.rtol, c.atol), controls, (relative, jnp.zeros_like(controls.atol)))

    def matvec(extended):
        x, mark = extended
        multiplied = add_shift(shift, product(op, x), x)
        # JAX transposes a tangent system only if all of its right-hand side depends on a tangent: the mark too.
        return multiplied, None if mark is None else mark + _nothing_of(multiplied)

    def forward(_, extended):
        b, mark = extended
        if not own_terms:
            tolerances, use_guess = of_others, has_guess
        else:
            own = mark == 1
            tolerances = select(own, controls, of_others)
            use_guess = has_guess & own
        x, outcome = run(method, op, shift, preconditioner, b, guess, use_guess, tolerances)
        return (_raise_if_failed(x, outcome, throw), mark), outcome

    def backward(_, extended):
        b, mark = extended
        # A^T x = b is A^H conj(x) = conj(b).
        adjoint_preconditioner = None if preconditioner is None else preconditioner.H
        no_guess = jnp.zeros_like(has_guess)
        x, outcome = run(
            method,
            op.H,
            conjugate(shift),
            adjoint_preconditioner,
            conjugate(b),
            zeros_like(b),
            no_guess,
            of_others,
        )
        return (conjugate(_raise_if_failed(x, outcome, throw)), jax.tree.map(jnp.zeros_like, mark)), outcome

    extended = rhs, _mark(rhs) if own_terms else None
    try:
        (x, _), outcome = jax.lax.custom_linear_solve(matvec, extended, forward, backward, has_aux=True)
    except Exception:
        if _can_be_transposed(matvec, extended):
            raise
        # Then it is solved forward only; JAX says so, should a gradient be asked for.
        (x, _), outcome = jax.lax.custom_linear_solve(matvec, extended, forward, has_aux=True)
    return x, outcome


def _can_be_transposed(matvec: Callable[..., Any], vector: Any) -> bool:
    """Whether JAX has a transpose of the product. A loop of unknown length has none, and is solved with all the same.

    Raises:
        LinearizationError: it is not even linear.
    """
    structure = jax.tree.map(abstract, vector)
    try:
        jax.eval_shape(linear_transpose(matvec, structure, name="solve: the operator"), structure)
    except LinearizationError as error:
        if any(name in str(error) for name in ("got       while", "got       custom_vjp_call", "_callback")):
            return False
        raise
    return True


def _without_derivatives(tree: Any) -> Any:
    """The solution does not depend on where the solve starts, how it is preconditioned or when it stops."""
    return jax.tree.map(lambda x: jax.lax.stop_gradient(x) if eqx.is_inexact_array(x) else x, tree)


def _mark(rhs: Vector) -> Array:
    """One, and formally linear in ``rhs``: in the tangent systems, which JAX solves the same way, it is zero."""
    return 1 + _nothing_of(rhs)


def _nothing_of(vector: Vector) -> Array:
    """Zero, formally linear in the vector."""
    total = jnp.zeros(())
    for leaf in jax.tree.leaves(vector):
        total = total + jnp.sum(jnp.atleast_1d(leaf)[:0].real).astype(total.dtype)
    return total


def _raise_if_failed(x: Vector, outcome: Outcome, throw: bool) -> Vector:
    if not throw:
        return x
    return eqx.error_if(
        x,
        outcome.status != Status.CONVERGED,
        "krylov.solve: the system, or that of a derivative, did not converge. Raise maxiter or rtol, use a better "
        "preconditioner, or look at the solution with throw=False.",
    )
