"""The exact inverse of a gram over some of its samples."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from krylov.operators.base import LinearOperator
from krylov.operators.gram import GramOperator
from krylov.operators.rows import row_parts
from krylov.operators.sample_rows import adjoint_rows
from krylov.operators.structure import real_dtype

from ..coordinates import combine, coordinates_of, whole
from .base import Preconditioner, positive_count
from .spectral import SpectralInverse


class SampleWoodbury(Preconditioner):
    r"""The exact inverse of :math:`J_B^H J_B + s`, J_B the rows of some samples drawn at random, for a gram.

    The weights of the samples drawn are scaled to sum up to one, the mean is that of all. Costs the gradients of the
    samples drawn and one singular value decomposition, no product with the operator; stores a vector for each row, the
    real and imaginary parts of an output apart over the real field. At equal rank `SampleNystrom` is a much better
    preconditioner, and takes longer to build.

    Args:
        samples: how many, all if there are not as many.

    Raises:
        ValueError: fewer than one.
        TypeError: on building, an operator that is not ``J.gram()``.

    Example:
        >>> f = lambda w, x: jnp.tanh(x @ w)
        >>> x = jax.random.normal(jax.random.key(0), (50, 20)) / jnp.arange(1, 21) ** 2
        >>> S = krylov.Jacobian(f, jnp.ones(20), x).gram()
        >>> M = krylov.SampleWoodbury(samples=50).build(S)
        >>> int(krylov.solve(S, jnp.ones(20), shift=1e-2, preconditioner=M).iterations)
        1

    Reference: Woodbury identity, Hager (1989), doi:10.1137/1031049.
    """

    samples: int

    def __init__(self, samples: int = 256):
        self.samples = positive_count("SampleWoodbury", "samples", samples)

    def _check(self, op: LinearOperator) -> None:
        if not isinstance(op, GramOperator):
            raise TypeError(
                f"SampleWoodbury.build: it takes the samples of a gram.\n  got       {op!r}\n  expected  J.gram()\n"
                "  Nystrom takes any positive operator."
            )

    def _build(self, op: LinearOperator, key: Array, shift: Any) -> SpectralInverse:
        assert isinstance(op, GramOperator)
        J, coordinates = op.jacobian, coordinates_of(op)
        number = J.chunks.num_samples
        chosen = jax.random.permutation(key, number)[: self.samples]
        parts = row_parts(J)
        outputs = sum(s.size // s.shape[0] * (2 if _apart(J, s) else 1) for s in jax.tree.leaves(J.out_structure()))
        numbers = jnp.tile(jnp.arange(outputs), chosen.size)
        rows = adjoint_rows(J, parts, jnp.repeat(chosen, outputs), numbers).astype(coordinates.dtype)
        total = whole(J.chunks.flat_weights)[chosen].sum()
        rows = rows / jnp.sqrt(jnp.where(total > 0, total, 1)).astype(real_dtype(rows.dtype))
        q, r = jnp.linalg.qr(rows.T)
        left, values, _ = jnp.linalg.svd(r, full_matrices=False)
        return SpectralInverse(
            basis=combine(left.T, q.T),
            eigenvalues=values.astype(coordinates.real_dtype) ** 2,
            rest=jnp.zeros((), coordinates.real_dtype),
            shift=shift,
            rank=jnp.asarray(values.size, jnp.int32),
            # The mean row takes a pass over per-sample gradients.
            matvecs=jnp.asarray(0 if parts.mean is None else 1, jnp.int32),
            coordinates=coordinates,
        )


def _apart(J, output) -> bool:
    return J.field == "real" and jnp.issubdtype(output.dtype, jnp.complexfloating)
