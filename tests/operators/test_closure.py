"""Functions as pytrees: captured values are leaves, and programs are shared exactly when they are the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from krylov.operators import linear_call
from krylov.operators.closure import close

X = jnp.arange(3.0)


def of(fn, x=X):
    return close(fn, jax.ShapeDtypeStruct(x.shape, x.dtype))


def test_captured_arrays_are_leaves_and_the_program_is_shared():
    def make(scale):
        offset = scale * jnp.ones(3)
        return of(lambda x: jnp.sin(x) * offset)

    first, second = make(1.0), make(2.0)
    assert first.jaxpr is second.jaxpr
    assert jax.tree.structure(first) == jax.tree.structure(second)
    np.testing.assert_allclose(first(X), jnp.sin(X))
    np.testing.assert_allclose(second(X), 2 * jnp.sin(X))


def test_structures_of_arguments_and_results_are_kept():
    closed = close(lambda a, b: {"s": (a["x"] + b, b)}, {"x": X}, jnp.ones(3))
    out = closed({"x": X}, jnp.ones(3))
    np.testing.assert_allclose(out["s"][0], X + 1)
    assert jax.tree.map(lambda s: s.shape, closed.out_structure) == {"s": ((3,), (3,))}


def _same_line(value):
    return of(lambda x: x * value)


@pytest.mark.parametrize(
    "a, b, shared",
    [
        (jnp.float32(1), jnp.float32(2), True),
        (jnp.ones(3), jnp.zeros(3), True),
        (jnp.ones(3), jnp.ones(()), False),
        (jnp.ones(3, np.float32), jnp.ones(3, np.float16), False),
        (2.0, 2.0, True),
        (2.0, 3.0, False),  # Python numbers are part of the program
        (np.ones(3), np.zeros(3), True),
    ],
)
def test_programs_of_the_same_code_are_shared_if_they_differ_in_captured_arrays_only(a, b, shared):
    first, second = _same_line(a), _same_line(b)
    assert (first.jaxpr is second.jaxpr) == shared
    np.testing.assert_allclose(first(X), X * a)
    np.testing.assert_allclose(second(X), X * b)


def test_programs_of_other_code_or_branches_are_not_shared():
    def make(power, flag):
        def fn(x):
            y = x**power
            return jnp.cos(y) if flag else jnp.sin(y)

        return of(fn)

    programs = [make(p, f) for p in (2, 3) for f in (False, True)]
    assert len({id(p.jaxpr) for p in programs}) == 4
    for program, (p, f) in zip(programs, [(p, f) for p in (2, 3) for f in (False, True)]):
        np.testing.assert_allclose(program(X), (np.cos if f else np.sin)(X**p), rtol=1e-6)
    assert make(2, True).jaxpr is programs[1].jaxpr


@pytest.mark.parametrize(
    "wrap",
    [
        jax.checkpoint,
        lambda f: functools.partial(f),
        lambda f: lambda x: jax.lax.cond(x[0] > 0, f, lambda x: x, x),
        lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
        lambda f: lambda x: jax.lax.map(f, x),
        jax.vmap,
        lambda f: lambda x: jax.lax.while_loop(lambda x: x[0] < 0, f, x),
    ],
)
def test_programs_inside_programs_are_compared_too(wrap):
    def make(power, scale):
        return of(wrap(lambda x: jax.nn.gelu(x) ** power * scale))

    first, again, other = make(2, jnp.float32(1)), make(2, jnp.float32(3)), make(3, jnp.float32(1))
    assert first.jaxpr is again.jaxpr
    assert first.jaxpr is not other.jaxpr


def test_linear_calls_are_compared_with_their_transposes():
    def make(scale, factor):
        return of(lambda x: linear_call(lambda r, x: r * x, lambda r, y: factor * r * y, scale, jnp.sin(x)))

    first, again, other = make(jnp.float32(1), 1.0), make(jnp.float32(2), 1.0), make(jnp.float32(1), 2.0)
    assert first.jaxpr is again.jaxpr
    assert first.jaxpr is not other.jaxpr


def test_zeros_of_other_sign_are_other_programs_and_nan_is_one():
    def make(value):
        return of(lambda x: jnp.arctan2(value, x))

    assert make(0.0).jaxpr is not make(-0.0).jaxpr
    assert make(np.nan).jaxpr is make(np.nan).jaxpr


# Rules of custom derivatives are part of the program, though JAX keeps them out of it.


def jvp_closing_over(scale):
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(lambda primals, tangents: (f(primals[0]), scale * tangents[0]))
    return f


def jvp_with_default(scale):
    def rule(primals, tangents, scale=scale):
        return f(primals[0]), scale * tangents[0]

    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(rule)
    return f


def jvp_by_argument(scale):
    return lambda x: _scaled(x, scale)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _scaled(x, scale):
    return jnp.sin(x)


@_scaled.defjvp
def _(scale, primals, tangents):
    return _scaled(primals[0], scale), scale * tangents[0]


def jvp_by_parts(scale):
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvps(lambda tangent, out, x: scale * tangent)
    return f


def jvp_of_partial(scale):
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    def rule(scale, primals, tangents):
        return f(primals[0]), scale * tangents[0]

    f.defjvp(functools.partial(rule, scale))
    return f


def jvp_inside_jit(scale):
    return jax.jit(jvp_closing_over(scale))


def jvp_of_array(scale):
    return jvp_closing_over(np.array(scale))


def vjp_closing_over(scale):
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (f(x), None), lambda _, ct: (scale * ct,))
    return f


def vjp_forward_closing_over(scale):
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (f(x), jnp.full_like(x, scale)), lambda residual, ct: (residual * ct,))
    return f


@pytest.mark.parametrize(
    "make",
    [
        jvp_closing_over,
        jvp_with_default,
        jvp_by_argument,
        jvp_by_parts,
        jvp_of_partial,
        jvp_inside_jit,
        jvp_of_array,
        vjp_closing_over,
        vjp_forward_closing_over,
    ],
)
def test_rules_that_close_over_other_values_are_other_programs(make):
    def derivative(scale):
        closed = of(lambda x: make(scale)(x))
        return closed.jaxpr, jax.vjp(closed, X)[1](jnp.ones(3))[0]

    first, other, again = (derivative(scale) for scale in (1.0, 2.0, 1.0))
    np.testing.assert_allclose(first[1], np.ones(3))
    np.testing.assert_allclose(other[1], 2 * np.ones(3))
    assert first[0] is not other[0]
    assert first[0] is again[0]


def test_rules_that_close_over_device_arrays_are_never_mixed_up():
    values = [jvp_closing_over(jnp.asarray(s)) for s in (1.0, 2.0)]
    for f, s in zip(values, (1.0, 2.0)):
        closed = of(lambda x, f=f: f(x))
        np.testing.assert_allclose(jax.jvp(closed, (X,), (jnp.ones(3),))[1], s * np.ones(3))


@pytest.mark.parametrize(
    "activation",
    [jax.nn.relu, jax.nn.gelu, jax.nn.silu, jax.nn.softplus, jax.nn.elu, jax.nn.logsumexp, jnp.linalg.norm],
)
def test_activations_of_jax_are_shared(activation):
    first, second = (of(lambda x, scale=scale: activation(x) * scale) for scale in (jnp.ones(3), jnp.zeros(3)))
    assert first.jaxpr is second.jaxpr


def test_programs_pushed_out_by_others_still_work():
    kept = [of(lambda x, k=k: x * k) for k in range(100)]
    for k in (0, 50, 99):
        np.testing.assert_allclose(kept[k](X), k * X)


def test_captured_tracers_are_seen_by_every_transformation():
    def f(a, x):
        return jnp.sum(of(lambda x: jnp.sin(a * x))(x))

    expected = lambda a, x: jnp.sum(jnp.sin(a * x))
    a = jnp.array(0.7)
    for transform in (jax.jit, jax.grad, lambda f: jax.jit(jax.grad(jax.grad(f)))):
        np.testing.assert_allclose(transform(f)(a, X), transform(expected)(a, X), rtol=1e-5)
    batch = jnp.array([0.5, 0.7])
    np.testing.assert_allclose(jax.vmap(f, (0, None))(batch, X), jax.vmap(expected, (0, None))(batch, X), rtol=1e-6)


def test_what_a_jitted_function_captures_is_not_stale():
    def f(a, x):
        return jnp.sum(of(jax.jit(lambda x: jnp.sin(a * x)))(x))

    expected = lambda a, x: jnp.sum(jnp.sin(a * x))
    for a in (0.5, 0.7):
        for transform in (lambda f: f, jax.grad, lambda f: jax.jit(jax.grad(f))):
            np.testing.assert_allclose(transform(f)(jnp.asarray(a), X), transform(expected)(a, X), rtol=1e-5)


def test_captured_keys_integers_and_nothing():
    key = jax.random.key(3)
    closed = of(lambda x: x * jax.random.normal(key, (3,)))
    np.testing.assert_allclose(jax.jit(lambda c: c(X))(closed), X * jax.random.normal(key, (3,)))
    assert of(lambda x: 2 * x).captured == []
    order = np.array([2, 1, 0])
    np.testing.assert_allclose(of(lambda x: x[order])(X), X[::-1])


def test_methods_partials_and_callables_share_by_their_code():
    class Scale:
        def __init__(self, value):
            self.value = value

        def apply(self, x):
            return self.value * x

        __call__ = apply

    for pick in (lambda s: s.apply, lambda s: s, lambda s: functools.partial(Scale.apply, s)):
        first, second = (of(pick(Scale(jnp.float32(v)))) for v in (1, 2))
        assert first.jaxpr is second.jaxpr
        np.testing.assert_allclose(second(X), 2 * X)
