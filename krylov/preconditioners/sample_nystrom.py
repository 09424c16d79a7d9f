"""Nystrom approximation from pivoted rows of a Jacobian."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from krylov.operators.base import LinearOperator
from krylov.operators.gram import CogramOperator, GramOperator
from krylov.operators.jacobian import Jacobian
from krylov.operators.rows import by_numbers, row_parts
from krylov.operators.sample_rows import adjoint_rows, row_norms

from ..coordinates import Coordinates, coordinates_of, multiply_rows, orthonormalise, whole
from .base import Preconditioner, positive_count
from .nystrom import blocks
from .spectral import SpectralInverse, absorb, from_factor, left_over, stabilising_ridge


class SampleNystrom(Preconditioner):
    r"""Nystrom preconditioner from rows of J, for :math:`S = J^H J` and :math:`T = J J^H`.

    Samples are drawn in blocks with probabilities in proportion to the part of their rows that is not yet spanned by
    the rows drawn before (randomly pivoted Cholesky). The rows stand in for the random vectors of `Nystrom` and, being
    made of what S consists of, find more of it for the same rank. A row is one number of the output on one sample: over
    the real field real and imaginary part count apart. Costs ``rank`` products and two passes over per-sample
    gradients; stores ``2 rank`` vectors while it is built and ``rank`` afterwards.

    Args:
        rank: most rows.
        tolerance: stop before ``rank`` once the eigenvalues left out are estimated to be at most this times the shift
            given to ``build``; 0 never stops early.
        block_size: rows drawn at a time.

    Raises:
        ValueError: a rank or block size below one, a negative tolerance.
        TypeError: on building, an operator that is neither ``J.gram()`` nor ``J.cogram()``.

    Example:
        >>> f = lambda w, x: jnp.tanh(x @ w)
        >>> x = jax.random.normal(jax.random.key(0), (50, 20)) / jnp.arange(1, 21) ** 2
        >>> S = krylov.Jacobian(f, jnp.ones(20), x).gram()
        >>> sol = krylov.solve(S, jnp.ones(20), shift=1e-4, preconditioner=krylov.SampleNystrom(rank=10))
        >>> bool(sol.converged)
        True

    Reference: Chen, Epperly, Tropp & Webber (2025), doi:10.1002/cpa.22234.
    """

    rank: int
    tolerance: float
    block_size: int

    def __init__(self, rank: int = 256, tolerance: float = 1.0, *, block_size: int = 32):
        self.rank = positive_count("SampleNystrom", "rank", rank)
        self.block_size = positive_count("SampleNystrom", "block_size", block_size)
        if not tolerance >= 0:
            raise ValueError(f"SampleNystrom: tolerance must not be negative.\n  got       {tolerance!r}")
        self.tolerance = float(tolerance)

    def _check(self, op: LinearOperator) -> None:
        if not isinstance(op, (GramOperator, CogramOperator)):
            raise TypeError(
                f"SampleNystrom.build: it takes rows of a Jacobian.\n  got       {op!r}\n"
                "  expected  J.gram() or J.cogram()\n  Nystrom takes any positive operator."
            )

    def _build(self, op: LinearOperator, key: Array, shift: Any) -> SpectralInverse:
        assert isinstance(op, (GramOperator, CogramOperator))
        J, gram = op.jacobian, isinstance(op, GramOperator)
        inputs, outputs = coordinates_of(J), Coordinates(J.out_structure(), J.field)
        rank = min(self.rank, inputs.size, outputs.size)
        count, size = blocks(rank, self.block_size, rank)
        parts = row_parts(J)
        weights = whole(row_norms(J, parts))

        def going(state):
            return (state.blocks < count) & (state.left > self.tolerance * shift)

        def step(state):
            start = state.blocks * size
            samples, numbers = _draw(jax.random.fold_in(key, state.blocks), state.weights, size)
            rows = orthonormalise(adjoint_rows(J, parts, samples, numbers).astype(inputs.dtype), state.basis)
            rows = jnp.where((start + jnp.arange(size) < rank)[:, None], rows, 0)
            pushed = multiply_rows(J, rows)
            if gram:
                products = multiply_rows(J.H, pushed)
                ridge = jnp.where(state.blocks == 0, stabilising_ridge(products, inputs), state.ridge)
                new = absorb(state.factor, rows, products, ridge)
            else:
                ridge, new = state.ridge, pushed
            return _State(
                basis=state.basis.at[start + jnp.arange(size)].set(rows),
                factor=state.factor.at[start + jnp.arange(size)].set(new),
                weights=jnp.maximum(state.weights - _spanned(J, outputs, pushed), 0),
                left=left_over(new).astype(state.left.dtype),
                ridge=ridge,
                blocks=state.blocks + 1,
            )

        coordinates = inputs if gram else outputs
        nothing = jnp.zeros((), coordinates.real_dtype)
        first = _State(
            basis=jnp.zeros((count * size, inputs.size), inputs.dtype),
            factor=jnp.zeros((count * size, coordinates.size), coordinates.dtype),
            weights=weights,
            left=jnp.full_like(nothing, jnp.inf),
            ridge=nothing,
            blocks=jnp.asarray(0, jnp.int32),
        )
        last = jax.lax.while_loop(going, step, first)
        reached = jnp.minimum(last.blocks * size, rank).astype(jnp.int32)
        # Each of the two passes over per-sample gradients is counted as a product.
        built = from_factor(last.factor, last.ridge, reached, shift, reached + 2, coordinates)
        if rank < min(inputs.size, outputs.size):
            return built
        # All rows, or rows that span all gradients: nothing is left.
        return eqx.tree_at(lambda b: b.rest, built, jnp.where(reached == rank, 0, built.rest))


class _State(NamedTuple):
    basis: Inexact[Array, "k n"]  # orthonormal, of the rows drawn
    factor: Inexact[Array, "k m"]
    weights: Float[Array, "N numbers"]  # squared norms of what is left of each row
    left: Float[Array, ""]
    ridge: Float[Array, ""]
    blocks: Int[Array, ""]


def _draw(key: Array, weights: Float[Array, "N numbers"], count: int) -> tuple[Array, Array]:
    """Different rows, one after another in proportion to their weights: by the largest of perturbed logarithms."""
    flat = weights.reshape(-1)
    _, index = jax.lax.top_k(jnp.log(flat) + jax.random.gumbel(key, flat.shape, flat.dtype), count)
    return index // weights.shape[1], index % weights.shape[1]


def _spanned(J: Jacobian, outputs: Coordinates, pushed: Inexact[Array, "b m"]) -> Float[Array, "N numbers"]:
    """The squared norm of the part of each row in the new directions."""
    numbers = jax.vmap(lambda flat: by_numbers(J, outputs.unflatten(flat)))(pushed)
    return jnp.sum(numbers.real**2 + numbers.imag**2, axis=0)
