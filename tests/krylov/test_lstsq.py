"""Least squares: the solution of least norm as LAPACK finds it, norms that are true, and the derivatives of A^+ b."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import krylov
from krylov import Status
from krylov.operators import DiagonalOperator, FunctionOperator, MatrixOperator
from tests import problems
from tests.conftest import X64
from tests.problems import assert_honest_least_squares, eps, norm, random_vector, wide

ALWAYS = ("lsmr", "lsqr", "cgls")
ALL = (*ALWAYS, "craig")
DOUBLE = "complex128" if X64 else "complex64"


def case(method, dtype):
    """One in every run."""
    marks = [pytest.mark.x64_only] if dtype in ("float64", "complex128") else []
    quick = method == "lsmr" and dtype == DOUBLE
    return pytest.param(method, dtype, marks=marks if quick else [*marks, pytest.mark.slow])


CASES = [case(method, dtype) for method in ALL for dtype in ("float32", "complex64", "float64", "complex128")]


@functools.cache
def solver(method, **options):
    """Kept, so that problems of one shape compile once; over matrices, right-hand sides and tolerances."""
    return jax.jit(jax.vmap(lambda A, y, rtol: krylov.lstsq(A, y, method, rtol=rtol, **options)))


@functools.cache
def damped_solver(method):
    return jax.jit(jax.vmap(lambda A, y, d, rtol: krylov.lstsq(A, y, method, damping=d, rtol=rtol)))


def solve_each(method, systems, rtol, dtype, **options):
    matrices, vectors = (np.stack([system[part] for system in systems]) for part in (0, 1))
    batch = solver(method, **options)(matrices, vectors, np.full(len(systems), rtol, np.finfo(dtype).dtype))
    return [member(batch, i) for i in range(len(systems))]


def member(batch, i):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[i], batch)


def least_norm(matrix, rhs):
    """LAPACK's, in double precision, with the rank that the entries have in theirs."""
    return np.linalg.lstsq(wide(matrix), wide(rhs), rcond=100 * eps(matrix.dtype))[0]


def tall(dtype):
    """Of 25 rows and 10 columns: rank 2, repeated singular values, bidiagonal, rank 6, with and without a solution."""
    rank_six = problems.with_singular_values(dtype, np.linspace(1, 3, 6), 25, 10)
    return {
        "rank two": problems.rank_two(dtype),
        "rank two, no solution": problems.System(problems.rank_two(dtype).matrix, random_vector(dtype, 25)),
        "Paige and Saunders": problems.householder_singular_values(dtype),
        "Paige and Saunders, no solution": problems.householder_singular_values(dtype, residual=1.0),
        "bidiagonal": problems.with_rows(problems.bidiagonal(dtype), 25),
        "rank six": problems.System(rank_six, random_vector(dtype, 25)),
        "orthogonal to the range": problems.System(
            problems.with_rows(problems.System(np.eye(10, dtype=dtype), np.ones(10, dtype)), 25).matrix,
            np.eye(25, dtype=dtype)[12],
        ),
        "no right-hand side": problems.System(problems.rank_two(dtype).matrix, np.zeros(25, dtype)),
    }


def solvable(system):
    x = least_norm(*system)
    return norm(wide(system.rhs) - wide(system.matrix) @ x) <= 100 * eps(system.rhs.dtype) * norm(system.rhs)


def wide_systems(dtype):
    """Of 10 rows and 25 columns."""
    full = random_vector(dtype, 10, 25, seed=3)
    rank_six = problems.with_singular_values(dtype, np.linspace(1, 3, 6), 10, 25)
    return {
        "rank two": problems.rank_two(dtype, 10, 25),
        "rank two, no solution": problems.System(problems.rank_two(dtype, 10, 25).matrix, random_vector(dtype, 10)),
        "full rank": problems.System(full, random_vector(dtype, 10)),
        "rank six": problems.System(rank_six, random_vector(dtype, 10)),
    }


@pytest.mark.parametrize("systems", [tall, wide_systems])
@pytest.mark.parametrize("method, dtype", CASES)
def test_solution_of_least_norm_as_lapack_finds_it(method, dtype, systems):
    systems = {k: s for k, s in systems(dtype).items() if method != "craig" or solvable(s)}
    rtol = 20 * eps(dtype)
    for name, system, sol in zip(systems, systems.values(), solve_each(method, [*systems.values()], rtol, dtype)):
        assert_honest_least_squares(sol, *system, rtol)
        assert sol.converged, (name, sol)
        right, size = least_norm(*system), norm(least_norm(*system))
        assert norm(wide(sol.x) - right) <= (1e-8 if eps(dtype) < 1e-10 else 1e-2) * max(size, eps(dtype)), name
        if name in ("orthogonal to the range", "no right-hand side"):
            assert sol.iterations == 0 and not np.any(sol.x)


