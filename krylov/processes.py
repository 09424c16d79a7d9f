"""Krylov processes: orthonormal bases of Krylov spaces, and the operator as a small matrix in them.

A basis is kept as the rows of a matrix, in the flat coordinates of the operator's field.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from krylov.operators.base import LinearOperator, Vector, adjoint_product, product
from krylov.operators.convert import as_operator
from krylov.operators.structure import check_vector, real_dtype, structure_of

from .coordinates import Coordinates, combine, coordinates_of, overlaps
from .preconditioners.base import positive_count, square_operator
from .vectors import safe_norm


class Lanczos(NamedTuple):
    r"""``k`` steps of the Lanczos process for a hermitian operator: :math:`A V = V T + \beta_k v_{k+1} e_k^H`.

    Attributes:
        basis: the vectors of V as rows, with :math:`v_{k+1}` last.
        diagonal: of the tridiagonal T.
        off_diagonal: beside it, beta_k last.
        steps: steps taken before the space was exhausted; what comes after is zero.
        coordinates: of the rows.
    """

    basis: Inexact[Array, "k1 n"]
    diagonal: Float[Array, " k"]
    off_diagonal: Float[Array, " k"]
    steps: Int[Array, ""]
    coordinates: Coordinates

    @property
    def matrix(self) -> Float[Array, "k k"]:
        """The tridiagonal T."""
        inner = self.off_diagonal[:-1]
        return jnp.diag(self.diagonal) + jnp.diag(inner, 1) + jnp.diag(inner, -1)


class Arnoldi(NamedTuple):
    r"""``k`` steps of the Arnoldi process: :math:`A V_k = V_{k+1} H`.

    Attributes:
        basis: the vectors of V as rows.
        matrix: the upper Hessenberg matrix H.
        steps: steps taken before the space was exhausted.
        coordinates: of the rows.
    """

    basis: Inexact[Array, "k1 n"]
    matrix: Inexact[Array, "k1 k"]
    steps: Int[Array, ""]
    coordinates: Coordinates


class GolubKahan(NamedTuple):
    r"""``k`` steps of the Golub-Kahan process, :math:`A V = U B` and :math:`A^H U = V B^H + \beta_k v_{k+1} e_k^H`.

    Attributes:
        left: the vectors of U as rows.
        right: the vectors of V as rows, with :math:`v_{k+1}` last.
        diagonal: of the upper bidiagonal B.
        off_diagonal: above it, beta_k last.
        steps: steps taken before the space was exhausted.
        left_coordinates: of the rows of ``left``.
        right_coordinates: of the rows of ``right``.
    """

    left: Inexact[Array, "k m"]
    right: Inexact[Array, "k1 n"]
    diagonal: Float[Array, " k"]
    off_diagonal: Float[Array, " k"]
    steps: Int[Array, ""]
    left_coordinates: Coordinates
    right_coordinates: Coordinates

    @property
    def matrix(self) -> Float[Array, "k k"]:
        """The bidiagonal B."""
        return jnp.diag(self.diagonal) + jnp.diag(self.off_diagonal[:-1], 1)


def lanczos(op: Any, start: Vector, steps: int, *, reorthogonalise: bool = True) -> Lanczos:
    """The Lanczos process.

    Args:
        op: hermitian.
        start: first vector, need not be normalised.
        steps: products.
        reorthogonalise: against all vectors before, twice; without it the basis loses orthogonality as eigenvalues
            converge, and costs less.

    Raises:
        ValueError: the operator is not square, or ``start`` does not match it.

    Example:
        >>> process = krylov.processes.lanczos(jnp.diag(jnp.array([1.0, 2.0, 3.0])), jnp.ones(3), 3)
        >>> [f"{value:.3f}" for value in jnp.linalg.eigvalsh(process.matrix)]
        ['1.000', '2.000', '3.000']

    Reference: Lanczos (1950), doi:10.6028/jres.045.026.
    """
    op, start = _checked("lanczos", op, start)
    return _lanczos(op, start, positive_count("lanczos", "steps", steps), bool(reorthogonalise))


@eqx.filter_jit
def _lanczos(op: LinearOperator, start: Vector, steps: int, reorthogonalise: bool) -> Lanczos:
    coordinates = coordinates_of(op)
    first, _ = normalised(coordinates.flatten(start))
    rows = jnp.zeros((steps + 1, coordinates.size), coordinates.dtype).at[0].set(first)
    zero = jnp.zeros(steps, coordinates.real_dtype)

    def step(j, state):
        rows, alphas, betas, scale, count = state
        v = rows[j]
        w = coordinates.flatten(product(op, coordinates.unflatten(v)))
        alpha = jnp.real(overlaps(rows[j][None], w)[0]).astype(zero.dtype)
        w = w - alpha * v - jnp.where(j > 0, betas[j - 1], 0) * rows[jnp.maximum(j - 1, 0)]
        if reorthogonalise:
            w = away_from(rows, w)
        scale = jnp.maximum(scale, jnp.abs(alpha))
        w, beta = _next(w, scale, coordinates)
        scale = jnp.maximum(scale, beta)
        alive = jnp.any(v != 0)
        return rows.at[j + 1].set(w), alphas.at[j].set(alpha), betas.at[j].set(beta), scale, count + alive

    state = rows, zero, zero, jnp.zeros((), zero.dtype), jnp.asarray(0, jnp.int32)
    rows, alphas, betas, _, count = jax.lax.fori_loop(0, steps, step, state)
    return Lanczos(rows, alphas, betas, count, coordinates)


def arnoldi(op: Any, start: Vector, steps: int) -> Arnoldi:
    """The Arnoldi process, orthogonalised twice by classical Gram-Schmidt.

    Args:
        op: square.
        start: first vector, need not be normalised.
        steps: products.

    Raises:
        ValueError: the operator is not square, or ``start`` does not match it.

    Example:
        >>> process = krylov.processes.arnoldi(jnp.array([[0.0, 1.0], [-1.0, 0.0]]), jnp.array([1.0, 0.0]), 2)
        >>> process.matrix.shape
        (3, 2)

    Reference: Arnoldi (1951), doi:10.1090/qam/42792.
    """
    op, start = _checked("arnoldi", op, start)
    return _arnoldi(op, start, positive_count("arnoldi", "steps", steps))


@eqx.filter_jit
def _arnoldi(op: LinearOperator, start: Vector, steps: int) -> Arnoldi:
    coordinates = coordinates_of(op)
    first, _ = normalised(coordinates.flatten(start))
    rows = jnp.zeros((steps + 1, coordinates.size), coordinates.dtype).at[0].set(first)
    matrix = jnp.zeros((steps + 1, steps), coordinates.dtype)

    def step(j, state):
        rows, matrix, count = state
        w = coordinates.flatten(product(op, coordinates.unflatten(rows[j])))
        size = safe_norm(w, coordinates.real_dtype)
        column = jnp.zeros(steps + 1, coordinates.dtype)
        for _ in range(2):
            part = overlaps(rows, w)
            w, column = w - combine(part, rows), column + part
        w, beta = _next(w, size, coordinates)
        alive = jnp.any(rows[j] != 0)
        column = column.at[j + 1].set(beta.astype(column.dtype))
        return rows.at[j + 1].set(w), matrix.at[:, j].set(column), count + alive

    rows, matrix, count = jax.lax.fori_loop(0, steps, step, (rows, matrix, jnp.asarray(0, jnp.int32)))
    return Arnoldi(rows, matrix, count, coordinates)


def golub_kahan(op: Any, start: Vector, steps: int, *, reorthogonalise: bool = True) -> GolubKahan:
    """The Golub-Kahan bidiagonalisation of a rectangular operator.

    Args:
        op: any operator or matrix.
        start: first right vector, like the operator's input.
        steps: pairs of products, with the operator and with its adjoint.
        reorthogonalise: against all vectors before, twice.

    Raises:
        ValueError: ``start`` does not match.

    Example:
        >>> matrix = jnp.array([[3.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
        >>> process = krylov.processes.golub_kahan(matrix, jnp.ones(2), 2)
        >>> [f"{value:.3f}" for value in jnp.linalg.svd(process.matrix)[1]]
        ['3.000', '2.000']

    Reference: Golub & Kahan (1965), doi:10.1137/0702016.
    """
    op = as_operator(op, where="golub_kahan")
    start = check_vector("golub_kahan", "start", start, op.in_structure())
    return _golub_kahan(op, start, positive_count("golub_kahan", "steps", steps), bool(reorthogonalise))


@eqx.filter_jit
def _golub_kahan(op: LinearOperator, start: Vector, steps: int, reorthogonalise: bool) -> GolubKahan:
    inner, outer = coordinates_of(op), Coordinates(op.out_structure(), op.field)
    first, _ = normalised(inner.flatten(start))
    right = jnp.zeros((steps + 1, inner.size), inner.dtype).at[0].set(first)
    left = jnp.zeros((steps, outer.size), outer.dtype)
    zero = jnp.zeros(steps, inner.real_dtype)

    def step(j, state):
        left, right, alphas, betas, scale, count = state
        u = outer.flatten(product(op, inner.unflatten(right[j])))
        u = u - jnp.where(j > 0, betas[j - 1], 0) * left[jnp.maximum(j - 1, 0)]
        if reorthogonalise:
            u = away_from(left, u)
        u, alpha = _next(u, scale, outer)
        scale = jnp.maximum(scale, alpha)
        v = inner.flatten(adjoint_product(op, outer.unflatten(u))) - alpha * right[j]
        if reorthogonalise:
            v = away_from(right, v)
        v, beta = _next(v, scale, inner)
        alive = jnp.any(right[j] != 0) & (alpha > 0)
        left, right = left.at[j].set(u), right.at[j + 1].set(v)
        return left, right, alphas.at[j].set(alpha), betas.at[j].set(beta), jnp.maximum(scale, beta), count + alive

    state = left, right, zero, zero, jnp.zeros((), zero.dtype), jnp.asarray(0, jnp.int32)
    left, right, alphas, betas, _, count = jax.lax.fori_loop(0, steps, step, state)
    return GolubKahan(left, right, alphas, betas, count, outer, inner)


def away_from(rows: Inexact[Array, "k n"], vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
    """The part of a vector that is orthogonal to orthonormal (or zero) rows; twice, for rounding."""
    for _ in range(2):
        vector = vector - combine(overlaps(rows, vector), rows)
    return vector


def normalised(flat: Inexact[Array, " n"]) -> tuple[Inexact[Array, " n"], Float[Array, ""]]:
    """A vector of norm one, and the norm; zero stays zero."""
    norm = safe_norm(flat, real_dtype(flat.dtype))
    return flat / jnp.where(norm > 0, norm, 1).astype(flat.dtype), norm


def _next(flat: Array, scale: Array, coordinates: Coordinates) -> tuple[Array, Array]:
    """The next vector and its norm; zero where only rounding is left, which ends the process."""
    norm = safe_norm(flat, coordinates.real_dtype)
    ended = norm <= 10 * coordinates.eps * scale
    unit = flat / jnp.where(ended, 1, norm).astype(flat.dtype)
    return jnp.where(ended, 0, unit), jnp.where(ended, 0, norm)


def _checked(name: str, op: Any, start: Vector) -> tuple[LinearOperator, Vector]:
    op = square_operator(name, op, "golub_kahan takes any operator.", structure_of(start))
    return op, check_vector(name, "start", start, op.in_structure())
