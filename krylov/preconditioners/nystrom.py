"""Randomized Nystrom approximation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from krylov.operators.base import Field, LinearOperator
from krylov.operators.convert import as_operator
from krylov.operators.structure import Structure, describe, same_structure

from ..coordinates import Coordinates, coordinates_of, multiply_rows, orthonormalise
from .base import Preconditioner, positive_count, without_derivatives
from .spectral import SpectralInverse, absorb, from_factor, left_over, stabilising_ridge


class Nystrom(Preconditioner):
    r"""Randomized Nystrom preconditioner: the largest eigenvalues of A from products with random vectors.

    From :math:`Y = A\Omega` it takes :math:`\hat A = Y (\Omega^H Y)^{-1} Y^H = U \Lambda U^H`, all that these
    products say of A, and inverts :math:`\hat A + \lambda_k (1 - U U^H) + s`. Worth it where the eigenvalues of A fall
    fast. Costs ``rank`` products, which come in blocks, and stores ``rank`` vectors. Over the complex field
    (``holomorphic=True``) half the rank does as much as over the real one.

    Args:
        rank: most random vectors.
        tolerance: stop before ``rank`` once the eigenvalues left out are estimated to be at most this times the shift
            given to ``build``; 0 never stops early.
        block_size: products at a time.

    Raises:
        ValueError: a rank or block size below one, a negative tolerance.

    Example:
        >>> op = krylov.operators.MatrixOperator(jnp.diag(1.0 / jnp.arange(1, 201) ** 2), positive=True)
        >>> M = krylov.Nystrom(rank=40).build(op)
        >>> plain = krylov.solve(op, jnp.ones(200), shift=1e-4)
        >>> sol = krylov.solve(op, jnp.ones(200), shift=1e-4, preconditioner=M)
        >>> bool(sol.converged), bool(2 * sol.iterations < plain.iterations)
        (True, True)

    Reference: Frangella, Tropp & Udell (2023), doi:10.1137/21M1466244.
    """

    rank: int
    tolerance: float
    block_size: int

    def __init__(self, rank: int = 256, tolerance: float = 1.0, *, block_size: int = 32):
        self.rank = positive_count("Nystrom", "rank", rank)
        self.block_size = positive_count("Nystrom", "block_size", block_size)
        if not tolerance >= 0:
            raise ValueError(f"Nystrom: tolerance must not be negative.\n  got       {tolerance!r}")
        self.tolerance = float(tolerance)

    def _build(self, op: LinearOperator, key: Array, shift: Any) -> SpectralInverse:
        coordinates = coordinates_of(op)
        count, size = blocks(self.rank, self.block_size, coordinates.size)

        def tests(j):
            return orthonormalise(coordinates.random(jax.random.fold_in(key, j), size))

        return sketch(op, tests, count, size, min(self.rank, coordinates.size), self.tolerance, shift)

    def refresh(self, op: Any, built: SpectralInverse, key: Array | None = None) -> SpectralInverse:
        r"""Rebuild for an operator that has changed slowly, with the old eigenvectors in place of random vectors.

        Being a step of subspace iteration, it finds the eigenvalues better than building anew does.

        Args:
            op: like the operator that ``built`` was built for.
            built: what ``build`` or ``refresh`` returned; keeps its shift.
            key: for random vectors beside the old ones where ``built`` had stopped early.

        Raises:
            ValueError: ``built`` is of another recipe or of another operator.
        """
        op = as_operator(op, where="Nystrom.refresh")
        rows = rows_of(self, op.in_structure(), op.field)
        fits = isinstance(built, SpectralInverse) and same_structure(built.in_structure(), op.in_structure())
        if not fits or built.basis.shape[0] != rows or built.field != op.field:
            raise ValueError(
                "Nystrom.refresh: built must come from this recipe and an operator like this one.\n"
                f"  got       {built!r}\n  expected  {rows} columns on {describe(op.in_structure())}, {op.field} field"
            )
        op, built = without_derivatives((op, built))
        return _refresh(self, op, jax.random.key(0) if key is None else key, built)


def rows_of(recipe: Nystrom, structure: Structure, field: Field) -> int:
    """The number of vectors that are stored for an operator."""
    count, size = blocks(recipe.rank, recipe.block_size, Coordinates(structure, field).size)
    return min(count * size, Coordinates(structure, field).size)


@eqx.filter_jit
def _refresh(recipe: Nystrom, op: LinearOperator, key: Array, built: SpectralInverse) -> SpectralInverse:
    coordinates = coordinates_of(op)
    count, size = blocks(recipe.rank, recipe.block_size, coordinates.size)
    basis = jnp.pad(built.basis, ((0, count * size - built.basis.shape[0]), (0, 0)))

    def tests(j):
        old = jax.lax.dynamic_slice_in_dim(basis, j * size, size)
        used = j * size + jnp.arange(size) < built.rank

        def filled_up():
            drawn = orthonormalise(coordinates.random(jax.random.fold_in(key, j), size), built.basis)
            return jnp.where(used[:, None], old, drawn)

        return jax.lax.cond(jnp.all(used), lambda: old, filled_up)

    return sketch(op, tests, count, size, min(recipe.rank, coordinates.size), recipe.tolerance, built.shift)


def blocks(rank: int, block_size: int, dimension: int) -> tuple[int, int]:
    """The number of blocks and their size, for a rank that must not exceed the dimension."""
    rank = min(rank, dimension)
    count = -(-rank // block_size)
    return count, -(-rank // count)


class _Sketch(NamedTuple):
    factor: Inexact[Array, "k n"]
    left: Float[Array, ""]
    ridge: Float[Array, ""]
    blocks: Int[Array, ""]


def sketch(
    op: LinearOperator,
    tests: Callable[[Int[Array, ""]], Inexact[Array, "b n"]],
    count: int,
    size: int,
    rank: int,
    tolerance: float,
    shift: Float[Array, ""],
) -> SpectralInverse:
    """The Nystrom approximation from blocks of test vectors, until what a block finds is small beside the shift."""
    coordinates = coordinates_of(op)
    real, nothing = coordinates.real_dtype, jnp.zeros((), coordinates.real_dtype)

    def going(state):
        return (state.blocks < count) & (state.left > tolerance * shift)

    def step(state):
        start = state.blocks * size
        omega = jnp.where((start + jnp.arange(size) < rank)[:, None], tests(state.blocks), 0)
        products = multiply_rows(op, omega)
        ridge = jnp.where(state.blocks == 0, stabilising_ridge(products, coordinates), state.ridge)
        rows = absorb(state.factor, omega, products, ridge)
        factor = state.factor.at[start + jnp.arange(size)].set(rows)
        return _Sketch(factor, left_over(rows).astype(real), ridge, state.blocks + 1)

    factor = jnp.zeros((count * size, coordinates.size), coordinates.dtype)
    first = _Sketch(factor, jnp.full_like(nothing, jnp.inf), nothing, jnp.asarray(0, jnp.int32))
    last = jax.lax.while_loop(going, step, first)
    reached = jnp.minimum(last.blocks * size, rank).astype(jnp.int32)
    return from_factor(last.factor, last.ridge, reached, shift, reached, coordinates)
