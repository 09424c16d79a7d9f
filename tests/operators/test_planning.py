"""What is planned for a Jacobian is what it then takes, and what is chosen is what is planned."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import krylov
from krylov.operators import max_pool
from krylov.operators.device_memory import free_memory, parse_bytes
from tests import networks

FLOAT = jnp.result_type(float)


def perceptron(params, x):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def layers(*widths):
    return [
        {"w": jnp.cos(jnp.arange(a * b, dtype=FLOAT)).reshape(a, b) / a**0.5, "b": jnp.zeros(b, FLOAT)}
        for a, b in itertools.pairwise(widths)
    ]


def pooled(params, x):
    axes = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(x.reshape(-1, 8, 8, 1), params["kernel"], (1, 1), "SAME", dimension_numbers=axes)
    return max_pool(jax.nn.gelu(x), (2, 2), (2, 2)).sum((1, 2, 3)) * params["scale"]


def recurrent(params, x):
    step = lambda state, column: (jnp.tanh(state @ params["w"] + column[:, None]), None)
    return jax.lax.scan(step, jnp.zeros((len(x), 16), x.dtype), x.T)[0].sum(-1)


def samples(count, sites):
    return jnp.sin(jnp.arange(count * sites, dtype=FLOAT)).reshape(count, sites)


def systems():
    spins = jnp.sign(samples(512, 20))
    rbm = {
        "Dense": {"kernel": jnp.full((20, 40), 0.1 + 0.1j), "bias": jnp.full(40, 0.1j)},
        "visible_bias": jnp.full(20, 0.1j),
    }
    return {
        "perceptron": (perceptron, layers(32, 64, 64, 3), samples(512, 32), {"center": True}),
        "wide": (perceptron, layers(64, 256, 1), samples(128, 64), {}),
        "pooled": (pooled, {"kernel": jnp.ones((3, 3, 1, 4)), "scale": jnp.ones(())}, samples(512, 64), {}),
        "recurrent": (recurrent, {"w": jnp.eye(16) / 2}, samples(256, 10), {"center": True}),
        "rbm": (networks.rbm, rbm, spins, {"center": True, "holomorphic": True}),
        "not holomorphic": (lambda p, x: networks.rbm(p, x).real, rbm, spins, {"center": True}),
    }


def temporary(J):
    vector = jax.tree.map(jnp.ones_like, J.params)
    compiled = jax.jit(lambda S, v: S @ v).lower(J.gram(), vector).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def check(planned, J):
    """Kept bytes are exact; temporary ones neither a quarter below nor twice above."""
    kept = sum(x.nbytes for x in jax.tree.leaves((J.storage, J.mean_rows)))
    assert planned.kept_bytes == kept
    assert 0.75 <= planned.temporary_bytes / temporary(J) <= 2.0


QUICK = ("perceptron",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in systems()])
def test_bytes_are_what_the_operator_keeps_and_xla_reserves(name):
    f, params, x, options = systems()[name]
    J = krylov.Jacobian(f, params, x, **options)
    table = krylov.plan(J, "1GiB")
    for planned in table.candidates:
        if planned.storage == "dense" or planned.chunk_size in (64, len(x)):
            check(planned, J.rebuilt(planned.storage, planned.chunk_size))


@pytest.mark.slow
def test_bytes_of_a_trained_transformer():
    params, x, _ = networks.trained_vit(256)
    J = krylov.Jacobian(networks.vit, params, x, center=True)
    for planned in krylov.plan(J, "1GiB").candidates:
        if (planned.storage, planned.chunk_size) in (("recompute", 64), ("linearized", 256)):
            check(planned, J.rebuilt(planned.storage, planned.chunk_size))


def test_bytes_kept_are_exact_where_chunks_do_not_divide_the_samples():
    J = krylov.Jacobian(perceptron, layers(8, 5, 2), samples(1001, 8), center=True)
    for planned in krylov.plan(J, "1GiB").candidates:
        other = J.rebuilt(planned.storage, planned.chunk_size)
        assert planned.chunk_size == other.chunk_size
        assert planned.kept_bytes == sum(x.nbytes for x in jax.tree.leaves((other.storage, other.mean_rows)))


@pytest.mark.slow
def test_bytes_between_traced_chunk_sizes_are_those_of_that_size():
    f, params, x, options = systems()["perceptron"]
    J = krylov.Jacobian(f, params, x, **options)
    between = [c for c in krylov.plan(J).candidates if c.chunk_size == 64 and c.storage != "dense"]
    # Traced by itself, being the only size that there is to look at.
    alone = [c for c in krylov.plan(J.with_chunk_size(64)).candidates if c.chunk_size == 64 and c.storage != "dense"]
    for interpolated, traced in zip(between, alone, strict=True):
        assert interpolated.kept_bytes == traced.kept_bytes
        assert interpolated.flops == pytest.approx(traced.flops, rel=0.05)


@pytest.mark.slow
def test_operations_are_those_of_the_matrix_products():
    """Each product with a layer's matrix, in the pass forward and, twice for what hangs on it, in the other two."""
    J = krylov.Jacobian(perceptron, layers(64, 256, 1), samples(128, 64))
    first, last = 2 * 128 * 64 * 256, 2 * 128 * 256
    planned = {c.storage: c for c in krylov.plan(J).candidates if c.storage == "dense" or c.chunk_size == 128}
    forward, push, pull = first + last, first + 2 * last, first + 2 * last
    assert planned["recompute"].flops == pytest.approx(forward + push + pull, rel=0.1)
    assert planned["linearized"].flops == pytest.approx(push + pull, rel=0.1)
    assert planned["dense"].flops == pytest.approx(4 * 128 * (64 * 256 + 2 * 256 + 1), rel=0.1)


