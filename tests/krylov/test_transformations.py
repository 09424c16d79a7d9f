"""Every method, dtype and transformation of JAX in one table, against formulas evaluated densely in double precision.

With x = A^-1 b and a real loss of x whose JAX gradient is g: x' = A^-1 (b' - A' x), grad_b = A^-T g, and
grad_A = -grad_b x^T.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import krylov
from krylov.operators import MatrixOperator
from tests import problems
from tests.conftest import X64
from tests.problems import HERMITIAN_METHODS, METHODS, eps, random_vector, wide

N, BATCH = 10, 3
# The dtype in which some methods are tested in every run; the rest is slow.
QUICK = "complex128" if X64 else "complex64"


def solver(method, dtype):
    """A function of the matrix and the right-hand side. Hermitian methods get an operator that says what it is."""

    def solve(matrix, rhs):
        op = MatrixOperator(matrix, hermitian=method in HERMITIAN_METHODS, positive=method in ("cg", "cholesky"))
        return krylov.solve(op, rhs, method, rtol=20 * eps(dtype)).x

    return solve


def loss(x):
    return jnp.sum(jnp.abs(x) ** 2) + jnp.sum(x.real**3) / 3


def loss_gradient(x):
    """As JAX defines it: the conjugate of the direction of steepest ascent."""
    return 2 * x.conj() + x.real**2


def loss_gradient_tangent(x, x_dot):
    return 2 * x_dot.conj() + 2 * x.real * x_dot.real


def direction(method, dtype):
    """A tangent of the matrix. What is said to be hermitian stays hermitian."""
    tangent = wide(random_vector(dtype, N, N, seed=11)) / N
    if method in HERMITIAN_METHODS:
        tangent = tangent + tangent.conj().T
    return tangent.astype(dtype)


def computed(method, dtype, A, b, A_dot, b_dot, matrices, vectors):
    """All transformations as one function, since compiling it is what takes the time."""
    solve = solver(method, dtype)

    def solution_and_gradient(A, b):
        def loss_and_solution(A, b):
            x = solve(A, b)
            return loss(x), x

        gradient, x = jax.grad(loss_and_solution, argnums=(0, 1), has_aux=True)(A, b)
        return x, gradient

    (_, (grad_A, grad_b)), (x_dot, gradient_dot) = jax.jvp(solution_and_gradient, (A, b), (A_dot, b_dot))
    return {
        "jit": solve(A, b),
        "vmap over b": jax.vmap(solve, (None, 0))(A, vectors),
        "vmap over the operator": jax.vmap(solve, (0, None))(matrices, b),
        "jvp": x_dot,
        "grad in b": grad_b,
        "grad in the operator": grad_A,
        "forward over reverse": gradient_dot,
        "linear_transpose": jax.linear_transpose(lambda b: solve(A, b), b)(b_dot)[0],
    }


def expected(A, b, A_dot, b_dot, matrices, vectors):
    A, b, A_dot, b_dot, matrices, vectors = map(wide, (A, b, A_dot, b_dot, matrices, vectors))
    solve = np.linalg.solve
    x = solve(A, b)
    x_dot = solve(A, b_dot - A_dot @ x)
    g, g_dot = loss_gradient(x), loss_gradient_tangent(x, x_dot)
    grad_b = solve(A.T, g)
    grad_b_dot = solve(A.T, g_dot - A_dot.T @ grad_b)
    return {
        "eager": x,
        "jit": x,
        "vmap over b": solve(A, vectors.T).T,
        "vmap over the operator": np.stack([solve(matrix, b) for matrix in matrices]),
        "jvp": x_dot,
        "grad in b": grad_b,
        "grad in the operator": -np.outer(grad_b, x),
        "forward over reverse": (-np.outer(grad_b_dot, x) - np.outer(grad_b, x_dot), grad_b_dot),
        "linear_transpose": solve(A.T, b_dot),
    }


@functools.cache
def results(method, dtype):
    """Pairs of what came out and what should, by transformation."""
    systems = [problems.suited(method, dtype, N, seed) for seed in (0, 5, 6)]
    A, b = systems[0]
    arguments = (
        A,
        b,
        direction(method, dtype),
        random_vector(dtype, N, seed=12),
        np.stack([system.matrix for system in systems]),
        random_vector(dtype, BATCH, N, seed=13),
    )
    out = jax.jit(functools.partial(computed, method, dtype))(*arguments)
    out["eager"] = solver(method, dtype)(A, b)
    right = expected(*arguments)
    return {name: (out[name], right[name]) for name in right}


TRANSFORMATIONS = (
    "eager",
    "jit",
    "vmap over b",
    "vmap over the operator",
    "jvp",
    "grad in b",
    "grad in the operator",
    "forward over reverse",
    "linear_transpose",
)


def as_marked(method, dtype):
    marks = [pytest.mark.x64_only] if dtype in ("float64", "complex128") else []
    quick = dtype == QUICK and method in ("cg", "gmres", "lu")
    return pytest.param(method, dtype, marks=marks if quick else [*marks, pytest.mark.slow])


CASES = [as_marked(method, dtype) for method in METHODS for dtype in ("float32", "complex64", "float64", "complex128")]
CASES.append(as_marked("bicgstabl", "complex64"))


# All transformations of a case after each other: they share one program.
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("method, dtype", CASES)
def test_agrees_with_the_dense_formula(method, dtype, transformation):
    got, right = results(method, dtype)[transformation]
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(right), strict=True):
        assert x.dtype == dtype and x.shape == y.shape
        assert np.max(np.abs(wide(x) - y)) <= 1000 * eps(dtype) * np.max(np.abs(y))
