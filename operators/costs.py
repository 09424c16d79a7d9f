"""What a traced program costs, from shapes alone: operations, memory traffic, and temporary memory.

A model of what XLA makes of a program on CPUs: elementwise work is fused into whatever reads it, the rest runs in the
order in which its inputs are ready, breadth first, and a buffer is free once its last reader has run.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr

from .dataflow import LOOPS, Operation, Program, contraction_size, shape_of
from .structure import is_complex

_READS_MEMORY = ("dot_general", "conv_general_dilated", "copy", "sort", "gather", "fft", "reduce_window", *LOOPS)
_REDUCES = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin")
_WRITES_MEMORY = ("concatenate", "pad", "dynamic_update_slice")
_SPECIAL = frozenset(
    """
    tanh exp exp2 log log1p expm1 sin cos tan erf erfc erf_inv logistic pow sqrt rsqrt cbrt div atan2 sinh cosh asin
    acos atan asinh acosh atanh lgamma digamma
    """.split()  # noqa: SIM905
)
_MOVES = frozenset(
    """
    broadcast_in_dim transpose convert_element_type slice slice_of_stack rev iota real imag complex concatenate pad
    copy gather dynamic_slice dynamic_update_slice select_n split
    """.split()  # noqa: SIM905
)
# Buffers that the model does not see: broadcast constants, copies for layouts, padding. On twelve networks in two
# precisions and up to ten chunk sizes XLA used 0.8 to 1.6 of what the model sees, mostly 1.0 to 1.2.
_UNSEEN = 1.45


class Cost(NamedTuple):
    """What one run of a program takes.

    Attributes:
        temporary_bytes: most memory in use at a time, inputs and outputs apart.
        flops: floating-point operations in products, convolutions and elementwise work.
        special: evaluations of functions such as tanh, weighted by what they cost next to a real one.
        moved_bytes: read and written by operations that are not fused.
    """

    temporary_bytes: float
    flops: float
    special: float
    moved_bytes: float


def cost_of(jaxpr: Jaxpr) -> Cost:
    """The cost of a program; a ``while`` counts as one pass."""
    cost = _Model(Program(jaxpr)).cost()
    return cost._replace(temporary_bytes=_UNSEEN * cost.temporary_bytes)


class _Model:
    def __init__(self, program: Program, in_loop: bool = False):
        self.program, self.values, self.in_loop = program, program.values, in_loop
        self.readers = _readers(program.operations)
        self.writer = {x: op for op in program.operations for x in op.outputs}
        self.kept = {x for op in program.operations for x in op.outputs if self._is_kept(op, x)}
        self._keep_operands_of_sums()
        self.kernels = self._fuse()

    def cost(self) -> Cost:
        inner = {id(op): _cost_of_loop(op) for op, _ in self.kernels if op.name in LOOPS}
        peak = self._peak({key: cost.temporary_bytes for key, cost in inner.items()})
        flops = special = 0.0
        for op in self.program.operations:
            operations, functions = _operations(op, self.values)
            flops, special = flops + operations, special + functions
        moved = sum(
            self.values[x].size for op, read in self.kernels if op.name not in LOOPS for x in (*read, *op.outputs)
        )
        flops, special, moved = (
            own + sum(cost[i] for cost in inner.values()) for i, own in enumerate((flops, special, moved), 1)
        )
        return Cost(peak, flops, special, moved)

    def _is_kept(self, op: Operation, x: int) -> bool:
        """Whether a value is written to memory rather than fused into its readers."""
        readers = self.readers.get(x, [])
        if not _is_fusible(op) or x in self.program.outputs or any(map(_reads_memory, readers)):
            return True
        if len(readers) < 2:
            return False
        return op.name in _SPECIAL or (op.name not in _MOVES and any(r.name == "reduce_sum" for r in readers))

    def _keep_operands_of_sums(self) -> None:
        """A sum takes the products and sums before it into its own kernel; everything else it reads from memory."""
        constants: dict[tuple, int] = {}

        def take(x: int, total: Operation) -> None:
            op = self.writer.get(x)
            if op is None or x in self.kept:
                return
            if op.name in ("mul", "add", "sub", "add_any") and len(self.readers[x]) == 1:
                for constant in op.constants:
                    key = constant, self.values[x].size
                    if key not in constants:
                        constants[key] = self.program.add_constant(x)
                        self.kept.add(constants[key])
                    total.inputs.append(constants[key])
                for y in op.inputs:
                    take(y, total)
            else:
                self.kept.add(x)

        for op in list(self.program.operations):
            if op.name == "reduce_sum" and jnp.issubdtype(self.values[op.outputs[0]].dtype, jnp.floating):
                for x in list(op.inputs):
                    take(x, op)

    def _fuse(self) -> list[tuple[Operation, frozenset[int]]]:
        """The operations that write to memory, each with what it reads from there."""
        reads: dict[int, frozenset[int]] = {}
        kernels = []
        for op in sorted(self.program.operations, key=lambda op: bool(op.inputs)):
            read = frozenset().union(*(reads.get(x, frozenset([x])) for x in op.inputs))
            if self.kept.intersection(op.outputs):
                kernels.append((op, read))
            else:
                reads.update((x, read) for x in op.outputs)
        return kernels

    def _peak(self, inner: dict[int, float]) -> float:
        """The most memory that kernels, run breadth first, hold at a time."""
        order = _breadth_first(self.kernels)
        last = {x: time for time, (_, read) in enumerate(order) for x in read}
        live: dict[int, int] = {}
        unwritten = set() if self.in_loop else set(self.program.outputs)
        peak = 0.0
        for time, (op, read) in enumerate(order):
            dying = [x for x in read if x in live and last[x] == time]
            for x in op.outputs:
                # Elementwise work on real numbers overwrites an operand nobody needs any more, as a loop's carries do.
                old = next((y for y in dying if self.values[y].size == self.values[x].size), None)
                if old is not None and (op.name in LOOPS or (_is_fusible(op) and not is_complex(self.values[x]))):
                    dying.remove(old)
                    del live[old]
                if x not in self.program.outputs and not self._is_in_output(x):
                    live[x] = self.values[x].size
            unwritten -= {x for x in op.outputs if self._is_in_output(x)} | set(op.outputs)
            held = self._not_in_outputs(sorted(live.values(), reverse=True), unwritten)
            peak = max(peak, held + inner.get(id(op), 0.0))
            live = {x: size for x, size in live.items() if last.get(x, -1) > time}
        return peak

    def _not_in_outputs(self, sizes: list[int], unwritten: set[int]) -> int:
        """The bytes left when each output not written yet lends its buffer to one value."""
        for room in sorted((self.values[x].size for x in unwritten), reverse=True):
            lent = next((size for size in sizes if size <= room), None)
            if lent is not None:
                sizes.remove(lent)
        return sum(sizes)

    def _is_in_output(self, x: int) -> bool:
        """Whether a value turns into something that leaves the program, in the same buffer."""
        readers = self.readers.get(x, [])
        # In the body of a loop that buffer holds the carry of the step before.
        if self.in_loop or len(readers) != 1 or not _is_fusible(readers[0]):
            return False
        out = readers[0].outputs[0]
        return out in self.program.outputs and self.values[out].size == self.values[x].size


def _readers(operations: list[Operation]) -> dict[int, list[Operation]]:
    readers: dict[int, list[Operation]] = {}
    for op in operations:
        for x in set(op.inputs):
            readers.setdefault(x, []).append(op)
    return readers


def _reads_memory(op: Operation) -> bool:
    return op.name in _READS_MEMORY or op.name.startswith(("scatter", "cum", "reduce_window", "select_and"))


def _is_fusible(op: Operation) -> bool:
    return not _reads_memory(op) and op.name not in _REDUCES and op.name not in _WRITES_MEMORY


def _breadth_first(kernels):
    """Kernels in the order in which all they read is there; those that read nothing right before their first reader."""
    writer = {x: i for i, (op, _) in enumerate(kernels) for x in op.outputs}
    needs = [{writer[x] for x in read if x in writer} for _, read in kernels]
    early = {i for i, (_, read) in enumerate(kernels) if not read}
    waiting = [len(need - early) for need in needs]
    after: dict[int, list[int]] = {}
    for i, need in enumerate(needs):
        for j in need - early:
            after.setdefault(j, []).append(i)
    ready, order, placed = deque(i for i, count in enumerate(waiting) if count == 0 and i not in early), [], set()
    while ready:
        i = ready.popleft()
        order.extend(sorted(needs[i] & early - placed))
        placed |= needs[i] & early
        order.append(i)
        for j in after.get(i, []):
            waiting[j] -= 1
            if waiting[j] == 0:
                ready.append(j)
    return [kernels[i] for i in order]


def _cost_of_loop(op: Operation) -> Cost:
    assert op.source is not None
    params = op.source.params
    if op.name == "cond":
        costs = [_Model(Program(branch.jaxpr)).cost() for branch in params["branches"]]
        return Cost(*(max(values) for values in zip(*costs, strict=True)))
    if op.name == "while":
        return _Model(Program(params["body_jaxpr"].jaxpr), in_loop=True).cost()
    body = params["jaxpr"].jaxpr
    stacked = body.invars[params["num_consts"] + params["num_carry"] :]
    cost = _Model(Program(body, stacked), in_loop=True).cost()
    return Cost(cost.temporary_bytes, *(params["length"] * x for x in cost[1:]))


def _operations(op: Operation, values) -> tuple[float, float]:
    """Floating-point operations, and weighted special functions, of one operation."""
    out = values[op.outputs[0]] if op.outputs else None
    if (
        out is None
        or op.source is None
        or op.name in LOOPS
        or op.name in _MOVES
        or not jnp.issubdtype(out.dtype, jnp.inexact)
    ):
        return 0.0, 0.0
    complex_ = is_complex(out)
    if op.name == "dot_general":
        return (8.0 if complex_ else 2.0) * out.entries * contraction_size(op.source), 0.0
    if op.name == "conv_general_dilated":
        kernel = shape_of(op.source.invars[1].aval)
        channels = kernel[op.source.params["dimension_numbers"].rhs_spec[0]]
        return (8.0 if complex_ else 2.0) * out.entries * math.prod(kernel) / max(channels, 1), 0.0
    if op.name in _SPECIAL:
        return 0.0, (10.0 if complex_ else 1.0) * out.entries
    each = {"mul": 6.0}.get(op.name, 2.0) if complex_ else 1.0
    entries = max([out.entries, *(values[x].entries for x in op.inputs)]) if op.name in _REDUCES else out.entries
    return each * entries, 0.0
