"""What krylov needs of a variational state: the network, its parameters, samples and weights."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
from jaxtyping import Array, PyTree
from netket.vqs import FullSumState

from krylov.operators import Jacobian


class View(NamedTuple):
    """A variational state in parts; ``apply`` is hashable."""

    apply: Callable[[Any, Array], Array]
    params: PyTree
    model_state: PyTree
    samples: Array
    weights: Array | None


def view(state: Any, weights: Any = None) -> View:
    """The parts of an MCState or a FullSumState; configurations of the latter are weighted by their probabilities."""
    # NetKet has no public name for the network with its hashable apply function; its own tensors use this one.
    parts = state._apply_fun, state.parameters, state.model_state
    if isinstance(state, FullSumState):
        return View(
            *parts, state.hilbert.all_states(), state.probability_distribution() if weights is None else weights
        )
    samples = state.samples
    return View(*parts, jax.lax.collapse(samples, 0, samples.ndim - 1), weights)


def chunk_size_of(state: Any, chunk_size: int | Literal["auto"] | None) -> int | Literal["auto"] | None:
    """The one given, else that of the state."""
    return getattr(state, "chunk_size", None) if chunk_size is None else chunk_size


def network(apply: Callable[[Any, Array], Array], model_state: PyTree, mode: str | None) -> Callable[[Any, Any], Array]:
    """Log-amplitudes of parameters and samples; only their real parts in mode ``"real"``."""

    def log_psi(params: PyTree, samples: Array) -> Array:
        out = apply({"params": params, **model_state}, samples)
        return out.real if mode == "real" else out

    return log_psi


def jacobian(
    apply: Any, params: PyTree, model_state: PyTree, samples: Array, mode: str | None, **options: Any
) -> Jacobian:
    """The centred Jacobian of log-amplitudes."""
    return Jacobian(network(apply, model_state, mode), params, samples, center=True, **options)
