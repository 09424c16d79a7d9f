"""Linear systems with known answers, as NumPy arrays, and the references to hold a solution against.

Builders take a dtype. Where a system has a real and a complex version, `a` is 1 in the one and i in the other.
References are dense, in double precision or better.
"""

from typing import NamedTuple

import numpy as np
import pytest

_DOUBLE = pytest.mark.x64_only

DTYPES = (
    "float32",
    "complex64",
    pytest.param("float64", marks=_DOUBLE),
    pytest.param("complex128", marks=_DOUBLE),
)
REAL_DTYPES = ("float32", pytest.param("float64", marks=_DOUBLE))
SINGLE_DTYPES = ("float32", "complex64")

ITERATIVE = ("cg", "minres", "gmres", "bicgstab")
DIRECT = ("cholesky", "lu")
METHODS = (*ITERATIVE, *DIRECT)
# For the tests that say most about a recurrence; the rest tell of the driver, and compile long.
RECURRENCES = (*ITERATIVE, "bicgstabl")
HERMITIAN_METHODS = ("cg", "minres", "cholesky")


def slow_but(values, *quick):
    """Parameters of a test of which only the quick ones run in every run."""
    return [pytest.param(value, marks=[] if value in quick else pytest.mark.slow) for value in values]


class System(NamedTuple):
    """A matrix and a right-hand side."""

    matrix: np.ndarray
    rhs: np.ndarray

    @property
    def solution(self) -> np.ndarray:
        """In double precision."""
        return np.linalg.solve(wide(self.matrix), wide(self.rhs))


def is_complex(dtype) -> bool:
    return np.issubdtype(np.dtype(dtype), np.complexfloating)


def eps(dtype) -> float:
    return float(np.finfo(dtype).eps)


def wide(x) -> np.ndarray:
    """In double precision."""
    x = np.asarray(x)
    return x.astype(np.complex128 if is_complex(x.dtype) else np.float64)


def _a(dtype):
    return 1j if is_complex(dtype) else 1.0


def _system(matrix, dtype, rhs=None) -> System:
    """With the right-hand side rounded after multiplication; by default that of the solution 1, 2, ..., n."""
    if rhs is None:
        rhs = matrix @ np.arange(1, len(matrix) + 1)
    return System(np.asarray(matrix).astype(dtype), np.asarray(rhs).astype(dtype))


def padded(system, n=10) -> System:
    """With unknowns added that stay zero: the Krylov space is the same, and systems of one size compile once."""
    matrix, rhs = np.eye(n, dtype=system.matrix.dtype), np.zeros(n, system.rhs.dtype)
    m = len(system.rhs)
    matrix[:m, :m], rhs[:m] = system
    return System(matrix, rhs)


def random_vector(dtype, *shape, seed=0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape)
    if is_complex(dtype):
        x = x + 1j * rng.normal(size=shape)
    return x.astype(dtype)


def unitary(dtype, n, seed=0) -> np.ndarray:
    """Random unitary (orthogonal) matrix in double precision."""
    q, r = np.linalg.qr(wide(random_vector(dtype, n, n, seed=seed)))
    return q * (np.diag(r) / np.abs(np.diag(r)))


def hermitian(dtype, eigenvalues, seed=0) -> np.ndarray:
    """Random hermitian matrix with these eigenvalues."""
    q = unitary(np.result_type(dtype, np.float64), len(eigenvalues), seed)
    matrix = (q * np.asarray(eigenvalues)) @ q.conj().T
    return ((matrix + matrix.conj().T) / 2).astype(dtype)


def tridiagonal(lower, diagonal, upper, n) -> np.ndarray:
    return np.diag(np.full(n - 1, lower), -1) + np.diag(np.full(n, diagonal)) + np.diag(np.full(n - 1, upper), 1)


def positive_tridiagonal(dtype, n=10) -> System:
    """Problem 1: tri(a, 4, conj a), solution 1, ..., n."""
    a = _a(dtype)
    return _system(tridiagonal(a, 4.0, np.conj(a), n), dtype)


