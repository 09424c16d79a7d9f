"""Conjugate gradients on the normal equations, without forming them."""

from typing import NamedTuple

import jax.numpy as jnp

from krylov.operators.base import Vector

from ..vectors import Flag, RealScalar, Space, axpy, divide, select, zeros_like
from .least_squares import LeastSquares


class CGLSState(NamedTuple):
    """Residual, direction and the image of the direction, with their norms; ``gamma`` is the squared gradient norm."""

    x: Vector
    r: Vector
    p: Vector
    image: Vector
    gamma: RealScalar
    norm: RealScalar
    p_norm: RealScalar
    image_norm: RealScalar
    operator_norm: RealScalar


class CGLS(LeastSquares):
    r"""Least squares, :math:`\min \|b - A x\|`, with any A, by conjugate gradients on :math:`A^H A x = A^H b`.

    The recurrence keeps the residual :math:`b - A x` itself, so that the condition number is not squared by forming
    :math:`A^H A`. The shortest of the least-squares methods, a little less accurate than LSQR and LSMR where the
    condition is bad. One product with A and one with its adjoint, four norms and three vector updates an iteration;
    stores two vectors like x and two like b beside x and b.

    Example:
        >>> import jax.numpy as jnp, krylov
        >>> A = jnp.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
        >>> sol = krylov.lstsq(A, jnp.array([1.0, 4.0, 3.0]), method=krylov.CGLS())
        >>> [f"{value:.3f}" for value in sol.x]
        ['1.000', '2.000']

    Reference: Bjorck, Elfving & Strakos (1998), doi:10.1137/S089547989631202X.
    """

    name = "cgls"
    vectors = (2, 2)

    def allocate(self, space: Space, left: Vector, right: Vector) -> CGLSState:
        nothing = jnp.zeros((), space.real_dtype)
        return CGLSState(right, left, right, left, *[nothing] * 5)

    def probe(self, state: CGLSState) -> Vector:
        return state.p

    def left(self, state: CGLSState, product: Vector) -> Vector:
        # The product itself: the step along it needs its norm.
        return product

    def receive(self, space: Space, state: CGLSState, left: Vector, fresh: Flag) -> CGLSState:
        # Fresh, `left` is the residual.
        length = space.norm(left)
        step = divide(divide(state.gamma, length), length)
        r = select(fresh, left, axpy(-step, left, state.r))
        return state._replace(
            x=select(fresh, zeros_like(state.x), axpy(step, state.p, state.x)),
            r=r,
            norm=space.norm(r),
            image_norm=jnp.where(fresh, 0, length),
        )

    def right(self, state: CGLSState) -> Vector:
        return state.r

    def right_norm(self, state: CGLSState) -> RealScalar:
        return state.norm

    def advance(self, space: Space, state: CGLSState, product: Vector, fresh: Flag) -> CGLSState:
        gradient = space.norm(product)
        gamma = gradient**2
        p = select(fresh, product, axpy(divide(gamma, state.gamma), state.p, product))
        along = divide(state.image_norm, state.p_norm)
        return state._replace(
            p=p,
            gamma=gamma,
            p_norm=space.norm(p),
            operator_norm=jnp.maximum(jnp.where(fresh, 0, along), divide(gradient, state.norm)),
        )

    def residual_norm(self, state: CGLSState) -> RealScalar:
        return state.norm

    def gradient_norm(self, state: CGLSState) -> RealScalar:
        return jnp.sqrt(state.gamma)

    def operator_norm(self, state: CGLSState) -> RealScalar:
        return state.operator_norm

    def increment(self, state: CGLSState) -> Vector:
        return state.x
