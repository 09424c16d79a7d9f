"""The check that a network treats samples one by one, without which chunking would solve another system."""

from __future__ import annotations

from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .structure import is_traced, real_dtype

if TYPE_CHECKING:
    from .jacobian import Jacobian

# Programs that have passed, so that a run checks each network once. The programs live as long as those of `closure`.
_passed: dict[tuple[int, int], tuple] = {}
_MAX_PASSED = 512


def check_samples_apart(jacobian: Jacobian) -> None:
    """Compare the network on the first chunk with the network on its samples one by one.

    Runs where the values are known (not under a transformation) and once for each traced network and shape of samples.

    Raises:
        ValueError: they differ by more than rounding.
    """
    network, one = jacobian.network, jacobian.network_of_one
    key = (id(network.jaxpr), id(one.jaxpr))
    if key in _passed:
        return
    if any(is_traced(x) for x in jax.tree.leaves(jacobian)):
        return
    if jacobian.chunks.weights.size == 1:
        return
    together, apart = _both(jacobian)
    difference, scale, tolerance = _compare(together, apart)
    if not difference <= tolerance * scale:
        raise ValueError(
            "Jacobian: the outputs of f depend on which samples are evaluated together.\n"
            f"  got       outputs that differ by {difference:.2e} (of {scale:.2e}) between a chunk and single samples\n"
            "  expected  the same to rounding; in chunks another system would be solved\n"
            "  Look for batch statistics, a mask or noise shaped like the batch, or a mean over samples inside f."
        )
    if len(_passed) >= _MAX_PASSED:
        _passed.pop(next(iter(_passed)))
    _passed[key] = (network.jaxpr, one.jaxpr)  # holding them keeps the ids theirs


@eqx.filter_jit
def _both(jacobian: Jacobian):
    chunk = jax.tree.map(lambda x: x[0], jacobian.chunks.samples)
    together = jacobian.network(jacobian.params, chunk)

    def alone(sample):
        out = jacobian.network_of_one(jacobian.params, jax.tree.map(lambda x: x[None], sample))
        return jax.tree.map(lambda y: y[0], out)

    return together, jax.lax.map(alone, chunk, batch_size=jacobian.chunks.weights.shape[1])


def _compare(together, apart) -> tuple[float, float, float]:
    difference, scale, tolerance = 0.0, 0.0, 0.0
    for x, y in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        wide = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
        x, y, eps = np.asarray(x).astype(wide), np.asarray(y).astype(wide), float(jnp.finfo(real_dtype(x.dtype)).eps)
        finite = np.isfinite(x) & np.isfinite(y)  # a network that is not finite is the solver's to report
        difference = max(difference, float(np.abs(np.where(finite, x - y, 0)).max(initial=0)))
        scale = max(scale, float(np.abs(np.where(finite, x, 0)).max(initial=0)))
        tolerance = max(tolerance, min(1e3 * eps, 0.05))
    return difference, scale, tolerance
