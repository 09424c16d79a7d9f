"""Solves inside JAX's control flow and derivative rules, and inside the operators of other solves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import krylov
from krylov.operators import FunctionOperator, MatrixOperator
from tests import problems
from tests.conftest import X64
from tests.problems import ITERATIVE, METHODS, eps, norm, random_vector, wide

DTYPE = "float64" if X64 else "float32"
TOLERANCE = 1e4 * eps(DTYPE)


def by_krylov(A, b):
    return krylov.solve(MatrixOperator(A), b, "cg", rtol=20 * eps(DTYPE)).x


def by_dense(A, b):
    return jnp.linalg.solve(A, b)


def in_scan(solve):
    def composed(A, b):
        return jax.lax.scan(lambda x, k: (solve(A + k * jnp.eye(len(b)), x + b), x), b, jnp.arange(3.0))

    return composed


def in_fori_loop(solve):
    return lambda A, b: jax.lax.fori_loop(0, 3, lambda _, x: solve(A, x + b), b)


def in_cond(solve):
    """A solve or none, also for a batch of predicates, where both branches run."""

    def choose(which, A, b):
        return jax.lax.cond(which, lambda: solve(A, 2 * b) + b, lambda: b)

    def composed(A, b):
        return choose(b[0] < 100, A, b), jax.vmap(choose, (0, None, None))(jnp.array([True, False]), A, b)

    return composed


def in_checkpoint(solve):
    return jax.checkpoint(lambda A, b: solve(A, jnp.sin(solve(A, b))))


def in_custom_jvp(solve):
    """The root of A x + x^3 = b by Newton, differentiated by the implicit function theorem."""

    def jacobian(A, x):
        return A + jnp.diag(3 * x**2)

    @jax.custom_jvp
    def root(A, b):
        def step(_, x):
            return x - solve(jacobian(A, x), A @ x + x**3 - b)

        return jax.lax.fori_loop(0, 8, step, 0 * b)

    @root.defjvp
    def _(primals, tangents):
        (A, b), (A_dot, b_dot) = primals, tangents
        x = root(A, b)
        return x, solve(jacobian(A, x), b_dot - A_dot @ x)

    return root


def in_custom_vjp(solve):
    @jax.custom_vjp
    def energy(A, b):
        return b @ solve(A, b)

    def forward(A, b):
        x = solve(A, b)
        return b @ x, (A, b, x)

    def backward(kept, cotangent):
        A, b, x = kept
        adjoint = solve(A.T, b)
        return -cotangent * jnp.outer(adjoint, x), cotangent * (x + adjoint)

    energy.defvjp(forward, backward)
    return energy


def in_operator(solve):
    """A Schur complement: each product of the outer solve is an inner solve."""

    def composed(A, b):
        inner = jnp.eye(len(b)) * 3 + A / 4
        if solve is by_dense:
            return jnp.linalg.solve(A + jnp.linalg.inv(inner), b)
        outer = FunctionOperator(lambda x: A @ x + solve(inner, x), b)
        return krylov.solve(outer, b, "cg", rtol=100 * eps(DTYPE)).x

    return composed


QUICK = (in_scan, in_operator)
COMPOSITIONS = (in_scan, in_fori_loop, in_cond, in_checkpoint, in_custom_jvp, in_custom_vjp, in_operator)


@pytest.mark.parametrize("compose", problems.slow_but(COMPOSITIONS, *QUICK), ids=lambda compose: compose.__name__)
def test_values_and_derivatives_of_a_composition(compose):
    A, b = problems.definite(DTYPE)
    A_dot, b_dot = random_vector(DTYPE, 10, 10, seed=1), random_vector(DTYPE, 10, seed=2)
    A_dot = A_dot + A_dot.T

    def everything(solve):
        composed = compose(solve)

        def loss(A, b):
            out = composed(A, b)
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(out)), out

        value_and_grad = jax.value_and_grad(loss, (0, 1), has_aux=True)
        if compose is in_custom_vjp:
            return value_and_grad(A, b)
        return jax.jvp(lambda A, b: value_and_grad(A, b), (A, b), (A_dot, b_dot))

    got, expected = jax.jit(lambda: everything(by_krylov))(), jax.jit(lambda: everything(by_dense))()
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert norm(wide(x) - wide(y)) <= TOLERANCE * max(norm(y), 1)


def test_in_while_loop_forward():
    """Inverse iteration until it stands still; JAX has no reverse mode through a while loop."""
    A, b = problems.definite(DTYPE)

    def inverse_iteration(solve):
        def run(A, b):
            def step(carry):
                x, _, k = carry
                y = solve(A, x)
                y = y / jnp.sqrt(y @ y)
                return y, jnp.max(jnp.abs(y - x)), k + 1

            going = lambda carry: (carry[1] > 1e3 * eps(DTYPE)) & (carry[2] < 200)
            return jax.lax.while_loop(going, step, (b / jnp.sqrt(b @ b), jnp.asarray(1, b.dtype), 0))[0]

        return run

    dots = (0.1 * A @ A, b)
    by_method = lambda A, b: krylov.solve(MatrixOperator(A, positive=True), b, "cg", rtol=20 * eps(DTYPE)).x
    got = jax.jit(lambda A, b: jax.jvp(inverse_iteration(by_method), (A, b), dots))(A, b)
    expected = jax.jit(lambda A, b: jax.jvp(inverse_iteration(by_dense), (A, b), dots))(A, b)
    for x, y in zip(got, expected, strict=True):
        assert norm(wide(x) - wide(y)) <= TOLERANCE


@pytest.mark.slow
def test_second_derivatives_in_reverse():
    A, b = problems.definite(DTYPE)

    def gradient_norm(solve):
        gradient = jax.grad(lambda A, b: jnp.sum(jnp.sin(solve(A, b))), (0, 1))
        return lambda A, b: sum(jnp.sum(g**2) for g in gradient(A, b))

    got, expected = (jax.jit(jax.grad(gradient_norm(solve), (0, 1)))(A, b) for solve in (by_krylov, by_dense))
    for x, y in zip(got, expected, strict=True):
        assert norm(wide(x) - wide(y)) <= TOLERANCE * norm(y)


SCALES = np.array([1e-30, 1e-20, 1e-10, 1.0, 1e10, 1e20, 1e30], "float32")


@pytest.mark.parametrize("method", problems.slow_but(METHODS, "cg"))
def test_derivatives_are_right_for_cotangents_and_tangents_of_every_size_in_float32(method):
    A, b = problems.suited(method, "float32")
    A_dot = (0.3 * A + 0.1 * np.eye(10)).astype("float32")
    b_dot = random_vector("float32", 10, seed=4)

    def solve(A, b):
        return krylov.solve(MatrixOperator(A, hermitian=method in problems.HERMITIAN_METHODS), b, method).x

    @jax.jit
    def derivatives(scales):
        _, pull = jax.vjp(solve, A, b)
        _, push = jax.linearize(solve, A, b)
        cotangents = jax.vmap(lambda scale: pull(scale * b_dot))(scales)
        return (*cotangents, jax.vmap(lambda scale: push(scale * A_dot, scale * b_dot))(scales))

    grad_A, grad_b, x_dot = (wide(leaf) for leaf in derivatives(SCALES))
    matrix, x = wide(A), np.linalg.solve(wide(A), wide(b))
    adjoint = np.linalg.solve(matrix.T, wide(b_dot))
    tangent = np.linalg.solve(matrix, wide(b_dot) - wide(A_dot) @ x)
    for i, scale in enumerate(SCALES.astype(float)):
        for got, expected in ((grad_A, -np.outer(adjoint, x)), (grad_b, adjoint), (x_dot, tangent)):
            assert norm(got[i] / scale - expected) <= 1e-4 * norm(expected), scale


@pytest.mark.parametrize("method", problems.slow_but(["gmres", "bicgstab", "bicgstabl"], "bicgstab"))
def test_the_transposed_solve_uses_the_adjoint_of_a_preconditioner_that_is_not_symmetric(method):
    """With the exact inverse three products are enough, in both directions or in neither."""
    A, b = problems.general("float32")
    inverse = np.linalg.inv(wide(A)).astype("float32")

    def solve(A, b):
        return krylov.solve(A, b, method, preconditioner=MatrixOperator(inverse), maxiter=2).x

    @jax.jit
    def both(A, b):
        gradient = jax.grad(lambda A, b: jnp.sum(solve(A, b) ** 2) / 2, (0, 1))(A, b)
        return gradient, jax.linear_transpose(lambda b: solve(A, b), b)(b)[0]

    (grad_A, grad_b), transposed = both(A, b)
    x = np.linalg.solve(wide(A), wide(b))
    adjoint = np.linalg.solve(wide(A).T, x)
    assert norm(wide(grad_b) - adjoint) <= 1e-4 * norm(adjoint)
    assert norm(wide(grad_A) + np.outer(adjoint, x)) <= 1e-4 * norm(adjoint) * norm(x)
    assert norm(wide(transposed) - np.linalg.solve(wide(A).T, wide(b))) <= 1e-4 * norm(transposed)


@pytest.mark.parametrize("method", problems.slow_but(["cg", "lu"], "lu"))
def test_derivatives_in_the_shift_and_none_in_guess_tolerance_and_preconditioner(method):
    A, b = problems.suited(method, "float32")
    diagonal = np.linspace(0.1, 0.5, 10, dtype="float32")

    def loss(shift, diagonal, x0, rtol, atol, inverse):
        op, options = MatrixOperator(A), {}
        if method in ITERATIVE:
            options["preconditioner"] = krylov.operators.DiagonalOperator(inverse, positive=True)
        one = krylov.solve(op, b, method, shift=shift, x0=x0, rtol=rtol, atol=atol, **options).x
        other = krylov.solve(op, b, method, shift=diagonal, rtol=rtol, **options).x
        return jnp.sum(one**2) + jnp.sum(other**2)

    arguments = 0.2, diagonal, b, 1e-6, 1e-6, np.ones(10, "float32")
    in_shift, in_diagonal, *others = jax.jit(jax.grad(loss, tuple(range(6))))(*map(jnp.asarray, arguments))
    assert all(not np.any(other) for other in others)

    def expected(shift):
        matrix = wide(A) + np.diag(shift)
        x = np.linalg.solve(matrix, wide(b))
        return -2 * np.linalg.solve(matrix.T, x) * x

    np.testing.assert_allclose(in_shift, expected(np.full(10, 0.2)).sum(), rtol=1e-4)
    np.testing.assert_allclose(in_diagonal, expected(diagonal), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", problems.slow_but(["cg", "gmres", "lu"], "cg"))
def test_derivatives_at_zero_and_of_nothing_are_finite(method):
    """At b = 0, with a cotangent of zero, and with an exact guess: nothing is divided by the size of a zero."""
    A, b = problems.suited(method, "float32")

    def solve(A, b, x0):
        return krylov.solve(MatrixOperator(A), b, method, x0=x0).x

    @jax.jit
    def pulled(b, x0, cotangent):
        x, pull = jax.vjp(lambda A, b: solve(A, b, x0), A, b)
        return x, pull(cotangent)

    adjoint = np.linalg.solve(wide(A).T, wide(b))
    x, (grad_A, grad_b) = pulled(0 * b, 0 * b, b)
    assert not np.any(x) and not np.any(grad_A)
    assert norm(wide(grad_b) - adjoint) <= 1e-4 * norm(adjoint)
    _, (grad_A, grad_b) = pulled(b, b, 0 * b)
    assert not np.any(grad_A) and not np.any(grad_b)
    exact = np.linalg.solve(wide(A), wide(b)).astype("float32")
    _, (grad_A, grad_b) = pulled(b, exact, b)
    assert norm(wide(grad_b) - adjoint) <= 1e-4 * norm(adjoint)
    assert norm(wide(grad_A) + np.outer(adjoint, exact)) <= 1e-4 * norm(adjoint) * norm(exact)


def test_an_absolute_tolerance_belongs_to_the_system_and_not_to_its_derivatives():
    """Were atol of order one taken for the cotangent system too, its solution would be zero."""
    A, b = problems.definite("float32")
    op = MatrixOperator(A, positive=True)

    def loss(b):
        x = krylov.solve(op, 1e3 * b, "cg", rtol=1e-5, atol=1.0).x
        return 1e-3 * jnp.sum(x * 1e-3)

    expected = 1e-3 * np.linalg.solve(wide(A), np.ones(10))
    gradient = jax.jit(jax.grad(loss))(b)
    assert norm(wide(gradient) - expected) <= 1e-4 * norm(expected)


@pytest.mark.slow
def test_batches_of_gradients_agree_with_single_ones():
    systems = [problems.general("float32", seed=seed) for seed in range(3)]
    matrices, vectors = (np.stack([system[part] for system in systems]) for part in (0, 1))
    gradient = jax.grad(lambda A, b: jnp.sum(krylov.solve(A, b, "bicgstab").x ** 2), (0, 1))
    batch = jax.jit(jax.vmap(gradient))(matrices, vectors)
    single = jax.jit(gradient)
    for i in range(3):
        for x, y in zip(batch, single(matrices[i], vectors[i]), strict=True):
            assert norm(wide(x[i]) - wide(y)) <= 1e-4 * norm(y)


OWN_TERMS = {"guess": {"x0": True}, "atol": {"atol": 1e-9}, "no rtol": {"rtol": 0.0}}


@pytest.mark.parametrize("options", problems.slow_but(OWN_TERMS, "guess"))
def test_a_guess_or_an_absolute_tolerance_changes_no_derivative(options):
    """Whichever of b and the operator is differentiated, in every mode: they stop the system, not its derivatives."""
    A, b = problems.general("float32")
    A_dot, b_dot = random_vector("float32", 10, 10, seed=1), random_vector("float32", 10, seed=2)

    def everything(**options):
        if "x0" in options:
            options["x0"] = 1.5 * b
        solve = lambda A, b: krylov.solve(MatrixOperator(A), b, "lu", **{"rtol": 1e-6, **options}).x
        loss = lambda A, b: jnp.sum(jnp.sin(solve(A, b)))
        both, gradient_dot = jax.jvp(jax.grad(loss, (0, 1)), (A, b), (A_dot, b_dot))
        return {
            "both": both,
            "forward over reverse": gradient_dot,
            "operator": jax.grad(loss, 0)(A, b),
            "b": jax.grad(loss, 1)(A, b),
            "jvp in the operator": jax.jvp(lambda A: solve(A, b), (A,), (A_dot,))[1],
            "vmap of grad over the operator": jax.vmap(jax.grad(loss, 0), (0, None))(jnp.stack([A, A + A_dot / 9]), b),
            "linear_transpose": jax.linear_transpose(lambda b: solve(A, b), b)(b_dot)[0],
        }

    got, expected = jax.jit(lambda: everything(**OWN_TERMS[options]))(), jax.jit(everything)()
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        assert norm(wide(x) - wide(y)) <= 1e-4 * norm(y), jax.tree_util.keystr(path)
