"""One small operator of each kind, with its dense matrix in double precision.

The matrix acts on real parts of all leaves followed by imaginary parts of the complex ones. So one reference serves
C-linear and R-linear operators, and the adjoint in either inner product is its transpose.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from jax.experimental import sparse

from krylov.operators import (
    BlockDiagonalOperator,
    DiagonalOperator,
    FunctionOperator,
    IdentityOperator,
    LowRankPlusDiagonal,
    MatrixOperator,
    as_operator,
    complexify,
    conjugate_operator,
    shifted,
)

N = 4


class Case(NamedTuple):
    """An operator, its real dense matrix, and what it should claim."""

    op: Any
    matrix: np.ndarray
    hermitian: bool = False
    positive: bool = False


def is_complex(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.complexfloating))


def flat(vector: Any) -> np.ndarray:
    """Real parts of all leaves, then imaginary parts of the complex ones, in double precision."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(vector)]
    wide = [x.astype(np.complex128 if is_complex(x) else np.float64).ravel() for x in leaves]
    return np.concatenate([np.zeros(0), *(x.real for x in wide), *(x.imag for x in wide if is_complex(x))])


def unflat(values: np.ndarray, structure: Any) -> Any:
    """Inverse of `flat`, in NumPy arrays of the dtypes of the structure."""
    leaves, tree = jax.tree.flatten(structure)
    sizes = [int(np.prod(s.shape)) for s in leaves]
    parts = np.split(values, np.cumsum(sizes + [n for n, s in zip(sizes, leaves) if is_complex(s)])[:-1])
    imaginary = iter(parts[len(leaves) :])
    out = []
    for part, s in zip(parts, leaves):
        entries = part + 1j * next(imaginary) if is_complex(s) else part
        out.append(entries.reshape(s.shape).astype(s.dtype))
    return jax.tree.unflatten(tree, out)


def real_form(matrix: np.ndarray, dtype: Any) -> np.ndarray:
    """The real matrix of a map between vectors of this dtype."""
    if not np.issubdtype(np.dtype(dtype), np.complexfloating):
        return np.asarray(matrix, np.float64)
    matrix = np.asarray(matrix, np.complex128)
    return np.block([[matrix.real, -matrix.imag], [matrix.imag, matrix.real]])


def normal(rng: np.random.Generator, dtype: Any, *shape: int) -> np.ndarray:
    """Normal entries that are exact in the dtype."""
    values = rng.normal(size=shape)
    if np.issubdtype(np.dtype(dtype), np.complexfloating):
        values = values + 1j * rng.normal(size=shape)
    return values.astype(dtype)


def real_of(dtype: Any) -> np.dtype:
    return np.dtype(np.zeros((), dtype).real.dtype)


def tree_of(dtype: Any) -> Any:
    """A structure of N entries."""
    return {"b": [jax.ShapeDtypeStruct((), dtype)], "w": jax.ShapeDtypeStruct((1, N - 1), dtype)}


def vector(rng: np.random.Generator, structure: Any) -> Any:
    """A random vector of a structure, as JAX arrays."""
    size = flat(jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), structure)).size
    return jax.tree.map(jnp.asarray, unflat(rng.normal(size=size), structure))


def _square(rng, dtype):
    return normal(rng, dtype, N, N)


def _positive(rng, dtype):
    a = _square(rng, dtype)
    return a @ a.conj().T + 0.5 * np.eye(N, dtype=dtype)


def _sparse(rng, dtype):
    return np.where(rng.uniform(size=(N, N)) < 0.5, _square(rng, dtype), 0)


def matrix(rng, dtype):
    a = _square(rng, dtype)
    return Case(MatrixOperator(a), real_form(a, dtype))


def wide_matrix(rng, dtype):
    a = normal(rng, dtype, N - 1, N)
    return Case(MatrixOperator(a), real_form(a, dtype))


def positive_matrix(rng, dtype):
    a = _positive(rng, dtype)
    return Case(MatrixOperator(a, positive=True), real_form(a, dtype), True, True)


def bcoo_matrix(rng, dtype):
    a = _sparse(rng, dtype)
    # With room for entries that are not there.
    return Case(MatrixOperator(sparse.BCOO.fromdense(jnp.asarray(a), nse=N * N)), real_form(a, dtype))


