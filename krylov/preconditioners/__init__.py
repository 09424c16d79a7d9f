"""Preconditioners: recipes to be built for an operator."""

from .base import BuiltPreconditioner, Preconditioner, PreconditionerReport
from .block_jacobi import BlockJacobi
from .deflation import Deflation
from .jacobi import Jacobi
from .nystrom import Nystrom
from .sample_nystrom import SampleNystrom
from .sample_woodbury import SampleWoodbury
from .spectral import SpectralInverse

__all__ = [
    "BlockJacobi",
    "BuiltPreconditioner",
    "Deflation",
    "Jacobi",
    "Nystrom",
    "Preconditioner",
    "PreconditionerReport",
    "SampleNystrom",
    "SampleWoodbury",
    "SpectralInverse",
]
