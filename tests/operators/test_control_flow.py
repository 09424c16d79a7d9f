"""Scans and branches of linear maps: every transformation agrees with the plain loop, and memory stays flat."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from krylov.operators import linear_cond, linear_scan, linear_stack, linear_sum
from tests.operators import transformations
from tests.operators.transformations import assert_close, assert_same, quick_jit, random_like


def under(*which):
    return pytest.mark.parametrize("transformation", which, ids=lambda t: t.__name__)


def array(seed, *shape, dtype=float):
    return random_like(jax.ShapeDtypeStruct(shape, jnp.result_type(dtype)), seed)


def row(tree, k):
    return jax.tree.map(lambda x: x[k], tree)


def plain_scan(f, residuals, init, xs, reverse=False):
    return jax.lax.scan(lambda carry, inputs: f(inputs[0], carry, inputs[1]), init, (residuals, xs), reverse=reverse)


def loop(f, residuals, init, xs):
    """`linear_scan` as a Python loop."""
    carry, ys = init, []
    for k in range(len(jax.tree.leaves((residuals, xs))[0])):
        carry, y = f(row(residuals, k), carry, row(xs, k))
        ys.append(y)
    return carry, jax.tree.map(lambda *y: jnp.stack(y), *ys)


def step(residual, carry, x):
    """Mixed real and complex leaves, an integer residual, everything coupled to everything."""
    a, index = residual["a"], residual["index"]
    z, r = carry
    new = jnp.sin(a) @ z + x["b"] + 1j * a[0] * r[index]
    return (new, r / 2 + (a[0] * x["b"]).real), {"y": z.real * 2, "w": (x["b"] + z) * jnp.exp(a[1])}


def recurrence():
    residuals = {"a": array(1, 3, 3, 3, dtype=complex) / 3, "index": jnp.array([0, 2, 1])}
    return residuals, ((array(2, 3, dtype=complex), array(3, 3)), {"b": array(4, 3, 3, dtype=complex)})


def test_recurrence_agrees_with_a_python_loop():
    residuals, linear = recurrence()
    both = quick_jit(lambda r, x: (linear_scan(step, r, *x), loop(step, r, *x)))
    assert_close(*both(residuals, linear))


@under(
    transformations.transpose_twice,
    transformations.linearize_then_vmap_then_transpose,
    transformations.forward_over_reverse,
)
def test_recurrence_agrees_with_plain_scan(transformation):
    residuals, linear = recurrence()
    f = lambda r, x: linear_scan(step, r, *x)
    assert_same(transformation, f, lambda r, x: plain_scan(step, r, *x), residuals, linear)


def test_small_recurrence_agrees_with_plain_scan_in_reverse_over_reverse():
    residuals, linear = array(1, 4), (array(2), array(3, 4))
    smooth = lambda a, carry, x: (jnp.sin(a) * carry + x, a * carry)
    for transformation in (transformations.reverse_over_reverse, transformations.grad_of_checkpoint):
        f = lambda r, x: linear_scan(smooth, r, *x)
        assert_same(transformation, f, lambda r, x: plain_scan(smooth, r, *x), residuals, linear)


@under(transformations.evaluate, transformations.transpose)
def test_recurrence_run_in_reverse_agrees_with_plain_scan(transformation):
    residuals, linear = recurrence()
    f = lambda r, x: linear_scan(step, r, *x, reverse=True)
    assert_same(transformation, f, lambda r, x: plain_scan(step, r, *x, reverse=True), residuals, linear)


def test_recurrence_without_residuals_or_without_inputs():
    double = lambda _, c, x: (2 * c + (0 if x is None else x), c)
    init, xs = array(1, 2), array(2, 5, 2)
    assert_close(linear_scan(double, None, init, xs), loop(double, None, init, xs))
    carry, path = linear_scan(double, None, init, length=3)
    assert_close((carry, path[2]), (8 * init, 4 * init))
    y = array(3, 2)
    transposed = jax.linear_transpose(lambda c: linear_scan(double, None, c, length=3)[0], init)
    assert_close(transposed(y)[0], 8 * y)


def test_residuals_may_be_keys():
    keys, v, y = jax.random.split(jax.random.key(0), 3), array(1, 4), array(2, 2)
    A = [jax.random.normal(key, (2, 4), v.dtype) for key in keys]
    f = lambda v: linear_sum(lambda key, v: jax.random.normal(key, (2, 4), v.dtype) @ v, keys, v)
    assert_close(f(v), sum(A) @ v)
    assert_close(jax.linear_transpose(f, v)(y)[0], sum(A).T @ y)


def test_zero_steps_return_the_initial_carry():
    carry, path = linear_scan(lambda r, c, x: (r * c + x, c), jnp.zeros(0), jnp.ones(()), jnp.zeros(0))
    assert carry == 1
    assert path.shape == (0,)
    assert_close(linear_sum(lambda r, v: r * v, jnp.zeros((0, 2)), jnp.ones(2)), jnp.zeros(2))


def chunk_product(chunk, v):
    """The product a tangent operator makes: forward through a chunk of rows, and back."""
    rows = jnp.tanh(chunk["rows"])
    out = rows @ v["c"] + v["r"][chunk["index"]]
    return {"c": rows.T @ out, "r": out.real[:2]}


def chunks():
    residuals = {"rows": array(1, 3, 4, 3, dtype=complex), "index": jnp.array([[0, 1, 1, 0]] * 3)}
    return residuals, {"c": array(2, 3, dtype=complex), "r": array(3, 2)}


@under(transformations.transpose_twice, transformations.vmap_then_transpose, transformations.grad)
def test_sum_over_chunks_agrees_with_the_loop(transformation):
    def plain(residuals, v):
        terms = [chunk_product(row(residuals, k), v) for k in range(3)]
        return jax.tree.map(lambda *t: sum(t), *terms)

    assert_same(transformation, lambda r, v: linear_sum(chunk_product, r, v), plain, *chunks())


@under(transformations.transpose, transformations.vmap_grad)
def test_stack_over_chunks_agrees_with_the_loop(transformation):
    def plain(residuals, v):
        return jax.tree.map(lambda *t: jnp.stack(t), *[chunk_product(row(residuals, k), v) for k in range(3)])

    assert_same(transformation, lambda r, v: linear_stack(chunk_product, r, v), plain, *chunks())


@under(transformations.vmap_then_transpose, transformations.grad)
def test_parameters_that_the_step_closes_over_are_differentiated(transformation):
    xs, v = array(1, 4, 3), array(2, 3)

    def product(params, v, total):
        return total(lambda x, v: jnp.outer(jnp.sin(params @ x), x) @ v, xs, v)

    def plain(f, xs, v):
        return sum(f(x, v) for x in xs)

    params = array(3, 2, 3)
    assert_same(transformation, lambda p, v: product(p, v, linear_sum), lambda p, v: product(p, v, plain), params, v)


def test_the_users_operator_jvp_then_vjp_in_batches_transposes():
    """What the library grew out of: a hermitian J^H J accumulated over batches in a scan."""
    J = array(1, 100, 10, dtype=complex)
    batches, v = J.reshape(20, 5, 10), array(2, 10, dtype=complex)

    def batch_product(rows, v):
        model = lambda p: rows @ p
        _, out = jax.jvp(model, (v,), (v,))
        return jax.vjp(model, v)[1](out.conj())[0].conj()

    f = lambda v: linear_sum(batch_product, batches, v)
    S = J.conj().T @ J
    assert_close(quick_jit(f)(v), S @ v, factor=10)
    assert_close(quick_jit(lambda y: jax.linear_transpose(f, v)(y)[0])(v), S.T @ v, factor=10)


def temporary_bytes(f, *args):
    return quick_jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes


def network(params, chunk):
    """One output for each of the rows of a chunk, with activations that are worth not keeping."""
    h = jnp.tanh(chunk @ params["in"])
    h = jnp.sin(h * params["scale"])
    return h @ params["out"]


def gram(chunk, v, params):
    out, push = jax.linearize(lambda p: network(p, chunk), params)
    del out
    return jax.linear_transpose(push, params)(push(v))[0]


def rows(chunk, v, params):
    return jax.jvp(lambda p: network(p, chunk), (params,), (v,))[1]


PRODUCTS = {
    "sum": lambda chunks, params, v: linear_sum(lambda c, v: gram(c, v, params), chunks, v),
    "stack": lambda chunks, params, v: linear_stack(lambda c, v: rows(c, v, params), chunks, v),
}


def problem_of(count):
    params = {"in": (10, 500), "scale": (500,), "out": (500,)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.result_type(float)) for name, shape in params.items()}
    return jax.ShapeDtypeStruct((count, 40, 10), jnp.result_type(float)), params


def loss_of(f):
    def loss(*args):
        return sum(jnp.sum(y**2) for y in jax.tree.leaves(f(*args)))

    return loss


@pytest.mark.parametrize("name", PRODUCTS)
def test_memory_of_64_chunks_is_flat_in_transpose_and_gradients(name):
    f = PRODUCTS[name]
    chunks, params = problem_of(64)
    out = jax.eval_shape(f, chunks, params, params)
    loss = loss_of(f)

    def transposed(chunks, params, y):
        return jax.linear_transpose(lambda v: f(chunks, params, v), params)(y)

    def hessian_vector(*args):
        return jax.jvp(jax.grad(loss, (1, 2)), args, args)[1]

    product = temporary_bytes(f, chunks, params, params)
    derived = {
        "transpose": temporary_bytes(transposed, chunks, params, out),
        "grad in params": temporary_bytes(jax.grad(loss, 1), chunks, params, params),
        "grad in v": temporary_bytes(jax.grad(loss, 2), chunks, params, params),
    }
    assert max(derived.values()) <= 2.5 * product, (product, derived)
    if name == "sum":
        second = [temporary_bytes(hessian_vector, *problem_of(k), params) for k in (2, 64)]
        assert second[1] <= 1.5 * second[0], second


def test_memory_of_the_recurrence_is_flat_in_its_transpose_and_one_carry_a_step_in_gradients():
    def f(chunks, params, v):
        return linear_scan(lambda c, carry, _: (gram(c, carry, params), None), chunks, v)[0]

    def transposed(chunks, params, y):
        return jax.linear_transpose(lambda v: f(chunks, params, v), params)(y)

    chunks, params = problem_of(64)
    product = temporary_bytes(f, chunks, params, params)
    assert temporary_bytes(transposed, chunks, params, params) <= 2.5 * product
    carries = 64 * sum(p.size * p.dtype.itemsize for p in params.values())
    gradients = temporary_bytes(jax.grad(loss_of(f), (1, 2)), chunks, params, params)
    assert gradients <= 3 * product + carries, (product, gradients)


def mesh():
    return jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))


def on_a_mesh(f):
    """``f`` of a shard of the first argument, summed over the mesh."""
    local = lambda r, v: jax.tree.map(lambda y: jax.lax.psum(y, "d"), f(r, v))
    return jax.shard_map(local, mesh=mesh(), in_specs=(P("d"), P()), out_specs=P())


@pytest.mark.parametrize(
    ("name", "transformation"),
    [("sum", transformations.grad), ("scan", transformations.transpose), ("cond", transformations.grad)],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_inside_shard_map(name, transformation):
    rows = array(1, 2 * jax.device_count(), 3, 4)
    v = array(2, 4)
    term = lambda r, v: jnp.sin(r).T @ (r @ v)
    maps = {
        "sum": lambda r, v: linear_sum(term, r, v),
        "scan": lambda r, v: linear_scan(lambda r, c, x: (term(r, c) + x, r @ c), r, v, r[:, 0] * v)[0],
        "cond": lambda r, v: linear_cond(r.sum() > 0, lambda r, v: term(r[0], v), lambda r, v: v, r, v),
    }
    f = maps[name]

    def plain(rows, v):
        return sum(f(rows[2 * i : 2 * i + 2], v) for i in range(jax.device_count()))

    assert_same(transformation, on_a_mesh(f), plain, rows, v)


@pytest.mark.parametrize("sharded", ["the chunks", "what the step closes over"])
def test_a_sharded_sum_transposes_with_one_reduction_and_none_inside_the_loop(sharded):
    rows, v = array(1, 2 * jax.device_count(), 3, 4), array(2, 4)

    def term(r, v):
        return jnp.sin(r).T @ (r @ v)

    def closing_over(scale, v):
        return linear_sum(lambda r, v: scale[0] * term(r, v), rows, v)

    f = on_a_mesh((lambda r, v: linear_sum(term, r, v)) if sharded == "the chunks" else closing_over)
    first = rows if sharded == "the chunks" else array(3, jax.device_count())
    transposed = quick_jit(lambda r, y: jax.linear_transpose(lambda v: f(r, v), v)(y)[0])
    total = sum(jnp.sin(r).T @ r for r in rows)
    scale = 1 if sharded == "the chunks" else first.sum()
    assert_close(transposed(first, v), scale * total.T @ v, factor=10)
    text = transposed.lower(first, v).compile().as_text()
    if jax.device_count() > 1:
        assert text.count(" all-reduce(") == 1
    assert " all-gather(" not in text


def test_scan_refuses_what_it_cannot_run():
    r, v = array(1, 4, 3), array(2, 3)
    with pytest.raises(ValueError, match=r"linear_scan: the number of steps is not clear"):
        linear_scan(lambda r, c, x: (c, x), r, v, jnp.zeros(5))
    with pytest.raises(ValueError, match=r"linear_scan: the number of steps is not clear"):
        linear_scan(lambda r, c, x: (c, x), None, v)
    with pytest.raises(ValueError, match=r"linear_sum: the number of steps is not clear[\s\S]*got       residuals"):
        linear_sum(lambda r, v: v, (r, jnp.zeros(())), v)
    with pytest.raises(TypeError, match=r"linear_scan: the carry that f returns differs[\s\S]*float\d\d\[3,1\]"):
        linear_scan(lambda r, c, x: (c[:, None], x), r, v)
    with pytest.raises(TypeError, match=r"linear_stack: the linear input must be real or complex"):
        linear_stack(lambda r, v: r * v, r, jnp.arange(3))
    with pytest.raises(TypeError, match=r"linear_sum: what f returns must be real or complex"):
        linear_sum(lambda r, v: jnp.sign(v).astype(int), r, v)


# Branches.


def branches():
    def true_fun(residuals, x):
        A, index = residuals
        return {"u": jnp.sin(A) @ x["c"], "v": x["r"][index]}

    def false_fun(residuals, x):
        A, _ = residuals
        return {"u": x["c"] * jnp.exp(A.sum()), "v": (A @ x["c"]).real}

    residuals = (array(1, 3, 3, dtype=complex) / 3, jnp.array([0, 2, 1]))
    return true_fun, false_fun, residuals, {"c": array(2, 3, dtype=complex), "r": array(3, 3)}


@under(
    transformations.vmap_both,
    transformations.transpose,
    transformations.vmap_then_transpose,
    transformations.linearize_then_vmap_then_transpose,
    transformations.vmap_grad,
    transformations.grad_of_checkpoint,
    transformations.reverse_over_reverse,
)
def test_cond_agrees_with_choosing_among_the_branches(transformation):
    true_fun, false_fun, residuals, linear = branches()

    def f(residuals, x):
        # The predicate is vmapped with what it depends on.
        return linear_cond(residuals[0][0, 0].real > 0, true_fun, false_fun, residuals, x)

    def plain(residuals, x):
        pred = residuals[0][0, 0].real > 0
        return jax.tree.map(lambda a, b: jnp.where(pred, a, b), true_fun(residuals, x), false_fun(residuals, x))

    assert_same(transformation, f, plain, residuals, linear)


def gated_layer(cond):
    def layer(pred, params, x):
        return cond(pred, lambda w, x: jnp.tanh(w) @ x, lambda w, x: jnp.sin(w) @ x * jnp.exp(w.sum()), params, x)

    return layer


def plain_layer(preds, w, xs):
    return jnp.where(preds[:, None], xs @ jnp.tanh(w).T, xs @ jnp.sin(w).T * jnp.exp(w.sum()))


@pytest.mark.parametrize("cond", [linear_cond, jax.lax.cond], ids=["linear_cond", "lax.cond"])
def test_linearize_then_vmap_over_predicates_then_transpose(cond):
    """The user's scenario. On JAX alone it fails with `lax.cond`: a rule that lineax brings mends it."""
    layer, params, xs = gated_layer(cond), array(1, 4, 3), array(2, 5, 3)
    preds = jnp.array([True, False, True, True, False])

    def tangent(pred, x, v):
        return jax.linearize(lambda w: layer(pred, w, x), params)[1](v)

    def many(v):
        return jax.vmap(tangent, (0, 0, None))(preds, xs, v)

    dense = quick_jit(jax.jacobian(lambda w: plain_layer(preds, w, xs)))(params)
    y = array(3, 5, 4)
    assert_close(quick_jit(many)(params), jnp.tensordot(dense, params, 2))
    for push in (many, jax.jit(many)):
        transposed = quick_jit(jax.linear_transpose(push, params))
        assert_close(transposed(y)[0], jnp.tensordot(y, dense, 2))


