"""NetKet on krylov's operators and solvers: a quantum geometric tensor, linear solvers, a driver without matrices.

Needs the extra ``netket``.
"""

from .driver import VMC_MatrixFree
from .qgt import QGT, KrylovQGT
from .solvers import Solver, auto, bicgstab, bicgstabl, cg, cholesky, cr, fcg, gmres, lsmr, lu, minres, minres_qlp

__all__ = [
    "QGT",
    "KrylovQGT",
    "Solver",
    "VMC_MatrixFree",
    "auto",
    "bicgstab",
    "bicgstabl",
    "cg",
    "cholesky",
    "cr",
    "fcg",
    "gmres",
    "lsmr",
    "lu",
    "minres",
    "minres_qlp",
]
