"""A driver of variational Monte Carlo that forms no matrix, for SR, minSR and SPRING alike."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree
from netket.driver import AbstractVariationalDriver
from netket.stats import Stats, statistics
from netket.utils import struct
from netket.vqs import FullSumState

from krylov.damping import as_arrays
from krylov.methods import Method
from krylov.natural_gradient import check_recycler, natural_gradient
from krylov.operators.jacobian import StorageName
from krylov.operators.structure import is_complex
from krylov.preconditioners import Preconditioner
from krylov.recycler import Recycler, RecyclerState
from krylov.routes import check_route

from .qgt import check_mode
from .solvers import facts
from .states import chunk_size_of, network, view


class VMC_MatrixFree(AbstractVariationalDriver):  # noqa: N801  # named as NetKet names its own
    r"""Energy minimisation by stochastic reconfiguration, minSR or SPRING without any dense matrix.

    The step is `krylov.natural_gradient`, solved by a Krylov method to a tolerance of the true residual, on parameters
    or on samples. Memory is that of a few vectors and one chunk of samples, whatever the numbers of parameters and
    samples. The conventions are those of ``netket.driver.VMC_SR``: the same update for the same ``diag_shift``.
    `MCState` and `FullSumState`; real, complex and mixed parameters. Logs ``info``: iterations, true residual, whether
    it converged. Nothing is traced again from step to step.

    Args:
        hamiltonian: the Hamiltonian.
        optimizer: an optax optimizer, ``optax.sgd`` say.
        variational_state: the state.
        diag_shift: the shift, or a schedule: a function of the step.
        diag_scale: multiple of the exact diagonal added to the shift, or a schedule, or None.
        momentum: of SPRING, between 0 and 1, or a schedule; None for none.
        route: ``"parameters"`` (SR), ``"samples"`` (minSR), ``"least_squares"`` or ``"auto"``.
        method: as in `krylov.solve`.
        preconditioner: a recipe such as ``krylov.Nystrom(64)``, built in each step; or None.
        recycler: solves in place of ``method`` and ``preconditioner``, with what the steps before have learnt; that is
            not written to checkpoints.
        rtol: relative tolerance of the linear system.
        maxiter: most iterations.
        chunk_size: samples at a time in the derivatives, or ``"auto"``, see `krylov.Jacobian`; default that of
            the state.
        mode: ``"real"`` leaves out the imaginary parts of log-amplitudes and local energies.
        holomorphic: promise that the network is holomorphic. Not needed.
        storage: what is kept between products; see `krylov.Jacobian`.

    Raises:
        ValueError: an unknown route or mode; a recycler beside a method or a preconditioner.

    Reference: Sorella (1998), doi:10.1103/PhysRevLett.80.4558; Chen & Heyl (2024), doi:10.1038/s41567-024-02566-1;
    Goldshlager, Abrahamsen & Lin (2024), doi:10.1016/j.jcp.2024.113351.
    """

    diag_shift: Any = struct.field(serialize=False)
    diag_scale: Any = struct.field(serialize=False)
    momentum: Any = struct.field(serialize=False)
    info: Any = struct.field(serialize=False, default=None)
    _ham: Any = struct.field(pytree_node=False, serialize=False)
    _sparse: Any = struct.field(pytree_node=False, serialize=False, default=None)
    _settings: Any = struct.field(pytree_node=False, serialize=False)
    _old_updates: PyTree = None
    _recycler_state: RecyclerState | None = struct.field(serialize=False, default=None)

    def __init__(
        self,
        hamiltonian: Any,
        optimizer: Any,
        *,
        variational_state: Any,
        diag_shift: Any,
        diag_scale: Any = None,
        momentum: Any = None,
        route: str = "auto",
        method: str | Method = "auto",
        preconditioner: Preconditioner | None = None,
        recycler: Recycler | None = None,
        rtol: float = 1e-5,
        maxiter: int | None = None,
        chunk_size: int | Literal["auto"] | None = None,
        mode: str | None = None,
        holomorphic: bool = False,
        storage: StorageName = "recompute",
    ):
        check_mode("VMC_MatrixFree", mode)
        check_route("VMC_MatrixFree", route)
        check_recycler("VMC_MatrixFree", recycler, route, method, preconditioner)
        super().__init__(variational_state, optimizer, minimized_quantity_name="Energy")
        self._ham = hamiltonian
        self.diag_shift, self.diag_scale, self.momentum = diag_shift, diag_scale, momentum
        self._settings = dict(
            route=route,
            method=method,
            preconditioner=preconditioner,
            recycler=recycler,
            storage=storage,
            rtol=float(rtol),
            maxiter=maxiter,
            chunk_size=chunk_size_of(variational_state, chunk_size),
            mode=mode,
            holomorphic=bool(holomorphic),
        )
        # Made here rather than in the first step, so that a new driver can take it from a checkpoint.
        if momentum is not None:
            self._old_updates = jax.tree.map(jnp.zeros_like, self.state.parameters)

    def compute_loss_and_update(self) -> tuple[Stats, PyTree]:
        """The energy and the step."""
        self.state.reset()
        energies, self._loss_stats = self._local_energies()
        parts = view(self.state)
        shift, scale, momentum = (as_arrays(self._now(x)) for x in (self.diag_shift, self.diag_scale, self.momentum))
        arguments = *parts[1:], energies, shift, scale, momentum, self._old_updates
        recycler = self._settings["recycler"]
        if recycler is not None and self._recycler_state is None:
            # Traced only, for the space: so the step compiles once.
            step_of = functools.partial(_step, parts.apply, **self._settings)
            traced: Any = jax.eval_shape(step_of, *arguments, None)[2]
            self._recycler_state = recycler.start_on(traced.preconditioner.coordinates)
        step, self.info, self._recycler_state = _step(parts.apply, *arguments, self._recycler_state, **self._settings)
        if self.momentum is not None:
            self._old_updates = step
        return self._loss_stats, step

    def _now(self, scheduled: Any) -> Any:
        return scheduled(self.step_count) if callable(scheduled) else scheduled

    def _local_energies(self) -> tuple[Array, Stats]:
        state: Any = self.state
        if not isinstance(state, FullSumState):
            energies = state.local_estimators(self._ham)
            return energies, statistics(energies)
        if self._sparse is None:
            self._sparse = self._ham.to_sparse()
        psi = state.to_array()
        applied = self._sparse @ psi
        mean = jnp.vdot(psi, applied)
        variance = jnp.sum(jnp.abs(applied - mean * psi) ** 2)
        # Where psi vanishes so does the weight, and what the quotient is has no effect.
        energies = jnp.where(psi == 0, 0, applied / jnp.where(psi == 0, 1, psi))
        facts_of_mean: dict[str, Any] = dict(mean=mean, error_of_mean=0.0, variance=variance)
        return energies, Stats(**facts_of_mean)

    @property
    def energy(self) -> Stats:
        """The energy of the last step."""
        return self._loss_stats

    def _log_additional_data(self, log_dict: dict) -> None:
        super()._log_additional_data(log_dict)
        if self.info is not None:
            log_dict["info"] = self.info

    def __repr__(self) -> str:
        return f"VMC_MatrixFree(step_count={self.step_count}, state={self.state})"


_SETTINGS = (
    *("route", "method", "preconditioner", "recycler", "rtol", "maxiter"),
    *("chunk_size", "mode", "holomorphic", "storage"),
)


@functools.partial(jax.jit, static_argnames=("apply", *_SETTINGS))
def _step(
    apply,
    params,
    model_state,
    samples,
    weights,
    energies,
    shift,
    scale,
    momentum,
    previous,
    recycler_state,
    *,
    mode,
    **options,
):
    log_psi = network(apply, model_state, mode)
    out = jax.eval_shape(log_psi, params, samples)
    # NetKet's gradient is twice the covariance of log-derivatives with local energies.
    values = 2 * energies.reshape(-1)
    step, solution = natural_gradient(
        log_psi,
        params,
        samples,
        (values if is_complex(out) else values.real).astype(out.dtype),
        shift=shift,
        diag_scale=scale,
        mu=0.0 if momentum is None else momentum,
        previous=previous,
        weights=weights,
        recycler_state=recycler_state,
        **options,
    )
    return step, facts(solution), solution.recycler_state
