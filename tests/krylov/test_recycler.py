"""A run of stochastic reconfiguration with one preconditioner, against solves from nothing."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import krylov
from krylov.operators import Jacobian, MatrixOperator
from tests import networks, problems

SITES, HIDDEN, SAMPLES, SHIFT, RTOL, RATE, WARMUP = 10, 30, 2000, 1e-4, 1e-5, 2e-3, 60


def heisenberg_chain():
    """All configurations of zero magnetisation, and the Hamiltonian in them with the sign rule absorbed."""
    states = np.array([s for s in itertools.product((1, -1), repeat=SITES) if sum(s) == 0])
    index = {tuple(s): i for i, s in enumerate(states)}
    matrix = np.zeros((len(states), len(states)))
    for i, state in enumerate(states):
        for site in range(SITES):
            other = (site + 1) % SITES
            matrix[i, i] += state[site] * state[other]
            if state[site] != state[other]:
                swapped = state.copy()
                swapped[[site, other]] = swapped[[other, site]]
                matrix[i, index[tuple(swapped)]] -= 2
    return states, matrix


def parameters():
    rng = np.random.default_rng(0)
    normal = lambda *shape: 0.1 * (rng.normal(size=shape) + 1j * rng.normal(size=shape))
    params = {"Dense": {"kernel": normal(SITES, HIDDEN), "bias": normal(HIDDEN)}, "visible_bias": normal(SITES)}
    return jax.tree.map(jnp.asarray, params)


def run(recycler, steps):
    """Steps from random parameters, samples drawn anew in each; products of both, residuals and energies."""
    states, hamiltonian = (jnp.asarray(x, float) for x in heisenberg_chain())
    params = parameters()

    def system(params, key):
        amplitudes = networks.rbm(params, states)
        psi = jnp.exp(amplitudes - amplitudes.real.max())
        local = (hamiltonian @ psi) / psi
        drawn = jax.random.categorical(key, 2 * amplitudes.real, shape=(SAMPLES,))
        J = Jacobian(networks.rbm, params, states[drawn], center=True, holomorphic=True)
        energy = jnp.sum(jnp.abs(psi) ** 2 * local.real) / jnp.sum(jnp.abs(psi) ** 2)
        return J.gram(), J.H @ J.sample_vector(local[drawn]), energy

    def step(carried, key):
        params, state = carried
        S, F, energy = system(params, key)
        plain = krylov.solve(S, F, "cg", shift=SHIFT, rtol=RTOL)
        solution, state = recycler.solve(S, F, state, shift=SHIFT, rtol=RTOL)
        residual = jax.tree.map(lambda b, a, x: b - a - SHIFT * x, F, S @ solution.x, solution.x)
        relative = [jnp.sqrt(sum(jnp.sum(jnp.abs(leaf) ** 2) for leaf in jax.tree.leaves(v))) for v in (residual, F)]
        params = jax.tree.map(lambda p, x: p - RATE * x, params, solution.x)
        found = dict(
            plain=plain.matvecs,
            recycled=solution.matvecs,
            iterations=solution.iterations,
            status=solution.status_code,
            residual=relative[0] / relative[1],
            energy=energy,
        )
        return (params, state), found

    def warm_up(params, key):
        S, F, _ = system(params, key)
        solution = krylov.solve(S, F, "cg", shift=1e-2, rtol=1e-2)
        return jax.tree.map(lambda p, x: p - 0.05 * x, params, solution.x), None

    @jax.jit
    def everything():
        warm, _ = jax.lax.scan(warm_up, params, jax.random.split(jax.random.key(2), WARMUP))
        keys = jax.random.split(jax.random.key(1), steps)
        start = recycler.start(system(params, keys[0])[0])
        return jax.lax.scan(step, (warm, start), keys)[1]

    return jax.tree.map(np.asarray, everything())


@pytest.mark.slow
@pytest.mark.x64_only
def test_a_run_takes_a_quarter_of_the_products_of_plain_cg():
    found = run(krylov.Recycler(krylov.Nystrom(rank=64)), 20)
    assert np.all(found["status"] == krylov.Status.CONVERGED)
    assert np.all(found["residual"] <= 1.001 * RTOL)
    assert -18.1 < found["energy"][-1] < found["energy"][0] < -17.5  # a real run, downhill to -18.0618
    assert found["recycled"].sum() <= 0.25 * found["plain"].sum(), found


def tridiagonal_system(key, n=120):
    """A system that has nothing in common with the one before."""
    matrix = jax.random.normal(key, (n, n), jnp.float32)
    return MatrixOperator(matrix @ matrix.T / n, positive=True)


def test_what_does_not_pay_is_dropped_and_changes_no_answer():
    recycler, b = krylov.Recycler(krylov.Nystrom(rank=60, tolerance=0.0), pause=5), np.ones(120, np.float32)

    @jax.jit
    def step(state, key):
        op = tridiagonal_system(key)
        solution, state = recycler.solve(op, b, state, shift=0.05)
        residual = b - op.matrix @ solution.x - 0.05 * solution.x
        return state, (jnp.linalg.norm(residual), solution.matvecs, state.preconditioner.rank)

    start = recycler.start(tridiagonal_system(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), 40)
    _, (residuals, matvecs, ranks) = jax.lax.scan(step, start, keys)
    assert np.all(residuals <= 1.2e-5 * np.sqrt(120))
    plain = [int(krylov.solve(tridiagonal_system(key), b, shift=0.05).matvecs) for key in keys[:3]]
    assert np.sum(np.asarray(ranks) == 0) >= 20  # mostly dropped
    assert np.sum(matvecs) <= 1.5 * np.mean(plain) * 40


def test_a_system_that_stays_is_learnt_once():
    op = MatrixOperator(problems.hermitian("float32", 1 / np.arange(1, 121) ** 2), positive=True)
    recycler, b = krylov.Recycler(krylov.Nystrom(rank=30, tolerance=0.0)), np.ones(120, np.float32)
    state = recycler.start(op)
    counts = []
    for _ in range(4):
        solution, state = recycler.solve(op, b, state, shift=1e-3)
        counts.append(int(solution.matvecs))
        assert bool(solution.converged)
    assert counts[0] - counts[1] == 30 and counts[1] == counts[2] == counts[3]


def test_a_warm_start_begins_at_the_last_solution_and_ends_at_the_same():
    op = MatrixOperator(problems.hermitian("float32", 1 / np.arange(1, 121) ** 2), positive=True)
    b, change = np.ones(120, np.float32), problems.random_vector("float32", 120)
    warm, cold = (krylov.Recycler(krylov.Nystrom(rank=8, tolerance=0.0), warm_start=w) for w in (True, False))
    counts = {}
    for name, recycler in ("warm", warm), ("cold", cold):
        state, counts[name] = recycler.start(op), []
        for size in (0.0, 1e-3, 2e-3, 2e-3):
            rhs = b + np.float32(size) * change
            solution, state = recycler.solve(op, rhs, state, shift=1e-3)
            residual = rhs - op.matrix @ solution.x - np.float32(1e-3) * solution.x
            assert problems.norm(residual) <= 1.2e-5 * problems.norm(rhs)
            np.testing.assert_array_equal(state.solution, solution.x)
            counts[name].append(int(solution.iterations))
    assert counts["warm"][0] == counts["cold"][0]
    assert all(w < c for w, c in zip(counts["warm"][1:], counts["cold"][1:])), counts
    assert counts["warm"][3] == 0  # the same system again
    # A guess of one's own goes before it: the solution takes no iteration, where zero takes many.
    guess = np.zeros(120, np.float32)
    assert int(warm.solve(op, rhs, state, shift=1e-3, x0=guess)[0].iterations) == counts["cold"][3] > 0


def test_a_solution_that_is_not_finite_is_no_warm_start():
    op = MatrixOperator(problems.hermitian("float32", 1 / np.arange(1, 41) ** 2), positive=True)
    recycler, b = krylov.Recycler(krylov.Nystrom(rank=4), warm_start=True), np.ones(40, np.float32)
    _, state = recycler.solve(op, b, recycler.start(op), shift=1e-2)
    broken, after = recycler.solve(op, np.full(40, np.nan, np.float32), state, shift=1e-2)
    assert broken.status is krylov.Status.NONFINITE
    np.testing.assert_array_equal(after.solution, state.solution)
    solution, _ = recycler.solve(op, b, after, shift=1e-2)
    assert bool(solution.converged) and int(solution.iterations) == 0


@pytest.mark.slow
def test_gradients_pass_through_a_recycled_solve():
    op = MatrixOperator(problems.hermitian("float32", 1 / np.arange(1, 41) ** 2), positive=True)
    recycler = krylov.Recycler(krylov.Nystrom(rank=10))
    state = recycler.start(op)

    def loss(scale, recycled):
        A, b = scale * op, scale * jnp.ones(40, jnp.float32)
        solution = recycler.solve(A, b, state, shift=0.1)[0] if recycled else krylov.solve(A, b, "cg", shift=0.1)
        return jnp.sum(solution.x**2)

    got, expected = (jax.grad(loss)(jnp.float32(1.5), recycled) for recycled in (True, False))
    assert abs(got - expected) <= 1e-2 * abs(expected)


def test_state_of_another_operator_and_another_recipe_are_refused():
    op, other = (MatrixOperator(np.eye(n, dtype=np.float32), positive=True) for n in (4, 5))
    recycler = krylov.Recycler(krylov.Nystrom(rank=2))
    with pytest.raises(ValueError, match=r"(?s)float32\[4\].*float32\[5\].*recycler.start"):
        recycler.solve(other, np.ones(5, np.float32), recycler.start(op))
    with pytest.raises(TypeError, match="Jacobi"):
        krylov.Recycler(krylov.Jacobi())
