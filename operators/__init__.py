"""Linear operators on pytrees: matrices, functions, their algebra, and the tangent operators of networks."""

from . import lineax_rules as _lineax_rules
from .algebra import shifted
from .base import LinearOperator
from .blocks import BlockDiagonalOperator, IdentityOperator, LowRankPlusDiagonal
from .checks import check_operator
from .convert import as_operator
from .function import FunctionOperator
from .jacobian import Jacobian
from .linear_call import linear_call
from .linear_cond import linear_cond
from .linear_scan import linear_scan, linear_stack, linear_sum
from .linearization import LinearizationError
from .matrix import DiagonalOperator, MatrixOperator
from .planning import Plan, plan, tune
from .pooling import max_pool, reduce_window_max
from .report import OperatorError, OperatorReport
from .structure import join_real, split_real
from .views import complexify, conjugate_operator

__all__ = [
    "BlockDiagonalOperator",
    "DiagonalOperator",
    "FunctionOperator",
    "IdentityOperator",
    "Jacobian",
    "LinearOperator",
    "LinearizationError",
    "LowRankPlusDiagonal",
    "MatrixOperator",
    "OperatorError",
    "OperatorReport",
    "Plan",
    "as_operator",
    "check_operator",
    "complexify",
    "conjugate_operator",
    "join_real",
    "linear_call",
    "linear_cond",
    "linear_scan",
    "linear_stack",
    "linear_sum",
    "max_pool",
    "plan",
    "reduce_window_max",
    "shifted",
    "split_real",
    "tune",
]
del _lineax_rules