def shifted_tridiagonal(dtype, shift, n=10) -> System:
    """Problem 2: tri(a, 1, conj a) - shift. Eigenvalues 1 - shift + 2 cos(k pi / (n + 1))."""
    a = _a(dtype)
    return _system(tridiagonal(a, 1.0 - shift, np.conj(a), n), dtype)


def one_negative_eigenvalue(dtype) -> System:
    """Problem 3."""
    return _system(np.diag([10.0, 8.0, 5.0, -1.0]), dtype, np.array([1.0, 1.0, 1.0, 0.1]))


def divergence_gradient(dtype, side=16, shift=0.0):
    """Problem 4: the seven-point Laplacian with Dirichlet boundary, a SciPy matrix; 5 is nearly an eigenvalue."""
    import scipy.sparse

    line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(side, side))
    eye = scipy.sparse.eye_array(side)
    kron = scipy.sparse.kron
    matrix = kron(kron(line, eye), eye) + kron(kron(eye, line), eye) + kron(kron(eye, eye), line)
    matrix = matrix - shift * scipy.sparse.eye_array(side**3)
    return matrix.tocsr().astype(dtype), np.ones(side**3, dtype)


def singular_consistent(dtype, n=10) -> System:
    """Problem 5: rows and columns 1 and 2 are equal; the solution 1 is one of many."""
    i = np.arange(1.0, n + 1)
    matrix = np.outer(i, i) + 5 * np.eye(n)
    matrix[:2] = 1
    matrix[:, :2] = 1
    return _system(matrix, dtype, matrix @ np.ones(n))


def singular_inconsistent(dtype, n=10) -> System:
    """Problem 6: diag(0, 1, ..., 1) with the right-hand side 1. The smallest residual norm is one."""
    return _system(np.diag(np.minimum(np.arange(n), 1.0)), dtype, np.ones(n))


def swap(dtype) -> System:
    """Problem 7: Lanczos meets a zero pivot in its first step."""
    return _system(np.array([[0.0, 1.0], [1.0, 0.0]]), dtype, np.array([1.0, 0.0]))


def poisson(dtype, dimensions, sign=1) -> System:
    """Problem 12: n = 40 in one dimension, 12 x 12 in two."""
    n = {1: 40, 2: 12}[dimensions]
    line = tridiagonal(-1.0, 2.0, -1.0, n)
    eye = np.eye(n)
    matrix = line if dimensions == 1 else np.kron(line, eye) + np.kron(eye, line)
    return _system(sign * matrix, dtype, np.ones(len(matrix)))


def indefinite_diagonal(dtype) -> System:
    """Problem 13: ten distinct eigenvalues of both signs."""
    return _system(np.diag([6.0, -5, 2, 7, -1, 10, 4, -3, -8, 9]), dtype, np.ones(10))


def gram(dtype, condition, n=30, seed=0) -> System:
    """Problem 14: a random Gram matrix with eigenvalues from 1 down to 1 / condition, evenly on a logarithmic scale."""
    eigenvalues = np.logspace(0, -np.log10(condition), n)
    return System(hermitian(dtype, eigenvalues, seed), random_vector(dtype, n, seed=seed + 1))


def low_rank_plus_identity(dtype, n=30, rank=5) -> System:
    """Problem 15: U U^H + 10, whose condition is about 10."""
    u = wide(random_vector(dtype, n, rank))
    return _system(u @ u.conj().T + 10 * np.eye(n), dtype, wide(random_vector(dtype, n, seed=1)))


def strakos(dtype, n=48, rho=0.65, smallest=1e-10) -> System:
    """Problem 18: eigenvalues crowd at ``smallest``, and rounding makes recurrences stray from their residual."""
    i = np.arange(1, n + 1)
    eigenvalues = smallest + (i - 1) / (n - 1) * (1 - smallest) * rho ** (n - i)
    q = unitary(np.result_type(dtype, np.float64), n)
    return System(hermitian(dtype, eigenvalues), (q @ np.ones(n)).astype(dtype))


