"""Samples spread over a mesh give the same products as on one device, with one all-reduce and no all-gather."""

import os
import re
import socket
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import krylov
from krylov.operators import Jacobian
from tests.conftest import X64
from tests.operators.zoo import flat

slow = pytest.mark.slow
N = 8 * 11
TOLERANCE = 1e-11 if X64 else 1e-4


def f(params, x):
    """Complex output of a mixed tree, through a scan, whose carry tells whether types of mesh axes get in the way."""
    h = jnp.tanh(x @ params["w"] + params["b"])
    h, _ = jax.lax.scan(lambda h, kernel: (jnp.tanh(h @ kernel), None), h, params["deep"])
    return (h @ params["out"]).sum(-1) + 1j * jnp.maximum(h, 0.0).sum(-1)


def system():
    rng = np.random.default_rng(0)
    dtype = np.float64 if X64 else np.float32
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape).astype(dtype))
    out = normal(5, 2) + 0.5j * normal(5, 2)
    params = {"w": normal(6, 5), "b": jnp.zeros(5, dtype), "deep": normal(3, 5, 5), "out": out}
    return params, normal(N, 6), jnp.abs(normal(N)), normal(N) + 1j * normal(N)


def spread(kind, axes, *arrays):
    """A mesh of eight devices, and the arrays with their first axis spread over some of its axes."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    return mesh, jax.device_put(arrays, NamedSharding(mesh, P(axes)))


def assert_same(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * max(1.0, np.abs(b).max()))


@pytest.mark.parametrize("storage", ["recompute", pytest.param("dense", marks=slow)])
def test_inside_shard_map_it_is_that_of_the_devices_own_samples(storage):
    network = lambda params, x: jnp.tanh(x @ params).sum(-1)
    params, samples = jnp.ones((3, 4)), jnp.linspace(-1, 1, 8 * 12).reshape(32, 3)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))

    def local(params, samples):
        J = Jacobian(network, params, samples, center=True, chunk_size=3, storage=storage)
        return krylov.solve(J.gram(), params, shift=1.0, rtol=1e-6).x[None]

    def on_each(check):
        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("a")), out_specs=P("a"), check_vma=check)

    expected = [local(params, part)[0] for part in samples.reshape(8, 4, 3)]
    np.testing.assert_allclose(on_each(False)(params, samples), expected, rtol=1e-4)
    with pytest.raises(ValueError, match=r"Pass check_vma=False to jax\.shard_map"):
        on_each(True)(params, samples)


CASES = [
    ("Explicit", "recompute", ("a", "b")),
    pytest.param("Auto", "recompute", "a", marks=slow),
    pytest.param("Auto", "linearized", ("a", "b"), marks=slow),
    pytest.param("Explicit", "dense", ("a", "b"), marks=slow),
]


@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=slow)])
def test_under_the_mesh_of_the_context(kind):
    """Made and used inside ``jax.set_mesh``, eagerly, under jit and under grad."""
    weights = jnp.ones((3, 4))
    network = lambda params, x: jnp.tanh(x @ params).sum(-1)
    mesh, samples = spread(AxisType[kind], ("a", "b"), jnp.linspace(-1, 1, 3 * N).reshape(N, 3))
    product = lambda params, x: Jacobian(network, params, x, center=True, chunk_size=4).gram() @ jnp.ones((3, 4))
    expected = product(weights, jax.device_get(samples[0]))
    with jax.set_mesh(mesh):
        replicated = jax.device_put(weights, NamedSharding(mesh, P()))
        assert_same(product(replicated, samples[0]), expected)
        assert_same(jax.jit(product)(replicated, samples[0]), expected)
        by_scale = jax.grad(lambda scale: (scale * product(replicated, samples[0])).sum())
        assert_same(by_scale(1.0), expected.sum())


@pytest.mark.parametrize("kind, storage, axes", CASES)
def test_all_products(kind, storage, axes):
    params, samples, weights, values = system()
    options = dict(center=True, chunk_size=4)
    alone = Jacobian(f, params, samples, weights=weights, **options)
    mesh, (samples, weights, spread_values) = spread(AxisType[kind], axes, samples, weights, values)
    replicated = jax.device_put(params, NamedSharding(mesh, P()))
    J = Jacobian(f, replicated, samples, weights=weights, storage=storage, **options)

    def everything(J, v, y):
        S = J.gram()
        b = J.H @ J.sample_vector(y)
        sol = krylov.solve(S, b, "cg", shift=0.01, rtol=1e-12 if X64 else 1e-6)
        return J @ v, S @ v, J.cogram() @ y, b, S.diagonal(), sol.x

    found = jax.jit(everything)(J, replicated, spread_values)
    assert found[0].sharding.spec[0] == axes
    *exact, x = found
    *expected, expected_x = jax.jit(everything)(alone, params, values)
    assert_same(exact, expected)
    tolerance = 1e-7 if X64 else 0.05
    np.testing.assert_allclose(
        flat(jax.device_get(x)), flat(expected_x), atol=tolerance * np.abs(flat(expected_x)).max()
    )

    program = jax.jit(lambda S, v: S @ v).lower(J.gram(), replicated).compile().as_text()
    count = lambda name: len(re.findall(rf"= \S+ {name}(?:-start)?\(", program))
    assert count("all-reduce") == 1
    assert count("all-gather") == count("all-to-all") == count("collective-permute") == 0


@pytest.mark.parametrize(
    "kind, storage",
    [
        pytest.param("Explicit", "recompute", marks=slow),
        pytest.param("Auto", "linearized", marks=slow),
        pytest.param("Explicit", "dense", marks=slow),
    ],
)
def test_gradients_in_parameters(kind, storage):
    params, samples, weights, values = system()

    def loss(params, samples, weights, values, storage):
        J = Jacobian(f, params, samples, weights=weights, center=True, chunk_size=4, storage=storage)
        step = J.gram() @ (J.H @ J.sample_vector(values))
        return sum(jnp.sum(jnp.abs(x) ** 2) for x in jax.tree.leaves(step))

    gradient = jax.grad(loss, (0, 2))
    expected = jax.jit(gradient, static_argnums=4)(params, samples, weights, values, "recompute")
    mesh, arrays = spread(AxisType[kind], ("a", "b"), samples, weights, values)
    replicated = jax.device_put(params, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        if kind == "Explicit":  # under jit only Explicit meshes tell how samples are spread
            found = jax.jit(gradient, static_argnums=4)(replicated, *arrays, storage)
        else:
            found = gradient(replicated, *arrays, storage)
    size = max(float(np.abs(np.asarray(leaf)).max()) for leaf in jax.tree.leaves(expected))
    scaled = lambda tree: jax.tree.map(lambda x: np.asarray(x) / size, tree)
    assert_same(scaled(found), scaled(expected))


def test_samples_that_see_each_other_are_refused_on_a_mesh():
    _, (samples,) = spread(AxisType.Auto, ("a", "b"), system()[1])
    with pytest.raises(ValueError, match="depend on which samples are evaluated together"):
        Jacobian(lambda p, x: x @ p - (x @ p).mean(), jnp.ones(6), samples)


def test_leaves_that_are_spread_in_different_ways_are_refused():
    mesh, (samples,) = spread(AxisType.Auto, ("a", "b"), system()[1])
    other = jax.device_put(samples, NamedSharding(mesh, P("a")))
    with pytest.raises(ValueError, match="must be sharded alike"):
        Jacobian(lambda p, x: x[0] @ p + x[1] @ p, jnp.ones(6), (samples, other))


PROCESS = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import krylov

rank, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
assert jax.device_count() == 4 and jax.local_device_count() == 2
mesh = jax.make_mesh((4,), ("samples",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)
samples, energies = rng.normal(size=(44, 6)).astype("f"), rng.normal(size=44).astype("f")
params = {"w": rng.normal(size=(6, 5)).astype("f"), "out": rng.normal(size=5).astype("f")}
f = lambda p, x: jnp.tanh(x @ p["w"]) @ p["out"]
options = dict(center=True, chunk_size=4)

def step(J, energies):
    return krylov.solve(J.gram(), J.H @ J.sample_vector(energies), "cg", shift=0.01, rtol=1e-6)

expected = step(krylov.Jacobian(f, params, samples, **options), energies)
sharding = NamedSharding(mesh, P("samples"))
spread = lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
replicated = jax.tree.map(
    lambda x: jax.make_array_from_callback(x.shape, NamedSharding(mesh, P()), lambda index: x[index]), params
)
found = step(krylov.Jacobian(f, replicated, spread(samples), **options), spread(energies))
for a, b in zip(jax.tree.leaves(found.x), jax.tree.leaves(expected.x)):
    np.testing.assert_allclose(np.asarray(a.addressable_data(0)), b, atol=2e-3 * float(jnp.abs(b).max()))
assert int(found.status_code.addressable_data(0)) == krylov.Status.CONVERGED
"""


@slow
def test_two_processes_solve_one_system(tmp_path):
    script = tmp_path / "process.py"
    script.write_text(textwrap.dedent(PROCESS))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(script)]
    processes = [
        subprocess.Popen([*command, str(rank), port], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0].decode() for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