@pytest.mark.parametrize("cond", [linear_cond, jax.lax.cond], ids=["linear_cond", "lax.cond"])
def test_a_network_with_cond_inside_is_vmapped_then_linearized_then_transposed(cond):
    layer, params, xs = gated_layer(cond), array(1, 4, 3), array(2, 5, 3)

    def stacked(w):
        return jax.vmap(lambda x: jnp.sin(layer(x[0] > 0, w, x)))(xs)

    dense = quick_jit(jax.jacobian(lambda w: jnp.sin(plain_layer(xs[:, 0] > 0, w, xs))))(params)
    _, push = jax.linearize(stacked, params)
    assert_close(quick_jit(push)(params), jnp.tensordot(dense, params, 2))
    transposed = quick_jit(jax.linear_transpose(push, params))
    assert_close(transposed(array(3, 5, 4))[0], jnp.tensordot(array(3, 5, 4), dense, 2))


def test_only_the_branch_taken_is_computed():
    calls = []

    def counted(name):
        def branch(_, x):
            jax.debug.callback(lambda: calls.append(name))
            return x

        return branch

    for pred in (True, jnp.array(0), 2.0):
        linear_cond(pred, counted("true"), counted("false"), None, jnp.ones(2))
    jax.effects_barrier()
    assert calls == ["true", "false", "true"]


