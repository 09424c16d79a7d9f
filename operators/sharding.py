"""Samples spread over the devices of a mesh: each device loops over its own, and sums meet in one all-reduce."""

import contextlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, reshard, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from .structure import abstract, is_traced, join_real, ravel, real_dtype, split_real, structure_of, unravel, varies

Result = Literal["parts", "sum", "same"]


class Spread(NamedTuple):
    """The mesh, and its axes over which the first axis of the samples is spread."""

    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]

    @property
    def num_parts(self) -> int:
        """The number of parts that samples are in."""
        count = 1
        for axis in self.axes:
            count *= self.mesh.shape[axis]
        return count


def spread_of(samples: PyTree) -> Spread | None:
    """How samples are spread; None where they are not, or where JAX does not say: under jit on an Auto mesh.

    Raises:
        ValueError: leaves are spread in different ways, or are parts that a ``jax.shard_map`` keeps account of.
    """
    if any(varies(leaf) for leaf in jax.tree.leaves(samples)):
        raise ValueError(
            "Jacobian: inside jax.shard_map the derivatives of a traced network cannot say what varies.\n"
            f"  got       samples {[str(jax.typeof(leaf)) for leaf in jax.tree.leaves(samples)]}\n"
            "  Pass check_vma=False to jax.shard_map: the Jacobian is then that of the device's own samples. Or make\n"
            "  it outside from sharded samples, whose sums go over all devices."
        )
    found = {_spread_of_leaf(leaf) for leaf in jax.tree.leaves(samples)}
    if len(found) > 1:
        raise ValueError(
            "Jacobian: all sample leaves must be sharded alike along the first axis.\n"
            f"  got       {jax.tree.map(lambda leaf: str(_sharding(leaf)), samples)}"
        )
    return found.pop() if found else None


def _sharding(leaf: Any) -> Any:
    return abstract(leaf).sharding if is_traced(leaf) else getattr(leaf, "sharding", None)


def _spread_of_leaf(leaf: Any) -> Spread | None:
    sharding = _sharding(leaf)
    if not isinstance(sharding, NamedSharding) or not sharding.spec or sharding.spec[0] is None:
        return None
    axes = sharding.spec[0]
    spread = Spread(sharding.mesh, axes if isinstance(axes, tuple) else (axes,))
    return spread if spread.num_parts > 1 else None


def run_spread(spread: Spread | None, fn: Callable[..., Any], shared: Any, *stacks: Any, result: Result) -> Any:
    """``fn(shared, *stacks)`` on each device's part of the stacks.

    Args:
        spread: how the first axis of the stacks is spread; None runs ``fn`` as it is.
        fn: closes over no array.
        shared: what each device needs all of.
        stacks: arrays to be cut along the first axis.
        result: ``"parts"`` are put together along the first axis, a ``"sum"`` is taken over devices, and what is the
            ``"same"`` on each device is taken from any.
    """
    if spread is None:
        return fn(shared, *stacks)
    part = P(spread.axes)
    mesh = _as_seen_here(spread.mesh)

    def local(shared, *stacks):
        out = fn(shared, *stacks)
        return _sum_over_devices(out, spread.axes) if result == "sum" else out

    # The network was traced elsewhere, so its operations do not say what varies from device to device.
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), *(part for _ in stacks)),
        out_specs=part if result == "parts" else P(),
        check_vma=False,
    )
    return run(_reshard(shared, mesh, P()), *_reshard(stacks, mesh, part))


def _as_seen_here(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The mesh, or the context's, if that differs only in axes made Auto: inside ``jax.sharding.auto_axes``."""
    here = jax.sharding.get_abstract_mesh()
    return here if here.are_all_axes_auto and here.shape == mesh.shape else mesh


def _reshard(tree: Any, mesh: Mesh | AbstractMesh, spec: P) -> Any:
    """On Explicit axes JAX moves nothing unasked: default weights, say, which come from one device."""
    if not mesh.are_all_axes_explicit:
        return tree
    return jax.tree.map(lambda x: reshard(x, NamedSharding(mesh, spec)), tree)


def _sum_over_devices(tree: Any, axes: tuple[str, ...]) -> Any:
    """One all-reduce for each precision, however many leaves there are, real and complex."""
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(real_dtype(leaf.dtype), []).append(i)
    for members in groups.values():
        part = [leaves[i] for i in members]
        real = split_real(part)
        total = join_real(unravel(jax.lax.psum(ravel(real), axes), real), structure_of(part))
        for i, leaf in zip(members, total, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def context_of_parts(spread: Spread | None) -> contextlib.AbstractContextManager:
    """Where programs must be traced that will run on one device's part.

    JAX writes the mesh of the context into each operation and wants to find the same one where the operation runs.
    """
    return contextlib.nullcontext() if spread is None else use_abstract_mesh(AbstractMesh((), ()))


def context_of_one_device() -> contextlib.AbstractContextManager:
    """Where what lies on one device can be computed with: the mesh of ``jax.set_mesh`` wants all of its devices."""
    if jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.set_mesh(Mesh(np.empty((), object), ()))


def on_one_device(tree: Any) -> Any:
    """The part of each array that lies on the first device of this process that has one; all of it, if replicated."""

    def leaf(x):
        if not isinstance(x, jax.Array) or is_traced(x) or len(x.sharding.device_set) == 1:
            return x
        return x.addressable_data(0)

    return jax.tree.map(leaf, tree)
