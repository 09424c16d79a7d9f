"""Krylov solvers on JAX, for tangent operators of neural networks and every other linear system."""

from importlib.metadata import version as _version

from krylov.operators import Jacobian, LinearOperator, OperatorError, check_operator, plan, tune
from krylov.operators.curvature import fisher, gauss_newton, hessian, neural_tangent_kernel, quantum_geometric_tensor

from . import processes
from .lstsq import lstsq
from .many import solve_many
from .methods import (
    CG,
    CGLS,
    CR,
    CRAIG,
    FCG,
    GMRES,
    LSMR,
    LSQR,
    LU,
    MINRES,
    MINRESQLP,
    SVD,
    BiCGStab,
    BiCGStabL,
    Cholesky,
    Eigh,
)
from .natural_gradient import natural_gradient
from .preconditioners import BlockJacobi, Deflation, Jacobi, Nystrom, SampleNystrom, SampleWoodbury
from .recycler import Recycler
from .shifted import solve_shifted
from .solution import ConvergenceError, LeastSquaresSolution, Solution
from .solve import solve
from .spectrum import eigsh, logdet, spectral_density, suggest_shift, trace
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
    "SVD",
    "BiCGStab",
    "BiCGStabL",
    "BlockJacobi",
    "Cholesky",
    "ConvergenceError",
    "Deflation",
    "Eigh",
    "Jacobi",
    "Jacobian",
    "LeastSquaresSolution",
    "LinearOperator",
    "Nystrom",
    "OperatorError",
    "Recycler",
    "SampleNystrom",
    "SampleWoodbury",
    "Solution",
    "Status",
    "check_operator",
    "eigsh",
    "fisher",
    "gauss_newton",
    "hessian",
    "logdet",
    "lstsq",
    "natural_gradient",
    "neural_tangent_kernel",
    "plan",
    "processes",
    "quantum_geometric_tensor",
    "solve",
    "solve_many",
    "solve_shifted",
    "spectral_density",
    "suggest_shift",
    "trace",
    "tune",
]
