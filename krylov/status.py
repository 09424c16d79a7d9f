"""How a solve can end, and what to try then."""

from enum import IntEnum


class Status(IntEnum):
    """How a solve ended. Compares with the integers that a `Solution` holds under transformations."""

    CONVERGED = 0
    MAX_ITERATIONS = 1
    STAGNATED = 2
    BREAKDOWN = 3
    INDEFINITE = 4
    NONFINITE = 5
    INCONSISTENT = 6

    @property
    def advice(self) -> str:
        """What happened and what to try, in words."""
        return _ADVICE[self]


_ADVICE = {
    Status.CONVERGED: "the true residual is within the tolerance",
    Status.MAX_ITERATIONS: (
        "the iterations ran out; raise maxiter or the shift, use a preconditioner, or see with krylov.check_operator "
        "whether the operator is what the method needs"
    ),
    Status.STAGNATED: (
        "the true residual stopped falling above the tolerance; rounding allows no better: raise rtol or the shift, or "
        "use higher precision; gmres may need a larger restart"
    ),
    Status.BREAKDOWN: (
        "the method met a zero pivot or diverged; the system may be singular: add a shift, or try minres or gmres"
    ),
    Status.INDEFINITE: (
        "a direction of negative curvature was met: the operator or the preconditioner is not positive definite; use "
        "method='minres'"
    ),
    Status.NONFINITE: (
        "a NaN or an infinity appeared: look at the right-hand side, the operator and the preconditioner; or the "
        "method diverged on a singular system"
    ),
    Status.INCONSISTENT: "the system is singular: x solves it in least squares only, without what a cut-off left out",
}
