"""A function that cannot be linearized or transposed gives an error that names the operation, the place, the cure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

from krylov.operators import Jacobian, plan
from krylov.operators.linearization import LinearizationError, explained, linear_transpose, linearize
from tests.operators.transformations import assert_close

ruleless_p = Primitive("ruleless")
ruleless_p.def_abstract_eval(lambda x: x)
ruleless_p.def_impl(lambda x: x)


@jax.custom_vjp
def reverse_only(x):
    return jnp.sin(x)


reverse_only.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cos, y: (y * cos,))


def pool(x, init=0.0, op=lax.max):
    init = np.asarray(init, x.dtype) if isinstance(init, float) else init
    return lax.reduce_window(x, init, op, (2,), (2,))


def loop(x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]


def on_host(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


X = np.linspace(-1, 1, 8)

NOT_LINEARIZABLE = {
    "max pooling": (lambda x: jnp.sin(pool(jnp.cos(x))), r"maximum over windows with initial value 0.0[\s\S]*max_pool"),
    "traced init": (lambda x: jax.jit(pool)(x, x[0]), r"maximum over windows with a traced initial value"),
    "min pooling": (lambda x: pool(x, 1.0, lax.min), r"minimum over windows[\s\S]*-krylov.operators.reduce_window_max"),
    "window sum": (lambda x: pool(x, 1.0, lax.add), r"sum over windows[\s\S]*add the initial value"),
    "window product": (lambda x: pool(x, 2.0, lax.mul), r"reduction of its own"),
    "in jit": (jax.jit(pool), "max_pool"),
    "in vmap": (lambda x: jax.vmap(pool)(jnp.stack([x, x])), "max_pool"),
    "in checkpoint": (jax.checkpoint(lambda x: pool(x)), "max_pool"),
    "in scan": (lambda x: lax.scan(lambda c, _: (c + pool(x).sum(), None), x[0], None, length=2)[0], "max_pool"),
    "in cond": (lambda x: lax.cond(x[0] > 0, pool, lambda x: x[:4], x), "max_pool"),
    "after an inactive one": (lambda x: pool(ruleless_p.bind(jnp.ones(8, x.dtype)) * x), "max_pool"),
    "no rule": (lambda x: 2 * ruleless_p.bind(x), r"ruleless, float\d\d\[8\] -> float\d\d\[8\][\s\S]*custom_jvp"),
    "callback": (lambda x: on_host(x) + x, r"pure_callback[\s\S]*custom_jvp"),
}


def stopped(x):
    """Reverse mode only, and no derivative at all in the end."""
    return reverse_only(x) + lax.stop_gradient(reverse_only(2 * x))


@pytest.mark.parametrize("f", [reverse_only, stopped, lambda x: jax.vmap(jax.jit(jax.checkpoint(reverse_only)))(x)])
@pytest.mark.parametrize("storage", ["recompute", "linearized"])
def test_a_jacobian_names_a_derivative_for_reverse_mode_only(storage, f):
    params, samples = jnp.asarray(X[:4]), jnp.asarray(X.reshape(2, 4))
    J = Jacobian(lambda p, x: f(x * p).sum(-1), params, samples, storage=storage)
    for product in (J.mv, J.gram().mv, jax.jit(lambda v: J.gram().mv(v))):
        with pytest.raises(LinearizationError, match=r"f cannot be pushed forward[\s\S]*custom_vjp_call"):
            product(params)
    rows = np.cos(X.reshape(2, 4) * X[:4]) * X.reshape(2, 4) / np.sqrt(2)
    assert_close(J.H.mv(jnp.ones(2, params.dtype)), jnp.asarray(rows.sum(0)))


def test_a_derivative_for_reverse_mode_only_is_chosen_dense_storage():
    params, samples = jnp.asarray(X[:4]), jnp.asarray(X.reshape(2, 4))
    J = Jacobian(lambda p, x: reverse_only(x * p).sum(-1), params, samples, storage="auto")
    rows = np.cos(X.reshape(2, 4) * X[:4]) * X.reshape(2, 4) / np.sqrt(2)
    assert J.storage.name == "dense"
    assert {c.storage for c in plan(J).candidates} == {"dense"}
    assert_close(J.mv(params), jnp.asarray(rows @ X[:4]))


def test_a_derivative_for_reverse_mode_only_may_be_inactive():
    params, samples = jnp.asarray(X[:4]), jnp.asarray(X.reshape(2, 4))
    J = Jacobian(lambda p, x: (reverse_only(x) * p).sum(-1), params, samples)
    assert_close(J.mv(params), jnp.asarray(np.sin(X.reshape(2, 4)) @ X[:4] / np.sqrt(2)))


@pytest.mark.parametrize("name", NOT_LINEARIZABLE)
def test_what_cannot_be_linearized_is_named(name):
    f, words = NOT_LINEARIZABLE[name]
    with pytest.raises(LinearizationError, match=words) as info:
        linearize(f, jnp.asarray(X), name="network")
    message = str(info.value)
    assert message.startswith("network cannot be linearized.\n  got       ")
    assert "\n  at        " in message
    assert "test_linearization.py" in message
    assert info.value.__cause__ is not None


@pytest.mark.parametrize("init", [0.0, -np.inf])
def test_pooling_with_an_array_as_initial_value_under_jit_is_named(init):
    x = jnp.asarray(X)
    init = jnp.asarray(init, x.dtype)

    def f(x):
        return lax.reduce_window(x, init, lax.max, (2,), (2,))

    def differentiated(x):
        return linearize(f, x)[0]

    with pytest.raises(LinearizationError, match=r"f cannot be traced[\s\S]*test_linearization.py[\s\S]*max_pool"):
        jax.jit(differentiated)(x)
    with pytest.raises(LinearizationError, match="max_pool"), explained(f, x):
        jax.eval_shape(f, x)


def test_a_loop_is_named_where_it_is_transposed_not_where_it_is_linearized():
    x = jnp.asarray(X)
    out, push = linearize(loop, x)
    assert_close(push(x), jax.jvp(loop, (x,), (x,))[1])
    for words, call in {
        "fun cannot be transposed": lambda: linear_transpose(push, x)(out),
        "loop cannot be transposed": lambda: gradient_of_loop(x),
    }.items():
        with pytest.raises(LinearizationError, match=words + r"[\s\S]*got       while,[\s\S]*lax.scan"):
            call()


def gradient_of_loop(x):
    with explained(loop, x, name="loop"):
        return jax.grad(lambda x: loop(x).sum())(x)


def test_a_rule_for_reverse_mode_only_is_named_where_it_is_pushed_forward():
    x = jnp.asarray(X)
    with explained(reverse_only, x):
        assert_close(jax.grad(lambda x: reverse_only(x).sum())(x), jnp.cos(x))
    words = r"cannot be pushed forward[\s\S]*custom_vjp_call[\s\S]*custom_jvp"
    with pytest.raises(LinearizationError, match=words), explained(reverse_only, x):
        jax.linearize(reverse_only, x)[1](x)


@pytest.mark.parametrize(("f", "operation"), [(jnp.sin, "sin"), (lambda x: x * x, "mul")], ids=["sin", "square"])
def test_what_is_not_linear_is_named_when_it_is_transposed(f, operation):
    x = jnp.asarray(X)
    with pytest.raises(LinearizationError, match=rf"fun cannot be transposed[\s\S]*got       {operation},"):
        linear_transpose(f, x)(x)


def test_what_works_is_left_alone():
    x = jnp.asarray(X)
    f = lambda x: jnp.sin(x) * x
    out, push = linearize(f, x)
    assert_close((out, push(x)), jax.jvp(f, (x,), (x,)))
    assert_close(linear_transpose(push, x)(x), jax.vjp(f, x)[1](x))


def test_errors_of_the_users_own_are_left_alone():
    x = jnp.asarray(X)
    with pytest.raises(TypeError, match="contracting dimensions") as info:
        linearize(lambda x: x @ jnp.ones(3), x)
    assert not isinstance(info.value, LinearizationError)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(lambda x: linearize(lambda x: x if x.sum() > 0 else -x, x)[0])(x)
    with pytest.raises(RuntimeError, match="cannot be linearized, says the user"):
        linearize(complain, x)


def complain(x):
    raise RuntimeError("cannot be linearized, says the user")
