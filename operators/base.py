"""What every linear operator here is: a map between pytree vectors that knows its adjoint, its field and its claims."""

import abc
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact, PyTree

from .structure import (
    Structure,
    abstract,
    check_vector,
    common_dtype,
    has_complex,
    ravel,
    real_dtype,
    same_structure,
    size_of,
    unravel,
    zeros,
)

Field = Literal["complex", "real"]
Vector = PyTree[Inexact[Array, "..."]]


class LinearOperator(lx.AbstractLinearOperator):
    r"""A linear map between vectors that are pytrees of arrays.

    An operator over the ``"complex"`` field is C-linear and its adjoint is taken in the inner product
    :math:`\langle x, y\rangle = \sum \bar x_i y_i`. One over the ``"real"`` field is R-linear (leaves may be real,
    complex or mixed) and its adjoint is taken in :math:`\mathrm{Re}\langle x, y\rangle`, summed over all leaves.

    A subclass gives ``_product``, ``in_structure``, ``out_structure`` and ``field``; ``_adjoint_product`` where JAX's
    transpose of the product is not the best way, and ``is_hermitian`` and ``is_positive`` where they are not False.
    """

    __array_ufunc__ = None  # so that a NumPy scalar on the left leaves the multiplication to us

    @abc.abstractmethod
    def _product(self, vector: Vector) -> Vector:
        """The product with a vector that is known to match ``in_structure``."""

    @property
    @abc.abstractmethod
    def field(self) -> Field:
        """``"complex"`` for a C-linear map between complex leaves, else ``"real"``."""

    @property
    def is_hermitian(self) -> bool:
        """Whether the operator is claimed to equal its adjoint. Claims are unchecked; see `check_operator`."""
        return False

    @property
    def is_positive(self) -> bool:
        """Whether the operator is claimed to be hermitian positive semi-definite."""
        return False

    def _adjoint_product(self, vector: Vector) -> Vector:
        like = self.in_structure()
        if same_structure(like, self.out_structure()):
            like = jax.tree.map(abstract, vector)  # spread over a mesh as the vector is
        (out,) = jax.linear_transpose(self._product, like)(conjugate(vector))
        return conjugate(out)

    def mv(self, vector: Vector) -> Vector:
        """The product ``A x``; ``op @ x`` is the same.

        Raises:
            ValueError: ``vector`` does not match ``in_structure()``.
        """
        vector = check_vector(f"{type(self).__name__}.mv", "vector", vector, self.in_structure())
        return product(self, vector)

    def rmv(self, vector: Vector) -> Vector:
        """The adjoint product ``A^H y``.

        Raises:
            ValueError: ``vector`` does not match ``out_structure()``.
        """
        vector = check_vector(f"{type(self).__name__}.rmv", "vector", vector, self.out_structure())
        return adjoint_product(self, vector)

    def mm(self, vectors: PyTree[Inexact[Array, "k ..."]]) -> PyTree[Inexact[Array, "k ..."]]:
        """Products with several vectors, stacked along a new first axis; a network is linearized once for all of them.

        Raises:
            ValueError: ``vectors`` are not a stack of vectors that match ``in_structure()``.
        """
        shapes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(vectors)}
        k = shapes.pop() if len(shapes) == 1 else ()
        expected = jax.tree.map(lambda s: jax.ShapeDtypeStruct((*k, *s.shape), s.dtype), self.in_structure())
        cure = "Stack vectors along a new first axis: jax.tree.map(lambda *leaves: jnp.stack(leaves), *vectors)."
        vectors = check_vector(f"{type(self).__name__}.mm", "vectors", vectors, expected, cure)
        return products(self, vectors)

    @property
    def H(self) -> "LinearOperator":
        """The adjoint (conjugate transpose)."""
        from .views import AdjointOperator

        return self if self.is_hermitian else AdjointOperator(self)

    def transpose(self) -> "LinearOperator":
        """The transpose without conjugation; ``op.T`` is the same. It is the conjugate of the adjoint."""
        from .views import conjugate_operator

        return conjugate_operator(self.H)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns, a complex entry counted once."""
        return size_of(self.out_structure()), size_of(self.in_structure())

    @property
    def is_square(self) -> bool:
        """Whether input and output have the same structure, shapes and dtypes."""
        return same_structure(self.in_structure(), self.out_structure())

    def as_matrix(self) -> Inexact[Array, "rows columns"]:
        r"""The dense matrix on ravelled vectors (leaves in the order of ``jax.tree.leaves``).

        A real-field operator with complex leaves has no complex matrix. For it this is the matrix of `as_real`: real,
        on the real parts of all leaves followed by the imaginary parts of the complex ones.
        """
        if self._needs_splitting:
            return self.as_real().as_matrix()
        return _as_matrix(self)

    def as_real(self) -> "LinearOperator":
        """The same operator on ``(real parts of all leaves, [imaginary parts of the complex ones])``.

        All leaves are real there and the real inner product is the ordinary one, so any solver that knows nothing of
        fields is right on it. An operator without complex leaves is returned as it is.
        """
        from .views import RealOperator

        if has_complex((self.in_structure(), self.out_structure())):
            return RealOperator(self)
        return self

    def diagonal(self) -> Vector:
        """The diagonal, as a vector; of `as_real` where a real-field operator has complex leaves, as in `as_matrix`.

        Raises:
            ValueError: the operator is not square.
        """
        if not self.is_square:
            raise ValueError(f"{type(self).__name__}.diagonal: the operator is not square but {self.shape}.")
        if self._needs_splitting:
            return self.as_real().diagonal()
        return _diagonal(self)

    @property
    def _needs_splitting(self) -> bool:
        return self.field == "real" and has_complex((self.in_structure(), self.out_structure()))

    def __matmul__(self, other: Any) -> Any:
        from .algebra import compose

        if isinstance(other, lx.AbstractLinearOperator):
            return compose(self, other)
        return self.mv(other)

    def __add__(self, other: Any) -> "LinearOperator":
        from .algebra import add

        return add(self, other)

    def __radd__(self, other: Any) -> "LinearOperator":
        if isinstance(other, int) and other == 0:  # what sum() begins with
            return self
        return self + other

    def __sub__(self, other: Any) -> "LinearOperator":
        from .algebra import add

        return add(self, -other)

    def __mul__(self, scalar: Any) -> "LinearOperator":
        from .algebra import ScaledOperator

        return ScaledOperator(self, scalar)

    def __rmul__(self, scalar: Any) -> "LinearOperator":
        return self * scalar

    def __truediv__(self, scalar: Any) -> "LinearOperator":
        # In the operator's precision, and known where the scalar is: under jit JAX would make a tracer of a number.
        precision = real_dtype(common_dtype(self.out_structure()))
        if not isinstance(scalar, jax.Array):
            scalar = np.asarray(scalar)
        inverse = 1 / scalar.astype(jnp.promote_types(scalar.dtype, precision))
        return self * inverse

    def __neg__(self) -> "LinearOperator":
        return self * -1.0

    def __repr__(self) -> str:
        rows, columns = self.shape
        claims = "positive " if self.is_positive else "hermitian " if self.is_hermitian else ""
        return f"{type(self).__name__}({claims}{rows} x {columns}, {self.field} field)"


class HermitianOperator(LinearOperator):
    """An operator that is its own adjoint.

    A subclass gives ``_product``, ``in_structure`` and ``field``, and ``is_positive`` where it is not False.
    """

    def _adjoint_product(self, vector: Vector) -> Vector:
        return self._product(vector)

    def out_structure(self) -> Structure:
        """The same as the input."""
        return self.in_structure()

    @property
    def is_hermitian(self) -> bool:
        """True."""
        return True


def conjugate(vector: Vector) -> Vector:
    """The complex conjugate of every leaf."""
    return jax.tree.map(jnp.conj, vector)


# One compiled product for each kind of operator, whoever asks: JAX traces a network once, however many solvers,
# derivatives and loops it ends up in.
@eqx.filter_jit
def product(op: LinearOperator, vector: Vector) -> Vector:
    """``A x``, jitted with the operator as an argument; the vector is known to match."""
    return op._product(vector)


@eqx.filter_jit
def products(op: LinearOperator, vectors: Vector) -> Vector:
    """``A x`` for each x along the first axis, jitted."""
    return jax.vmap(op._product)(vectors)


@eqx.filter_jit
def adjoint_product(op: LinearOperator, vector: Vector) -> Vector:
    """``A^H y``, jitted with the operator as an argument; the vector is known to match."""
    return op._adjoint_product(vector)


_COLUMNS_AT_ONCE = 64


@eqx.filter_jit
def _as_matrix(op: LinearOperator) -> Array:
    structure, out_dtype = op.in_structure(), common_dtype(op.out_structure())
    n = size_of(structure)
    if n == 0 or op.shape[0] == 0:
        return jnp.zeros(op.shape, out_dtype)

    def column(i):
        unit = jnp.zeros(n, common_dtype(structure)).at[i].set(1)
        return ravel(op._product(unravel(unit, structure)), out_dtype)

    return jax.lax.map(column, jnp.arange(n), batch_size=min(n, _COLUMNS_AT_ONCE)).T


@eqx.filter_jit
def _diagonal(op: LinearOperator) -> Vector:
    structure = op.in_structure()
    n, dtype = size_of(structure), common_dtype(structure)
    if n == 0:
        return zeros(structure)

    def entry(i):
        unit = jnp.zeros(n, dtype).at[i].set(1)
        return ravel(op._product(unravel(unit, structure)), dtype)[i]

    return unravel(jax.lax.map(entry, jnp.arange(n), batch_size=min(n, _COLUMNS_AT_ONCE)), structure)
