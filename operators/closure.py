"""A Python function turned into a pytree: its traced program, and the arrays it closed over as leaves."""

import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun
from jaxtyping import Array

from .linear_call import LazyJaxpr
from .structure import abstract


class ClosedFunction(eqx.Module):
    """A traced function whose captured arrays are leaves, so that it can be an argument of ``jit`` like any array.

    Two traces of the same code that differ only in the captured values share one program object: passing the second
    where the first was compiled compiles nothing.
    """

    captured: list[Array]
    jaxpr: Jaxpr = eqx.field(static=True)
    out_tree: Any = eqx.field(static=True)

    def __call__(self, *args: Any) -> Any:
        """Evaluate on arguments of the structure, shapes and dtypes it was traced for."""
        out = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, self.captured))(*jax.tree.leaves(args))
        return jax.tree.unflatten(self.out_tree, out)

    @property
    def out_structure(self) -> Any:
        """Shapes and dtypes of the result."""
        types = [abstract(variable.aval) for variable in self.jaxpr.outvars]
        return jax.tree.unflatten(self.out_tree, [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types])


def close(
    fn: Callable, *args: Any, code: Callable | None = None, rewrite: Callable[[Jaxpr], Jaxpr] = lambda jaxpr: jaxpr
) -> ClosedFunction:
    """Trace ``fn`` for arguments (arrays or shapes) and hoist what it closes over.

    Args:
        fn: the function.
        args: arrays or shapes to trace it for.
        code: the function whose code tells programs apart, where ``fn`` only wraps it.
        rewrite: changes the traced program to an equivalent one.
    """
    leaves, tree = jax.tree.flatten(args)
    out_tree = None

    def flat(*flat_args):
        nonlocal out_tree
        out, out_tree = jax.tree.flatten(fn(*jax.tree.unflatten(tree, flat_args)))
        return out

    # `flat` is new each time, so JAX's own trace cache cannot serve a program with outdated captured values.
    closed = jax.make_jaxpr(flat)(*leaves)
    program = _intern(fn if code is None else code, rewrite(closed.jaxpr))
    return ClosedFunction([jnp.asarray(c) for c in closed.consts], program, out_tree)


_LOOKS_AT_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


@contextmanager
def traceable(where: str, name: str, cure: str = "") -> Iterator[None]:
    """Say of a user's function what JAX's errors say of its tracers.

    Args:
        where: the caller's name.
        name: what the caller calls the function.
        cure: one more thing to do, beside writing it in JAX.

    Raises:
        TypeError: inside the block a function looked at the values of what is traced.
    """
    try:
        yield
    except _LOOKS_AT_VALUES as error:
        raise TypeError(
            f"{where}: {name} looks at the values of its arguments, so that JAX cannot trace it.\n"
            f"  got       {type(error).__name__}: {str(error).splitlines()[0]}\n"
            "  Write it with jax.numpy, and its branches with jnp.where or jax.lax.cond"
            f"{'; ' if cure else '.'}{cure}"
        ) from error


# Programs seen lately, by the code they came from.
_programs: OrderedDict[Any, list[Jaxpr]] = OrderedDict()
_MAX_CODES, _MAX_PROGRAMS_PER_CODE = 256, 32


def _intern(fn: Callable, jaxpr: Jaxpr) -> Jaxpr:
    known = _programs.setdefault(_code_of(fn), [])
    _programs.move_to_end(_code_of(fn))
    if len(_programs) > _MAX_CODES:
        _programs.popitem(last=False)
    for i, other in enumerate(known):
        if _same_program(jaxpr, other):
            jaxpr = known.pop(i)
            break
    known.append(jaxpr)
    del known[:-_MAX_PROGRAMS_PER_CODE]
    return jaxpr


def _code_of(fn: Callable) -> Any:
    while isinstance(fn, partial):
        fn = fn.func
    if isinstance(fn, types.MethodType):
        fn = fn.__func__
    fn = getattr(fn, "__wrapped__", fn)
    return getattr(fn, "__code__", type(fn))


