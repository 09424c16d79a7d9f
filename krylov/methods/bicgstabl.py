"""Stabilised bi-conjugate gradients with residuals minimised over several dimensions at once."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int

from krylov.operators.base import Vector

from ..units import Sizes, shown
from ..vectors import Flag, RealScalar, Scalar, Space, axpy, divide, power_of_two, scale, select, zeros_like
from .gmres import combine, overlaps
from .recurrence import RUNNING, ZERO_PIVOT, Recurrence


class BiCGStabLState(NamedTuple):
    """Row i of ``r`` and of ``u`` is that of the paper: the power i of the operator on residual and direction.

    ``half`` is False while the product with u_j is wanted, True while that with r_j is. Images are those under the
    preconditioner, which the solution moves along; the operator is multiplied by ``unit``, so that its powers stay in
    range.
    """

    x: Vector
    r: Vector
    u: Vector
    r_images: Vector | None
    u_images: Vector | None
    shadow: Vector
    incoming: Vector
    z: Vector
    rho: Scalar
    alpha: Scalar
    shadow_norm: RealScalar
    norm: RealScalar
    unit: RealScalar
    size: RealScalar
    j: Int[Array, ""]
    half: Flag
    fresh: Flag  # incoming is a residual rather than a product
    first: Flag  # no product has come in since
    retried: Flag  # the last attempt lost a pivot
    condition: Int[Array, ""]


class BiCGStabL(Recurrence):
    r"""BiCGStab(l) for :math:`A x = b` with any square A.

    Follows l steps of bi-conjugate gradients with one that minimises the residual over l dimensions. That handles
    complex eigenvalues, near the imaginary axis too, where the single real steps of BiCGStab are short or fail. Where
    the shadow residual loses a pivot, it begins anew with another. Short recurrences: two products and about
    2 l + 6 vector updates an iteration, 2 l + 6 vectors stored, 4 l + 6 with a preconditioner, which is applied from
    the right.

    Args:
        degree: l, the dimension of the minimisations.

    Raises:
        ValueError: ``degree`` is not a positive whole number.

    Example:
        >>> import jax.numpy as jnp, krylov
        >>> sol = krylov.solve(jnp.array([[0.0, 1.0], [-1.0, 0.0]]), jnp.ones(2), method=krylov.BiCGStabL(degree=2))
        >>> bool(sol.converged)
        True

    Reference: Sleijpen & Fokkema (1993), Electron. Trans. Numer. Anal. 1, 11-32.
    """

    degree: int = eqx.field(static=True, default=4)
    name = "bicgstabl"
    vectors = 14
    products = 2

    def __check_init__(self):
        if isinstance(self.degree, bool) or not isinstance(self.degree, int) or self.degree < 1:
            raise ValueError(f"BiCGStabL: degree must be a positive whole number, not {self.degree!r}.")

    def allocate(self, space: Space, rhs: Vector, preconditioned: bool) -> BiCGStabLState:
        """The rows, and their images with a preconditioner."""

        def rows(count):
            return jax.tree.map(lambda x: jnp.broadcast_to(jnp.zeros_like(x), (count, *x.shape)), rhs)

        zero, nothing, one = zeros_like(rhs), jnp.zeros((), space.dtype), jnp.ones((), space.real_dtype)
        no, images = jnp.asarray(False), [rows(self.degree) if preconditioned else None for _ in range(2)]
        return BiCGStabLState(
            zero,
            rows(self.degree + 1),
            rows(self.degree + 1),
            *images,
            shadow=rhs,
            incoming=rhs,
            z=zero,
            rho=nothing,
            alpha=nothing,
            shadow_norm=one,
            norm=one,
            unit=one,
            size=one,
            j=jnp.asarray(0, jnp.int32),
            half=no,
            fresh=~no,
            first=no,
            retried=no,
            condition=jnp.asarray(RUNNING, jnp.int32),
        )

    def start(self, space: Space, state: BiCGStabLState, residual: Vector) -> BiCGStabLState:
        """The first row is the residual. Old rows stay: those not filled again are not used."""
        return state._replace(
            incoming=residual,
            fresh=jnp.asarray(True),
            retried=state.condition == ZERO_PIVOT,
            condition=jnp.asarray(RUNNING, jnp.int32),
        )

    def settle(self, space: Space, state: BiCGStabLState) -> BiCGStabLState:
        """Take in the residual or the product, then go along u, or minimise the residual and find the next u."""
        fresh, j = state.fresh, state.j
        incoming_norm = space.norm(state.incoming)
        size = jnp.where(state.first & ~fresh, divide(incoming_norm, state.norm), state.size)
        unit = jnp.where(state.first & ~fresh, power_of_two(1 / shown(size)), state.unit)
        factor = jnp.where(fresh, 1, unit)
        incoming, incoming_norm = scale(factor, state.incoming), factor * incoming_norm
        along_u, along_r = ~fresh & ~state.half, ~fresh & state.half
        nowhere = self.degree + 1
        state = state._replace(
            r=_put(state.r, jnp.where(fresh, 0, jnp.where(along_r, j + 1, nowhere)), incoming),
            u=_put(state.u, jnp.where(along_u, j + 1, nowhere), incoming),
            unit=unit,
            size=size,
        )
        state, pivot_lost = _step(space, state, along_u, incoming, incoming_norm)
        closes = along_r & (j + 1 == self.degree)
        state, omega = _minimise(space, state, closes)
        norm = space.norm(_row(state.r, 0))
        begins, j = fresh | along_r, jnp.where(fresh | closes, 0, j + 1)
        shadow = _shadow(space, state, norm)
        shadow_norm = jnp.where(fresh, space.norm(shadow), state.shadow_norm)
        rho = space.inner(shadow, _row(state.r, j))
        row_norm = jnp.where(j == 0, norm, incoming_norm)
        lost = along_r & (jnp.abs(rho) <= space.eps * shadow_norm * row_norm)
        beta = state.alpha * divide(rho, jnp.where(closes, -omega * state.rho, state.rho))
        beta = jnp.where(fresh, 0, beta)
        state = _turn(state, begins, jnp.where(begins, j, state.j), beta)
        return state._replace(
            x=select(fresh, zeros_like(state.x), state.x),
            shadow=shadow,
            rho=jnp.where(begins, rho, state.rho),
            shadow_norm=shadow_norm,
            norm=norm,
            half=along_u,
            first=fresh,
            condition=jnp.where(pivot_lost | lost, ZERO_PIVOT, state.condition).astype(jnp.int32),
        )

    def direction(self, state: BiCGStabLState) -> Vector:
        """Row j of u, then of r."""
        return select(state.half, _row(state.r, state.j), _row(state.u, state.j))

    def prepare(self, space: Space, state: BiCGStabLState, preconditioned: Vector) -> BiCGStabLState:
        """Keep the image of the row."""
        if state.r_images is None:
            return state._replace(z=preconditioned)
        return state._replace(
            r_images=_put(state.r_images, jnp.where(state.half, state.j, self.degree), preconditioned),
            u_images=_put(state.u_images, jnp.where(state.half, self.degree, state.j), preconditioned),
            z=preconditioned,
        )

    def probe(self, state: BiCGStabLState) -> Vector:
        """The preconditioned row."""
        return state.z

    def advance(self, space: Space, state: BiCGStabLState, product: Vector) -> BiCGStabLState:
        """The next row."""
        return state._replace(incoming=product, fresh=jnp.asarray(False))

    def residual_norm(self, state: BiCGStabLState) -> RealScalar:
        """Of the residual that the recurrence updates."""
        return state.norm

    def increment(self, space: Space, state: BiCGStabLState, wanted: Flag) -> Vector:
        """Accumulated since the start."""
        return state.x

    def condition(self, state: BiCGStabLState) -> Int[Array, ""]:
        """Whether a pivot was lost."""
        return state.condition

    def sizes(self, state: BiCGStabLState, residual_norm: RealScalar) -> Sizes:
        """From the first product."""
        del residual_norm
        return Sizes(shown(state.size), jnp.ones_like(state.size))


def _step(
    space: Space, state: BiCGStabLState, taken: Flag, product: Vector, product_norm: RealScalar
) -> tuple[BiCGStabLState, Flag]:
    """Bi-conjugate gradients along u, if ``taken``, as far as the shadow residual says; whether it says nothing."""
    sigma = space.inner(state.shadow, product)
    lost = taken & (jnp.abs(sigma) <= space.eps * state.shadow_norm * product_norm)
    step = jnp.where(taken & ~lost, divide(state.rho, sigma), 0)
    moves = taken & ~lost
    images = state.r_images
    if images is not None:
        images = _add_next(images, -step, state.u_images, moves, state.j - 1)
    along = _row(state.u if state.u_images is None else state.u_images, 0)
    moved = select(moves, axpy(step * state.unit, along, state.x), state.x)
    state = state._replace(
        x=moved,
        r=_add_next(state.r, -step, state.u, moves, state.j),
        r_images=images,
        alpha=jnp.where(moves, step, state.alpha),
    )
    return state, lost


def _minimise(space: Space, state: BiCGStabLState, wanted: Flag) -> tuple[BiCGStabLState, Scalar]:
    """Lower the residual as far as its powers can, if ``wanted``; also the weight of the highest."""

    def minimised():
        gram = jax.vmap(lambda row: overlaps(space, state.r, row), out_axes=1)(state.r)
        weights = _weights(gram[1:, 1:], gram[1:, 0], space.eps)
        of_x = _tail(state.r, slice(-1)) if state.r_images is None else state.r_images
        x = axpy(state.unit, combine(of_x, weights), state.x)
        r, u = (_lower(rows, combine(_tail(rows, slice(1, None)), weights)) for rows in (state.r, state.u))
        return x, r, u, weights[-1]

    nothing = state.x, state.r, state.u, jnp.zeros((), space.dtype)
    x, r, u, omega = jax.lax.cond(wanted, minimised, lambda: nothing)
    return state._replace(x=x, r=r, u=u), omega


def _shadow(space: Space, state: BiCGStabLState, norm: RealScalar) -> Vector:
    """The residual; after a lost pivot mixed with the first product, which a skew operator makes orthogonal to it."""

    def mixed():
        product = _row(state.u, 1)
        product_norm = space.norm(product)
        usable = jnp.isfinite(product_norm) & (product_norm > 0)
        weight = jnp.where(usable, divide(norm, product_norm), 0)
        return select(usable, axpy(weight, product, state.incoming), state.incoming)

    def plain():
        return select(state.fresh, state.incoming, state.shadow)

    return jax.lax.cond(state.fresh & state.retried, mixed, plain)


def _turn(state: BiCGStabLState, wanted: Flag, j: Int[Array, ""], beta: Scalar) -> BiCGStabLState:
    """The rows of u up to j become ``r - beta u``, if ``wanted``."""

    def turned(r, u, last):
        def leaf(a, b):
            # What an earlier attempt left need not be finite.
            mask = _mask(b, last) & wanted
            return jnp.where(mask, a - jnp.where(beta == 0, 0, beta * b), b).astype(b.dtype)

        return jax.tree.map(leaf, r, u)

    images = state.u_images
    if images is not None:
        images = turned(state.r_images, images, j - 1)
    return state._replace(u=turned(state.r, state.u, j), u_images=images, j=j)


def _weights(gram: Inexact[Array, "l l"], rhs: Inexact[Array, " l"], eps: float) -> Inexact[Array, " l"]:
    """Solve by elimination; rows that depend on those before get no weight."""
    size = rhs.shape[0]
    whole = jnp.concatenate([gram, rhs[:, None]], 1)
    lengths, used = jnp.real(jnp.diagonal(gram)), []
    for k in range(size):
        pivot = jnp.real(whole[k, k])
        used.append(pivot > eps * lengths[k])
        below = jnp.arange(size) > k
        factors = jnp.where(used[k] & below, whole[:, k] / jnp.where(used[k], pivot, 1), 0)
        whole = whole - factors[:, None] * whole[k]
    weights = jnp.zeros_like(rhs)
    for k in reversed(range(size)):
        known = jnp.sum(whole[k, :-1] * weights)
        pivot = jnp.where(used[k], jnp.real(whole[k, k]), 1)
        weights = weights.at[k].set(jnp.where(used[k], (whole[k, -1] - known) / pivot, 0))
    return weights


def _row(rows: Vector, j: int | Int[Array, ""]) -> Vector:
    return jax.tree.map(lambda v: jax.lax.dynamic_index_in_dim(v, j, keepdims=False), rows)


def _put(rows: Vector, j: Int[Array, ""], vector: Vector) -> Vector:
    """With the vector in row j; nowhere if there is none."""
    return jax.tree.map(lambda v, x: v.at[j].set(x, mode="drop"), rows, vector)


def _tail(rows: Vector, which: slice) -> Vector:
    return jax.tree.map(lambda v: v[which], rows)


def _lower(rows: Vector, vector: Vector) -> Vector:
    """The vector subtracted from the first row."""
    return jax.tree.map(lambda v, x: v.at[0].add(-x), rows, vector)


def _mask(rows: Array, last: Int[Array, ""]) -> Array:
    """Rows up to the last."""
    return (jnp.arange(rows.shape[0]) <= last).reshape(-1, *[1] * (rows.ndim - 1))


def _add_next(rows: Vector, weight: Scalar, others: Vector, wanted: Flag, last: Int[Array, ""]) -> Vector:
    """To each row up to the last, the next of the others with this weight, if ``wanted``."""

    def leaf(a, b):
        added = jnp.where(_mask(b[1:], last) & wanted, weight * b[1:], 0)
        return a.at[: b.shape[0] - 1].add(added.astype(a.dtype))

    return jax.tree.map(leaf, rows, others)
