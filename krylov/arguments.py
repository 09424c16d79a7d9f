"""The arguments that every front door takes: right-hand sides, numbers, and when to stop."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from krylov.operators.base import LinearOperator, Vector
from krylov.operators.function import check_inexact
from krylov.operators.matrix import DiagonalOperator, MatrixOperator
from krylov.operators.structure import Structure, has_complex, is_complex, is_traced, size_of, structure_of

from .driver import Controls

# Residual norms kept by history=True where maxiter is not given.
_MAX_HISTORY = 10_000


def right_hand_side(where: str, name: str, b: Any) -> Vector:
    """``b`` as a pytree of floating-point arrays."""
    try:
        b = jax.tree.map(jnp.asarray, b)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{where}: {name} is not a pytree of arrays: {error}") from None
    check_inexact(where, name, structure_of(b))
    return b


def is_real_matrix(op: LinearOperator) -> bool:
    """Whether it is given by real entries, so that complex vectors are meant entry by entry."""
    return isinstance(op, (MatrixOperator, DiagonalOperator)) and not has_complex(op.in_structure())


def number(where: str, name: str, value: Any) -> Any:
    """A scalar; NumPy numbers stay NumPy, since converting them on the device would compile."""
    if not hasattr(value, "dtype"):
        value = np.asarray(value)
    if not (jnp.issubdtype(value.dtype, jnp.number)) or value.shape != ():
        raise TypeError(f"{where}: {name} must be a number, not {value!r}.")
    return value


def not_negative(where: str, name: str, value: Any, dtype: Any) -> Any:
    """A real number that is not known to be negative, in the given precision."""
    value = number(where, name, value)
    if np.iscomplexobj(value) if not is_traced(value) else is_complex(value):
        raise TypeError(f"{where}: {name} must be real, not {value!r}.")
    if not is_traced(value) and not value >= 0:
        raise ValueError(f"{where}: {name} must not be negative.\n  got       {value}\n  expected  a number >= 0")
    return value.astype(dtype)


def known(value: Any) -> float:
    """The value of a number, or NaN where it is traced."""
    return float("nan") if is_traced(value) else float(value)


def real_unknowns(structure: Structure) -> int:
    """The number of real numbers in a vector."""
    return sum(size_of(s) * (2 if is_complex(s) else 1) for s in jax.tree.leaves(structure))


def stopping(
    where: str, rtol: Any, atol: Any, maxiter: Any, history: bool, progress: bool, dtype: Any, unknowns: int
) -> Controls:
    """When to stop, checked; ``maxiter`` is ten times the unknowns unless given."""
    rtol, atol = (not_negative(where, name, value, dtype) for name, value in (("rtol", rtol), ("atol", atol)))
    most = np.iinfo(np.int32).max
    length = min(10 * max(unknowns, 1), _MAX_HISTORY) + 1
    if maxiter is None:
        limit = np.asarray(min(10 * max(unknowns, 1), most), np.int32)
    elif is_traced(maxiter):
        limit = maxiter.astype(jnp.int32)
    else:
        whole = (
            not isinstance(maxiter, bool)
            and np.ndim(maxiter) == 0
            and np.issubdtype(np.asarray(maxiter).dtype, np.integer)
        )
        if not whole or maxiter < 0:
            raise ValueError(
                f"{where}: maxiter must be a whole number and not negative.\n  got       {maxiter!r}\n"
                "  Leave it out for ten times the number of real unknowns."
            )
        limit = np.asarray(min(int(maxiter), most), np.int32)
        length = min(int(maxiter), _MAX_HISTORY) + 1
    # An array made from a NumPy number compiles nothing.
    return Controls(rtol, atol, jnp.asarray(limit), length if history else None, bool(progress))
