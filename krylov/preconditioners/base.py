"""What a preconditioner is: a recipe that is built for an operator, and what it builds."""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from krylov.operators.base import Field, HermitianOperator, LinearOperator
from krylov.operators.convert import as_operator
from krylov.operators.structure import Structure, describe, has_complex, is_traced, real_dtype

from ..coordinates import Coordinates
from ..driver import is_scalar


class PreconditionerReport(eqx.Module):
    """What a preconditioner is worth, for the shift it stands at.

    Attributes:
        rank: directions in which it is better than a multiple of the identity.
        condition_before: estimated condition number of the shifted operator, whose smallest eigenvalue is taken to be
            the shift; NaN where nothing was estimated.
        condition_after: the same of the preconditioned operator.
        matvecs: products with the operator that building it took.
    """

    rank: Int[Array, ""]
    condition_before: Float[Array, ""]
    condition_after: Float[Array, ""]
    matvecs: Int[Array, ""]

    def __repr__(self) -> str:
        values = self.rank, self.condition_before, self.condition_after, self.matvecs
        if any(is_traced(x) or np.ndim(x) for x in values):
            return "PreconditionerReport(traced or stacked)"
        rank, before, after, matvecs = (float(x) for x in values)
        known = (
            "condition not estimated" if np.isnan(after) else f"condition about {before:.1e} before, {after:.1e} after"
        )
        return f"PreconditionerReport(rank {rank:.0f}, {known}, {matvecs:.0f} products)"


def not_estimated(rank: int, matvecs: Any, dtype: Any) -> PreconditionerReport:
    """A report without condition numbers."""
    unknown = jnp.full((), jnp.nan, dtype)
    return PreconditionerReport(jnp.asarray(rank, jnp.int32), unknown, unknown, jnp.asarray(matvecs, jnp.int32))


class BuiltPreconditioner(HermitianOperator):
    r"""An approximate inverse of :math:`A + s`, hermitian and positive, that can be moved to another shift.

    `krylov.solve` moves it to the shift of each solve. A pytree: it passes through jit and scan, and may be kept while
    the operator changes slowly.
    """

    coordinates: eqx.AbstractVar[Coordinates]
    shift: eqx.AbstractVar[Any]

    @property
    @abc.abstractmethod
    def report(self) -> PreconditionerReport:
        """Rank, estimated condition numbers at its shift, and products spent."""

    def with_shift(self, shift: Any) -> "BuiltPreconditioner":
        """The same for another shift, at no cost.

        Raises:
            ValueError: a complex shift, or a diagonal where a scalar is needed.
        """
        shift = check_shift(f"{type(self).__name__}.with_shift", shift, self.coordinates)
        return eqx.tree_at(lambda built: built.shift, self, shift)

    def in_structure(self) -> Structure:
        """That of the operator it was built for."""
        return self.coordinates.structure

    @property
    def field(self) -> Field:
        """That of the operator it was built for."""
        return self.coordinates.field

    @property
    def is_positive(self) -> bool:
        """True."""
        return True


class Preconditioner(eqx.Module):
    """A recipe for an approximate inverse of ``A + shift``, to `build` or to pass to `krylov.solve` as it is."""

    def build(self, op: Any, key: Array | None = None, *, shift: Any = 0.0) -> BuiltPreconditioner:
        """The preconditioner for an operator; under derivatives a constant.

        Args:
            op: hermitian positive; an operator or a matrix.
            key: for the random choices; default ``jax.random.key(0)``.
            shift: where it will be used first, which decides when an adaptive rank is enough.

        Raises:
            ValueError: an operator that is not square or that this preconditioner cannot be built for, or a shift that
                is not real.
        """
        name = f"{type(self).__name__}.build"
        op = square_operator(name, op)
        self._check(op)
        shift = check_shift(name, shift, Coordinates(op.in_structure(), op.field), self._takes_diagonal)
        op, shift = without_derivatives((op, shift))
        return _build(self, op, key, shift)

    _takes_diagonal = False

    def _check(self, op: LinearOperator) -> None:
        """Raise an error where the preconditioner cannot be built for this operator."""

    @abc.abstractmethod
    def _build(self, op: LinearOperator, key: Array, shift: Any) -> BuiltPreconditioner:
        """Build it, with arguments that are known to be right."""


@eqx.filter_jit
def _build(recipe: Preconditioner, op: LinearOperator, key: Array | None, shift: Any) -> BuiltPreconditioner:
    return recipe._build(op, jax.random.key(0) if key is None else key, shift)


def without_derivatives(tree: Any) -> Any:
    """The solution does not depend on how it is preconditioned."""
    return jax.tree.map(lambda x: jax.lax.stop_gradient(x) if eqx.is_inexact_array(x) else x, tree)


def check_shift(where: str, shift: Any, coordinates: Coordinates, takes_diagonal: bool = False) -> Any:
    """The shift as arrays of the right precision.

    Raises:
        ValueError: complex, or a diagonal where that does not do.
    """
    if has_complex(jax.tree.map(jnp.asarray, shift)):
        raise ValueError(f"{where}: a complex shift makes no hermitian system; take its real part.")
    if is_scalar(shift):
        return jnp.asarray(shift, coordinates.real_dtype)
    if not takes_diagonal:
        raise ValueError(
            f"{where}: the shift must be a scalar here.\n  got       {describe(shift)}\n"
            "  Jacobi takes a diagonal shift; or scale the system so that the shift becomes a number."
        )
    return jax.tree.map(
        lambda d, s: jnp.broadcast_to(d, s.shape).astype(real_dtype(s.dtype)), shift, coordinates.structure
    )


def square_operator(
    where: str, op: Any, cure: str = "Take J.gram() or op.H @ op.", structure: Structure | None = None
) -> LinearOperator:
    """An operator from whatever stands for one; ``structure`` is that of its vectors where the operator is a function.

    Raises:
        ValueError: it is not square, or empty.
    """
    op = as_operator(op, structure, where=where)
    if not op.is_square:
        raise ValueError(
            f"{where}: the operator is not square.\n  input     {describe(op.in_structure())}\n"
            f"  output    {describe(op.out_structure())}\n  {cure}"
        )
    if op.shape == (0, 0):
        raise ValueError(f"{where}: the operator is empty.\n  input     {describe(op.in_structure())}")
    return op


def positive_count(name: str, option: str, value: Any) -> int:
    """A whole number of at least one.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name}: {option} must be a whole number of at least one.\n  got       {value!r}")
    return int(value)
