"""The quantum geometric tensor of a variational state as NetKet's SR, TDVP and states take it."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, PyTree
from netket.optimizer.linear_operator import LinearOperator as NetKetOperator

from krylov.damping import as_arrays, make_damping
from krylov.driver import is_scalar
from krylov.operators import LinearOperator, join_real, split_real
from krylov.operators.base import Vector, product
from krylov.operators.jacobian import StorageName
from krylov.operators.metric import PartsDiagonal, spread_over_parts
from krylov.operators.structure import check_vector, is_complex, ravel, unravel

from .solvers import Solver
from .states import chunk_size_of, jacobian, view


def QGT(  # noqa: N802  # named as NetKet names its own
    vstate: Any = None,
    *,
    diag_shift: Any = 0.0,
    diag_scale: Any = None,
    chunk_size: int | Literal["auto"] | None = None,
    holomorphic: bool | None = None,
    weights: Any = None,
    mode: str | None = None,
    precision: str | None = "highest",
    storage: StorageName = "recompute",
) -> Any:
    r"""The quantum geometric tensor of a NetKet state, never formed, for ``SR(qgt=...)`` and ``TDVP(qgt=...)``.

    Right for every kind of parameters as it is: real, complex, mixed, holomorphic or not; no flag is needed and no
    warning given. Takes an `MCState` or a `FullSumState`. Building it again for new parameters or samples of the same
    shapes traces nothing.

    Args:
        vstate: the state. Without it a constructor with these options is returned.
        diag_shift: added to the diagonal; a scalar or a pytree like the parameters.
        diag_scale: also add this multiple of the exact diagonal.
        chunk_size: samples at a time, or ``"auto"``, see `krylov.Jacobian`; default that of the state. Need not divide
            their number.
        holomorphic: promise that the network is holomorphic. Dense forms are then half as large.
        weights: of the samples, in place of equal ones or of the probabilities of a `FullSumState`.
        mode: ``"real"`` leaves out the imaginary part of the log-amplitudes: a phase that is constant but for jumps.
        precision: matrix multiplication precision of the network; see `krylov.Jacobian`.
        storage: what is kept between products; see `krylov.Jacobian`.

    Returns:
        A `KrylovQGT`.

    Raises:
        ValueError: an unknown mode, or what `krylov.Jacobian` does not take.
    """
    options = dict(
        diag_shift=diag_shift,
        diag_scale=diag_scale,
        chunk_size=chunk_size,
        holomorphic=holomorphic,
        weights=weights,
        mode=mode,
        precision=precision,
        storage=storage,
    )
    if vstate is None:
        given = {name: value for name, value in options.items() if value is not _DEFAULTS[name]}
        return functools.partial(QGT, **given)
    check_mode("QGT", mode)
    parts = view(vstate, weights)
    static = dict(mode=mode, chunk_size=chunk_size_of(vstate, chunk_size), precision=precision, storage=storage)
    if isinstance(diag_scale, (int, float)) and diag_scale == 0:
        diag_scale = None  # known here, before it is traced
    operator, diagonal = _build(
        parts.apply,
        parts.params,
        parts.model_state,
        parts.samples,
        parts.weights,
        as_arrays(diag_scale),
        holomorphic=bool(holomorphic),
        **static,
    )
    return KrylovQGT(diag_shift=diag_shift, operator=operator, diagonal=diagonal)


_DEFAULTS: dict[str, Any] = dict(QGT.__kwdefaults__ or {})


def check_mode(where: str, mode: str | None) -> None:
    """Refuse a mode that is none.

    Raises:
        ValueError: it is none.
    """
    if mode not in (None, "real", "complex"):
        raise ValueError(f"{where}: unknown mode.\n  got       {mode!r}\n  expected  'real', 'complex' or None")


@functools.partial(jax.jit, static_argnames=("apply", "holomorphic", "mode", "chunk_size", "precision", "storage"))
def _build(apply, params, model_state, samples, weights, diag_scale, *, mode, **options):
    J = jacobian(apply, params, model_state, samples, mode, weights=weights, **options)
    diagonal = None if diag_scale is None else make_damping("QGT", J, 0.0, diag_scale).operator
    return J.gram(), diagonal


@struct.dataclass
class KrylovQGT(NetKetOperator):
    """A quantum geometric tensor made of krylov's operators; made by `QGT`.

    Attributes:
        operator: the tensor without shifts, a `krylov.operators.LinearOperator`.
        diagonal: a diagonal operator to be added to it, or None.
        split: whether vectors are real and imaginary parts, in the form of `krylov.operators.split_real`.
    """

    replace: ClassVar[Callable[..., "KrylovQGT"]]  # flax gives it

    operator: Any = None
    diagonal: Any = None
    split: bool = struct.field(pytree_node=False, default=False)

    @property
    def regularised(self) -> LinearOperator:
        """The tensor with its diagonal, without the shift."""
        return self.operator if self.diagonal is None else self.operator + self.diagonal

    def __matmul__(self, vec: Any) -> Any:
        return _product(self, vec)

    def __add__(self, eps: Any) -> "KrylovQGT":
        shifts = self.diag_shift, eps
        if not all(map(is_scalar, shifts)):
            shifts = (_for_each_leaf(shift, self.operator.in_structure()) for shift in shifts)
        return self.replace(diag_shift=jax.tree.map(jnp.add, *shifts))

    def solve_with(self, solver: Solver, y: Vector, x0: Vector | None) -> tuple[Vector, dict[str, Array]]:
        """Solve with one of krylov's solvers, without leaving pytrees."""
        if self.split:
            structure = self.operator.in_structure()
            x0 = None if x0 is None else join_real(x0, structure)
            x, info = self.replace(split=False).solve_with(solver, join_real(y, structure), x0)
            return split_real(x), info
        y = _as_parameters(y, self.operator)
        return solver.solve(self.regularised, y, x0, as_arrays(self.diag_shift))

    def _solve(self, solve_fun: Any, y: Vector, *, x0: Vector | None = None, **options: Any) -> tuple[Vector, Any]:
        if isinstance(solve_fun.func, Solver):
            return solve_fun(self, y, x0=x0, **options)
        return _solve_by_others(self, solve_fun, y, x0, options)

    def to_dense(self) -> Array:
        """The matrix, on real and imaginary parts where the tensor is only R-linear on complex parameters."""
        return _to_dense(self)

    def __repr__(self) -> str:
        return f"KrylovQGT({self.operator!r}, diag_shift={self.diag_shift})"


