"""Other libraries' operators, arrays and functions as operators of this one."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from jax.experimental import sparse

from .base import Field, LinearOperator, Vector, conjugate
from .function import FunctionOperator, check_inexact
from .linear_call import closed_linear_call
from .matrix import MatrixOperator
from .structure import Structure, all_complex, has_complex, structure_of


def as_operator(op: Any, structure: Any = None, *, where: str = "as_operator") -> LinearOperator:
    """Anything that stands for a linear map, as a `LinearOperator`.

    Args:
        op: a `LinearOperator`, any lineax operator, a NumPy or JAX matrix, a ``jax.experimental.sparse`` or SciPy
            sparse matrix, a ``scipy.sparse.linalg.LinearOperator`` (called back on the host), or a function.
        structure: what a function acts on, as a pytree of arrays or shapes.
        where: the caller's name, for errors.

    Raises:
        TypeError: ``op`` is none of these.
        ValueError: a function without a structure, or a matrix that is not two-dimensional.
    """
    if isinstance(op, LinearOperator):
        return op
    if isinstance(op, lx.AbstractLinearOperator):
        return LineaxOperator(op)
    if isinstance(op, scipy.sparse.linalg.LinearOperator):
        return HostOperator(op)
    if isinstance(op, (np.ndarray, jax.Array, sparse.JAXSparse, list)) or scipy.sparse.issparse(op):
        if isinstance(op, list):
            op = np.asarray(op)
        if op.ndim == 1:
            raise ValueError(
                f"{where}: got a vector of shape {op.shape}, expected an operator or a matrix.\n"
                "  For a diagonal matrix pass krylov.operators.DiagonalOperator(vector)."
            )
        return MatrixOperator(op)
    if callable(op):
        if structure is None:
            raise ValueError(f"{where}: a function needs the structure of its input.")
        return FunctionOperator(op, structure)
    raise TypeError(
        f"{where}: cannot make an operator of {type(op).__name__}.\n"
        "  expected  a LinearOperator, a lineax operator, a matrix (dense or sparse), a SciPy operator, or a function."
    )


class LineaxOperator(LinearOperator):
    """A lineax operator seen as one of this library; its tags become the claims.

    lineax's symmetric complex matrices are not hermitian, and are not claimed to be.
    """

    operator: lx.AbstractLinearOperator

    def __init__(self, operator: lx.AbstractLinearOperator):
        check_inexact("LineaxOperator", "the input", operator.in_structure())
        check_inexact("LineaxOperator", "the output", operator.out_structure())
        self.operator = operator

    def _product(self, vector: Vector) -> Vector:
        return self.operator.mv(vector)

    def _adjoint_product(self, vector: Vector) -> Vector:
        return conjugate(self.operator.transpose().mv(conjugate(vector)))

    def in_structure(self) -> Structure:
        """That of the lineax operator."""
        return structure_of(self.operator.in_structure())

    def out_structure(self) -> Structure:
        """That of the lineax operator."""
        return structure_of(self.operator.out_structure())

    @property
    def field(self) -> Field:
        """Complex where all leaves are, unless one of this library's R-linear operators is inside."""
        inside = jax.tree.leaves(self.operator, is_leaf=lambda x: isinstance(x, LinearOperator))
        if any(isinstance(x, LinearOperator) and x._needs_splitting for x in inside):
            return "real"
        return "complex" if all_complex((self.in_structure(), self.out_structure())) else "real"

    @property
    def is_hermitian(self) -> bool:
        """Tagged definite, or tagged symmetric and real."""
        definite = lx.is_positive_semidefinite(self.operator) or lx.is_negative_semidefinite(self.operator)
        return bool(definite or (lx.is_symmetric(self.operator) and not has_complex(self.in_structure())))

    @property
    def is_positive(self) -> bool:
        """Tagged positive semi-definite."""
        return bool(lx.is_positive_semidefinite(self.operator))

    def as_matrix(self) -> jax.Array:
        """lineax's own dense form."""
        return super().as_matrix() if self._needs_splitting else self.operator.as_matrix()


class HostOperator(LinearOperator):
    """A SciPy ``LinearOperator``, called back on the host in each product. For reference and small problems."""

    operator: scipy.sparse.linalg.LinearOperator = eqx.field(static=True)

    def __init__(self, operator: scipy.sparse.linalg.LinearOperator):
        self.operator = operator
        check_inexact("HostOperator", "the vectors", self.in_structure())

    def _product(self, vector: Vector) -> Vector:
        return closed_linear_call(
            lambda _, x: _call_back(self.operator.matvec, x, self.out_structure()),
            lambda _, y: jnp.conj(_call_back(self.operator.rmatvec, jnp.conj(y), self.in_structure())),
            (),
            vector,
        )

    def in_structure(self) -> Structure:
        """One array ``(columns,)`` in the dtype that JAX gives the operator's."""
        return jax.ShapeDtypeStruct(self.operator.shape[1:], jax.dtypes.canonicalize_dtype(self.operator.dtype))

    def out_structure(self) -> Structure:
        """One array ``(rows,)``."""
        return jax.ShapeDtypeStruct(self.operator.shape[:1], self.in_structure().dtype)

    @property
    def field(self) -> Field:
        """Complex where the dtype is."""
        return "complex" if all_complex(self.in_structure()) else "real"


def _call_back(host_product, x, out):
    return jax.pure_callback(
        lambda x: np.asarray(host_product(np.asarray(x))).reshape(out.shape).astype(out.dtype),
        out,
        x,
        vmap_method="sequential",
    )
