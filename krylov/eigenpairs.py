"""A few eigenpairs of a hermitian operator."""

from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int

from krylov.operators.base import Vector

from .arguments import not_negative
from .coordinates import combine, coordinates_of, multiply_rows, norms_of, orthonormalise, overlaps
from .preconditioners.base import positive_count, square_operator
from .processes import away_from, normalised
from .vectors import safe_norm

Which = Literal["largest", "smallest", "magnitude"]


class Eigenpairs(NamedTuple):
    r"""A few eigenpairs of a hermitian operator.

    Attributes:
        values: eigenvalues, the wanted ones first.
        vectors: eigenvectors along a leading axis of each leaf.
        residual_norms: :math:`\|A v - \lambda v\|`, from products with the vectors.
        converged: whether all of them are below the tolerance.
        matvecs: products spent.
    """

    values: Float[Array, " k"]
    vectors: Vector
    residual_norms: Float[Array, " k"]
    converged: Bool[Array, ""]
    matvecs: Int[Array, ""]


def eigsh(
    op: Any,
    k: int = 6,
    which: Which = "largest",
    *,
    tolerance: float | None = None,
    max_restarts: int = 100,
    basis_size: int | None = None,
    key: Array | None = None,
) -> Eigenpairs:
    r"""A few eigenvalues and eigenvectors of a hermitian operator, by Lanczos with thick restarts.

    Keeps the best Ritz vectors and goes on from the last residual, fully orthogonalised. Over the real field a complex
    eigenvector counts twice, v and i v. One vector finds one vector of a multiple eigenvalue at a time.

    Args:
        op: hermitian; an operator or a matrix.
        k: how many.
        which: ``"largest"``, ``"smallest"`` or largest ``"magnitude"``.
        tolerance: of the residual norm, relative to the largest eigenvalue found; default the root of the precision
            times a tenth.
        max_restarts: restarts at most.
        basis_size: vectors stored; default ``max(2 k + 1, k + 20)``.
        key: for the first vector; default ``jax.random.key(0)``.

    Returns:
        `Eigenpairs`, the best found; ``converged`` says whether all are within the tolerance.

    Raises:
        ValueError: not square, more eigenvalues than dimensions, an unknown ``which``, a negative tolerance, or a count
            below one.

    Example:
        >>> found = krylov.eigsh(jnp.diag(jnp.arange(1.0, 101.0)), k=2)
        >>> [f"{value:.2f}" for value in found.values], bool(found.converged)
        (['100.00', '99.00'], True)

    Reference: Wu & Simon (2000), doi:10.1137/S0895479898334605.
    """
    op = square_operator("eigsh", op)
    coordinates, k = coordinates_of(op), positive_count("eigsh", "k", k)
    if which not in ("largest", "smallest", "magnitude"):
        raise ValueError(f"eigsh: which must be 'largest', 'smallest' or 'magnitude'.\n  got       {which!r}")
    if k > coordinates.size:
        raise ValueError(f"eigsh: k must not exceed the dimension.\n  got       {k}\n  expected  <= {coordinates.size}")
    size = min(coordinates.size, max(2 * k + 1, k + 20))
    if basis_size is not None:
        size = min(coordinates.size, max(positive_count("eigsh", "basis_size", basis_size), k + 1))
    if tolerance is None:
        tolerance = 0.1 * coordinates.eps**0.5
    tolerance = not_negative("eigsh", "tolerance", tolerance, coordinates.real_dtype)
    key = jax.random.key(0) if key is None else key
    return _eigsh(op, k, which, size, tolerance, positive_count("eigsh", "max_restarts", max_restarts), key)


class _Restart(NamedTuple):
    rows: Inexact[Array, "m1 n"]
    products: Inexact[Array, "m n"]
    values: Float[Array, " m"]
    norms: Float[Array, " k"]
    kept: Int[Array, ""]
    restarts: Int[Array, ""]
    matvecs: Int[Array, ""]


@eqx.filter_jit
def _eigsh(op, k, which, size, tolerance, max_restarts, key) -> Eigenpairs:
    coordinates = coordinates_of(op)
    real = coordinates.real_dtype
    # Some more Ritz vectors than wanted are kept, which speeds up the last of them.
    keep = max(min(k + (size - k) // 2, size - 1), 1)

    def order(values):
        return {"largest": -values, "smallest": values, "magnitude": -jnp.abs(values)}[which]

    def extend(state):
        """Rows from ``kept`` on, each the product with the last one, orthogonal to all before."""

        def one(j, carried):
            rows, products = carried
            w = multiply_rows(op, rows[j][None])[0]
            products = products.at[j].set(w)
            above = jnp.where((jnp.arange(size + 1) <= j)[:, None], rows, 0)
            left = away_from(above, w)
            norm, size_of_w = safe_norm(left, real), safe_norm(w, real)
            # An invariant space: go on with a random vector.
            drawn = away_from(above, coordinates.random(jax.random.fold_in(key, j + 1), 1)[0])
            left = jnp.where(norm > 10 * coordinates.eps * size_of_w, left, drawn)
            left, _ = normalised(away_from(above, normalised(left)[0]))
            return rows.at[j + 1].set(left), products

        rows, products = jax.lax.fori_loop(state.kept, size, one, (state.rows, state.products))
        core = overlaps(rows[:size], products)
        values, vectors = jnp.linalg.eigh((core + jnp.conj(core.T)) / 2)
        best = jnp.argsort(order(values))
        values, vectors = values[best].astype(real), vectors[:, best]
        ritz, moved = combine(vectors.T, rows[:size]), combine(vectors.T, products)
        norms = norms_of(moved[:k] - values[:k, None] * ritz[:k])
        used = (jnp.arange(size) < keep)[:, None]
        # Where all dimensions are asked for, nothing is orthogonal to the basis: go on from the last wanted vector.
        next_row = rows[size] if keep >= k else ritz[keep]
        new = jnp.zeros_like(rows).at[:size].set(jnp.where(used, ritz, 0)).at[keep].set(next_row)
        return _Restart(
            rows=new,
            products=jnp.where(used, moved, 0),
            values=values,
            norms=norms,
            kept=jnp.asarray(keep, jnp.int32),
            restarts=state.restarts + 1,
            matvecs=state.matvecs + size - state.kept,
        )

    def small(norms, state):
        return jnp.all(norms <= tolerance * jnp.max(jnp.abs(state.values)))

    def going(state):
        return (state.restarts < max_restarts) & ~small(state.norms, state)

    first = orthonormalise(coordinates.random(key, 1))
    count = jnp.asarray(0, jnp.int32)
    state = _Restart(
        rows=jnp.zeros((size + 1, coordinates.size), coordinates.dtype).at[0].set(first[0]),
        products=jnp.zeros((size, coordinates.size), coordinates.dtype),
        values=jnp.zeros(size, real),
        norms=jnp.full(k, jnp.inf, real),
        kept=count,
        restarts=count,
        matvecs=count,
    )
    last = jax.lax.while_loop(going, extend, state)
    # The products were combined from restart to restart: those that count are computed anew.
    rows, values = last.rows[:k], last.values[:k]
    norms = norms_of(multiply_rows(op, rows) - values[:, None] * rows)
    vectors = jax.vmap(coordinates.unflatten)(rows)
    return Eigenpairs(values, vectors, norms, small(norms, last), last.matvecs + k)
