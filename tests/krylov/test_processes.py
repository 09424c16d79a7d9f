"""Krylov processes fulfil their relations, and their bases are orthonormal."""

import jax
import numpy as np
import pytest

from krylov import processes
from krylov.coordinates import multiply_rows
from krylov.operators import Jacobian, MatrixOperator
from tests import networks, problems
from tests.problems import DTYPES, eps, wide


def rows_apart(rows):
    """How far rows are from orthonormal."""
    rows = wide(rows)
    return np.linalg.norm(rows.conj() @ rows.T - np.eye(len(rows)), 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_relations_hold_for_matrices(dtype):
    n, k, small = 30, 12, 100 * eps(dtype)
    A = problems.hermitian(dtype, np.logspace(0, -6, n))
    start = problems.random_vector(dtype, n)
    found = processes.lanczos(MatrixOperator(A, hermitian=True), start, k)
    V, T = wide(found.basis).T, wide(found.matrix)
    rest = np.outer(V[:, -1], np.eye(k)[-1]) * float(found.off_diagonal[-1])
    assert np.linalg.norm(wide(A) @ V[:, :k] - V[:, :k] @ T - rest) <= small
    assert rows_apart(found.basis) <= small and int(found.steps) == k

    B = problems.general(dtype, n).matrix
    found = processes.arnoldi(B, start, k)
    V, H = wide(found.basis).T, wide(found.matrix)
    assert np.linalg.norm(wide(B) @ V[:, :k] - V @ H) <= 10 * small
    assert rows_apart(found.basis) <= small and np.allclose(np.tril(H, -2), 0, atol=small)

    J = problems.decaying_jacobian(dtype)
    found = processes.golub_kahan(J, problems.random_vector(dtype, 20), k)
    U, V, B = wide(found.left).T, wide(found.right).T, wide(found.matrix)
    rest = np.outer(V[:, -1], np.eye(k)[-1]) * float(found.off_diagonal[-1])
    assert np.linalg.norm(wide(J) @ V[:, :k] - U @ B) <= small
    assert np.linalg.norm(wide(J).conj().T @ U - V[:, :k] @ B.T - rest) <= small
    assert rows_apart(found.left) <= small and rows_apart(found.right) <= small


def test_relations_hold_on_mixed_leaves_over_the_real_field():
    J = Jacobian(networks.mixed, networks.mixed_params(), networks.samples(40), center=True)
    start, k = J.params, 8

    @jax.jit
    def everything(J, start):
        S = J.gram()
        lanczos = processes.lanczos(S, start, k)
        arnoldi = processes.arnoldi(S, start, k)
        golub_kahan = processes.golub_kahan(J, start, k)
        return (
            lanczos,
            arnoldi,
            golub_kahan,
            multiply_rows(S, lanczos.basis[:k]),
            multiply_rows(J, golub_kahan.right[:k]),
        )

    lanczos, arnoldi, golub_kahan, on_lanczos, on_right = everything(J, start)
    scale = np.linalg.norm(on_lanczos, 2)
    inside = wide(lanczos.matrix).T @ wide(lanczos.basis[:k])
    inside[-1] += float(lanczos.off_diagonal[-1]) * wide(lanczos.basis[-1])
    assert np.linalg.norm(wide(on_lanczos) - inside) <= 1e-5 * scale
    assert np.linalg.norm(wide(arnoldi.matrix[:k]) - wide(lanczos.matrix)) <= 1e-4 * scale
    assert np.linalg.norm(wide(golub_kahan.matrix).T @ wide(golub_kahan.left) - wide(on_right)) <= 1e-5 * scale
    # The bidiagonal is the Cholesky factor of the tridiagonal.
    B = wide(golub_kahan.matrix)
    assert np.linalg.norm(B.T @ B - wide(lanczos.matrix)) <= 1e-4 * scale


@pytest.mark.x64_only
def test_orthogonality_survives_converged_eigenvalues_and_condition_1e12():
    i = np.arange(1, 41)
    hilbert = 1 / (i[:, None] + i[None] - 1.0)
    found = processes.arnoldi(hilbert, np.ones(40), 11)
    assert rows_apart(found.basis[: int(found.steps)]) <= 1e-13
    system = problems.strakos("float64")
    whole = processes.lanczos(MatrixOperator(system.matrix), system.rhs, 40)
    loose = processes.lanczos(MatrixOperator(system.matrix), system.rhs, 40, reorthogonalise=False)
    assert rows_apart(whole.basis[:40]) <= 1e-13 and rows_apart(loose.basis[:40]) > 1e-3


@pytest.mark.parametrize("process", [processes.lanczos, processes.arnoldi, processes.golub_kahan])
def test_exhausted_space_ends_the_process(process):
    found = process(np.diag([1.0, 1.0, 2.0, 3.0, 3.0]).astype("float32"), np.ones(5, "float32"), 5)
    assert int(found.steps) == 3
    leaves = [np.asarray(x) for x in jax.tree.leaves(found)]
    assert all(np.all(np.isfinite(x)) for x in leaves)
    matrix = wide(found.matrix)[:3, :3]
    values = np.linalg.svd(matrix)[1] if process is processes.golub_kahan else np.linalg.eigvals(matrix)
    assert np.allclose(np.sort(values), [1, 2, 3], atol=1e-5)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"(?s)lanczos.*square.*golub_kahan"):
        processes.lanczos(np.ones((3, 2), "float32"), np.ones(2, "float32"), 2)
    with pytest.raises(ValueError, match=r"(?s)golub_kahan.*start.*float32\[3\].*float32\[2\]"):
        processes.golub_kahan(np.ones((3, 2), "float32"), np.ones(3, "float32"), 2)
    with pytest.raises(ValueError, match="steps"):
        processes.arnoldi(np.eye(2, dtype="float32"), np.ones(2, "float32"), 0)
