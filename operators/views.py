"""One operator seen differently: its adjoint, its conjugate, on real parts, on complex vectors."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .base import Field, LinearOperator, Vector, conjugate
from .structure import Structure, describe, has_complex, join_real, split_real


def joint_field(*ops: LinearOperator) -> Field:
    """The field over which all operators are linear: complex where all are."""
    return "complex" if all(op.field == "complex" for op in ops) else "real"


class View(LinearOperator):
    """An operator that wraps another; structures, field and claims are those of the other unless said otherwise."""

    operator: LinearOperator

    def in_structure(self) -> Structure:
        """That of the wrapped operator."""
        return self.operator.in_structure()

    def out_structure(self) -> Structure:
        """That of the wrapped operator."""
        return self.operator.out_structure()

    @property
    def field(self) -> Field:
        """That of the wrapped operator."""
        return self.operator.field

    @property
    def is_hermitian(self) -> bool:
        """As the wrapped operator."""
        return self.operator.is_hermitian

    @property
    def is_positive(self) -> bool:
        """As the wrapped operator."""
        return self.operator.is_positive


class AdjointOperator(View):
    """The adjoint of an operator; made by ``op.H``."""

    def _product(self, vector: Vector) -> Vector:
        return self.operator._adjoint_product(vector)

    def _adjoint_product(self, vector: Vector) -> Vector:
        return self.operator._product(vector)

    @property
    def H(self) -> LinearOperator:
        """The operator itself."""
        return self.operator

    def in_structure(self) -> Structure:
        """Output of the wrapped operator."""
        return self.operator.out_structure()

    def out_structure(self) -> Structure:
        """Input of the wrapped operator."""
        return self.operator.in_structure()

    def as_matrix(self) -> Array:
        """The conjugate transpose of the wrapped operator's matrix."""
        return jnp.conj(self.operator.as_matrix()).T

    def diagonal(self) -> Vector:
        """The conjugate of the wrapped operator's diagonal."""
        return conjugate(self.operator.diagonal())


class ConjugateOperator(View):
    r"""The complex conjugate :math:`x \mapsto \overline{A \bar x}`; made by `conjugate_operator`."""

    def _product(self, vector: Vector) -> Vector:
        return conjugate(self.operator._product(conjugate(vector)))

    def _adjoint_product(self, vector: Vector) -> Vector:
        return conjugate(self.operator._adjoint_product(conjugate(vector)))


def conjugate_operator(op: LinearOperator) -> LinearOperator:
    r"""The operator with conjugated entries, :math:`\bar A`; a real one is returned as it is."""
    if isinstance(op, ConjugateOperator):
        return op.operator
    return ConjugateOperator(op) if has_complex((op.in_structure(), op.out_structure())) else op


class RealOperator(View):
    """An operator on real and imaginary parts; made by ``op.as_real()``."""

    def _product(self, vector: Vector) -> Vector:
        return split_real(self.operator._product(join_real(vector, self.operator.in_structure())))

    def _adjoint_product(self, vector: Vector) -> Vector:
        return split_real(self.operator._adjoint_product(join_real(vector, self.operator.out_structure())))

    def in_structure(self) -> Structure:
        """Real parts of the input, and imaginary parts of its complex leaves."""
        return split_real(self.operator.in_structure())

    def out_structure(self) -> Structure:
        """Real parts of the output, and imaginary parts of its complex leaves."""
        return split_real(self.operator.out_structure())

    @property
    def field(self) -> Field:
        """Real: all leaves are."""
        return "real"


class ComplexifiedOperator(View):
    """The C-linear extension of an operator between real vectors; made by `complexify`."""

    def _product(self, vector: Vector) -> Vector:
        return _on_parts(self.operator._product, vector)

    def _adjoint_product(self, vector: Vector) -> Vector:
        return _on_parts(self.operator._adjoint_product, vector)

    def in_structure(self) -> Structure:
        """That of the wrapped operator, complex."""
        return _complex_structure(self.operator.in_structure())

    def out_structure(self) -> Structure:
        """That of the wrapped operator, complex."""
        return _complex_structure(self.operator.out_structure())

    @property
    def field(self) -> Field:
        """Complex."""
        return "complex"


def complexify(op: LinearOperator) -> LinearOperator:
    r"""The operator between complex vectors with the same real entries, :math:`A(x + iy) = Ax + iAy`.

    Raises:
        ValueError: the operator has complex leaves already.
    """
    if has_complex((op.in_structure(), op.out_structure())):
        raise ValueError(
            f"complexify: the operator has complex leaves already: {describe(op.in_structure())} -> "
            f"{describe(op.out_structure())}."
        )
    return ComplexifiedOperator(op)


def _on_parts(product, vector):
    # vmap rather than two calls: the operator is then traced and compiled once.
    both = jax.tree.map(lambda x: jnp.stack([x.real, x.imag]), vector)
    return jax.tree.map(lambda y: jax.lax.complex(y[0], y[1]), jax.vmap(product)(both))


def _complex_structure(structure: Structure) -> Structure:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.result_type(s.dtype, jnp.complex64)), structure)
