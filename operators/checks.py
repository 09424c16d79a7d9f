"""Whether an operator is what it claims to be: linear, with this adjoint, hermitian, positive, sample by sample."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .convert import as_operator
from .operator_checks import findings_of_operator
from .report import OperatorError, OperatorReport
from .structure import describe, is_traced


def check_operator(
    op: Any,
    key: Any = None,
    *,
    structure: Any = None,
    probes: int = 3,
    tolerance: float | None = None,
    throw: bool = True,
) -> OperatorReport:
    r"""Test on random vectors that an operator is what it claims to be.

    Checked are linearity over the declared field, the adjoint identity :math:`\langle y, A x\rangle = \langle A^H y, x
    \rangle`, that JAX's transpose is the same map, the claims hermitian and positive (the latter by the smallest Ritz
    value of a short Lanczos run, which finds an isolated negative eigenvalue that random vectors miss), the diagonal
    where it is cheap, and that products are finite and the same twice. For each `Jacobian` inside, whatever surrounds
    it: that samples do not see each other, and that ``f`` is finite and gives the same twice.

    Costs some thirty products. Figures are taken in double precision and are relative, so that size and units of the
    operator do not matter.

    Args:
        op: a `LinearOperator` or whatever `as_operator` takes.
        key: a JAX random key or an integer seed, for the vectors.
        structure: what a function acts on, where ``op`` is one.
        probes: random vectors for each check.
        tolerance: largest relative difference that counts as rounding; default the square root of the spacing of
            floating-point numbers in the coarsest leaf: 1.5e-8 for float64, 3.5e-4 for float32, 0.09 for bfloat16.
            Digits that a centred Jacobian cancels are allowed for.
        throw: raise if a check fails.

    Returns:
        An `OperatorReport`.

    Raises:
        OperatorError: a ``ValueError`` that lists every check that failed, by how much, and what to do.
        TypeError: called under a transformation, where values are not known.

    Example:
        >>> from krylov.operators import MatrixOperator
        >>> A = jnp.array([[2.0, 1.0], [0.0, 2.0]])
        >>> check_operator(MatrixOperator(A)).passed
        True
        >>> check_operator(MatrixOperator(A, hermitian=True), throw=False)["hermitian"].passed
        False
    """
    op = as_operator(op, structure, where="check_operator")
    if any(is_traced(x) for x in jax.tree.leaves(op)):
        raise TypeError("check_operator: needs known values; call it outside jit, grad and vmap.")
    if not isinstance(probes, int) or probes < 1:
        raise ValueError(f"check_operator: probes must be a positive whole number, not {probes!r}.")
    with np.errstate(all="ignore"):  # what is not finite is found and told
        findings = list(findings_of_operator(op, np.random.default_rng(_seed(key)), probes, tolerance))
    report = OperatorReport(_in_words(op), findings)
    if throw and not report.passed:
        raise OperatorError(report)
    return report


def _seed(key):
    if key is None:
        return 0
    if hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    return np.asarray(key).ravel().tolist()


def _in_words(op) -> str:
    ins, outs = describe(op.in_structure()), describe(op.out_structure())
    return f"{type(op).__name__} {ins} -> {outs} over the {op.field} field"
