"""krylov's methods as NetKet calls a linear solver: ``solver(A, b, x0=None) -> (x, info)``."""

import dataclasses
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jaxtyping import Array
from netket.optimizer.linear_operator import LinearOperator as NetKetOperator

from krylov.driver import is_scalar
from krylov.lstsq import lstsq
from krylov.methods import LEAST_SQUARES_METHODS, LeastSquares, Method
from krylov.operators import DiagonalOperator, FunctionOperator, IdentityOperator, LinearOperator, MatrixOperator
from krylov.operators.base import Vector
from krylov.operators.structure import all_complex, common_dtype, is_complex, real_dtype
from krylov.preconditioners import Preconditioner
from krylov.solution import Solution
from krylov.solve import solve
from krylov.vectors import divide, safe_norm


@dataclasses.dataclass(frozen=True)
class Solver:
    """A linear solver as NetKet takes it, in ``SR(solver=...)``, ``VMC_SR(linear_solver=...)`` and ``TDVP``.

    Hashable and equal to another one with the same options, so that NetKet compiles once. Called with options only, it
    returns a solver with these: ``cg(rtol=1e-8)``. Called by NetKet it returns the solution and a dictionary with
    ``iterations``, ``matvecs``, the true ``residual_norm``, ``relative_residual`` (to the right-hand side) and
    ``converged``, which NetKet's drivers log. A matrix is taken to be hermitian and positive, as NetKet's are.

    The methods for least squares, ``lsmr`` say, are taken too, on the matrix A with its shift. There lsmr is minres on
    :math:`A^2 x = A b`: right, but slower than minres and cg, and without a preconditioner. What it is better for, the
    damped least-squares problem of the Jacobian itself, whose condition is the root of the matrix's, is no system that
    NetKet hands to a solver: ``VMC_MatrixFree(route="least_squares")`` solves that.

    Args:
        method: as in `krylov.solve` or `krylov.lstsq`.
        rtol: relative tolerance of the true residual.
        atol: absolute tolerance.
        maxiter: most iterations.
        preconditioner: a recipe such as ``krylov.Nystrom(64)``, built for each system; or None.

    Raises:
        ValueError: an unknown method, or a preconditioner for least squares.

    Example:
        >>> A = jnp.array([[4.0, 1.0], [1.0, 3.0]])
        >>> solver = Solver("cg", rtol=1e-6)
        >>> x, info = solver(A, jnp.array([1.0, 2.0]))
        >>> [f"{value:.4f}" for value in x], int(info["iterations"]), bool(info["converged"])
        (['0.0909', '0.6364'], 2, True)
        >>> solver(rtol=1e-3) == Solver("cg", rtol=1e-3)
        True
    """

    method: str | Method = "auto"
    rtol: float = 1e-6
    atol: float = 0.0
    maxiter: int | None = None
    preconditioner: Preconditioner | None = None

    def __call__(self, A: Any = None, b: Any = None, *, x0: Vector | None = None, **options: Any) -> Any:
        """Solve ``A x = b``; without either, a solver with other options.

        Raises:
            TypeError: one of ``A`` and ``b`` only, or an unknown option.
        """
        solver = dataclasses.replace(self, **options)
        if A is None and b is None:
            return solver
        if A is None or b is None:
            raise TypeError("krylov.interop.netket: a solver takes both A and b, or options only.")
        if hasattr(A, "solve_with"):
            return A.solve_with(solver, b, x0)
        if isinstance(A, NetKetOperator):
            op = _wrap(A, b)
        else:
            matrix = jnp.asarray(A)
            b = b.astype(jnp.result_type(matrix, b))
            op = MatrixOperator(matrix.astype(b.dtype), positive=True)
        return solver.solve(op, b, x0)

    def solve(self, op: Any, b: Vector, x0: Vector | None = None, shift: Any = 0.0) -> tuple[Vector, dict[str, Array]]:
        """Solve with an operator of krylov."""
        if x0 is not None:
            x0 = jax.tree.map(lambda x, like: jnp.asarray(x).astype(like.dtype), x0, b)
        if _by_least_squares(self.method):
            return self._least_squares(self.method, op, b, x0, shift)
        options: dict[str, Any] = dict(rtol=self.rtol, atol=self.atol, maxiter=self.maxiter)
        solution = solve(op, b, self.method, x0=x0, shift=shift, preconditioner=self.preconditioner, **options)
        return solution.x, facts(solution)

    def __post_init__(self):
        if _by_least_squares(self.method) and self.preconditioner is not None:
            raise ValueError(
                f"krylov.interop.netket: {self.method} takes no preconditioner.\n"
                f"  got       {self.preconditioner!r}\n  Use cg or minres with it."
            )

    def _least_squares(
        self, method: str | LeastSquares, op: LinearOperator, b: Vector, x0: Vector | None, shift: Any
    ) -> tuple[Vector, dict[str, Array]]:
        shifted = op + _diagonal(shift, op)
        # By the residual alone: the gradient A r is small long before r is where A is ill-conditioned.
        size = safe_norm(b, real_dtype(common_dtype(op.out_structure())))
        tolerance = jnp.maximum(self.rtol * size, self.atol)
        solution = lstsq(shifted, b, method, x0=x0, rtol=0.0, atol=tolerance, maxiter=self.maxiter)
        # Where no residual is zero, a gradient that is zero is the end too.
        found = facts(solution)
        return solution.x, found | {"converged": found["converged"] & (solution.residual_norm <= tolerance)}


def _by_least_squares(method: str | Method) -> TypeGuard[str | LeastSquares]:
    return method.lower() in LEAST_SQUARES_METHODS if isinstance(method, str) else isinstance(method, LeastSquares)


def _diagonal(shift: Any, op: LinearOperator) -> LinearOperator:
    structure = op.in_structure()
    if is_scalar(shift):
        return IdentityOperator(structure) * shift
    entries = jax.tree.map(lambda d, s: jnp.broadcast_to(d, s.shape).astype(real_dtype(s.dtype)), shift, structure)
    return DiagonalOperator(entries, structure)


def facts(solution: Solution) -> dict[str, Array]:
    """What to log of a solve."""
    return {
        "iterations": solution.iterations,
        "matvecs": solution.matvecs,
        "residual_norm": solution.residual_norm,
        "relative_residual": divide(solution.residual_norm, solution.rhs_norm),
        "converged": jnp.asarray(solution.converged),
    }


def _wrap(A: NetKetOperator, b: Vector) -> FunctionOperator:
    """A lazy operator of NetKet's, which adds its shift itself.

    Over the real field unless it says that it is C-linear: that is right for every one.
    """
    mode = getattr(A, "mode", getattr(A, "_mode", None))
    c_linear = mode == "holomorphic" and all_complex(b)
    positive = mode != "imag"
    field = "complex" if c_linear or (mode == "imag" and all_complex(b)) else "real"

    def product(x):
        out = A @ x
        return jax.tree.map(lambda y, like: (y if is_complex(like) else y.real).astype(like.dtype), out, b)

    return FunctionOperator(product, b, hermitian=True, positive=positive, field=field)


auto = Solver("auto")
cg = Solver("cg")
cr = Solver("cr")
fcg = Solver("fcg")
minres = Solver("minres")
minres_qlp = Solver("minres_qlp")
gmres = Solver("gmres")
lsmr = Solver("lsmr")
bicgstab = Solver("bicgstab")
bicgstabl = Solver("bicgstabl")
cholesky = Solver("cholesky")
lu = Solver("lu")
