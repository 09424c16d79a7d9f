"""The two square operators of a Jacobian: on parameters and on samples."""

import jax
from jaxtyping import Array, PyTree

from .base import Field, HermitianOperator, Vector
from .jacobian import Jacobian
from .kernel_matrix import cogram_matrix
from .linear_call import closed_linear_call
from .rows import gram_blocks, gram_diagonal, gram_matrix, leaf_entries
from .structure import Structure, split_real, unravel


class GramOperator(HermitianOperator):
    r"""The hermitian positive operator :math:`J^H J` on parameters; made by ``J.gram()``.

    One product linearizes each chunk once and costs about two forward and two backward passes of the network. With a
    centred Jacobian of log-amplitudes it is the quantum geometric tensor of stochastic reconfiguration.
    """

    jacobian: Jacobian

    def _product(self, vector: Vector) -> Vector:
        return closed_linear_call(_gram_product, None, self.jacobian, vector)

    def in_structure(self) -> Structure:
        """The trainable parameters."""
        return self.jacobian.in_structure()

    @property
    def field(self) -> Field:
        """That of the Jacobian."""
        return self.jacobian.field

    @property
    def is_positive(self) -> bool:
        """True."""
        return True

    def diagonal(self) -> Vector:
        """The exact diagonal, from per-sample gradients; as in `as_matrix` where only R-linear on complex leaves."""
        flat = gram_diagonal(self.jacobian)
        structure = self.in_structure()
        return unravel(flat, split_real(structure) if self._needs_splitting else structure)

    def as_matrix(self) -> Array:
        """The dense matrix, summed over groups of rows; see `LinearOperator.as_matrix`."""
        return gram_matrix(self.jacobian)

    def diagonal_blocks(self) -> PyTree[Array]:
        """The exact diagonal block of each leaf, from one pass over the samples.

        Returns:
            A pytree like the parameters with a square matrix for each leaf, on the ravelled leaf; where the map is only
            R-linear on a complex leaf it is real, on the real parts followed by the imaginary parts.
        """
        structure = self.in_structure()
        blocks = gram_blocks(self.jacobian, leaf_entries(structure, self.field))
        return jax.tree.unflatten(jax.tree.structure(structure), blocks)


def _gram_product(jacobian: Jacobian, vector: Vector) -> Vector:
    return jacobian.storage.gram_product(jacobian, vector)


class CogramOperator(HermitianOperator):
    r"""The hermitian positive operator :math:`J J^H` on samples; made by ``J.cogram()``.

    The (centred) neural tangent kernel, never formed: one product is a pull-back and a push-forward.
    """

    jacobian: Jacobian

    def _product(self, vector: Vector) -> Vector:
        return self.jacobian._product(self.jacobian._adjoint_product(vector))

    def in_structure(self) -> Structure:
        """The outputs on all samples."""
        return self.jacobian.out_structure()

    @property
    def field(self) -> Field:
        """That of the Jacobian."""
        return self.jacobian.field

    @property
    def is_positive(self) -> bool:
        """True."""
        return True

    def as_matrix(self) -> Array:
        """The dense matrix, from blocks of rows; see `LinearOperator.as_matrix`."""
        # Rows on different devices would have to meet: there products with unit vectors move less.
        return cogram_matrix(self.jacobian) if self.jacobian.chunks.spread is None else super().as_matrix()
