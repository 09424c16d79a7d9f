"""Half-precision systems, solved in single precision."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from krylov.operators.base import Field, LinearOperator, Vector
from krylov.operators.matrix import DiagonalOperator, MatrixOperator
from krylov.operators.structure import Structure, structure_of


def promote_half(
    op: LinearOperator, preconditioner: LinearOperator | None, b: Vector, guess: Vector
) -> tuple[LinearOperator, LinearOperator | None, Vector, Vector]:
    """The same system with float32 in place of float16 and bfloat16; other systems as they are.

    A matrix or a diagonal is promoted itself. Any other operator still computes in half precision, and its rounding
    then limits the residual that can be reached.
    """
    if not any(_is_half(leaf.dtype) for leaf in jax.tree.leaves(structure_of(b))):
        return op, preconditioner, b, guess
    promoted = None if preconditioner is None else _promote(preconditioner)
    return _promote(op), promoted, _widen(b), _widen(guess)


def _is_half(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4


def _widen(vector: Vector) -> Vector:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if _is_half(x.dtype) else x, vector)


def _widen_structure(structure: Structure) -> Structure:
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32 if _is_half(s.dtype) else s.dtype), structure
    )


def _promote(op: LinearOperator) -> LinearOperator:
    if isinstance(op, MatrixOperator) and op._structures is None:
        return eqx.tree_at(lambda o: o.matrix, op, _widen(op.matrix))
    if isinstance(op, DiagonalOperator):
        return DiagonalOperator(_widen(op.entries), _widen_structure(op.in_structure()), positive=op.is_positive)
    return PromotedOperator(op)


class PromotedOperator(LinearOperator):
    """An operator on half-precision vectors, seen in single precision: vectors are rounded on the way in."""

    operator: LinearOperator

    def _product(self, vector: Vector) -> Vector:
        return _widen(self.operator._product(_narrow(vector, self.operator.in_structure())))

    def _adjoint_product(self, vector: Vector) -> Vector:
        return _widen(self.operator._adjoint_product(_narrow(vector, self.operator.out_structure())))

    def in_structure(self) -> Structure:
        """That of the operator, in single precision."""
        return _widen_structure(self.operator.in_structure())

    def out_structure(self) -> Structure:
        """That of the operator, in single precision."""
        return _widen_structure(self.operator.out_structure())

    @property
    def field(self) -> Field:
        """That of the operator."""
        return self.operator.field

    @property
    def is_hermitian(self) -> bool:
        """As the operator."""
        return self.operator.is_hermitian

    @property
    def is_positive(self) -> bool:
        """As the operator."""
        return self.operator.is_positive


def _narrow(vector: Vector, structure: Structure) -> Vector:
    return jax.tree.map(lambda x, s: x.astype(s.dtype), vector, structure)
