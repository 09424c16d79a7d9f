r"""Why a function cannot be linearized, or its tangent map not transposed: errors that name the operation and the cure.

JAX says that "linearization failed" without saying of what. Here a failure makes the function be traced again and its
operations be differentiated one by one until the culprit is found; nothing is spent where nothing fails.
"""

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun, jaxprs_in_params
from jax.extend.source_info_util import summarize

from .structure import abstract, describe


class LinearizationError(TypeError):
    """A function contains an operation that JAX cannot linearize or transpose."""


def linearize(f: Callable, *primals: Any, name: str = "f") -> tuple[Any, Callable]:
    """``jax.linearize``, with errors that name the operation that cannot be linearized and say what to use instead.

    Args:
        f: the function.
        primals: where to linearize it.
        name: what errors call the function.

    Raises:
        LinearizationError: ``f`` contains such an operation.

    Example:
        >>> pool = lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.max, (2,), (2,))
        >>> linearize(pool, jnp.ones(4))
        Traceback (most recent call last):
        ...
        krylov.operators.linearization.LinearizationError: f cannot be linearized.
          got       reduce_window, a maximum over windows with initial value 0.0, float32[4] -> float32[2]
          at        ...
          expected  operations that JAX can differentiate
          Use krylov.operators.max_pool or krylov.operators.reduce_window_max, which take any initial value; or give ...
    """
    with explained(f, *primals, name=name):
        return jax.linearize(f, *primals)


def linear_transpose(fun: Callable, *primals: Any, name: str = "fun") -> Callable:
    """``jax.linear_transpose``, with errors that name the operation that cannot be transposed and say what to do.

    Args:
        fun: a linear function.
        primals: arguments of it, or their shapes and dtypes.
        name: what errors call the function.

    Raises:
        LinearizationError: on the call of the result, ``fun`` contains such an operation.
    """

    def transposed(cotangents):
        with _explained(fun, primals, name, ("transpose",)):
            return jax.linear_transpose(fun, *primals)(cotangents)

    return transposed


@contextmanager
def explained(f: Callable, *primals: Any, name: str = "f") -> Iterator[None]:
    """Turn failures to differentiate ``f`` inside this block into a `LinearizationError`; leave all others alone.

    The block may trace ``f``, or use ``jax.jvp``, ``jax.vjp``, ``jax.linearize`` or ``jax.grad`` on it, and what these
    return.

    Args:
        f: the function that is differentiated.
        primals: its arguments, or their shapes and dtypes.
        name: what errors call the function.
    """
    with _explained(f, primals, name, ("linearize", "pull", "push")):
        yield


@contextmanager
def _explained(f, primals, name, stages):
    try:
        yield
    except LinearizationError:
        raise
    except Exception as error:
        if "forward-mode" in str(error):
            stages = tuple(reversed(stages))
        message = _explanation(error, f, primals, name, stages)
        if message is None:
            raise
        raise LinearizationError(message) from error


_ABOUT_DERIVATIVES = re.compile(r"lineari[sz]|differentia|transpos|jvp|vjp", re.IGNORECASE)


def _explanation(error, f, primals, name, stages) -> str | None:
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return _of_untraced_pooling(error, name)
    # JAX's own rules assert what nonlinear operations violate.
    nonlinear = isinstance(error, AssertionError) and stages == ("transpose",)
    if not (nonlinear or _ABOUT_DERIVATIVES.search(str(error))):
        return None
    try:
        types = jax.tree.map(abstract, primals)
        traced = jax.make_jaxpr(f)(*types).jaxpr
    except jax.errors.TracerBoolConversionError as untraced:
        return _of_untraced_pooling(untraced, name)
    except Exception:  # then it is not the derivative that fails, and the error at hand says more
        return None
    active = {v for v in traced.invars if _is_inexact(v)}
    for stage in stages:
        culprit = _culprit(traced, active, stage)
        if culprit is not None:
            what, cure = _diagnosis(culprit, stage)
            failed = {"linearize": "linearized", "push": "pushed forward"}.get(stage, "transposed")
            return _words(name, failed, f"{what}, {_signature(culprit)}", summarize(culprit.source_info), cure)
    return None


