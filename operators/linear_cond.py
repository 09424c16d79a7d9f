r"""Branches of linear maps, whose transpose is again such a branch.

By itself JAX cannot transpose a ``lax.cond`` that was linearized first and vmapped over predicates then. Here the
transpose is explicit: the cond of the transposed branches.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, PyTree, Shaped

from .closure import close
from .linear_call import closed_linear_call
from .linear_inputs import as_linear, check_inexact, vary, varying
from .structure import abstract, describe, same_structure


def linear_cond(
    pred: Shaped[Array, ""] | bool,
    true_fun: Callable[[Any, Any], Any],
    false_fun: Callable[[Any, Any], Any],
    residuals: PyTree[Array],
    linear: PyTree[Array],
) -> PyTree[Array]:
    r"""One of two linear maps: ``lax.cond`` with its coefficients apart.

    Both branches ``fun(residuals, x)`` are linear in ``x`` and may depend in any way on ``residuals``. It can be
    linearized, vmapped over predicates and transposed in any order, also where the derivative is one with respect to
    ``residuals``. Only the branch taken is computed, unless predicates are vmapped: then both are, and a branch must
    not divide by zero where it is not taken.

    Args:
        pred: scalar, traced or not; a number is true where it is not zero.
        true_fun: the map where ``pred`` is true.
        false_fun: the map where it is false; returns the same structure, shapes and dtypes.
        residuals: pytree of arrays of any dtype.
        linear: pytree of real or complex arrays.

    Raises:
        TypeError: the branches return different structures, ``pred`` is no scalar, or an input or output that should
            be linear is not real or complex.

    Example:
        >>> A = jnp.array([[1.0, 2.0], [3.0, 4.0]])
        >>> either = lambda pred, x: linear_cond(pred, lambda A, x: A @ x, lambda A, x: A.T @ x, A, x)
        >>> over_predicates = lambda x: jax.vmap(either, (0, None))(jnp.array([True, False]), x)
        >>> jax.linear_transpose(over_predicates, jnp.ones(2))(jnp.eye(2))[0].tolist()
        [3.0, 6.0]
    """
    pred = jnp.asarray(pred)
    if pred.shape != ():
        raise TypeError(
            f"linear_cond: pred must be a scalar.\n  got       {describe(pred)}\n  expected  bool[]\n"
            "  Reduce it with .all() or .any(); for one predicate each of many cases vmap over linear_cond."
        )
    residuals, linear = jax.tree.map(jnp.asarray, residuals), as_linear("linear_cond", linear)
    linear = vary(linear, varying((pred, residuals, linear)))
    types = jax.tree.map(abstract, linear)
    branches = [close(fun, jax.tree.map(abstract, residuals), types) for fun in (true_fun, false_fun)]
    first, second = (branch.out_structure for branch in branches)
    if not same_structure(first, second):
        raise TypeError(
            "linear_cond: the branches return different structures.\n"
            f"  got       true_fun: {describe(first)}\n            false_fun: {describe(second)}\n"
            "  expected  the same tree, shapes and dtypes from both"
        )
    check_inexact("linear_cond", "what the branches return", first)

    def branch(i, arrays, x):
        branches, residuals = arrays
        return branches[i](residuals, x)

    def transposed(i, arrays, y):
        return jax.linear_transpose(partial(branch, i, arrays), types)(y)[0]

    def run(fun):
        return lambda residuals, x: _either(residuals[0], partial(fun, 0), partial(fun, 1), residuals[1], x)

    return closed_linear_call(run(branch), run(transposed), (pred != 0, (branches, residuals)), linear)


def _either(pred, true_fun, false_fun, *args):
    """``lax.cond`` whose derivative is a `linear_cond`, so that it can still be vmapped and then transposed."""
    leaves, tree = jax.tree.flatten(args)

    @jax.custom_jvp
    def either(pred, *leaves):
        return lax.cond(pred, true_fun, false_fun, *jax.tree.unflatten(tree, leaves))

    @partial(either.defjvp, symbolic_zeros=True)
    def either_jvp(primals, tangents):
        pred, *leaves = primals
        active = [i for i, t in enumerate(tangents[1:]) if not isinstance(t, SymbolicZero)]

        def push(fun, leaves, dots):
            def of_active(*values):
                merged = list(leaves)
                for i, value in zip(active, values, strict=True):
                    merged[i] = value
                return fun(*jax.tree.unflatten(tree, merged))

            return jax.jvp(of_active, [leaves[i] for i in active], dots)[1]

        dots = [tangents[1 + i] for i in active]
        return either(*primals), linear_cond(pred, partial(push, true_fun), partial(push, false_fun), leaves, dots)

    return either(pred, *leaves)
