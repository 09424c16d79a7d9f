"""What a solve returns."""

import dataclasses
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from krylov.operators.base import Vector
from krylov.operators.structure import is_traced

from .status import Status


class Solution(eqx.Module):
    r"""The result of `solve`; a pytree, so that it passes through jit, vmap and scan.

    Attributes:
        x: the solution, like the right-hand side.
        iterations: iterations taken; back-substitutions of a direct method.
        matvecs: products with the operator; those that verify, and that build a preconditioner on the fly, among them.
        residual_norm: :math:`\|b - A x\|`, recomputed from x.
        rhs_norm: :math:`\|b\|`.
        history: residual norm after each iteration, the first entry before it, if asked for. Its entries are the
            recurrence's own. Under a transformation its length is fixed and the last value repeats.
        method: the method's name.
        error_bounds: a lower and an upper bound of the energy norm of the error, from ``CG(bounds=True)``.
    """

    x: Vector
    iterations: Int[Array, ""]
    matvecs: Int[Array, ""]
    residual_norm: Float[Array, ""]
    rhs_norm: Float[Array, ""]
    history: Float[Array, " length"] | None
    status_code: Int[Array, ""]
    method: str = eqx.field(static=True)
    error_bounds: tuple[Float[Array, ""], Float[Array, ""]] | None = eqx.field(default=None, kw_only=True)

    @property
    def status(self) -> Any:
        """A `Status`, or an array of its numbers under a transformation and for stacked solutions."""
        if is_traced(self.status_code) or np.ndim(self.status_code) > 0:
            return self.status_code
        return Status(int(self.status_code))

    @property
    def converged(self) -> Bool[Array, ""]:
        """Whether the true residual is within the tolerance, or the error's bound within ``CG(energy_rtol=...)``."""
        return self.status_code == Status.CONVERGED

    def __repr__(self) -> str:
        if is_traced(self.status_code):
            return f"Solution(method={self.method!r}, traced)"
        if np.ndim(self.status_code) > 0:
            codes, counts = np.unique(np.asarray(self.status_code), return_counts=True)
            each = ", ".join(f"{n} {Status(int(c)).name}" for c, n in zip(codes, counts, strict=True))
            return f"Solution(method={self.method!r}, shape {np.shape(self.status_code)}: {each})"
        status = Status(int(self.status_code))
        norm, rhs = float(self.residual_norm), float(self.rhs_norm)
        relative = f" ({norm / rhs:.1e} of ||b||)" if rhs > 0 else ""
        return (
            f"Solution({status.name} by {self.method} after {int(self.iterations)} iterations, "
            f"{int(self.matvecs)} products: ||b - A x|| = {norm:.1e}{relative}; {status.advice})"
        )


class LeastSquaresSolution(Solution):
    r"""The result of `lstsq`; a pytree, so that it passes through jit, vmap and scan.

    With r = y - J x, :math:`\lambda` the damping and :math:`f = \sqrt{\|r\|^2 + \lambda^2 \|x\|^2}`, all
    recomputed from x:

    Attributes:
        x: the solution, like the operator's input.
        iterations: iterations taken.
        matvecs: products with the operator and with its adjoint, those that verify among them.
        residual_norm: :math:`\|r\|`.
        objective_norm: f, which is minimised; without damping the same as ``residual_norm``.
        gradient_norm: :math:`\|J^H r - \lambda^2 x\|`, zero at the solution.
        operator_norm: a lower bound of the spectral norm of J (with damping: of J over :math:`\lambda`).
        rhs_norm: :math:`\|y\|`.
        history: f after each iteration, the first entry before it, if asked for. Its entries are the recurrence's own.
        gradient_history: the gradient norm after each iteration, likewise.
        method: the method's name.
    """

    objective_norm: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    operator_norm: Float[Array, ""]
    gradient_history: Float[Array, " length"] | None

    def __repr__(self) -> str:
        if is_traced(self.status_code) or np.ndim(self.status_code) > 0:
            return "LeastSquares" + super().__repr__()
        status = Status(int(self.status_code))
        norm, rhs = float(self.residual_norm), float(self.rhs_norm)
        slope = float(self.operator_norm) * float(self.objective_norm)
        relative = f" ({norm / rhs:.1e} of ||y||)" if rhs > 0 else ""
        falling = f" ({float(self.gradient_norm) / slope:.1e} of ||J|| ||r||)" if slope > 0 else ""
        return (
            f"LeastSquaresSolution({status.name} by {self.method} after {int(self.iterations)} iterations, "
            f"{int(self.matvecs)} products: ||r|| = {norm:.1e}{relative}, gradient {float(self.gradient_norm):.1e}"
            f"{falling}; {_LEAST_SQUARES_ADVICE.get(status, status.advice)})"
        )


_LEAST_SQUARES_ADVICE = {
    Status.CONVERGED: "the residual or the gradient is within the tolerance",
    Status.MAX_ITERATIONS: "the iterations ran out; raise maxiter or the damping",
    Status.STAGNATED: (
        "residual and gradient stopped falling above the tolerance; rounding allows no better: raise rtol or the "
        "damping, or use higher precision. craig needs a problem that has a solution"
    ),
    Status.BREAKDOWN: "the method diverged or cannot lower the residual; craig needs a problem that has a solution",
}


class ConvergenceError(RuntimeError):
    """Raised with ``throw=True``; the solution that was reached is its attribute ``solution``."""

    def __init__(self, solution: Solution):
        super().__init__(repr(solution))
        self.solution = solution


AnySolution = TypeVar("AnySolution", bound=Solution)


def finished(kind: type[AnySolution], x: Vector, outcome: Any, method: str, throw: Any, **more: Any) -> AnySolution:
    """The solution as its user gets it, made of what a driver reports under the same names.

    Raises:
        ConvergenceError: with ``throw``, where it is known not to have converged.
    """
    names = {field.name for field in dataclasses.fields(kind)}
    reported = {name: value for name, value in outcome._asdict().items() if name in names}
    known = not is_traced(outcome.status)
    if known and np.ndim(outcome.status) == 0:
        length = int(outcome.iterations) + 1
        for name in names & {"history", "gradient_history"}:
            if reported[name] is not None:
                # On the host: a slice on the device compiles for each length, and so does `jnp.asarray`.
                reported[name] = jax.device_put(np.asarray(reported[name])[:length])
    solution = kind(x=x, status_code=outcome.status, method=method, **reported, **more)
    if throw and known and not bool(np.all(np.asarray(outcome.status) == Status.CONVERGED)):
        raise ConvergenceError(solution)
    return solution