def rank_two(dtype, rows=25, columns=10) -> System:
    """Problem 8: A_ij = i / j - conj(a) j / i, whose rank is 2, with b = A 1."""
    i, j = np.arange(1.0, rows + 1)[:, None], np.arange(1.0, columns + 1)
    matrix = i / j - np.conj(_a(dtype)) * j / i
    return _system(matrix, dtype, matrix @ np.ones(columns))


def householder_singular_values(dtype, rows=25, columns=10, repeats=2, power=3, residual=0.0) -> System:
    """Problem 9: singular values (floor((i - 1 + q) / q) q / n)^p between Householder matrices; Paige & Saunders."""
    i = np.arange(1, columns + 1)
    values = (np.floor((i - 1 + repeats) / repeats) * repeats / columns) ** power
    left, right = (
        np.exp(1j * k * np.arange(k)) if is_complex(dtype) else np.cos(np.arange(k)) for k in (rows, columns)
    )
    left, right = (np.eye(len(y)) - 2 * np.outer(y, y.conj()) / np.vdot(y, y).real for y in (left, right))
    matrix = (left[:, :columns] * values) @ right
    outside = left[:, columns:] @ np.ones(rows - columns)
    return _system(matrix, dtype, matrix @ i + residual * outside)


def bidiagonal(dtype, rows=20, columns=10) -> System:
    """Problem 10: lower bidiagonal, a_ii = a_{i+1,i} = i; no solution."""
    matrix = np.zeros((rows, columns))
    for i in range(columns):
        matrix[i, i] = matrix[i + 1, i] = i + 1
    return _system(matrix, dtype, np.ones(rows))


def with_singular_values(dtype, values, rows, columns, seed=0) -> np.ndarray:
    """Random matrix with these singular values."""
    u, v = unitary(dtype, rows, seed)[:, : len(values)], unitary(dtype, columns, seed + 1)[:, : len(values)]
    return ((u * np.asarray(values)) @ v.conj().T).astype(dtype)


def with_rows(system, rows) -> System:
    """With empty rows added, so that problems of one shape compile once."""
    matrix, rhs = system
    more = rows - len(rhs)
    return System(np.pad(matrix, ((0, more), (0, 0))), np.pad(rhs, (0, more)))


def decaying_jacobian(dtype, rows=30, columns=20) -> np.ndarray:
    """Problem 19: U diag(10^(-i/10)) V^H."""
    k = min(rows, columns)
    u, v = unitary(dtype, rows, 1)[:, :k], unitary(dtype, columns, 2)[:, :k]
    return ((u * 10.0 ** (-np.arange(k) / 10)) @ v.conj().T).astype(dtype)


def small_tridiagonal(dtype, n=5) -> System:
    """Problem 20: tri(-1, 3, -1)."""
    return _system(tridiagonal(-1.0, 3.0, -1.0, n), dtype, np.ones(n))


def pyamg_example(name, dtype):
    """Problem 23, one of those that pyamg ships: a SciPy matrix, and a right-hand side in its range.

    In complex precision a real one is turned by a diagonal of phases, which leaves its eigenvalues alone.
    """
    import scipy.sparse
    from pyamg.gallery import load_example

    matrix = load_example(name)["A"].tocsr()
    if is_complex(dtype) and not is_complex(matrix.dtype):
        phases = scipy.sparse.diags_array(np.exp(1j * np.arange(matrix.shape[0])))
        matrix = (phases @ matrix @ phases.conj()).tocsr()
    rhs = matrix @ wide(random_vector(dtype, matrix.shape[0]))
    return matrix.astype(dtype), rhs.astype(dtype)


def general(dtype, n=10, seed=0) -> System:
    """No symmetry; singular values from 1 to 4, eigenvalues in the right half plane."""
    rest = unitary(dtype, n, seed) @ unitary(dtype, n, seed + 1)
    return _system(2.5 * np.eye(n) + 1.5 * rest, dtype, wide(random_vector(dtype, n, seed=seed + 2)))


def definite(dtype, n=10, seed=0) -> System:
    """Eigenvalues from 1 to 4."""
    return System(hermitian(dtype, np.linspace(1, 4, n), seed), random_vector(dtype, n, seed=seed + 2))


