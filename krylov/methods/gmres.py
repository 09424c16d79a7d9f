"""Generalised minimal residuals, restarted and flexible."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from krylov.operators.base import Vector
from krylov.operators.structure import abstract, size_of

from ..units import Sizes, shown
from ..vectors import Flag, RealScalar, Space, divide, scale, subtract
from .recurrence import CYCLE_CLOSED, RUNNING, ZERO_PIVOT, Recurrence


class GMRESState(NamedTuple):
    """The basis, row by row along a leading axis; the QR factorization of the Hessenberg matrix, Q^H kept whole."""

    basis: Vector
    images: Vector | None  # of the basis under the preconditioner
    incoming: Vector
    z: Vector
    filled: Int[Array, ""]
    column: Array
    length: RealScalar
    q_adjoint: Array
    r: Array
    start_norm: RealScalar
    norm: RealScalar
    fresh: Flag


class GMRES(Recurrence):
    r"""Generalised minimal residuals for :math:`A x = b` with any square A.

    Minimises :math:`\|b - A x\|` over the Krylov space, orthogonalising twice (CGS2) so that the basis stays
    orthogonal to rounding. The preconditioner is applied from the right and its images are kept, so that it may itself
    be an iteration (flexible GMRES) and the residual is the true one. One product and 4 j vector updates in iteration j
    of a cycle; stores ``restart + 3`` vectors, ``2 restart + 3`` with a preconditioner.

    Args:
        restart: iterations in a cycle; the basis is then dropped.

    Raises:
        ValueError: ``restart`` is not a positive whole number.

    Example:
        >>> import jax.numpy as jnp, krylov
        >>> A = jnp.array([[2.0, 1.0], [-1.0, 3.0]])
        >>> sol = krylov.solve(A, jnp.ones(2), method=krylov.GMRES(restart=10))
        >>> bool(sol.converged), int(sol.iterations)
        (True, 2)

    Reference: Saad & Schultz (1986), doi:10.1137/0907058. Flexible: Saad (1993), doi:10.1137/0914028. CGS2: Giraud,
    Langou, Rozloznik & van den Eshof (2005), doi:10.1007/s00211-005-0615-4.
    """

    restart: int = eqx.field(static=True, default=50)
    name = "gmres"
    vectors = 53

    def __check_init__(self):
        if isinstance(self.restart, bool) or not isinstance(self.restart, int) or self.restart < 1:
            raise ValueError(f"GMRES: restart must be a positive whole number, not {self.restart!r}.")

    def allocate(self, space: Space, rhs: Vector, preconditioned: bool) -> GMRESState:
        """The basis, and its images with a preconditioner."""
        m = max(1, min(self.restart, (1 if space.field == "complex" else 2) * size_of(rhs)))

        def rows(count):
            return jax.tree.map(lambda x: jnp.broadcast_to(jnp.zeros_like(x), (count, *x.shape)), rhs)

        nothing = jnp.zeros((), space.real_dtype)
        return GMRESState(
            basis=rows(m + 1),
            images=rows(m) if preconditioned else None,
            incoming=rhs,
            z=rhs,
            filled=jnp.asarray(0, jnp.int32),
            column=jnp.zeros(m + 1, space.dtype),
            length=nothing,
            q_adjoint=jnp.eye(m + 1, dtype=space.dtype),
            r=jnp.zeros((m + 1, m), space.dtype),
            start_norm=nothing,
            norm=nothing,
            fresh=jnp.asarray(True),
        )

    def start(self, space: Space, state: GMRESState, residual: Vector) -> GMRESState:
        """The first basis vector is the residual. Old rows stay: those not filled again are not used."""
        return state._replace(
            incoming=residual,
            filled=jnp.asarray(0, jnp.int32),
            q_adjoint=jnp.eye(state.q_adjoint.shape[0], dtype=space.dtype),
            r=jnp.zeros_like(state.r),
            fresh=jnp.asarray(True),
        )

    def settle(self, space: Space, state: GMRESState) -> GMRESState:
        """Normalise the incoming vector and, after a step, rotate the new column of the Hessenberg matrix."""
        length = space.norm(state.incoming)
        # What is left of the product by rounding alone is no direction.
        scale_of_product = jnp.sqrt(jnp.sum(jnp.abs(state.column) ** 2))
        vanished = ~state.fresh & (length <= 4 * space.eps * scale_of_product)
        per_length = jnp.where(vanished, 0, divide(jnp.ones_like(length), length))
        start_norm = jnp.where(state.fresh, length, state.start_norm)
        j = jnp.maximum(state.filled - 1, 0)
        q_adjoint, column = _rotate(state.q_adjoint, state.column, jnp.where(vanished, 0, length), j)
        q_adjoint = jnp.where(state.fresh, state.q_adjoint, q_adjoint)
        estimate = jnp.abs(q_adjoint[state.filled, 0]) * start_norm
        return state._replace(
            incoming=scale(per_length, state.incoming),
            length=jnp.where(vanished, 0, length),
            q_adjoint=q_adjoint,
            r=jnp.where(state.fresh, state.r, state.r.at[:, j].set(column)),
            start_norm=start_norm,
            norm=jnp.where(state.fresh, length, estimate),
        )

    def direction(self, state: GMRESState) -> Vector:
        """The newest basis vector."""
        return state.incoming

    def prepare(self, space: Space, state: GMRESState, preconditioned: Vector) -> GMRESState:
        """Put the basis vector in its row."""

        def put(rows, vector):
            return jax.tree.map(lambda v, x: v.at[state.filled].set(x, mode="drop"), rows, vector)

        images = None if state.images is None else put(state.images, preconditioned)
        return state._replace(basis=put(state.basis, state.incoming), images=images, z=preconditioned)

    def probe(self, state: GMRESState) -> Vector:
        """The preconditioned basis vector."""
        return state.z

    def advance(self, space: Space, state: GMRESState, product: Vector) -> GMRESState:
        """Orthogonalise the product against the basis, twice."""
        known = jnp.arange(state.column.shape[0]) <= state.filled
        first = jnp.where(known, overlaps(space, state.basis, product), 0)
        rest = subtract(product, combine(state.basis, first))
        second = jnp.where(known, overlaps(space, state.basis, rest), 0)
        rest = subtract(rest, combine(state.basis, second))
        return state._replace(incoming=rest, column=first + second, filled=state.filled + 1, fresh=jnp.asarray(False))

    def residual_norm(self, state: GMRESState) -> RealScalar:
        """Of the least-squares problem on the basis."""
        return state.norm

    def increment(self, space: Space, state: GMRESState, wanted: Flag) -> Vector:
        """The least-squares combination of the images of the basis."""
        rows = state.basis if state.images is None else state.images
        m = state.r.shape[1]

        def combined():
            rhs = state.q_adjoint[:m, 0] * state.start_norm
            diagonal = jnp.abs(jnp.diagonal(state.r))
            # Columns not there yet, and those of a singular operator that add nothing, get weight zero.
            used = (jnp.arange(m) < state.filled) & (diagonal > space.eps * jnp.max(diagonal))
            r = jnp.where(used[:, None] & used[None, :], state.r[:m], jnp.eye(m, dtype=state.r.dtype))
            weights = jax.scipy.linalg.solve_triangular(r, jnp.where(used, rhs, 0))
            return combine(jax.tree.map(lambda v: v[:m], rows), weights)

        return jax.lax.cond(wanted, combined, lambda: jax.tree.map(jnp.zeros_like, state.incoming))

    def condition(self, state: GMRESState) -> Int[Array, ""]:
        """Whether the basis is full, or spans an invariant space."""
        invariant = ~state.fresh & (state.length == 0)
        full = state.filled >= state.r.shape[1]
        return jnp.where(invariant, ZERO_PIVOT, jnp.where(full, CYCLE_CLOSED, RUNNING)).astype(jnp.int32)

    def sizes(self, state: GMRESState, residual_norm: RealScalar) -> Sizes:
        """From the first column of the Hessenberg matrix, of the preconditioned operator."""
        del residual_norm
        return Sizes(shown(jnp.maximum(jnp.abs(state.column[0]), state.length)), jnp.ones_like(state.length))

    def forget(self, state: GMRESState) -> GMRESState:
        """The row that is about to be filled, which may not be finite."""
        return state._replace(filled=jnp.zeros_like(state.filled))


def _rotate(q_adjoint: Array, column: Array, below: RealScalar, j: Any) -> tuple[Array, Array]:
    """Bring column j of the Hessenberg matrix, with ``below`` under its diagonal, to upper triangular form."""
    column = q_adjoint @ column.at[j + 1].set(below.astype(column.dtype))
    a, b = column[j], column[j + 1]
    hypotenuse = jnp.sqrt(jnp.abs(a) ** 2 + jnp.abs(b) ** 2)
    # An empty column removes nothing from the residual: the rows change places.
    c = divide(a, hypotenuse)
    s = jnp.where(hypotenuse > 0, divide(b, hypotenuse), 1)
    upper, lower = q_adjoint[j], q_adjoint[j + 1]
    q_adjoint = q_adjoint.at[j].set(jnp.conj(c) * upper + jnp.conj(s) * lower)
    q_adjoint = q_adjoint.at[j + 1].set(c * lower - s * upper)
    return q_adjoint, column.at[j].set(hypotenuse.astype(column.dtype)).at[j + 1].set(0)


def overlaps(space: Space, rows: Vector, x: Vector) -> Array:
    """Inner products of each row with x."""
    total = jnp.zeros((), space.dtype)
    for v, y in zip(jax.tree.leaves(rows), jax.tree.leaves(x), strict=True):
        if abstract(y).sharding is not None:
            # On Explicit axes a product of matrices leaves open how its result is sharded; a sum does not.
            total = total + jax.vmap(space.inner, (0, None))(v, y)
            continue
        v = v.reshape(v.shape[0], -1)
        y = y.reshape(-1)
        if space.field == "real" and jnp.iscomplexobj(v):
            overlap = jnp.matmul(v.real, y.real, precision="highest") + jnp.matmul(v.imag, y.imag, precision="highest")
        else:
            overlap = jnp.matmul(jnp.conj(v), y, precision="highest")
        total = total + overlap.astype(space.dtype)
    return total


def combine(rows: Vector, weights: Array) -> Vector:
    """The sum of rows with these weights."""
    return jax.tree.map(lambda v: jnp.tensordot(weights, v, axes=1, precision="highest").astype(v.dtype), rows)
