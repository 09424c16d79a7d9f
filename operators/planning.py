"""Which storage and chunk size of a Jacobian: what each keeps, needs and costs, known from shapes or measured."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .costs import cost_of
from .device_memory import describe_bytes, free_memory, parse_bytes
from .linearization import LinearizationError
from .rows import group_size
from .structure import freeze, is_complex, is_traced, structure_of
from .tangent_sums import check_forward

if TYPE_CHECKING:
    from .jacobian import Jacobian, StorageName

# Seconds on one processor core or so: only ratios count, and these differ little from device to device.
_SECONDS_PER_BYTE, _SECONDS_PER_FLOP, _SECONDS_PER_SPECIAL = 1e-10, 1e-11, 1e-9
# Storages in the order of what they keep. The next one must be faster by this factor to be worth it.
_WORTH = 1.1
# Larger chunks gain nothing: on CPUs those stay in the cache whose temporaries do, and 256 samples keep the cores busy.
_ENOUGH_SAMPLES, _ENOUGH_BYTES, _ENOUGH_BYTES_ON_CPU = 256, 1 << 30, 1 << 23


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to keep a Jacobian and what a product ``J^H J v`` takes, in bytes on each device.

    Attributes:
        storage: as in `Jacobian`.
        chunk_size: as in `Jacobian`; for ``"dense"`` it matters only while the matrix is made.
        kept_bytes: what the operator keeps beside parameters and samples; exact.
        temporary_bytes: an estimate of what XLA allocates during a product.
        flops: floating-point operations of a product.
        cost: seconds of a product: a rough estimate to compare candidates by, or the median measured by `tune`.
    """

    storage: StorageName
    chunk_size: int
    kept_bytes: int
    temporary_bytes: int
    flops: float
    cost: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """What each storage and chunk size takes; printed as a table.

    Attributes:
        candidates: all that were looked at.
        memory: the budget in bytes on each device.
        best: the fastest that fits; the smallest where nothing does.
        measured: whether costs are measured.
    """

    candidates: tuple[Candidate, ...]
    memory: int
    best: Candidate
    measured: bool = False

    def __str__(self) -> str:
        unit = "s measured" if self.measured else "s guessed"
        rows = [("storage", "chunk_size", "kept", "temporary", "flops", unit, "")]
        for c in self.candidates:
            note = "<- best" if c is self.best else "" if self.fits(c) else "too large"
            sizes = describe_bytes(c.kept_bytes), describe_bytes(c.temporary_bytes)
            rows.append((c.storage, str(c.chunk_size), *sizes, f"{c.flops:.2e}", f"{c.cost:.2e}", note))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"One product J^H J v within {describe_bytes(self.memory)} on each device:", *lines])

    __repr__ = __str__

    def fits(self, candidate: Candidate) -> bool:
        """Whether what a candidate keeps and needs is within the budget."""
        return _total(candidate) <= self.memory


def plan(J: Jacobian, memory: int | str | None = None) -> Plan:
    r"""What a product :math:`J^H J v` takes with each storage and chunk size, from shapes alone.

    Nothing is compiled or run. Kept bytes are exact. Temporary bytes follow a model of how XLA fuses and schedules,
    within 25% below and a factor of two above what it reports on CPUs for the networks of the tests. The guess of a
    time knows only operations and memory traffic; `tune` measures.

    Args:
        J: a Jacobian, of any storage and chunk size.
        memory: bytes on each device, as a number or like ``"2GiB"`` or ``"500MB"``; default half of what is free now.

    Returns:
        `Plan`, a table to print. Its ``best.storage`` and ``best.chunk_size`` are what ``"auto"`` takes.

    Raises:
        TypeError: not a Jacobian.
        ValueError: memory that is not a size.

    Example:
        >>> import jax.numpy as jnp
        >>> J = krylov.Jacobian(lambda p, x: jnp.tanh(x @ p), jnp.ones((50, 8)), jnp.ones((1000, 50)))
        >>> krylov.plan(J, memory="100KiB").best.storage
        'recompute'
    """
    budget = _checked(J, "plan", memory)
    return _best_of([c for storage in _storages(J) for c in _candidates(J, storage, _sizes(J, storage))], budget)


