"""The front door: look at what came, and solve."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from krylov.operators.base import LinearOperator, Vector
from krylov.operators.structure import (
    check_vector,
    common_dtype,
    has_complex,
    is_complex,
    is_traced,
    real_dtype,
    structure_of,
)

from .arguments import known, real_unknowns, right_hand_side, stopping
from .error_bounds import bounds_of, informed
from .implicit import solve_implicitly
from .methods import CG, METHODS, Direct, Method, method_named
from .precision import promote_half
from .solution import Solution, finished
from .square_system import built, check_shift, square_system
from .vectors import zeros_like


def solve(
    op: Any,
    b: Vector,
    method: str | Method = "auto",
    *,
    x0: Vector | None = None,
    shift: Any = 0.0,
    preconditioner: Any = None,
    rtol: Any = 1e-5,
    atol: Any = 0.0,
    maxiter: int | None = None,
    history: bool = False,
    progress: bool = False,
    throw: bool = False,
) -> Solution:
    r"""Solve the linear system :math:`(A + s)\, x = b`.

    Stops when :math:`\|b - (A + s) x\| \le \max(\mathrm{rtol}\,\|b\|, \mathrm{atol})` in the 2-norm over all leaves.
    The residual is recomputed from x before that is claimed; where rounding makes the recurrence's own residual differ,
    the recurrence begins anew, and STAGNATED is reported if that does not help. Works under jit, vmap, grad, jvp and
    linear_transpose in ``b``, ``shift`` and whatever the operator holds. Half-precision vectors are solved, and ``x``
    returned, in single precision. For ``b = 0`` the iterative methods give ``x = 0`` at once: A, which is then not
    multiplied, may hold anything, NaN included.

    Args:
        op: a `LinearOperator`, a lineax operator, a dense or sparse matrix, a SciPy operator, or a function of a vector
            like ``b``. A real matrix takes a complex ``b``.
        b: right-hand side, a pytree of arrays like the operator's output.
        method: ``"cg"``, ``"fcg"``, ``"cr"``, ``"minres"``, ``"minres_qlp"``, ``"gmres"``, ``"bicgstab"``,
            ``"bicgstabl"``, ``"cholesky"``, ``"lu"``, ``"eigh"``, ``"svd"``, a method object such as
            ``krylov.GMRES(restart=50)``, or ``"auto"``: cg for a positive operator, minres for a
            hermitian one, else gmres.
        x0: first guess, like ``b``; default zero.
        shift: added to the operator: a scalar, or a diagonal as a pytree like ``b``.
        preconditioner: an operator that applies an approximate inverse, hermitian positive definite for hermitian
            methods. Or a recipe such as ``krylov.Nystrom(rank=256)``, built for this operator and shift; or what its
            ``build`` returned, moved to this shift.
        rtol: relative tolerance.
        atol: absolute tolerance.
        maxiter: most iterations; default ten times the number of real unknowns.
        history: keep the residual norm of each iteration.
        progress: show a progress bar, under jit too.
        throw: raise `ConvergenceError` unless converged; under a transformation, a runtime error.

    Returns:
        A `Solution`.

    Raises:
        ValueError: structures, shapes or dtypes that do not match, an operator that is not square, an unknown method,
            a negative tolerance: where the call is, at trace time.
        TypeError: something of the wrong kind.
        ConvergenceError: with ``throw``, not converged.

    Example:
        >>> import jax.numpy as jnp, krylov
        >>> A = jnp.array([[4.0, 1.0], [1.0, 3.0]])
        >>> sol = krylov.solve(A, jnp.array([1.0, 2.0]), method="cg", rtol=1e-6)
        >>> [f"{value:.4f}" for value in sol.x], sol.status.name
        (['0.0909', '0.6364'], 'CONVERGED')
    """
    b = right_hand_side("solve", "b", b)
    op, preconditioner, recipe = square_system("solve", op, preconditioner, structure_of(b), shift)
    b = check_vector("solve", "b", b, op.out_structure())
    x0_given = x0 is not None
    guess = check_vector("solve", "x0", x0, op.in_structure()) if x0_given else zeros_like(b)
    op, preconditioner, b, guess = promote_half(op, preconditioner, b, guess)
    structure = op.out_structure()

    shift = check_shift("solve", shift, structure)
    chosen = choose(method, op, shift)
    _check_method(chosen, shift, preconditioner or recipe)
    preconditioner, building = built(recipe, preconditioner, op, shift)
    if isinstance(chosen, CG) and chosen.bounds:
        chosen = informed(chosen, op, shift, preconditioner)
    dtype, unknowns = real_dtype(common_dtype(structure)), real_unknowns(structure)
    controls = stopping("solve", rtol, atol, maxiter, history, progress, dtype, unknowns)
    own_terms = x0_given or not (known(controls.atol) == 0 and known(controls.rtol) > 0)
    system = (op, shift, preconditioner, b, guess)
    traced = any(map(is_traced, jax.tree.leaves((system, controls))))
    x, outcome = solve_implicitly(chosen, *system, jnp.asarray(x0_given), controls, own_terms, bool(throw) and traced)
    outcome = outcome._replace(matvecs=outcome.matvecs + building)
    bounds = None
    if isinstance(chosen, CG) and chosen.bounds:
        bounds = bounds_of(chosen, *system[:-1], x, outcome)
    return finished(Solution, x, outcome, chosen.name, throw, error_bounds=bounds)


def choose(method: Any, op: LinearOperator, shift: Any) -> Method:
    """The method named, or for "auto" the one for what the operator claims."""
    if method != "auto" if isinstance(method, str) else True:
        return method_named(method)
    real_shift = not has_complex(jax.tree.map(jnp.asarray, shift))
    if not (op.is_hermitian and real_shift):
        return METHODS["gmres"]()
    leaves = jax.tree.leaves(shift)
    known_negative = any(not is_traced(s) and np.any(np.asarray(s) < 0) for s in leaves)
    return METHODS["cg" if op.is_positive and not known_negative else "minres"]()


def _check_method(method: Method, shift: Any, preconditioner: Any) -> None:
    if preconditioner is not None and isinstance(method, Direct):
        raise ValueError(f"solve: {method.name} is a direct method and takes no preconditioner; leave it out.")
    if method.needs_hermitian and any(is_complex(s) for s in jax.tree.leaves(shift)):
        raise ValueError(
            f"solve: {method.name} needs a hermitian system, and a complex shift makes none. Use method='gmres', or "
            "the real part of the shift."
        )
