"""krylov's methods as NetKet calls a linear solver: ``solver(A, b, x0=None) -> (x, info)``."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
from netket.optimizer.linear_operator import LinearOperator as NetKetOperator

from krylov.methods import Method
from krylov.operators import FunctionOperator, MatrixOperator
from krylov.operators.base import Vector
from krylov.operators.structure import all_complex, is_complex
from krylov.preconditioners import Preconditioner
from krylov.solution import Solution
from krylov.solve import solve
from krylov.vectors import divide


@dataclasses.dataclass(frozen=True)
class Solver:
    """A linear solver as NetKet takes it, in ``SR(solver=...)``, ``VMC_SR(linear_solver=...)`` and ``TDVP``.

    Hashable and equal to another one with the same options, so that NetKet compiles once. Called with options only, it
    returns a solver with these: ``cg(rtol=1e-8)``. Called by NetKet it returns the solution and a dictionary with
    ``iterations``, ``matvecs``, the true ``residual_norm``, ``relative_residual`` (to the right-hand side) and
    ``converged``, which NetKet's drivers log. A matrix is taken to be hermitian and positive, as NetKet's are.

    Args:
        method: as in `krylov.solve`.
        rtol: relative tolerance of the true residual.
        atol: absolute tolerance.
        maxiter: most iterations.
        preconditioner: a recipe such as ``krylov.Nystrom(64)``, built for each system; or None.

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
        options: dict[str, Any] = dict(rtol=self.rtol, atol=self.atol, maxiter=self.maxiter)
        solution = solve(op, b, self.method, x0=x0, shift=shift, preconditioner=self.preconditioner, **options)
        return solution.x, facts(solution)


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
bicgstab = Solver("bicgstab")
cholesky = Solver("cholesky")
lu = Solver("lu")