def bcsr_matrix(rng, dtype):
    a = _sparse(rng, dtype)
    return Case(MatrixOperator(sparse.BCSR.fromdense(jnp.asarray(a))), real_form(a, dtype))


def scipy_matrix(rng, dtype):
    a = _sparse(rng, dtype)
    return Case(MatrixOperator(scipy.sparse.csr_array(a)), real_form(a, dtype))


def matrix_on_trees(rng, dtype):
    a = _square(rng, dtype)
    op = MatrixOperator(a, in_structure=tree_of(dtype), out_structure=(np.zeros((2, 2), dtype),))
    return Case(op, real_form(a, dtype))


def diagonal(rng, dtype):
    d = normal(rng, dtype, N)
    hermitian = not np.iscomplexobj(d)
    return Case(DiagonalOperator({"d": d}), real_form(np.diag(d), dtype), hermitian)


def real_diagonal(rng, dtype):
    d = np.abs(normal(rng, real_of(dtype), N))
    return Case(DiagonalOperator(d, np.zeros(N, dtype)), real_form(np.diag(d), dtype), True, True)


def function(rng, dtype):
    a, structure = jnp.asarray(_square(rng, dtype)), tree_of(dtype)

    def fn(x):
        y = a @ jnp.concatenate([x["b"][0][None], x["w"][0]])
        return {"b": [y[0]], "w": y[None, 1:]}

    return Case(FunctionOperator(fn, structure), real_form(a, dtype))


def function_with_adjoint(rng, dtype):
    a = jnp.asarray(normal(rng, dtype, N - 1, N))
    op = FunctionOperator(lambda x: a @ x, np.zeros(N, dtype), adjoint=lambda y: a.conj().T @ y)
    return Case(op, real_form(a, dtype))


def hermitian_function(rng, dtype):
    a = _square(rng, dtype)
    a = jnp.asarray(a + a.conj().T)
    return Case(FunctionOperator(lambda x: a @ x, np.zeros(N, dtype), hermitian=True), real_form(a, dtype), True)


def identity(rng, dtype):
    return Case(IdentityOperator(tree_of(dtype)), real_form(np.eye(N), dtype), True, True)


def sum_of_three(rng, dtype):
    a, b, c = (_square(rng, dtype) for _ in range(3))
    op = MatrixOperator(a) + MatrixOperator(b) - MatrixOperator(c)
    return Case(op, real_form(a + b - c, dtype))


def sum_of_positive(rng, dtype):
    a, b = _positive(rng, dtype), _positive(rng, dtype)
    op = MatrixOperator(a, positive=True) + MatrixOperator(b, positive=True)
    return Case(op, real_form(a + b, dtype), True, True)


def scaled(rng, dtype):
    a = _positive(rng, dtype)
    return Case(2 * MatrixOperator(a, positive=True), real_form(2 * a, dtype), True, True)


def negated(rng, dtype):
    a = _positive(rng, dtype)
    return Case(-MatrixOperator(a, positive=True), real_form(-a, dtype), True)


def divided(rng, dtype):
    a = _square(rng, dtype)
    return Case(MatrixOperator(a) / np.float32(4), real_form(a / 4, dtype))


def shifted_by_number(rng, dtype):
    a = _positive(rng, dtype)
    return Case(shifted(MatrixOperator(a, positive=True), 0.5), real_form(a + 0.5 * np.eye(N), dtype), True, True)


def shifted_by_tree(rng, dtype):
    a, d, structure = _square(rng, dtype), normal(rng, real_of(dtype), N), tree_of(dtype)
    shift = {"b": [d[0]], "w": d[None, 1:]}
    op = shifted(MatrixOperator(a, in_structure=structure), shift)
    return Case(op, real_form(a + np.diag(d), dtype))


def composed(rng, dtype):
    a, b = normal(rng, dtype, N, 3), normal(rng, dtype, 3, N)
    return Case(MatrixOperator(a) @ MatrixOperator(b), real_form(a @ b, dtype))


def composed_gram(rng, dtype):
    a = normal(rng, dtype, 3, N)
    op = MatrixOperator(a)
    return Case(op.H @ op, real_form(a.conj().T @ a, dtype), True, True)


def adjoint(rng, dtype):
    a = normal(rng, dtype, 3, N)
    return Case(MatrixOperator(a).H, real_form(a.conj().T, dtype))


