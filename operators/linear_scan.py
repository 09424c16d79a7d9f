r"""Loops of linear maps, with transposes that are again such loops.

JAX transposes a ``lax.scan`` by differentiating it, which can keep every step in memory. Here the transpose is
explicit: the scan of the transposed steps in reverse. Branches are in `linear_cond`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from .closure import close
from .linear_call import closed_linear_call
from .linear_inputs import as_linear, check_inexact, vary, varying
from .structure import abstract, describe, same_structure


def linear_scan(
    f: Callable[[Any, Any, Any], tuple[Any, Any]],
    residuals: PyTree[Array],
    init: PyTree[Array],
    xs: PyTree[Array] = None,
    *,
    length: int | None = None,
    reverse: bool = False,
) -> tuple[PyTree[Array], PyTree[Array]]:
    r"""A linear recurrence, ``lax.scan`` with its coefficients apart.

    Each step ``f(residual, carry, x) -> (carry, y)`` is linear in ``(carry, x)`` and may depend in any way on
    ``residual``. The transpose runs the transposed steps in reverse and stores nothing. Derivatives with respect to
    ``residuals``, and to whatever ``f`` closes over, recompute each step from its inputs: the carries are kept, one a
    step, what a step computes is not. For a sum or a stack over steps without a carry see `linear_sum` and
    `linear_stack`, whose derivatives keep nothing.

    Args:
        f: the step.
        residuals: pytree of arrays of any dtype with a leading axis of one entry a step; None for none.
        init: the first carry, a pytree of real or complex arrays; None for none.
        xs: pytree of real or complex arrays with the same leading axis; None for none.
        length: number of steps, where neither ``residuals`` nor ``xs`` tell.
        reverse: run from the last step to the first.

    Returns:
        The last carry, and the ``y`` of all steps, stacked.

    Raises:
        ValueError: leading axes differ or are missing.
        TypeError: the carry changes its structure, shapes or dtypes; a linear input is not real or complex.

    Example:
        Exponential smoothing, ``carry' = a carry + (1 - a) x``:

        >>> smooth = lambda a, carry, x: (a * carry + (1 - a) * x,) * 2
        >>> final, path = linear_scan(smooth, jnp.array([0.5, 0.5]), jnp.float32(0), jnp.array([2.0, 4.0]))
        >>> path.tolist()
        [1.0, 2.5]
    """

    def step(residual, shared, carry, x):
        del shared
        carry, y = f(residual, carry, x)
        return None, carry, y

    _, carry, ys = _scan("linear_scan", step, residuals, None, init, xs, length, reverse)
    return carry, ys


def linear_sum(f: Callable[[Any, Any], Any], residuals: PyTree[Array], linear: PyTree[Array]) -> PyTree[Array]:
    r"""The sum :math:`\sum_k A_k v` over chunks, where ``f(residuals[k], v)`` computes :math:`A_k v`.

    One chunk is in memory at a time, also in the transpose :math:`\sum_k A_k^T w` and in derivatives with respect to
    ``residuals``, ``linear`` and whatever ``f`` closes over, and in forward derivatives of these. Reverse over reverse
    keeps one vector a chunk.

    Args:
        f: linear in its second argument.
        residuals: pytree of arrays of any dtype, one entry a chunk along the leading axis.
        linear: pytree of real or complex arrays, the same for every chunk.

    Raises:
        ValueError: leading axes differ or are missing.
        TypeError: a linear input is not real or complex.

    Example:
        >>> chunks = jnp.arange(6.0).reshape(3, 2)
        >>> linear_sum(lambda row, v: row * (row @ v), chunks, jnp.ones(2)).tolist()
        [46.0, 61.0]
    """

    def step(residual, shared, carry, x):
        del carry, x
        return f(residual, shared), None, None

    return _scan("linear_sum", step, residuals, linear, None, None)[0]


def linear_stack(f: Callable[[Any, Any], Any], residuals: PyTree[Array], linear: PyTree[Array]) -> PyTree[Array]:
    r"""The stack of :math:`A_k v` over chunks, where ``f(residuals[k], v)`` computes :math:`A_k v`.

    One chunk is in memory at a time, also in the transpose :math:`\sum_k A_k^T w_k` and in every derivative, as in
    `linear_sum`. To concatenate chunks of rows instead, reshape the result.

    Args:
        f: linear in its second argument.
        residuals: pytree of arrays of any dtype, one entry a chunk along the leading axis.
        linear: pytree of real or complex arrays, the same for every chunk.

    Raises:
        ValueError: leading axes differ or are missing.
        TypeError: a linear input is not real or complex.

    Example:
        >>> chunks = jnp.arange(6.0).reshape(3, 2)
        >>> linear_stack(lambda row, v: row @ v, chunks, jnp.ones(2)).tolist()
        [1.0, 5.0, 9.0]
    """

    def step(residual, shared, carry, x):
        del carry, x
        return None, None, f(residual, shared)

    return _scan("linear_stack", step, residuals, linear, None, None)[2]


def _scan(where, f, residuals, shared, init, xs, length=None, reverse=False):
    r"""Steps ``f(residual, shared, carry, x) -> (term, carry, y)``, linear in the last three; returns the sum of terms,
    the last carry and the stack of y.

    Input and output mirror each other: in the transpose what is shared becomes a sum, a sum what is shared, a carry a
    carry in the other direction, a stack a stack.
    """
    residuals, linear = jax.tree.map(jnp.asarray, residuals), as_linear(where, (shared, init, xs))
    length = _length(where, residuals, linear[2], length)
    residual = jax.tree.map(abstract, _of_one_step(residuals))

    def traced(linear):
        types = jax.tree.map(abstract, (*linear[:2], _of_one_step(linear[2])))
        return close(f, residual, *types), types

    # Inputs are made to vary here, once: inside the loop, the transpose of that would be a collective every step.
    linear = vary(linear, varying((residuals, linear)))
    step, types = traced(linear)
    if axes := varying(step) - varying(linear):
        linear = vary(linear, axes)
        step, types = traced(linear)
    if not same_structure(step.out_structure[1], types[1]):
        raise TypeError(
            f"{where}: the carry that f returns differs from the one it takes.\n"
            f"  got       {describe(step.out_structure[1])}\n  expected  {describe(types[1])}\n"
            "  Cast init, or what f returns, to one common structure."
        )
    check_inexact(where, "what f returns", step.out_structure)

    def transposed_step(step, residual, *cotangents):
        return jax.linear_transpose(partial(step, residual), *types)(cotangents)

    def run(step_of, sum_type, reverse):
        def fun(arrays, linear):
            step, residuals = arrays
            shared, init, xs = linear
            axes = varying((arrays, linear))

            def body(carry, inputs):
                total, carry = carry
                term, carry, y = step_of(step, inputs[0], shared, carry, inputs[1])
                return (jax.tree.map(jnp.add, total, term), vary(carry, axes)), y

            start = vary((jax.tree.map(jnp.zeros_like, sum_type), init), axes)
            body = jax.checkpoint(body, prevent_cse=False)
            (total, carry), ys = lax.scan(body, start, (residuals, xs), length, reverse)
            return total, carry, ys

        return fun

    out_types = jax.tree.unflatten(step.out_tree, [abstract(v.aval) for v in step.jaxpr.outvars])
    return closed_linear_call(
        run(lambda step, *args: step(*args), out_types[0], reverse),
        run(transposed_step, types[0], not reverse),
        (step, residuals),
        linear,
    )


def _of_one_step(stacks):
    def first(x):
        return x[0] if len(x) else jnp.zeros(x.shape[1:], x.dtype)

    return jax.eval_shape(lambda stacks: jax.tree.map(first, stacks), stacks)


def _length(where, residuals, xs, length):
    leaves = jax.tree.leaves((residuals, xs))
    lengths = {x.shape[0] if x.ndim else None for x in leaves} | ({length} if length is not None else set())
    if len(lengths) != 1 or None in lengths:
        raise ValueError(
            f"{where}: the number of steps is not clear.\n"
            f"  got       residuals {describe(residuals)}"
            + (f", xs {describe(xs)}, length {length}\n" if where == "linear_scan" else "\n")
            + "  expected  arrays with leading axes of the same length"
            + (", or `length` where there are none" if where == "linear_scan" else "")
        )
    return lengths.pop()