@pytest.mark.parametrize("method, dtype", [case for case in CASES if case.values[0] != "craig"])
def test_damping_is_squared_and_the_norms_are_those_of_the_damped_problem(method, dtype):
    systems = [*tall(dtype).values()]
    real = np.finfo(dtype).dtype
    rtol = 20 * eps(dtype)
    matrices, vectors = (np.stack([system[part] for system in systems]) for part in (0, 1))
    for damping in (0.3, 100.0, 1e-3):
        count = len(systems)
        batch = damped_solver(method)(matrices, vectors, np.full(count, damping, real), np.full(count, rtol, real))
        for i, (matrix, rhs) in enumerate(systems):
            sol = member(batch, i)
            d = float(np.asarray(damping, real))
            assert_honest_least_squares(sol, matrix, rhs, rtol, damping=d)
            A, y = wide(matrix), wide(rhs)
            right = np.linalg.lstsq(np.vstack([A, d * np.eye(10)]), np.concatenate([y, np.zeros(10)]))[0]
            accuracy = 1000 * eps(dtype) * (np.linalg.norm(A, 2) / d if damping < 1 else 1)
            assert norm(wide(sol.x) - right) <= accuracy * max(norm(right), norm(y)), (i, damping)


@pytest.mark.x64_only
@pytest.mark.parametrize("seed", problems.slow_but([0, 1], 0))
def test_lsmr_comes_a_thousand_times_closer_than_cg_on_the_normal_equations_at_condition_1e7(seed):
    n, m = 30, 50
    A = problems.with_singular_values("float64", np.logspace(0, -7, n), m, n, seed)
    x = random_vector("float64", n, seed=seed + 2)
    error = lambda sol: norm(np.asarray(sol.x) - x) / norm(x)
    closest = error(solve_each("lsmr", [(A, A @ x)], 1e-15, "float64", maxiter=3000)[0])
    normal = krylov.solve(MatrixOperator(A.T @ A, positive=True), A.T @ (A @ x), "cg", rtol=1e-15, maxiter=3000)
    assert closest <= 1e-8 and closest <= 1e-3 * error(normal), (closest, error(normal))


TOLERANCES = [0.0, *10.0 ** np.arange(-16, 0)]


@pytest.mark.parametrize("method", problems.slow_but(ALL, "lsmr"))
def test_ill_conditioned_problems_are_never_claimed_falsely(method):
    dtype, rows, columns = "float32", 25, 10
    systems, rtols = [], []
    for condition in 10.0 ** np.arange(1, 12):
        A = problems.with_singular_values(dtype, np.geomspace(1, 1 / condition, columns), rows, columns)
        for rhs in (random_vector(dtype, rows), (A @ random_vector(dtype, columns)).astype(dtype)):
            systems += [(A, rhs)] * len(TOLERANCES)
            rtols += TOLERANCES
    matrices, vectors = (np.stack([system[part] for system in systems]) for part in (0, 1))
    batch = jax.tree.map(np.asarray, solver(method, maxiter=300)(matrices, vectors, np.array(rtols, dtype)))
    for i, (system, rtol) in enumerate(zip(systems, rtols)):
        assert_honest_least_squares(member(batch, i), *system, rtol)
    loose = np.array(rtols) >= 1e-3
    assert np.all(batch.converged[loose]) or method == "craig"


def test_scales_of_operator_and_right_hand_side_change_nothing():
    A, y = random_vector("float32", 25, 10), random_vector("float32", 25, seed=1)
    scales = [(1, 1), (1, 1e-30), (1, 1e30), (1e-30, 1), (1e-30, 1e-30), (1e30, 1), (1e30, 1e30), (2.0**50, 2.0**-20)]
    systems = [(A * np.float32(a), y * np.float32(b)) for a, b in scales]
    plain, *rest = solve_each("lsmr", systems, 1e-5, "float32")
    for (a, b), system, sol in zip(scales[1:], systems[1:], rest):
        assert sol.converged and abs(int(sol.iterations) - int(plain.iterations)) <= 1, (a, b)
        x = wide(sol.x)
        r = wide(system[1]) - wide(system[0]) @ x
        assert abs(float(sol.residual_norm) - norm(r)) <= 1e-5 * norm(r)
        assert norm(wide(system[0]).T @ r) <= 1.1e-5 * np.linalg.norm(wide(system[0]), 2) * norm(r)
    np.testing.assert_array_equal(rest[-1].x, plain.x * np.float32(2.0**-70))


