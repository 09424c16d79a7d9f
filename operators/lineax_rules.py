"""lineax's dispatch functions for the operators of this library, so that every lineax solver takes them."""

import jax.numpy as jnp
import lineax as lx

from .base import LinearOperator
from .blocks import BlockDiagonalOperator, IdentityOperator
from .matrix import DiagonalOperator, MatrixOperator
from .structure import has_complex, ravel
from .views import conjugate_operator


def _check_c_linear(operator):
    # lineax's iterative solvers use the complex inner product, in which an R-linear map on complex leaves has no
    # adjoint: they would go wrong without a word. Its direct solvers expect a matrix of another shape.
    if operator._needs_splitting:
        raise ValueError(
            f"{type(operator).__name__}: this operator is only R-linear but has complex leaves; lineax's solvers "
            "assume C-linear operators.\n  Solve with op.as_real() and krylov.operators.split_real, or with "
            "krylov.solve."
        )


@lx.linearise.register(LinearOperator)
def _linearise(operator):
    _check_c_linear(operator)
    return operator


@lx.materialise.register(LinearOperator)
def _materialise(operator):
    _check_c_linear(operator)
    if isinstance(operator, MatrixOperator):
        return operator
    return MatrixOperator(
        operator.as_matrix(),
        hermitian=operator.is_hermitian,
        positive=operator.is_positive,
        in_structure=operator.in_structure(),
        out_structure=operator.out_structure(),
    )


@lx.diagonal.register(LinearOperator)
def _diagonal(operator):
    return ravel(operator.diagonal())


@lx.tridiagonal.register(LinearOperator)
def _tridiagonal(operator):
    matrix = operator.as_matrix()
    return jnp.diagonal(matrix), jnp.diagonal(matrix, offset=-1), jnp.diagonal(matrix, offset=1)


@lx.is_symmetric.register(LinearOperator)
def _is_symmetric(operator):
    # Symmetric means A^T = A: a complex hermitian matrix is not.
    return _is_diagonal(operator) or (operator.is_hermitian and not has_complex(operator.in_structure()))


def _is_diagonal(operator: LinearOperator) -> bool:
    """Whether the operator is known to be diagonal from its kind alone."""
    if isinstance(operator, BlockDiagonalOperator):
        return all(map(_is_diagonal, operator.blocks))
    return isinstance(operator, (DiagonalOperator, IdentityOperator))


# What direct solvers ask first, where it makes them choose or refuse.
def _is_c_linear_and_diagonal(operator):
    _check_c_linear(operator)
    return _is_diagonal(operator)


for _predicate in (lx.is_diagonal, lx.is_tridiagonal, lx.is_lower_triangular, lx.is_upper_triangular):
    _predicate.register(LinearOperator)(_is_c_linear_and_diagonal)


@lx.has_unit_diagonal.register(LinearOperator)
def _has_unit_diagonal(operator):
    return isinstance(operator, IdentityOperator)


@lx.is_positive_semidefinite.register(LinearOperator)
def _is_positive_semidefinite(operator):
    return operator.is_positive


@lx.is_negative_semidefinite.register(LinearOperator)
def _is_negative_semidefinite(operator):
    return False


@lx.conj.register(LinearOperator)
def _conj(operator):
    return conjugate_operator(operator)
