r"""The Jacobian of a network over samples as an operator, with products chunk by chunk or from a matrix.

Row i of J is :math:`\sqrt{w_i}\,(O_i - \sum_j w_j O_j)` with :math:`O_i` the derivative of the network's output on
sample i with respect to the parameters; without centring the mean is left out.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from .base import Field, LinearOperator, Vector, conjugate
from .chunks import Chunks, check_chunk_size, split_samples
from .closure import ClosedFunction
from .dense import Dense
from .dtypes import Precision, cast
from .linear_call import closed_linear_call
from .network import check_outputs, many_from_one, trace_network
from .planning import choose
from .sample_values import weighed_values
from .samples_apart import check_samples_apart
from .storage import Linearized, Recomputed, Storage
from .structure import Structure, freeze, structure_of, thaw
from .tangent_sums import mean_rows
from .trainable import real_dtype_of, split_trainable

StorageName = Literal["auto", "recompute", "linearized", "dense"]


class Jacobian(LinearOperator):
    r"""The Jacobian of ``f`` with respect to its parameters, over weighted samples.

    Maps a change of the parameters to the change of the output on each sample. With :math:`O_i = \partial f_i`,

    .. math:: (J v)_i = \sqrt{w_i}\,\bigl(O_i v - \textstyle\sum_j w_j O_j v\bigr),

    the mean left out unless ``center``. ``J.gram()`` is the quantum geometric tensor :math:`J^H J`, ``J.cogram()`` the
    neural tangent kernel :math:`J J^H`, and ``J.H @ J.sample_vector(E)`` the forces.

    What is kept between products is the storage: nothing (``"recompute"``: each product linearizes ``f`` anew), the
    residuals of the linearization (``"linearized"``), or all entries (``"dense"``). All three are the same map;
    `krylov.plan` shows what each costs, `krylov.tune` measures.

    The map is R-linear unless ``holomorphic=True`` promises more; adjoints are those of the real inner product, which
    is right for holomorphic, non-holomorphic and real parameters alike.

    Args:
        f: ``f(params, samples)``; returns an array or a pytree of arrays, all with the sample axis first. It may be a
            pytree itself, an equinox module say. No output may depend on another sample.
        params: pytree. Leaves that are not floating-point arrays take no part; vectors have None in their place.
        samples: array or pytree of arrays, sample axis first, of one length N.
        weights: ``(N,)`` not negative; divided by their sum. Default: all equal. Where one is zero ``f`` must be finite
            all the same.
        center: subtract the weighted mean from each row.
        chunk_size: samples at a time; need not divide N. Default: all at once. ``"auto"`` takes what `krylov.plan`
            finds best within half of the memory that is free on the device.
        trainable: pytree of bools over ``params`` (or a prefix of it), or a function of a leaf; False freezes.
        holomorphic: promise that ``f`` is holomorphic in complex parameters, so that J is C-linear.
        precision: matrix multiplication precision that ``f`` is traced under, see ``jax.default_matmul_precision``;
            None leaves it as it is. On GPUs the default TF32 breaks the symmetry that CG relies on.
        storage: ``"recompute"``, ``"linearized"``, ``"dense"``, or ``"auto"`` as for ``chunk_size``: chosen for many
            products, as a solve takes, and once for a network, its shapes and the number of samples.
        compute_dtype: what ``f`` is evaluated and differentiated in, and, at most, the matrix of dense storage kept in:
            ``"bfloat16"``, ``"float32"`` or ``"float64"``, complex leaves in the complex dtype of that precision. All
            floating-point leaves of parameters and samples are cast to it, integers are not. Default: as they are.
        accumulate_dtype: what sums over chunks are taken in, ``"float32"`` or ``"float64"``; those within a chunk are
            XLA's own. Default: that of vectors, float32 at least.
        vector_dtype: that of vectors on both sides, so of a solve. Default: that of the parameters, and on samples
            that of ``f`` without ``compute_dtype``.

    Samples that are sharded along the first axis stay where they are: each device loops over its own chunks, and sums
    meet in one all-reduce. Parameters and vectors of their shape are replicated.

    Raises:
        ValueError: samples or weights of unequal lengths, bad weights or chunk size, outputs without the sample axis
            first, a holomorphic promise that cannot be true, outputs that depend on other samples, or another dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> f = lambda params, x: jnp.tanh(x @ params["w"])
        >>> J = Jacobian(f, {"w": jnp.ones(2)}, jnp.eye(3, 2), center=True)
        >>> J.shape
        (3, 2)

    Reference: Sorella (1998), doi:10.1103/PhysRevLett.80.4558; Chen & Heyl (2024), doi:10.1038/s41567-024-02566-1.
    """

    network: ClosedFunction
    network_of_one: ClosedFunction
    params: PyTree
    chunks: Chunks
    mean_rows: PyTree | None
    storage: Storage
    vectors: tuple = eqx.field(static=True)
    center: bool = eqx.field(static=True)
    holomorphic: bool = eqx.field(static=True)

    def __init__(
        self,
        f: Callable[[Any, Any], PyTree[Array]],
        params: PyTree,
        samples: PyTree,
        *,
        weights: Any = None,
        center: bool = False,
        chunk_size: int | Literal["auto"] | None = None,
        trainable: Any = None,
        holomorphic: bool = False,
        precision: str | None = "highest",
        storage: StorageName = "recompute",
        compute_dtype: Any = None,
        accumulate_dtype: Any = None,
        vector_dtype: Any = None,
    ):
        if not callable(f):
            raise TypeError(f"Jacobian: f must be a function f(params, samples), not {type(f).__name__}.")
        trained, rest = split_trainable(params, trainable)
        dtypes = Precision.of(compute_dtype, accumulate_dtype, vector_dtype)
        self.vectors = freeze(cast(structure_of(trained), dtypes.vectors, "vector_dtype"))
        network, self.params, samples = dtypes.network(f, trained, rest, samples)
        size = check_chunk_size(None if _is_auto(chunk_size) else chunk_size)
        self.chunks = split_samples(samples, weights, size, dtypes.widest(real_dtype_of(trained)), dtypes.accumulate)
        self.center, self.holomorphic = bool(center), bool(holomorphic)

        def traced(count):
            return trace_network(network, f, self.params, self.chunks, count, precision)

        self.network = traced(self.chunk_size)
        self.network_of_one = self.network if self.chunk_size == 1 else traced(1)
        check_outputs(self.network.out_structure, self.params, self.holomorphic)
        self.storage, self.mean_rows = Recomputed(), None
        if _is_auto(chunk_size) or _is_auto(storage):
            chosen = choose(
                self, None if _is_auto(storage) else storage, None if _is_auto(chunk_size) else self.chunk_size
            )
            storage = chosen.storage
            self.chunks = self.chunks.recut(chosen.chunk_size)
            self.network = traced(self.chunk_size)
        # A chunk of one sample shows nothing of what two do to each other.
        alone = self.chunk_size == 1 and self.chunks.num_samples > 1
        check_samples_apart(self, traced(2) if alone else self.network)
        self._keep(storage)

    def _keep(self, storage: StorageName) -> None:
        """Set what is kept for products."""
        kinds = {"recompute": lambda _: Recomputed(), "linearized": Linearized.of, "dense": Dense.of}
        if storage not in kinds:
            raise ValueError(
                "Jacobian: there is no such storage.\n"
                f"  got       {storage!r}\n  expected  one of auto, {', '.join(kinds)}"
            )
        set_field = object.__setattr__
        # Both are made by differentiating the network.
        set_field(self, "storage", Recomputed())
        set_field(self, "storage", kinds[storage](self))
        if storage == "dense":
            set_field(self, "mean_rows", None)  # its rows are centred
        elif self.center and self.mean_rows is None:
            set_field(self, "mean_rows", mean_rows(self))

    def with_storage(self, storage: StorageName) -> "Jacobian":
        """The same map with another storage.

        Args:
            storage: as in `Jacobian`.
        """
        if _is_auto(storage):
            storage = choose(self, None, self.chunk_size).storage
        return self.rebuilt(storage, self.chunk_size)

    @property
    def chunk_size(self) -> int:
        """Samples at a time on each device; at most what was asked for."""
        return self.chunks.weights.shape[1]

    def with_chunk_size(self, chunk_size: int | Literal["auto"] | None) -> "Jacobian":
        """The same map with another chunk size: the network as it was traced for one sample, vmapped.

        Args:
            chunk_size: as in `Jacobian`.
        """
        name: Any = self.storage.name
        if _is_auto(chunk_size):
            chunk_size = choose(self, name, None).chunk_size
        return self.rebuilt(name, check_chunk_size(chunk_size) or self.chunks.num_samples)

    def rebuilt(self, storage: StorageName, chunk_size: int) -> "Jacobian":
        """The same map, kept and cut in another way."""
        other = copy_of(self)
        object.__setattr__(other, "chunks", self.chunks.recut(chunk_size))
        if other.chunk_size != self.chunk_size:
            object.__setattr__(other, "network", many_from_one(self.network_of_one, self.params, other.chunks))
        other._keep(storage)
        return other

    def _product(self, vector: Vector) -> Vector:
        return closed_linear_call(_push_forward, _pull_back, self, vector)

    def _adjoint_product(self, vector: Vector) -> Vector:
        # The transpose of a call is the other function, so this is one call too, with the roles exchanged.
        return conjugate(closed_linear_call(_pull_back, _push_forward, self, conjugate(vector)))

    def in_structure(self) -> Structure:
        """The trainable parameters, None in place of the others."""
        return thaw(self.vectors)

    def out_structure(self) -> Structure:
        """The outputs of ``f`` on all samples."""
        n = self.chunks.num_samples
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct((n, *s.shape[1:]), s.dtype), self.network.out_structure)

    @property
    def field(self) -> Field:
        """Complex where holomorphic is promised, else real."""
        return "complex" if self.holomorphic else "real"

    def gram(self) -> LinearOperator:
        r"""The operator :math:`J^H J` on parameters: quantum geometric tensor, Fisher or Gauss-Newton matrix."""
        from .gram import GramOperator

        return GramOperator(self)

    def cogram(self) -> LinearOperator:
        r"""The operator :math:`J J^H` on samples: the neural tangent kernel."""
        from .gram import CogramOperator

        return CogramOperator(self)

    def sample_vector(self, values: Any) -> Vector:
        r"""Plain values per sample as a vector of the output space, :math:`\sqrt{w_i}\,(E_i - \sum_j w_j E_j)`.

        The mean is subtracted only where the Jacobian is centred. ``J.H @ J.sample_vector(E)`` is then the (co)variance
        of the derivatives with E: the forces, for local energies E.

        Args:
            values: like the output of ``f`` on all samples; a real array is taken where the output is complex.

        Raises:
            ValueError: values do not match.
        """
        return weighed_values(self.chunks, values, self.out_structure(), self.center)


def _is_auto(option: Any) -> bool:
    return isinstance(option, str) and option == "auto"


def copy_of(jacobian: Jacobian) -> Jacobian:
    """A copy whose fields may be set; they are known to fit, and it would cost a trace to make it anew."""
    copy = object.__new__(Jacobian)
    for field in dataclasses.fields(Jacobian):
        object.__setattr__(copy, field.name, getattr(jacobian, field.name))
    return copy


def _push_forward(jacobian: Jacobian, vector: Vector) -> Vector:
    return jacobian.storage.push_forward(jacobian, vector)


def _pull_back(jacobian: Jacobian, cotangent: Vector) -> Vector:
    return jacobian.storage.pull_back(jacobian, cotangent)
