r"""Max pooling that is differentiable for every initial value and in every order of derivatives.

``jax.lax.reduce_window(x, init, jax.lax.max, ...)`` can be linearized only where ``init`` is minus infinity and known
while tracing. Here the derivative is explicit: each window remembers which entry it selected, the tangent map takes the
tangent of that entry, and its transpose adds the cotangent there. What is kept for it is one integer an output.
"""

import math
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Num

from .structure import is_traced

Padding = str | Sequence[tuple[int, int]]


def max_pool(
    x: Num[Array, "*batch_window_channels"],
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    *,
    init: Any = -math.inf,
) -> Num[Array, "..."]:
    """Max pooling over the axes before the last, as ``flax.linen.max_pool`` lays them out.

    Args:
        x: ``(..., *spatial, channels)`` with any number of leading batch axes, also none.
        window_shape: size of the window along each spatial axis; its length says how many there are.
        strides: step along each spatial axis; 1 by default, as in flax. For windows that do not overlap pass
            ``window_shape`` again.
        padding: "VALID", "SAME", "SAME_LOWER", or a pair ``(low, high)`` for each spatial axis.
        init: lower bound of the result, see `reduce_window_max`.

    Returns:
        The maxima, ``(..., *pooled, channels)``.

    Raises:
        ValueError: the arguments do not fit the shape of ``x``.
        TypeError: ``x`` is complex, or ``init`` is no real scalar.

    Example:
        >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)
        >>> max_pool(x, (2, 2), strides=(2, 2))[0, :, :, 0].tolist()
        [[5.0, 7.0], [13.0, 15.0]]
    """
    where, x = "max_pool", jnp.asarray(x)
    window = _integers(where, "window_shape", window_shape)
    batch = x.ndim - len(window) - 1
    if batch < 0:
        raise ValueError(
            f"{where}: x has too few axes for the window.\n"
            f"  got       x of shape {x.shape}, window_shape {window}\n"
            f"  expected  x of at least {len(window) + 1} axes: (..., {len(window)} spatial axes, channels)\n"
            "  Add a channel axis with x[..., None], or shorten window_shape."
        )

    def everywhere(inner, outer):
        return (outer,) * batch + tuple(inner) + (outer,)

    strides = _integers(where, "strides", (1,) * len(window) if strides is None else strides, len(window))
    if not isinstance(padding, str):
        padding = everywhere(_pairs(where, padding, len(window)), (0, 0))
    return _reduce(where, x, init, everywhere(window, 1), everywhere(strides, 1), padding)


def reduce_window_max(
    x: Num[Array, "..."],
    init: Any,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    base_dilation: Sequence[int] | None = None,
    window_dilation: Sequence[int] | None = None,
) -> Num[Array, "..."]:
    r"""``jax.lax.reduce_window(x, init, jax.lax.max, ...)`` with derivatives, whatever ``init`` is.

    The value is the maximum of ``init`` and the entries of each window. The derivative follows the entry selected:

    - among equal entries the first of the window in row-major order, as JAX does where ``init`` is minus infinity;
    - ``init`` where it is strictly greater than all entries, or where the window holds nothing but padding;
    - a NaN wins over everything, the first NaN of the window over the rest, and an entry over ``init``.

    It is piecewise linear in ``x`` and ``init``, so second derivatives of it are zero. The minimum over windows is
    ``-reduce_window_max(-x, -init, ...)``. For several reducers at once, or others than max, there is no such help.

    Args:
        x: real array of any number of axes; integers have values but no derivatives.
        init: real scalar, Python or NumPy or JAX, traced or not, differentiable; cast to the dtype of ``x``.
        window_dimensions: size of the window along every axis of ``x``.
        window_strides: step along every axis; 1 by default.
        padding: "VALID", "SAME", "SAME_LOWER", or a pair ``(low, high)`` for every axis. Padding never wins.
        base_dilation: distance of the entries of ``x`` along every axis, filled up with padding; 1 by default.
        window_dilation: distance of the entries of a window along every axis; 1 by default.

    Raises:
        ValueError: the arguments do not fit the shape of ``x``.
        TypeError: ``x`` is complex, or ``init`` is no real scalar.

    Example:
        >>> x = jnp.array([-3.0, -1.0, 2.0, 5.0])
        >>> jax.grad(lambda x, init: reduce_window_max(x, init, (2,), (2,)).sum(), (0, 1))(x, 0.0)
        (Array([0., 0., 0., 1.], dtype=float32), Array(1., dtype=float32, weak_type=True))
    """
    return _reduce(
        "reduce_window_max", x, init, window_dimensions, window_strides, padding, base_dilation, window_dilation
    )


