"""Sums, multiples and products of operators. Adjoint, field and claims follow from the parts."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array

from .base import Field, LinearOperator, Vector
from .blocks import IdentityOperator
from .matrix import DiagonalOperator
from .structure import Structure, all_complex, describe, is_complex, known_not_negative, same_structure
from .views import AdjointOperator, joint_field


class SumOperator(LinearOperator):
    """A sum of operators; made by ``a + b``. Positive (hermitian) where all terms are."""

    terms: tuple[LinearOperator, ...]

    def _product(self, vector: Vector) -> Vector:
        first, *rest = (term._product(vector) for term in self.terms)
        return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), first, *rest)

    def _adjoint_product(self, vector: Vector) -> Vector:
        first, *rest = (term._adjoint_product(vector) for term in self.terms)
        return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), first, *rest)

    def in_structure(self) -> Structure:
        """That of the terms."""
        return self.terms[0].in_structure()

    def out_structure(self) -> Structure:
        """That of the terms."""
        return self.terms[0].out_structure()

    @property
    def field(self) -> Field:
        """Complex where all terms are."""
        return joint_field(*self.terms)

    @property
    def is_hermitian(self) -> bool:
        """Where all terms are."""
        return all(term.is_hermitian for term in self.terms)

    @property
    def is_positive(self) -> bool:
        """Where all terms are."""
        return all(term.is_positive for term in self.terms)

    def diagonal(self) -> Vector:
        """The sum of the diagonals."""
        if not self.is_square or self._needs_splitting:
            return super().diagonal()
        return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *(term.diagonal() for term in self.terms))


def add(a: LinearOperator, b: Any) -> LinearOperator:
    """The sum of two operators.

    Raises:
        ValueError: they map different spaces.
        TypeError: ``b`` is not an operator.
    """
    b = _operand("+", b)
    if not (
        same_structure(a.in_structure(), b.in_structure()) and same_structure(a.out_structure(), b.out_structure())
    ):
        raise ValueError(
            "operators: the terms of a sum must map the same spaces.\n"
            f"  left      {describe(a.in_structure())} -> {describe(a.out_structure())}\n"
            f"  right     {describe(b.in_structure())} -> {describe(b.out_structure())}"
        )
    terms = tuple(t for op in (a, b) for t in (op.terms if isinstance(op, SumOperator) else (op,)))
    return SumOperator(terms)


def shifted(op: LinearOperator, shift: Any) -> LinearOperator:
    r"""The operator :math:`A + \lambda` for a scalar, or :math:`A + \mathrm{diag}(d)` for a pytree diagonal.

    `krylov.solve` takes a ``shift`` of its own, which is cheaper to change.

    Raises:
        ValueError: the operator is not square or the diagonal does not fit.
    """
    if jax.tree.structure(shift) == jax.tree.structure(0) and jnp.ndim(shift) == 0:
        return op + IdentityOperator(op.in_structure()) * shift
    return op + DiagonalOperator(shift, op.in_structure())


class ScaledOperator(LinearOperator):
    """A scalar times an operator; made by ``c * op``.

    Raises:
        ValueError: the scalar is no scalar, or complex where the result has real leaves.
    """

    operator: LinearOperator
    scalar: Array
    _positive: bool = eqx.field(static=True)

    def __init__(self, operator: LinearOperator, scalar: Any):
        if isinstance(scalar, lx.AbstractLinearOperator):
            raise TypeError("operators: the product of two operators is a @ b; * takes a scalar.")
        positive = operator.is_positive and known_not_negative(scalar)
        scalar = jnp.asarray(scalar)
        if scalar.ndim != 0:
            raise ValueError(f"operators: can multiply by a scalar only, not by an array of shape {scalar.shape}.")
        if is_complex(scalar) and not all_complex(operator.out_structure()):
            raise ValueError(
                f"operators: cannot multiply by the complex scalar {scalar.dtype} where the result has real leaves: "
                f"{describe(operator.out_structure())}. Take its real part, or `complexify` the operator first."
            )
        self.operator, self.scalar = operator, scalar
        self._positive = positive

    def _product(self, vector: Vector) -> Vector:
        return _scale(self.scalar, self.operator._product(vector))

    def _adjoint_product(self, vector: Vector) -> Vector:
        return self.operator._adjoint_product(_scale(jnp.conj(self.scalar), vector))

    def in_structure(self) -> Structure:
        """That of the operator."""
        return self.operator.in_structure()

    def out_structure(self) -> Structure:
        """That of the operator."""
        return self.operator.out_structure()

    @property
    def field(self) -> Field:
        """That of the operator."""
        return self.operator.field

    @property
    def is_hermitian(self) -> bool:
        """Where the operator is and the scalar has a real dtype."""
        return self.operator.is_hermitian and not is_complex(self.scalar)

    @property
    def is_positive(self) -> bool:
        """Where the operator is and the scalar is known not to be negative."""
        return self._positive

    def diagonal(self) -> Vector:
        """The scaled diagonal."""
        if not self.is_square or self._needs_splitting:
            return super().diagonal()
        return _scale(self.scalar, self.operator.diagonal())


def _scale(scalar, vector):
    return jax.tree.map(lambda x: (scalar * x).astype(x.dtype), vector)


class ComposedOperator(LinearOperator):
    """The product of two operators; made by ``a @ b``. ``b.H @ b`` is known to be positive."""

    left: LinearOperator
    right: LinearOperator
    _gram: bool = eqx.field(static=True)

    def _product(self, vector: Vector) -> Vector:
        return self.left._product(self.right._product(vector))

    def _adjoint_product(self, vector: Vector) -> Vector:
        return self.right._adjoint_product(self.left._adjoint_product(vector))

    def in_structure(self) -> Structure:
        """Input of the right factor."""
        return self.right.in_structure()

    def out_structure(self) -> Structure:
        """Output of the left factor."""
        return self.left.out_structure()

    @property
    def field(self) -> Field:
        """Complex where both are."""
        return joint_field(self.left, self.right)

    @property
    def is_hermitian(self) -> bool:
        """Where one factor is the adjoint of the other."""
        return self._gram

    @property
    def is_positive(self) -> bool:
        """Where one factor is the adjoint of the other."""
        return self._gram


def compose(left: LinearOperator, right: Any) -> LinearOperator:
    """The product ``left right`` of two operators.

    Raises:
        ValueError: the output of ``right`` is not the input of ``left``.
        TypeError: ``right`` is not an operator.
    """
    right = _operand("@", right)
    if not same_structure(left.in_structure(), right.out_structure()):
        raise ValueError(
            "operators: the output of the right factor is not the input of the left one.\n"
            f"  right gives  {describe(right.out_structure())}\n  left takes   {describe(left.in_structure())}"
        )
    one_is_adjoint = (isinstance(left, AdjointOperator) and left.operator is right) or (
        isinstance(right, AdjointOperator) and right.operator is left
    )
    return ComposedOperator(left, right, one_is_adjoint or (left is right and left.is_hermitian))


def _operand(sign: str, op: Any) -> LinearOperator:
    if isinstance(op, LinearOperator):
        return op
    if isinstance(op, lx.AbstractLinearOperator) or getattr(op, "ndim", 0) == 2:
        from .convert import as_operator

        return as_operator(op)
    if sign == "+" and jnp.ndim(op) == 0 and not callable(op):
        raise TypeError(
            f"operators: cannot add the number {op} to an operator.\n"
            "  For a multiple of the identity: krylov.operators.shifted(op, number), or solve(..., shift=number)."
        )
    raise TypeError(f"operators: cannot apply {sign!r} to an operator and {type(op).__name__}; wrap it as an operator.")
