"""History, progress, exceptions, and what a solution says of itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import krylov
from krylov import Status
from krylov.operators import FunctionOperator, MatrixOperator
from tests import problems
from tests.problems import ITERATIVE, METHODS, norm, wide


def solve(A, b, method="cg", **options):
    return krylov.solve(MatrixOperator(A), b, method, **options)


@pytest.mark.parametrize("method", problems.slow_but(METHODS, "cg"))
def test_history_goes_from_the_first_residual_to_the_last(method):
    A, b = problems.suited(method, "float32")
    sol = solve(A, b * 1e5, method, history=True)
    assert sol.history.shape == (int(sol.iterations) + 1,)
    np.testing.assert_allclose(sol.history[0], norm(b * 1e5), rtol=1e-5)
    assert float(sol.history[-1]) == float(sol.residual_norm)
    assert np.all(np.isfinite(sol.history)) and np.all(np.asarray(sol.history) > 0)
    if method in ("minres", "gmres"):
        assert np.all(np.diff(sol.history) <= 1e-5 * sol.history[0])


@pytest.mark.parametrize("method", problems.slow_but(ITERATIVE, "minres"))
def test_history_holds_the_true_residuals_of_a_shorter_solve(method):
    A, b = problems.suited(method, "float32")
    history = solve(A, b, method, history=True).history
    for k in (1, 2, 3):
        sol = solve(A, b, method, maxiter=k)
        residual = norm(wide(b) - wide(A) @ wide(sol.x))
        np.testing.assert_allclose(history[k], residual, rtol=1e-3)


def test_history_under_transformations_has_a_fixed_length_and_repeats_its_end():
    A, b = problems.definite("float32")

    @jax.jit
    def batch(scales):
        return jax.vmap(lambda s: krylov.solve(A + s * np.eye(10, dtype=A.dtype), b, "cg", history=True, maxiter=30))(
            scales
        )

    sol = batch(jnp.array([0.0, 100.0], jnp.float32))
    assert sol.history.shape == (2, 31)
    for i in range(2):
        end = int(sol.iterations[i])
        assert np.all(sol.history[i, end:] == sol.residual_norm[i])
        assert sol.history[i, end - 1] > sol.residual_norm[i]


def test_history_of_a_guess_begins_with_its_residual():
    A, b = problems.definite("float32")
    guess = np.full(10, 3.0, "float32")
    sol = solve(A, b, x0=guess, history=True)
    np.testing.assert_allclose(sol.history[0], norm(wide(b) - wide(A) @ guess), rtol=1e-5)


def test_history_of_nothing_to_do_is_the_residual():
    A, b = problems.definite("float32")
    zero = solve(A, 0 * b, history=True)
    assert zero.history.tolist() == [0.0]
    exact = solve(np.eye(10, dtype="float32"), b, x0=b, history=True)
    assert exact.history.tolist() == [0.0]
    assert solve(A, b).history is None


def test_progress_bar_reports_and_closes(capfd):
    A, b = problems.definite("float32")
    sol = solve(A, b, progress=True)
    jax.effects_barrier()
    shown = capfd.readouterr().err
    assert f"{int(sol.iterations)}" in shown and "residual" in shown
    from krylov import progress

    assert progress._bar is None


@pytest.mark.slow
def test_progress_bar_works_under_jit_vmap_grad_and_for_several_solves(capfd):
    A, b = problems.definite("float32")
    x = jax.jit(lambda b: solve(A, b, progress=True).x)(b)
    np.testing.assert_allclose(x, solve(A, b).x, rtol=1e-5)
    batch = jax.jit(jax.vmap(lambda s: solve(A, s * b, progress=True).x))(jnp.arange(3.0, dtype=jnp.float32))
    np.testing.assert_allclose(batch[2], 2 * x, rtol=1e-4)
    gradient = jax.grad(lambda b: jnp.sum(solve(A, b, progress=True).x))(jnp.asarray(b))
    assert np.all(np.isfinite(gradient))
    jax.effects_barrier()
    assert "residual" in capfd.readouterr().err
    from krylov import progress

    assert progress._bar is None


def test_throw_raises_with_the_solution_and_returns_it_where_all_is_well():
    A, b = problems.definite("float32")
    assert solve(A, b, throw=True).status is Status.CONVERGED
    with pytest.raises(krylov.ConvergenceError, match="MAX_ITERATIONS") as caught:
        solve(A, b, maxiter=2, throw=True)
    sol = caught.value.solution
    assert sol.status is Status.MAX_ITERATIONS and int(sol.iterations) == 2
    assert norm(wide(b) - wide(A) @ wide(sol.x)) < norm(b)
    with pytest.raises(krylov.ConvergenceError, match="NONFINITE"):
        solve(A, b * np.nan, throw=True)


TRANSFORMED = {
    "jit": lambda f, b: jax.jit(f)(b),
    "vmap": lambda f, b: jax.vmap(f)(jnp.stack([b, b])),
    "jvp": lambda f, b: jax.jvp(f, (b,), (b,)),
    "jit of grad": lambda f, b: jax.jit(jax.grad(lambda b: jnp.sum(f(b))))(b),
    "linear_transpose": lambda f, b: jax.linear_transpose(f, b)(b),
}


@pytest.mark.parametrize("name", problems.slow_but(TRANSFORMED, "linear_transpose"))
def test_throw_under_a_transformation(name):
    A, b = problems.definite("float32")
    run, b = TRANSFORMED[name], jnp.asarray(b)
    plain = run(lambda b: solve(A, b).x, b)
    thrown = run(lambda b: solve(A, b, throw=True).x, b)
    for x, y in zip(jax.tree.leaves(plain), jax.tree.leaves(thrown)):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(Exception, match=r"did not converge|MAX_ITERATIONS"):
        jax.block_until_ready(run(lambda b: solve(A, b, throw=True, maxiter=2).x, b))


def test_throw_raises_where_only_the_system_of_the_derivative_fails():
    """b is an eigenvector and takes one iteration; the cotangent takes ten."""
    A = np.diag(np.arange(1.0, 11)).astype("float32")
    b = jnp.eye(10, dtype=jnp.float32)[0]
    loss = lambda b, throw: jnp.sum(solve(A, b, maxiter=3, throw=throw).x)
    assert np.all(np.isfinite(jax.jit(jax.grad(lambda b: loss(b, False)))(b)))
    with pytest.raises(Exception, match="did not converge"):
        jax.block_until_ready(jax.jit(jax.grad(lambda b: loss(b, True)))(b))


def test_repr_says_what_happened_and_what_to_try():
    A, b = problems.definite("float32")
    converged = repr(solve(A, b))
    assert all(word in converged for word in ("CONVERGED", "cg", "iterations", "products", "||b - A x||"))
    assert "raise maxiter" in repr(solve(A, b, maxiter=1))
    assert "minres" in repr(solve(-A, b))
    assert "right-hand side" in repr(solve(A, b * np.nan))
    assert "CONVERGED" in repr(solve(A, 0 * b))
    batch = jax.vmap(lambda s: solve(A, s * b))(jnp.array([1.0, np.nan], jnp.float32))
    assert "1 CONVERGED" in repr(batch) and "1 NONFINITE" in repr(batch)
    seen = []
    jax.jit(lambda b: (lambda sol: (seen.append((repr(sol), sol.status)), sol.x))(solve(A, b)))(b)
    assert "traced" in seen[0][0]


def test_every_status_has_advice():
    assert all(len(status.advice) > 20 for status in Status)


def test_a_solution_passes_through_transformations():
    A, b = problems.definite("float32")
    sol = jax.jit(lambda b: solve(A, b))(b)
    assert isinstance(sol, krylov.Solution)
    assert sol.status is Status.CONVERGED and bool(sol.converged) and sol.method == "cg"
    np.testing.assert_allclose(sol.rhs_norm, norm(b), rtol=1e-6)
    assert int(sol.matvecs) == int(sol.iterations) + 1
    _, stacked = jax.lax.scan(lambda x, _: ((s := solve(A, b, x0=x)).x, s), jnp.zeros(10, jnp.float32), None, 3)
    assert stacked.iterations.shape == (3,) and int(stacked.iterations[1]) == 0


@pytest.mark.parametrize("method", problems.slow_but(["cg", "bicgstab", "lu"], "cg"))
def test_matvecs_counts_the_products_that_are_made(method):
    A, b = problems.suited(method, "float32")
    calls = []

    def fn(x):
        jax.debug.callback(lambda x: calls.append(1), x)
        return jnp.asarray(A) @ x

    sol = krylov.solve(FunctionOperator(fn, b, hermitian=method in problems.HERMITIAN_METHODS), b, method)
    jax.effects_barrier()
    assert len(calls) == int(sol.matvecs)
