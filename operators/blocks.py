"""Structured operators: the identity, blocks side by side, few columns plus a diagonal."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .base import Field, HermitianOperator, LinearOperator, Vector
from .function import check_inexact
from .structure import Structure, all_complex, describe, freeze, has_complex, known_not_negative, structure_of, thaw
from .views import joint_field


class IdentityOperator(HermitianOperator):
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

    @property
    def field(self) -> Field:
        """Complex where all leaves are."""
        return "complex" if all_complex(self.in_structure()) else "real"

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
        blocks: one operator, matrix or other operand of `as_operator` for each entry of the tuple.

    Example:
        >>> import jax.numpy as jnp
        >>> from krylov.operators import DiagonalOperator
        >>> op = BlockDiagonalOperator([DiagonalOperator(jnp.ones(2)), 2.0 * IdentityOperator(jnp.zeros(3))])
        >>> op.shape
        (5, 5)
    """

    blocks: tuple[LinearOperator, ...]

    def __init__(self, blocks: Any):
        from .convert import as_operator

        self.blocks = tuple(as_operator(block, where="BlockDiagonalOperator") for block in blocks)

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
        return joint_field(*self.blocks)

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


class LowRankPlusDiagonal(HermitianOperator):
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
        if positive is None:
            positive = known_not_negative((weights, diagonal))
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
        self._positive = bool(positive)

    @property
    def _scalar_diagonal(self) -> bool:
        leaves = jax.tree.leaves(self.entries)
        return jax.tree.structure(self.entries) == jax.tree.structure(0) and leaves[0].ndim == 0

    def _product(self, vector: Vector) -> Vector:
        overlap = [
            jnp.tensordot(jnp.conj(u), x, axes=(tuple(range(x.ndim)),) * 2, precision="highest")
            for u, x in zip(jax.tree.leaves(self.basis), jax.tree.leaves(vector), strict=True)
        ]
        if not overlap:
            return vector
        if self.field == "real":
            overlap = [c.real for c in overlap]
        coefficients = self.weights * sum(overlap[1:], overlap[0])

        def leaf(d, u, x):
            low_rank = jnp.tensordot(u, coefficients, axes=(-1, 0), precision="highest")
            return (d * x + low_rank).astype(x.dtype)

        if self._scalar_diagonal:
            return jax.tree.map(lambda u, x: leaf(self.entries, u, x), self.basis, vector)
        return jax.tree.map(leaf, self.entries, self.basis, vector)

    def in_structure(self) -> Structure:
        """The basis without its last axis."""
        return jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape[:-1], u.dtype), self.basis)

    @property
    def field(self) -> Field:
        """Complex where all leaves are."""
        return "complex" if all_complex(self.basis) else "real"

    @property
    def is_positive(self) -> bool:
        """As claimed or found."""
        return self._positive
