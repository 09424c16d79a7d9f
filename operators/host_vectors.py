"""Vectors on the host, in double precision, where the figures of checks are computed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .base import Vector
from .structure import Structure, is_complex, size_of, split_real


def host(vector: Any) -> list[np.ndarray]:
    """The leaves in double precision."""
    wide = {True: np.complex128, False: np.float64}
    return [np.asarray(leaf).astype(wide[is_complex(leaf)]) for leaf in jax.tree.leaves(vector)]


def norm(vector: Any) -> float:
    """The 2-norm."""
    return float(np.sqrt(sum(np.sum(np.abs(leaf) ** 2) for leaf in host(vector))))


def distance(x: Any, y: Any) -> float:
    """The 2-norm of the difference of two vectors, which may be lists of their leaves."""
    return norm([a - b for a, b in zip(host(x), host(y), strict=True)])


def to_parts(vector: Vector) -> np.ndarray:
    """Real and imaginary parts in one array; the inner product of either field becomes the ordinary one."""
    return np.concatenate([leaf.ravel() for leaf in host(split_real(vector))])


def from_parts(parts: np.ndarray, structure: Structure) -> Vector:
    """Inverse of `to_parts`, in the dtypes of the structure. Cut on the host: JAX would compile each slice."""
    leaves, tree = jax.tree.flatten(structure)
    sizes = [size_of(s) for s in leaves] + [size_of(s) for s in leaves if is_complex(s)]
    pieces = np.split(parts, np.cumsum(sizes)[:-1])
    imaginary, out = iter(pieces[len(leaves) :]), []
    for piece, s in zip(pieces, leaves, strict=False):
        entries = piece + 1j * next(imaginary) if is_complex(s) else piece
        out.append(jnp.asarray(entries.reshape(s.shape).astype(s.dtype)))
    return jax.tree.unflatten(tree, out)


def unit_vector(i: int, structure: Structure) -> Vector:
    """The unit vector of entry i, in the order of ``jax.tree.leaves``."""
    parts = np.zeros(size_of(split_real(structure)))
    parts[i] = 1
    return from_parts(parts, structure)
