"""Which leaves of a network's parameters are trained."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .structure import describe, real_dtype, size_of


def split_trainable(params: PyTree, trainable: Any) -> tuple[PyTree, PyTree]:
    """The leaves that are trained, and the others; None stands where a leaf is in the other part.

    Args:
        params: pytree.
        trainable: as in `Jacobian`.

    Raises:
        ValueError: a mask that does not fit, or nothing to train.
    """
    params = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, params)
    if trainable is None:
        mask = True
    elif callable(trainable) and not _holds_bools(trainable):
        mask = jax.tree.map(lambda x: bool(trainable(x)), params)
    else:
        mask = trainable
    try:
        chosen, _ = eqx.partition(params, jax.tree.map(_as_bool, mask))
    except (ValueError, TypeError) as error:
        raise ValueError(
            "Jacobian: trainable must be a function of a leaf or a pytree of bools that is a prefix of params.\n"
            f"  got       {trainable!r}\n  params    {describe(params)}\n  {error}"
        ) from None
    trained = eqx.filter(chosen, eqx.is_inexact_array)
    rest = jax.tree.map(lambda x, t: None if t is not None else x, params, trained, is_leaf=lambda x: x is None)
    if size_of(trained) == 0:
        raise ValueError(
            f"Jacobian: no trainable floating-point array among params.\n  params    {describe(params)}\n"
            "  Python numbers and integers are constants: pass what is to be trained as jnp.asarray(..., float)."
        )
    return trained, rest


def _holds_bools(tree):
    """Whether a pytree is a mask, even one that can be called as a module can."""
    leaves = jax.tree.leaves(tree)
    return bool(leaves) and all(isinstance(x, (bool, np.bool_)) for x in leaves)


def _as_bool(x):
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{x!r} is not a bool")
    return bool(x)


def real_dtype_of(params: PyTree) -> np.dtype:
    """The real dtype of the widest parameter, in which weights are kept."""
    leaves = jax.tree.leaves(params)
    return real_dtype(jnp.result_type(*(leaf.dtype for leaf in leaves), jnp.float32))