class _Windows(NamedTuple):
    """Geometry of a pooling, one entry an axis."""

    window: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    base_dilation: tuple[int, ...]
    window_dilation: tuple[int, ...]

    @property
    def pooled(self) -> tuple[int, ...]:
        """Axes along which anything happens; along the others the pooling is a batch of independent ones."""
        trivial = (1, 1, (0, 0), 1)
        return tuple(i for i, axis in enumerate(zip(*self[:4], strict=True)) if axis != trivial)


def _reduce(where, x, init, window, strides=None, padding: Padding = "VALID", base_dilation=None, window_dilation=None):
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(
            f"{where}: complex numbers have no maximum.\n  got       x of dtype {x.dtype}\n"
            "  expected  a real dtype\n  Pool abs(x), or the real and imaginary parts one by one."
        )
    init = _scalar(where, init, x.dtype)

    def integers(name, values):
        return _integers(where, name, (1,) * x.ndim if values is None else values, x.ndim)

    window = _integers(where, "window_dimensions", window, x.ndim)
    strides = integers("window_strides", strides)
    base_dilation = integers("base_dilation", base_dilation)
    window_dilation = integers("window_dilation", window_dilation)
    if isinstance(padding, str):
        if padding.upper() not in ("VALID", "SAME", "SAME_LOWER"):
            raise ValueError(
                f"{where}: unknown padding.\n  got       {padding!r}\n"
                "  expected  'VALID', 'SAME', 'SAME_LOWER', or a pair (low, high) of integers for each axis"
            )
        extent = [(w - 1) * d + 1 for w, d in zip(window, window_dilation, strict=True)]
        padding = lax.padtype_to_pads(x.shape, extent, strides, padding.upper())
    windows = _Windows(window, strides, _pairs(where, padding, x.ndim), base_dilation, window_dilation)
    return _max(windows, x, init) if x.ndim else lax.max(x, init)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _max(windows, x, init):
    maxima = lax.reduce_window(x, _lowest(x.dtype), lax.max, *windows)
    return lax.max(maxima, jnp.broadcast_to(init, maxima.shape))


@_max.defjvp
def _max_jvp(windows, primals, tangents):
    x, init = primals
    selected = _selected(windows, lax.stop_gradient(x), lax.stop_gradient(init))
    # The value is the same selection, so that it can be differentiated again. What the tangent map keeps is `selected`.
    push = jax.checkpoint(partial(_take, windows, selected), prevent_cse=False)
    return _take(windows, selected, x, init), push(*tangents)


def _take(windows, selected, x, init):
    """The entries of ``x`` at the selected positions, ``init`` where that is -1. Linear in ``(x, init)``."""
    pooled = windows.pooled or (0,)
    first, last = pooled[0], pooled[-1] + 1
    if pooled != tuple(range(first, last)):
        to = tuple(range(len(pooled)))
        x, selected = jnp.moveaxis(x, pooled, to), jnp.moveaxis(selected, pooled, to)
        first, last = 0, len(pooled)

    def flat(a):
        return a.reshape(*a.shape[:first], math.prod(a.shape[first:last]), *a.shape[last:])

    # Other axes are batch axes of this gather: sharded over a mesh, they need no communication.
    entries = jnp.take_along_axis(flat(x), flat(jnp.maximum(selected, 0)), first, mode="promise_in_bounds")
    out = jnp.where(selected < 0, init, entries.reshape(selected.shape))
    return out if first else jnp.moveaxis(out, tuple(range(len(pooled))), pooled)


# Up to this size of window the search is unrolled into one fused loop, on CPU 4 to 20 times faster than XLA's
# reduction of pairs; beyond it, compile time grows and the advantage goes.
_MAX_UNROLLED = 16