def _as_parameters(vector, operator):
    """Real vectors of complex parameters become complex; an imaginary part where there is none is refused."""

    def leaf(x, s):
        x = jnp.asarray(x)
        return x.astype(s.dtype) if is_complex(s) or not is_complex(x) else x

    structure = operator.in_structure()
    if jax.tree.structure(vector) == jax.tree.structure(structure):
        vector = jax.tree.map(leaf, vector, structure)
    return check_vector("KrylovQGT", "vector", vector, structure)


def _shifted(qgt, x):
    """The product with vectors like the parameters."""
    shift, y = _for_each_leaf(qgt.diag_shift, x), product(qgt.regularised, x)
    return jax.tree.map(lambda y, d, x: (y + d * x).astype(y.dtype), y, shift, x)


def _for_each_leaf(shift, tree):
    return jax.tree.map(lambda _: shift, tree) if is_scalar(shift) else shift


@jax.jit
def _product(qgt: KrylovQGT, vec: Any) -> Any:
    structure = qgt.operator.in_structure()
    here = split_real(structure) if qgt.split else structure
    flat = hasattr(vec, "ndim") and not isinstance(here, jax.ShapeDtypeStruct)
    x = unravel(vec, here) if flat else vec
    if qgt.split:
        y = split_real(_shifted(qgt, join_real(x, structure)))
    else:
        y = _shifted(qgt, _as_parameters(x, qgt.operator))
    return ravel(y) if flat else y


@jax.jit
def _solve_by_others(qgt, solve_fun, y, x0, options):
    y = _as_parameters(y, qgt.operator)
    x0 = None if x0 is None else _as_parameters(x0, qgt.operator)
    if not qgt.operator._needs_splitting:
        return solve_fun(qgt, y, x0=x0, **options)
    # Solvers that know nothing of fields must see real numbers.
    x0 = None if x0 is None else split_real(x0)
    x, info = solve_fun(qgt.replace(split=True), split_real(y), x0=x0, **options)
    return join_real(x, qgt.operator.in_structure()), info


@jax.jit
def _to_dense(qgt: KrylovQGT) -> Array:
    structure, matrix = qgt.operator.in_structure(), qgt.operator.as_matrix()
    parts: PyTree = spread_over_parts(as_arrays(qgt.diag_shift), structure)
    if qgt.diagonal is not None:
        own = qgt.diagonal
        entries = own.parts if isinstance(own, PartsDiagonal) else spread_over_parts(own.entries, structure)
        parts = jax.tree.map(jnp.add, parts, entries)
    diagonal = parts if qgt.operator._needs_splitting else parts[0]
    return matrix + jnp.diag(ravel(diagonal).astype(matrix.dtype))
