r"""Least-squares solutions as JAX sees them: :math:`x = A^+ b` with the derivatives of the pseudo-inverse."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from krylov.operators.base import LinearOperator, Vector, adjoint_product, conjugate, product
from krylov.operators.linear_call import linear_call

from .adjoint_driver import AdjointOutcome, iterate_with_adjoint
from .driver import Controls
from .methods.least_squares import LeastSquares
from .status import Status
from .vectors import add, subtract, zeros_like


@eqx.filter_jit
def solve_least_squares(
    op: LinearOperator,
    rhs: Vector,
    guess: Vector,
    has_guess: Bool[Array, ""],
    controls: Controls,
    *,
    method: LeastSquares,
    damped: bool,
    throw: bool,
) -> tuple[Vector, AdjointOutcome]:
    r"""Minimise :math:`\|b - A x\|`, differentiably.

    .. math:: \dot x = A^+ (\dot b - \dot A x + A^{+H} \dot A^H r - A v) + v, \quad v = \dot A^H A^{+H} x

    for changes that keep the rank, r the residual (Golub & Pereyra, 1973, doi:10.1137/0710036). Terms with v are those
    of the null space, which a damped operator does not have. Systems of derivatives start from zero and are solved to
    ``rtol`` of their own right-hand sides.
    """
    guess, controls = jax.lax.stop_gradient((guess, controls))
    return _solve(op, rhs, guess, has_guess, controls=controls, method=method, damped=damped, throw=throw)


@eqx.filter_custom_jvp
def _solve(op, rhs, guess, has_guess, *, controls, method, damped, throw):
    x, outcome = iterate_with_adjoint(method, op, rhs, guess, has_guess, controls, damped=damped)
    if throw:
        x = eqx.error_if(
            x,
            outcome.status != Status.CONVERGED,
            "krylov.lstsq: the problem, or that of a derivative, did not converge. Raise maxiter, rtol or the damping, "
            "or look at the solution with throw=False.",
        )
    return x, outcome


@_solve.def_jvp
def _solve_jvp(primals, tangents, *, controls, method, damped, throw):
    op, rhs, guess, _ = primals
    op_dot, rhs_dot, *_ = tangents
    options = dict(method=method, damped=damped, throw=throw)
    x, outcome = _solve(*primals, controls=controls, **options)
    others = dict(controls=_of_others(controls), method=method.adjoint, throw=throw)
    change = _filled(rhs_dot, rhs)
    null_space = None
    if jax.tree.leaves(op_dot):
        change = subtract(change, _derivative(product, op, op_dot, x))
        gradient_dot = _derivative(adjoint_product, op, op_dot, subtract(rhs, product(op, x)))
        change = add(change, _pseudo_inverse(op.H, gradient_dot, **others))
        if not damped:
            # The part of x in the null space is that of the guess.
            dual = _pseudo_inverse(op.H, subtract(x, guess), **others)
            null_space = _derivative(adjoint_product, op, op_dot, dual)
            change = subtract(change, product(op, null_space))
    x_dot = _pseudo_inverse(op, change, **others)
    if null_space is not None:
        x_dot = add(x_dot, null_space)
    return (x, outcome), (x_dot, jax.tree.map(lambda _: None, outcome))


def _derivative(multiply, op: LinearOperator, op_dot: Any, vector: Vector) -> Vector:
    """Of the product with a fixed vector."""
    value, change = eqx.filter_jvp(lambda op: multiply(op, vector), (op,), (op_dot,))
    return _filled(change, value)


def _filled(tangent: Any, like: Vector) -> Vector:
    """Zeros where there is no tangent."""
    return jax.tree.map(lambda x, t: jnp.zeros_like(x) if t is None else t, like, tangent)


def _pseudo_inverse(op: LinearOperator, vector: Vector, **options: Any) -> Vector:
    """``A^+ vector``, as a linear call: its transpose is the pseudo-inverse of the adjoint."""
    controls = options.pop("controls")
    arrays, rest = eqx.partition((op, controls), eqx.is_array)

    def apply(adjoint):
        def applied(arrays, vector):
            op, controls = eqx.combine(arrays, rest)
            if adjoint:
                op, vector = op.H, conjugate(vector)
            zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), op.in_structure())
            nothing = jnp.asarray(False)
            x, _ = _solve(op, vector, zero, nothing, controls=controls, damped=False, **options)
            return conjugate(x) if adjoint else x

        return applied

    return linear_call(apply(False), apply(True), arrays, vector)


def _of_others(controls: Controls) -> Controls:
    """Tolerances of the systems of derivatives; the absolute one belongs to the right-hand side given."""
    eps = jnp.finfo(controls.rtol.dtype).eps
    relative = jnp.where(controls.rtol > 0, controls.rtol, eps**0.75)
    return Controls(relative, zeros_like(controls.atol), controls.maxiter, None, False)
