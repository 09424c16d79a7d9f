"""Several right-hand sides of one operator: the front door, and the loop of the block method."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, auto_axes
from jax.sharding import PartitionSpec as P

from krylov.operators.base import LinearOperator, Vector, products
from krylov.operators.structure import abstract, check_vector, common_dtype, describe, is_traced, real_dtype, zeros

from .arguments import real_unknowns, right_hand_side, stopping
from .driver import Controls, add_shift
from .implicit import solve_implicitly
from .methods import CG
from .methods.block_cg import BlockCG
from .packing import Packing
from .precision import promote_half
from .solution import Solution, finished
from .square_system import built, check_shift, square_system
from .vectors import Space, power_of_two, safe_norm

# Below the tolerance by more than the residuals of a block usually are off: what it misses is mended column by column.
_BLOCK_AIM = 0.5


def solve_many(
    op: Any,
    b: Vector,
    *,
    shift: Any = 0.0,
    preconditioner: Any = None,
    rtol: Any = 1e-5,
    atol: Any = 0.0,
    maxiter: int | None = None,
    throw: bool = False,
) -> Solution:
    r"""Solve :math:`(A + s)\, x_j = b_j` for several right-hand sides at once by block conjugate gradients.

    A + s is hermitian positive definite. Every column profits from the Krylov spaces of all, so that there are fewer
    iterations than with `jax.vmap` of `solve`, and a product takes all columns together. Columns may depend on each
    other or be zero. One more product gives the true residual of each column, which decides; a column that the block
    recurrence has lost to rounding goes on alone. Works under jit, vmap and grad, as `solve` does.

    Args:
        op: A, anything that `solve` takes, hermitian positive definite.
        b: right-hand sides, a pytree like the operator's output with a leading axis on every leaf.
        shift: added to the operator: a scalar, or a diagonal as a pytree like one right-hand side.
        preconditioner: an operator that applies an approximate inverse, hermitian positive definite; a recipe such as
            ``krylov.Nystrom(rank=256)``, built for this operator and shift; or what its ``build`` returned, moved to
            this shift.
        rtol: relative tolerance.
        atol: absolute tolerance.
        maxiter: most iterations; default ten times the number of real unknowns.
        throw: raise `ConvergenceError` unless all have converged; under a transformation, a runtime error.

    Returns:
        A `Solution` whose fields all have a leading axis for the right-hand sides.

    Raises:
        ValueError: leading axes that differ, or what `solve` raises.
        ConvergenceError: with ``throw``, not all converged.

    Example:
        >>> import jax.numpy as jnp, krylov
        >>> A = jnp.diag(jnp.array([1.0, 2.0, 3.0]))
        >>> sol = krylov.solve_many(A, jnp.array([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0]]))
        >>> [krylov.Status(int(code)).name for code in sol.status]
        ['CONVERGED', 'CONVERGED', 'CONVERGED']

    Reference: O'Leary (1980), doi:10.1016/0024-3795(80)90247-5; Ji & Li (2017), doi:10.1007/s10543-016-0631-z.
    """
    where = "solve_many"
    b = right_hand_side(where, "b", b)
    counts = {leaf.shape[0] if leaf.ndim else None for leaf in jax.tree.leaves(b)}
    if len(counts) != 1 or None in counts or 0 in counts:
        raise ValueError(
            f"{where}: every leaf of b must have a leading axis of the same length, at least one.\n"
            f"  got       {describe(b)}\n"
            "  For one right-hand side: krylov.solve."
        )
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), b)
    op, preconditioner, recipe = square_system(where, op, preconditioner, one, shift)
    check_vector(where, "b", zeros(one), op.out_structure())
    op, preconditioner, b, _ = promote_half(op, preconditioner, b, b)
    structure = op.out_structure()
    shift = check_shift(where, shift, structure)
    preconditioner, building = built(recipe, preconditioner, op, shift)
    dtype = real_dtype(common_dtype(structure))
    controls = stopping(where, rtol, atol, maxiter, False, False, dtype, real_unknowns(structure))
    traced = any(map(is_traced, jax.tree.leaves((op, b, shift, preconditioner, controls))))
    x, outcome = _solve_all(op, shift, preconditioner, b, controls, bool(throw) and traced)
    outcome = outcome._replace(matvecs=outcome.matvecs + building)
    return finished(Solution, x, outcome, "block_cg", throw)


@eqx.filter_jit
def _solve_all(op, shift, preconditioner, b, controls, throw) -> Any:
    shardings = [abstract(leaf).sharding for leaf in jax.tree.leaves((op, shift, preconditioner, b))]
    mesh = next((s.mesh for s in shardings if s is not None), None)
    if mesh is None:
        return _solve_block(op, shift, preconditioner, b, controls, throw)
    # The recurrence mixes columns and measures them: how these are spread on the way is left to XLA, the end is not.
    arrays, rest = eqx.partition((op, shift, preconditioner, b, controls), eqx.is_array)
    whole = NamedSharding(mesh, P())
    spread = jax.tree.map(lambda x: abstract(x).sharding or whole, b)

    def solve(arrays):
        op, shift, preconditioner, b, controls = eqx.combine(arrays, rest)
        return _solve_block(op, shift, preconditioner, b, controls, throw)

    return auto_axes(solve, out_sharding=(spread, whole))(arrays)


def _solve_block(op, shift, preconditioner, b, controls, throw):
    stopped = jax.tree.map(
        lambda x: jax.lax.stop_gradient(x) if eqx.is_array(x) else x, (op, shift, preconditioner, b, controls)
    )
    guesses, iterations = _iterate(*stopped)
    limits = jnp.maximum(controls.maxiter - iterations, 0).astype(jnp.int32)

    def verify(b, limit, guess):
        """The method for one column, which begins with the true residual of the guess, and mostly ends there."""
        own = Controls(controls.rtol, controls.atol, limit, None, False)
        return solve_implicitly(CG(), op, shift, preconditioner, b, guess, jnp.asarray(True), own, True, throw)

    x, outcome = jax.vmap(verify)(b, limits, guesses)
    total = jnp.max(iterations, initial=0)
    return x, outcome._replace(iterations=iterations + outcome.iterations, matvecs=total + outcome.matvecs)


def _iterate(op: LinearOperator, shift: Any, preconditioner: LinearOperator | None, b: Vector, controls: Controls):
    """The block recurrence: solutions not verified yet, and iterations of each column."""
    space = Space.of(op.in_structure(), op.field)
    packing = Packing(jax.tree.map(lambda x: x[0], b)) if _columns(b) else Packing(b)
    pack, unpack = jax.vmap(packing.pack), jax.vmap(packing.unpack)

    def times(operator, rows):
        return pack(products(operator, unpack(rows)))

    def shifted_times(rows):
        vectors = unpack(rows)
        return pack(jax.vmap(lambda y, v: add_shift(shift, y, v))(products(op, vectors), vectors))

    norms = jax.vmap(lambda x: safe_norm(x, space.real_dtype))(b)
    units = jax.vmap(power_of_two)(norms)
    usable = jnp.isfinite(norms) & (norms > 0)

    def scaled(factors, rows):
        return jax.tree.map(lambda v: (factors.reshape(-1, *[1] * (v.ndim - 1)) * v).astype(v.dtype), rows)

    clean = jax.tree.map(lambda v: jnp.where(usable.reshape(-1, *[1] * (v.ndim - 1)), v, 0), b)
    rhs = pack(scaled(1 / units, clean))
    targets = _BLOCK_AIM * jnp.maximum(controls.rtol * (norms / units), controls.atol / units)
    # A recurrence cannot shrink its residuals by more than its digits.
    targets = jnp.maximum(targets, 0.01 * space.eps)
    state = BlockCG.start(space, rhs)
    state = state._replace(done=~usable | (norms / units <= targets))
    zero = jax.tree.map(jnp.zeros_like, rhs)
    nothing = jnp.zeros(norms.shape[0], jnp.int32)
    inverse = jnp.zeros((norms.shape[0],) * 2, space.dtype)

    def body(loop):
        state, images, inverse, count, iterations = loop
        z = state.r if preconditioner is None else times(preconditioner, state.r)
        state = BlockCG.prepare(space, state, z, images, inverse)
        images = shifted_times(state.p)
        iterations = iterations + jnp.where(state.done, 0, 1)
        state, inverse = BlockCG.advance(space, state, images, targets)
        return state, images, inverse, count + 1, iterations

    def going(loop):
        state, _, _, count, _ = loop
        return ~jnp.all(state.done) & ~state.broken & (count < controls.maxiter)

    first = (state, zero, inverse, jnp.asarray(0, jnp.int32), nothing)
    state, _, _, _, iterations = jax.lax.while_loop(going, body, first)
    return scaled(units, unpack(state.x)), iterations


def _columns(b: Vector) -> int:
    return max((leaf.shape[0] for leaf in jax.tree.leaves(b)), default=0)