def refuse_reverse_only(f: Callable, traced: Jaxpr, *primals: Any) -> None:
    """Fail where the tangent map of ``f`` holds a derivative for reverse mode only, as JAX would in lowering it.

    Inside `explained`: what is jitted around it is lowered where no block can name the operation any more.

    Args:
        f: the function.
        traced: its program, looked through for such derivatives; without one nothing is lowered.
        primals: the shapes and dtypes of its arguments; it is differentiated in the first.
    """
    if _holds_custom_vjp(traced):
        like, *rest = (jax.tree.map(abstract, x) for x in primals)
        # Checkpointed as the loops' bodies are: so what no result needs is lowered too.
        push = jax.checkpoint(lambda x, v, *rest: jax.jvp(lambda x: f(x, *rest), (x,), (v,))[1])
        jax.jit(push).lower(like, like, *rest)


def _holds_custom_vjp(jaxpr: Jaxpr) -> bool:
    return any(
        e.primitive.name.startswith("custom_vjp") or any(map(_holds_custom_vjp, jaxprs_in_params(e.params)))
        for e in jaxpr.eqns
    )


def _words(name, failed, what, place, cure):
    at = f"  at        {place}\n" if place else ""
    return (
        f"{name} cannot be {failed}.\n  got       {what}\n{at}"
        f"  expected  operations that JAX can {'trace' if failed == 'traced' else 'differentiate'}\n  {cure}"
    )


def _culprit(jaxpr: Jaxpr, active: set, stage: str) -> JaxprEqn | None:
    """The first operation on active values, innermost, that does not go through the given stage on its own."""
    active = set(active)
    for eqn in jaxpr.eqns:
        if not any(v in active for v in eqn.invars if not isinstance(v, Literal)):
            continue
        if not _goes_through(jaxpr, eqn, active, stage):
            # A loop that fails to be transposed fails as a whole: its body also carries what is not linear.
            loop = eqn.primitive.name == "while" and stage in ("pull", "transpose")
            for inner in () if loop else jaxprs_in_params(eqn.params):
                found = _culprit(inner, _active_inside(inner, eqn, active), stage)
                if found is not None:
                    return found
            return eqn
        if eqn.primitive.name != "stop_gradient":
            active.update(v for v in eqn.outvars if _is_inexact(v))
    return None


def _active_inside(inner, eqn, active):
    outer = eqn.invars[len(eqn.invars) - len(inner.invars) :] if len(inner.invars) <= len(eqn.invars) else ()
    if eqn.primitive.name == "while" or len(outer) != len(inner.invars):
        return {v for v in inner.invars if _is_inexact(v)}
    return {v for v, o in zip(inner.invars, outer, strict=True) if not isinstance(o, Literal) and o in active}


def _goes_through(jaxpr, eqn, active, stage):
    inputs = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)))
    outputs = [v for v in eqn.outvars if _is_inexact(v)]
    if not outputs:
        return True
    single = jaxpr.replace(constvars=[], invars=inputs, outvars=outputs, eqns=[eqn])
    run = jaxpr_as_fun(ClosedJaxpr(single, []))
    chosen = [i for i, v in enumerate(inputs) if v in active]
    types = [abstract(v.aval) for v in inputs]

    def attempt(args, cotangents):
        def of_active(*values):
            merged = list(args)
            for i, value in zip(chosen, values, strict=True):
                merged[i] = value
            return run(*merged)

        values = [args[i] for i in chosen]
        if stage == "transpose":
            return jax.linear_transpose(of_active, *values)(cotangents)
        _, push = jax.linearize(of_active, *values)
        if stage == "push":
            return push(*values)
        return jax.linear_transpose(push, *values)(cotangents) if stage == "pull" else None

    def works(fun, *args):
        try:
            # A rule for reverse mode only refuses as late as in lowering.
            jax.jit(fun).lower(*args) if stage == "push" else jax.eval_shape(fun, *args)
        except Exception:
            return False
        return True

    # What does not even run alone needs an environment, such as a mesh axis: no verdict.
    return not works(run, *types) or works(attempt, types, [abstract(v.aval) for v in outputs])


