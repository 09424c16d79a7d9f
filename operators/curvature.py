"""Curvature by the names that its fields know: quantum geometric tensor, tangent kernel, Gauss-Newton, Fisher, Hessian.

Each operator is made of a `Jacobian` and takes its chunks, weights and frozen parameters.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .base import Field, HermitianOperator, LinearOperator, Vector
from .dtypes import cast_like
from .jacobian import Jacobian
from .linear_call import closed_linear_call
from .metric import MetricGramOperator, OutputHessian, check_losses
from .structure import Structure, describe
from .tangent_sums import each


def quantum_geometric_tensor(
    log_psi: Callable[[Any, Any], Array], params: Any, samples: Any, *, center: bool = True, **options: Any
) -> LinearOperator:
    r"""The quantum geometric tensor :math:`S = \langle O^H O\rangle - \langle O\rangle^H\langle O\rangle`.

    Short for ``Jacobian(log_psi, params, samples, center=True).gram()``. Never formed: solve with `krylov.solve`. For
    real parameters it is the real part, the metric of real parameters.

    Args:
        log_psi: log-amplitudes ``log_psi(params, samples) -> (N,)``, real or complex.
        params: pytree.
        samples: drawn from :math:`|\psi|^2`, or any with ``weights``.
        center: subtract the mean of the log-derivatives.
        options: those of `Jacobian`: ``weights``, ``chunk_size``, ``trainable``, ``holomorphic``, ``storage``.

    Example:
        >>> import jax.numpy as jnp
        >>> log_psi = lambda params, x: jnp.tanh(x @ params)
        >>> S = krylov.quantum_geometric_tensor(log_psi, jnp.ones(2), jnp.eye(3, 2))
        >>> S.is_positive, S.shape
        (True, (2, 2))

    Reference: Provost & Vallee (1980), doi:10.1007/BF02193559; Stokes et al. (2020), doi:10.22331/q-2020-05-25-269.
    """
    return Jacobian(log_psi, params, samples, center=center, **options).gram()


def neural_tangent_kernel(
    f: Callable[[Any, Any], Any], params: Any, samples: Any, *, center: bool = False, **options: Any
) -> LinearOperator:
    r"""The neural tangent kernel :math:`T_{ij} = \sqrt{w_i w_j}\, O_i O_j^H` on samples.

    Short for ``Jacobian(f, params, samples).cogram()``. With the default weights :math:`w_i = 1/N` it is the kernel of
    the literature divided by N, whose non-zero spectrum is that of the Fisher matrix. Centred, it is the matrix of
    minSR. Never formed.

    Args:
        f: the network, ``f(params, samples)``, sample axis first.
        params: pytree.
        samples: array or pytree of arrays, sample axis first.
        center: subtract the mean of the derivatives.
        options: those of `Jacobian`: ``weights``, ``chunk_size``, ``trainable``, ``holomorphic``, ``storage``.

    Example:
        >>> import jax.numpy as jnp
        >>> f = lambda params, x: jnp.tanh(x @ params)
        >>> krylov.neural_tangent_kernel(f, jnp.ones(2), jnp.eye(3, 2)).shape
        (3, 3)

    Reference: Jacot, Gabriel & Hongler (2018), arXiv:1806.07572.
    """
    return Jacobian(f, params, samples, center=center, **options).cogram()


def gauss_newton(
    f: Callable[[Any, Any], Any],
    loss: Callable[[Any, Any], Array],
    params: Any,
    batch: Any,
    *,
    convex: bool = True,
    **options: Any,
) -> LinearOperator:
    r"""The generalised Gauss-Newton matrix :math:`\sum_i w_i\, J_i^H\, \nabla^2\ell_i\, J_i` of a mean loss.

    :math:`\nabla^2\ell_i` is the Hessian of the loss of sample i in the network's outputs, so the matrix is that of the
    loss with the network linearized; positive where the loss is convex. Two passes over the samples a product.

    Args:
        f: ``f(params, batch) -> outputs``, sample axis first.
        loss: ``loss(outputs, batch) -> (N,)`` real, one for each sample.
        params: pytree.
        batch: array or pytree of arrays, sample axis first; inputs and targets, say.
        convex: claim that the loss is convex in the outputs. Without it the operator is hermitian only.
        options: those of `Jacobian`: ``weights``, ``chunk_size``, ``trainable``, ``storage``.

    Raises:
        ValueError: the loss does not return one real number for each sample.

    Example:
        >>> import jax.numpy as jnp
        >>> f = lambda params, batch: jnp.tanh(batch[0] @ params)
        >>> loss = lambda outputs, batch: 0.5 * (outputs - batch[1]) ** 2
        >>> krylov.gauss_newton(f, loss, jnp.ones(2), (jnp.eye(3, 2), jnp.zeros(3))).shape
        (2, 2)

    Reference: Schraudolph (2002), doi:10.1162/08997660260028683; Martens (2020), arXiv:1412.1193.
    """
    J = Jacobian(f, params, batch, **options)
    # From the closed network, in chunks as everywhere: whatever f closes over is known to it.
    outputs = _outputs(J)
    return MetricGramOperator(J, OutputHessian(loss, outputs, batch, convex=convex))


_LOG_PARTITIONS: dict[str, Callable[[Array], Array]] = {
    "gaussian": lambda z: 0.5 * (z.real**2 + z.imag**2).reshape(z.shape[0], -1).sum(-1),
    "categorical": lambda z: jax.nn.logsumexp(z, axis=-1).reshape(z.shape[0], -1).sum(-1),
    "bernoulli": lambda z: jax.nn.softplus(z).reshape(z.shape[0], -1).sum(-1),
    "poisson": lambda z: jnp.exp(z).reshape(z.shape[0], -1).sum(-1),
}


def fisher(
    f: Callable[[Any, Any], Any], params: Any, samples: Any, *, distribution: str = "categorical", **options: Any
) -> LinearOperator:
    r"""The Fisher information matrix of the distribution that a network's outputs describe.

    The outputs z are natural parameters: then the information in z is the Hessian of the log-partition function
    :math:`A(z)`, and the whole is :math:`\sum_i w_i\, J_i^H\, \nabla^2 A(z_i)\, J_i`. No labels are drawn.

    Args:
        f: ``f(params, samples) -> outputs``, one array, sample axis first.
        params: pytree.
        samples: inputs; labels are not needed.
        distribution: ``"categorical"``: logits along the last axis; ``"bernoulli"``: logits; ``"gaussian"``: means,
            variance one; ``"poisson"``: logarithms of rates; ``"log_prob"``: ``f`` is the log-probability ``(N,)`` of
            samples drawn from it, whose score has the second moment :math:`\sum_i w_i\, O_i^H O_i`.
        options: those of `Jacobian`: ``weights``, ``chunk_size``, ``trainable``, ``precision``.

    Raises:
        ValueError: an unknown distribution, or outputs that do not fit it.

    Example:
        >>> import jax.numpy as jnp
        >>> logits = lambda params, x: x @ params
        >>> krylov.fisher(logits, jnp.ones((2, 3)), jnp.eye(4, 2)).is_positive
        True

    Reference: Amari (1998), doi:10.1162/089976698300017746; Martens (2020), arXiv:1412.1193.
    """
    if distribution not in (*_LOG_PARTITIONS, "log_prob"):
        raise ValueError(
            f"fisher: unknown distribution.\n  got       {distribution!r}\n"
            f"  expected  one of {', '.join(map(repr, (*_LOG_PARTITIONS, 'log_prob')))}\n"
            "  For another one use gauss_newton with its log-partition function as the loss."
        )
    J = Jacobian(f, params, samples, **options)
    out = J.out_structure()
    real = isinstance(out, jax.ShapeDtypeStruct) and jnp.issubdtype(out.dtype, jnp.floating)
    if not isinstance(out, jax.ShapeDtypeStruct) or not (real or distribution == "gaussian"):
        raise ValueError(
            f"fisher: the outputs do not fit the distribution {distribution!r}.\n  got       {describe(out)}\n"
            "  expected  one array, real unless gaussian"
        )
    if distribution == "log_prob":
        check_losses("fisher: with distribution='log_prob' f(params, samples)", out, out.shape[0])
    if distribution == "categorical" and len(out.shape) < 2:
        raise ValueError(f"fisher: categorical logits need a last axis of classes.\n  got       {describe(out)}")
    if distribution in ("log_prob", "gaussian"):
        return J.gram()
    partition = _LOG_PARTITIONS[distribution]
    return MetricGramOperator(J, OutputHessian(lambda z, _: partition(z), _outputs(J), None))


def hessian(loss: Callable[[Any, Any], Array], params: Any, batch: Any, **options: Any) -> LinearOperator:
    r"""The Hessian :math:`\sum_i w_i\, \nabla^2\ell_i` of a mean loss with respect to the parameters.

    Hermitian and in general not positive. In complex parameters it is the derivative of the gradient along real and
    imaginary directions, which is only R-linear. One product differentiates the chunked gradient forward.

    Args:
        loss: ``loss(params, batch) -> (N,)`` real, one for each sample.
        params: pytree.
        batch: array or pytree of arrays, sample axis first.
        options: those of `Jacobian`: ``weights``, ``chunk_size``, ``trainable``, ``precision``.

    Raises:
        ValueError: the loss does not return one real number for each sample.

    Example:
        >>> import jax.numpy as jnp
        >>> loss = lambda params, x: jnp.cosh(x @ params)
        >>> krylov.hessian(loss, jnp.ones(2), jnp.eye(3, 2)).is_hermitian
        True

    Reference: Pearlmutter (1994), doi:10.1162/neco.1994.6.1.147.
    """
    J = Jacobian(loss, params, batch, **options)
    out = J.out_structure()
    count = jax.tree.leaves(out)[0].shape[0]
    check_losses("hessian: loss(params, batch)", out, count)
    # What another storage keeps belongs to the parameters, which a product moves.
    return HessianOperator(J.with_storage("recompute"), J.sample_vector(jnp.ones(count, out.dtype)))


class HessianOperator(HermitianOperator):
    """The Hessian of a weighted sum of losses; made by `hessian`."""

    jacobian: Jacobian
    cotangent: Vector  # the adjoint product with it is the gradient

    def _product(self, vector: Vector) -> Vector:
        return closed_linear_call(_hessian_product, None, (self.jacobian, self.cotangent), vector)

    def in_structure(self) -> Structure:
        """The trainable parameters."""
        return self.jacobian.in_structure()

    @property
    def field(self) -> Field:
        """Real."""
        return "real"


def _hessian_product(residuals: tuple[Jacobian, Vector], vector: Vector) -> Vector:
    jacobian, cotangent = residuals

    def gradient(params):
        return eqx.tree_at(lambda j: j.params, jacobian, params)._adjoint_product(cotangent)

    return each(lambda v: jax.jvp(gradient, (jacobian.params,), (cast_like(v, jacobian.params),))[1], vector)


@eqx.filter_jit
def _outputs(jacobian: Jacobian) -> Vector:
    """The network's outputs on all samples, chunk by chunk."""
    chunks = jacobian.chunks

    def outputs(params, samples):
        return jax.lax.map(lambda chunk: jacobian.network(params, chunk), samples)

    return chunks.join(chunks.run(outputs, jacobian.params, chunks.samples))
