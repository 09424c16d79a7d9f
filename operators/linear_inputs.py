"""What linear loops and branches ask of their linear inputs: real or complex, and varying over the same mesh axes."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .structure import describe, structure_of


def as_linear(where: str, linear: Any) -> Any:
    """Arrays that are real or complex, without weak types."""
    linear = jax.tree.map(jnp.asarray, linear)
    check_inexact(where, "the linear input", linear)
    return jax.tree.map(lambda x: x.astype(x.dtype), linear)


def check_inexact(where: str, what: str, tree: Any) -> None:
    """Refuse integers and booleans where something is linear.

    Raises:
        TypeError: a leaf is not real or complex.
    """
    if not all(jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(tree)):
        raise TypeError(
            f"{where}: {what} must be real or complex.\n  got       {describe(structure_of(tree))}\n"
            "  Integers and booleans belong among the residuals."
        )


def varying(tree: Any) -> frozenset:
    """The manual mesh axes of a `jax.shard_map` over which any leaf varies."""
    axes = frozenset()
    for x in jax.tree.leaves(tree):
        aval = jax.typeof(x)
        kind = getattr(aval, "manual_axis_type", None)
        axes |= getattr(aval, "vma", frozenset()) if kind is None else kind.varying
    return axes


def vary(tree: Any, axes: frozenset) -> Any:
    """The same values, varying over the given axes."""

    def leaf(x):
        missing = tuple(sorted(axes - varying(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(leaf, tree)
