"""Singular hermitian systems: MINRES-QLP finds the pseudo-inverse's solution, and says whether there is one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import krylov
from krylov import Status
from krylov.operators import MatrixOperator
from tests import problems
from tests.conftest import X64
from tests.problems import assert_honest, eps, norm, random_vector, wide

DOUBLE = "complex128" if X64 else "complex64"
DTYPES = [
    pytest.param(d, marks=([pytest.mark.x64_only] if eps(d) < 1e-10 else []) + ([] if quick else [pytest.mark.slow]))
    for d, quick in [("float32", False), ("complex64", not X64), ("float64", False), ("complex128", X64)]
]


@functools.cache
def solver(method):
    """Over matrices, right-hand sides and tolerances; kept, so that problems of one shape compile once."""

    def solve(A, b, rtol):
        return krylov.solve(MatrixOperator(A, hermitian=True), b, method, rtol=rtol, maxiter=1000)

    return jax.jit(jax.vmap(solve))


def solve_each(systems, rtol, method="minres_qlp"):
    matrices, vectors = (np.stack([system[part] for system in systems]) for part in (0, 1))
    batch = solver(method)(matrices, vectors, np.full(len(systems), rtol, np.finfo(matrices.dtype).dtype))
    return [member(batch, i) for i in range(len(systems))]


def member(batch, i):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[i], batch)


def of_rank(dtype, rank, condition, n=20, seed=0):
    eigenvalues = np.zeros(n)
    eigenvalues[:rank] = np.geomspace(1, 1 / condition, rank) * (-1.0) ** np.arange(rank)
    return problems.hermitian(dtype, eigenvalues, seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_least_norm_of_inconsistent_systems_to_the_root_of_the_precision(dtype):
    """Ranks from 1 to n - 1 at a condition of 10; problem 6; a right-hand side orthogonal to the range."""
    cases = [(rank, seed) for rank in (1, 5, 10, 15, 19) for seed in range(4)]
    systems = [(of_rank(dtype, rank, 10, seed=seed), random_vector(dtype, 20, seed=seed + 50)) for rank, seed in cases]
    systems.append(problems.singular_inconsistent(dtype, 20))
    projector = np.diag(np.arange(20) < 12).astype(dtype)
    systems.append((projector, np.eye(20, dtype=dtype)[15]))
    accuracy = 1e-8 if eps(dtype) < 1e-10 else 1e-3
    for system, sol in zip(systems, solve_each(systems, 1e-12 if eps(dtype) < 1e-10 else 1e-5)):
        assert sol.status_code == Status.INCONSISTENT, sol
        assert_honest(sol, *system, 1e-5)
        right = np.linalg.pinv(wide(system[0]), rcond=1e3 * eps(dtype), hermitian=True) @ wide(system[1])
        assert norm(wide(sol.x) - right) <= accuracy * max(norm(right), 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_least_norm_of_consistent_systems(dtype):
    systems = []
    for rank in (1, 5, 10, 15, 19):
        A = of_rank(dtype, rank, 100)
        systems.append((A, (wide(A) @ wide(random_vector(dtype, 20))).astype(dtype)))
    systems.append(problems.singular_consistent(dtype, 20))
    rtol = 100 * eps(dtype)
    for system, sol in zip(systems, solve_each(systems, rtol)):
        assert sol.converged, sol
        assert_honest(sol, *system, rtol)
        right = np.linalg.pinv(wide(system[0]), rcond=1e3 * eps(dtype), hermitian=True) @ wide(system[1])
        assert norm(wide(sol.x) - right) <= 1e4 * rtol * norm(right)


@pytest.mark.parametrize("dtype", DTYPES)
def test_regular_systems_are_solved_as_by_minres(dtype):
    systems = [problems.padded(s, 20) for s in (problems.indefinite_diagonal(dtype), problems.swap(dtype))]
    systems += [problems.padded(problems.shifted_tridiagonal(dtype, shift), 20) for shift in (0.0, 5.0, 10.0)]
    systems += [problems.definite(dtype, 20), problems.indefinite(dtype, 20)]
    for system, sol, plain in zip(systems, solve_each(systems, 1e-5), solve_each(systems, 1e-5, "minres")):
        assert sol.converged, sol
        assert_honest(sol, *system, 1e-5)
        assert abs(int(sol.iterations) - int(plain.iterations)) <= 1


@pytest.mark.parametrize("method", ["minres_qlp", "minres"])
def test_residuals_never_rise(method):
    A, b = problems.indefinite("float32", 20)
    sol = krylov.solve(MatrixOperator(A, hermitian=True), b, method, history=True, rtol=1e-6)
    assert np.all(np.diff(sol.history) <= 0)


def test_no_system_of_full_rank_is_called_inconsistent():
    """In float32 up to a condition of 1e3; at 1e4 one in twenty of these is."""
    n, seeds, condition = 20, range(20), 1e3
    eigenvalues = np.geomspace(1, 1 / condition, n) * (-1.0) ** np.arange(n)
    systems = [(problems.hermitian("float32", eigenvalues, s), random_vector("float32", n, seed=s)) for s in seeds]
    statuses = [Status(int(sol.status_code)) for sol in solve_each(systems, 1e-2)]
    assert Status.INCONSISTENT not in statuses and Status.BREAKDOWN not in statuses, statuses


@pytest.mark.slow
def test_with_a_preconditioner_and_on_a_mixed_tree():
    """The gram of a Jacobian with fewer samples than parameters, real and complex: singular and R-linear."""

    def f(params, x):
        return jnp.tanh(x @ params["w"]) @ params["v"]

    params = {"w": jnp.asarray(random_vector("float32", 4, 6)), "v": jnp.asarray(random_vector("complex64", 6, seed=1))}
    S = krylov.Jacobian(f, params, random_vector("float32", 8, 4, seed=2)).gram()
    b = S @ jax.tree.map(jnp.ones_like, params)
    plain = krylov.solve(S, b, "minres_qlp", rtol=1e-5)
    assert plain.converged
    dense, flat = np.asarray(S.as_matrix(), float), np.concatenate([*map(np.ravel, jax.tree.leaves(split(b)))])
    right = np.linalg.pinv(dense, rcond=1e-5, hermitian=True) @ flat
    found = np.concatenate([*map(np.ravel, jax.tree.leaves(split(plain.x)))])
    assert norm(found - right) <= 5e-2 * norm(right)
    weighted = krylov.solve(S, b, "minres_qlp", rtol=1e-4, preconditioner=lambda x: jax.tree.map(lambda y: 2 * y, x))
    assert weighted.converged


def split(tree):
    return krylov.operators.split_real(tree)


@pytest.mark.slow
@pytest.mark.x64_only
def test_derivatives_on_a_regular_system():
    A, b = problems.indefinite("complex128", 20)
    op = lambda A: MatrixOperator(A, hermitian=True)
    loss = lambda A, b: jnp.sum(jnp.abs(krylov.solve(op(A), b, "minres_qlp", rtol=1e-12).x) ** 2)
    dense = lambda A, b: jnp.sum(jnp.abs(jnp.linalg.solve(A, b)) ** 2)
    got, right = (jax.jit(jax.grad(f, (0, 1)))(A, b) for f in (loss, dense))
    for x, y in zip(got, right):
        assert norm(x - y) <= 1e-9 * norm(y)


@pytest.mark.parametrize("dtype", DTYPES[1:2] if not X64 else DTYPES[3:])
@pytest.mark.parametrize("method", ["eigh", "svd"])
def test_dense_pseudo_inverses_find_the_least_norm(method, dtype):
    cases = [
        (of_rank(dtype, rank, 10, seed=rank), random_vector(dtype, 20, seed=rank + 50)) for rank in (1, 10, 19, 20)
    ]
    cases += [(A, (wide(A) @ wide(b)).astype(dtype)) for A, b in cases]
    for i, (system, sol) in enumerate(zip(cases, solve_each(cases, 1e3 * eps(dtype), method))):
        right = np.linalg.pinv(wide(system[0]), rcond=1e3 * eps(dtype), hermitian=True) @ wide(system[1])
        assert norm(wide(sol.x) - right) <= 1e4 * eps(dtype) * norm(right)
        assert_honest(sol, *system, 1e3 * eps(dtype))
        assert sol.status_code == (Status.CONVERGED if i >= 3 else Status.INCONSISTENT), (i, sol)


def test_the_cut_off_is_smooth_and_where_it_was_set():
    b = np.ones(2, "float32")
    weight = lambda value: float(krylov.solve(np.diag([1, value]).astype("float32"), b, krylov.Eigh(rcond=1e-2)).x[1])
    found = [weight(value) * value for value in (1e-3, 0.5e-2, 1e-2, 2e-2, 1e-1)]
    np.testing.assert_allclose(found, [1e-6, 1 / 65, 0.5, 64 / 65, 1], rtol=2e-2)
    with pytest.raises(ValueError, match="SVD: rcond must be at least 0 and less than 1"):
        krylov.SVD(rcond=2.0)
