"""Operators given by functions: claims, adjoints, captured values, and what is refused."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from krylov.operators import FunctionOperator
from tests.operators.zoo import normal

FLOAT, COMPLEX = np.dtype(jnp.result_type(float)), np.dtype(jnp.result_type(complex))
TOLERANCE = 300 * float(jnp.finfo(FLOAT).eps)


def test_the_given_adjoint_is_used_forward_and_in_derivatives(rng):
    a, x, y = (normal(rng, COMPLEX, *shape) for shape in ((3, 2), (2,), (3,)))
    op = FunctionOperator(lambda x: a @ x, x, adjoint=lambda y: 2 * (a.conj().T @ y))
    np.testing.assert_allclose(op.rmv(y), 2 * a.conj().T @ y, rtol=TOLERANCE)
    np.testing.assert_allclose(jax.linear_transpose(op.mv, x)(y)[0], 2 * a.T @ y, rtol=TOLERANCE)
    np.testing.assert_allclose(jax.vjp(op.mv, x)[1](y)[0], 2 * a.T @ y, rtol=TOLERANCE)
    np.testing.assert_allclose(op.H.H @ x, a @ x, rtol=TOLERANCE)


def test_a_hermitian_claim_saves_the_transpose(rng):
    a, x = normal(rng, COMPLEX, 3, 3), normal(rng, COMPLEX, 3)

    def opaque(x):  # JAX cannot transpose a while_loop
        return jax.lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, a @ s[1]), (0, x))[1]

    op = FunctionOperator(opaque, x, hermitian=True)
    assert op.H is op
    np.testing.assert_allclose(op.rmv(x), a @ x, rtol=TOLERANCE)
    np.testing.assert_allclose(jax.linear_transpose(op.mv, x)(x)[0], (a @ x.conj()).conj(), rtol=TOLERANCE)


def test_fields_follow_from_the_leaves():
    identity = lambda x: x
    real, whole = np.zeros(2, FLOAT), np.zeros(2, COMPLEX)
    assert FunctionOperator(identity, real).field == "real"
    assert FunctionOperator(identity, whole).field == "complex"
    assert FunctionOperator(identity, whole, field="real").field == "real"
    assert FunctionOperator(identity, (real, whole)).field == "real"
    assert FunctionOperator(lambda x: x.real, whole).field == "real"
    assert FunctionOperator(lambda x: x + 0j, real).field == "real"


def test_positive_implies_hermitian():
    op = FunctionOperator(lambda x: x, np.zeros(2), positive=True)
    assert op.is_hermitian and op.is_positive
    assert FunctionOperator(lambda x: x, np.zeros(2), hermitian=True).is_positive is False


def test_structures_may_be_arrays_shapes_or_numbers():
    for structure in (np.zeros(2, np.float32), jnp.zeros(2, np.float32), jax.ShapeDtypeStruct((2,), np.float32)):
        assert FunctionOperator(lambda x: 2 * x, structure).in_structure().shape == (2,)
    assert FunctionOperator(lambda x: 2 * x, 1.0).out_structure().dtype == FLOAT
    assert FunctionOperator(lambda x: 2 * x, 1j).out_structure().dtype == COMPLEX


@pytest.mark.parametrize(
    "build, error, words",
    [
        (lambda: FunctionOperator(lambda x: x, np.zeros(2), field="rational"), ValueError, ["'complex' or 'real'"]),
        (
            lambda: FunctionOperator(lambda x: x, np.zeros(2, np.float32), field="complex"),
            ValueError,
            ["needs complex leaves only", "float32[2] -> float32[2]", "Leave out field='complex'"],
        ),
        (
            lambda: FunctionOperator(lambda x: x[:1], np.zeros(2, np.float32), hermitian=True),
            ValueError,
            ["maps a space to itself", "float32[2]", "float32[1]", "Drop hermitian=True"],
        ),
        (
            lambda: FunctionOperator(lambda x: {"a": x}, np.zeros(2, np.float32), positive=True),
            ValueError,
            ["maps a space to itself", "{'a': float32[2]}"],
        ),
        (
            lambda: FunctionOperator(lambda x: x[:1], np.zeros(2, np.float32), adjoint=lambda y: y),
            ValueError,
            ["adjoint does not return what fn takes", "got       float32[1]", "expected  float32[2]"],
        ),
        (
            lambda: FunctionOperator(lambda x: x, np.zeros(2, int)),
            TypeError,
            ["structure must have real or complex floating-point leaves", "[2]", "astype"],
        ),
        (
            lambda: FunctionOperator(lambda x: x > 0, np.zeros(2)),
            TypeError,
            ["the output of fn must have real or complex floating-point leaves", "bool[2]"],
        ),
    ],
)
def test_what_cannot_be_is_refused_when_the_operator_is_made(build, error, words):
    with pytest.raises(error, match="FunctionOperator") as info:
        build()
    for word in words:
        assert word in str(info.value)


def scaling(scale):
    return FunctionOperator(
        lambda x: scale * jnp.cumsum(x), jnp.zeros(3), adjoint=lambda y: scale * jnp.cumsum(y[::-1])[::-1]
    )


def test_captured_values_are_leaves_seen_by_jit_grad_and_vmap():
    x, y = jnp.arange(1.0, 4), jnp.array([1.0, 0, 2])
    dense = np.tril(np.ones((3, 3)))

    def forward(scale):
        return jnp.vdot(y, scaling(scale) @ x)

    def backward(scale):
        return jnp.vdot(scaling(scale).H @ y, x)

    value = float(y @ dense @ x)
    scales = jnp.array([1.0, 3.0])
    for f in (forward, backward):
        np.testing.assert_allclose(f(2.0), 2 * value)
        np.testing.assert_allclose(jax.jit(f)(2.0), 2 * value)
        np.testing.assert_allclose(jax.grad(f)(2.0), value)
        np.testing.assert_allclose(jax.jvp(f, (2.0,), (0.5,))[1], 0.5 * value)
        np.testing.assert_allclose(jax.vmap(f)(scales), scales * value)
        np.testing.assert_allclose(jax.vmap(jax.grad(lambda s, f=f: f(s) ** 2))(scales), 2 * scales * value**2)
    gradient = eqx.filter_grad(lambda op: jnp.vdot(y, op @ x))(scaling(jnp.asarray(2.0)))
    np.testing.assert_allclose(sum(jax.tree.leaves(gradient)), value)


def test_captured_values_may_be_keys_integers_and_booleans():
    key, order, keep = jax.random.key(0), np.array([2, 0, 1]), jnp.array([True, False, True])
    op = FunctionOperator(lambda x: jnp.where(keep, x[order], 0) * jax.random.normal(key, (3,)), jnp.zeros(3))
    noise = jax.random.normal(key, (3,))
    x = jnp.arange(1.0, 4)
    np.testing.assert_allclose(op @ x, np.where(keep, x[order], 0) * noise)
    np.testing.assert_allclose(op.rmv(x), op.as_matrix().T @ x, rtol=1e-6)
    gradient = eqx.filter_grad(lambda op: jnp.sum(op @ x))(op)
    assert all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(gradient))


def test_an_r_linear_function_on_real_parts(rng):
    a, b = normal(rng, COMPLEX, 2, 2), normal(rng, COMPLEX, 2, 2)
    op = FunctionOperator(lambda x: a @ x + b @ x.conj(), np.zeros(2, COMPLEX), field="real")
    dense = np.block([[a.real + b.real, b.imag - a.imag], [a.imag + b.imag, a.real - b.real]])
    np.testing.assert_allclose(op.as_matrix(), dense, rtol=TOLERANCE)
    x, y = normal(rng, COMPLEX, 2), normal(rng, COMPLEX, 2)
    assert abs(np.vdot(y, op @ x).real - np.vdot(op.H @ y, x).real) < TOLERANCE * 10
    assert abs(np.vdot(y, op @ x) - np.vdot(op.H @ y, x)) > 0.1  # the complex inner product has no adjoint


def test_the_function_is_traced_once():
    calls = []

    def fn(x):
        calls.append(x)
        return 2 * x

    op = FunctionOperator(fn, jnp.zeros(2))
    op @ jnp.ones(2)
    op.H @ jnp.ones(2)
    op.as_matrix()
    jax.grad(lambda x: jnp.sum(op @ x))(jnp.ones(2))
    assert len(calls) == 1


def branching(x):
    return x if x.sum() > 0 else -x


@pytest.mark.parametrize("fn", [lambda x: np.linalg.norm(x) * np.asarray(x), branching, lambda x: x[x > 0]])
def test_what_looks_at_values_is_named_and_cured(fn):
    for build in (
        lambda: FunctionOperator(fn, np.zeros(2)),
        lambda: FunctionOperator(lambda x: 2 * x, np.zeros(2), adjoint=fn),
    ):
        with pytest.raises(TypeError, match=r"FunctionOperator: \w+ looks at the values (.|\n)*scipy") as caught:
            build()
        assert "jax.lax.cond" in str(caught.value)
