"""The solve as JAX sees it: a linear map of the right-hand side with a transpose, differentiable in the operator."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from krylov.operators.base import LinearOperator, Vector, conjugate, product

from .dense import factorize_and_refine
from .driver import Controls, Outcome, add_shift, iterate
from .methods import Direct, Method, Recurrence
from .status import Status
from .vectors import is_exactly, safe_norm, zeros_like


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
    throw: bool,
) -> tuple[Vector, Outcome]:
    r"""Solve :math:`(A + s) x = b` with :math:`\dot x = (A + s)^{-1}(\dot b - (\dot A + \dot s) x)`.

    Tangent and cotangent systems start from zero and are solved to the relative tolerance of their own right-hand
    sides. With ``throw`` one of them that does not converge raises, since its status has nowhere else to go.
    """
    own_rhs = rhs
    relative = _relative_tolerance(controls, rhs)

    def matvec(x: Vector) -> Vector:
        return add_shift(shift, product(op, x), x)

    def forward(_, b: Vector) -> tuple[Vector, Outcome]:
        # JAX solves tangent systems with this function too. The guess and the absolute tolerance belong to one
        # right-hand side, so they are used for that one only.
        own = is_exactly(b, own_rhs)
        tolerances = eqx.tree_at(
            lambda c: (c.rtol, c.atol),
            controls,
            (jnp.where(own, controls.rtol, relative), jnp.where(own, controls.atol, 0)),
        )
        x, outcome = run(method, op, shift, preconditioner, b, guess, has_guess & own, tolerances)
        return _raise_if_failed(x, outcome, throw, ~own), outcome

    def backward(_, b: Vector) -> tuple[Vector, Outcome]:
        # A^T x = b is A^H conj(x) = conj(b).
        tolerances = eqx.tree_at(lambda c: (c.rtol, c.atol), controls, (relative, jnp.zeros_like(controls.atol)))
        adjoint_preconditioner = None if preconditioner is None else preconditioner.H
        no_guess = jnp.zeros_like(has_guess)
        x, outcome = run(
            method, op.H, conjugate(shift), adjoint_preconditioner, conjugate(b), zeros_like(b), no_guess, tolerances
        )
        return conjugate(_raise_if_failed(x, outcome, throw, True)), outcome

    return jax.lax.custom_linear_solve(matvec, rhs, forward, backward, has_aux=True)


def _relative_tolerance(controls: Controls, rhs: Vector) -> Array:
    """The relative tolerance, or where only an absolute one is given what that means for this right-hand side."""
    norm = safe_norm(jax.lax.stop_gradient(rhs), controls.rtol.dtype)
    return jnp.where(controls.rtol > 0, controls.rtol, jnp.where(norm > 0, controls.atol / norm, 0))


def _raise_if_failed(x: Vector, outcome: Outcome, throw: bool, derivative: Any) -> Vector:
    if not throw:
        return x
    return eqx.error_if(
        x,
        derivative & (outcome.status != Status.CONVERGED),
        "krylov.solve: the linear system of a derivative did not converge. Raise maxiter or rtol, use a better "
        "preconditioner, or set throw=False to take it as it is.",
    )