@pytest.mark.parametrize("method", problems.slow_but(ALL, "craig"))
def test_statuses(method):
    dtype = "float32"
    solvable_system = problems.householder_singular_values(dtype)
    unsolvable = problems.householder_singular_values(dtype, residual=1.0)
    bad_rhs, bad_matrix = solvable_system.rhs.copy(), solvable_system.matrix.copy()
    bad_rhs[3], bad_matrix[4, 5] = np.nan, np.inf
    systems = [solvable_system, unsolvable, (solvable_system.matrix, bad_rhs), (bad_matrix, solvable_system.rhs)]
    fine, none, *bad = solve_each(method, systems, 1e-5, dtype)
    assert fine.converged
    if method == "craig":
        assert Status(int(none.status_code)) in (Status.BREAKDOWN, Status.STAGNATED, Status.MAX_ITERATIONS)
    else:
        assert none.converged
    assert_honest_least_squares(none, *unsolvable, 1e-5)
    for sol in bad:
        assert sol.status_code == Status.NONFINITE and np.all(np.isfinite(sol.x))


def test_few_iterations_end_with_what_they_reached():
    A, y = problems.householder_singular_values("float32", residual=1.0)
    for maxiter in (0, 2):
        sol = krylov.lstsq(A, y, maxiter=maxiter, rtol=1e-6)
        assert sol.status is Status.MAX_ITERATIONS and int(sol.iterations) == maxiter
        assert_honest_least_squares(sol, A, y, 1e-6)
    with pytest.raises(krylov.ConvergenceError, match="the iterations ran out"):
        krylov.lstsq(A, y, maxiter=2, rtol=1e-6, throw=True)


def test_residual_and_gradient_fall_monotonically_and_histories_end_in_the_norms_returned():
    A, y = problems.householder_singular_values("float32", residual=1.0)
    sol = krylov.lstsq(A, y, rtol=1e-4, history=True)
    assert len(sol.history) == len(sol.gradient_history) == int(sol.iterations) + 1
    assert np.all(np.diff(sol.history) <= 1e-6 * norm(y)) and np.all(np.diff(sol.gradient_history) <= 1e-6 * norm(y))
    assert sol.history[-1] == sol.objective_norm and sol.gradient_history[-1] == sol.gradient_norm
    np.testing.assert_allclose(sol.history[0], norm(y), rtol=1e-6)
    np.testing.assert_allclose(sol.gradient_history[0], norm(A.T @ y), rtol=1e-5)


def test_a_guess_saves_iterations_and_without_full_rank_the_nearest_solution_is_found():
    A, y = problems.householder_singular_values("float32", residual=1.0)
    right = least_norm(A, y)
    cold = krylov.lstsq(A, y, x0=np.zeros(10, "float32"), rtol=1e-6)
    warm = krylov.lstsq(A, y, x0=(right * (1 + 1e-4)).astype("float32"), rtol=1e-6)
    assert warm.converged and int(warm.iterations) < int(cold.iterations)
    exact = krylov.lstsq(A, y, x0=cold.x, rtol=1e-5)
    assert exact.converged and int(exact.iterations) == 0
    np.testing.assert_array_equal(exact.x, cold.x)
    A, y = problems.rank_two("float32")
    guess = random_vector("float32", 10)
    sol = krylov.lstsq(A, y, x0=guess, rtol=1e-6)
    nearest = guess + least_norm(A, wide(y) - wide(A) @ wide(guess))
    assert norm(wide(sol.x) - nearest) <= 1e-4 * norm(nearest)


def rank_preserving(dtype, rows, columns, rank):
    """A matrix and a tangent along which the rank stays: of its factors."""
    u, v, u_dot, v_dot = (random_vector(dtype, *s, seed=i) for i, s in enumerate([(rows, rank), (rank, columns)] * 2))
    return u @ v, u_dot @ v + u @ v_dot, lambda t: (u + t * u_dot) @ (v + t * v_dot)


DERIVATIVES = [
    ("lsmr", 9, 5, 5, 0.0),
    ("lsmr", 5, 9, 5, 0.0),
    ("craig", 5, 9, 5, 0.0),
    ("lsqr", 9, 7, 4, 0.0),
    ("lsmr", 9, 5, 5, 0.5),
    ("cgls", 5, 9, 3, 0.5),
]


