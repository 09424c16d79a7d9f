"""An operator over a multiple of the identity: damped least squares as plain least squares."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from krylov.operators.base import Field, LinearOperator, Vector
from krylov.operators.structure import Structure

from .vectors import axpy, scale


class DampedOperator(LinearOperator):
    r"""The map :math:`x \mapsto (J x, \lambda x)`, whose least-squares residual holds the damping."""

    operator: LinearOperator
    damping: Array

    def _product(self, vector: Vector) -> Vector:
        return self.operator._product(vector), scale(self.damping, vector)

    def _adjoint_product(self, vector: Vector) -> Vector:
        left, right = vector
        return axpy(self.damping, right, self.operator._adjoint_product(left))

    def in_structure(self) -> Structure:
        """That of the operator."""
        return self.operator.in_structure()

    def out_structure(self) -> Structure:
        """Output and input of the operator."""
        return self.operator.out_structure(), self.operator.in_structure()

    @property
    def field(self) -> Field:
        """That of the operator."""
        return self.operator.field


def damp(op: LinearOperator, rhs: Vector, damping: Array) -> tuple[LinearOperator, Vector]:
    """The operator and the right-hand side of the damped problem."""
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), op.in_structure())
    return DampedOperator(op, damping), (rhs, zero)
