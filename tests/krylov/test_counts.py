"""Iterations, products and histories mean the same for every method of square systems."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import krylov
from krylov import Status
from krylov.operators import MatrixOperator
from tests import problems
from tests.krylov.test_scale import DIRECT, HERMITIAN, ITERATIVE, POSITIVE, system
from tests.problems import norm, true_residual

GUESS = np.full(10, 0.1, "float32")


def stopped_early(method, guess, **options):
    """The system, its solution, and those after 0 to 12 iterations."""
    name = "gmres" if isinstance(method, krylov.GMRES) else method
    A, b = system(name, "float32")
    op = MatrixOperator(A, hermitian=name in HERMITIAN, positive=name in POSITIVE)

    @jax.jit
    def solve(limits):
        return jax.vmap(lambda k: krylov.solve(op, b, method, x0=guess, maxiter=k, history=True, **options))(limits)

    some = solve(jnp.array([*range(13), 999]))
    return A, b, jax.tree.map(lambda x: x[-1], some), some


@pytest.mark.parametrize(
    "guess", [None, pytest.param(GUESS, marks=pytest.mark.slow)], ids=["from zero", "from a guess"]
)
@pytest.mark.parametrize(
    "method", problems.slow_but([*ITERATIVE, krylov.GMRES(restart=3)], "bicgstab", "minres"), ids=str
)
def test_k_iterations_take_their_products_one_to_verify_and_one_for_a_guess(method, guess):
    A, b, full, some = stopped_early(method, guess)
    products = 2 if method in ("bicgstab", "bicgstabl") else 1
    needed = int(full.iterations)
    assert full.status_code == Status.CONVERGED and needed > 5
    for k in range(13):
        iterations, found = int(some.iterations[k]), true_residual(A, some.x[k], b)
        assert iterations == min(k, needed)
        if k < needed:
            # A guess that is all there is needs no second look, and each cycle of GMRES ends with one.
            verifications = k // 3 + (k % 3 > 0) if isinstance(method, krylov.GMRES) else min(k, 1)
            looks = verifications + (1 if guess is not None or k == 0 else 0)
            assert int(some.matvecs[k]) == products * k + looks
            assert some.status_code[k] == Status.MAX_ITERATIONS
            # The recurrence's own residual, which strays by rounding.
            # BiCGStab(l) strays with the weights of four powers at once.
            strays = 1e-5 if method == "bicgstabl" else 1e-6
            assert abs(float(full.history[k]) - found) <= strays * norm(b)
        # Half an iteration of BiCGStab may be enough.
        assert 0 <= int(full.matvecs) - products * needed + (products - 1) <= 10
        assert abs(float(some.residual_norm[k]) - found) <= 1e-6 * norm(b)
        assert float(some.history[k][iterations]) == float(some.residual_norm[k])


@pytest.mark.parametrize("method", problems.slow_but(DIRECT, "cholesky"))
def test_a_substitution_is_an_iteration_and_takes_one_product(method):
    A, b, full, some = stopped_early(method, GUESS, rtol=1e-6)
    assert full.status_code == Status.CONVERGED and 1 <= int(full.iterations) <= 3
    for k in range(4):
        iterations, found = int(some.iterations[k]), true_residual(A, some.x[k], b)
        assert iterations == min(k, int(full.iterations))
        assert int(some.matvecs[k]) == iterations + 1
        assert abs(float(some.residual_norm[k]) - found) <= 1e-6 * norm(b)
        assert float(some.history[k][iterations]) == float(some.residual_norm[k])