def tune(J: Jacobian, memory: int | str | None = None) -> tuple[Jacobian, Plan]:
    r"""The same map with the storage and chunk size that are fastest here: compiles and runs what `plan` says fits.

    Each storage is tried with its three largest chunk sizes, one after the other; the median time of a few products
    :math:`J^H J v` counts.

    Args:
        J: a Jacobian.
        memory: as in `plan`.

    Returns:
        The Jacobian, and the `Plan` of the candidates tried, with measured times.

    Raises:
        TypeError: not a Jacobian.
        ValueError: memory that is not a size, or called under ``jit``.

    Example:
        >>> import jax.numpy as jnp
        >>> J = krylov.Jacobian(lambda p, x: jnp.tanh(x @ p), jnp.ones((50, 8)), jnp.ones((1000, 50)))
        >>> J, table = krylov.tune(J, memory="100MiB")
        >>> table.measured, J.chunk_size == table.best.chunk_size
        (True, True)
    """
    budget = _checked(J, "tune", memory)
    if any(is_traced(x) for x in jax.tree.leaves(J)):
        raise ValueError("tune: cannot measure under jit or another transformation.\n  Call it outside, once.")
    found = plan(J, budget)
    candidates = [c for storage in _STORAGES for c in _largest(found, storage)] or [found.best]
    # One at a time: together they would not fit.
    measured = [dataclasses.replace(c, cost=_measured(J.rebuilt(c.storage, c.chunk_size))) for c in candidates]
    best = min(measured, key=lambda c: c.cost)
    return J.rebuilt(best.storage, best.chunk_size), Plan(tuple(measured), budget, best, measured=True)


