"""Spectral densities, traces and determinants from products alone, and the shift a spectrum asks for."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .coordinates import combine, coordinates_of, multiply_rows, orthonormalise, overlaps
from .eigenpairs import Eigenpairs, eigsh
from .preconditioners.base import check_shift, positive_count, square_operator
from .processes import _lanczos
from .vectors import largest_entry, power_of_two

__all__ = ["Eigenpairs", "Estimate", "SpectralDensity", "eigsh", "logdet", "spectral_density", "suggest_shift", "trace"]


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

    Returns:
        A `SpectralDensity`, to be evaluated on a grid or integrated over.

    Raises:
        ValueError: not square, or a count below one.

    Example:
        >>> density = krylov.spectral_density(jnp.diag(jnp.linspace(0.0, 1.0, 200)), steps=20)
        >>> f"{density.mean(lambda x: x):.1f} {density.weights.sum():.3f}"
        '0.5 1.000'

    Reference: Ubaru, Chen & Saad (2017), doi:10.1137/16M1104974.
    """
    op = square_operator("spectral_density", op)
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

    Returns:
        An `Estimate`: the value and its standard error.

    Raises:
        ValueError: not square, a negative rank or no vectors.

    Example:
        >>> found = krylov.trace(jnp.diag(1.0 / jnp.arange(1, 101) ** 2))
        >>> f"{found.value:.2f}"
        '1.63'

    Reference: Meyer, Musco, Musco & Woodruff (2021), doi:10.1137/1.9781611976496.16.
    """
    op = square_operator("trace", op)
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
    # Squares must not overflow, nor vanish, which would claim certainty.
    unit = power_of_two(largest_entry(each, coordinates.real_dtype))
    error = jnp.std(each / unit) * unit / jnp.sqrt(vectors - 1) if vectors > 1 else jnp.full_like(unit, jnp.nan)
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

    Returns:
        The logarithm; NaN where a Ritz value is below zero, that is, where :math:`A + s` is not definite.

    Raises:
        ValueError: not square, or a shift that is not a real scalar.

    Example:
        >>> f"{krylov.logdet(jnp.diag(jnp.full(50, 2.0))):.3f}"
        '34.657'

    Reference: Ubaru, Chen & Saad (2017), doi:10.1137/16M1104974.
    """
    op = square_operator("logdet", op)
    coordinates = coordinates_of(op)
    shift = check_shift("logdet", shift, coordinates)
    density = spectral_density(op, steps=steps, vectors=vectors, key=key)
    return coordinates.size * density.mean(lambda x: jnp.log(x + shift))


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

    Returns:
        The shift; a little low where ``steps`` have not found the largest eigenvalue.

    Raises:
        ValueError: not square, or a condition number of one or less.

    Example:
        >>> f"{krylov.suggest_shift(jnp.diag(jnp.linspace(0.0, 9.9, 100)), condition=100.0, steps=100):.2f}"
        '0.10'

    Reference: the largest Ritz value from a random start, Kuczynski & Wozniakowski (1992), doi:10.1137/0613066.
    """
    if not condition > 1:
        raise ValueError(f"suggest_shift: condition must be more than one.\n  got       {condition!r}")
    density = spectral_density(op, steps=steps, vectors=1, key=key)
    largest = jnp.max(density.points)
    return jnp.maximum((largest - condition * smallest) / (condition - 1), 0)