def conjugated(rng, dtype):
    a = _square(rng, dtype)
    return Case(conjugate_operator(MatrixOperator(a)), real_form(a.conj(), dtype))


def transposed(rng, dtype):
    a = normal(rng, dtype, 3, N)
    return Case(MatrixOperator(a).T, real_form(a.T, dtype))


def as_real(rng, dtype):
    a = _square(rng, dtype)
    return Case(MatrixOperator(a).as_real(), real_form(a, dtype))


def blocks(rng, dtype):
    a, b = normal(rng, dtype, 2, N), normal(rng, dtype, 3, 1)
    dense = np.block([[a, np.zeros((2, 1))], [np.zeros((3, N)), b]])
    return Case(BlockDiagonalOperator([MatrixOperator(a), MatrixOperator(b)]), real_form(dense, dtype))


def low_rank(rng, dtype):
    u, w, d = normal(rng, dtype, N, 2), np.array([1.0, 3.0]), 0.5
    op = LowRankPlusDiagonal(d, {"u": u}, w.astype(real_of(dtype)))
    return Case(op, real_form(d * np.eye(N) + (u * w) @ u.conj().T, dtype), True, True)


def low_rank_plus_tree(rng, dtype):
    u, w, d = normal(rng, dtype, N, 2), np.array([1.0, -3.0]), normal(rng, real_of(dtype), N)
    basis = {"b": [u[0]], "w": u[None, 1:]}
    op = LowRankPlusDiagonal({"b": [d[0]], "w": d[None, 1:]}, basis, w)
    return Case(op, real_form(np.diag(d) + (u * w) @ u.conj().T, dtype), True)


def from_lineax(rng, dtype):
    a = _positive(rng, dtype)
    op = as_operator(lx.MatrixLinearOperator(jnp.asarray(a), lx.positive_semidefinite_tag))
    return Case(op, real_form(a, dtype), True, True)


def from_scipy(rng, dtype):
    a = normal(rng, dtype, 3, N)
    return Case(as_operator(scipy.sparse.linalg.aslinearoperator(a)), real_form(a, dtype))


def real_on_complex(rng, dtype):
    """Of real dtypes only."""
    a = _square(rng, real_of(dtype))
    return Case(complexify(MatrixOperator(a)), real_form(a, np.complex128))


UNIFORM: list[Callable[[np.random.Generator, Any], Case]] = [
    matrix,
    wide_matrix,
    positive_matrix,
    bcoo_matrix,
    bcsr_matrix,
    scipy_matrix,
    matrix_on_trees,
    diagonal,
    real_diagonal,
    function,
    function_with_adjoint,
    hermitian_function,
    identity,
    sum_of_three,
    sum_of_positive,
    scaled,
    negated,
    divided,
    shifted_by_number,
    shifted_by_tree,
    composed,
    composed_gram,
    adjoint,
    conjugated,
    transposed,
    as_real,
    blocks,
    low_rank,
    low_rank_plus_tree,
    from_lineax,
    from_scipy,
    real_on_complex,
]


# Operators that are only R-linear, between trees of real and complex leaves.


def mixed_tree(dtype: Any) -> Any:
    """Two real entries and two complex ones: six numbers."""
    return {"c": jax.ShapeDtypeStruct((1, 2), dtype), "r": jax.ShapeDtypeStruct((2,), real_of(dtype))}


def _mixed_matrix(rng):
    return rng.normal(size=(6, 6))


def _act(a, x):
    """The matrix on `flat` vectors of `mixed_tree`."""
    y = a @ jnp.concatenate([x["c"][0].real, x["r"], x["c"][0].imag])
    return {"c": jax.lax.complex(y[:2], y[4:])[None], "r": y[2:4]}


def mixed_function(rng, dtype):
    a = jnp.asarray(_mixed_matrix(rng), real_of(dtype))
    return Case(FunctionOperator(lambda x: _act(a, x), mixed_tree(dtype)), np.asarray(a, np.float64))


def mixed_function_with_adjoint(rng, dtype):
    a = jnp.asarray(_mixed_matrix(rng), real_of(dtype))
    op = FunctionOperator(lambda x: _act(a, x), mixed_tree(dtype), adjoint=lambda y: _act(a.T, y))
    return Case(op, np.asarray(a, np.float64))


