"""Arithmetic on vectors that are pytrees of arrays, in the inner product of an operator's field."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Inexact, PyTree, Real

from krylov.operators.base import Field, Vector
from krylov.operators.structure import Structure, common_dtype, is_complex, real_dtype

Scalar = Inexact[Array, ""]
RealScalar = Real[Array, ""]
Flag = Bool[Array, ""]


class Space(NamedTuple):
    """The vectors that an operator acts on: their field and the precision of its scalars."""

    field: Field
    dtype: np.dtype

    @classmethod
    def of(cls, structure: Structure, field: Field) -> "Space":
        """The space of vectors with this structure; over the real field its scalars are real."""
        dtype = common_dtype(structure)
        return cls(field, dtype if field == "complex" else real_dtype(dtype))

    @property
    def real_dtype(self) -> np.dtype:
        """The dtype of norms."""
        return real_dtype(self.dtype)

    @property
    def eps(self) -> float:
        """The spacing of floating-point numbers at one."""
        return float(jnp.finfo(self.real_dtype).eps)

    def inner(self, x: Vector, y: Vector) -> Scalar:
        """The inner product, conjugate in ``x``; its real part over the real field."""
        if self.field == "real":
            return real_inner(x, y).astype(self.dtype)
        return _sum([jnp.sum(jnp.conj(a) * b) for a, b in _pairs(x, y)], self.dtype)

    def norm(self, x: Vector) -> RealScalar:
        """The 2-norm."""
        return jnp.sqrt(real_inner(x, x)).astype(self.real_dtype)


def real_inner(x: Vector, y: Vector) -> RealScalar:
    """The real part of the inner product."""

    def leaf(a, b):
        if is_complex(a) and is_complex(b):
            return jnp.sum(a.real * b.real + a.imag * b.imag)
        return jnp.sum(a.real * b.real)

    return _sum([leaf(a, b) for a, b in _pairs(x, y)], None)


def _pairs(x, y):
    return zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)


def _sum(terms, dtype):
    if not terms:
        return jnp.zeros((), dtype)
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total if dtype is None else total.astype(dtype)


def largest_entry(x: Vector, dtype: Any) -> RealScalar:
    """The largest modulus of a real or imaginary part."""
    largest = jnp.zeros((), dtype)
    for leaf in jax.tree.leaves(x):
        if leaf.size:
            parts = [leaf.real, leaf.imag] if is_complex(leaf) else [leaf]
            for part in parts:
                largest = jnp.maximum(largest, jnp.max(jnp.abs(part)).astype(dtype))
    return largest


def safe_norm(x: Vector, dtype: Any) -> RealScalar:
    """The 2-norm without overflow or underflow of the squares."""
    unit = power_of_two(largest_entry(x, dtype))
    scaled = scale(1 / unit, x)
    return jnp.sqrt(real_inner(scaled, scaled)).astype(dtype) * unit


def power_of_two(x: RealScalar) -> RealScalar:
    """The power of two at or below ``x``, by which scaling is exact; one where ``x`` is zero or not finite."""
    info = jnp.finfo(x.dtype)
    _, exponent = jnp.frexp(x)
    # Neither it nor its inverse may be subnormal: hardware flushes those to zero.
    exponent = jnp.clip(exponent - 1, info.minexp, -info.minexp)
    return jnp.where(jnp.isfinite(x) & (x > 0), jnp.ldexp(jnp.ones((), x.dtype), exponent), 1)


def add(x: Vector, y: Vector) -> Vector:
    """``x + y``."""
    return jax.tree.map(jnp.add, x, y)


def subtract(x: Vector, y: Vector) -> Vector:
    """``x - y``."""
    return jax.tree.map(jnp.subtract, x, y)


def scale(a: Scalar, x: Vector) -> Vector:
    """``a x``, each leaf in its own dtype."""
    return jax.tree.map(lambda leaf: (a * leaf).astype(leaf.dtype), x)


def axpy(a: Scalar, x: Vector, y: Vector) -> Vector:
    """``y + a x``, each leaf in its own dtype."""
    return jax.tree.map(lambda p, q: (q + a * p).astype(q.dtype), x, y)


def zeros_like(x: Vector) -> Vector:
    """The zero vector."""
    return jax.tree.map(jnp.zeros_like, x)


def select(condition: Flag, x: PyTree, y: PyTree) -> PyTree:
    """``x`` where the condition holds, else ``y``; leaves that are the same object are left alone."""
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(condition, a, b), x, y)


def divide(a: Scalar, b: Scalar) -> Scalar:
    """``a / b``, and zero where b is zero."""
    return jnp.where(b != 0, a / jnp.where(b != 0, b, 1), 0)
