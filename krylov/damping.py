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
from krylov.operators.structure import Structure, has_complex, is_traced, real_dtype, same_structure

from .driver import is_scalar
from .parameters import trained_part
from .vectors import scale


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
        return scaled(self.shift, vector) if self.operator is None else self.operator.mv(vector)


def shift_damping(where: str, shift: Any, structure: Structure) -> Damping:
    """The damping by a shift alone; see `make_damping`."""
    uniform = is_scalar(shift)
    shift = as_arrays(shift)
    if not uniform:
        shift = trained_part(where, "shift", shift, structure)
    _check_not_negative(where, "shift", shift)
    known_singular = any(map(_has_known_zero, jax.tree.leaves(shift)))
    if uniform:
        return Damping(shift, None, known_singular)
    shift = jax.tree.map(lambda d, s: jnp.broadcast_to(d, s.shape).astype(real_dtype(s.dtype)), shift, structure)
    return Damping(shift, DiagonalOperator(shift, structure, positive=True), known_singular)


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
    damping, diag_scale = shift_damping(where, shift, structure), as_arrays(diag_scale)
    if diag_scale is None:
        return damping
    if not is_scalar(diag_scale):
        raise ValueError(f"{where}: diag_scale must be a number.\n  got       {diag_scale!r}")
    _check_not_negative(where, "diag_scale", diag_scale)
    if _has_known_zero(diag_scale):
        return damping
    diagonal = J.gram().diagonal()
    if same_structure(diagonal, structure):
        entries = _scaled_diagonal(jax.tree.map(jnp.real, diagonal), diag_scale, damping.shift)
        return Damping(entries, DiagonalOperator(entries, structure, positive=True), False)
    entries = _scaled_diagonal(diagonal, diag_scale, spread_over_parts(damping.shift, structure))
    return Damping(None, PartsDiagonal(entries, structure, positive=True), False)


def _check_not_negative(where: str, name: str, value: Any) -> None:
    leaves = jax.tree.leaves(value)
    if has_complex(leaves) or any(not is_traced(v) and not np.all(np.asarray(v) >= 0) for v in leaves):
        raise ValueError(
            f"{where}: {name} must be real and not negative.\n  got       {value!r}\n"
            "  For an indefinite system build it with Jacobian and krylov.solve(..., method='minres')."
        )


def _has_known_zero(value: Any) -> bool:
    return not is_traced(value) and bool(np.any(np.asarray(value) == 0))


def as_arrays(tree: Any) -> Any:
    """Python's numbers as arrays, for which jitted functions are not compiled anew when they change."""
    return jax.tree.map(lambda x: x if hasattr(x, "dtype") else np.asarray(x), tree)


@eqx.filter_jit
def _scaled_diagonal(diagonal, factor, shift):
    if is_scalar(shift):
        shift = jax.tree.map(lambda _: shift, diagonal)

    def leaf(d, s):
        # What the network does not depend on has a column of zeros: any damping but none gives the same step.
        unused = (d == 0) & (s == 0)
        return (factor * jnp.where(unused, 1, d) + s).astype(d.dtype)

    return jax.tree.map(leaf, diagonal, shift)


@eqx.filter_jit
def _power(tree, exponent):
    return jax.tree.map(lambda d: d**exponent, tree)


scaled = eqx.filter_jit(scale)
