"""One step by every route against dense algebra on real parts, and what a user's own loop needs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import krylov
from krylov.operators import planning, split_real
from tests import networks, problems
from tests.krylov.test_recompilation import compiling

N = 20


def real_network(params, x):
    return jnp.tanh(x @ params["a"]) @ params["b"]


def complex_output(params, x):
    """Real parameters, complex output: the common case of transformers."""
    hidden = jnp.tanh(x @ params["a"])
    return jax.lax.complex(hidden @ params["b"], jnp.sin(hidden.sum(-1)))


def holomorphic(params, x):
    return networks.log_cosh(x @ params["a"]) @ params["b"]


def _params(dtype, seed=0):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, 5, 4)) / 2, rng.normal(size=(2, 4)) / 2
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return {"a": jnp.asarray(a[0] + 1j * a[1], dtype), "b": jnp.asarray(b[0] + 1j * b[1], dtype)}
    return {"a": jnp.asarray(a[0], dtype), "b": jnp.asarray(b[0], dtype)}


REAL = jnp.result_type(float)
COMPLEX = jnp.result_type(complex)
NETWORKS = {
    "real": (real_network, _params(REAL)),
    "complex output": (complex_output, _params(REAL)),
    "mixed": (networks.mixed, networks.mixed_params(REAL)),
    "holomorphic": (holomorphic, _params(COMPLEX)),
}
SAMPLES = networks.samples(N, REAL)
WEIGHTS = np.random.default_rng(3).uniform(0.2, 1, N)
# The residual cannot fall below the spacing of numbers times the condition, which is 1e3 at a shift of 0.01.
TIGHT, SHIFT = (2e-12, 1e-2) if jax.config.jax_enable_x64 else (1e-5, 0.1)


def values_of(f, params, seed=4):
    out = jax.eval_shape(f, params, SAMPLES)
    return jnp.asarray(problems.random_vector(out.dtype, N, seed=seed))


def flat(tree):
    """Real parts of all leaves, then imaginary parts of the complex ones, in double precision."""
    return np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(split_real(tree))])


def dense_system(f, params, values, weights=WEIGHTS, center=True):
    """Rows of the Jacobian and the values, weighted, centred and on real parts, by a dense derivative."""
    reals = split_real(params)

    def outputs(reals):
        out = f(krylov.operators.join_real(reals, params), SAMPLES)
        return jnp.stack([out.real, out.imag], 1) if jnp.iscomplexobj(out) else out[:, None]

    rows = jax.jacobian(outputs)(reals)
    pairs = zip(*map(jax.tree.leaves, (rows, reals)))
    rows = np.concatenate([np.asarray(r, np.float64).reshape(N, -1, p.size) for r, p in pairs], 2)
    values = np.asarray(values)
    values = np.stack([values.real, values.imag], 1) if np.iscomplexobj(values) else values[:, None]
    values = values[:, : rows.shape[1]].astype(np.float64)
    w = np.full(N, 1 / N) if weights is None else weights / weights.sum()
    if center:
        rows, values = (x - np.tensordot(w, x, 1) for x in (rows, values))
    root = np.sqrt(w)[:, None]
    return (root[..., None] * rows).reshape(-1, rows.shape[2]), (root * values).reshape(-1)


def dense_step(rows, e, damping, pull=0.0):
    """Minimise ||rows dp - e||^2 + (dp - pull, D (dp - pull)) as a least-squares problem."""
    damping = np.broadcast_to(damping, rows.shape[1])
    stacked = np.concatenate([rows, np.diag(np.sqrt(damping))])
    rhs = np.concatenate([e, np.sqrt(damping) * np.broadcast_to(pull, rows.shape[1])])
    return scipy.linalg.lstsq(stacked, rhs)[0]


def close(step, expected, factor=1e3):
    assert problems.norm(flat(step) - expected) <= factor * TIGHT * problems.norm(expected)


@pytest.mark.parametrize(
    "kind, route",
    [
        pytest.param("mixed", "parameters", marks=pytest.mark.slow),
        ("mixed", "samples"),
        ("mixed", "least_squares"),
        ("complex output", "samples"),
        pytest.param("holomorphic", "samples", marks=pytest.mark.slow),
        pytest.param("real", "parameters", marks=pytest.mark.slow),
    ],
)
def test_every_route_gives_the_dense_step(kind, route):
    f, params = NETWORKS[kind]
    values, shift = values_of(f, params), SHIFT
    step, solution = krylov.natural_gradient(
        f, params, SAMPLES, values, shift=shift, route=route, weights=WEIGHTS, chunk_size=7, rtol=TIGHT
    )
    assert bool(solution.converged), solution
    assert solution.route == route and route in repr(solution)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), step) == jax.tree.map(lambda x: (x.shape, x.dtype), params)
    close(step, dense_step(*dense_system(f, params, values), shift))


@pytest.mark.parametrize("kind", problems.slow_but(["mixed", "complex output"], "mixed"))
@pytest.mark.parametrize("route", ["parameters", "samples", "least_squares"])
def test_diagonal_damping_and_momentum_by_every_route(kind, route):
    """A shift for each leaf, a share of the exact diagonal, and the step before, all at once."""
    f, params = NETWORKS[kind]
    values, scale, mu = values_of(f, params), 0.1, 0.8
    shift = {name: 0.01 * (i + 1) for i, name in enumerate(params)}
    previous = jax.tree.map(lambda p: jnp.asarray(problems.random_vector(p.dtype, *p.shape, seed=9)), params)
    step, solution = krylov.natural_gradient(
        f, params, SAMPLES, values, shift=shift, diag_scale=scale, mu=mu, previous=previous, route=route, rtol=TIGHT
    )
    assert bool(solution.converged), solution
    rows, e = dense_system(f, params, values, None)
    each = jax.tree.map(lambda d, p: np.full(p.shape, d * (1 + 1j) if np.iscomplexobj(p) else d), shift, params)
    damping = flat(each) + scale * np.sum(rows**2, 0)
    close(step, dense_step(rows, e, damping, mu * flat(previous)))


@pytest.mark.parametrize("route", ["parameters", "samples", "least_squares"])
def test_momentum_with_one_shift(route):
    f, params = NETWORKS["holomorphic"]
    values, shift, mu = values_of(f, params), SHIFT, 0.9
    previous = jax.tree.map(lambda p: jnp.asarray(problems.random_vector(p.dtype, *p.shape, seed=9)), params)
    options = dict(shift=shift, route=route, rtol=TIGHT, weights=WEIGHTS, diag_scale=None)
    step, _ = krylov.natural_gradient(f, params, SAMPLES, values, mu=mu, previous=previous, **options)
    rows, e = dense_system(f, params, values)
    close(step, dense_step(rows, e, shift, mu * flat(previous)))
    nothing = jax.tree.map(jnp.zeros_like, params)
    begun, _ = krylov.natural_gradient(f, params, SAMPLES, values, mu=mu, previous=nothing, **options)
    close(begun, dense_step(rows, e, shift))


@pytest.mark.x64_only
@pytest.mark.parametrize("route", problems.slow_but(["parameters", "samples", "least_squares"], "samples"))
def test_single_precision_parameters_solved_in_double(route):
    """The step of the parameters as they are, to the digits of double, in their own dtype."""
    single = jax.tree.map(lambda x: x.astype(jnp.float32), _params(np.float64))
    samples = SAMPLES.astype(jnp.float32)
    values = values_of(complex_output, _params(np.float64))
    double = jax.tree.map(lambda x: x.astype(jnp.float64), single)
    expected, _ = krylov.natural_gradient(complex_output, double, samples, values, shift=1e-6, rtol=1e-9, route=route)
    step, solution = krylov.natural_gradient(
        complex_output,
        single,
        samples,
        values,
        shift=1e-6,
        rtol=1e-9,
        route=route,
        compute_dtype="float64",
        vector_dtype="float64",
    )
    assert bool(solution.converged)
    for x, y in zip(jax.tree.leaves(step), jax.tree.leaves(expected), strict=True):
        assert x.dtype == np.float32
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6 * np.abs(y).max())


def test_holomorphic_promise_changes_nothing_but_the_diagonal_of_one_shape():
    f, params = NETWORKS["holomorphic"]
    values = values_of(f, params)
    options = dict(shift=1e-2, diag_scale=0.3, rtol=TIGHT, route="samples")
    promised, _ = krylov.natural_gradient(f, params, SAMPLES, values, holomorphic=True, **options)
    rows, e = dense_system(f, params, values, None)
    close(promised, dense_step(rows, e, 1e-2 + 0.3 * np.sum(rows**2, 0)))


def test_real_values_of_a_complex_network_uncentred():
    f, params = NETWORKS["complex output"]
    values = values_of(f, params).real
    step, _ = krylov.natural_gradient(f, params, SAMPLES, values, shift=0.1, center=False, rtol=TIGHT, route="samples")
    rows, e = dense_system(f, params, values + 0j, None, center=False)
    close(step, dense_step(rows, e, 0.1))


@pytest.mark.parametrize("route", problems.slow_but(["parameters", "samples"], "samples"))
def test_a_recipe_of_a_preconditioner_and_a_dense_jacobian_change_only_the_iterations(route):
    f, params = NETWORKS["mixed"]
    values = values_of(f, params)
    options = dict(shift=SHIFT, route=route, rtol=TIGHT)
    step, plain = krylov.natural_gradient(f, params, SAMPLES, values, **options)
    better, solution = krylov.natural_gradient(
        f, params, SAMPLES, values, preconditioner=krylov.Nystrom(30), storage="dense", **options
    )
    close(better, flat(step), 1e4)
    assert int(solution.iterations) < int(plain.iterations)


def route_of(**options):
    f, params = NETWORKS["mixed"]
    options = {"shift": 0.1, "chunk_size": None} | options
    # Only traced: nothing is compiled to find out.
    return jax.eval_shape(lambda: krylov.natural_gradient(f, params, SAMPLES, values_of(f, params), **options)[1])


def test_the_route_is_the_cheapest_and_says_why():
    """Mixed: 46 real unknowns on parameters, 40 on samples."""
    assert route_of().route == "samples"
    assert "40 real unknowns on samples, 46 on parameters" in route_of().reason
    assert route_of(chunk_size=10).route == "parameters"
    assert "one pass" in route_of(chunk_size=10).reason
    assert route_of(chunk_size=10, method="cholesky").route == "samples"
    assert route_of(shift=0.0).route == "parameters"
    assert route_of(route="parameters").reason == "asked for"


def test_the_side_of_a_preconditioner_or_a_first_guess_decides():
    _, params = NETWORKS["mixed"]
    identity = krylov.operators.IdentityOperator(params)
    assert route_of(preconditioner=identity).route == "parameters"
    f, values = networks.mixed, values_of(networks.mixed, params)
    options = dict(shift=0.1, chunk_size=10)
    _, solution = krylov.natural_gradient(f, params, SAMPLES, values, route="samples", rtol=1e-4, **options)
    _, again = krylov.natural_gradient(f, params, SAMPLES, values, x0=solution.x, rtol=1e-3, **options)
    assert again.route == "samples" and int(again.iterations) == 0


def test_the_planner_chooses_at_every_entrance(monkeypatch):
    """What it is asked for, and that its choice changes no product."""
    asked = []

    def choose(jacobian, storage, chunk_size):
        asked.append((storage, chunk_size))
        return planning.Candidate("dense", 7, 0, 0, 0.0, 0.0)

    monkeypatch.setattr("krylov.operators.jacobian.choose", choose)
    f, params = NETWORKS["real"]
    loss = lambda outputs, _: outputs**2
    v, auto = params, dict(chunk_size="auto", storage="auto")
    for build in (
        lambda **o: krylov.quantum_geometric_tensor(f, params, SAMPLES, **o),
        lambda **o: krylov.gauss_newton(f, loss, params, SAMPLES, **o),
        lambda **o: krylov.fisher(f, params, SAMPLES, distribution="bernoulli", **o),
        lambda **o: krylov.hessian(lambda p, x: f(p, x) ** 2, params, SAMPLES, **o),
        lambda **o: krylov.neural_tangent_kernel(f, params, SAMPLES, **o),
    ):
        plain, planned = build(), build(**auto)
        vector = v if plain.in_structure() != jax.ShapeDtypeStruct((N,), REAL) else SAMPLES[:, 0]
        expected = flat(plain @ vector)
        assert problems.norm(flat(planned @ vector) - expected) <= TIGHT * problems.norm(expected)
    assert asked == [(None, None)] * 5
    asked.clear()
    options = dict(shift=0.1, rtol=TIGHT, route="parameters")
    step, _ = krylov.natural_gradient(f, params, SAMPLES, values_of(f, params), **options)
    planned, _ = krylov.natural_gradient(f, params, SAMPLES, values_of(f, params), storage="auto", **options)
    close(planned, flat(step))
    assert asked == [("recompute", None), (None, None)]


def test_frozen_leaves_do_not_move_and_the_step_fits_the_parameters():
    params = _params(REAL) | {"steps": jnp.arange(3), "name": "net"}
    values = values_of(real_network, _params(REAL))

    def trained(leaf):
        return getattr(leaf, "ndim", 0) == 2

    options = dict(
        shift={"a": 0.1, "b": 0.0, "steps": None, "name": None},
        previous={"a": params["a"], "b": None, "steps": 1, "name": ""},
        mu=0.5,
        trainable=trained,
        rtol=TIGHT,
    )
    for route in ("parameters", "samples"):
        step, _ = krylov.natural_gradient(real_network, params, SAMPLES, values, route=route, **options)
        assert step["steps"] is None and step["name"] is None
        np.testing.assert_array_equal(step["b"], np.zeros(4))
        rows, e = dense_system(real_network, {k: params[k] for k in "ab"}, values, None)
        close({"a": step["a"]}, dense_step(rows[:, :20], e, 0.1, 0.5 * flat(params["a"])))


@pytest.mark.parametrize("route", ["parameters", "samples", "least_squares"])
def test_damping_by_the_diagonal_alone_leaves_unused_parameters_where_they_are(route):
    f, params = NETWORKS["real"]
    values = values_of(f, params)
    step, solution = krylov.natural_gradient(
        f, params | {"unused": jnp.ones(2)}, SAMPLES, values, shift=0.0, diag_scale=0.1, route=route, rtol=TIGHT
    )
    assert bool(solution.converged)
    np.testing.assert_array_equal(step.pop("unused"), np.zeros(2))
    rows, e = dense_system(f, params, values, None)
    close(step, dense_step(rows, e, 0.1 * np.sum(rows**2, 0)))


def loop_step(seed, shift, jitted):
    f, params = NETWORKS["mixed"]
    params = networks.mixed_params(REAL, seed=seed)
    values = values_of(f, params, seed)
    return jitted(params, SAMPLES + seed, values, shift, params)


@pytest.mark.parametrize("route", ["parameters", "samples"])
def test_a_plain_loop_compiles_once(route):
    """Called as it is, with new parameters, samples, values, shift and momentum in each step; with float shifts too."""

    def step(params, samples, values, shift, previous):
        options = dict(shift=shift, mu=shift, previous=previous, route=route, chunk_size=6)
        return krylov.natural_gradient(networks.mixed, params, samples, values, **options)

    loop_step(0, 0.1, step)
    loop_step(1, 0.2, step)
    with compiling(0):
        for seed in (2, 3):
            found, _ = loop_step(seed, 0.3 / seed, step)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(found))


def test_a_jitted_loop_compiles_once_and_agrees_with_the_plain_one():
    def step(params, samples, values, shift, previous):
        return krylov.natural_gradient(
            networks.mixed,
            params,
            samples,
            values,
            shift=shift,
            mu=0.5,
            previous=previous,
            diag_scale=shift,
            chunk_size=None,
            rtol=TIGHT,
        )

    jitted = jax.jit(step)
    loop_step(0, 0.1, jitted)
    with compiling(0):
        loop_step(1, 0.2, jitted)
        found, solution = loop_step(2, 0.3, jitted)
    plain, expected = loop_step(2, 0.3, step)
    close(found, flat(plain))
    assert solution.route == expected.route == "samples"


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(route="least"), "unknown route"),
        (dict(shift=-1.0), "not negative"),
        (dict(diag_scale=-1.0), "diag_scale must be real and not negative"),
        (dict(shift=0.1 + 1j), "shift must be real"),
        (dict(diag_scale={"a": 0.1, "b": 0.1}), "diag_scale must be a number"),
        (dict(shift=0.0, route="samples"), "divides by the shift"),
        (dict(shift=0.0, diag_scale=0.0, route="samples"), "divides by the shift"),
        (dict(shift={"a": 0.1, "b": 0.0}, route="least_squares"), "divides by the shift"),
        (dict(route="least_squares", preconditioner=krylov.Nystrom(2)), "takes no preconditioner"),
        (dict(mu=0.5, previous={"a": jnp.zeros(3)}), "previous must be a pytree like params"),
        (dict(values=np.zeros(3)), "values does not match"),
    ],
)
def test_bad_input_is_named(options, words):
    f, params = NETWORKS["real"]
    options = {"values": np.zeros(N, REAL), "shift": 0.1} | options
    values = options.pop("values")
    with pytest.raises(ValueError, match=words):
        krylov.natural_gradient(f, params, SAMPLES, values, **options)


def test_a_network_that_is_not_finite_is_said_so():
    f, params = NETWORKS["real"]
    broken = jax.tree.map(lambda p: p.at[0].set(jnp.nan), params)
    for route in ("parameters", "samples"):
        _, solution = krylov.natural_gradient(
            f, broken, SAMPLES, values_of(f, params), shift=0.1, route=route, chunk_size=7
        )
        assert solution.status is krylov.Status.NONFINITE


@pytest.mark.parametrize("route", ["parameters", "samples"])
def test_recycled_steps_are_right_whatever_was_learnt_before(route):
    """New parameters, samples, values, shift and momentum in each step, and a space of a system far away."""
    f, recycler = networks.mixed, krylov.Recycler(krylov.Nystrom(8, tolerance=0.0))

    @jax.jit
    def step(params, samples, values, shift, previous, state):
        options = dict(shift=shift, mu=shift, previous=previous, route=route, rtol=TIGHT)
        return krylov.natural_gradient(
            f, params, samples, values, recycler=recycler, recycler_state=state, chunk_size=7, **options
        )

    params = networks.mixed_params(REAL)
    J = krylov.Jacobian(f, params, SAMPLES, center=True)
    state, used = recycler.start(J.gram() if route == "parameters" else J.cogram()), []
    for seed, shift in enumerate([0.1, 0.5, SHIFT, 0.1]):
        params = networks.mixed_params(REAL, seed=seed)
        samples, values, previous = SAMPLES + seed, values_of(f, params, seed), networks.mixed_params(REAL, seed=9)
        found, solution = step(params, samples, values, shift, previous, state)
        state = solution.recycler_state
        assert solution.status is krylov.Status.CONVERGED and solution.route == route
        used.append(int(state.preconditioner.rank))
        plain, _ = krylov.natural_gradient(
            f, params, samples, values, shift=shift, mu=shift, previous=previous, method="cholesky", route=route
        )
        close(found, flat(plain), 1e4)
    assert used[0] == 8 and int(state.steps) == 4
    assert step._cache_size() == 1


@pytest.mark.slow
def test_recycled_steps_with_a_shift_for_each_parameter():
    f, params = NETWORKS["mixed"]
    values, recycler = values_of(f, params), krylov.Recycler(krylov.Nystrom(8, tolerance=0.0))
    shift = {name: 0.01 * (i + 1) for i, name in enumerate(params)}
    for route in ("parameters", "samples"):
        options = dict(shift=shift, diag_scale=0.1, rtol=TIGHT, recycler=recycler)
        first, solution = krylov.natural_gradient(f, params, SAMPLES, values, route=route, **options)
        state = solution.recycler_state
        # What was learnt at another shift, which is in the operator here; its space decides the route.
        options["shift"] = jax.tree.map(lambda s: 3 * s, shift)
        step, solution = krylov.natural_gradient(f, params, SAMPLES, values, recycler_state=state, **options)
        assert solution.route == route and "recycler_state" in solution.reason
        rows, e = dense_system(f, params, values, None)
        each = jax.tree.map(lambda d, p: np.full(p.shape, d * (1 + 1j) if np.iscomplexobj(p) else d), shift, params)
        share = 0.1 * np.sum(rows**2, 0)
        close(first, dense_step(rows, e, flat(each) + share))
        close(step, dense_step(rows, e, 3 * flat(each) + share))


def test_a_recycler_beside_what_it_brings_itself_is_refused():
    f, params = NETWORKS["real"]
    recycler = krylov.Recycler(krylov.Nystrom(2))
    state = recycler.start(krylov.quantum_geometric_tensor(f, params, SAMPLES))
    for options, words in [
        (dict(recycler=recycler, preconditioner=krylov.Nystrom(2)), "own preconditioner"),
        (dict(recycler=recycler, method="minres"), "own method"),
        (dict(recycler=recycler, route="least_squares"), "takes no recycler"),
        (dict(recycler_state=state), "without its recycler"),
        (dict(recycler=recycler, recycler_state=state, route="samples"), "state is of another operator"),
    ]:
        with pytest.raises(ValueError, match=words):
            krylov.natural_gradient(f, params, SAMPLES, np.zeros(N, REAL), shift=0.1, **options)
    with pytest.raises(TypeError, match=r"krylov\.Recycler, not Nystrom"):
        krylov.natural_gradient(f, params, SAMPLES, np.zeros(N, REAL), shift=0.1, recycler=krylov.Nystrom(2))