@pytest.mark.x64_only
@pytest.mark.parametrize("dtype", problems.slow_but(["float64", "complex128"], "complex128"))
@pytest.mark.parametrize("problem", problems.slow_but(DERIVATIVES, DERIVATIVES[3]))
def test_derivatives_in_the_operator_and_the_right_hand_side(problem, dtype):
    """Against central differences of the dense formula; reverse mode against forward mode."""
    method, rows, columns, rank, damping = problem
    A, A_dot, path = rank_preserving(dtype, rows, columns, rank)
    y, y_dot = random_vector(dtype, rows, seed=5), random_vector(dtype, rows, seed=6)
    weights = random_vector(dtype, columns, seed=7)

    def dense(t):
        B, rhs = path(t), y + t * y_dot
        if damping:
            return np.linalg.solve(B.conj().T @ B + damping**2 * np.eye(columns), B.conj().T @ rhs)
        return np.linalg.pinv(B, rcond=1e-10) @ rhs

    def solve(A, y):
        return krylov.lstsq(A, y, method, damping=damping, rtol=1e-13).x

    def computed(A, y):
        _, x_dot = jax.jvp(solve, (A, y), (A_dot, y_dot))
        return x_dot, jax.grad(lambda A, y: jnp.sum((solve(A, y) * weights).real), argnums=(0, 1))(A, y)

    x_dot, (A_bar, y_bar) = jax.jit(computed)(A, y)
    step = 1e-5
    difference = (dense(step) - dense(-step)) / (2 * step)
    assert norm(x_dot - difference) <= 1e-7 * norm(difference)
    forward = np.sum((x_dot * weights).real)
    reverse = np.sum((A_bar * A_dot).real) + np.sum((y_bar * y_dot).real)
    assert abs(forward - reverse) <= 1e-9 * (abs(forward) + norm(A_bar) * norm(A_dot))


@pytest.mark.x64_only
@pytest.mark.slow
def test_second_derivatives_and_the_derivative_in_the_damping():
    A, y, v = (
        random_vector("float64", 8, 5),
        random_vector("float64", 8, seed=1),
        random_vector("float64", 8, 5, seed=2),
    )

    def loss(A, y, d):
        return (krylov.lstsq(A, y, damping=d, rtol=1e-13).x ** 2).sum()

    def dense(A, y, d):
        return (jnp.linalg.solve(A.T @ A + d**2 * jnp.eye(5), A.T @ y) ** 2).sum()

    def forward_over_reverse(f):
        return jax.jvp(jax.grad(f, (0, 1, 2)), (A, y, 0.3), (v, y, 1.0))

    for got, right in zip(
        *(jax.tree.leaves(jax.jit(forward_over_reverse, static_argnums=0)(f)) for f in (loss, dense))
    ):
        np.testing.assert_allclose(got, right, rtol=1e-8, atol=1e-10)
    got, right = (jax.hessian(f, 1)(A, y, 0.3) for f in (loss, dense))
    np.testing.assert_allclose(got, right, rtol=1e-8, atol=1e-10)


def test_damped_least_squares_on_a_jacobian_is_the_shifted_gram_system():
    """A network with real and complex parameters, R-linear: the natural gradient by two routes."""
    f, params, samples = mixed_network()
    J = krylov.Jacobian(f, params, samples, center=True)
    y = J.sample_vector(random_vector(DOUBLE, 40, seed=3))
    rtol = 100 * eps(DOUBLE)
    step = krylov.lstsq(J, y, damping=0.1, rtol=rtol)
    gram = krylov.solve(J.gram(), J.H @ y, "cg", shift=0.01, rtol=rtol)
    assert step.converged and gram.converged
    for a, b in zip(jax.tree.leaves(step.x), jax.tree.leaves(gram.x), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, atol=1e4 * eps(DOUBLE) * norm(b))


def mixed_network():
    def log_psi(params, x):
        hidden = x @ params["kernel"] + params["bias"]
        return jnp.sum(jnp.log(jnp.cosh(hidden)), -1) + 1j * jnp.tanh(x @ params["phase"])

    real = np.finfo(DOUBLE).dtype
    params = {
        "kernel": 0.3 * random_vector(DOUBLE, 4, 3),
        "bias": 0.3 * random_vector(DOUBLE, 3, seed=1),
        "phase": 0.3 * random_vector(real, 4, seed=2),
    }
    return log_psi, jax.tree.map(jnp.asarray, params), np.sign(random_vector(real, 40, 4, seed=4))


