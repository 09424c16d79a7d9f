"""A traced program as XLA comes to see it: calls inlined, repeated work found once, dead work left out.

Values are numbered. Where XLA copies an operand to have its axes in another order, the copy is an operation of its own.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

# Operations whose bodies are programs of their own, run once or several times.
LOOPS = ("scan", "while", "cond")
# They change how a buffer is looked at, not what is in it.
_VIEWS = frozenset(
    ["reshape", "squeeze", "expand_dims", "bitcast_convert_type", "copy_p", "stop_gradient", "optimization_barrier"]
)


@dataclass(eq=False)
class Operation:
    """One operation: the numbers of what it reads and writes, and how many scalar constants it has."""

    name: str
    inputs: list[int]
    outputs: list[int]
    source: JaxprEqn | None = None
    constants: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Value:
    """Size, number of entries, and dtype of a value."""

    size: int
    entries: int
    dtype: Any


class Program:
    """A flat list of operations.

    Args:
        jaxpr: the program.
        slices: those of its inputs that are cut out of something larger in each pass of a loop.
    """

    def __init__(self, jaxpr: Jaxpr, slices: Iterable[Any] = ()):
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self._known: dict[Any, list[int]] = {}
        self._same: dict[int, int] = {}
        self._products: set[int] = set()
        names = {v: self._new(v.aval) for v in (*jaxpr.invars, *jaxpr.constvars)}
        for v in slices:
            names[v] = self._emit("slice_of_stack", [names[v]], [v.aval])[0]
        outputs = self._inline(jaxpr, names)
        self.outputs = {self._root(x) for x in outputs if isinstance(x, int)}
        self._drop_unused()

    def add_constant(self, like: int) -> int:
        """A scalar constant written out at the size of another value."""
        self.values.append(self.values[like])
        self.operations.append(Operation("broadcast_in_dim", [], [len(self.values) - 1]))
        return len(self.values) - 1

    def _new(self, aval: Any) -> int:
        entries = math.prod(shape_of(aval))
        dtype = getattr(aval, "dtype", np.dtype("uint8"))
        size = 8 if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype).itemsize
        self.values.append(Value(entries * size, entries, dtype))
        return len(self.values) - 1

    def _root(self, x: int) -> int:
        while x in self._same:
            x = self._same[x]
        return x

    def _emit(self, name: str, inputs: list[Any], avals: list[Any], source: Any = None, key: Any = None) -> list[int]:
        """Append an operation, or find the same one made before."""
        inputs = [self._root(x) if isinstance(x, int) else x for x in inputs]
        known = None if key is None else (name, tuple(inputs), key)
        if known in self._known:
            return self._known[known]
        outputs = [self._new(aval) for aval in avals]
        numbers = [x for x in inputs if isinstance(x, int)]
        self.operations.append(Operation(name, numbers, outputs, source, [x for x in inputs if not isinstance(x, int)]))
        if known is not None:
            self._known[known] = outputs
        return outputs

    def _inline(self, jaxpr: Jaxpr, names: dict[Any, Any]) -> list[Any]:
        """Append the operations of a program; its outputs are numbers, or constants."""

        def read(atom):
            return ("constant", repr(atom.val)) if isinstance(atom, Literal) else names[atom]

        for eqn in jaxpr.eqns:
            inputs = [read(atom) for atom in eqn.invars]
            body = _body(eqn)
            if body is not None:
                inside = dict(zip(body.invars, inputs, strict=True)) | {v: self._new(v.aval) for v in body.constvars}
                outputs = self._inline(body, inside)
            else:
                outputs = self._operation(eqn, inputs)
            names.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _operation(self, eqn: JaxprEqn, inputs: list[Any]) -> list[int]:
        name, avals = eqn.primitive.name, [v.aval for v in eqn.outvars]
        first = inputs[0] if inputs and isinstance(inputs[0], int) else None
        if first is not None and self._is_view(eqn, name, first):
            outputs = [self._new(avals[0])]
            self._same[outputs[0]] = first
            return outputs
        order_of_output = None
        if name == "dot_general":
            if contraction_size(eqn) == 1:
                name = "mul"
            else:
                inputs = self._dot_operands(eqn, inputs)
        elif name == "conv_general_dilated":
            inputs, order_of_output = self._convolution_operands(eqn, inputs)
        key = None if name in LOOPS else repr((sorted(eqn.params.items(), key=lambda p: p[0]), avals))
        outputs = self._emit(name, inputs, avals, eqn, key)
        if name == "dot_general":
            self._products.update(outputs)
        return outputs if order_of_output is None else self._emit("copy", outputs, avals, key=order_of_output)

    def _is_view(self, eqn: JaxprEqn, name: str, first: int) -> bool:
        if name == "broadcast_in_dim":
            return math.prod(shape_of(eqn.outvars[0].aval)) == self.values[first].entries
        # The transpose of a product is the product the other way round.
        return name in _VIEWS or (name == "transpose" and self._root(first) in self._products)

    def _dot_operands(self, eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
        contracted, batch = eqn.params["dimension_numbers"]
        for i, axes in enumerate(zip(batch, contracted, strict=True)):
            aval: Any = eqn.invars[i].aval
            if isinstance(inputs[i], int) and not _is_matrix_order(*axes, aval.ndim):
                inputs[i] = self._emit("copy", [inputs[i]], [aval], key=axes)[0]
        return inputs

    def _convolution_operands(self, eqn: JaxprEqn, inputs: list[Any]) -> tuple[list[Any], Any]:
        """Operands with channels last, as the convolution wants them; the order of the output if it is another."""
        axes = eqn.params["dimension_numbers"]
        n = len(axes.lhs_spec)
        last = (0, n - 1, *range(1, n - 1))
        orders = ((axes.lhs_spec, last), (axes.rhs_spec, (n - 1, n - 2, *range(n - 2))))
        for i, (order, wanted) in enumerate(orders):
            if order != wanted and isinstance(inputs[i], int):
                inputs[i] = self._emit("copy", [inputs[i]], [eqn.invars[i].aval], key=order)[0]
        return inputs, None if axes.out_spec == last else axes.out_spec

    def _drop_unused(self) -> None:
        needed, kept = set(self.outputs), []
        for op in reversed(self.operations):
            if needed.intersection(op.outputs):
                kept.append(op)
                needed.update(op.inputs)
        self.operations = kept[::-1]


def shape_of(aval: Any) -> tuple[int, ...]:
    """The shape of a value's type; tokens and the like have none."""
    return getattr(aval, "shape", ())


def contraction_size(eqn: JaxprEqn) -> int:
    """How many products are summed for each entry of a ``dot_general``."""
    (axes, _), _ = eqn.params["dimension_numbers"]
    shape = shape_of(eqn.invars[0].aval)
    return math.prod(shape[axis] for axis in axes)


def _body(eqn: JaxprEqn) -> Jaxpr | None:
    """The program of a call that runs it once."""
    if eqn.primitive.name in LOOPS:
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "callee"):
        body = eqn.params.get(name)
        if isinstance(body, ClosedJaxpr):
            return body.jaxpr
        if isinstance(body, Jaxpr):
            return body
    return None


def _is_matrix_order(batch: tuple[int, ...], contracted: tuple[int, ...], ndim: int) -> bool:
    """Whether an operand is a stack of matrices as it lies in memory."""
    free = [axis for axis in range(ndim) if axis not in batch and axis not in contracted]
    groups = (sorted(contracted), free)
    return tuple(batch) == tuple(range(len(batch))) and all(g == list(range(g[0], g[0] + len(g))) for g in groups if g)
