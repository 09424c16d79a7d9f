"""Systems of tangent operators: the three ways to write one down, their derivatives, memory, and two real ones."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import krylov
from krylov.operators import FunctionOperator, Jacobian, linear_call
from tests import networks, problems
from tests.problems import random_vector, wide

SAMPLES, PARAMETERS, BATCH_SIZE, SHIFT = 100, 10, 5, 0.1


def scanned_product(J, v):
    """J^H J v, five rows at a time."""
    batches = J.reshape(-1, BATCH_SIZE, J.shape[1])
    return jax.lax.scan(lambda total, rows: (total + rows.conj().T @ (rows @ v), None), jnp.zeros_like(v), batches)[0]


def by_function(J):
    return FunctionOperator(lambda v: scanned_product(J, v), J[0], positive=True)


def by_function_transposed_by_jax(J):
    return FunctionOperator(lambda v: scanned_product(J, v), J[0])


def by_linear_call(J):
    def transposed(J, w):
        return scanned_product(J, w.conj()).conj()

    return FunctionOperator(lambda v: linear_call(scanned_product, transposed, J, v), J[0])


def by_jacobian(J):
    weights = jnp.ones(len(J))
    network = lambda v, rows: rows @ v
    return len(J) * Jacobian(network, J[0], J, weights=weights, chunk_size=BATCH_SIZE, holomorphic=True).gram()


ORIGINAL = (
    pytest.param(by_linear_call, "cg", id="linear_call-cg"),
    pytest.param(by_function, "gmres", id="function-gmres", marks=pytest.mark.slow),
    pytest.param(by_function_transposed_by_jax, "gmres", id="function transposed by jax-gmres", marks=pytest.mark.slow),
    pytest.param(by_jacobian, "cg", id="jacobian-cg", marks=pytest.mark.slow),
)


@pytest.mark.x64_only
@pytest.mark.parametrize("build, method", ORIGINAL)
def test_original_problem_agrees_with_the_dense_answer_to_1e_minus_10(build, method):
    Js = jnp.stack([random_vector("complex128", SAMPLES, PARAMETERS, seed=seed) for seed in range(2)])
    bs = jnp.stack([random_vector("complex128", PARAMETERS, seed=10 + seed) for seed in range(2)])

    def solve(J, b):
        return krylov.solve(build(J), b, method, shift=SHIFT, rtol=1e-13).x

    def dense(J, b):
        return jnp.linalg.solve(J.conj().T @ J + SHIFT * jnp.eye(PARAMETERS), b)

    def everything(solve):
        # The product of J^H J with x is of size 100 x.
        value_and_grad = jax.value_and_grad(lambda J, b: 1e4 * jnp.sum(jnp.abs(solve(J, b)) ** 2), (0, 1))
        transposed = lambda J, y: jax.linear_transpose(lambda b: solve(J, b), y)(y)[0]
        return {
            "solution, transposed solution": (solve(Js[0], bs[0]), transposed(Js[0], bs[0])),
            "gradient": value_and_grad(Js[0], bs[0])[1],
            "vmap of the gradient": jax.vmap(value_and_grad)(Js, bs),
            "vmap of the transposed solution": jax.vmap(transposed, (0, None))(Js, bs[0]),
        }

    assert_trees_close(jax.jit(everything, static_argnums=0)(solve), everything(dense), 1e-10)


def assert_trees_close(got, expected, tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        assert problems.norm(wide(x) - wide(y)) <= tolerance * problems.norm(y), jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("complex128", marks=[pytest.mark.x64_only, pytest.mark.slow])]
)
def test_damped_least_squares_has_three_equal_routes(dtype):
    """(J^H J + l)^-1 J^H f = J^H (J J^H + l)^-1 f, problem 19."""
    J, l = problems.decaying_jacobian(dtype), 1e-4
    f = random_vector(dtype, len(J), seed=5)
    op = krylov.operators.MatrixOperator(J)
    options = dict(method="cg", shift=l, rtol=20 * problems.eps(dtype), maxiter=1000)
    on_parameters = krylov.solve(op.H @ op, op.H @ f, **options).x
    on_samples = op.H @ krylov.solve(op @ op.H, f, **options).x
    J, f = wide(J), wide(f)
    dense = np.linalg.solve(J.conj().T @ J + l * np.eye(J.shape[1]), J.conj().T @ f)
    # The condition is 1e4, and J^H f itself is rounded.
    for route in (on_parameters, on_samples):
        assert problems.norm(wide(route) - dense) <= 1e4 * problems.eps(dtype) * problems.norm(dense)


CHUNKS = 64


def temporaries(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("side", ["gram", "cogram"])
def test_memory_of_a_chunked_solve_and_its_derivatives_stays_near_that_of_one_product(side):
    params, per_chunk = networks.wide_layer_params(512, jnp.float32), 64
    x = networks.samples(CHUNKS * per_chunk)

    def operator(params):
        J = Jacobian(networks.wide_layer, params, x, chunk_size=per_chunk, center=True)
        return getattr(J, side)()

    b = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), operator(params).in_structure())

    def squares(tree):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))

    def product(params, b):
        return operator(params).mv(b)

    def solve(params, b):
        return krylov.solve(operator(params), b, "cg", shift=0.1).x

    def transposed(function):
        return lambda params, b: jax.linear_transpose(lambda b: function(params, b), b)(b)

    def gradient(function, argument):
        return jax.grad(lambda params, b: squares(function(params, b)), argument)

    one_product = temporaries(product, params, b)
    found = {
        "transposed product": temporaries(transposed(product), params, b),
        "gradient of a product in the parameters": temporaries(gradient(product, 0), params, b),
        "solve": temporaries(solve, params, b),
        "transposed solve": temporaries(transposed(solve), params, b),
        "gradient of a solve in b": temporaries(gradient(solve, 1), params, b),
        "gradient of a solve in the parameters": temporaries(gradient(solve, 0), params, b),
    }
    assert {name: size for name, size in found.items() if size > 2.5 * one_product} == {}


def rows_of_jacobian(network, params, samples, energies):
    """The centred Jacobian and the centred energies in double precision, real and imaginary parts of both as rows."""
    flat, unravel = jax.flatten_util.ravel_pytree(jax.tree.map(jnp.asarray, params))
    of_one = lambda p, sample: network(unravel(p), sample[None])[0]
    if jnp.iscomplexobj(flat):
        row = jax.grad(of_one, holomorphic=True)
    else:
        part = lambda which: jax.grad(lambda p, sample: which(of_one(p, sample)))
        row = lambda p, sample: jax.lax.complex(part(jnp.real)(p, sample), part(jnp.imag)(p, sample))
    rows = jax.jit(jax.vmap(row, (None, 0)))(flat, samples)
    rows, energies = wide(rows), wide(energies)
    root = np.sqrt(len(rows))
    rows, energies = (rows - rows.mean(0)) / root, (energies - energies.mean()) / root
    if jnp.iscomplexobj(flat):
        return rows, energies
    return np.concatenate([rows.real, rows.imag]), np.concatenate([energies.real, energies.imag])


def assert_solves(x, rows, energies, shift, rtol):
    x = wide(jax.flatten_util.ravel_pytree(x)[0])
    forces = rows.conj().T @ energies
    residual = rows.conj().T @ (rows @ x) + shift * x - forces
    assert problems.norm(residual) <= 1.01 * rtol * problems.norm(forces)
    dense = scipy.linalg.solve(rows.conj().T @ rows + shift * np.eye(len(x)), forces, assume_a="pos")
    assert problems.norm(x - dense) <= 1.01 * rtol * problems.norm(forces) / shift


@pytest.mark.slow
@pytest.mark.x64_only
def test_trained_rbm_agrees_with_dense_cholesky_after_the_known_number_of_iterations():
    params, samples, energies = networks.trained_rbm(4096)
    shift, rtol, iterations = 1e-3, 1e-6, 360
    J = Jacobian(networks.rbm, params, samples, center=True, chunk_size=1000, holomorphic=True)
    sol = krylov.solve(J.gram(), J.H @ J.sample_vector(energies), "cg", shift=shift, rtol=rtol)
    assert bool(sol.converged)
    assert abs(int(sol.iterations) - iterations) <= 0.05 * iterations
    assert_solves(sol.x, *rows_of_jacobian(networks.rbm, params, samples, energies), shift, rtol)


@pytest.mark.slow
@pytest.mark.x64_only
def test_trained_transformer_agrees_with_dense_cholesky_through_its_kernel():
    """A network that is only R-linear, by minSR: on samples, where there are fewer."""
    params, samples, energies = networks.trained_vit(96)
    shift, rtol = 1e-2, 1e-6
    J = Jacobian(networks.vit, params, samples, center=True, chunk_size=40)
    sol = krylov.solve(J.cogram(), J.sample_vector(energies), "cg", shift=shift, rtol=rtol)
    assert bool(sol.converged)
    rows, energies = rows_of_jacobian(networks.vit, params, samples, energies)
    kernel = rows @ rows.T + shift * np.eye(len(rows))
    x = np.concatenate([sol.x.real, sol.x.imag])
    assert problems.norm(kernel @ x - energies) <= 1.01 * rtol * problems.norm(energies)
    assert (
        problems.norm(x - scipy.linalg.solve(kernel, energies, assume_a="pos"))
        <= rtol * problems.norm(energies) / shift
    )
