r"""What a chunked Jacobian keeps between products: nothing, or the residuals of its linearization.

The two are one map. `Recomputed` linearizes each chunk in each product; `Linearized` has done so once for all samples
and keeps what the linear part needs: arrays that depend on the samples for each chunk, the others once.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import equinox as eqx
import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jaxtyping import Array

from . import tangent_sums
from .base import Vector
from .closure import ClosedFunction, close
from .dtypes import cast_like
from .sharding import context_of_parts
from .structure import freeze, structure_of, thaw

if TYPE_CHECKING:
    from .jacobian import Jacobian


class Storage(eqx.Module):
    """The products of a Jacobian, on what is kept for them."""

    name: ClassVar[str]

    @abc.abstractmethod
    def push_forward(self, jacobian: Jacobian, vector: Vector) -> Vector:
        """``J v``: one row for each sample."""

    @abc.abstractmethod
    def pull_back(self, jacobian: Jacobian, cotangent: Vector) -> Vector:
        """``J^T y``, the transpose."""

    @abc.abstractmethod
    def gram_product(self, jacobian: Jacobian, vector: Vector) -> Vector:
        """``J^H J v``."""

    @abc.abstractmethod
    def kept_by_chunk(self) -> Any:
        """What is kept for each chunk, and so is spread over devices as the samples are."""

    @property
    def entries(self) -> Array | None:
        """All rows, by chunks, where they are kept; see `rows`."""
        return None


class Chunked(Storage):
    """A storage whose products are loops over chunks, with the derivative of the network on each.

    Its functions of a chunk take what all chunks share, and what is the chunk's own.
    """

    @abc.abstractmethod
    def shared(self, jacobian: Jacobian) -> Any:
        """What all chunks need."""

    @abc.abstractmethod
    def stacked(self, jacobian: Jacobian) -> Any:
        """What each chunk needs for itself, along a leading axis."""

    @abc.abstractmethod
    def tangent_map(self, shared: Any, chunk: Any) -> Callable[[Vector], Vector]:
        """The derivative of the network on one chunk, a linear function of a change of the parameters."""

    @abc.abstractmethod
    def cotangent_map(self, shared: Any, chunk: Any) -> Callable[[Vector], Vector]:
        """Its transpose."""

    def push_forward(self, jacobian: Jacobian, vector: Vector) -> Vector:
        """``J v``, in one loop."""
        return tangent_sums.push_forward(jacobian, vector)

    def pull_back(self, jacobian: Jacobian, cotangent: Vector) -> Vector:
        """``J^T y``, in one loop."""
        return tangent_sums.pull_back(jacobian, cotangent)

    def gram_product(self, jacobian: Jacobian, vector: Vector) -> Vector:
        """``J^H J v``, in one loop."""
        return tangent_sums.gram_product(jacobian, vector)


class Recomputed(Chunked):
    """Keeps nothing: each product evaluates the network anew."""

    name = "recompute"

    def kept_by_chunk(self) -> Any:
        """Nothing."""
        return ()

    def shared(self, jacobian: Jacobian) -> Any:
        """The network and its parameters."""
        return jacobian.network, jacobian.params

    def stacked(self, jacobian: Jacobian) -> Any:
        """The samples."""
        return jacobian.chunks.samples

    def tangent_map(self, shared: Any, chunk: Any) -> Callable[[Vector], Vector]:
        """Linearized here and now."""
        network, params = shared
        push = jax.linearize(lambda p: network(p, chunk), params)[1]
        return lambda vector: push(cast_like(vector, params))

    def cotangent_map(self, shared: Any, chunk: Any) -> Callable[[Vector], Vector]:
        """Reverse mode."""
        network, params = shared
        back = jax.vjp(lambda p: network(p, chunk), params)[1]
        return lambda cotangent: back(cotangent)[0]


class Linearized(Chunked):
    """Keeps the residuals of the linearization: no product evaluates the network again."""

    once: list[Array]
    by_chunk: list[Array]
    linear_part: ClosedFunction
    is_stacked: tuple[bool, ...] = eqx.field(static=True)
    tangents: tuple = eqx.field(static=True)
    name = "linearized"

    @classmethod
    def of(cls, jacobian: Jacobian) -> Linearized:
        """Linearize all chunks of a Jacobian."""
        nonlinear_part, linear_part, is_stacked = linearized_parts(jacobian)
        once, by_chunk = _keep(jacobian, nonlinear_part, is_stacked)
        return cls(once, by_chunk, linear_part, is_stacked, freeze(jacobian.params))

    def kept_by_chunk(self) -> Any:
        """The residuals that depend on samples."""
        return self.by_chunk

    def shared(self, jacobian: Jacobian) -> Any:
        """The residuals that depend on no sample."""
        return self.linear_part, self.once

    def stacked(self, jacobian: Jacobian) -> Any:
        """The residuals that do."""
        return self.by_chunk

    def tangent_map(self, shared: Any, chunk: Any) -> Callable[[Vector], Vector]:
        """The linear part, on kept residuals."""
        linear_part, once = shared
        once, own = iter(once), iter(chunk)
        residuals = [next(own) if stacked else next(once) for stacked in self.is_stacked]
        return lambda vector: linear_part(residuals, cast_like(vector, thaw(self.tangents)))

    def cotangent_map(self, shared: Any, chunk: Any) -> Callable[[Vector], Vector]:
        """The transpose of the linear part."""
        back = jax.linear_transpose(self.tangent_map(shared, chunk), thaw(self.tangents))
        return lambda cotangent: back(cotangent)[0]


@tangent_sums.explains
def linearized_parts(jacobian: Jacobian) -> tuple[ClosedFunction, ClosedFunction, tuple[bool, ...]]:
    """The network on one chunk cut in two: what gives residuals, what is linear, and which residuals hold samples."""
    params, chunk = structure_of(jacobian.params), jacobian.chunks.chunk_structure
    linear: Any = None

    def residuals_of(network, params, chunk):
        nonlocal linear
        push = jax.linearize(lambda p: network(p, chunk), params)[1]
        linear = jax.make_jaxpr(push)(params)
        return linear.consts

    with context_of_parts(jacobian.chunks.spread):
        nonlinear_part = close(residuals_of, jacobian.network, params, chunk, code=residuals_of)
    program, out_tree = linear.jaxpr, jax.tree.structure(jacobian.network.out_structure)

    def linear_map(residuals, vector):
        out = jaxpr_as_fun(ClosedJaxpr(program, residuals))(*jax.tree.leaves(vector))
        return jax.tree.unflatten(out_tree, out)

    with context_of_parts(jacobian.chunks.spread):
        linear_part = close(linear_map, nonlinear_part.out_structure, params, code=linear_map)
    inputs = nonlinear_part.jaxpr.invars
    of_samples = len(inputs) - len(jax.tree.leaves(chunk))
    depends = _depends(nonlinear_part.jaxpr, [False] * of_samples + [True] * (len(inputs) - of_samples))
    return nonlinear_part, linear_part, tuple(depends)


@eqx.filter_jit
@tangent_sums.explains
def _keep(jacobian, nonlinear_part, is_stacked):
    def residuals(shared, chunk, wanted):
        nonlinear_part, network, params = shared
        leaves = nonlinear_part(network, params, chunk)
        return [leaf for leaf, stacked in zip(leaves, is_stacked, strict=True) if stacked == wanted]

    shared = nonlinear_part, jacobian.network, jacobian.params
    chunks, samples = jacobian.chunks, jacobian.chunks.samples
    by_chunk = chunks.map(lambda shared, chunk: residuals(shared, chunk, True), shared, samples)

    def of_first(shared, samples):
        return residuals(shared, jax.tree.map(lambda x: x[0], samples), False)

    return chunks.run(of_first, shared, samples, result="same"), by_chunk


def _depends(jaxpr: Jaxpr, inputs: list[bool]) -> list[bool]:
    """Which outputs of a program depend on any of the marked inputs."""
    marked = {v for v, mark in zip(jaxpr.invars, inputs, strict=True) if mark}

    def mark_of(atom):
        return not isinstance(atom, Literal) and atom in marked

    for eqn in jaxpr.eqns:
        marks = [mark_of(atom) for atom in eqn.invars]
        inner = eqn.params.get("jaxpr")
        if eqn.primitive.name == "jit" and isinstance(inner, ClosedJaxpr):
            outputs = _depends(inner.jaxpr, marks)
        else:
            outputs = [any(marks)] * len(eqn.outvars)
        marked.update(v for v, mark in zip(eqn.outvars, outputs, strict=True) if mark)
    return [mark_of(atom) for atom in jaxpr.outvars]
