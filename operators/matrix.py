"""Operators given by their entries: dense and sparse matrices, diagonals."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse
from jax.sharding import NamedSharding, reshard
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from .base import Field, LinearOperator, Vector
from .function import check_hermitian_structure, check_inexact
from .structure import (
    Structure,
    abstract,
    all_complex,
    common_dtype,
    describe,
    freeze,
    has_complex,
    is_complex,
    known_not_negative,
    ravel,
    size_of,
    structure_of,
    thaw,
    unravel,
)


class MatrixOperator(LinearOperator):
    r"""The product with a dense or sparse matrix.

    Args:
        matrix: ``(m, n)``: a NumPy or JAX array, a ``jax.experimental.sparse`` matrix or a SciPy sparse matrix (kept as
            ``BCOO``), with real or complex floating-point entries.
        hermitian: claim that the matrix is hermitian.
        positive: claim that it is hermitian positive semi-definite.
        in_structure: pytree whose ravelled form the matrix acts on; default one array ``(n,)``.
        out_structure: the same for the result; default ``in_structure`` of a square matrix, else one array ``(m,)``.

    Raises:
        TypeError: entries are not floating point.
        ValueError: not two-dimensional, or claims and structures that do not fit.

    Example:
        >>> import numpy as np
        >>> op = MatrixOperator(np.array([[2.0, 1.0], [1.0, 3.0]]), positive=True)
        >>> (op @ np.array([1.0, 0.0])).tolist()
        [2.0, 1.0]
    """

    matrix: Any
    _structures: tuple | None = eqx.field(static=True)
    _hermitian: bool = eqx.field(static=True)
    _positive: bool = eqx.field(static=True)

    def __init__(
        self,
        matrix: Any,
        *,
        hermitian: bool = False,
        positive: bool = False,
        in_structure: Any = None,
        out_structure: Any = None,
    ):
        self.matrix = _as_jax_matrix(matrix)
        rows, columns = self.matrix.shape
        self._structures = None
        if in_structure is not None or out_structure is not None:
            default = lambda n: jax.ShapeDtypeStruct((n,), self.matrix.dtype)  # noqa: E731
            ins = structure_of(in_structure) if in_structure is not None else default(columns)
            if out_structure is not None:
                outs = structure_of(out_structure)
            else:
                outs = ins if rows == columns else default(rows)
            check_inexact("MatrixOperator", "in_structure", ins)
            check_inexact("MatrixOperator", "out_structure", outs)
            if (size_of(outs), size_of(ins)) != (rows, columns):
                raise ValueError(
                    f"MatrixOperator: a matrix of shape {rows, columns} cannot map {describe(ins)} to {describe(outs)}."
                )
            self._structures = freeze(ins), freeze(outs)
        self._hermitian = bool(hermitian or positive)
        self._positive = bool(positive)
        if self._hermitian:
            check_hermitian_structure("MatrixOperator", self.in_structure(), self.out_structure())

    def _product(self, vector: Vector) -> Vector:
        if self._structures is None:
            return _multiply(self.matrix, vector)
        return unravel(_multiply(self.matrix, ravel(vector, common_dtype(self.in_structure()))), self.out_structure())

    def in_structure(self) -> Structure:
        """Shapes and dtypes of the input."""
        if self._structures is None:
            return jax.ShapeDtypeStruct((self.matrix.shape[1],), self.matrix.dtype)
        return thaw(self._structures[0])

    def out_structure(self) -> Structure:
        """Shapes and dtypes of the output."""
        if self._structures is None:
            return jax.ShapeDtypeStruct((self.matrix.shape[0],), self.matrix.dtype)
        return thaw(self._structures[1])

    @property
    def field(self) -> Field:
        """Complex where all leaves are."""
        return "complex" if all_complex((self.in_structure(), self.out_structure())) else "real"

    @property
    def is_hermitian(self) -> bool:
        """As claimed."""
        return self._hermitian

    @property
    def is_positive(self) -> bool:
        """As claimed."""
        return self._positive

    def as_matrix(self) -> Array:
        """The matrix, dense."""
        if self._needs_splitting:
            return super().as_matrix()
        dense = self.matrix.todense() if isinstance(self.matrix, sparse.BCOO) else self.matrix
        # Between real vectors only the real part of a complex matrix acts.
        return dense if has_complex(self.out_structure()) else dense.real

    def diagonal(self) -> Vector:
        """The diagonal, as a vector."""
        if self._needs_splitting or not self.is_square:
            return super().diagonal()
        if isinstance(self.matrix, sparse.BCOO):
            rows, columns = self.matrix.indices[:, 0], self.matrix.indices[:, 1]
            entries = jnp.where(rows == columns, self.matrix.data, 0)
            flat = jnp.zeros(self.matrix.shape[0], self.matrix.dtype).at[rows].add(entries, mode="drop")
        else:
            flat = jnp.diagonal(self.matrix)
        return flat if self._structures is None else unravel(flat, self.in_structure())


def _multiply(matrix, vector):
    if isinstance(matrix, sparse.BCOO):
        return matrix @ vector
    sharding = abstract(vector).sharding
    if sharding is None or matrix.shape[0] != matrix.shape[1]:
        return jnp.matmul(matrix, vector, precision=jax.lax.Precision.HIGHEST)
    # On Explicit axes a product must say how it is spread: as the vector is, whatever the matrix.
    whole = reshard(vector, NamedSharding(sharding.mesh, P()))
    return jnp.matmul(matrix, whole, precision=jax.lax.Precision.HIGHEST, out_sharding=sharding)


def _as_jax_matrix(matrix: Any) -> Any:
    if hasattr(matrix, "tocoo"):  # SciPy sparse
        if not np.issubdtype(matrix.dtype, np.inexact):
            raise TypeError(_not_floating(matrix.dtype))
        matrix = sparse.BCOO.from_scipy_sparse(matrix.tocoo())
    elif isinstance(matrix, sparse.BCSR):
        matrix = matrix.to_bcoo()
    elif isinstance(matrix, sparse.JAXSparse) and not isinstance(matrix, sparse.BCOO):
        matrix = sparse.BCOO.fromdense(matrix.todense())
    elif not isinstance(matrix, sparse.BCOO):
        if not hasattr(matrix, "dtype"):
            matrix = np.asarray(matrix)
        if not jnp.issubdtype(matrix.dtype, jnp.number):
            raise TypeError(_not_floating(matrix.dtype))
        matrix = jnp.asarray(matrix)
    if len(matrix.shape) != 2:
        raise ValueError(f"MatrixOperator: matrix must have two axes, not shape {matrix.shape}.")
    if isinstance(matrix, sparse.BCOO) and (matrix.n_batch or matrix.n_dense):
        raise ValueError("MatrixOperator: a BCOO matrix must have no batch and no dense axes.")
    if not jnp.issubdtype(matrix.dtype, jnp.inexact):
        raise TypeError(_not_floating(matrix.dtype))
    return matrix


def _not_floating(dtype) -> str:
    return (
        f"MatrixOperator: matrix must have real or complex floating-point entries.\n  got       {dtype}\n"
        "  Cast it, for example with matrix.astype(float)."
    )


class DiagonalOperator(LinearOperator):
    r"""Entrywise product with a vector, :math:`x \mapsto d \odot x`.

    Args:
        entries: the diagonal, a pytree of real or complex arrays.
        structure: the vectors it acts on where they are not like ``entries``: a real diagonal on complex vectors.
        positive: claim that no entry is negative. Default: looked up where the entries are real and known.

    Raises:
        ValueError: shapes differ, or a complex diagonal for real vectors.

    Example:
        >>> import jax.numpy as jnp
        >>> (DiagonalOperator(jnp.array([1.0, 2.0])) @ jnp.ones(2)).tolist()
        [1.0, 2.0]
    """

    entries: Vector
    _structure: tuple = eqx.field(static=True)
    _positive: bool = eqx.field(static=True)

    def __init__(self, entries: Any, structure: Any = None, *, positive: bool | None = None):
        if positive is None:
            positive = known_not_negative(entries)
        self.entries = jax.tree.map(jnp.asarray, entries)
        check_inexact("DiagonalOperator", "entries", structure_of(self.entries))
        own = structure_of(self.entries)
        target = own if structure is None else structure_of(structure)
        fits = jax.tree.structure(own) == jax.tree.structure(target) and all(
            d.shape == x.shape and (is_complex(x) or not is_complex(d))
            for d, x in zip(jax.tree.leaves(own), jax.tree.leaves(target), strict=True)
        )
        if not fits:
            raise ValueError(
                "DiagonalOperator: the entries do not fit the vectors.\n"
                f"  got       {describe(own)}\n  expected  {describe(target)}\n"
                "  Shapes must agree, and a complex diagonal needs complex vectors."
            )
        self._structure = freeze(target)
        if positive and has_complex(own):
            raise ValueError("DiagonalOperator: positive=True needs real entries; pass entries.real.")
        self._positive = bool(positive)

    def _product(self, vector: Vector) -> Vector:
        return jax.tree.map(lambda d, x: (d * x).astype(x.dtype), self.entries, vector)

    def _adjoint_product(self, vector: Vector) -> Vector:
        return jax.tree.map(lambda d, x: (jnp.conj(d) * x).astype(x.dtype), self.entries, vector)

    def in_structure(self) -> Structure:
        """Shapes and dtypes of the vectors it acts on."""
        return thaw(self._structure)

    def out_structure(self) -> Structure:
        """The same as the input."""
        return thaw(self._structure)

    @property
    def field(self) -> Field:
        """Complex where all leaves are."""
        return "complex" if all_complex(self.in_structure()) else "real"

    @property
    def is_hermitian(self) -> bool:
        """Whether the entries have a real dtype."""
        return not has_complex(self.entries)

    @property
    def is_positive(self) -> bool:
        """As claimed or found."""
        return self._positive

    def diagonal(self) -> Vector:
        """The entries, in the dtype of the vectors."""
        if self._needs_splitting:
            return super().diagonal()
        return jax.tree.map(lambda d, x: d.astype(x.dtype), self.entries, self.in_structure())