def _selected(windows, x, init):
    """Flat position within the pooled axes of the entry that each window selects, -1 where it selects ``init``."""
    window, strides, padding, base_dilation, window_dilation = windows
    position = jnp.zeros(x.shape, jnp.int32)
    for axis in windows.pooled:
        position = position * x.shape[axis] + lax.broadcasted_iota(jnp.int32, x.shape, axis)
    pads = [(low, high, dilation - 1) for (low, high), dilation in zip(padding, base_dilation, strict=True)]
    lowest = _lowest(x.dtype)
    value, position = lax.pad(x, lowest, pads), lax.pad(position, np.int32(-1), pads)
    if math.prod(window) > _MAX_UNROLLED:
        none = (jnp.asarray(lowest), jnp.int32(-1))
        still = ((0, 0),) * x.ndim
        value, position = lax.reduce_window(
            (value, position), none, _better, window, strides, still, None, window_dilation
        )
    else:
        last = [(w - 1) * d for w, d in zip(window, window_dilation, strict=True)]
        counts = [(n - e - 1) // s + 1 for n, e, s in zip(value.shape, last, strides, strict=True)]
        if any(n <= 0 for n in counts):
            return jnp.full([max(n, 0) for n in counts], -1)
        entries = []
        for offset in np.ndindex(*window):
            start = [o * d for o, d in zip(offset, window_dilation, strict=True)]
            stop = [a + (n - 1) * s + 1 for a, n, s in zip(start, counts, strides, strict=True)]
            entries.append((lax.slice(value, start, stop, strides), lax.slice(position, start, stop, strides)))
        value, position = reduce(_better, entries)
    init_wins = (init > value) | ((init != init) & (value == value))
    return jnp.where(init_wins, -1, position)


def _better(a, b):
    """Of two pairs (value, position) the better: NaN, then the larger value, an entry before padding, the first."""
    (value_a, at_a), (value_b, at_b) = a, b
    nan_a, nan_b = value_a != value_a, value_b != value_b
    tie = (value_a == value_b) | (nan_a & nan_b)
    earlier = (at_b >= 0) & ((at_a < 0) | (at_b < at_a))
    take_b = (value_b > value_a) | (nan_b & ~nan_a) | (tie & earlier)
    return jnp.where(take_b, value_b, value_a), jnp.where(take_b, at_b, at_a)


def _lowest(dtype):
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.array(-np.inf, dtype)
    return np.array(False if jnp.issubdtype(dtype, jnp.bool_) else jnp.iinfo(dtype).min, dtype)


def _scalar(where, init, dtype):
    try:
        value = jnp.asarray(init)
    except (TypeError, OverflowError):
        value = None
    kinds = (jnp.floating, jnp.integer, jnp.bool_) if jnp.issubdtype(dtype, jnp.floating) else (jnp.integer, jnp.bool_)
    # Minus infinity bounds integers too: it is the default of `max_pool`.
    if isinstance(init, float) and init == -math.inf:
        return jnp.asarray(_lowest(dtype))
    if (
        value is None
        or not _fits(init, dtype)
        or value.shape != ()
        or not any(jnp.issubdtype(value.dtype, kind) for kind in kinds)
    ):
        got = (
            repr(init)
            if value is None or not _fits(init, dtype)
            else f"{value.dtype}[{','.join(map(str, value.shape))}]"
        )
        raise TypeError(
            f"{where}: init is not a real scalar that {dtype} can hold.\n  got       {got}\n  expected  {dtype}[]\n"
            "  Pass a number, -jnp.inf for none, or an array of shape ()."
        )
    return value.astype(dtype)


def _fits(init, dtype):
    """Whether an integer dtype can hold a value, as far as it is known."""
    if is_traced(init) or not jnp.issubdtype(dtype, jnp.integer):
        return True
    value = np.asarray(init)
    if value.shape != () or not np.issubdtype(value.dtype, np.integer):
        return True
    return jnp.iinfo(dtype).min <= int(value) <= jnp.iinfo(dtype).max


def _integers(where, name, values, length=None):
    try:
        values = tuple(v.__index__() for v in values)
    except (TypeError, AttributeError):
        raise TypeError(f"{where}: {name} must be a sequence of integers.\n  got       {values!r}") from None
    if (length is not None and len(values) != length) or any(v < 1 for v in values):
        count = "" if length is None else f"{length} "
        raise ValueError(
            f"{where}: {name} does not fit.\n  got       {values}\n  expected  {count}integers >= 1, one for "
            f"{'each spatial axis' if where == 'max_pool' else 'every axis of x'}"
        )
    return values


def _pairs(where, padding, length):
    try:
        pairs = tuple((low.__index__(), high.__index__()) for low, high in padding)
    except (TypeError, ValueError, AttributeError):
        pairs = None
    if pairs is None or len(pairs) != length or any(side < 0 for pair in pairs for side in pair):
        raise ValueError(
            f"{where}: padding does not fit.\n  got       {padding!r}\n"
            f"  expected  'VALID', 'SAME', 'SAME_LOWER', or {length} pairs (low, high) of integers >= 0"
        )
    return pairs
