r"""The natural gradient, by the cheapest of the routes that lead to it.

The step minimises :math:`\|J\,dp - e\|^2 + \langle dp - \mu\,p, D (dp - \mu\,p)\rangle` with J the Jacobian of the
network, e the values, D the damping and p the step before. On parameters that is :math:`(S + D)\,dp = J^H e + \mu D p`,
on samples :math:`dp = \mu p + D^{-1} J^H (J D^{-1} J^H + 1)^{-1} (e - \mu J p)`.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
from jaxtyping import PyTree

from krylov.operators import Jacobian, LinearOperator
from krylov.operators.base import Vector
from krylov.operators.jacobian import StorageName
from krylov.operators.metric import MetricGramOperator

from .damping import as_arrays, make_damping, scaled
from .lstsq import lstsq
from .methods import Method
from .parameters import like_params, trained_vector
from .recycler import Recycler, RecyclerState
from .routes import choose_route
from .solution import Solution
from .solve import solve


class NaturalGradientSolution(Solution):
    """How the linear system of a natural-gradient step was solved.

    Its ``x`` is the unknown of the route: on parameters the step itself, on samples a vector of them, in least squares
    what is added to the step before. There ``residual_norm`` is what the least-squares problem leaves.

    Attributes:
        route: ``"parameters"``, ``"samples"`` or ``"least_squares"``.
        reason: why this route was taken.
        recycler_state: for the next step, with a ``recycler``; else None.
    """

    route: str = eqx.field(static=True)
    reason: str = eqx.field(static=True)
    recycler_state: RecyclerState | None = None

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}; route {self.route}: {self.reason})"


def natural_gradient(
    f: Callable[[Any, Any], Any],
    params: PyTree,
    samples: PyTree,
    values: PyTree,
    *,
    shift: Any,
    diag_scale: Any = None,
    route: str = "auto",
    method: str | Method = "auto",
    preconditioner: Any = None,
    recycler: Recycler | None = None,
    recycler_state: RecyclerState | None = None,
    x0: Vector | None = None,
    mu: Any = 0.0,
    previous: PyTree | None = None,
    center: bool = True,
    weights: Any = None,
    chunk_size: int | Literal["auto"] | None = "auto",
    trainable: Any = None,
    holomorphic: bool = False,
    precision: str | None = "highest",
    storage: StorageName = "recompute",
    compute_dtype: Any = None,
    accumulate_dtype: Any = None,
    vector_dtype: Any = None,
    **options: Any,
) -> tuple[PyTree, NaturalGradientSolution]:
    r"""The natural-gradient step :math:`dp = (J^H J + \lambda)^{-1} J^H e` of a network, never forming a matrix.

    J is the `Jacobian` of ``f`` over the samples and e the ``values`` per sample, both weighted and centred. With local
    energies as values this is stochastic reconfiguration, taken on samples it is minSR; with ``-1j`` times the local
    energies it is the velocity of time-dependent variational Monte Carlo. Subtract a multiple of it from ``params`` to
    go downhill. Real and complex parameters, holomorphic networks and others, are all right as they are.

    The routes solve for the same step to the tolerance of their own systems:

    - ``"parameters"``: :math:`(J^H J + \lambda)\,dp = J^H e`, one pass over the samples a product;
    - ``"samples"``: :math:`dp = J^H z`, :math:`(J J^H + \lambda)\,z = e`, vectors as long as the outputs. Needs a
      positive shift for every parameter, as least squares does where the shift is no single number;
    - ``"least_squares"``: :math:`\min \|J\,dp - e\|^2 + \lambda\|dp\|^2` by `lstsq`, where the condition is not
      squared: for small shifts and many digits. Never chosen by itself.

    ``"auto"`` takes the side that the preconditioner, the recycler's state or the first guess belongs to. Else, with
    several chunks it takes parameters, where a product makes one pass instead of two; with one chunk, where products
    cost the same, and for the dense methods, the side with fewer unknowns. With a shift known to be zero, parameters.

    Args:
        f: ``f(params, samples)``, sample axis first: log-amplitudes, say.
        params: pytree; leaves that are no floating-point arrays take no part.
        samples: array or pytree of arrays, sample axis first.
        values: per sample, like the output of ``f``; real ones are taken where that is complex.
        shift: not negative; a scalar or a pytree like ``params`` with a scalar or an array for each leaf.
        diag_scale: add this multiple of the diagonal of :math:`J^H J` to the shift; the diagonal is exact, from
            per-sample gradients.
        route: ``"auto"``, ``"parameters"``, ``"samples"`` or ``"least_squares"``.
        method: as in `solve`; as in `lstsq` for least squares.
        preconditioner: as in `solve`, for the operator of the route; a recipe, such as ``krylov.Nystrom(64)``, is built
            in each call.
        recycler: solves in place of ``method`` and ``preconditioner``, with what the steps before have learnt.
        recycler_state: that of the solution of the step before; None in the first step. To have it before that, in a
            loop under ``jax.lax.scan`` say: ``recycler.start(op)`` with the operator of the route,
            `quantum_geometric_tensor` or `neural_tangent_kernel`.
        x0: first guess for the unknown of the route: the ``x`` of a solution.
        mu: momentum of SPRING, between 0 and 1: the step is drawn to ``mu`` times the ``previous`` one where the
            samples say nothing.
        previous: the step before, as it was returned; zeros to begin with. Without it there is no momentum.
        center: subtract the weighted means of rows and values.
        weights: ``(N,)``, not negative; default all equal.
        chunk_size: samples at a time; need not divide N. See `Jacobian`: ``"auto"`` takes what memory allows, all at
            once where they are few; None takes all.
        trainable: a pytree of bools or a function of a leaf; False freezes. See `Jacobian`.
        holomorphic: promise that ``f`` is holomorphic in complex parameters. Needed by no route.
        precision: matrix multiplication precision of ``f``; see `Jacobian`.
        storage: what is kept between products; see `Jacobian`.
        compute_dtype: precision of the network; this and the two that follow as for `Jacobian`.
        accumulate_dtype: precision of sums over samples.
        vector_dtype: precision of the vectors, and so of the solve.
        options: ``rtol``, ``atol``, ``maxiter``, ``history``, ``progress``, ``throw`` of `solve`.

    Returns:
        The step, with the tree, shapes and dtypes of ``params``: zero where frozen, None where a leaf is no
        floating-point array. And the `Solution` of the system that was solved, with ``route`` and ``reason``.

    Raises:
        ValueError: an unknown route, a negative or complex shift, one of zero where the route divides by it, or
            whatever does not fit.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> log_psi = lambda params, x: jnp.log(jnp.cosh(x @ params)).sum(-1)
        >>> params = 0.1 * jax.random.normal(jax.random.key(0), (4, 8))
        >>> spins = jax.random.rademacher(jax.random.key(1), (100, 4), float)
        >>> energies = spins[:, 0] * spins[:, 1]
        >>> step, solution = krylov.natural_gradient(log_psi, params, spins, energies, shift=1e-2)
        >>> step.shape, solution.route, bool(solution.converged)
        ((4, 8), 'parameters', True)

    Reference: Sorella (1998), doi:10.1103/PhysRevLett.80.4558. Samples: Chen & Heyl (2024),
    doi:10.1038/s41567-024-02566-1. SPRING: Goldshlager, Abrahamsen & Lin (2024), doi:10.1016/j.jcp.2024.113351.
    """
    J = Jacobian(
        f,
        params,
        samples,
        weights=weights,
        center=center,
        chunk_size=chunk_size,
        trainable=trainable,
        holomorphic=holomorphic,
        precision=precision,
        storage=storage,
        compute_dtype=compute_dtype,
        accumulate_dtype=accumulate_dtype,
        vector_dtype=vector_dtype,
    )
    damping = make_damping("natural_gradient", J, shift, diag_scale)
    before = None
    if previous is not None:
        before = trained_vector("natural_gradient", "previous", previous, J.in_structure())
        before = scaled(as_arrays(mu), before)
    check_recycler("natural_gradient", recycler, route, method, preconditioner, recycler_state)
    route, reason = choose_route(J, route, method, preconditioner, recycler_state, x0, damping)
    e = J.sample_vector(values)
    if route == "least_squares":
        step, solution = _by_least_squares(J, e, damping, before, method, preconditioner, x0, options)
    else:
        solver = _Solver(method, preconditioner, recycler, recycler_state, options)
        on_side = _on_parameters if route == "parameters" else _on_samples
        step, solution, recycler_state = on_side(J, e, damping, before, solver, x0)
    fields = {name: getattr(solution, name) for name in Solution.__dataclass_fields__}
    solution = NaturalGradientSolution(**fields, route=route, reason=reason, recycler_state=recycler_state)
    return like_params(step, J.in_structure(), params), solution


class _Solver(NamedTuple):
    """How the square system of a step is solved."""

    method: str | Method
    preconditioner: Any
    recycler: Recycler | None
    state: RecyclerState | None
    options: dict[str, Any]

    def __call__(
        self, op: LinearOperator, b: Vector, shift: Any, x0: Vector | None
    ) -> tuple[Solution, RecyclerState | None]:
        """Solve, and what to carry to the next step."""
        if self.recycler is None:
            preconditioner = self.preconditioner
            return solve(op, b, self.method, shift=shift, preconditioner=preconditioner, x0=x0, **self.options), None
        state = self.recycler.start(op) if self.state is None else self.state
        return self.recycler.solve(op, b, state, shift=shift, x0=x0, **self.options)


def _on_parameters(J, e, damping, before, solver: _Solver, x0):
    S, rhs, shift = J.gram(), J.H.mv(e), damping.shift
    if before is not None:
        rhs = _add(rhs, damping.times(before))
        warm = solver.recycler is not None and solver.recycler.warm_start
        x0 = before if x0 is None and not warm else x0
    if shift is None or (solver.recycler is not None and damping.operator is not None):
        S, shift = S + damping.operator, 0.0
    solution, state = solver(S, rhs, shift, x0)
    return solution.x, solution, state


def _on_samples(J, e, damping, before, solver: _Solver, x0):
    if before is not None:
        e = _subtract(e, J.mv(before))
    if damping.operator is None:
        T, shift, inverse = J.cogram(), damping.shift, None
    else:
        inverse = damping.inverse()
        T, shift = MetricGramOperator(J.H, inverse), 1.0
    solution, state = solver(T, e, shift, x0)
    step = J.H.mv(_as(e, solution.x))
    if inverse is not None:
        step = inverse.mv(step)
    return step if before is None else _add(step, before), solution, state


def _by_least_squares(J, e, damping, before, method, preconditioner, x0, options):
    if preconditioner is not None:
        raise ValueError("natural_gradient: the route by least squares takes no preconditioner; leave it out.")
    if before is not None:
        e = _subtract(e, J.mv(before))
    op, root = J, None
    if damping.operator is None:
        scalar = damping.shift**0.5
    else:
        root, scalar = damping.inverse(0.5), 1.0
        op = J @ root
    if isinstance(method, str) and method == "auto":
        method = "lsmr"
    solution = lstsq(op, e, method, damping=scalar, x0=x0, **options)
    step = _as(before if before is not None else J.in_structure(), solution.x)
    if root is not None:
        step = root.mv(step)
    return step if before is None else _add(step, before), solution


@eqx.filter_jit
def _add(x, y):
    return jax.tree.map(lambda a, b: (a + b).astype(a.dtype), x, y)


@eqx.filter_jit
def _subtract(x, y):
    return jax.tree.map(lambda a, b: (a - b).astype(a.dtype), x, y)


@eqx.filter_jit
def _as(like, vector):
    """Half precision is solved in single."""
    return jax.tree.map(lambda x, y: y.astype(x.dtype), like, vector)


def check_recycler(
    where: str, recycler: Any, route: str, method: str | Method, preconditioner: Any, state: Any = None
) -> None:
    """Refuse what a recycler does not go with.

    Raises:
        ValueError: another method or preconditioner, or a route that it does not solve.
        TypeError: it is no recycler.
    """
    if recycler is None:
        if state is not None:
            raise ValueError(f"{where}: recycler_state without its recycler; pass both.")
        return
    if not isinstance(recycler, Recycler):
        raise TypeError(f"{where}: recycler must be a krylov.Recycler, not {type(recycler).__name__}.")
    if route == "least_squares":
        raise ValueError(
            f"{where}: the route by least squares takes no recycler.\n"
            "  Leave it out, or take route='parameters' or 'samples'."
        )
    if preconditioner is not None:
        raise ValueError(
            f"{where}: a recycler brings its own preconditioner.\n  got       preconditioner={preconditioner!r}\n"
            "  Give its recipe to the recycler: krylov.Recycler(recipe)."
        )
    if method not in ("auto", recycler.method):
        raise ValueError(
            f"{where}: a recycler brings its own method.\n"
            f"  got       method={method!r}\n  expected  'auto' or {recycler.method!r}\n"
            "  Give it to the recycler: krylov.Recycler(method=...)."
        )