def test_a_branch_may_ignore_its_input():
    f = lambda pred, x: linear_cond(pred, lambda _, x: jnp.zeros(2), lambda _, x: x[:2], None, x)
    x, y = array(1, 3), array(2, 2)
    assert_close(jax.linear_transpose(lambda x: f(True, x), x)(y)[0], jnp.zeros(3))
    assert_close(jax.linear_transpose(lambda x: f(False, x), x)(y)[0], jnp.append(y, 0))


def test_cond_inside_a_scan_inside_a_cond():
    chunks, v = array(1, 4, 3, 3), array(2, 3)

    def inner(r, v, cond):
        return cond(r[0, 0] > 0, lambda r, v: jnp.sin(r) @ v, lambda r, v: r.T @ v, r, v)

    def f(r, v):
        total = lambda r, v: linear_sum(lambda r, v: inner(r, v, linear_cond), r, v)
        return linear_cond(r.sum() > 0, total, lambda r, v: v, r, v)

    def plain(r, v):
        total = sum(inner(rk, v, lambda p, t, f, r, v: jnp.where(p, t(r, v), f(r, v))) for rk in r)
        return jnp.where(r.sum() > 0, total, v)

    for transformation in (transformations.vmap_then_transpose, transformations.vmap_grad):
        assert_same(transformation, f, plain, chunks, v)


def test_cond_refuses_bad_arguments():
    x = array(1, 3)
    same = lambda _, x: x
    with pytest.raises(TypeError, match=r"linear_cond: pred must be a scalar[\s\S]*bool\[2\]"):
        linear_cond(jnp.array([True, False]), same, same, None, x)
    with pytest.raises(TypeError, match=r"linear_cond: the branches return different structures[\s\S]*\[2\]"):
        jax.eval_shape(lambda p, x: linear_cond(p, same, lambda _, x: x[:2], None, x), True, x)
    with pytest.raises(TypeError, match=r"linear_cond: the linear input must be real or complex"):
        linear_cond(True, same, same, None, jnp.arange(3))
