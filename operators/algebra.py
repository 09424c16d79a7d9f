"""Operators made from operators: sums, products, adjoints, blocks. Adjoint, field and claims follow from the parts."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array

from .base import Field, LinearOperator, Vector, conjugate
from .function import check_inexact
from .matrix import DiagonalOperator
from .structure import (
    Structure,
    all_complex,
    describe,
    freeze,
    has_complex,
    is_complex,
    join_real,

    same_structure,
    split_real,
    structure_of,
    thaw,
)


def _joint_field(*ops: LinearOperator) -> Field:
    return "complex" if all(op.field == "complex" for op in ops) else "real"


class _Wrapper(LinearOperator):
    """One operator seen differently; maps the same space to itself where the operator does."""

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


class AdjointOperator(_Wrapper):
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


class ConjugateOperator(_Wrapper):
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


class RealOperator(_Wrapper):
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


class ComplexifiedOperator(_Wrapper):
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
        return _joint_field(*self.terms)

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
        scalar = jnp.asarray(scalar)
        if scalar.ndim != 0:
            raise ValueError(f"operators: can multiply by a scalar only, not by an array of shape {scalar.shape}.")
        if is_complex(scalar) and not all_complex(operator.out_structure()):
            raise ValueError(
                f"operators: cannot multiply by the complex scalar {scalar.dtype} where the result has real leaves: "
                f"{describe(operator.out_structure())}. Take its real part, or `complexify` the operator first."
            )
        self.operator, self.scalar = operator, scalar
        known = not isinstance(scalar, jax.core.Tracer) and not is_complex(scalar)
        self._positive = operator.is_positive and known and bool(scalar >= 0)

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
        return _joint_field(self.left, self.right)

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
    if isinstance(op, lx.AbstractLinearOperator):
        from .convert import as_operator

        return as_operator(op)
    raise TypeError(f"operators: cannot apply {sign!r} to an operator and {type(op).__name__}; wrap it as an operator.")


class IdentityOperator(LinearOperator):
    """The identity on vectors of a structure.

    Args:
        structure: pytree of arrays or of ``jax.ShapeDtypeStruct``.
    """

    _structure: tuple = eqx.field(static=True)

    def __init__(self, structure: Any):
        check_inexact("IdentityOperator", "structure", structure_of(structure))
        self._structure = freeze(structure)

    def _product(self, vector: Vector) -> Vector:
        return vector

    def in_structure(self) -> Structure:
        """The structure given."""
        return thaw(self._structure)

    def out_structure(self) -> Structure:
        """The structure given."""
        return thaw(self._structure)

    @property
    def field(self) -> Field:
        """Complex where all leaves are."""
        return "complex" if all_complex(self.in_structure()) else "real"

    @property
    def is_hermitian(self) -> bool:
        """True."""
        return True

    @property
    def is_positive(self) -> bool:
        """True."""
        return True

    def diagonal(self) -> Vector:
        """Ones."""
        if self._needs_splitting:
            return super().diagonal()
        return jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), self.in_structure())


class BlockDiagonalOperator(LinearOperator):
    """Independent operators side by side, on vectors that are tuples.

    Args:
        blocks: one operator for each entry of the tuple.

    Example:
        >>> import jax.numpy as jnp
        >>> op = BlockDiagonalOperator([DiagonalOperator(jnp.ones(2)), 2.0 * IdentityOperator(jnp.zeros(3))])
        >>> op.shape
        (5, 5)
    """

    blocks: tuple[LinearOperator, ...]

    def __init__(self, blocks: Any):
        self.blocks = tuple(_operand("block", block) for block in blocks)

    def _product(self, vector: Vector) -> Vector:
        return tuple(block._product(x) for block, x in zip(self.blocks, vector, strict=True))

    def _adjoint_product(self, vector: Vector) -> Vector:
        return tuple(block._adjoint_product(x) for block, x in zip(self.blocks, vector, strict=True))

    def in_structure(self) -> Structure:
        """A tuple of the blocks' inputs."""
        return tuple(block.in_structure() for block in self.blocks)

    def out_structure(self) -> Structure:
        """A tuple of the blocks' outputs."""
        return tuple(block.out_structure() for block in self.blocks)

    @property
    def field(self) -> Field:
        """Complex where all blocks are."""
        return _joint_field(*self.blocks)

    @property
    def is_hermitian(self) -> bool:
        """Where all blocks are."""
        return all(block.is_hermitian for block in self.blocks)

    @property
    def is_positive(self) -> bool:
        """Where all blocks are."""
        return all(block.is_positive for block in self.blocks)

    def diagonal(self) -> Vector:
        """A tuple of the blocks' diagonals."""
        if not self.is_square or self._needs_splitting:
            return super().diagonal()
        return tuple(block.diagonal() for block in self.blocks)


