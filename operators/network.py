"""The network of a Jacobian as a traced program: for some samples at a time, and for many from one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .chunks import Chunks
from .closure import ClosedFunction, close, traceable
from .linearization import explained
from .real_factors import real_factors_apart
from .sharding import context_of_parts
from .structure import Structure, all_complex, describe, size_of, structure_of


def trace_network(
    network: Callable[[Any, Any], PyTree], f: Callable, params: PyTree, chunks: Chunks, count: int, precision: Any
) -> ClosedFunction:
    """The network on so many samples at a time.

    Args:
        network: the network of trained parameters and samples.
        f: the user's function in it, whose code tells programs apart.
        params: trained parameters.
        chunks: the samples.
        count: how many at a time.
        precision: as in `Jacobian`.

    Raises:
        ValueError: outputs whose first axis is not that of the samples.
    """
    chunk = chunks.structure(count)
    try:
        with (
            traceable("Jacobian", "f"),
            context_of_parts(chunks.spread),
            jax.default_matmul_precision(precision) if precision is not None else contextlib.nullcontext(),
            explained(network, params, chunk, name="Jacobian: f"),
        ):
            closed = close(network, structure_of(params), chunk, code=f, rewrite=real_factors_apart)
    except Exception as error:
        error.add_note(
            f"Jacobian: while tracing f for {count} of {chunks.num_samples} samples at a time. f must take "
            "any number of samples along the first axis; pass an array shaped like all samples as a sample leaf."
        )
        raise
    for leaf in jax.tree.leaves(closed.out_structure):
        if leaf.ndim == 0 or leaf.shape[0] != count:
            raise ValueError(
                "Jacobian: f must return arrays whose first axis is the sample axis.\n"
                f"  got       {describe(closed.out_structure)} for {count} samples\n"
                "  A function of one sample becomes one of many with jax.vmap(f, in_axes=(None, 0))."
            )
    return closed


def check_outputs(out: Structure, params: PyTree, holomorphic: bool) -> None:
    """Refuse outputs that have no derivative, or not the one promised.

    Raises:
        ValueError: no number, no floating-point number, or real ones with a holomorphic promise.
    """
    if size_of(out) == 0:
        raise ValueError(f"Jacobian: f returns no number.\n  got       {describe(out)}")
    for leaf in jax.tree.leaves(out):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(f"Jacobian: f must return floating-point arrays.\n  got       {describe(out)}")
    if holomorphic and not (all_complex(structure_of(params)) and all_complex(out)):
        raise ValueError(
            "Jacobian: holomorphic=True needs complex parameters and complex outputs only.\n"
            f"  params    {describe(params)}\n  output    {describe(out)}\n"
            "  Leave it out: all products are right without it."
        )


def many_from_one(network_of_one: ClosedFunction, params: PyTree, chunks: Chunks) -> ClosedFunction:
    """The network on a chunk, from the network on one sample."""

    def many(params, chunk):
        def one(sample):
            out = network_of_one(params, jax.tree.map(lambda x: x[None], sample))
            return jax.tree.map(lambda y: y[0], out)

        return jax.vmap(one)(chunk)

    with context_of_parts(chunks.spread):
        return close(many, structure_of(params), chunks.chunk_structure, code=many)
