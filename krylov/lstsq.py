"""The front door of least squares."""

from typing import Any

import jax
import jax.numpy as jnp

from krylov.operators.base import Vector
from krylov.operators.convert import as_operator
from krylov.operators.structure import (
    all_complex,
    check_vector,
    common_dtype,
    is_traced,
    real_dtype,
    structure_of,
    zeros,
)
from krylov.operators.views import complexify

from .arguments import is_real_matrix, known, not_negative, real_unknowns, right_hand_side, stopping
from .damped import damp
from .methods import CRAIG, LEAST_SQUARES_METHODS, LeastSquares, method_named
from .precision import promote_half
from .pseudo_inverse import solve_least_squares
from .solution import LeastSquaresSolution, finished


def lstsq(
    op: Any,
    y: Vector,
    method: str | LeastSquares = "lsmr",
    *,
    damping: Any = 0.0,
    x0: Vector | None = None,
    preconditioner: None = None,
    rtol: Any = 1e-5,
    atol: Any = 0.0,
    maxiter: int | None = None,
    history: bool = False,
    progress: bool = False,
    throw: bool = False,
) -> LeastSquaresSolution:
    r"""Solve the least-squares problem :math:`\min_x \|J x - y\|^2 + \lambda^2 \|x\|^2` with any J, square or not.

    Without damping and x0 the minimiser of least norm, :math:`J^+ y`, whatever the shape and the rank; with x0 the one
    nearest to it. Stops when, with r = y - J x and :math:`f^2 = \|r\|^2 + \lambda^2\|x\|^2`,

    .. math:: f \le \max(\mathrm{rtol}\,\|y\|, \mathrm{atol}) \quad\text{or}\quad
        \|J^H r - \lambda^2 x\| \le \mathrm{rtol}\,\|\tilde J\|\,f, \qquad \tilde J = (J; \lambda),

    recomputed from x, with a lower bound of the spectral norm that the products have shown. Neither the size of J nor
    that of y matters. Condition numbers are not squared. Works under jit, vmap, jvp and grad in ``y``, ``damping`` and
    whatever the operator holds; derivatives are those at constant rank.

    Args:
        op: J: a `LinearOperator`, a lineax operator, a dense or sparse matrix, a SciPy operator, or (with ``x0``) a
            function. A real matrix takes a complex ``y``.
        y: a pytree of arrays like the operator's output.
        method: ``"lsmr"``, ``"lsqr"``, ``"cgls"``, ``"craig"`` (for systems that have a solution, without damping), or
            a method object.
        damping: :math:`\lambda`, which is squared, as ``damp`` in SciPy: ``lstsq(J, y, damping=d)`` solves
            ``(J^H J + d**2) x = J^H y``, and `krylov.solve` with ``shift=d**2`` does the same.
        x0: first guess, like the operator's input; default zero. With damping it changes the start alone.
        preconditioner: none, the message of the error says why and what to do.
        rtol: relative tolerance.
        atol: absolute tolerance of f.
        maxiter: most iterations; default ten times the number of real rows or columns, whichever are fewer.
        history: keep f and the norm of the gradient of each iteration.
        progress: show a progress bar, under jit too.
        throw: raise `ConvergenceError` unless converged; under a transformation, a runtime error.

    Returns:
        A `LeastSquaresSolution`.

    Raises:
        ValueError: structures, shapes or dtypes that do not match, an unknown method, a negative tolerance or damping,
            damping with craig, a preconditioner: where the call is, at trace time.
        TypeError: something of the wrong kind.
        ConvergenceError: with ``throw``, not converged.

    Example:
        >>> import jax.numpy as jnp, krylov
        >>> J = jnp.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
        >>> sol = krylov.lstsq(J, jnp.array([1.0, 3.0, 5.0]), rtol=1e-6)
        >>> [f"{value:.3f}" for value in sol.x], sol.status.name
        (['1.000', '2.000'], 'CONVERGED')

    Reference: Fong & Saunders (2011), doi:10.1137/10079687X; of each method in its own documentation.
    """
    if preconditioner is not None:
        raise ValueError(
            "lstsq: a preconditioner M changes which x has least norm, what the damping weighs and the gradient that "
            f"stops.\n  got       {type(preconditioner).__name__}\n"
            "  Say what is meant: new unknowns, x = M z with J of full column rank and no damping,\n"
            "    z = krylov.lstsq(J @ M, y).x; x = M @ z\n"
            "  or the normal equations: krylov.solve(J.gram(), J.H @ y, shift=damping**2, preconditioner=...)."
        )
    y = right_hand_side("lstsq", "y", y)
    op = as_operator(op, None if x0 is None else structure_of(x0), where="lstsq")
    if is_real_matrix(op) and all_complex(y):
        op = complexify(op)
    y = check_vector("lstsq", "y", y, op.out_structure())
    guess = zeros(op.in_structure()) if x0 is None else check_vector("lstsq", "x0", x0, op.in_structure())
    op, _, y, guess = promote_half(op, None, y, guess)
    chosen = method_named(method, LEAST_SQUARES_METHODS, "lstsq")
    if not isinstance(chosen, LeastSquares):
        raise TypeError(
            f"lstsq: {chosen.name} is a method for square systems.\n"
            f"  expected  one of {', '.join(LEAST_SQUARES_METHODS)}\n"
            "  For a square system: krylov.solve. For J^H J with a shift: krylov.solve(J.gram(), J.H @ y, shift=...)."
        )
    dtype = real_dtype(common_dtype((op.in_structure(), op.out_structure())))
    unknowns = min(real_unknowns(op.in_structure()), real_unknowns(op.out_structure()))
    controls = stopping("lstsq", rtol, atol, maxiter, history, progress, dtype, unknowns)
    damping = not_negative("lstsq", "damping", damping, dtype)
    damped = known(damping) != 0
    if damped and isinstance(chosen, CRAIG):
        raise ValueError(
            "lstsq: craig takes no damping: it is for systems that have a solution, and the damped problem has none.\n"
            f"  got       damping={damping}\n  Use method='lsmr'."
        )
    system, rhs = damp(op, y, jnp.asarray(damping)) if damped else (op, y)
    traced = any(map(is_traced, jax.tree.leaves((system, rhs, guess, controls))))
    x, outcome = solve_least_squares(
        system,
        rhs,
        guess,
        jnp.asarray(x0 is not None),
        controls,
        method=chosen,
        damped=damped,
        throw=bool(throw) and traced,
    )
    return finished(LeastSquaresSolution, x, outcome, chosen.name, throw)
