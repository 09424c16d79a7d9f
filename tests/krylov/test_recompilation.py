"""A second eager call with other values compiles nothing."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring
from jax.experimental import sparse

import krylov
from krylov.operators import DiagonalOperator, FunctionOperator, Jacobian, MatrixOperator
from tests import networks, problems
from tests.problems import METHODS

_EVENT = "/jax/core/compile/backend_compile_duration"
_counts = [0]


def _listen(event: str, duration: float, **_: object) -> None:
    _counts[0] += event == _EVENT


monitoring.register_event_duration_secs_listener(_listen)


@contextlib.contextmanager
def compiling(count):
    before = _counts[0]
    yield
    assert _counts[0] - before == count


def test_the_counter_sees_a_compilation():
    with compiling(1):
        jax.jit(lambda x: x + 1)(np.ones(7))


@pytest.mark.parametrize("method", problems.slow_but(METHODS, "cg"))
def test_new_values_of_everything(method):
    def system(seed):
        A, b = problems.suited(method, "float32", seed=seed)
        return MatrixOperator(A), jnp.asarray(b)

    krylov.solve(*system(0), method)
    krylov.solve(*system(0), method, shift=jnp.asarray(0.3), rtol=jnp.asarray(1e-4))
    with compiling(0):
        krylov.solve(*system(1), method)
        krylov.solve(*system(2), method, shift=0.1, rtol=1e-3)
        krylov.solve(*system(2), method, shift=np.float32(0.2), rtol=np.float64(1e-3), maxiter=7)
        krylov.solve(*system(2), method, shift=jnp.asarray(0.3), rtol=jnp.asarray(1e-4))
        krylov.solve(*system(2), method, shift=1, rtol=1, atol=0)


@pytest.mark.parametrize("method", problems.slow_but(["cg", "gmres"], "cg"))
def test_new_guess_tolerance_preconditioner_and_diagonal_shift(method):
    A, b = problems.suited(method, "float32")

    def solve(seed):
        vector = problems.random_vector("float32", 10, seed=seed)
        preconditioner = DiagonalOperator(jnp.asarray(1 + vector**2))
        options = dict(x0=vector, shift=vector**2, atol=1e-7 * seed, preconditioner=preconditioner)
        return krylov.solve(MatrixOperator(A), b, method, **options)

    solve(0)
    with compiling(0):
        solve(1)
        solve(2)


def test_new_parameters_of_a_network():
    x = networks.samples(20)

    def solve(seed, shift):
        params = networks.mixed_params(seed=seed)
        J = Jacobian(networks.mixed, params, x + seed, center=True, chunk_size=6)
        b = jax.tree.map(lambda p: np.full(p.shape, seed, p.dtype), params)
        return krylov.solve(J.gram(), b, "cg", shift=shift)

    solve(1, 0.1)
    with compiling(0):
        solve(2, 0.2)
        solve(3, 0.3)


def test_new_values_that_a_function_closes_over():
    def solve(seed):
        diagonal = jnp.asarray(1 + problems.random_vector("float32", 10, seed=seed) ** 2)
        op = FunctionOperator(lambda x: diagonal * x, diagonal, positive=True)
        return krylov.solve(op, np.ones(10, "float32")).x * diagonal

    solve(0)
    with compiling(0):
        for seed in (1, 2):
            np.testing.assert_allclose(solve(seed), 1, rtol=1e-4)


@pytest.mark.slow
def test_new_values_of_a_plain_function_a_sparse_matrix_and_a_lineax_operator():
    import lineax

    A, b = problems.general("float32")
    entries = sparse.BCOO.fromdense(A)

    def solve(scale):
        matrix = jnp.asarray(A * np.float32(scale))
        krylov.solve(lambda x: matrix @ x, b)
        krylov.solve(sparse.BCOO((np.float32(scale) * np.asarray(entries.data), entries.indices), shape=A.shape), b)
        krylov.solve(lineax.MatrixLinearOperator(matrix), b)

    solve(1)
    with compiling(0):
        solve(2)


def test_history_of_another_length():
    A, b = problems.definite("float32")
    lengths = set()
    for rtol in (1e-2, 1e-3):
        lengths.add(len(krylov.solve(A, b, "cg", rtol=rtol, history=True).history))
    with compiling(0):
        for rtol in (1e-1, 1e-4, 1e-5):
            lengths.add(len(krylov.solve(A, b, "cg", rtol=rtol, history=True).history))
    assert len(lengths) == 5


def test_looking_at_a_solution():
    A, b = problems.definite("float32")

    def look(b):
        sol = krylov.solve(A, b, "cg")
        return repr(sol), sol.status, bool(sol.converged)

    look(b)
    with compiling(0):
        look(2 * b)
