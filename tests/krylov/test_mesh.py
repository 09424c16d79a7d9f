"""Vectors and matrices spread over the devices of a mesh are solved like those on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import krylov
from krylov import Status
from krylov.operators import DiagonalOperator, FunctionOperator, MatrixOperator
from tests import problems
from tests.problems import eps, norm, wide

N = 16
MESHES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh_of(kind):
    return jax.make_mesh((8,), ("devices",), axis_types=(MESHES[kind],))


def on_each_mesh(methods, *quick):
    return [
        pytest.param(
            method,
            kind,
            marks=[] if method in quick else [pytest.mark.slow],
        )
        for method in methods
        for kind in MESHES
    ]


@pytest.mark.parametrize("method, kind", on_each_mesh(("cg", "gmres", "lu"), "cg"))
def test_sharded_system_gives_the_same_answer(method, kind):
    A, b = problems.suited(method, "float32", N)
    mesh = mesh_of(kind)
    rows, vector = NamedSharding(mesh, P("devices", None)), NamedSharding(mesh, P("devices"))

    def solve(A, b):
        # The product leaves its result spread over the devices as its argument is.
        op = MatrixOperator(A, hermitian=method in problems.HERMITIAN_METHODS)
        return krylov.solve(op, b, method)

    alone = jax.jit(solve)(A, b)
    with jax.set_mesh(mesh):
        spread = jax.jit(solve)(jax.device_put(A, rows), jax.device_put(b, vector))
    assert spread.status is Status.CONVERGED
    assert norm(wide(spread.x) - wide(alone.x)) <= 1e3 * eps("float32") * norm(alone.x)


@pytest.mark.parametrize("method", problems.slow_but(("cg", "fcg", "gmres", "bicgstab", "cholesky", "lu"), "cg"))
def test_matrix_and_vector_may_be_spread_in_different_ways(method):
    """On Explicit axes, in the context of the mesh and without: solution and gradient are spread as b is."""
    A, b = problems.suited("cg" if method == "fcg" else method, "float32", N)
    expected = np.linalg.solve(wide(A), wide(b))
    hermitian = method in ("fcg", *problems.HERMITIAN_METHODS)
    mesh = mesh_of("explicit")

    def total(A, b):
        x = krylov.solve(MatrixOperator(A, hermitian=hermitian), b, method, rtol=1e-6).x
        return x.sum(), x

    for rows, entries in ((P(), P("devices")), (P(None, "devices"), P("devices")), (P("devices", None), P())):
        spread_A, spread_b = (jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((A, rows), (b, entries)))
        gradient, x = jax.jit(jax.grad(total, argnums=1, has_aux=True))(spread_A, spread_b)
        spread_alike = NamedSharding(mesh, entries)
        assert all(y.sharding.is_equivalent_to(spread_alike, 1) for y in (x, gradient))
        assert norm(wide(x) - expected) <= 1e-3 * norm(expected)
        right = np.linalg.solve(wide(A).T, np.ones(N))
        assert norm(wide(gradient) - right) <= 1e-3 * norm(right)
        with jax.set_mesh(mesh):
            assert norm(wide(total(spread_A, spread_b)[1]) - expected) <= 1e-3 * norm(expected)


@pytest.mark.parametrize(
    "method, kind", on_each_mesh(("cg", "minres", "gmres", "bicgstab", "bicgstabl", "cholesky"), "cg")
)
def test_sharded_vectors_stay_sharded(method, kind):
    b = problems.random_vector("float32", 8 * 100)
    d = (2 + np.sin(np.arange(800))).astype("float32")
    mesh = mesh_of(kind)
    vector = NamedSharding(mesh, P("devices"))
    with jax.set_mesh(mesh):
        b_spread, d_spread = jax.device_put(b, vector), jax.device_put(d, vector)
        sol = krylov.solve(DiagonalOperator(d_spread), b_spread, method, shift=d_spread, x0=b_spread)
        inside = jax.jit(lambda d, b: krylov.solve(DiagonalOperator(d, positive=True), b, method, shift=1.0))
        under_jit = inside(d_spread, b_spread)
    for found, expected in ((sol, b / (2 * d)), (under_jit, b / (1 + d))):
        assert bool(found.converged)
        assert found.x.sharding.is_equivalent_to(vector, 1)
        np.testing.assert_allclose(found.x, expected, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MESHES)
def test_gradients_through_a_sharded_solve(kind):
    A, b = problems.definite("float32", N)
    mesh = mesh_of(kind)
    rows, vector = NamedSharding(mesh, P("devices", None)), NamedSharding(mesh, P("devices"))
    gradient = jax.grad(lambda A, b: jnp.sum(krylov.solve(MatrixOperator(A, positive=True), b, "cg").x ** 2), (0, 1))
    alone = jax.jit(gradient)(A, b)
    with jax.set_mesh(mesh):
        spread = jax.jit(gradient)(jax.device_put(A, rows), jax.device_put(b, vector))
    for x, y in zip(spread, alone):
        assert norm(wide(x) - wide(y)) <= 1e4 * eps("float32") * norm(y)


def test_a_batch_over_devices_solves_each_member():
    systems = [problems.definite("float32", 10, seed) for seed in range(8)]
    matrices, vectors = (np.stack([system[part] for system in systems]) for part in (0, 1))
    batch = NamedSharding(mesh_of("auto"), P("devices"))
    solve = jax.jit(jax.vmap(lambda A, b: krylov.solve(MatrixOperator(A, positive=True), b, "cg")))
    sol = solve(jax.device_put(matrices, batch), jax.device_put(vectors, batch))
    assert np.all(sol.converged)
    for i, system in enumerate(systems):
        assert norm(wide(sol.x[i]) - system.solution) <= 1e-4 * norm(system.solution)


def test_operator_with_a_collective_inside_shard_map():
    """The user's own parallel product: each device holds some rows, and gathers the vector."""
    A, b = problems.definite("float32", N)
    mesh = mesh_of("auto")
    rows = jax.device_put(A, NamedSharding(mesh, P("devices", None)))

    def product(x):
        local = lambda A, x: A @ jax.lax.all_gather(x, "devices", tiled=True)
        return jax.shard_map(local, mesh=mesh, in_specs=(P("devices", None), P("devices")), out_specs=P("devices"))(
            rows, x
        )

    op = FunctionOperator(product, b, positive=True)
    sol = krylov.solve(op, jax.device_put(b, NamedSharding(mesh, P("devices"))), "cg")
    assert bool(sol.converged)
    expected = np.linalg.solve(wide(A), wide(b))
    assert norm(wide(sol.x) - expected) <= 1e-4 * norm(expected)