def test_a_real_matrix_takes_a_complex_right_hand_side_and_a_function_a_guess():
    A, y = random_vector("float32", 25, 10), random_vector("complex64", 25)
    sol = krylov.lstsq(A, y, rtol=1e-6)
    np.testing.assert_allclose(sol.x, least_norm(A, y), atol=1e-4)
    sol = krylov.lstsq(lambda x: jnp.diff(x), np.ones(9, "float32"), x0=np.zeros(10, "float32"), rtol=1e-6)
    np.testing.assert_allclose(sol.x, np.arange(10) - 4.5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ALWAYS)
def test_two_hundred_thousand_rows_in_float32(method):
    """Three differences of each unknown, and damping: a condition of about 40."""
    n = 100_000
    y = random_vector("float32", 2 * n)

    def fn(x):
        return jnp.concatenate([x - 0.9 * jnp.roll(x, 1), 2 * x + jnp.roll(x, 2)])

    op = FunctionOperator(fn, jax.ShapeDtypeStruct((n,), "float32"))
    sol = krylov.lstsq(op, y, method, damping=0.05, rtol=1e-4)
    assert sol.converged
    with jax.enable_x64(True):
        x = jnp.asarray(wide(sol.x))
        r = jnp.asarray(wide(y)) - fn(x)
        gradient = jax.linear_transpose(fn, x)(r)[0] - 0.05**2 * x
    f = np.hypot(norm(r), 0.05 * norm(x))
    assert norm(gradient) <= 1.01e-4 * 4 * f
    np.testing.assert_allclose(float(sol.gradient_norm), norm(gradient), rtol=0.05)
    np.testing.assert_allclose(float(sol.residual_norm), norm(r), rtol=1e-4)


def test_half_precision_is_promoted():
    A, y = random_vector("float16", 12, 5), random_vector("float16", 12, seed=1)
    sol = krylov.lstsq(A, y)
    assert sol.x.dtype == np.float32 and sol.converged


BAD = {
    "a vector of the wrong length": (dict(y=np.ones(9, "float32")), ValueError, "lstsq: y does not match"),
    "a guess of the wrong length": (dict(x0=np.ones(25, "float32")), ValueError, "lstsq: x0 does not match"),
    "a method for square systems": (dict(method=krylov.CG()), TypeError, "cg is a method for square systems"),
    "an unknown method": (dict(method="lsrq"), ValueError, "lstsq: unknown method 'lsrq'. Did you mean 'lsqr'"),
    "negative damping": (dict(damping=-1.0), ValueError, "lstsq: damping must not be negative"),
    "complex damping": (dict(damping=1j), TypeError, "lstsq: damping must be real"),
    "craig with damping": (dict(method="craig", damping=1.0), ValueError, "craig takes no damping"),
    "negative tolerance": (dict(rtol=-1.0), ValueError, "lstsq: rtol must not be negative"),
    "a broken maxiter": (dict(maxiter=2.5), ValueError, "lstsq: maxiter must be a whole number"),
    "a function without a guess": (dict(op=lambda x: x), ValueError, "lstsq: a function needs the structure"),
    "integers": (dict(y=np.ones(25, int)), TypeError, "lstsq: y must have real or complex"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    change, error, message = BAD[name]
    arguments = dict(op=np.ones((25, 10), "float32"), y=np.ones(25, "float32")) | change
    with pytest.raises(error, match=message):
        krylov.lstsq(arguments.pop("op"), arguments.pop("y"), **arguments)


@pytest.mark.slow
def test_new_unknowns_precondition_a_problem_of_full_rank():
    """What the error about ``preconditioner`` recommends, on columns of very different lengths."""
    scales = np.geomspace(1e-3, 1e3, 10)
    matrix = problems.with_singular_values("float64", np.linspace(1, 2, 10), 25, 10) * scales
    y = problems.random_vector("float32", 25)
    J, M = MatrixOperator(matrix.astype("float32")), DiagonalOperator((1 / scales).astype("float32"))
    sol = krylov.lstsq(J @ M, y, rtol=1e-6)
    assert sol.converged and int(sol.iterations) <= 15
    right = np.linalg.lstsq(matrix, wide(y))[0]
    assert norm((wide(M @ sol.x) - right) * scales) <= 1e-4 * norm(right * scales)
