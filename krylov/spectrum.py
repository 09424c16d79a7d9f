"""Eigenvalues, spectral densities, traces and determinants from products alone, and the shift a spectrum asks for."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Inexact, Int

from krylov.operators.base import LinearOperator, Vector
from krylov.operators.convert import as_operator
from krylov.operators.structure import describe

from .coordinates import combine, coordinates_of, multiply_rows, orthonormalise, overlaps
from .preconditioners.base import positive_count
from .processes import _lanczos, away_from

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

    Raises:
        ValueError: not square, more eigenvalues than dimensions, an unknown ``which``.

    Example:
        >>> found = krylov.eigsh(jnp.diag(jnp.arange(1.0, 101.0)), k=2)
        >>> [f"{value:.2f}" for value in found.values], bool(found.converged)
        (['100.00', '99.00'], True)

    Reference: Wu & Simon (2000), doi:10.1137/S0895479898334605.
    """
    op = _square("eigsh", op)
    coordinates, k = coordinates_of(op), positive_count("eigsh", "k", k)
    if which not in ("largest", "smallest", "magnitude"):
        raise ValueError(f"eigsh: which must be 'largest', 'smallest' or 'magnitude'.\n  got       {which!r}")
    if k > coordinates.size:
        raise ValueError(f"eigsh: k must not exceed the dimension.\n  got       {k}\n  expected  <= {coordinates.size}")
    size = min(coordinates.size, max(2 * k + 1, k + 20) if basis_size is None else max(int(basis_size), k + 1))
    if tolerance is None:
        tolerance = 0.1 * coordinates.eps**0.5
    key = jax.random.key(0) if key is None else key
    return _eigsh(op, k, which, size, jnp.asarray(tolerance, coordinates.real_dtype), int(max_restarts), key)


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
            norm, size_of_w = jnp.linalg.norm(left), jnp.linalg.norm(w)
            # An invariant space: go on with a random vector.
            drawn = away_from(above, coordinates.random(jax.random.fold_in(key, j + 1), 1)[0])
            left = jnp.where(norm > 10 * coordinates.eps * size_of_w, left, drawn)
            left = away_from(above, left / _not_zero(jnp.linalg.norm(left)))
            return rows.at[j + 1].set(left / _not_zero(jnp.linalg.norm(left))), products

        rows, products = jax.lax.fori_loop(state.kept, size, one, (state.rows, state.products))
        core = overlaps(rows[:size], products)
        values, vectors = jnp.linalg.eigh((core + jnp.conj(core.T)) / 2)
        best = jnp.argsort(order(values))
        values, vectors = values[best].astype(real), vectors[:, best]
        ritz, moved = combine(vectors.T, rows[:size]), combine(vectors.T, products)
        norms = jnp.linalg.norm(moved[:k] - values[:k, None] * ritz[:k], axis=1)
        used = (jnp.arange(size) < keep)[:, None]
        new = jnp.zeros_like(rows).at[:size].set(jnp.where(used, ritz, 0)).at[keep].set(rows[size])
        return _Restart(
            rows=new,
            products=jnp.where(used, moved, 0),
            values=values,
            norms=norms.astype(real),
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
    norms = jnp.linalg.norm(multiply_rows(op, rows) - values[:, None] * rows, axis=1).astype(real)
    vectors = jax.vmap(coordinates.unflatten)(rows)
    return Eigenpairs(values, vectors, norms, small(norms, last), last.matvecs + k)


def _not_zero(norm):
    return jnp.where(norm > 0, norm, 1)


class SpectralDensity(NamedTuple):
    """The eigenvalues of an operator as a sum of weighted points, each point the mean of a cluster of them.

    Attributes:
        points: Ritz values, of all random vectors together.
        weights: not negative, of sum one: the fraction of the eigenvalues that a point stands for.
    """

    points: Float[Array, " k"]
    weights: Float[Array, " k"]

    def __call__(self, x: Float[Array, " n"], width: float) -> Float[Array, " n"]:
        """The density at ``x``, each point a Gaussian of this standard deviation."""
        distance = (jnp.asarray(x)[..., None] - self.points) / width
        bell = jnp.exp(-(distance**2) / 2) / (width * np.sqrt(2 * np.pi))
        return jnp.sum(self.weights * bell, axis=-1)

    def mean(self, function: Callable[[Array], Array]) -> Float[Array, ""]:
        """The mean of a function over the eigenvalues."""
        return jnp.sum(self.weights * function(self.points))


def spectral_density(op: Any, *, steps: int = 50, vectors: int = 8, key: Array | None = None) -> SpectralDensity:
    """The distribution of eigenvalues of a hermitian operator, by stochastic Lanczos quadrature.

    Args:
        op: hermitian; an operator or a matrix.
        steps: Lanczos steps for each random vector; features narrower than about the width of the spectrum over
            ``steps`` are not resolved, but at its ends.
        vectors: random vectors, whose results are averaged.
        key: default ``jax.random.key(0)``.

    Raises:
        ValueError: not square.

    Example:
        >>> density = krylov.spectral_density(jnp.diag(jnp.linspace(0.0, 1.0, 200)), steps=20)
        >>> f"{density.mean(lambda x: x):.1f} {density.weights.sum():.3f}"
        '0.5 1.000'

    Reference: Ubaru, Chen & Saad (2017), doi:10.1137/16M1104974.
    """
    op = _square("spectral_density", op)
    steps = min(positive_count("spectral_density", "steps", steps), coordinates_of(op).size)
    vectors = positive_count("spectral_density", "vectors", vectors)
    return _density(op, steps, vectors, jax.random.key(0) if key is None else key)


@eqx.filter_jit
def _density(op, steps, vectors, key) -> SpectralDensity:
    coordinates = coordinates_of(op)

    def one(key):
        start = jax.random.rademacher(key, (coordinates.size,), coordinates.real_dtype)
        process = _lanczos(op, coordinates.unflatten(start.astype(coordinates.dtype)), steps, True)
        values, states = jnp.linalg.eigh(process.matrix)
        weights = jnp.abs(states[0]) ** 2
        # Where the process has ended early, its matrix goes on with zeros, which are no eigenvalues.
        real = weights > coordinates.eps**2
        return jnp.where(real, values, values[jnp.argmax(weights)]), jnp.where(real, weights, 0)

    points, weights = jax.lax.map(one, jax.random.split(key, vectors))
    return SpectralDensity(points.reshape(-1), weights.reshape(-1) / vectors)


class Estimate(NamedTuple):
    """A number from random vectors.

    Attributes:
        value: the mean.
        error: its standard error; not a number from one vector.
    """

    value: Float[Array, ""]
    error: Float[Array, ""]


def trace(op: Any, *, rank: int = 20, vectors: int = 20, key: Array | None = None) -> Estimate:
    r"""The trace of a square operator: exact on a subspace that holds most of it, Hutchinson's estimate on the rest.

    Costs ``2 rank + vectors`` products. Over the real field it is the real trace, that of `LinearOperator.as_real`.

    Args:
        op: an operator or a matrix; best if hermitian.
        rank: vectors of the subspace; 0 leaves it out.
        vectors: random vectors for the rest.
        key: default ``jax.random.key(0)``.

    Raises:
        ValueError: not square.

    Example:
        >>> found = krylov.trace(jnp.diag(1.0 / jnp.arange(1, 101) ** 2))
        >>> f"{found.value:.2f}"
        '1.63'

    Reference: Meyer, Musco, Musco & Woodruff (2021), doi:10.1137/1.9781611976496.16.
    """
    op = _square("trace", op)
    if rank:
        rank = min(positive_count("trace", "rank", rank), coordinates_of(op).size)
    vectors = positive_count("trace", "vectors", vectors)
    return _trace(op, rank, vectors, jax.random.key(0) if key is None else key)


@eqx.filter_jit
def _trace(op, rank, vectors, key) -> Estimate:
    coordinates = coordinates_of(op)
    first, second = jax.random.split(key)
    exact = jnp.zeros((), coordinates.dtype)
    tests = jax.random.rademacher(second, (vectors, coordinates.size), coordinates.real_dtype).astype(coordinates.dtype)
    if rank:
        space = orthonormalise(multiply_rows(op, orthonormalise(coordinates.random(first, rank))))
        exact = jnp.trace(overlaps(space, multiply_rows(op, space)))
        tests = tests - combine(overlaps(space, tests).T, space)
    each = jnp.sum(jnp.conj(tests) * multiply_rows(op, tests), axis=1)
    if op.is_hermitian:
        exact, each = exact.real, each.real
    error = jnp.std(each) / jnp.sqrt(vectors - 1) if vectors > 1 else jnp.full((), jnp.nan, coordinates.real_dtype)
    return Estimate(exact + jnp.mean(each), error)


def logdet(
    op: Any, *, shift: Any = 0.0, steps: int = 50, vectors: int = 20, key: Array | None = None
) -> Float[Array, ""]:
    r"""The logarithm of the determinant of :math:`A + s`, hermitian positive definite, by Lanczos quadrature.

    Args:
        op: hermitian positive.
        shift: real and large enough to make it definite.
        steps: Lanczos steps for each random vector; about the root of the condition number.
        vectors: random vectors; the error falls like one over their root.
        key: default ``jax.random.key(0)``.

    Raises:
        ValueError: not square.

    Example:
        >>> f"{krylov.logdet(jnp.diag(jnp.full(50, 2.0))):.3f}"
        '34.657'

    Reference: Ubaru, Chen & Saad (2017), doi:10.1137/16M1104974.
    """
    op = _square("logdet", op)
    density = spectral_density(op, steps=steps, vectors=vectors, key=key)
    return coordinates_of(op).size * density.mean(lambda x: jnp.log(x + shift))


def suggest_shift(
    op: Any, condition: float = 1e4, *, smallest: float = 0.0, steps: int = 30, key: Array | None = None
) -> Float[Array, ""]:
    r"""The smallest shift that is sure to bring the condition number of a positive operator down to ``condition``.

    :math:`s = (\lambda_{\max} - \kappa \lambda_{\min}) / (\kappa - 1)`, and zero where none is needed. The largest
    eigenvalue is found by ``steps`` products with one random vector; the smallest, which so few do not show, must be
    known.

    Args:
        op: hermitian positive.
        condition: the condition number wanted, more than one.
        smallest: a lower bound of the eigenvalues; zero for a gram.
        steps: products.
        key: default ``jax.random.key(0)``.

    Raises:
        ValueError: not square, or a condition number of one or less.

    Example:
        >>> f"{krylov.suggest_shift(jnp.diag(jnp.linspace(0.0, 9.9, 100)), condition=100.0, steps=100):.2f}"
        '0.10'
    """
    if not condition > 1:
        raise ValueError(f"suggest_shift: condition must be more than one.\n  got       {condition!r}")
    density = spectral_density(op, steps=steps, vectors=1, key=key)
    largest = jnp.max(density.points)
    return jnp.maximum((largest - condition * smallest) / (condition - 1), 0)


def _square(name: str, op: Any) -> LinearOperator:
    op = as_operator(op, where=name)
    if not op.is_square:
        raise ValueError(
            f"{name}: the operator is not square.\n  input     {describe(op.in_structure())}\n"
            f"  output    {describe(op.out_structure())}\n  Take op.H @ op for singular values."
        )
    return op
