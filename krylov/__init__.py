"""Krylov solvers on JAX, for tangent operators of neural networks and every other linear system."""

from importlib.metadata import version as _version

from krylov.operators import Jacobian, LinearOperator, OperatorError, check_operator

from .methods import CG, GMRES, LU, MINRES, BiCGStab, Cholesky
from .solution import ConvergenceError, Solution
from .solve import solve
from .status import Status

__version__ = _version("krylov-jax")

__all__ = [
    "CG",
    "GMRES",
    "LU",
    "MINRES",
    "BiCGStab",
    "Cholesky",
    "ConvergenceError",
    "Jacobian",
    "LinearOperator",
    "OperatorError",
    "Solution",
    "Status",
    "check_operator",
    "solve",
]
