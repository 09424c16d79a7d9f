r"""A linear function that carries its own transpose.

``linear_call(fun, fun_transpose, residuals, linear)`` evaluates ``fun(residuals, linear)``, which must be linear in
its second argument, and tells JAX that the transpose of that map is ``fun_transpose(residuals, cotangent)``. It is
what keeps the memory of a chunked product flat when it is transposed, where differentiating the loop would not.

Unlike ``jax.custom_derivatives.linear_call`` it can be vmapped, and differentiated with respect to the residuals.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from .structure import abstract, describe, is_traced, same_structure


def linear_call(
    fun: Callable[[Any, Any], Any], fun_transpose: Callable[[Any, Any], Any], residuals: Any, linear: Any
) -> Any:
    r"""Apply a linear function whose transpose is given.

    With :math:`y = F(r)\,x`, transposition uses :math:`x = F(r)^T y` as given by ``fun_transpose`` (the plain
    transpose, not the adjoint: no complex conjugation), and transposing twice returns to ``fun``. Derivatives with
    respect to the residuals differentiate ``fun`` at fixed ``linear``; those with respect to ``linear`` are another
    ``linear_call``. Values that either function closes over count as residuals.

    Args:
        fun: ``fun(residuals, linear)``, linear in ``linear``.
        fun_transpose: ``fun_transpose(residuals, cotangent)`` with a cotangent shaped like the output of ``fun``;
            returns a pytree shaped like ``linear``.
        residuals: pytree of arrays of any dtype.
        linear: pytree of real or complex arrays.

    Returns:
        ``fun(residuals, linear)``.

    Raises:
        TypeError: ``fun_transpose`` does not return the structure, shapes and dtypes of ``linear``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> A = jnp.array([[1.0, 2.0], [3.0, 4.0]])
        >>> product = lambda x: linear_call(lambda A, x: A @ x, lambda A, y: A.T @ y, A, x)
        >>> jax.linear_transpose(product, jnp.ones(2))(jnp.array([1.0, 0.0]))[0].tolist()
        [1.0, 2.0]
    """
    callee, out_tree = _trace(fun, residuals, linear)
    cotangent = jax.tree.unflatten(out_tree, [abstract(aval) for aval in callee.out_avals])
    transposed, transposed_tree = _trace(fun_transpose, residuals, cotangent)
    got = jax.tree.unflatten(transposed_tree, [abstract(aval) for aval in transposed.out_avals])
    if not same_structure(got, linear):
        raise TypeError(
            "linear_call: fun_transpose does not return what fun takes.\n"
            f"  got       {describe(got)}\n  expected  {describe(linear)}\n"
            "  fun_transpose(residuals, cotangent) must return the structure, shapes and dtypes of `linear`."
        )
    captured = (callee.consts, transposed.consts)
    residual_leaves, linear_leaves = jax.tree.leaves(residuals), jax.tree.leaves(linear)
    if any(captured):
        n, m = len(callee.consts), len(residual_leaves)
        arguments = [*callee.consts, *transposed.consts, *residual_leaves]

        def callee_of_all(*args):
            own, rest = args[:n], args[len(arguments) - m :]
            return jaxpr_as_fun(ClosedJaxpr(callee.jaxpr, own))(*rest)

        def transposed_of_all(*args):
            own, rest = args[n : len(arguments) - m], args[len(arguments) - m :]
            return jaxpr_as_fun(ClosedJaxpr(transposed.jaxpr, own))(*rest)

        callee_all = jax.make_jaxpr(callee_of_all)(*arguments, *linear_leaves)
        transposed_all = jax.make_jaxpr(transposed_of_all)(*arguments, *jax.tree.leaves(cotangent))
    else:
        arguments, callee_all, transposed_all = residual_leaves, callee, transposed
    out = linear_call_p.bind(
        *arguments,
        *linear_leaves,
        callee=callee_all,
        transpose=LazyJaxpr(lambda: transposed_all),
        num_residuals=len(arguments),
        one_by_one=False,
    )
    return jax.tree.unflatten(out_tree, out)


def closed_linear_call(
    fun: Callable[[Any, Any], Any],
    fun_transpose: Callable[[Any, Any], Any] | None,
    residuals: Any,
    linear: Any,
) -> Any:
    r"""`linear_call` for functions that close over no traced value, so that the transpose is traced only when used.

    ``fun_transpose=None`` promises that the map equals its adjoint, :math:`F^H = F` in the real inner product; the
    transpose is then :math:`y \mapsto \overline{F \bar y}` and costs no second function.
    """
    callee, out_tree = _trace(fun, residuals, linear)
    if any(is_traced(c) for c in callee.consts):
        raise TypeError("closed_linear_call: fun closes over traced arrays; pass them among the residuals.")
    residual_leaves, linear_leaves = jax.tree.leaves(residuals), jax.tree.leaves(linear)
    residual_tree = jax.tree.structure(residuals)
    residual_types = [abstract(leaf) for leaf in residual_leaves]
    cotangent_types = [abstract(aval) for aval in callee.out_avals]

    def transposed(*args):
        res, ct = args[: len(residual_types)], args[len(residual_types) :]
        if fun_transpose is None:
            out = jaxpr_as_fun(callee)(*res, *(leaf.conj() for leaf in ct))
            return [leaf.conj() for leaf in out]
        res, ct = jax.tree.unflatten(residual_tree, res), jax.tree.unflatten(out_tree, ct)
        return jax.tree.leaves(fun_transpose(res, ct))

    def trace_transpose() -> ClosedJaxpr:
        return jax.make_jaxpr(transposed)(*residual_types, *cotangent_types)

    out = linear_call_p.bind(
        *residual_leaves,
        *linear_leaves,
        callee=callee,
        transpose=LazyJaxpr(trace_transpose),
        num_residuals=len(residual_leaves),
        one_by_one=False,
    )
    return jax.tree.unflatten(out_tree, out)


def one_by_one(fun: Callable[..., Any], *linear: Any) -> Any:
    """``fun(*linear)``, linear in all of its arguments; a batch of those alone is evaluated one after the other.

    What ``fun`` closes over is shared by the members of a batch.
    """
    callee, out_tree = _trace(lambda _, linear: fun(*linear), (), linear)
    leaves, count = jax.tree.leaves(linear), len(callee.consts)

    def of_all(*args):
        return jaxpr_as_fun(ClosedJaxpr(callee.jaxpr, args[:count]))(*args[count:])

    whole = jax.make_jaxpr(of_all)(*callee.consts, *leaves)
    consts, types = [abstract(c) for c in callee.consts], [abstract(x) for x in leaves]

    def transposed(*args):
        consts, cotangents = args[:count], args[count:]
        return jax.linear_transpose(lambda *linear: of_all(*consts, *linear), *types)(list(cotangents))

    out = linear_call_p.bind(
        *callee.consts,
        *leaves,
        callee=whole,
        transpose=LazyJaxpr(lambda: jax.make_jaxpr(transposed)(*consts, *(abstract(a) for a in callee.out_avals))),
        num_residuals=count,
        one_by_one=True,
    )
    return jax.tree.unflatten(out_tree, out)


def _trace(fun, residuals, linear):
    """The jaxpr of ``fun(residuals, linear)`` and the tree of its output; captured arrays become its constants."""
    leaves, tree = jax.tree.flatten((residuals, linear))
    out_tree = None

    def flat(*args):
        nonlocal out_tree
        out, out_tree = jax.tree.flatten(fun(*jax.tree.unflatten(tree, args)))
        return out

    # A new function object each time: a closure over changed values must not meet the trace of the old ones.
    return jax.make_jaxpr(flat)(*leaves), out_tree


class LazyJaxpr:
    """A jaxpr that is traced when first asked for. Compared by identity, as jaxprs are."""

    def __init__(self, thunk: Callable[[], ClosedJaxpr]):
        self._thunk, self._jaxpr = thunk, None

    def get(self) -> ClosedJaxpr:
        if self._jaxpr is None:
            self._jaxpr = self._thunk()
        return self._jaxpr


linear_call_p = Primitive("krylov_linear_call")
linear_call_p.multiple_results = True


def _evaluate(*args, callee, **_):
    return jaxpr_as_fun(callee)(*args)


def _abstract_eval(*_, callee, **__):
    return list(callee.out_avals), callee.effects


def _jvp(primals, tangents, **params):
    callee, num_residuals = params["callee"], params["num_residuals"]
    residuals, linear = primals[:num_residuals], primals[num_residuals:]
    residuals_dot, linear_dot = tangents[:num_residuals], tangents[num_residuals:]
    out = linear_call_p.bind(*primals, **params)
    out_dot = [ad.Zero(jax.typeof(leaf).to_tangent_aval()) for leaf in out]
    if any(type(t) is not ad.Zero for t in linear_dot):
        linear_dot = [ad.instantiate_zeros(t) for t in linear_dot]
        out_dot = linear_call_p.bind(*residuals, *linear_dot, **params)
    active = [i for i, t in enumerate(residuals_dot) if type(t) is not ad.Zero and t.dtype != jax.dtypes.float0]
    if active:

        def of_active(*values):
            merged = list(residuals)
            for i, value in zip(active, values, strict=True):
                merged[i] = value
            return jaxpr_as_fun(callee)(*merged, *linear)

        _, from_residuals = jax.jvp(of_active, [residuals[i] for i in active], [residuals_dot[i] for i in active])
        out_dot = [ad.add_tangents(a, b) for a, b in zip(out_dot, from_residuals, strict=True)]
    return out, out_dot


def _transpose(cotangents, *args, callee, transpose, num_residuals, one_by_one):
    residuals, linear = args[:num_residuals], args[num_residuals:]
    if all(type(ct) is ad.Zero for ct in cotangents):
        return [None] * len(args)
    cotangents = [ad.instantiate_zeros(ct) for ct in cotangents]
    unknown = [i for i, r in enumerate(args) if ad.is_undefined_primal(r)]
    if any(i < num_residuals for i in unknown):
        # The map is linear in a residual as well (A x in A, say): there the callee itself is transposed.
        def of_unknown(*values):
            merged = list(args)
            for i, value in zip(unknown, values, strict=True):
                merged[i] = value
            return jaxpr_as_fun(callee)(*merged)

        found = jax.linear_transpose(of_unknown, *(abstract(args[i].aval) for i in unknown))(cotangents)
        out = [None] * len(args)
        for i, value in zip(unknown, found, strict=True):
            out[i] = value
        return out
    back = linear_call_p.bind(
        *residuals,
        *cotangents,
        callee=transpose.get(),
        transpose=LazyJaxpr(lambda: callee),
        num_residuals=num_residuals,
        one_by_one=one_by_one,
    )
    wanted = [ct if ad.is_undefined_primal(x) else None for ct, x in zip(back, linear, strict=True)]
    return [None] * num_residuals + wanted


def _batch(axis_data, args, dims, *, callee, transpose, num_residuals, one_by_one):
    shared = dict(num_residuals=num_residuals, one_by_one=one_by_one)
    if all(d is None for d in dims):  # JAX asks all the same
        out = linear_call_p.bind(*args, callee=callee, transpose=transpose, **shared)
        return out, [None] * len(out)
    size = axis_data.size
    residuals, linear = args[:num_residuals], args[num_residuals:]
    residual_dims = tuple(dims[:num_residuals])
    # Every linear input and output is batched, so that the transpose has one shape whichever of them came batched.
    linear = [batching.bdim_at_front(x, d, size) for x, d in zip(linear, dims[num_residuals:], strict=True)]
    options: dict[str, Any] = {"axis_size": size}
    if isinstance(axis_data.name, str):
        options["axis_name"] = axis_data.name
    if axis_data.spmd_name is not None:
        options["spmd_axis_name"] = axis_data.spmd_name
    residual_types = [abstract(r) for r in residuals]

    def batched(closed: ClosedJaxpr, linear_types) -> ClosedJaxpr:
        in_axes = (*residual_dims, *(0 for _ in linear_types))
        if one_by_one and all(d is None for d in residual_dims):
            return jax.make_jaxpr(_loop(closed, num_residuals))(*residual_types, *linear_types)
        return jax.make_jaxpr(jax.vmap(jaxpr_as_fun(closed), in_axes=in_axes, **options))(
            *residual_types, *linear_types
        )

    callee_batched = batched(callee, [abstract(x) for x in linear])
    cotangent_types = [abstract(aval) for aval in callee_batched.out_avals]
    out = linear_call_p.bind(
        *residuals,
        *linear,
        callee=callee_batched,
        transpose=LazyJaxpr(lambda: batched(transpose.get(), cotangent_types)),
        **shared,
    )
    return out, [0] * len(out)


def _loop(closed: ClosedJaxpr, num_residuals: int) -> Callable:
    """A program run for each of the linear inputs along their first axis."""

    def run(*args):
        residuals, linear = args[:num_residuals], args[num_residuals:]
        return jax.lax.map(lambda members: jaxpr_as_fun(closed)(*residuals, *members), linear)

    return run


linear_call_p.def_impl(_evaluate)
linear_call_p.def_effectful_abstract_eval(_abstract_eval)
ad.primitive_jvps[linear_call_p] = _jvp
ad.primitive_transposes[linear_call_p] = _transpose
batching.fancy_primitive_batchers[linear_call_p] = _batch
mlir.register_lowering(linear_call_p, mlir.lower_fun(_evaluate, multiple_results=True))