def _same_program(a: Jaxpr, b: Jaxpr) -> bool:
    """Equality of two programs up to the names of their variables."""
    if a is b:
        return True
    if len(a.eqns) != len(b.eqns) or a.effects != b.effects:
        return False
    names: dict[Var, Var] = {}

    def same_binders(xs, ys):
        if len(xs) != len(ys) or any(x.aval != y.aval for x, y in zip(xs, ys, strict=True)):
            return False
        names.update(zip(xs, ys, strict=True))
        return True

    def same_atoms(xs, ys):
        return len(xs) == len(ys) and all(map(same_atom, xs, ys))

    def same_atom(x, y):
        if isinstance(x, Literal) or isinstance(y, Literal):
            return isinstance(x, Literal) and isinstance(y, Literal) and x.aval == y.aval and _same(x.val, y.val)
        return names.get(x) is y

    if not (same_binders(a.constvars, b.constvars) and same_binders(a.invars, b.invars)):
        return False
    for e, f in zip(a.eqns, b.eqns, strict=True):
        if e.primitive is not f.primitive or e.params.keys() != f.params.keys():
            return False
        if not same_atoms(e.invars, f.invars) or not same_binders(e.outvars, f.outvars):
            return False
        if getattr(e, "ctx", None) != getattr(f, "ctx", None):
            return False
        rules = e.primitive.name in ("custom_jvp_call", "custom_vjp_call")
        for key in e.params:
            same = _same_rule if rules and key in _RULES else _same
            if not same(e.params[key], f.params[key]):
                return False
    return same_atoms(a.outvars, b.outvars)


_RULES = ("jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd", "out_trees")


def _same_rule(x: Any, y: Any, seen: frozenset = frozenset()) -> bool:
    """Whether two rules of custom derivatives are the same code with the same values closed over.

    JAX wraps a rule anew in every trace, so they are compared part by part. Its wrappers also hold what belongs to the
    trace, which does not count.
    """
    if x is y or (id(x), id(y)) in seen:
        return True
    if type(x) is not type(y):
        return False
    seen |= {(id(x), id(y))}

    def same_parts(*pairs):
        return all(_same_rule(a, b, seen) for a, b in pairs)

    if isinstance(x, types.FunctionType):
        if x.__code__ is not y.__code__:
            return False
        cells = [
            (a.cell_contents, b.cell_contents) for a, b in zip(x.__closure__ or (), y.__closure__ or (), strict=True)
        ]
        if _is_of_jax(x):
            cells = [(a, b) for a, b in cells if isinstance(a, _CARRIERS) or hasattr(a, "f_transformed")]
        return same_parts((x.__defaults__, y.__defaults__), (x.__kwdefaults__, y.__kwdefaults__), *cells)
    if isinstance(x, types.MethodType):
        return same_parts((x.__func__, y.__func__), (x.__self__, y.__self__))
    if isinstance(x, partial):
        return same_parts((x.func, y.func), (x.args, y.args), (x.keywords, y.keywords))
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and same_parts(*zip(x, y, strict=True))
    if isinstance(x, dict):
        return x.keys() == y.keys() and same_parts(*((x[k], y[k]) for k in x))
    if isinstance(x, (jax.custom_jvp, jax.custom_vjp)):
        return same_parts((vars(x), vars(y)))
    if hasattr(x, "f_transformed"):  # how JAX wraps a function with transformations of its arguments and results
        return same_parts((x.f, y.f), (x.f_transformed, y.f_transformed))
    return (type(x).__name__ in _OF_A_TRACE and _is_of_jax(type(x))) or _same(x, y)


_CARRIERS = (types.FunctionType, types.MethodType, partial, list, tuple)
_OF_A_TRACE = ("Store", "EqualStore", "DebugInfo")


def _is_of_jax(x: Any) -> bool:
    return (getattr(x, "__module__", None) or "").partition(".")[0] in ("jax", "jaxlib")


def _same(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if isinstance(x, ClosedJaxpr) and isinstance(y, ClosedJaxpr):
        return _same(x.consts, y.consts) and _same_program(x.jaxpr, y.jaxpr)
    if isinstance(x, Jaxpr) and isinstance(y, Jaxpr):
        return _same_program(x, y)
    if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
        return type(x) is type(y) and len(x) == len(y) and all(map(_same, x, y))
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(_same(x[k], y[k]) for k in x)
    if isinstance(x, (np.ndarray, np.generic)) and isinstance(y, (np.ndarray, np.generic)):
        return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    if isinstance(x, float) and isinstance(y, float):
        return np.float64(x).tobytes() == np.float64(y).tobytes()  # zeros have signs, and NaN is the same as NaN
    if isinstance(x, (jax.Array, np.ndarray)) or isinstance(y, (jax.Array, np.ndarray)):
        return False
    if isinstance(x, LazyJaxpr) and isinstance(y, LazyJaxpr):
        return _same(x.get(), y.get())
    try:
        return bool(x == y)
    except Exception:  # an unknown parameter that cannot be compared is a different one
        return False