def indefinite(dtype, n=10, seed=0) -> System:
    """Half of the eigenvalues from 1 to 4, half of them from -4 to -1."""
    half = np.linspace(1, 4, (n + 1) // 2)
    eigenvalues = np.concatenate([half, -half])[:n]
    return System(hermitian(dtype, eigenvalues, seed), random_vector(dtype, n, seed=seed + 2))


def suited(method, dtype, n=10, seed=0) -> System:
    """The most general well-conditioned system that a method is meant for."""
    kinds = {"cg": definite, "cholesky": definite, "minres": indefinite}
    return kinds.get(method, general)(dtype, n, seed)


def true_residual(matrix, x, rhs) -> float:
    """Norm of b - A x, in extended precision from the numbers as they are."""
    matrix, x, rhs = np.asarray(matrix), np.asarray(x), np.asarray(rhs)
    extended = np.clongdouble if any(is_complex(a.dtype) for a in (matrix, x, rhs)) else np.longdouble
    return norm(rhs.astype(extended) - matrix.astype(extended) @ x.astype(extended))


def norm(x) -> float:
    """The 2-norm in extended precision, where no square of a float32 or float64 overflows or vanishes."""
    x = np.asarray(x)
    x = x.astype(np.clongdouble if is_complex(x.dtype) else np.longdouble)
    return float(np.sqrt(np.sum(x.real**2 + x.imag**2)))


def rounding(matrix, x, rhs) -> float:
    r"""How far b - A x may be off when it is computed in the precision of x.

    Rounding errors grow with the square root of the number of terms, Higham & Mary (2019), doi:10.1137/18M1226312.
    """
    sizes = np.abs(wide(matrix)) @ np.abs(wide(x)) + np.abs(wide(rhs))
    return float(np.sqrt(len(rhs)) * eps(np.asarray(x).dtype) * norm(sizes))


def assert_honest_least_squares(solution, matrix, rhs, rtol, atol=0.0, damping=0.0) -> None:
    """The norms are those of x, and CONVERGED is said just where the residual or the gradient is within tolerance."""
    x = np.asarray(solution.x)
    assert np.all(np.isfinite(x)), solution
    matrix, rhs, x = (a.astype(np.clongdouble if is_complex(a.dtype) else np.longdouble) for a in (matrix, rhs, x))
    r = rhs - matrix @ x
    objective = np.hypot(norm(r), damping * norm(x))
    gradient = norm(matrix.conj().T @ r - damping**2 * x)
    slack = rounding(matrix, solution.x, rhs)
    operator_norm = np.linalg.norm(np.vstack([wide(matrix), damping * np.eye(len(x))]), 2)
    slope_slack = np.sqrt(len(rhs)) * operator_norm * (slack + eps(np.asarray(solution.x).dtype) * objective)
    assert abs(float(solution.residual_norm) - norm(r)) <= slack + 1e-6 * norm(r), solution
    assert abs(float(solution.objective_norm) - objective) <= slack + 1e-6 * objective, solution
    assert abs(float(solution.gradient_norm) - gradient) <= slope_slack + 1e-6 * gradient, (solution, gradient)
    assert float(solution.operator_norm) <= operator_norm * (1 + 100 * eps(np.asarray(solution.x).dtype))
    within = objective <= max(rtol * norm(rhs), atol) + slack
    flat = gradient <= rtol * operator_norm * objective + slope_slack
    if bool(solution.converged):
        assert within or flat, (solution, objective, gradient)


def assert_honest(solution, matrix, rhs, rtol, atol=0.0) -> None:
    """x is finite, ``residual_norm`` its true residual, and CONVERGED said just where that is within the tolerance."""
    x = np.asarray(solution.x)
    assert np.all(np.isfinite(x)), solution
    found, slack = true_residual(matrix, x, rhs), rounding(matrix, x, rhs)
    tolerance = max(rtol * norm(rhs), atol)
    assert abs(float(solution.residual_norm) - found) <= slack + 1e-6 * found, (solution, found)
    if bool(solution.converged):
        assert found <= tolerance + slack, (solution, found, tolerance)
    else:
        assert found >= tolerance - slack, (solution, found, tolerance)
