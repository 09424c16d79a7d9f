"""The front door: look at what came, and solve."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from krylov.operators.base import LinearOperator, Vector
from krylov.operators.convert import as_operator
from krylov.operators.structure import (
    Structure,
    all_complex,
    check_vector,
    common_dtype,
    describe,
    has_complex,
    is_complex,
    is_traced,
    real_dtype,
    same_structure,
    structure_of,
)
from krylov.operators.views import complexify

from .arguments import is_real_matrix, known, number, real_unknowns, right_hand_side, stopping
from .driver import is_scalar
from .error_bounds import bounds_of, informed
from .implicit import solve_implicitly
from .methods import CG, METHODS, Direct, Method, method_named
from .precision import promote_half
from .preconditioners import BuiltPreconditioner, Preconditioner
from .solution import ConvergenceError, Solution
from .status import Status
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
    returned, in single precision.

    Args:
        op: a `LinearOperator`, a lineax operator, a dense or sparse matrix, a SciPy operator, or a function of a vector
            like ``b``. A real matrix takes a complex ``b``.
        b: right-hand side, a pytree of arrays like the operator's output.
        method: ``"cg"``, ``"fcg"``, ``"cr"``, ``"minres"``, ``"minres_qlp"``, ``"gmres"``, ``"bicgstab"``,
            ``"cholesky"``, ``"lu"``, ``"eigh"``, ``"svd"``, a method object such as ``krylov.GMRES(restart=50)``, or
            ``"auto"``: cg for a positive operator, minres for a hermitian one, else gmres.
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
    op = as_operator(op, structure_of(b), where="solve")
    recipe = preconditioner if isinstance(preconditioner, Preconditioner) else None
    if recipe is not None:
        preconditioner = None
    elif preconditioner is not None:
        preconditioner = as_operator(preconditioner, structure_of(b), where="solve: preconditioner")
    if isinstance(preconditioner, BuiltPreconditioner):
        preconditioner = preconditioner.with_shift(shift)
    op, preconditioner = _match_fields(op, preconditioner, b)
    b = check_fit("solve", op, b)
    structure = op.out_structure()
    x0_given = x0 is not None
    guess = check_vector("solve", "x0", x0, structure) if x0_given else zeros_like(b)
    if preconditioner is not None:
        check_preconditioner(preconditioner, structure)
    op, preconditioner, b, guess = promote_half(op, preconditioner, b, guess)
    structure = op.out_structure()

    shift = check_shift(shift, structure)
    chosen = choose(method, op, shift)
    _check_method(chosen, shift, preconditioner or recipe)
    building = 0
    if recipe is not None:
        preconditioner = recipe.build(op, shift=shift)
        building = preconditioner.report.matvecs
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
    return _finish(x, outcome, chosen, throw, bounds)


def _finish(x, outcome, method, throw, bounds) -> Solution:
    traced = is_traced(outcome.status)
    kept = outcome.history
    if kept is not None and not traced and np.ndim(outcome.status) == 0:
        # On the host: a slice on the device compiles for each length, and so does `jnp.asarray`.
        kept = jax.device_put(np.asarray(kept)[: int(outcome.iterations) + 1])
    solution = Solution(
        x=x,
        iterations=outcome.iterations,
        matvecs=outcome.matvecs,
        residual_norm=outcome.residual_norm,
        rhs_norm=outcome.rhs_norm,
        history=kept,
        status_code=outcome.status,
        method=method.name,
        error_bounds=bounds,
    )
    if throw and not traced and not bool(np.all(np.asarray(outcome.status) == Status.CONVERGED)):
        raise ConvergenceError(solution)
    return solution


def _match_fields(op, preconditioner, b):
    """A real matrix, with its preconditioner, is extended to complex vectors where b is complex."""
    if is_real_matrix(op) and all_complex(b):
        op = complexify(op)
        if preconditioner is not None and not has_complex(preconditioner.in_structure()):
            preconditioner = complexify(preconditioner)
    elif preconditioner is not None and is_real_matrix(preconditioner) and all_complex(b):
        preconditioner = complexify(preconditioner)
    return op, preconditioner


def check_fit(where: str, op: LinearOperator, b: Vector) -> Vector:
    """The right-hand side of a square system as arrays, checked."""
    if not op.is_square:
        raise ValueError(
            f"{where}: the operator is not square.\n  input     {describe(op.in_structure())}\n"
            f"  output    {describe(op.out_structure())}\n"
            "  For the least-squares solution: krylov.lstsq, with damping in place of a shift; or solve with the gram, "
            "op.H @ op or J.gram()."
        )
    return check_vector(where, "b", b, op.out_structure())


def check_preconditioner(preconditioner: LinearOperator, structure: Structure) -> None:
    """Refuse one of another space than the vectors."""
    for name, got in (("input", preconditioner.in_structure()), ("output", preconditioner.out_structure())):
        if not same_structure(got, structure):
            raise ValueError(
                f"solve: the preconditioner's {name} does not match the operator.\n"
                f"  got       {describe(got)}\n  expected  {describe(structure)}"
            )


def check_shift(shift: Any, structure: Structure) -> Any:
    """The shift as arrays in the precision of the vectors."""
    if isinstance(shift, (bool, str)) or shift is None:
        raise TypeError(f"solve: shift must be a number or a pytree like b, not {shift!r}.")
    if is_scalar(shift):
        value = number("solve", "shift", shift)
        complex_shift = bool(np.iscomplexobj(value)) or (hasattr(value, "dtype") and is_complex(value))
        if complex_shift and not all_complex(structure):
            raise ValueError(
                f"solve: a complex shift needs complex vectors.\n  got       shift of dtype {jnp.result_type(value)}\n"
                f"  vectors   {describe(structure)}\n  Pass its real part, or make the system complex."
            )
        dtype = common_dtype(structure)
        return value.astype(dtype if complex_shift else real_dtype(dtype))
    leaves = jax.tree.map(jnp.asarray, shift)
    fits = jax.tree.structure(leaves) == jax.tree.structure(structure) and all(
        d.shape in ((), s.shape) and (is_complex(s) or not is_complex(d))
        for d, s in zip(jax.tree.leaves(leaves), jax.tree.leaves(structure), strict=True)
    )
    if not fits:
        raise ValueError(
            "solve: shift must be a scalar or a pytree like b, with an array or a scalar for each leaf.\n"
            f"  got       {describe(shift)}\n  expected  {describe(structure)}"
        )
    return jax.tree.map(lambda d, s: d.astype(s.dtype if is_complex(d) else real_dtype(s.dtype)), leaves, structure)


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