def test_a_tight_budget_is_kept_and_a_hopeless_one_met_as_well_as_can_be():
    J = krylov.Jacobian(perceptron, layers(32, 64, 64, 3), samples(4096, 32), center=True)
    loose, tight, hopeless = (krylov.plan(J, memory) for memory in ("1GiB", "1MiB", 100))
    assert tight.fits(tight.best) and tight.best.storage == "recompute" and tight.best.chunk_size < 4096
    assert loose.fits(loose.best) and loose.best.cost < tight.best.cost
    assert not hopeless.fits(hopeless.best)
    assert hopeless.best.kept_bytes + hopeless.best.temporary_bytes == min(
        c.kept_bytes + c.temporary_bytes for c in hopeless.candidates
    )
    printed = str(tight)
    assert "<- best" in printed and "too large" in printed and "1.0 MiB" in printed


@pytest.mark.slow
def test_auto_takes_what_is_planned_and_the_same_map():
    f, params, x, options = systems()["perceptron"]
    plain = krylov.Jacobian(f, params, x, **options)
    J = krylov.Jacobian(f, params, x, chunk_size="auto", storage="auto", **options)
    best = krylov.plan(plain, free_memory() // 2).best
    assert (J.storage.name, J.chunk_size) == (best.storage, best.chunk_size)
    fixed = krylov.Jacobian(f, params, x, chunk_size=100, storage="auto", **options)
    assert fixed.chunk_size == 86  # six chunks of 512 samples
    assert plain.with_storage("auto").storage.name in ("recompute", "linearized", "dense")
    assert plain.with_chunk_size("auto").storage.name == "recompute"
    v = jax.tree.map(jnp.cos, plain.params)
    for other in (J, fixed, plain.with_chunk_size(100), plain.with_chunk_size(None)):
        for got, right in zip(jax.tree.leaves(other.gram() @ v), jax.tree.leaves(plain.gram() @ v), strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-4 * float(jnp.abs(right).max()))


def test_auto_compiles_once_for_a_network_whatever_its_parameters():
    traces = 0

    @eqx.filter_jit
    def product(S, v):
        nonlocal traces
        traces += 1
        return S @ v

    first = layers(16, 8, 1)
    for params in (first, jax.tree.map(jnp.cos, first)):
        J = krylov.Jacobian(perceptron, params, samples(64, 16), chunk_size="auto", storage="auto")
        product(J.gram(), J.params)
    assert traces == 1
    under_jit = jax.jit(lambda p, x: krylov.Jacobian(perceptron, p, x, chunk_size="auto", storage="auto").gram() @ p)
    for got, right in zip(jax.tree.leaves(under_jit(J.params, samples(64, 16))), jax.tree.leaves(J.gram() @ J.params)):
        np.testing.assert_allclose(got, right, rtol=1e-4)


@pytest.mark.slow
def test_each_device_keeps_its_part():
    x = samples(512, 32)
    mesh = jax.make_mesh((8,), ("devices",), axis_types=(AxisType.Auto,))
    spread = jax.device_put(x, NamedSharding(mesh, P("devices")))
    J, alone = (krylov.Jacobian(perceptron, layers(32, 16, 1), s, center=True) for s in (spread, x[:64]))
    for here, one in zip(krylov.plan(J, "1GiB").candidates, krylov.plan(alone, "1GiB").candidates, strict=True):
        assert (here.storage, here.chunk_size, here.kept_bytes) == (one.storage, one.chunk_size, one.kept_bytes)


@pytest.mark.slow
def test_tuned_operators_are_the_same_map_with_the_fastest_of_the_measured():
    f, params, x, options = systems()["perceptron"]
    plain = krylov.Jacobian(f, params, x, **options)
    J, table = krylov.tune(plain, "1GiB")
    assert table.measured and {c.storage for c in table.candidates} == {"recompute", "linearized", "dense"}
    assert table.best.cost == min(c.cost for c in table.candidates)
    assert (J.storage.name, J.chunk_size) == (table.best.storage, table.best.chunk_size)
    v = jax.tree.map(jnp.cos, plain.params)
    for got, right in zip(jax.tree.leaves(J.gram() @ v), jax.tree.leaves(plain.gram() @ v), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-4 * float(jnp.abs(right).max()))
    recomputed, small = krylov.tune(plain, 400_000)
    assert recomputed.storage.name == "recompute" and small.fits(small.best)


def test_sizes_of_memory():
    for text, count in (
        ("2GiB", 2 << 30),
        ("500 MB", 500_000_000),
        ("1.5kib", 1536),
        ("7", 7),
        ("7B", 7),
        (1e6, 10**6),
    ):
        assert parse_bytes("plan", text) == count
    for wrong in ("2 gigs", "GiB", 0, -1, None, True, float("nan"), float("inf"), "-1GiB", [1]):
        with pytest.raises(ValueError, match="plan: memory must be a positive number of bytes"):
            parse_bytes("plan", wrong)
    assert free_memory() > 0


def test_what_cannot_be_planned_is_said_so():
    J = krylov.Jacobian(perceptron, layers(4, 2, 1), samples(8, 4))
    for ask in (krylov.plan, krylov.tune):
        with pytest.raises(TypeError, match=r"J must be a krylov\.Jacobian, not GramOperator"):
            ask(J.gram())
    with pytest.raises(ValueError, match="tune: cannot measure under jit"):
        jax.jit(lambda p: krylov.tune(krylov.Jacobian(perceptron, p, samples(8, 4))))(J.params)
    with pytest.raises(ValueError, match="'auto'"):
        krylov.Jacobian(perceptron, J.params, samples(8, 4), chunk_size="automatic")


def test_a_few_samples_are_one_chunk():
    J = krylov.Jacobian(perceptron, layers(4, 2, 1), samples(20, 4), chunk_size="auto")
    assert (J.storage.name, J.chunk_size) == ("recompute", 20)
