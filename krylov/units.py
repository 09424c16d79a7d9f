"""The sizes of operators and preconditioners, kept where squares neither overflow nor vanish."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from .vectors import Flag, RealScalar, Space


class Sizes(NamedTuple):
    """Norms as the first step of a recurrence showed them, roughly: zero where it showed nothing.

    One that left the range on the way may be infinite, NaN or, if it is the preconditioner's, zero.
    """

    operator: RealScalar
    preconditioner: RealScalar


class Units(NamedTuple):
    """Powers of two that a recurrence's vectors are multiplied by on their way to the operator and to the other."""

    operator: RealScalar
    preconditioner: RealScalar

    @classmethod
    def none(cls, space: Space) -> "Units":
        """Ones."""
        return cls(*[jnp.ones((), space.real_dtype)] * 2)

    def differ(self, other: "Units") -> Flag:
        """Whether any does."""
        return (self.operator != other.operator) | (self.preconditioner != other.preconditioner)


def rescaled(units: Units, sizes: Sizes | None, first: Flag) -> Units:
    """Those of the next attempt, if the first step of this one left the range or came near its ends.

    One of them at a time, the preconditioner's before, without which the operator's size is not known; each once. A
    unit is near the root of the range: what is multiplied by mistake, because the first vector was nearly null, is
    still in it.
    """
    if sizes is None:
        return units
    info = jnp.finfo(units.operator.dtype)
    of_preconditioner = _unit(sizes.preconditioner, info, zero_is_small=True)
    of_operator = _unit(sizes.operator, info, zero_is_small=False)
    moves = first & (units.preconditioner == 1) & (of_preconditioner != 1)
    units = units._replace(preconditioner=jnp.where(moves, of_preconditioner, units.preconditioner))
    moves = first & ~moves & (units.operator == 1)
    return units._replace(operator=jnp.where(moves, of_operator, units.operator))


def _unit(size: RealScalar, info: Any, *, zero_is_small: bool) -> RealScalar:
    large = 2.0 ** (15 * info.maxexp // 32)  # 2^60 in single precision
    far = large**0.8
    small = (size < 1 / far) & (zero_is_small | (size > 0))
    unit = jnp.where(small, large, jnp.where(~(size <= far), 1 / large, 1))
    return unit.astype(size.dtype)


def shown(norm: RealScalar) -> RealScalar:
    """A norm whose square may have vanished: never zero."""
    return jnp.maximum(norm, jnp.finfo(norm.dtype).tiny)
