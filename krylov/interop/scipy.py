"""Operators to and from SciPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
import scipy.sparse.linalg

from krylov.operators.base import LinearOperator, adjoint_product, product
from krylov.operators.convert import as_operator
from krylov.operators.function import FunctionOperator
from krylov.operators.matrix import MatrixOperator
from krylov.operators.structure import common_dtype, ravel, unravel


def to_scipy(op: Any) -> scipy.sparse.linalg.LinearOperator:
    """An operator of this library for SciPy's solvers and eigensolvers.

    Its vectors are flat: the leaves of the pytree, ravelled in the order of ``jax.tree.leaves``. An R-linear operator
    on complex leaves acts on real and imaginary parts, as its `as_real` does. A real one takes complex vectors too.

    Args:
        op: a `LinearOperator`, a lineax operator or a matrix.

    Returns:
        A SciPy ``LinearOperator`` with products and adjoint products, of one vector and of several columns.

    Raises:
        TypeError: ``op`` is none of these.

    Example:
        >>> import jax.numpy as jnp
        >>> from krylov.interop.scipy import to_scipy
        >>> A = to_scipy(krylov.operators.DiagonalOperator(jnp.array([1.0, 2.0])))
        >>> A.shape, A.matvec(np.ones(2)).tolist()
        ((2, 2), [1.0, 2.0])
    """
    op = as_operator(op, where="to_scipy")
    if op._needs_splitting:
        op = op.as_real()
    ins, outs = op.in_structure(), op.out_structure()
    dtype = np.dtype(common_dtype((ins, outs)))

    @jax.jit
    def forward(op: LinearOperator, flat):
        return ravel(product(op, unravel(flat, ins)), common_dtype(outs))

    @jax.jit
    def backward(op: LinearOperator, flat):
        return ravel(adjoint_product(op, unravel(flat, outs)), common_dtype(ins))

    def called(function):
        def on_one(x):
            if np.iscomplexobj(x) and not np.issubdtype(dtype, np.complexfloating):
                return on_one(x.real) + 1j * on_one(x.imag)
            return np.asarray(function(op, jnp.asarray(x, dtype).reshape(-1)))

        def on_columns(x):
            if np.iscomplexobj(x) and not np.issubdtype(dtype, np.complexfloating):
                return on_columns(x.real) + 1j * on_columns(x.imag)
            columns = jnp.asarray(x, dtype)
            return np.asarray(jax.vmap(lambda c: function(op, c), in_axes=1, out_axes=1)(columns))

        return on_one, on_columns

    (matvec, matmat), (rmatvec, rmatmat) = called(forward), called(backward)
    made: Any = scipy.sparse.linalg.LinearOperator  # which makes an object of another class
    return made(op.shape, matvec=matvec, rmatvec=rmatvec, matmat=matmat, rmatmat=rmatmat, dtype=dtype)


def from_scipy(matrix: Any, *, hermitian: bool = False, positive: bool = False) -> LinearOperator:
    """A SciPy sparse matrix or ``LinearOperator`` as an operator of this library, with claims.

    A sparse matrix becomes a JAX one; a ``LinearOperator`` is called back on the host in every product.

    Args:
        matrix: what SciPy has.
        hermitian: claim that it is hermitian.
        positive: claim that it is hermitian positive semi-definite.

    Returns:
        A `LinearOperator`.

    Raises:
        TypeError: it is neither.
        ValueError: it is claimed to be hermitian and is not square.

    Example:
        >>> import scipy.sparse
        >>> from krylov.interop.scipy import from_scipy
        >>> A = from_scipy(scipy.sparse.diags_array(np.array([1.0, 2.0], np.float32)).tocsr(), positive=True)
        >>> A.is_positive, krylov.solve(A, np.ones(2, np.float32)).method
        (True, 'cg')
    """
    if scipy.sparse.issparse(matrix):
        return MatrixOperator(matrix, hermitian=hermitian, positive=positive)
    if isinstance(matrix, scipy.sparse.linalg.LinearOperator):
        op = as_operator(matrix, where="from_scipy")
        if not (hermitian or positive):
            return op
        return FunctionOperator(op._product, op.in_structure(), hermitian=hermitian, positive=positive)
    raise TypeError(
        f"from_scipy: got {type(matrix).__name__}.\n  expected  a SciPy sparse matrix or LinearOperator\n"
        "  For an array: krylov.operators.MatrixOperator."
    )
