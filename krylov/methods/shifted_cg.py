"""Conjugate gradients for many shifts of one operator, by one Lanczos process."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from krylov.operators.base import Vector

from ..vectors import Flag, RealScalar, Space, axpy, divide, real_inner, scale, zeros_like

Shifts = Float[Array, " shifts"]


class ShiftedCGState(NamedTuple):
    """The two newest Lanczos vectors; of each shift the solution, the direction and the newest pivot of L D L^H."""

    v: Vector
    v_old: Vector
    beta: RealScalar
    x: Vector  # with a leading axis for the shifts, as p
    p: Vector
    pivot: Shifts
    weight: Shifts  # of the Lanczos vector in the residual, up to its sign the residual norm
    done: Bool[Array, " shifts"]
    indefinite: Bool[Array, " shifts"]
    fresh: Flag


class ShiftedCG:
    r"""Conjugate gradients for :math:`(A + s_i)\, x_i = b`, all shifts :math:`s_i` at one product an iteration.

    The Lanczos vectors of :math:`A + s_i` are those of A, and only the tridiagonal is shifted: each shift factorizes
    its own. One product, two inner products and, for each shift, two vector updates an iteration; stores two vectors
    beside b, and two for each shift. A pivot that is not positive says that :math:`A + s_i` is not positive definite.

    Reference: Frommer & Maass (1999), doi:10.1137/S1064827596313310; Jegerlehner (1996), arXiv:hep-lat/9612014.
    """

    @staticmethod
    def start(space: Space, rhs: Vector, shifts: Shifts) -> ShiftedCGState:
        """The first Lanczos vector is the right-hand side, which is not zero."""
        norm = space.norm(rhs)
        count = shifts.shape[0]
        many = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), rhs)
        no = jnp.zeros(count, bool)
        return ShiftedCGState(
            v=scale(divide(jnp.ones_like(norm), norm), rhs),
            v_old=zeros_like(rhs),
            beta=jnp.zeros_like(norm),
            x=many,
            p=many,
            pivot=jnp.ones(count, space.real_dtype),
            weight=jnp.full(count, norm),
            done=no,
            indefinite=no,
            fresh=jnp.asarray(True),
        )

    @staticmethod
    def advance(
        space: Space, state: ShiftedCGState, product: Vector, shifts: Shifts, targets: Shifts
    ) -> ShiftedCGState:
        """One Lanczos step, given the product with ``v``, and one step of each shift that is not done."""
        alpha = real_inner(state.v, product).astype(space.real_dtype)
        v = axpy(-alpha, state.v, axpy(-state.beta, state.v_old, product))
        beta = space.norm(v)

        below = jnp.where(state.fresh, 0, divide(state.beta, state.pivot))  # of the diagonal of L
        pivot = alpha + shifts - below * state.beta
        indefinite = ~state.done & ~(pivot > 0)
        going = ~state.done & ~indefinite
        p = jax.tree.map(lambda p, v: (v - _along(below, p) * p).astype(p.dtype), state.p, state.v)
        step = jnp.where(going, divide(state.weight, pivot), 0)
        x = jax.tree.map(lambda x, p: (x + _along(step, x) * p).astype(x.dtype), state.x, p)
        weight = jnp.where(going, -divide(beta, pivot) * state.weight, state.weight)
        return ShiftedCGState(
            v=scale(divide(jnp.ones_like(beta), beta), v),
            v_old=state.v,
            beta=beta,
            x=x,
            p=jax.tree.map(lambda old, new: jnp.where(_along(going, old), new, old), state.p, p),
            pivot=jnp.where(going, pivot, state.pivot),
            weight=weight,
            done=state.done | indefinite | (going & (jnp.abs(weight) <= targets)),
            indefinite=state.indefinite | indefinite,
            fresh=jnp.asarray(False),
        )


def _along(values: Shifts, rows: Array) -> Array:
    """One value for each row, to be multiplied with rows."""
    return values.reshape(-1, *[1] * (rows.ndim - 1))
