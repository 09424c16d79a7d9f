"""Trees like a user's parameters, and the vectors of their trained part."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from krylov.operators.base import Vector
from krylov.operators.structure import Structure, check_vector, describe


def trained_part(where: str, name: str, tree: PyTree, structure: Structure) -> PyTree:
    """The part of a tree like the user's parameters that belongs to trained ones, of which ``structure`` is.

    Raises:
        ValueError: the trees differ.
    """
    try:
        return jax.tree.map(lambda s, x: None if s is None else x, structure, tree, is_leaf=lambda s: s is None)
    except ValueError as error:
        raise ValueError(
            f"{where}: {name} must be a pytree like params.\n  got       {describe(tree)}\n"
            f"  expected  {describe(structure)}\n  {error}"
        ) from None


def trained_vector(where: str, name: str, tree: PyTree, structure: Structure) -> Vector:
    """As `trained_part`, for a vector, whose shapes and dtypes are checked too."""
    return check_vector(where, name, trained_part(where, name, tree, structure), structure)


def like_params(step: Vector, structure: Structure, params: PyTree) -> PyTree:
    """A step as a tree like ``params``, in their dtypes.

    Zero for frozen floating-point arrays, None for what is no such array, as in gradients of equinox: the sum with the
    parameters is then right leaf by leaf.
    """

    def leaf(s: Any, p: Any, x: Any) -> Any:
        if s is not None:
            return x if x.dtype == p.dtype else x.astype(p.dtype)
        array = isinstance(p, (jax.Array, np.ndarray)) and jnp.issubdtype(p.dtype, jnp.inexact)
        return jnp.zeros_like(p) if array else None

    return jax.tree.map(leaf, structure, params, step, is_leaf=lambda s: s is None)