class LowRankPlusDiagonal(LinearOperator):
    r"""The hermitian operator :math:`\mathrm{diag}(d) + U\, \mathrm{diag}(w)\, U^H` with few columns in U.

    Args:
        diagonal: real; a scalar or a pytree of arrays shaped like the vectors.
        basis: the columns of U: a vector with one more axis of length k at the end of each leaf.
        weights: ``(k,)`` real.
        positive: claim that no ``d`` and no ``w`` is negative. Default: looked up where the values are known.

    Raises:
        ValueError: shapes do not fit, or a diagonal or weights that are not real.
    """

    entries: Any
    basis: Vector
    weights: Array
    _positive: bool = eqx.field(static=True)

    def __init__(self, diagonal: Any, basis: Any, weights: Any, *, positive: bool | None = None):
        self.basis = jax.tree.map(jnp.asarray, basis)
        self.weights = jnp.asarray(weights)
        self.entries = jax.tree.map(jnp.asarray, diagonal)
        check_inexact("LowRankPlusDiagonal", "basis", structure_of(self.basis))
        if has_complex((self.weights, self.entries)):
            raise ValueError("LowRankPlusDiagonal: diagonal and weights must be real; the operator is hermitian.")
        if self.weights.ndim != 1 or any(u.shape[-1:] != self.weights.shape for u in jax.tree.leaves(self.basis)):
            raise ValueError(
                "LowRankPlusDiagonal: the last axis of each leaf of basis counts the columns, one weight each.\n"
                f"  got       basis {describe(self.basis)}, weights {describe(self.weights)}"
            )
        if not self._scalar_diagonal:
            shapes = jax.tree.map(lambda d: d.shape, self.entries)
            expected = jax.tree.map(lambda s: s.shape, self.in_structure())
            if shapes != expected:
                raise ValueError(
                    f"LowRankPlusDiagonal: diagonal has shapes {shapes}; the vectors have {expected}. Give a scalar or "
                    "a pytree like the vectors."
                )
        if positive is None:
            values = [self.weights, *jax.tree.leaves(self.entries)]
            known = not any(isinstance(v, jax.core.Tracer) for v in values)
            positive = known and all(bool(jnp.all(v >= 0)) for v in values)
        self._positive = bool(positive)

    @property
    def _scalar_diagonal(self) -> bool:
        leaves = jax.tree.leaves(self.entries)
        return jax.tree.structure(self.entries) == jax.tree.structure(0) and leaves[0].ndim == 0

    def _product(self, vector: Vector) -> Vector:
        overlap = [
            jnp.tensordot(jnp.conj(u), x, axes=(range(x.ndim), range(x.ndim)), precision="highest")
            for u, x in zip(jax.tree.leaves(self.basis), jax.tree.leaves(vector), strict=True)
        ]
        if self.field == "real":
            overlap = [c.real for c in overlap]
        coefficients = self.weights * sum(overlap[1:], overlap[0])

        def leaf(d, u, x):
            low_rank = jnp.tensordot(u, coefficients, axes=(-1, 0), precision="highest")
            return (d * x + low_rank).astype(x.dtype)

        if self._scalar_diagonal:
            return jax.tree.map(lambda u, x: leaf(self.entries, u, x), self.basis, vector)
        return jax.tree.map(leaf, self.entries, self.basis, vector)

    def _adjoint_product(self, vector: Vector) -> Vector:
        return self._product(vector)

    def in_structure(self) -> Structure:
        """The basis without its last axis."""
        return jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape[:-1], u.dtype), self.basis)

    def out_structure(self) -> Structure:
        """The same as the input."""
        return self.in_structure()

    @property
    def field(self) -> Field:
        """Complex where all leaves are."""
        return "complex" if all_complex(self.basis) else "real"

    @property
    def is_hermitian(self) -> bool:
        """True."""
        return True

    @property
    def is_positive(self) -> bool:
        """As claimed or found."""
        return self._positive


