"""`linear_call` behaves under every transformation as the function it calls, and uses the transpose it was given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from krylov.operators import linear_call
from krylov.operators.linear_call import closed_linear_call
from tests.operators import transformations
from tests.operators.transformations import assert_close, assert_same, random_like


def array(seed, *shape, dtype=None):
    return random_like(jax.ShapeDtypeStruct(shape, dtype or jnp.result_type(float)), seed)


def real_matrix():
    def fun(A, x):
        return jnp.sin(A) @ x

    def fun_transpose(A, y):
        return jnp.sin(A).T @ y

    return fun, fun_transpose, array(1, 4, 3), array(2, 3)


def mixed_trees():
    """Real and complex leaves, an integer residual, several inputs and outputs."""

    def fun(residuals, x):
        a, (rows, scale) = residuals["a"], residuals["rest"]
        real = (a @ x["c"]).real * scale + x["r"][rows]
        return {"u": real, "v": (jnp.exp(a.imag) @ x["r"].astype(a.dtype), 2 * x["c"])}

    def fun_transpose(residuals, y):
        a, (rows, scale) = residuals["a"], residuals["rest"]
        u, (v, w) = y["u"], y["v"]
        # The transpose of the real part is the inclusion of the reals.
        c = a.T @ (scale * u).astype(a.dtype) + 2 * w
        r = jnp.zeros(3, u.dtype).at[rows].add(u) + (jnp.exp(a.imag).T @ v).real
        return {"c": c, "r": r}

    a = array(1, 3, 3, dtype=jnp.result_type(complex))
    residuals = {"a": a, "rest": [jnp.array([0, 2, 0]), array(2, 3)]}
    return fun, fun_transpose, residuals, {"c": array(3, 3, dtype=a.dtype), "r": array(4, 3)}


@pytest.mark.parametrize("transformation", transformations.ALL, ids=lambda t: t.__name__)
def test_every_transformation_agrees_with_the_plain_function(transformation):
    fun, fun_transpose, residuals, linear = mixed_trees()
    assert_same(transformation, lambda r, x: linear_call(fun, fun_transpose, r, x), fun, residuals, linear)


@pytest.mark.parametrize("transformation", transformations.OF_LINEAR, ids=lambda t: t.__name__)
def test_closed_form_with_lazy_transpose_agrees_too(transformation):
    fun, fun_transpose, residuals, linear = mixed_trees()
    assert_same(transformation, lambda r, x: closed_linear_call(fun, fun_transpose, r, x), fun, residuals, linear)


@pytest.mark.parametrize(
    "transformation", [transformations.transpose, transformations.grad, transformations.forward_over_reverse]
)
def test_eager_agrees_with_the_plain_function(transformation):
    fun, fun_transpose, residuals, linear = real_matrix()
    assert_same(transformation, lambda r, x: linear_call(fun, fun_transpose, r, x), fun, residuals, linear, jit=False)


def test_a_map_that_is_its_own_adjoint_needs_no_transpose():
    a = array(1, 3, 3, dtype=jnp.result_type(complex))

    def fun(a, x):
        return (a + a.conj().T) @ x

    x = array(2, 3, dtype=a.dtype)
    for transformation in (transformations.transpose, transformations.transpose_twice, transformations.grad):
        assert_same(transformation, lambda r, x: closed_linear_call(fun, None, r, x), fun, a, x)


def test_the_given_transpose_is_used_and_the_callee_is_not_transposed():
    A, x = array(1, 4, 3), array(2, 3)
    call = lambda x: linear_call(lambda A, x: A @ x, lambda A, y: 2 * (A.T @ y), A, x)
    y = array(3, 4)
    for vmapped in (False, True):
        f = (lambda x: jax.vmap(call)(x[None])[0]) if vmapped else call
        assert_close(jax.linear_transpose(f, x)(y)[0], 2 * (A.T @ y))
        assert_close(jax.vjp(f, x)[1](y)[0], 2 * (A.T @ y))
        twice = jax.linear_transpose(lambda y, f=f: jax.linear_transpose(f, x)(y)[0], y)
        assert_close(twice(x)[0], A @ x)


def test_closed_over_tracers_count_as_residuals():
    A, B, x = array(1, 4, 3), array(2, 3, 3), array(3, 3)

    def plain(residuals, x):
        A, B = residuals
        return A @ (jnp.sin(B) @ x)

    def captured(residuals, x):
        A, B = residuals
        S = jnp.sin(B)
        return linear_call(lambda A, x: A @ (S @ x), lambda A, y: S.T @ (A.T @ y), A, x)

    for transformation in (*transformations.OF_LINEAR, transformations.forward_over_reverse):
        assert_same(transformation, captured, plain, (A, B), x)


def test_constants_closed_over_inside_jit_are_not_stale():
    x = array(1, 3)

    def product(scale):
        return jax.linear_transpose(lambda x: linear_call(lambda _, x: scale * x, lambda _, y: scale * y, None, x), x)

    assert_close([product(s)(x)[0] for s in (2.0, 3.0)], [2 * x, 3 * x])


def test_what_is_not_batched_stays_so_inside_vmap():
    """`jax.hessian` needs it: there the values are the same for all tangents."""
    fun, fun_transpose, A, x = real_matrix()
    hessian = jax.hessian(lambda x: jnp.sum(linear_call(fun, fun_transpose, A, x) ** 2))(x)
    assert_close(hessian, 2 * jnp.sin(A).T @ jnp.sin(A))


def test_transposed_in_a_residual_it_is_linear_in():
    A, x, y = array(1, 4, 3), array(2, 3), array(3, 4)

    def call(A, x):
        return linear_call(lambda A, x: A @ x, lambda A, y: A.T @ y, A, x)

    assert_close(jax.linear_transpose(lambda A: call(A, x), A)(y)[0], jnp.outer(y, x))
    many = jax.linear_transpose(lambda A: jax.vmap(call, (None, 0))(A, jnp.stack([x, 2 * x])), A)
    assert_close(many(jnp.stack([y, y]))[0], 3 * jnp.outer(y, x))


def test_inside_custom_linear_solve_values_and_derivatives_agree_with_dense():
    A, b = array(1, 4, 4) / 4 + 2 * jnp.eye(4), array(2, 4)

    def solve(A, b):
        def matvec(x):
            return linear_call(lambda A, x: A @ x, lambda A, y: A.T @ y, A, x)

        return jax.lax.custom_linear_solve(
            matvec,
            b,
            solve=lambda _, b: jnp.linalg.solve(A, b),
            transpose_solve=lambda _, b: jnp.linalg.solve(A.T, b),
        )

    # `solve` is linear in b, nonlinear in A: the table applies as it stands.
    for transformation in (
        transformations.evaluate,
        transformations.transpose,
        transformations.grad,
        transformations.vmap_both,
        transformations.forward_over_reverse,
    ):
        assert_same(transformation, solve, jnp.linalg.solve, A, b, factor=20)


def test_inside_shard_map_over_a_mesh():
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))
    A, x = array(1, 2 * jax.device_count(), 3), array(2, 3)

    def sharded(call):
        def product(A, x):
            x = jax.lax.pcast(x, ("d",), to="varying")
            return call(lambda A, x: jnp.sin(A) @ x, lambda A, y: jnp.sin(A).T @ y, A, x)

        return jax.shard_map(product, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))

    for call in (linear_call, closed_linear_call):
        for transformation in (
            transformations.evaluate,
            transformations.transpose,
            transformations.transpose_then_vmap,
            transformations.grad,
            transformations.forward_over_reverse,
        ):
            assert_same(transformation, sharded(call), lambda A, x: jnp.sin(A) @ x, A, x)


def test_linear_in_a_residual_inside_shard_map():
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))
    A, x = array(1, 2 * jax.device_count(), 3), array(2, 3)
    y = array(3, A.shape[0])

    def product(A, x):
        x = jax.lax.pcast(x, ("d",), to="varying")
        return linear_call(lambda A, x: A @ x, lambda A, y: A.T @ y, A, x)

    sharded = jax.shard_map(product, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    assert_close(jax.linear_transpose(lambda A: sharded(A, x), A)(y)[0], jnp.outer(y, x))


def test_a_transpose_of_another_structure_is_refused_at_trace_time():
    A, x = array(1, 4, 3), array(2, 3)
    with pytest.raises(TypeError, match=r"fun_transpose does not return what fun takes") as info:
        jax.eval_shape(lambda x: linear_call(lambda A, x: A @ x, lambda A, y: y, A, x), x)
    message = str(info.value)
    assert f"got       {np.dtype(x.dtype).name}[4]" in message
    assert f"expected  {np.dtype(x.dtype).name}[3]" in message


def test_the_closed_form_refuses_captured_tracers():
    A, x = array(1, 3, 3), array(2, 3)
    with pytest.raises(TypeError, match="pass them among the residuals"):
        jax.jit(lambda A: closed_linear_call(lambda _, x: A @ x, lambda _, y: A.T @ y, None, x))(A)


def test_residuals_may_be_integers_booleans_and_keys():
    residuals = (jnp.array([2, 0, 1]), jnp.array([True, False, True]), jax.random.key(0))

    def fun(residuals, x):
        order, keep, key = residuals
        return jnp.where(keep, x[order], 0) * jax.random.normal(key, (3,), x.dtype)

    def fun_transpose(residuals, y):
        order, keep, key = residuals
        return jnp.zeros_like(y).at[order].set(jnp.where(keep, y * jax.random.normal(key, (3,), y.dtype), 0))

    x, y = array(1, 3), array(2, 3)
    call = lambda x: linear_call(fun, fun_transpose, residuals, x)
    assert_close(jax.jit(call)(x), fun(residuals, x))
    assert_close(jax.linear_transpose(call, x)(y)[0], fun_transpose(residuals, y))
    loss = lambda f: jax.grad(lambda x: jnp.sum(f(x) ** 2))(x)
    assert_close(loss(call), loss(lambda x: fun(residuals, x)))
