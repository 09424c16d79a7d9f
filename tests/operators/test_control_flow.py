"""Scans and branches of linear maps: every transformation agrees with the plain loop, and memory stays flat."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from krylov.operators import control_flow
from krylov.operators.control_flow import linear_cond, linear_scan, linear_stack, linear_sum
from tests.operators import transformations
from tests.operators.transformations import assert_close, assert_same, random_like


def array(seed, *shape, dtype=float):
    return random_like(jax.ShapeDtypeStruct(shape, jnp.result_type(dtype)), seed)


def unrolled(f, residuals, init, xs, reverse=False):
    """`linear_scan` as a Python loop."""
    length = jax.tree.leaves((residuals, xs))[0].shape[0]
    carry, ys = init, [None] * length
    for k in reversed(range(length)) if reverse else range(length):
        carry, ys[k] = f(*jax.tree.map(lambda x, k=k: x[k], (residuals, xs))[:1], carry, xs_of(xs, k))
    return carry, jax.tree.map(lambda *y: jnp.stack(y), *ys)


def xs_of(xs, k):
    return jax.tree.map(lambda x: x[k], xs)


def recurrence(residual, carry, x):
    """Mixed real and complex leaves, an integer residual, a carry that couples to everything."""
    a, index = residual["a"], residual["index"]
    z, r = carry
    z = jnp.sin(a) @ z + x["b"] * r[index] + jnp.exp(1j * r)
    return (z, r + x["c"]), {"y": z.real, "w": x["b"] * a[0]}


def linear_recurrence(residual, carry, x):
    a, index = residual["a"], residual["index"]
    z, r = carry
    new = jnp.sin(a) @ z + x["b"] * r[index] + (1j * r)
    return (new, 0.5 * r + (a[0] * x["b"]).real), {"y": z.real * 2, "w": x["b"] * a[0] + z}


def recurrence_problem():
    residuals = {"a": array(1, 4, 3, 3, dtype=complex) / 3, "index": jnp.array([0, 2, 1, 1])}
    linear = ((array(2, 3, dtype=complex), array(3, 3)), {"b": array(4, 4, 3, dtype=complex)})
    return residuals, linear


@pytest.mark.parametrize("transformation", transformations.ALL, ids=lambda t: t.__name__)
def test_recurrence_agrees_with_the_loop(transformation):
    residuals, linear = recurrence_problem()
    assert_same(
        transformation,
        lambda r, x: linear_scan(linear_recurrence, r, *x),
        lambda r, x: unrolled(linear_recurrence, r, *x),
        residuals,
        linear,
    )


@pytest.mark.parametrize("transformation", [transformations.evaluate, transformations.transpose, transformations.grad])
def test_recurrence_in_reverse_agrees_with_the_loop(transformation):
    residuals, linear = recurrence_problem()
    assert_same(
        transformation,
        lambda r, x: linear_scan(linear_recurrence, r, *x, reverse=True),
        lambda r, x: unrolled(linear_recurrence, r, *x, reverse=True),
        residuals,
        linear,
    )