def _measured(J: Jacobian) -> float:
    """The median time of a few products, in seconds, once they are compiled."""
    S, vector, seconds = J.gram(), jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), J.in_structure()), []
    jax.block_until_ready(S.mv(vector))
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(S.mv(vector))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def choose(J: Jacobian, storage: str | None, chunk_size: int | None) -> Candidate:
    """The best candidate within half of the free memory, for what is None; chosen once for a network and its shapes."""
    key = (
        freeze((structure_of(J.params), J.in_structure(), J.chunks.chunk_structure)),
        *(J.chunks.num_samples, J.chunks.spread, J.chunks.accumulate, J.center, J.holomorphic, storage, chunk_size),
    )
    # Another choice in the next step of a loop would compile anew, and what is free changes all the time.
    program = J.network_of_one.jaxpr
    known = _choices.get((id(program), key))
    if known is not None and known[0] is program:
        return known[1]
    sizes = {name: [chunk_size] if chunk_size else _sizes(J, name) for name in ([storage] if storage else _storages(J))}
    best = _best_of([c for name in sizes for c in _candidates(J, name, sizes[name])], free_memory() // 2).best
    _choices[id(program), key] = program, best
    if len(_choices) > _MAX_CHOICES:
        _choices.popitem(last=False)
    return best


_choices: OrderedDict[Any, tuple[Any, Candidate]] = OrderedDict()
_MAX_CHOICES = 256
_STORAGES = ("recompute", "linearized", "dense")


def _storages(J: Jacobian) -> tuple[str, ...]:
    """Those that can serve: entries are made in reverse mode, products without them need forward mode too."""
    try:
        check_forward(J)
    except LinearizationError:
        return ("dense",)
    return _STORAGES


def _best_of(candidates: list[Candidate], memory: int) -> Plan:
    best = None
    for storage in _STORAGES:
        usable = [c for c in candidates if c.storage == storage and _total(c) <= memory]
        small = [c for c in usable if _is_small(c)]
        found = max(small, key=_chunk_size) if small else min(usable, key=_chunk_size, default=None)
        if found is not None and (best is None or found.cost * _WORTH < best.cost):
            best = found
    return Plan(tuple(candidates), memory, min(candidates, key=_total) if best is None else best)


def _total(candidate: Candidate) -> int:
    return candidate.kept_bytes + candidate.temporary_bytes


def _chunk_size(candidate: Candidate) -> int:
    return candidate.chunk_size


def _is_small(candidate: Candidate) -> bool:
    most = _ENOUGH_BYTES_ON_CPU if jax.default_backend() == "cpu" else _ENOUGH_BYTES
    return candidate.chunk_size <= _ENOUGH_SAMPLES or candidate.temporary_bytes <= most


def _largest(plan: Plan, storage: str) -> list[Candidate]:
    """Those with the largest chunks that fit."""
    return [c for c in plan.candidates if c.storage == storage and plan.fits(c)][-3:]


def _sizes(J: Jacobian, storage: str) -> list[int]:
    """Chunk sizes to look at: near some powers of four, all samples of a device, and the Jacobian's own."""
    here = _samples_here(J)
    if storage == "dense":
        # Products know no chunks, and the matrix is made in groups of this size.
        wanted = {group_size(J, here)}
    else:
        wanted = {min(4**k, here) for k in range(2, 11)} | {here, J.chunk_size}
    # Chunks are cut to be equal.
    return sorted({-(-here // -(-here // size)) for size in wanted})


def _candidates(J: Jacobian, storage: Any, sizes: list[int]) -> list[Candidate]:
    """What some chunk sizes take: three are traced, those between interpolated, all being linear in it."""
    looped = [size for size in sizes if size < _samples_here(J)]
    traced = {size: _per_chunk(J, storage, size) for size in {*looped[:1], *looped[-1:], *sizes[len(looped) :]}}
    found = []
    for size in sizes:
        if size not in traced:
            (low, at_low), (high, at_high) = ((end, traced[end]) for end in (looped[0], looped[-1]))
            traced[size] = at_low + (at_high - at_low) * ((size - low) / (high - low))
        found.append(_candidate(J, storage, size, traced[size]))
    return found


def _candidate(J: Jacobian, storage: Any, size: int, per_chunk: np.ndarray) -> Candidate:
    chunks = -(-_samples_here(J) // size)
    shared, temporary, kept, *operations = per_chunk
    flops, special, moved = (chunks * x for x in operations)
    itemsize = max(np.dtype(p.dtype).itemsize // (2 if is_complex(p) else 1) for p in jax.tree.leaves(J.params))
    guess = moved * _SECONDS_PER_BYTE + flops * _SECONDS_PER_FLOP * itemsize / 4 + special * _SECONDS_PER_SPECIAL
    return Candidate(storage, size, round(shared + chunks * kept), round(temporary), float(flops), float(guess))


def _per_chunk(J: Jacobian, storage: Any, size: int) -> np.ndarray:
    """Bytes kept for all chunks of a device, and temporary ones; then for each chunk bytes kept and operations."""
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x, J)
    other = eqx.filter_eval_shape(lambda J: J.rebuilt(storage, size), like)
    program = eqx.filter_make_jaxpr(lambda J, v: J.gram()._product(v))(other, J.in_structure())[0]
    cost, by_chunk = cost_of(program.jaxpr), _bytes(other.storage.kept_by_chunk())
    here = -(-_samples_here(J) // size)
    everywhere = other.chunks.weights.shape[0]
    shared = _bytes((other.storage, other.mean_rows)) - by_chunk
    operations = (x / here for x in (cost.flops, cost.special, cost.moved_bytes))
    return np.array([shared, cost.temporary_bytes, by_chunk / everywhere, *operations])


def _samples_here(J: Jacobian) -> int:
    """Samples on each device."""
    spread = J.chunks.spread
    return J.chunks.num_samples // (1 if spread is None else spread.num_parts)


def _bytes(tree: Any) -> int:
    leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "shape")]
    return sum(int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in leaves)


def _checked(J: Any, where: str, memory: int | str | None) -> int:
    from .jacobian import Jacobian

    if not isinstance(J, Jacobian):
        raise TypeError(
            f"{where}: J must be a krylov.Jacobian, not {type(J).__name__}.\n  J.gram() has it as .jacobian."
        )
    return free_memory() // 2 if memory is None else parse_bytes(where, memory)
