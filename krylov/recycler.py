"""A sequence of slowly changing systems: what one solve has learnt of the spectrum serves the next."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from krylov.operators.base import LinearOperator, Vector
from krylov.operators.structure import describe, same_structure, zeros

from .coordinates import Coordinates, coordinates_of
from .preconditioners import Nystrom, SpectralInverse
from .preconditioners.base import check_shift, without_derivatives
from .preconditioners.nystrom import rows_of
from .solution import Solution
from .solve import solve


class RecyclerState(eqx.Module):
    """What is carried from one solve to the next; a pytree of fixed shapes, for jit and scan.

    Attributes:
        preconditioner: of rank zero at first and while it does not pay.
        solution: the last one.
        fresh: iterations of the first solve after the preconditioner was built or refreshed.
        plain: iterations of a solve without preconditioner, estimated until ``measured``.
        measured: whether ``plain`` is the count of a real solve.
        excess: iterations beyond ``fresh`` since then.
        spent: products since then, those of building among them.
        solves: how many solves they were for.
        pause: solves to come without a preconditioner.
        steps: solves so far.
    """

    preconditioner: SpectralInverse
    solution: Vector
    fresh: Int[Array, ""]
    plain: Float[Array, ""]
    measured: Bool[Array, ""]
    excess: Int[Array, ""]
    spent: Int[Array, ""]
    solves: Int[Array, ""]
    pause: Int[Array, ""]
    steps: Int[Array, ""]


class Recycler(eqx.Module):
    r"""Solves a sequence of slowly changing systems with one Nystrom preconditioner, kept and refreshed when it pays.

    A preconditioner never changes the answer, however stale: each solve stops on the true residual of its own system.
    A stale one costs iterations. Once these sum up to the products of a refresh, it is refreshed, with its own
    eigenvectors as test vectors, which costs ``rank`` products and is better than building anew. So the products spent
    are at most about twice those of the best moments to refresh. If a period from refresh to refresh seems to have cost
    more products than plain solves would have, one solve without a preconditioner measures that; if it is so, the
    preconditioner is dropped and the next ``pause`` solves do without.

    Args:
        preconditioner: the recipe. A smaller rank than for a single solve is often best.
        method: a method for hermitian positive systems.
        warm_start: begin each solve from the last solution. Where the samples change, as in a Monte Carlo run, this
            has been seen to cost iterations.
        pause: solves without preconditioner after one that did not pay.

    Example:
        >>> op = krylov.operators.MatrixOperator(jnp.diag(1.0 / jnp.arange(1, 201) ** 2), positive=True)
        >>> recycler = krylov.Recycler(krylov.Nystrom(rank=20))
        >>> state = recycler.start(op)
        >>> for _ in range(3):
        ...     sol, state = recycler.solve(op, jnp.ones(200), state, shift=1e-3)
        >>> bool(sol.converged), int(state.preconditioner.report.rank)
        (True, 20)

    Reference: keeping a preconditioner over a sequence, Morales & Nocedal (2000), doi:10.1137/S1052623497327854;
    when to renew, Karlin, Manasse, Rudolph & Sleator (1988), doi:10.1007/BF01762111.
    """

    preconditioner: Nystrom
    method: str = eqx.field(static=True)
    warm_start: bool = eqx.field(static=True)
    pause: int = eqx.field(static=True)

    def __init__(
        self,
        preconditioner: Nystrom | None = None,
        *,
        method: str = "cg",
        warm_start: bool = False,
        pause: int = 10,
    ):
        self.preconditioner = Nystrom(rank=64) if preconditioner is None else preconditioner
        if not isinstance(self.preconditioner, Nystrom):
            raise TypeError(
                f"Recycler: the preconditioner must be a krylov.Nystrom, which can be refreshed.\n"
                f"  got       {type(preconditioner).__name__}"
            )
        self.method, self.warm_start, self.pause = method, bool(warm_start), int(pause)

    def start(self, op: LinearOperator) -> RecyclerState:
        """The state before the first solve.

        Args:
            op: an operator on the same vectors as those to come, over the same field.
        """
        return self.start_on(coordinates_of(op))

    def start_on(self, coordinates: Coordinates) -> RecyclerState:
        """The state before the first solve, where the space is known and the operator is not made yet.

        Args:
            coordinates: those of the space, ``state.preconditioner.coordinates`` of a state that was traced, say.
        """
        rows, real = rows_of(self.preconditioner, coordinates.structure, coordinates.field), coordinates.real_dtype
        # Distinct arrays: a state may be donated.
        number, count = lambda: jnp.zeros((), real), lambda: jnp.zeros((), jnp.int32)
        empty = SpectralInverse(
            basis=jnp.zeros((rows, coordinates.size), coordinates.dtype),
            eigenvalues=jnp.ones(rows, real),
            rest=number() + 1,
            shift=number(),
            rank=count(),
            matvecs=count(),
            coordinates=coordinates,
        )
        return RecyclerState(
            preconditioner=empty,
            solution=zeros(coordinates.structure),
            fresh=count(),
            plain=number(),
            measured=jnp.zeros((), bool),
            excess=count(),
            spent=count(),
            solves=count(),
            pause=count(),
            steps=count(),
        )

    def solve(
        self, op: LinearOperator, b: Vector, state: RecyclerState, *, shift: Any = 0.0, **options: Any
    ) -> tuple[Solution, RecyclerState]:
        """Solve ``(A + shift) x = b``, and what to carry on.

        Args:
            op: hermitian positive.
            b: right-hand side.
            state: from `start` or the solve before.
            shift: a real number.
            options: as for `krylov.solve`: ``rtol``, ``atol``, ``maxiter``, ``throw``; ``x0`` goes before the warm
                start.

        Returns:
            The `Solution`, whose ``matvecs`` count the products of building too, and the new state.

        Raises:
            ValueError: a state of another operator, and as `krylov.solve` does.
        """
        before = state.preconditioner
        if not same_structure(before.in_structure(), op.in_structure()) or before.field != op.field:
            raise ValueError(
                "Recycler.solve: the state is of another operator.\n"
                f"  got       {describe(before.in_structure())}, {before.field} field\n"
                f"  expected  {describe(op.in_structure())}, {op.field} field\n"
                "  Begin with state = recycler.start(op)."
            )
        shift = check_shift("Recycler.solve", shift, before.coordinates)
        state = without_derivatives(state)
        kept, applied, due, used = _renewed(self, *without_derivatives((op, state, shift)))
        if self.warm_start and options.get("x0") is None:
            options["x0"] = state.solution
        solution = solve(op, b, self.method, shift=shift, preconditioner=applied, **options)
        return _carried(self, solution, state, kept, due, used)


@eqx.filter_jit
def _renewed(recycler, op, state, shift):
    """The preconditioner to keep, that for the next solve, whether it was refreshed, and whether there is one."""
    old = state.preconditioner.with_shift(shift)
    due = (state.pause == 0) & ((old.rank == 0) | (state.excess >= old.matvecs))
    doubtful = due & (old.rank > 0) & (state.spent > state.plain * state.solves)
    due = due & ~doubtful
    key = jax.random.fold_in(jax.random.key(0), state.steps)
    kept = _where(doubtful & state.measured, _nothing_of(old), old)
    new = jax.lax.cond(due, lambda: recycler.preconditioner.refresh(op, kept, key), lambda: kept)
    applied = _where(doubtful, _nothing_of(old), new)
    return new, applied, due, applied.rank > 0


def _nothing_of(built: SpectralInverse) -> SpectralInverse:
    """A multiple of the identity."""
    ones, zeros_ = jnp.ones_like, jnp.zeros_like
    return eqx.tree_at(
        lambda b: (b.eigenvalues, b.rest, b.rank, b.matvecs),
        built,
        (ones(built.eigenvalues), ones(built.rest), zeros_(built.rank), zeros_(built.matvecs)),
    )


def _where(condition, a, b):
    return jax.tree.map(lambda x, y: x if x is y else jnp.where(condition, x, y), a, b)


@eqx.filter_jit
def _carried(recycler, solution, state, preconditioner, due, used):
    """The state after a solve, and the solution with the products of building counted in."""
    iterations, real = solution.iterations, state.plain.dtype
    matvecs = solution.matvecs + jnp.where(due, preconditioner.matvecs, 0)
    fresh = jnp.where(due, iterations, jnp.minimum(state.fresh, iterations))
    # Iterations go like the root of the condition number, roughly.
    report = preconditioner.report
    ratio = jnp.sqrt(jnp.maximum(report.condition_before / report.condition_after, 1))
    estimate = jnp.where(jnp.isfinite(ratio), ratio, 1).astype(real) * iterations
    plain = jnp.where(due & ~state.measured, estimate, state.plain)
    dropped = (preconditioner.rank == 0) & (state.preconditioner.rank > 0)
    # A solution that is not finite would spoil the next guess.
    finite = jnp.isfinite(solution.residual_norm)
    new = RecyclerState(
        preconditioner=preconditioner,
        solution=jax.tree.map(lambda a, b: jnp.where(finite, a, b).astype(b.dtype), solution.x, state.solution),
        fresh=jnp.where(used, fresh, state.fresh).astype(jnp.int32),
        plain=jnp.where(used, plain, iterations).astype(real),
        measured=state.measured | ~used,
        excess=jnp.where(due, 0, state.excess + jnp.where(used, iterations - fresh, 0)).astype(jnp.int32),
        spent=jnp.where(due, matvecs, state.spent + jnp.where(used, matvecs, 0)),
        solves=jnp.where(due, 1, state.solves + used).astype(jnp.int32),
        pause=jnp.where(dropped, recycler.pause, jnp.maximum(state.pause - 1, 0)).astype(jnp.int32),
        steps=state.steps + 1,
    )
    return eqx.tree_at(lambda s: s.matvecs, solution, matvecs), without_derivatives(new)
