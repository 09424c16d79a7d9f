"""Conjugate gradients on several right-hand sides at once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from krylov.operators.base import Vector

from ..vectors import Flag, Space, divide


class BlockCGState(NamedTuple):
    """Each a vector with a leading axis: the solutions, residuals and orthonormal directions, zero where dropped."""

    x: Vector
    r: Vector
    p: Vector
    kept: Bool[Array, " columns"]  # directions that are not zero
    norms: Float[Array, " columns"]
    done: Bool[Array, " columns"]
    broken: Flag  # a direction without positive curvature


class BlockCG:
    r"""Conjugate gradients for :math:`A X = B` with A hermitian positive definite and several right-hand sides.

    Minimises the energy norm of each error over the sum of the Krylov spaces of all right-hand sides: fewer iterations
    than one by one, each with one product on a block. The directions are orthonormalised by the eigenvectors of their
    Gram matrix, and those that depend on others are dropped and come back if they no longer do: right-hand sides may be
    equal, multiples of each other or zero. For s columns an iteration takes s products and about :math:`6 s^2` vector
    updates and inner products; stores 4 s vectors beside X and B.

    Reference: O'Leary (1980), doi:10.1016/0024-3795(80)90247-5; with dropped directions Ji & Li (2017),
    doi:10.1007/s10543-016-0631-z.
    """

    @staticmethod
    def start(space: Space, residuals: Vector) -> BlockCGState:
        """Not started: the first directions come from `prepare`."""
        zero = jax.tree.map(jnp.zeros_like, residuals)
        norms = norms_of(space, residuals)
        no = jnp.zeros(norms.shape, bool)
        return BlockCGState(zero, residuals, zero, no, norms, no, jnp.asarray(False))

    @staticmethod
    def prepare(
        space: Space, state: BlockCGState, preconditioned: Vector, images: Vector, inverse: Array
    ) -> BlockCGState:
        """The next directions, conjugate to the last, from the preconditioned residuals of the columns at work."""
        z = jax.tree.map(lambda z: jnp.where(_along(state.done, z), 0, z), preconditioned)
        beta = -inverse @ overlaps(space, images, z)
        p, kept = _orthonormal(space, _add_mixed(z, beta, state.p))
        return state._replace(p=p, kept=kept)

    @staticmethod
    def advance(space: Space, state: BlockCGState, images: Vector, targets: Array) -> tuple[BlockCGState, Array]:
        """The minimum of each energy in the span of the directions; also the inverse of their curvatures."""
        curvatures = overlaps(space, state.p, images)
        curvatures = (curvatures + curvatures.conj().T) / 2
        largest = jnp.max(jnp.abs(jnp.diagonal(curvatures).real), initial=0)
        both = state.kept[:, None] & state.kept[None, :]
        filled = jnp.where(both, curvatures, largest * jnp.eye(len(state.kept), dtype=curvatures.dtype))
        values, vectors = jnp.linalg.eigh(filled)
        broken = ~(values[0] > 0)  # also where not a number
        inverse = jnp.where(both & ~broken, (vectors * divide(jnp.ones_like(values), values)) @ vectors.conj().T, 0)
        alpha = inverse @ overlaps(space, state.p, state.r)
        alpha = jnp.where(state.done, 0, alpha)
        r = _add_mixed(state.r, -alpha, images)
        norms = norms_of(space, r)
        done = state.done | (norms <= targets)
        new = state._replace(x=_add_mixed(state.x, alpha, state.p), r=r, norms=norms, done=done, broken=broken)
        return new, inverse


def overlaps(space: Space, x: Vector, y: Vector) -> Array:
    """The matrix of inner products of the rows of x with the rows of y."""
    total = jnp.zeros((), space.dtype)
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        a, b = a.reshape(a.shape[0], -1), b.reshape(b.shape[0], -1)
        if space.field == "real" and jnp.iscomplexobj(a):
            part = jnp.matmul(a.real, b.real.T, precision="highest") + jnp.matmul(a.imag, b.imag.T, precision="highest")
        else:
            part = jnp.matmul(jnp.conj(a), b.T, precision="highest")
        total = total + part.astype(space.dtype)
    return total


def norms_of(space: Space, x: Vector) -> Array:
    """The norm of each row."""
    return jax.vmap(space.norm)(x)


def _along(values: Array, rows: Array) -> Array:
    """One value for each row, to be multiplied with rows."""
    return values.reshape(-1, *[1] * (rows.ndim - 1))


def _add_mixed(y: Vector, weights: Array, rows: Vector) -> Vector:
    """Row j of y plus the sum of the rows with the weights of column j."""
    mixed = jax.tree.map(lambda v: jnp.tensordot(weights.T, v, axes=1, precision="highest"), rows)
    return jax.tree.map(lambda a, b: (a + b).astype(a.dtype), y, mixed)


def _orthonormal(space: Space, rows: Vector) -> tuple[Vector, Array]:
    """An orthonormal basis of what the rows span, padded with zeros, and which of its rows are not zero."""
    norms = norms_of(space, rows)
    per_norm = divide(jnp.ones_like(norms), norms)
    rows = jax.tree.map(lambda v: (_along(per_norm, v) * v).astype(v.dtype), rows)
    values, vectors = jnp.linalg.eigh(overlaps(space, rows, rows))
    kept = values > 8 * len(values) * space.eps * jnp.maximum(values[-1], 0)
    weights = jnp.where(kept, vectors * jnp.where(kept, 1 / jnp.sqrt(jnp.where(kept, values, 1)), 0), 0)
    return _add_mixed(jax.tree.map(jnp.zeros_like, rows), weights, rows), kept
