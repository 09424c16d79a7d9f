"""Products of a real and a complex factor become two real ones, with the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params

from krylov.operators import Jacobian
from krylov.operators.real_factors import real_factors_apart
from tests.operators.networks import COMPLEX, FLOAT
from tests.operators.zoo import normal

RNG = np.random.default_rng(0)
X, W = normal(RNG, FLOAT, 6, 4), normal(RNG, COMPLEX, 4, 3)
IMAGE, KERNEL = normal(RNG, FLOAT, 2, 5, 5, 3), normal(RNG, COMPLEX, 3, 3, 3, 4)
BATCH = normal(RNG, COMPLEX, 3, 2, 5)


def convolution(x, k):
    x = x.astype(k.dtype)
    return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


PRODUCTS = {
    "real on the left": (lambda x, w: x @ w, X, W),
    "real on the right": (lambda x, w: w @ x, normal(RNG, FLOAT, 3, 2), W),
    "converted": (lambda x, w: jax.lax.dot(x.astype(w.dtype), w), X, W),
    "integers": (lambda x, w: x.astype(w.dtype) @ w, np.sign(X).astype(np.int8), W),
    "jitted": (lambda x, w: jax.jit(jnp.matmul)(x, w) @ w[:3], X, W),
    "with batches": (lambda x, w: jnp.einsum("bij,kj->bik", w, x), normal(RNG, FLOAT, 6, 5), BATCH),
    "convolution": (convolution, IMAGE, KERNEL),
}
UNTOUCHED = {
    "real": (lambda x, w: x @ w.real, X, W),
    "complex": (lambda x, w: (1j * x) @ w, X, W),
    "both converted": (lambda x, w: x.astype(w.dtype) @ w.real.astype(w.dtype), X, W),
}


def complex_products_of_a_real_factor(jaxpr):
    """Those that multiply by zeros."""
    count, real = 0, {v for v in jaxpr.invars if not jnp.iscomplexobj(v.aval)}
    for eqn in jaxpr.eqns:
        count += sum(map(complex_products_of_a_real_factor, jaxprs_in_params(eqn.params)))
        complex_out = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.complexfloating)
        if eqn.primitive.name == "convert_element_type" and eqn.invars[0] in real:
            real.add(eqn.outvars[0])
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            count += complex_out and any(v in real for v in eqn.invars)
    return count


def rewritten(f, *args):
    closed = jax.make_jaxpr(f)(*args)
    return closed, closed.replace(jaxpr=real_factors_apart(closed.jaxpr))


@pytest.mark.parametrize("name", PRODUCTS)
def test_results_stay_and_no_zeros_are_multiplied(name):
    f, *args = PRODUCTS[name]
    before, after = rewritten(f, *args)
    assert complex_products_of_a_real_factor(before.jaxpr) > 0
    assert complex_products_of_a_real_factor(after.jaxpr) == 0
    (found,) = jaxpr_as_fun(after)(*args)
    expected = f(*args)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, atol=30 * float(jnp.finfo(found.dtype).eps) * np.abs(expected).max())


@pytest.mark.parametrize("name", UNTOUCHED)
def test_other_products_are_left_alone(name):
    before, after = rewritten(*UNTOUCHED[name])
    assert str(before) == str(after)


def test_a_jacobian_multiplies_real_samples_apart():
    J = Jacobian(lambda w, x: jnp.sum(jnp.tanh(x @ w), axis=-1), jnp.asarray(W), X, holomorphic=True)
    assert complex_products_of_a_real_factor(J.network.jaxpr) == 0
    rows = jax.jacfwd(lambda w: jnp.sum(jnp.tanh(X @ w), axis=-1), holomorphic=True)(jnp.asarray(W)).reshape(6, -1)
    rows = rows / np.sqrt(6)
    for found, expected in ((J.as_matrix(), rows), (J.gram().as_matrix(), rows.conj().T @ rows)):
        tolerance = 30 * float(jnp.finfo(FLOAT).eps) * np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
