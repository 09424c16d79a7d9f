"""Square systems as they come in: the operator, its preconditioner and its shift, checked and made to fit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from krylov.operators.base import LinearOperator
from krylov.operators.convert import as_operator
from krylov.operators.structure import (
    Structure,
    all_complex,
    common_dtype,
    describe,
    has_complex,
    is_complex,
    real_dtype,
    same_structure,
)
from krylov.operators.views import complexify

from .arguments import is_real_matrix, number
from .driver import is_scalar
from .preconditioners import BuiltPreconditioner, Preconditioner


def square_system(
    where: str, op: Any, preconditioner: Any, vectors: Structure, shift: Any
) -> tuple[LinearOperator, LinearOperator | None, Preconditioner | None]:
    """The operator, its preconditioner at this shift, and the recipe of one that is still to be `built`.

    Raises:
        ValueError: an operator that is not square, a preconditioner on other vectors.
        TypeError: something of the wrong kind.
    """
    op = as_operator(op, vectors, where=where)
    if isinstance(preconditioner, type) and issubclass(preconditioner, LinearOperator | Preconditioner):
        name = preconditioner.__name__
        raise TypeError(
            f"{where}: preconditioner must be an object, not a class.\n  got       the class {name}\n"
            f"  expected  a recipe such as krylov.Nystrom(rank=256), or an operator\n  Make one: {name}(...)."
        )
    recipe = preconditioner if isinstance(preconditioner, Preconditioner) else None
    if recipe is not None:
        preconditioner = None
    elif preconditioner is not None:
        preconditioner = as_operator(preconditioner, vectors, where=f"{where}: preconditioner")
    if isinstance(preconditioner, BuiltPreconditioner):
        preconditioner = preconditioner.with_shift(shift)
    op, preconditioner = _match_fields(op, preconditioner, vectors)
    if not op.is_square:
        raise ValueError(
            f"{where}: the operator is not square.\n  input     {describe(op.in_structure())}\n"
            f"  output    {describe(op.out_structure())}\n  {_cure(op)}"
        )
    if preconditioner is not None:
        sides = {"input": preconditioner.in_structure(), "output": preconditioner.out_structure()}
        for side, got in sides.items():
            if not same_structure(got, op.in_structure()):
                raise ValueError(
                    f"{where}: the preconditioner's {side} does not match the operator.\n"
                    f"  got       {describe(got)}\n  expected  {describe(op.in_structure())}"
                )
    return op, preconditioner, recipe


def built(
    recipe: Preconditioner | None, preconditioner: LinearOperator | None, op: LinearOperator, shift: Any
) -> tuple[LinearOperator | None, Any]:
    """The preconditioner, from its recipe where there is one, and the products that this took."""
    if recipe is None:
        return preconditioner, 0
    made = recipe.build(op, shift=shift)
    return made, made.report.matvecs


def _cure(op: LinearOperator) -> str:
    """What to do about outputs that are not like the inputs."""
    inputs, outputs = jax.tree.leaves(op.in_structure()), jax.tree.leaves(op.out_structure())
    if not outputs:
        return "The product returns no array: a function without a return statement?"
    if [x.shape for x in inputs] == [x.shape for x in outputs]:
        if all(is_complex(y) >= is_complex(x) for x, y in zip(inputs, outputs, strict=True)):
            return "The product must return the structure and dtypes of b; where it is complex, give a complex b."
        return "The product must return the structure and dtypes of b: cast its result."
    return (
        "For the least-squares solution: krylov.lstsq, with damping in place of a shift; or solve with the gram, "
        "op.H @ op or J.gram()."
    )


def _match_fields(op, preconditioner, vectors):
    """A real matrix, with its preconditioner, is extended to complex vectors where those are."""
    if is_real_matrix(op) and all_complex(vectors):
        op = complexify(op)
        if preconditioner is not None and not has_complex(preconditioner.in_structure()):
            preconditioner = complexify(preconditioner)
    elif preconditioner is not None and is_real_matrix(preconditioner) and all_complex(vectors):
        preconditioner = complexify(preconditioner)
    return op, preconditioner


def check_shift(where: str, shift: Any, structure: Structure) -> Any:
    """The shift as arrays in the precision of the vectors."""
    if isinstance(shift, (bool, str)) or shift is None:
        raise TypeError(f"{where}: shift must be a number or a pytree like b, not {shift!r}.")
    if is_scalar(shift):
        value = number(where, "shift", shift)
        complex_shift = bool(np.iscomplexobj(value)) or (hasattr(value, "dtype") and is_complex(value))
        if complex_shift and not all_complex(structure):
            raise ValueError(
                f"{where}: a complex shift needs complex vectors.\n"
                f"  got       shift of dtype {jnp.result_type(value)}\n"
                f"  vectors   {describe(structure)}\n  Pass its real part, or make the system complex."
            )
        dtype = common_dtype(structure)
        return value.astype(dtype if complex_shift else real_dtype(dtype))
    leaves = jax.tree.map(jnp.asarray, shift)
    fits = jax.tree.structure(leaves) == jax.tree.structure(structure) and all(
        d.shape in ((), s.shape) and (is_complex(s) or not is_complex(d))
        for d, s in zip(jax.tree.leaves(leaves), jax.tree.leaves(structure), strict=True)
    )
    if not fits:
        raise ValueError(
            f"{where}: shift must be a scalar or a pytree like b, with an array or a scalar for each leaf.\n"
            f"  got       {describe(shift)}\n  expected  {describe(structure)}"
        )
    return jax.tree.map(lambda d, s: d.astype(s.dtype if is_complex(d) else real_dtype(s.dtype)), leaves, structure)
