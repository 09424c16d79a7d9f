"""The check that a network treats samples one by one, without which chunking would solve another system."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .closure import ClosedFunction
from .sharding import context_of_one_device, on_one_device
from .structure import is_complex, is_traced, real_dtype

if TYPE_CHECKING:
    from .jacobian import Jacobian

# Programs that have passed, so that a run checks each network once. The programs live as long as those of `closure`.
_passed: dict[tuple[int, int], tuple] = {}
_MAX_PASSED = 512


class Difference(NamedTuple):
    """The largest difference between two outputs of a network, what rounding explains of it, and their size."""

    found: float
    allowed: float
    scale: float

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains it; NaN would not."""
        return self.found <= self.allowed


def check_samples_apart(jacobian: Jacobian, together: ClosedFunction) -> None:
    """Compare the network on several samples together with the network on single ones.

    Runs where the values are known (not under a transformation) and once for each traced network and shape of samples.

    Args:
        jacobian: holds the network traced for one sample.
        together: its network traced for as many samples as come together, two at least.

    Raises:
        ValueError: they differ by more than rounding.
    """
    one = jacobian.network_of_one
    key = (id(together.jaxpr), id(one.jaxpr))
    if key in _passed or jacobian.chunks.num_samples == 1:
        return
    if any(is_traced(x) for x in jax.tree.leaves((jacobian, together))):
        return
    with context_of_one_device():
        samples = jacobian.chunks.first(jax.tree.leaves(together.out_structure)[0].shape[0])
        network, one, params = on_one_device((together, one, jacobian.params))
        difference = apart_from_together(network, one, params, samples)
        twice = difference if difference.is_rounding else repeated(network, params, samples)
    if not difference.is_rounding:
        if not twice.is_rounding:
            raise ValueError(
                "Jacobian: f does not give the same twice.\n"
                f"  got       outputs that differ by {twice.found:.2e} (of {twice.scale:.2e}) on the same samples\n"
                "  expected  a function of params and samples alone\n"
                "  Look for random numbers drawn on the host; pass noise or keys as a sample leaf."
            )
        raise ValueError(
            "Jacobian: the outputs of f depend on which samples are evaluated together.\n"
            f"  got       outputs that differ by {difference.found:.2e} (of {difference.scale:.2e}) between several "
            "samples and single ones\n  expected  the same to rounding; in chunks another system would be solved\n"
            "  Look for batch statistics, a mask or noise shaped like the batch, or a mean over samples inside f."
        )
    if len(_passed) >= _MAX_PASSED:
        _passed.pop(next(iter(_passed)))
    _passed[key] = (together.jaxpr, one.jaxpr)  # holding them keeps the ids theirs


def apart_from_together(network: ClosedFunction, one: ClosedFunction, params: PyTree, samples: PyTree) -> Difference:
    """The difference between a network on some samples and on each of them alone."""
    together = evaluate(network, params, samples)
    difference = _difference(together, _apart(one, params, samples), params)
    if difference.is_rounding or not repeated(network, params, samples).is_rounding:
        return difference
    # Where terms cancel inside the network its rounding exceeds that of its outputs: so see what it makes of input that
    # is changed by roundings.
    changed = _difference(together, evaluate(network, *_rounded((params, samples))), params)
    return difference._replace(allowed=difference.allowed + 30 * changed.found)


def repeated(network: ClosedFunction, params: PyTree, samples: PyTree) -> Difference:
    """The difference between two evaluations of the same."""
    return _difference(evaluate(network, params, samples), evaluate(network, params, samples), params)


@eqx.filter_jit
def evaluate(network: ClosedFunction, params: PyTree, samples: PyTree) -> PyTree:
    """The network's outputs, jitted with all it holds as arguments."""
    return network(params, samples)


@eqx.filter_jit
def _apart(one, params, samples):
    def alone(sample):
        out = one(params, jax.tree.map(lambda x: x[None], sample))
        return jax.tree.map(lambda y: y[0], out)

    return jax.vmap(alone)(samples)


def _difference(x, y, params) -> Difference:
    """Of two outputs; infinite where one is finite and the other is not."""
    # Outputs may come in more digits than they were computed with.
    found, scale, eps = 0.0, 0.0, min(float(jnp.finfo(p.dtype).eps) for p in jax.tree.leaves(params))
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        eps = max(eps, float(jnp.finfo(real_dtype(a.dtype)).eps))
        a, b = (np.asarray(v).astype(np.complex128 if is_complex(v) else np.float64) for v in (a, b))
        finite = np.isfinite(a) & np.isfinite(b)
        if np.any(np.isfinite(a) != np.isfinite(b)):
            found = np.inf
        found = max(found, float(np.abs(np.where(finite, a, 0) - np.where(finite, b, 0)).max(initial=0)))
        scale = max(scale, float(np.abs(np.where(finite, a, 0)).max(initial=0)))
    return Difference(found, min(1e3 * eps, 0.05) * scale, scale)


def _rounded(tree: Any) -> Any:
    """Floating-point leaves with each entry changed by a few roundings."""
    rng = np.random.default_rng(0)

    def leaf(x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        factor = 1 + 4 * float(jnp.finfo(real_dtype(x.dtype)).eps) * rng.choice([-1.0, 1.0], x.shape)
        return (x * factor).astype(x.dtype)

    return jax.tree.map(leaf, tree)
