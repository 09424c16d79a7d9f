"""Methods as lineax solvers: values, derivatives by lineax's own rules, results, and a Newton iteration around one."""

import functools

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix
import pytest

import krylov
from krylov.interop.lineax import Solver
from krylov.operators import MatrixOperator
from tests import problems
from tests.conftest import X64
from tests.problems import eps, norm, random_vector, wide

DOUBLE = "complex128" if X64 else "complex64"
HERMITIAN = ("cg", "minres", "minres_qlp", "cr", "fcg", "cholesky")
SQUARE = (*HERMITIAN, "gmres", "bicgstab", "bicgstabl", "lu")
RECTANGULAR = ("lsmr", "lsqr", "cgls")


def lineax_operator(method, A):
    # lineax has no tag for complex hermitian indefinite operators.
    return lx.MatrixLinearOperator(A, lx.positive_semidefinite_tag if method in HERMITIAN else ())


@functools.cache
def solved_and_differentiated(method, dtype):
    system = problems.definite(dtype) if method in HERMITIAN else problems.general(dtype)

    def solve(A, b):
        return lx.linear_solve(lineax_operator(method, A), b, Solver(method, rtol=20 * eps(dtype))).value

    def loss(A, b):
        x = solve(A, b)
        return jnp.sum(jnp.abs(x) ** 2), x

    (gradient, x) = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(*system)
    return system, x, gradient


@pytest.mark.parametrize("method", problems.slow_but((*SQUARE, *RECTANGULAR), "gmres"))
def test_linear_solve_and_its_gradient(method):
    system, x, (A_bar, b_bar) = solved_and_differentiated(method, DOUBLE)
    A, b = map(wide, system)
    right = np.linalg.solve(A, b)
    assert norm(x - right) <= 1e3 * eps(DOUBLE) * norm(right)
    # JAX's gradient: the conjugate of the direction of steepest ascent.
    cotangent = np.linalg.solve(A.T, 2 * right.conj())
    assert norm(b_bar - cotangent) <= 1e4 * eps(DOUBLE) * norm(cotangent)
    assert norm(A_bar + np.outer(cotangent, right)) <= 1e4 * eps(DOUBLE) * norm(np.outer(cotangent, right))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(12, 5), (5, 12)])
def test_rectangular_operators_and_their_gradients_agree_with_lineax(shape):
    A, y = random_vector("float32", *shape), random_vector("float32", shape[0], seed=1)

    def loss(solver):
        return lambda A, y: jnp.sum(lx.linear_solve(lx.MatrixLinearOperator(A), y, solver).value ** 2)

    ours, theirs = (jax.jit(jax.grad(loss(s), (0, 1)))(A, y) for s in (Solver("lsmr", rtol=1e-6), lx.SVD()))
    for a, b in zip(ours, theirs):
        assert norm(a - b) <= 1e-3 * norm(b)


@pytest.mark.x64_only
@pytest.mark.parametrize("method", problems.slow_but(("eigh", "svd", "minres_qlp", "lsmr"), "eigh"))
def test_singular_systems_and_their_gradients_agree_with_lineax(method):
    """With a solution and without one; derivatives at constant rank."""
    U, X = random_vector("complex128", 5, 3), random_vector("complex128", 5, 5, seed=1)
    A = U * np.array([1.0, 2.0, 3.0]) @ U.conj().T
    b = random_vector("complex128", 5, seed=2)

    @functools.partial(jax.jit, static_argnums=0)
    def solved_and_differentiated(solver, b):
        tags = () if isinstance(solver, lx.SVD) else lx.positive_semidefinite_tag
        solve = lambda A: lx.linear_solve(lx.MatrixLinearOperator(A, tags), b, solver).value
        x, moved = jax.jvp(solve, (A,), (X @ A + A @ X.conj().T,))
        return x, moved, jax.grad(lambda A: jnp.sum(jnp.abs(solve(A)) ** 2))(jnp.asarray(A))

    for rhs in A @ b, b:
        ours, theirs = (solved_and_differentiated(s, rhs) for s in (Solver(method, rtol=1e-11), lx.SVD()))
        for found, expected in zip(ours, theirs):
            assert norm(found - expected) <= 1e-7 * norm(expected)


def test_options_results_and_statistics():
    A, b = problems.definite("float32")
    op = lx.MatrixLinearOperator(A, lx.positive_semidefinite_tag)
    right = np.linalg.solve(A, b)
    given = lx.linear_solve(op, b, Solver("cg"), options={"y0": right.astype("float32")})
    assert int(given.stats["num_steps"]) == 0
    inverse = lx.MatrixLinearOperator(np.linalg.inv(A).astype("float32"), lx.positive_semidefinite_tag)
    quick = lx.linear_solve(op, b, Solver("auto"), options={"preconditioner": inverse})
    assert quick.result == lx.RESULTS.successful and int(quick.stats["num_steps"]) <= 2
    few = lx.linear_solve(op, b, Solver("cg", maxiter=1), throw=False)
    assert few.result == lx.RESULTS.max_steps_reached
    indefinite = lx.MatrixLinearOperator(problems.indefinite("float32").matrix, lx.symmetric_tag)
    broken = lx.linear_solve(indefinite, b, Solver("cg"), throw=False)
    assert broken.result == lx.RESULTS.breakdown and int(broken.stats["status"]) == krylov.Status.INDEFINITE
    with pytest.raises(Exception, match="iterative breakdown"):
        lx.linear_solve(indefinite, b, Solver("cg")).value.block_until_ready()
    with pytest.raises(ValueError, match="Solver: unknown method 'cgg'"):
        Solver("cgg")
    with pytest.raises(ValueError, match="lsmr takes no preconditioner"):
        lx.linear_solve(op, b, Solver("lsmr"), options={"preconditioner": inverse})


@pytest.mark.slow
def test_vmapped_over_operators_and_on_trees():
    A = np.stack([problems.definite("float32", seed=s).matrix for s in range(3)])
    b = random_vector("float32", 3, 10)
    solve = lambda A, b: lx.linear_solve(lx.MatrixLinearOperator(A, lx.positive_semidefinite_tag), b, Solver()).value
    np.testing.assert_allclose(jax.vmap(solve)(A, b), np.linalg.solve(A, b[..., None])[..., 0], atol=1e-4)
    structure = {"a": jax.ShapeDtypeStruct((4,), "float32"), "b": jax.ShapeDtypeStruct((2, 3), "float32")}
    op = MatrixOperator(A[0], positive=True, in_structure=structure)
    tree = {"a": jnp.ones(4, "float32"), "b": jnp.ones((2, 3), "float32")}
    x = lx.linear_solve(op, tree, Solver("cr")).value
    np.testing.assert_allclose(np.concatenate([x["a"], x["b"].ravel()]), np.linalg.solve(A[0], np.ones(10)), atol=1e-4)


def test_newton_of_optimistix_runs_on_it():
    def residual(y, args):
        return {"u": y["u"] ** 3 + 2 * y["v"] - 1, "v": y["v"] ** 3 - y["u"] - args}

    start = {"u": jnp.ones(3), "v": jnp.ones(3)}
    newton = optimistix.Newton(rtol=1e-4, atol=1e-4, linear_solver=Solver("gmres", rtol=1e-4))
    root = optimistix.root_find(residual, newton, start, jnp.array([0.5, 1.0, 2.0])).value
    for value in residual(root, jnp.array([0.5, 1.0, 2.0])).values():
        np.testing.assert_allclose(value, 0, atol=1e-3)