@pytest.mark.parametrize("rows, columns", [(P(), P("i")), (P("i"), P(None, "j")), (P("i", "j"), P("j", "i"))])
def test_a_block_of_right_hand_sides_spread_in_any_way(rows, columns):
    """On Explicit axes: solutions and gradients are spread as the right-hand sides are, whatever the matrix."""
    A, b = problems.definite("float32", N)
    block = np.stack([np.roll(b, i) for i in range(8)])
    mesh = jax.make_mesh((4, 2), ("i", "j"), axis_types=(AxisType.Explicit,) * 2)
    A_spread = jax.device_put(A, NamedSharding(mesh, rows))
    block_spread = jax.device_put(block, NamedSharding(mesh, columns))

    def total(A, block):
        x = krylov.solve_many(MatrixOperator(A, positive=True), block).x
        return x.sum(), x

    gradient, x = jax.jit(jax.grad(total, argnums=1, has_aux=True))(A_spread, block_spread)
    assert all(y.sharding.is_equivalent_to(NamedSharding(mesh, columns), 2) for y in (x, gradient))
    expected = np.linalg.solve(wide(A), wide(block).T).T
    assert norm(wide(x) - expected) <= 1e-3 * norm(expected)
    right = np.tile(np.linalg.solve(wide(A).T, np.ones(N)), (8, 1))
    assert norm(wide(gradient) - right) <= 1e-3 * norm(right)


@pytest.mark.parametrize("storage", problems.slow_but(("recompute", "linearized", "dense"), "linearized"))
def test_a_block_on_an_operator_whose_samples_are_spread(storage):
    samples = problems.random_vector("float32", 32 * 5).reshape(32, 5)
    w = problems.random_vector("float32", 20).reshape(5, 4)
    block = problems.random_vector("float32", 60).reshape(3, 5, 4)
    mesh = jax.make_mesh((4, 2), ("i", "j"), axis_types=(AxisType.Explicit,) * 2)

    @jax.jit
    def solve(samples):
        J = krylov.Jacobian(lambda w, x: jnp.sum(jnp.tanh(x @ w), axis=-1), w, samples, storage=storage)
        return krylov.solve_many(J.gram(), block, shift=1e-1).x

    alone, spread = solve(samples), solve(jax.device_put(samples, NamedSharding(mesh, P(("i", "j")))))
    assert norm(wide(spread) - wide(alone)) <= 1e-4 * norm(alone)
