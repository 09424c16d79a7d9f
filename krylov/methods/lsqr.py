"""Least squares by Golub-Kahan bidiagonalisation and QR."""

from typing import NamedTuple

import jax.numpy as jnp

from krylov.operators.base import Vector

from ..vectors import Flag, RealScalar, Space, axpy, divide, select, zeros_like
from .least_squares import GolubKahan, LeastSquares


class LSQRState(NamedTuple):
    """The two newest Golub-Kahan vectors; the search direction ``w``; the last rotation of the bidiagonal's QR."""

    process: GolubKahan
    x: Vector
    w: Vector
    rho_bar: RealScalar
    phi_bar: RealScalar
    cosine: RealScalar
    operator_norm: RealScalar


class LSQR(LeastSquares):
    r"""Least squares, :math:`\min \|b - A x\|`, with any A, by a QR factorization of the Golub-Kahan bidiagonal.

    In exact arithmetic conjugate gradients on the normal equations, without squaring the condition number. The residual
    norm never rises. One product with A and one with its adjoint, two norms and four vector updates an iteration;
    stores three vectors like x and one like b beside x and b.

    Example:
        >>> import jax.numpy as jnp, krylov
        >>> A = jnp.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
        >>> sol = krylov.lstsq(A, jnp.array([1.0, 4.0, 3.0]), method=krylov.LSQR())
        >>> [f"{value:.3f}" for value in sol.x]
        ['1.000', '2.000']

    Reference: Paige & Saunders (1982), doi:10.1145/355984.355989.
    """

    name = "lsqr"
    vectors = (3, 1)

    def allocate(self, space: Space, left: Vector, right: Vector) -> LSQRState:
        nothing = jnp.zeros((), space.real_dtype)
        process = GolubKahan.allocate(space, left, right)
        return LSQRState(process, right, right, nothing, nothing, nothing, nothing)

    def probe(self, state: LSQRState) -> Vector:
        return state.process.v

    def left(self, state: LSQRState, product: Vector) -> Vector:
        return state.process.left(product)

    def receive(self, space: Space, state: LSQRState, left: Vector, fresh: Flag) -> LSQRState:
        return state._replace(process=state.process.receive(space, left))

    def right(self, state: LSQRState) -> Vector:
        return state.process.u

    def right_norm(self, state: LSQRState) -> RealScalar:
        return jnp.ones_like(state.phi_bar)

    def advance(self, space: Space, state: LSQRState, product: Vector, fresh: Flag) -> LSQRState:
        process = state.process.advance(space, product, fresh)
        alpha, beta = process.alpha, process.beta
        rho = jnp.hypot(state.rho_bar, beta)
        c, s = divide(state.rho_bar, rho), divide(beta, rho)
        theta, phi = s * alpha, c * state.phi_bar
        return LSQRState(
            process=process,
            x=select(fresh, zeros_like(state.x), axpy(divide(phi, rho), state.w, state.x)),
            w=select(fresh, process.v, axpy(-divide(theta, rho), state.w, process.v)),
            rho_bar=jnp.where(fresh, alpha, -c * alpha),
            phi_bar=jnp.where(fresh, beta, s * state.phi_bar),
            cosine=jnp.where(fresh, 1, c),
            operator_norm=process.operator_norm(fresh),
        )

    def residual_norm(self, state: LSQRState) -> RealScalar:
        return state.phi_bar

    def gradient_norm(self, state: LSQRState) -> RealScalar:
        return state.phi_bar * state.process.alpha * jnp.abs(state.cosine)

    def operator_norm(self, state: LSQRState) -> RealScalar:
        return state.operator_norm

    def increment(self, state: LSQRState) -> Vector:
        return state.x
