"""Krylov solvers on JAX, for tangent operators of neural networks and every other linear system."""

from importlib.metadata import version as _version

from krylov.operators import Jacobian, LinearOperator, OperatorError, check_operator

from .lstsq import lstsq
from .many import solve_many
from .methods import CG, CGLS, CR, CRAIG, FCG, GMRES, LSMR, LSQR, LU, MINRES, MINRESQLP, BiCGStab, Cholesky
from .preconditioners import BlockJacobi, Deflation, Jacobi, Nystrom, SampleNystrom, SampleWoodbury
from .shifted import solve_shifted
from .solution import ConvergenceError, LeastSquaresSolution, Solution
from .solve import solve
from .status import Status

__version__ = _version("krylov-jax")

__all__ = [
    "CG",
    "CGLS",
    "CR",
    "CRAIG",
    "FCG",
    "GMRES",
    "LSMR",
    "LSQR",
    "LU",
    "MINRES",
    "MINRESQLP",
    "BiCGStab",
    "BlockJacobi",
    "Cholesky",
    "ConvergenceError",
    "Deflation",
    "Jacobi",
    "Jacobian",
    "LeastSquaresSolution",
    "LinearOperator",
    "Nystrom",
    "OperatorError",
    "SampleNystrom",
    "SampleWoodbury",
    "Solution",
    "Status",
    "check_operator",
    "lstsq",
    "solve",
    "solve_many",
    "solve_shifted",
]
