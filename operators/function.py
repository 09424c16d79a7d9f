"""An operator given by a function."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from .base import Field, LinearOperator, Vector, conjugate
from .closure import ClosedFunction, close, traceable
from .linear_call import closed_linear_call
from .structure import Structure, all_complex, describe, freeze, same_structure, structure_of, thaw


def check_claims(where: str, in_structure: Structure, out_structure: Structure, field: Any) -> None:
    """Refuse a field that does not exist or cannot be; the checks that need no product."""
    if field not in ("complex", "real"):
        raise ValueError(f"{where}: field must be 'complex' or 'real', not {field!r}.")
    if field == "complex" and not (all_complex(in_structure) and all_complex(out_structure)):
        raise ValueError(
            f"{where}: a map over the complex field needs complex leaves only.\n"
            f"  got       {describe(in_structure)} -> {describe(out_structure)}\n"
            "  Leave out field='complex', or make all leaves complex."
        )


def check_hermitian_structure(where: str, in_structure: Structure, out_structure: Structure) -> None:
    """Refuse the claim hermitian for a map between different spaces."""
    if not same_structure(in_structure, out_structure):
        raise ValueError(
            f"{where}: a hermitian operator maps a space to itself.\n"
            f"  input     {describe(in_structure)}\n  output    {describe(out_structure)}\n"
            "  Drop hermitian=True or positive=True, or make the output match the input."
        )


_HOST = (
    "or pass a function of NumPy arrays as\n"
    "  scipy.sparse.linalg.LinearOperator(shape, matvec=..., rmatvec=..., dtype=...), which is called back on the host."
)


class FunctionOperator(LinearOperator):
    r"""A linear operator :math:`x \mapsto f(x)` given by a function, with its adjoint where that is known.

    The function is traced once, when the operator is made. Arrays that it closes over become leaves of the operator, so
    derivatives, ``vmap`` and ``jit`` see them, and a new operator from the same code with other values compiles nothing
    anew. Without ``adjoint`` (and unless ``hermitian``) JAX transposes the traced function.

    Args:
        fn: ``fn(x)``, linear over the field.
        structure: the input, as a pytree of arrays or of ``jax.ShapeDtypeStruct``.
        adjoint: ``adjoint(y)``, the adjoint :math:`f^H` in the inner product of the field.
        hermitian: claim that :math:`f^H = f`; its own product then serves as adjoint.
        positive: claim that it is hermitian positive semi-definite.
        field: ``"complex"`` if C-linear, ``"real"`` if only R-linear. Default: complex where all leaves are complex.

    Raises:
        ValueError: the claims do not fit the structures.
        TypeError: a leaf is not real or complex floating point.

    Example:
        >>> import jax.numpy as jnp
        >>> op = FunctionOperator(lambda x: jnp.cumsum(x), jnp.zeros(3))
        >>> op.rmv(jnp.ones(3)).tolist()
        [3.0, 2.0, 1.0]
    """

    fn: ClosedFunction
    adjoint: ClosedFunction | None
    _structures: tuple = eqx.field(static=True)
    _field: Field = eqx.field(static=True)
    _hermitian: bool = eqx.field(static=True)
    _positive: bool = eqx.field(static=True)

    def __init__(
        self,
        fn: Callable[[Vector], Vector],
        structure: Any,
        adjoint: Callable[[Vector], Vector] | None = None,
        *,
        hermitian: bool = False,
        positive: bool = False,
        field: Field | None = None,
    ):
        in_structure = structure_of(structure)
        check_inexact("FunctionOperator", "structure", in_structure)
        with traceable("FunctionOperator", "fn", _HOST):
            self.fn = close(fn, in_structure)
        out_structure = self.fn.out_structure
        check_inexact("FunctionOperator", "the output of fn", out_structure)
        if field is None:
            field = "complex" if all_complex(in_structure) and all_complex(out_structure) else "real"
        check_claims("FunctionOperator", in_structure, out_structure, field)
        if hermitian or positive:
            check_hermitian_structure("FunctionOperator", in_structure, out_structure)
        with traceable("FunctionOperator", "adjoint", _HOST):
            self.adjoint = None if adjoint is None else close(adjoint, out_structure)
        if self.adjoint is not None and not same_structure(self.adjoint.out_structure, in_structure):
            raise ValueError(
                "FunctionOperator: adjoint does not return what fn takes.\n"
                f"  got       {describe(self.adjoint.out_structure)}\n  expected  {describe(in_structure)}\n"
                "  adjoint(y) must return a vector of the input space."
            )
        self._structures = freeze(in_structure), freeze(out_structure)
        self._field = field
        self._hermitian = bool(hermitian or positive)
        self._positive = bool(positive)

    def _product(self, vector: Vector) -> Vector:
        if self.adjoint is not None:
            return closed_linear_call(_forward, _transposed, (self.fn, self.adjoint), vector)
        if self._hermitian:
            return closed_linear_call(_apply, None, self.fn, vector)
        return self.fn(vector)

    def in_structure(self) -> Structure:
        """Shapes and dtypes of the input."""
        return thaw(self._structures[0])

    def out_structure(self) -> Structure:
        """Shapes and dtypes of the output."""
        return thaw(self._structures[1])

    @property
    def field(self) -> Field:
        """The field given."""
        return self._field

    @property
    def is_hermitian(self) -> bool:
        """As claimed."""
        return self._hermitian

    @property
    def is_positive(self) -> bool:
        """As claimed."""
        return self._positive


def check_inexact(where: str, name: str, structure: Structure) -> None:
    """Refuse leaves that are not floating point."""
    for leaf in jax.tree.leaves(structure):
        if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
            raise TypeError(
                f"{where}: {name} must have real or complex floating-point leaves.\n  got       {describe(structure)}\n"
                "  Cast it, for example with x.astype(float)."
            )


def _apply(fn, x):
    return fn(x)


def _forward(functions, x):
    return functions[0](x)


def _transposed(functions, y):
    return conjugate(functions[1](conjugate(y)))
