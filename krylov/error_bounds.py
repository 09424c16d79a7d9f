"""Bounds of the energy norm of the error: what CG needs to know for them, and the lower one."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from krylov.operators.base import LinearOperator, Vector, product
from krylov.operators.structure import common_dtype, is_traced, real_dtype

from .driver import Outcome, add_shift, is_scalar
from .methods import CG
from .vectors import RealScalar, divide, power_of_two, real_inner, safe_norm, scale, subtract


def informed(method: CG, op: LinearOperator, shift: Any, preconditioner: LinearOperator | None) -> CG:
    """The method with the lower bound of the spectrum that it needs, as an array.

    Raises:
        ValueError: none is given or known, or one that is not positive.
    """
    smallest = method.smallest
    if smallest is None:
        if not (op.is_positive and is_scalar(shift) and preconditioner is None):
            raise ValueError(
                "solve: CG(bounds=True) needs a lower bound of the spectrum.\n  Pass CG(bounds=True, smallest=...), or "
                "an operator that claims to be positive, a scalar shift and no preconditioner."
            )
        smallest = shift
    if not is_traced(smallest) and not smallest > 0:
        raise ValueError(
            f"solve: CG(bounds=True) needs a positive lower bound of the spectrum.\n  got       {smallest}\n"
            "  Pass smallest=..., or a positive shift."
        )
    dtype = real_dtype(common_dtype(op.in_structure()))
    smallest = jax.lax.stop_gradient(jnp.asarray(smallest, dtype))
    tolerance = None if method.energy_rtol is None else jax.lax.stop_gradient(jnp.asarray(method.energy_rtol, dtype))
    return CG(bounds=True, smallest=smallest, energy_rtol=tolerance)


@eqx.filter_jit
def bounds_of(
    method: CG,
    op: LinearOperator,
    shift: Any,
    preconditioner: LinearOperator | None,
    b: Vector,
    x: Vector,
    outcome: Outcome,
) -> tuple[RealScalar, RealScalar]:
    r"""A lower and an upper bound of the energy norm of the error, from the true residual r.

    The lower is the energy norm of the error's part along z = M r, :math:`|z^H r| / \sqrt{z^H A z}`. The upper is what
    the recurrence found, or without a preconditioner :math:`\|r\|` over the root of the smallest eigenvalue.
    """
    arrays = op, shift, preconditioner, b, x
    op, shift, preconditioner, b, x = jax.tree.map(lambda a: jax.lax.stop_gradient(a) if eqx.is_array(a) else a, arrays)
    r = subtract(b, add_shift(shift, product(op, x), x))
    unit = power_of_two(safe_norm(r, real_dtype(common_dtype(r))))
    r = scale(1 / unit, r)
    z = r if preconditioner is None else product(preconditioner, r)
    curvature = real_inner(z, add_shift(shift, product(op, z), z))
    lower = divide(jnp.abs(real_inner(z, r)), jnp.sqrt(jnp.maximum(curvature, 0))) * unit
    upper = outcome.error_bound
    assert upper is not None
    if preconditioner is None:
        upper = jnp.minimum(upper, outcome.residual_norm / jnp.sqrt(method.smallest))
    return lower.astype(upper.dtype), upper
