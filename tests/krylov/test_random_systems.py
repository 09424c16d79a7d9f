"""Random systems of every kind, a hundred at once: no method may claim what is not so, or miss what is easy."""

import jax
import numpy as np
import pytest

import krylov
from krylov import Status
from krylov.operators import MatrixOperator
from tests import problems
from tests.conftest import X64
from tests.krylov.test_scale import DIRECT, HERMITIAN, ITERATIVE, POSITIVE
from tests.problems import assert_honest, eps, is_complex

COUNT, N = 100, 6
ALL = (*ITERATIVE, *DIRECT)
# Whose only excuse is the condition; the others may meet a zero pivot, or negative curvature.
SURE = ("minres", "minres_qlp", "gmres", "lu", "eigh", "svd")


def random_matrix(rng, dtype, hermitian, positive):
    """Of any condition up to 1e12, singular now and then, a cycle, nilpotent or triangular; and of any size."""
    condition = 10.0 ** rng.uniform(0, 12)
    values = np.geomspace(1, 1 / condition, N) if rng.random() < 0.5 else rng.uniform(1 / condition, 1, N)
    kind = rng.integers(8)
    values[: {0: 1, 1: N // 2}.get(kind, 0)] = 0
    seed = int(rng.integers(1 << 30))
    if hermitian:
        signs = 1 if positive and kind != 2 else rng.choice([-1, 1], N)
        return problems.hermitian(np.result_type(dtype, float), signs * values, seed)
    if kind == 2:
        return np.roll(np.eye(N), 1, 0)
    if kind == 3:
        return np.diag(np.ones(N - 1), 1)
    if kind == 4:
        return np.triu(rng.normal(size=(N, N)))
    return problems.with_singular_values(np.result_type(dtype, float), values, N, N, seed)


def random_systems(dtype, hermitian, positive):
    """Matrices, right-hand sides, guesses and tolerances; the right-hand side in the range or anywhere."""
    rng, systems = np.random.default_rng(0), []
    for _ in range(COUNT):
        matrix, vector = random_matrix(rng, dtype, hermitian, positive), rng.normal(size=N)
        if is_complex(dtype):
            vector = vector + 1j * rng.normal(size=N)
        rhs = matrix @ vector if rng.random() < 0.5 else vector
        size, scale = 10.0 ** rng.choice([0, 0, 0, -20, 20]), 10.0 ** rng.choice([0, 0, 0, -10, 10])
        guess = rng.choice([0, 0, 1, 1e3]) * rng.normal(size=N) * scale / size
        rtol = 10.0 ** rng.uniform(np.log10(eps(dtype)), -1)
        systems.append((size * matrix, scale * rhs, guess, rtol))
    real = np.finfo(dtype).dtype
    kinds = dtype, dtype, dtype, real
    return [np.stack(part).astype(kind) for part, kind in zip(zip(*systems, strict=True), kinds, strict=True)]


@pytest.mark.parametrize("dtype", problems.slow_but(["float32", "complex128" if X64 else "complex64"], "float32"))
@pytest.mark.parametrize("method", problems.slow_but(ALL, "minres"))
def test_random_systems_are_solved_or_end_honestly(method, dtype):
    hermitian, positive = method in HERMITIAN, method in POSITIVE
    matrices, vectors, guesses, rtols = random_systems(dtype, hermitian, positive)

    @jax.jit
    @jax.vmap
    def solve(matrix, rhs, guess, rtol):
        op = MatrixOperator(matrix, hermitian=hermitian, positive=positive)
        return krylov.solve(op, rhs, method, x0=guess, rtol=rtol, maxiter=200)

    batch = jax.tree.map(np.asarray, solve(matrices, vectors, guesses, rtols))
    for i in range(COUNT):
        sol = jax.tree.map(lambda leaf, i=i: leaf[i], batch)
        assert_honest(sol, matrices[i], vectors[i], rtols[i])
        condition = np.linalg.cond(problems.wide(matrices[i]))
        if method in SURE and condition < 1e3 and rtols[i] > 100 * eps(dtype) * condition:
            assert sol.status_code == Status.CONVERGED, (i, sol, condition)
