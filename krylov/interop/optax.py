"""Second-order steps as optax gradient transformations: natural gradient and Gauss-Newton, matrix-free.

Needs the extra ``optax``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from krylov.damping import shift_damping
from krylov.methods import Method
from krylov.operators import LinearOperator, curvature
from krylov.parameters import like_params, trained_vector
from krylov.solution import Solution
from krylov.solve import solve
from krylov.vectors import axpy, divide


class CurvatureState(NamedTuple):
    """The state of the transformations here.

    Attributes:
        steps: steps taken.
        previous: the last step, where momentum or warm starts need it.
        iterations: of the last solve.
        residual_norm: its true residual, relative to the gradient.
        converged: whether that is within the tolerance.
    """

    steps: Int[Array, ""]
    previous: PyTree | None
    iterations: Int[Array, ""]
    residual_norm: Array
    converged: Array


def natural_gradient(
    f: Callable[[Any, Any], Any],
    *,
    distribution: str | None = None,
    shift: Any = 1e-3,
    mu: float = 0.0,
    warm_start: bool = False,
    method: str | Method = "auto",
    rtol: float = 1e-4,
    maxiter: int | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    r"""Precondition gradients g by a Fisher matrix: the step is :math:`(F + \lambda)^{-1} (g + \lambda\mu\,p)`.

    With a ``distribution`` the matrix is `krylov.fisher` of the network's outputs. Without one it is
    `krylov.quantum_geometric_tensor`, for log-amplitudes of samples drawn from :math:`|\psi|^2`.

    ``update`` takes the samples as an extra argument: ``tx.update(gradients, state, params, samples=x)``; also
    ``weights=`` of the samples, and ``shift=`` in place of the one given here. Chain it with ``optax.sgd``. For complex
    parameters the gradients are the conjugates of those of ``jax.grad``, as optax expects them.

    Args:
        f: ``f(params, samples)``, sample axis first.
        distribution: as in `krylov.fisher`, or None.
        shift: not negative: a number, a pytree like the parameters, or a schedule: a function of the step.
        mu: momentum p of SPRING: the step is drawn to ``mu`` times the one before.
        warm_start: begin each solve at the last step.
        method: as in `krylov.solve`.
        rtol: relative tolerance of the linear system.
        maxiter: most iterations.
        options: those of `krylov.Jacobian`: ``chunk_size``, ``trainable``, ``precision`` and others.

    Returns:
        The transformation, whose state is a `CurvatureState`. Its ``update`` raises ValueError where parameters or
        samples are missing, the shift is known to be negative, or gradients or momentum do not fit.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> logits = lambda params, x: x @ params
        >>> labels, x = jnp.arange(20) % 3, jnp.sin(jnp.arange(80.0)).reshape(20, 4)
        >>> def loss(params):
        ...     return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), labels).mean()
        >>> tx = optax.chain(natural_gradient(logits, distribution="categorical"), optax.sgd(0.5))
        >>> params = jnp.zeros((4, 3))
        >>> state = tx.init(params)
        >>> updates, state = tx.update(jax.grad(loss)(params), state, params, samples=x)
        >>> bool(loss(optax.apply_updates(params, updates)) < loss(params))
        True

    Reference: Amari (1998), doi:10.1162/089976698300017746.
    """

    def build(params: PyTree, *, samples: Any, weights: Any = None) -> LinearOperator:
        if distribution is None:
            return curvature.quantum_geometric_tensor(f, params, samples, weights=weights, **options)
        return curvature.fisher(f, params, samples, distribution=distribution, weights=weights, **options)

    return _preconditioned(build, "natural_gradient", "samples", shift, mu, warm_start, method, rtol, maxiter)


def gauss_newton(
    f: Callable[[Any, Any], Any],
    loss: Callable[[Any, Any], Array],
    *,
    shift: Any = 1e-3,
    mu: float = 0.0,
    warm_start: bool = False,
    method: str | Method = "auto",
    rtol: float = 1e-4,
    maxiter: int | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    r"""Precondition gradients by the Gauss-Newton matrix of a mean loss: the step is :math:`(G + \lambda)^{-1} g`.

    With the gradient of the same mean loss and a small shift it is the Gauss-Newton step, with a large one a short
    step downhill: the Levenberg-Marquardt method. ``update`` takes the batch as an extra argument:
    ``tx.update(gradients, state, params, batch=batch)``; also ``weights=`` and ``shift=``.

    Args:
        f: ``f(params, batch) -> outputs``, sample axis first.
        loss: ``loss(outputs, batch) -> (N,)`` real, one for each sample.
        shift: see `natural_gradient`, as for all that follows.
        mu: momentum.
        warm_start: begin each solve at the last step.
        method: as in `krylov.solve`.
        rtol: relative tolerance of the linear system.
        maxiter: most iterations.
        options: those of `krylov.gauss_newton`.

    Returns:
        The transformation; see `natural_gradient`.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> f = lambda params, batch: jnp.tanh(batch[0] @ params)
        >>> loss = lambda outputs, batch: 0.5 * (outputs - batch[1]) ** 2
        >>> x = jnp.sin(jnp.arange(60.0)).reshape(20, 3)
        >>> batch = x, jnp.tanh(x @ jnp.array([1.0, -1.0, 0.5]))
        >>> mean = lambda params: loss(f(params, batch), batch).mean()
        >>> tx = optax.chain(gauss_newton(f, loss, shift=1e-6), optax.sgd(1.0))
        >>> params = jnp.zeros(3)
        >>> state = tx.init(params)
        >>> for _ in range(6):
        ...     updates, state = tx.update(jax.grad(mean)(params), state, params, batch=batch)
        ...     params = optax.apply_updates(params, updates)
        >>> bool(mean(params) < 1e-8)
        True

    Reference: Schraudolph (2002), doi:10.1162/08997660260028683; Marquardt (1963), doi:10.1137/0111030.
    """

    def build(params: PyTree, *, batch: Any, weights: Any = None) -> LinearOperator:
        return curvature.gauss_newton(f, loss, params, batch, weights=weights, **options)

    return _preconditioned(build, "gauss_newton", "batch", shift, mu, warm_start, method, rtol, maxiter)


def _preconditioned(build, name, data, shift, mu, warm_start, method, rtol, maxiter):
    keeps = warm_start or mu != 0

    def init(params: Any) -> Any:
        nothing, real = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.result_type(float))
        previous = jax.tree.map(jnp.zeros_like, params) if keeps else None
        return CurvatureState(nothing, previous, nothing, real, jnp.asarray(True))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(f"{name}: update needs the parameters: tx.update(gradients, state, params, {data}=...).")
        if data not in extra:
            raise ValueError(
                f"{name}: update needs the data of the step.\n  got       {sorted(extra)}\n"
                f"  expected  {data}=..., as in tx.update(gradients, state, params, {data}=...)"
            )
        # Other transformations of a chain have extra arguments of their own.
        given = {key: extra[key] for key in (data, "weights") if key in extra}
        operator = build(params, **given)
        structure = operator.in_structure()
        rhs = trained_vector(name, "gradients", updates, structure)
        damping = extra.get("shift", shift)
        damping = shift_damping(name, damping(state.steps) if callable(damping) else damping, structure)
        x0 = None
        if keeps:
            x0 = trained_vector(name, "previous", state.previous, structure)
            if mu != 0:
                rhs = axpy(mu, damping.times(x0), rhs)
        options = dict(rtol=rtol, maxiter=maxiter)
        solution = solve(operator, rhs, method, shift=damping.shift, x0=x0 if warm_start else None, **options)
        step = like_params(solution.x, structure, params)
        return step, _next(state, step if keeps else None, solution)

    return optax.GradientTransformationExtraArgs(init, update)


def _next(state: CurvatureState, previous: PyTree | None, solution: Solution) -> CurvatureState:
    relative = divide(solution.residual_norm, solution.rhs_norm)
    return CurvatureState(
        steps=jnp.asarray(optax.safe_increment(state.steps)),
        previous=previous,
        iterations=solution.iterations.astype(state.iterations.dtype),
        residual_norm=relative.astype(state.residual_norm.dtype),
        converged=jnp.asarray(solution.converged),
    )
