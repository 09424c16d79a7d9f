"""Every method as a lineax solver, for `lineax.linear_solve` and what is built on it: optimistix, diffrax."""

from typing import Any

import jax.numpy as jnp
import lineax as lx

from krylov.operators.base import LinearOperator, Vector
from krylov.operators.convert import as_operator
from krylov.operators.views import conjugate_operator

from ..lstsq import lstsq
from ..methods import LEAST_SQUARES_METHODS, METHODS, MINRESQLP, SVD, Eigh, LeastSquares, Method, method_named
from ..solve import choose, solve
from ..status import Status

_RESULTS = {
    Status.MAX_ITERATIONS: lx.RESULTS.max_steps_reached,
    Status.STAGNATED: lx.RESULTS.stagnation,
    Status.BREAKDOWN: lx.RESULTS.breakdown,
    Status.INDEFINITE: lx.RESULTS.breakdown,
    Status.NONFINITE: lx.RESULTS.nonfinite_input,
    Status.INCONSISTENT: lx.RESULTS.singular,
}
# What they find where no solution exists is what lineax asks of a solver that does not assume full rank.
_PSEUDO_INVERSES = (MINRESQLP, Eigh, SVD)


class Solver(lx.AbstractLinearSolver[LinearOperator]):
    """A method of this library as a lineax solver.

    For square operators what `krylov.solve` does, for the methods of `krylov.lstsq` what that does; lineax
    differentiates. Understands the options ``"preconditioner"`` (of square systems) and ``"y0"`` that lineax's own
    iterative solvers have. lineax's tags become the claims of the operator: for ``"auto"``, tag it. With minres_qlp,
    eigh and svd a singular system without a solution is solved in least squares, successfully, as by ``lineax.SVD``;
    the statistics keep the status.

    Args:
        method: a name or a method object, as in `krylov.solve` and `krylov.lstsq`; ``"auto"`` is that of `solve`.
        rtol: relative tolerance of the true residual.
        atol: absolute tolerance.
        maxiter: most iterations; default as in `solve`.

    Raises:
        ValueError: an unknown method, or a preconditioner for one of `krylov.lstsq`.

    Example:
        >>> import jax.numpy as jnp, lineax
        >>> from krylov.interop.lineax import Solver
        >>> A = lineax.MatrixLinearOperator(jnp.array([[4.0, 1.0], [1.0, 3.0]]), lineax.positive_semidefinite_tag)
        >>> solution = lineax.linear_solve(A, jnp.array([1.0, 2.0]), Solver("cg", rtol=1e-6))
        >>> [f"{value:.4f}" for value in solution.value]
        ['0.0909', '0.6364']
    """

    method: str | Method = "auto"
    rtol: float = 1e-5
    atol: float = 0.0
    maxiter: int | None = None

    def __check_init__(self):
        self._chosen()

    def _chosen(self) -> Method | None:
        """The method object; None where the operator decides."""
        if isinstance(self.method, str) and self.method == "auto":
            return None
        return method_named(self.method, METHODS | LEAST_SQUARES_METHODS, "Solver")

    def init(self, operator: lx.AbstractLinearOperator, options: dict[str, Any]) -> LinearOperator:
        """The operator as one of this library."""
        del options
        return as_operator(operator, where="Solver")

    def compute(
        self, state: LinearOperator, vector: Vector, options: dict[str, Any]
    ) -> tuple[Vector, lx.RESULTS, dict[str, Any]]:
        """Solve; statistics are iterations, products, the true residual norm and this library's own status."""
        guess, preconditioner = options.get("y0"), options.get("preconditioner")
        controls: dict[str, Any] = dict(rtol=self.rtol, atol=self.atol, maxiter=self.maxiter)
        method = self._chosen() or choose("auto", state, 0.0)
        if isinstance(method, LeastSquares):
            if preconditioner is not None:
                raise ValueError(f"Solver: {method.name} takes no preconditioner; leave it out of the options.")
            solution = lstsq(state, vector, method, x0=guess, **controls)
        else:
            solution = solve(state, vector, method, x0=guess, preconditioner=preconditioner, **controls)
        code = jnp.asarray(solution.status_code)
        result = lx.RESULTS.successful
        for status, named in _RESULTS.items():
            if status is Status.INCONSISTENT and isinstance(method, _PSEUDO_INVERSES):
                continue
            result = lx.RESULTS.where(code == status, named, result)
        stats = {
            "num_steps": solution.iterations,
            "max_steps": self.maxiter,
            "matvecs": solution.matvecs,
            "residual_norm": solution.residual_norm,
            "status": code,
        }
        return solution.x, result, stats

    def transpose(self, state: LinearOperator, options: dict[str, Any]) -> tuple[LinearOperator, dict[str, Any]]:
        """The transposed operator and preconditioner; a guess does not carry over."""
        return conjugate_operator(state.H), _changed(options, lambda op: conjugate_operator(op.H))

    def conj(self, state: LinearOperator, options: dict[str, Any]) -> tuple[LinearOperator, dict[str, Any]]:
        """The conjugated operator and preconditioner; a guess does not carry over."""
        return conjugate_operator(state), _changed(options, conjugate_operator)

    def assume_full_rank(self) -> bool:
        """Whether derivatives may leave out the terms of null spaces: not for methods that find the least norm."""
        return not isinstance(self._chosen(), (*_PSEUDO_INVERSES, LeastSquares))


def _changed(options: dict[str, Any], change: Any) -> dict[str, Any]:
    preconditioner = options.get("preconditioner")
    if preconditioner is None:
        return {}
    return {"preconditioner": change(as_operator(preconditioner, where="Solver: preconditioner"))}
