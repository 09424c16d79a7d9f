"""Least squares by Golub-Kahan bidiagonalisation, minimal in the gradient."""

from typing import NamedTuple

import jax.numpy as jnp

from krylov.operators.base import Vector

from ..vectors import Flag, RealScalar, Space, axpy, divide, select, zeros_like
from .least_squares import GolubKahan, LeastSquares


class ResidualNorm(NamedTuple):
    """What the residual norm is found from: LSMR itself only meets the gradient. Section 5.1 of the paper."""

    beta_acute: RealScalar
    beta_dot: RealScalar
    rho_dot: RealScalar
    theta_tilde: RealScalar
    tau_tilde: RealScalar
    norm: RealScalar


class LSMRState(NamedTuple):
    """The two newest Golub-Kahan vectors; the directions ``h`` and ``h_bar``; the last of both QR factorizations."""

    process: GolubKahan
    x: Vector
    h: Vector
    h_bar: Vector
    alpha_bar: RealScalar
    zeta: RealScalar
    zeta_bar: RealScalar
    rho: RealScalar
    rho_bar: RealScalar
    c_bar: RealScalar
    s_bar: RealScalar
    residual: ResidualNorm
    operator_norm: RealScalar


class LSMR(LeastSquares):
    r"""Least squares, :math:`\min \|b - A x\|`, with any A, minimising the gradient :math:`\|A^H (b - A x)\|`.

    In exact arithmetic MINRES on the normal equations, without squaring the condition number. Gradient and residual
    norm never rise, so it may be stopped early. One product with A and one with its adjoint, two norms and five vector
    updates an iteration; stores four vectors like x and one like b beside x and b.

    Example:
        >>> import jax.numpy as jnp, krylov
        >>> A = jnp.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
        >>> sol = krylov.lstsq(A, jnp.array([1.0, 4.0, 3.0]), method=krylov.LSMR())
        >>> [f"{value:.3f}" for value in sol.x]
        ['1.000', '2.000']

    Reference: Fong & Saunders (2011), doi:10.1137/10079687X.
    """

    name = "lsmr"
    vectors = (4, 1)

    def allocate(self, space: Space, left: Vector, right: Vector) -> LSMRState:
        nothing = jnp.zeros((), space.real_dtype)
        process = GolubKahan.allocate(space, left, right)
        numbers = [name for name in LSMRState._fields if name not in ("process", "x", "h", "h_bar", "residual")]
        residual = ResidualNorm(nothing, nothing, nothing, nothing, nothing, nothing)
        return LSMRState(process, right, right, right, residual=residual, **dict.fromkeys(numbers, nothing))

    def probe(self, state: LSMRState) -> Vector:
        return state.process.v

    def left(self, state: LSMRState, product: Vector) -> Vector:
        return state.process.left(product)

    def receive(self, space: Space, state: LSMRState, left: Vector, fresh: Flag) -> LSMRState:
        return state._replace(process=state.process.receive(space, left))

    def right(self, state: LSMRState) -> Vector:
        return state.process.u

    def right_norm(self, state: LSMRState) -> RealScalar:
        return jnp.ones_like(state.zeta)

    def advance(self, space: Space, state: LSMRState, product: Vector, fresh: Flag) -> LSMRState:
        process = state.process.advance(space, product, fresh)
        alpha, beta = process.alpha, process.beta
        # Two QR factorizations, one of the bidiagonal and one of the transpose of its triangular factor.
        rho = jnp.hypot(state.alpha_bar, beta)
        c, s = divide(state.alpha_bar, rho), divide(beta, rho)
        theta = s * alpha
        theta_bar, rho_before_bar = state.s_bar * rho, state.c_bar * rho
        rho_bar = jnp.hypot(rho_before_bar, theta)
        c_bar, s_bar = divide(rho_before_bar, rho_bar), divide(theta, rho_bar)
        zeta, zeta_bar = c_bar * state.zeta_bar, -s_bar * state.zeta_bar

        h_bar = axpy(-divide(theta_bar * rho, state.rho * state.rho_bar), state.h_bar, state.h)
        h_bar = select(fresh, zeros_like(state.x), h_bar)
        nothing, one = jnp.zeros_like(alpha), jnp.ones_like(alpha)
        begun = ResidualNorm(beta, nothing, one, nothing, nothing, beta)
        residual = _residual_norm(state, c, s, theta_bar, rho_bar, zeta)
        return LSMRState(
            process=process,
            x=select(fresh, zeros_like(state.x), axpy(divide(zeta, rho * rho_bar), h_bar, state.x)),
            h=select(fresh, process.v, axpy(-divide(theta, rho), state.h, process.v)),
            h_bar=h_bar,
            alpha_bar=jnp.where(fresh, alpha, c * alpha),
            zeta=jnp.where(fresh, 0, zeta),
            zeta_bar=jnp.where(fresh, alpha * beta, zeta_bar),
            rho=jnp.where(fresh, 1, rho),
            rho_bar=jnp.where(fresh, 1, rho_bar),
            c_bar=jnp.where(fresh, 1, c_bar),
            s_bar=jnp.where(fresh, 0, s_bar),
            residual=select(fresh, begun, residual),
            operator_norm=process.operator_norm(fresh),
        )

    def residual_norm(self, state: LSMRState) -> RealScalar:
        return state.residual.norm

    def gradient_norm(self, state: LSMRState) -> RealScalar:
        return jnp.abs(state.zeta_bar)

    def operator_norm(self, state: LSMRState) -> RealScalar:
        return state.operator_norm

    def increment(self, state: LSMRState) -> Vector:
        return state.x


def _residual_norm(state: LSMRState, c, s, theta_bar, rho_bar, zeta) -> ResidualNorm:
    """One more rotation of the small triangular system in which x is written."""
    old = state.residual
    beta_hat, beta_acute = c * old.beta_acute, -s * old.beta_acute
    rho_tilde = jnp.hypot(old.rho_dot, theta_bar)
    c_tilde, s_tilde = divide(old.rho_dot, rho_tilde), divide(theta_bar, rho_tilde)
    theta_tilde, rho_dot = s_tilde * rho_bar, c_tilde * rho_bar
    beta_dot = c_tilde * beta_hat - s_tilde * old.beta_dot
    tau_tilde = divide(state.zeta - old.theta_tilde * old.tau_tilde, rho_tilde)
    tau_dot = divide(zeta - theta_tilde * tau_tilde, rho_dot)
    norm = jnp.hypot(beta_dot - tau_dot, beta_acute)
    return ResidualNorm(beta_acute, beta_dot, rho_dot, theta_tilde, tau_tilde, norm)