_POOLING = (
    "Use krylov.operators.max_pool or krylov.operators.reduce_window_max, which take any initial value; or give "
    "lax.reduce_window the Python number -jnp.inf."
)
_CURES = {
    "while": "Use lax.scan, or lax.fori_loop with bounds known in advance; for an iteration to a fixed point use "
    "jax.lax.custom_root, or krylov.solve where it solves a linear system.",
    "custom_vjp_call": "It has a derivative for reverse mode only: define it by jax.custom_jvp, which serves both.",
    "pure_callback": "JAX cannot look into a callback: give it a derivative by jax.custom_jvp.",
    "io_callback": "JAX cannot look into a callback: give it a derivative by jax.custom_jvp.",
}


def _diagnosis(eqn, stage) -> tuple[str, str]:
    name = eqn.primitive.name
    if name == "reduce_window":
        return _reduction(eqn)
    if "custom_lin" in name or "custom_vjp" in name:
        name = "custom_vjp_call"
    if name in _CURES:
        return name, _CURES[name]
    if stage == "transpose":
        return (
            name,
            "It is not linear here, or has no transpose: krylov.operators.linear_call gives a map its transpose.",
        )
    return name, "Give the function around it a derivative by jax.custom_jvp, or leave this operation out."


def _reduction(eqn):
    """What a generic reduction over windows does, in words, and what to use instead."""
    (reducer, *_), init = list(jaxprs_in_params(eqn.params)), eqn.invars[-1]
    kind = reducer.eqns[0].primitive.name if len(reducer.eqns) == 1 and len(eqn.invars) == 2 else None
    value = f"initial value {init.val}" if isinstance(init, Literal) else "a traced initial value"
    if kind == "max":
        return f"reduce_window, a maximum over windows with {value}", _POOLING
    if kind == "min":
        return (
            f"reduce_window, a minimum over windows with {value}",
            "Use -krylov.operators.reduce_window_max(-x, -init, ...), which takes any initial value; or give "
            "lax.reduce_window the Python number jnp.inf.",
        )
    if kind in ("add", "add_any"):
        return (
            f"reduce_window, a sum over windows with {value}",
            "Give lax.reduce_window the Python number 0.0, and add the initial value to what it returns.",
        )
    return "reduce_window, a reduction of its own", "Write it with lax.conv_general_dilated_patches and a reduction."


def _signature(eqn):
    def words(atoms):
        return ", ".join(describe(v.aval) for v in atoms[:4]) + (", ..." if len(atoms) > 4 else "")

    arrays = [v for v in eqn.invars if not isinstance(v, Literal)]
    return f"{words(arrays)} -> {words(eqn.outvars)}"


def _of_untraced_pooling(error, name) -> str | None:
    """What to say if the error comes from ``lax.reduce_window``, which looks at the value of its ``init``."""
    jax_home, place, called = str(Path(jax.__file__).parent), None, False
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_filename.startswith(jax_home):
            called = called or code.co_name == "reduce_window"
            continue
        text = traceback.FrameSummary(code.co_filename, line, code.co_name).line
        called = "reduce_window" in text if text else "reduce_window" in code.co_names
        place = f"{code.co_filename}:{line} ({code.co_name})"
    if not called:
        return None
    return _words(name, "traced", "lax.reduce_window whose initial value is an array, under jit", place, _POOLING)


def _is_inexact(v):
    dtype = getattr(v.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
