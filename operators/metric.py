"""Grams with a metric between the two factors, and the metrics: diagonals, blocks of samples, Hessians of losses."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .base import Field, HermitianOperator, LinearOperator, Vector, conjugate
from .closure import ClosedFunction, close, traceable
from .linear_call import closed_linear_call
from .matrix import DiagonalOperator
from .structure import (
    Structure,
    all_complex,
    describe,
    freeze,
    is_complex,
    join_real,
    real_dtype,
    same_structure,
    split_real,
    structure_of,
    thaw,
)
from .views import joint_field


class MetricGramOperator(LinearOperator):
    r"""The operator :math:`A^H M A`, hermitian (positive) where the metric :math:`M` is.

    With the Jacobian of a network for :math:`A` and the Hessian of a loss in the outputs for :math:`M` it is the
    Gauss-Newton matrix. One product costs one with each of :math:`A`, :math:`M` and :math:`A^H`; nothing is formed.

    Args:
        factor: the operator :math:`A`, a `Jacobian` say.
        metric: an operator on the outputs of ``factor``; or real arrays like these outputs, for a diagonal; or, where
            the output is one array ``(N, k)``, an array ``(N, k, k)``: one hermitian matrix for each sample, taken to
            be positive semi-definite.

    Raises:
        ValueError: the metric does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> f = lambda params, x: jnp.tanh(x @ params)
        >>> J = krylov.Jacobian(f, jnp.ones(2), jnp.eye(3, 2))
        >>> MetricGramOperator(J, jnp.array([1.0, 2.0, 3.0])).is_positive
        True

    Reference: Schraudolph (2002), doi:10.1162/08997660260028683.
    """

    factor: LinearOperator
    metric: LinearOperator

    def __init__(self, factor: LinearOperator, metric: Any):
        self.factor = factor
        self.metric = _as_metric(metric, factor.out_structure())

    def _product(self, vector: Vector) -> Vector:
        return self.factor._adjoint_product(self.metric._product(self.factor._product(vector)))

    def _adjoint_product(self, vector: Vector) -> Vector:
        return self.factor._adjoint_product(self.metric._adjoint_product(self.factor._product(vector)))

    def in_structure(self) -> Structure:
        """Input of the factor."""
        return self.factor.in_structure()

    def out_structure(self) -> Structure:
        """Input of the factor."""
        return self.factor.in_structure()

    @property
    def field(self) -> Field:
        """Complex where both are."""
        return joint_field(self.factor, self.metric)

    @property
    def is_hermitian(self) -> bool:
        """Where the metric is."""
        return self.metric.is_hermitian

    @property
    def is_positive(self) -> bool:
        """Where the metric is."""
        return self.metric.is_positive


def _as_metric(metric: Any, structure: Structure) -> LinearOperator:
    if isinstance(metric, LinearOperator):
        if metric.is_square and same_structure(metric.in_structure(), structure):
            return metric
        got = f"{describe(metric.in_structure())} -> {describe(metric.out_structure())}"
    else:
        metric = jax.tree.map(jnp.asarray, metric)
        shapes, expected = (jax.tree.map(lambda x: x.shape, tree) for tree in (metric, structure))
        if shapes == expected and not any(map(is_complex, jax.tree.leaves(metric))):
            return DiagonalOperator(metric, structure)
        if isinstance(structure, jax.ShapeDtypeStruct) and shapes == (*structure.shape, *structure.shape[1:]):
            return SampleBlocks(metric, structure)
        got = describe(metric)
    raise ValueError(
        "MetricGramOperator: the metric does not fit the outputs of the factor.\n"
        f"  got       {got}\n  expected  an operator on {describe(structure)}, real arrays of these shapes,\n"
        "            or (N, k, k) for an output (N, k)"
    )


class SampleBlocks(HermitianOperator):
    """One hermitian positive matrix for each sample, on outputs ``(N, k)``."""

    blocks: Array
    _structure: tuple = eqx.field(static=True)

    def __init__(self, blocks: Array, structure: Structure):
        if is_complex(blocks) and not all_complex(structure):
            raise ValueError("MetricGramOperator: complex blocks need complex outputs.")
        self.blocks, self._structure = blocks, freeze(structure)

    def _product(self, vector: Vector) -> Vector:
        return jnp.einsum("nij,nj->ni", self.blocks, vector, precision="highest").astype(vector.dtype)

    def in_structure(self) -> Structure:
        """The outputs."""
        return thaw(self._structure)

    @property
    def field(self) -> Field:
        """Complex where the outputs are."""
        return "complex" if all_complex(self.in_structure()) else "real"

    @property
    def is_positive(self) -> bool:
        """True."""
        return True


class OutputHessian(HermitianOperator):
    r"""The Hessians of the losses of single samples with respect to a network's outputs, side by side.

    Over the real field, in real and imaginary parts of complex outputs. A convex loss makes it positive.

    Args:
        loss: ``loss(outputs, batch) -> (N,)`` real, the loss of each sample.
        outputs: where the Hessians are taken.
        batch: what else the loss takes.
        convex: claim that the loss is convex in the outputs.
    """

    loss: ClosedFunction
    outputs: Vector
    batch: PyTree
    _convex: bool = eqx.field(static=True)

    def __init__(self, loss: Callable[[Any, Any], Array], outputs: Vector, batch: Any, *, convex: bool = True):
        self.outputs = outputs
        self.batch = jax.tree.map(jnp.asarray, batch)
        with traceable("OutputHessian", "loss"):
            self.loss = close(loss, structure_of(outputs), structure_of(self.batch))
        check_losses("loss(outputs, batch)", self.loss.out_structure, jax.tree.leaves(outputs)[0].shape[0])
        self._convex = bool(convex)

    def _product(self, vector: Vector) -> Vector:
        return closed_linear_call(_hessian_product, None, self, vector)

    def in_structure(self) -> Structure:
        """The outputs."""
        return structure_of(self.outputs)

    @property
    def field(self) -> Field:
        """Real."""
        return "real"

    @property
    def is_positive(self) -> bool:
        """As claimed."""
        return self._convex


def _hessian_product(op: OutputHessian, vector: Vector) -> Vector:
    def gradient(outputs):
        return conjugate(jax.grad(lambda z: op.loss(z, op.batch).sum())(outputs))

    return jax.jvp(gradient, (op.outputs,), (vector,))[1]


def check_losses(what: str, got: Any, count: int) -> None:
    """Refuse what is not one real loss for each sample.

    Raises:
        ValueError: it is something else.
    """
    single = isinstance(got, jax.ShapeDtypeStruct) and got.shape == (count,)
    if not single or not jnp.issubdtype(got.dtype, jnp.floating):
        raise ValueError(
            f"{what} must return one real loss for each sample.\n"
            f"  got       {describe(got)}\n  expected  float[{count}]\n"
            "  Leave the mean over samples to weights; take the real part of a complex loss."
        )


class PartsDiagonal(HermitianOperator):
    """A real diagonal with entries of its own for real and for imaginary parts, so only R-linear.

    Args:
        parts: the entries, in the form of `split_real`.
        structure: the vectors it acts on.
        positive: claim that no entry is negative.
    """

    parts: tuple
    _structure: tuple = eqx.field(static=True)
    _positive: bool = eqx.field(static=True)

    def __init__(self, parts: tuple, structure: Structure, *, positive: bool):
        self.parts, self._structure, self._positive = parts, freeze(structure), positive

    def _product(self, vector: Vector) -> Vector:
        scaled = jax.tree.map(lambda d, x: (d * x).astype(x.dtype), self.parts, split_real(vector))
        return join_real(scaled, self.in_structure())

    def in_structure(self) -> Structure:
        """The structure given."""
        return thaw(self._structure)

    @property
    def field(self) -> Field:
        """Real."""
        return "real"

    @property
    def is_positive(self) -> bool:
        """As claimed."""
        return self._positive

    def diagonal(self) -> Vector:
        """The entries: as parts where the vectors have complex leaves."""
        parts = jax.tree.map(lambda d, s: jnp.broadcast_to(d, s.shape), self.parts, split_real(self.in_structure()))
        return parts if self._needs_splitting else parts[0]


def spread_over_parts(diagonal: Any, structure: Structure) -> tuple:
    """A real diagonal, or a scalar, in the form of `split_real`: the same for real and imaginary parts."""
    if jax.tree.structure(diagonal) == jax.tree.structure(0):
        diagonal = jax.tree.map(lambda s: diagonal, structure)
    filled = jax.tree.map(lambda d, s: jnp.broadcast_to(d, s.shape).astype(real_dtype(s.dtype)), diagonal, structure)
    pairs = zip(jax.tree.leaves(filled), jax.tree.leaves(structure), strict=True)
    return filled, [d for d, s in pairs if is_complex(s)]