def mixed_positive_function(rng, dtype):
    a = _mixed_matrix(rng)
    a = jnp.asarray(a @ a.T, real_of(dtype))
    op = FunctionOperator(lambda x: _act(a, x), mixed_tree(dtype), positive=True)
    return Case(op, np.asarray(a, np.float64), True, True)


def mixed_matrix(rng, dtype):
    """A complex matrix on ravelled leaves, of whose result real leaves take the real part."""
    a = normal(rng, dtype, N, N)
    structure = mixed_tree(dtype)
    op = MatrixOperator(a, in_structure=structure)
    columns = []
    for e in np.eye(6):
        x = unflat(e, structure)
        y = a.astype(np.complex128) @ np.concatenate([x["c"][0], x["r"]])
        columns.append(np.concatenate([y.real, y[:2].imag]))
    return Case(op, np.array(columns).T)


def mixed_blocks(rng, dtype):
    a, b = normal(rng, dtype, 2, 2), normal(rng, real_of(dtype), 2, 2)
    dense, zero = real_form(a, np.complex128), np.zeros((2, 2))
    matrix = np.block([[dense[:2, :2], zero, dense[:2, 2:]], [zero, b, zero], [dense[2:, :2], zero, dense[2:, 2:]]])
    return Case(BlockDiagonalOperator([MatrixOperator(a), MatrixOperator(b)]), matrix)


def mixed_identity(rng, dtype):
    return Case(IdentityOperator(mixed_tree(dtype)), np.eye(6), True, True)


def mixed_diagonal(rng, dtype):
    d = rng.normal(size=4).astype(real_of(dtype))
    op = DiagonalOperator({"c": d[None, :2], "r": d[2:]}, mixed_tree(dtype))
    return Case(op, np.diag(np.concatenate([d, d[:2]]).astype(np.float64)), True)


def mixed_low_rank(rng, dtype):
    basis = {"c": normal(rng, dtype, 1, 2, 3), "r": normal(rng, real_of(dtype), 2, 3)}
    w = np.array([1.0, 2.0, 3.0])
    columns = [flat(jax.tree.map(lambda u, k=k: u[..., k], basis)) for k in range(3)]
    u = np.array(columns).T
    return Case(LowRankPlusDiagonal(0.5, basis, w), 0.5 * np.eye(6) + (u * w) @ u.T, True, True)


def mixed_sum(rng, dtype):
    a, b = mixed_function(rng, dtype), mixed_positive_function(rng, dtype)
    return Case(shifted(a.op + 2.0 * b.op, 0.5), a.matrix + 2 * b.matrix + 0.5 * np.eye(6))


def mixed_product(rng, dtype):
    a, b = mixed_function(rng, dtype), mixed_matrix(rng, dtype)
    return Case(a.op @ b.op.H, a.matrix @ b.matrix.T)


def mixed_gram(rng, dtype):
    a = mixed_function(rng, dtype)
    return Case(a.op.H @ a.op, a.matrix.T @ a.matrix, True, True)


def mixed_as_real(rng, dtype):
    a = mixed_function(rng, dtype)
    return Case(a.op.as_real(), a.matrix)


def conjugation_times_i(rng, dtype):
    """R-linear on complex leaves alone, times a complex number."""
    a, b = normal(rng, dtype, 2, 2), normal(rng, dtype, 2, 2)
    op = FunctionOperator(lambda x: a @ x + b @ x.conj(), np.zeros(2, dtype), field="real")
    conj = np.diag([1.0, 1, -1, -1])
    i = real_form(1j * np.eye(2), np.complex128)
    return Case(1j * op, i @ (real_form(a, np.complex128) + real_form(b, np.complex128) @ conj))


def complex_of_real(rng, dtype):
    """From real vectors to complex ones."""
    a = normal(rng, dtype, 2, 3)
    op = FunctionOperator(lambda x: a @ x, np.zeros(3, real_of(dtype)))
    return Case(op, np.concatenate([a.real, a.imag]).astype(np.float64))


MIXED: list[Callable[[np.random.Generator, Any], Case]] = [
    mixed_function,
    mixed_function_with_adjoint,
    mixed_positive_function,
    mixed_matrix,
    mixed_blocks,
    mixed_identity,
    mixed_diagonal,
    mixed_low_rank,
    mixed_sum,
    mixed_product,
    mixed_gram,
    mixed_as_real,
    conjugation_times_i,
    complex_of_real,
]
