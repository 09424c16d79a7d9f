"""Vectors as flat arrays, for what needs dense linear algebra on a few of them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, reshard
from jaxtyping import Array, Float, Inexact

from krylov.operators.base import Field, LinearOperator, Vector
from krylov.operators.dense import Dense
from krylov.operators.jacobian import Jacobian
from krylov.operators.structure import (
    Structure,
    common_dtype,
    freeze,
    has_complex,
    join_real,
    ravel,
    real_dtype,
    size_of,
    split_real,
    thaw,
    unravel,
)

from .vectors import safe_norm

# Products of a block are computed so many at a time, which bounds their memory.
_COLUMNS_AT_ONCE = 32


class Coordinates(eqx.Module):
    """Flat arrays for the vectors of a space: their ordinary inner product is that of the field.

    Over the real field a complex leaf becomes its real and imaginary parts. Several vectors are rows of a matrix.
    """

    _structure: tuple = eqx.field(static=True)
    field: Field = eqx.field(static=True)

    def __init__(self, structure: Structure, field: Field):
        self._structure, self.field = freeze(structure), field

    @property
    def structure(self) -> Structure:
        """That of the vectors."""
        return thaw(self._structure)

    @property
    def _splits(self) -> bool:
        return self.field == "real" and has_complex(self.structure)

    @property
    def size(self) -> int:
        """The dimension of the space over its field."""
        return size_of(split_real(self.structure) if self._splits else self.structure)

    @property
    def dtype(self) -> np.dtype:
        """Real over the real field."""
        return common_dtype(split_real(self.structure) if self._splits else self.structure)

    @property
    def real_dtype(self) -> np.dtype:
        """That of norms and eigenvalues."""
        return real_dtype(self.dtype)

    @property
    def eps(self) -> float:
        """The spacing of floating-point numbers at one."""
        return float(jnp.finfo(self.dtype).eps)

    def flatten(self, vector: Vector) -> Inexact[Array, " n"]:
        """The coordinates of a vector."""
        vector = jax.tree.map(whole, vector)
        return ravel(split_real(vector) if self._splits else vector, self.dtype)

    def unflatten(self, flat: Inexact[Array, " n"]) -> Vector:
        """Inverse of `flatten`."""
        if self._splits:
            return join_real(unravel(flat, split_real(self.structure)), self.structure)
        return unravel(flat, self.structure)

    def random(self, key: Array, count: int) -> Inexact[Array, "count n"]:
        """Independent standard normal vectors."""
        return jax.random.normal(key, (count, self.size), self.dtype)


def whole(x: Array) -> Array:
    """All of an array on every device: on the Explicit axes of a mesh JAX gathers nothing unasked."""
    sharding = jax.typeof(x).sharding
    if all(axes is None for axes in sharding.spec):
        return x
    return reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))


def spread_like(vector: Vector, like: Vector) -> Vector:
    """A vector spread over devices as another one, where its type says how: on Explicit axes."""

    def leaf(x, like):
        sharding = jax.typeof(like).sharding
        return x if all(axes is None for axes in sharding.spec) else reshard(x, sharding)

    return jax.tree.map(leaf, vector, like)


def coordinates_of(op: LinearOperator) -> Coordinates:
    """For the vectors that an operator takes."""
    return Coordinates(op.in_structure(), op.field)


def multiply_rows(op: LinearOperator, rows: Inexact[Array, "k n"]) -> Inexact[Array, "k m"]:
    """The products with several vectors, a block of them at a time."""
    before, after = coordinates_of(op), Coordinates(op.out_structure(), op.field)

    def one(row):
        return after.flatten(op._product(before.unflatten(row)))

    at_once = min(_COLUMNS_AT_ONCE, rows.shape[0])
    if _computes_anew(op) and jax.default_backend() == "cpu":
        # A CPU is kept busy by one product with a network, and has its activations in the cache.
        at_once = 1
    if rows.shape[0] == at_once:
        return jax.vmap(one)(rows)
    return jax.lax.map(one, rows, batch_size=None if at_once == 1 else at_once)


def _computes_anew(op: LinearOperator) -> bool:
    """Whether a product goes through a network rather than through the entries of a matrix."""
    networks = jax.tree.leaves(op, is_leaf=lambda x: isinstance(x, Jacobian))
    return any(isinstance(x, Jacobian) and not isinstance(x.storage, Dense) for x in networks)


def overlaps(rows: Inexact[Array, "k n"], others: Inexact[Array, "*j n"]) -> Inexact[Array, "k *j"]:
    """The inner products of rows, conjugate in the first."""
    return jnp.matmul(jnp.conj(rows), others.T, precision="highest")


def combine(coefficients: Inexact[Array, "*j k"], rows: Inexact[Array, "k n"]) -> Inexact[Array, "*j n"]:
    """Sums of rows with coefficients."""
    return jnp.matmul(coefficients, rows, precision="highest")


def norms_of(rows: Inexact[Array, "k n"]) -> Float[Array, " k"]:
    """The norm of each row, without overflow or underflow of the squares."""
    return jax.vmap(lambda row: safe_norm(row, real_dtype(row.dtype)))(rows)


def orthonormalise(rows: Inexact[Array, "k n"], against: Inexact[Array, "j n"] | None = None) -> Array:
    """An orthonormal basis of the rows, orthogonal to ``against``, which is orthonormal or zero; twice for rounding."""
    for _ in range(1 if against is None else 2):
        if against is not None:
            rows = rows - combine(overlaps(against, rows).T, against)
        rows = jnp.linalg.qr(rows.T)[0].T
    return rows
