"""The damping of a natural-gradient step: a shift, a shift for each parameter, a share of the diagonal of S."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from krylov.operators import Jacobian, LinearOperator
from krylov.operators.base import Vector
from krylov.operators.matrix import DiagonalOperator
from krylov.operators.metric import PartsDiagonal, spread_over_parts
from krylov.operators.structure import is_traced, real_dtype, same_structure

from .driver import is_scalar
from .parameters import trained_part


class Damping(NamedTuple):
    """The damping D of parameters.

    Attributes:
        shift: D as `solve` takes it, a scalar or a pytree; None where only the operator says it.
        operator: D as an operator; None where it is a scalar.
        known_singular: whether some entry is known to be zero.
    """

    shift: Any
    operator: LinearOperator | None
    known_singular: bool

    def inverse(self, power: float = 1.0) -> LinearOperator:
        """The inverse of the operator, or a power of it."""
        assert self.operator is not None
        structure = self.operator.in_structure()
        if isinstance(self.operator, PartsDiagonal):
            return PartsDiagonal(_power(self.operator.parts, -power), structure, positive=True)
        assert isinstance(self.operator, DiagonalOperator)
        return DiagonalOperator(_power(self.operator.entries, -power), structure, positive=True)

    def times(self, vector: Vector) -> Vector:
        """``D v``."""
        return _scaled(self.shift, vector) if self.operator is None else self.operator.mv(vector)


def make_damping(where: str, J: Jacobian, shift: Any, diag_scale: Any) -> Damping:
    r"""The damping :math:`\lambda + \epsilon\,\mathrm{diag}(J^H J)`.

    Args:
        where: what errors call the function.
        J: whose parameters are damped.
        shift: a scalar, or a pytree like the parameters with a scalar or an array for each leaf.
        diag_scale: a scalar, or None.

    Raises:
        ValueError: something is known to be negative, or does not fit.
    """
    structure = J.in_structure()
    scalar = is_scalar(shift)
    shift, diag_scale = as_arrays(shift), as_arrays(diag_scale)
    if not scalar:
        shift = trained_part(where, "shift", shift, structure)
        shift = jax.tree.map(lambda d, s: jnp.broadcast_to(d, s.shape).astype(real_dtype(s.dtype)), shift, structure)
    for name, value in (("shift", shift), ("diag_scale", diag_scale)):
        if any(not is_traced(v) and not np.all(np.asarray(v) >= 0) for v in jax.tree.leaves(value)):
            raise ValueError(
                f"{where}: {name} must be real and not negative.\n  got       {value!r}\n"
                "  For an indefinite system build it with Jacobian and krylov.solve(..., method='minres')."
            )
    zeros = (not is_traced(d) and bool(np.any(np.asarray(d) == 0)) for d in jax.tree.leaves(shift))
    known_singular = diag_scale is None and any(zeros)
    if diag_scale is None:
        return Damping(shift, None if scalar else DiagonalOperator(shift, structure, positive=True), known_singular)
    diagonal = J.gram().diagonal()
    if same_structure(diagonal, structure):
        entries = _scaled_diagonal(jax.tree.map(jnp.real, diagonal), diag_scale, shift, scalar)
        return Damping(entries, DiagonalOperator(entries, structure, positive=True), False)
    spread = shift if scalar else spread_over_parts(shift, structure)
    entries = _scaled_diagonal(diagonal, diag_scale, spread, scalar)
    return Damping(None, PartsDiagonal(entries, structure, positive=True), False)


def as_arrays(tree: Any) -> Any:
    """Python's numbers as arrays, for which jitted functions are not compiled anew when they change."""
    return jax.tree.map(lambda x: x if hasattr(x, "dtype") else np.asarray(x), tree)


@eqx.filter_jit
def _scaled_diagonal(diagonal, scale, shift, scalar):
    if scalar:
        return jax.tree.map(lambda d: (scale * d + shift).astype(d.dtype), diagonal)
    return jax.tree.map(lambda d, s: (scale * d + s).astype(d.dtype), diagonal, shift)


@eqx.filter_jit
def _power(tree, exponent):
    return jax.tree.map(lambda d: d**exponent, tree)


@eqx.filter_jit
def _scaled(scalar, vector):
    return jax.tree.map(lambda x: (scalar * x).astype(x.dtype), vector)
