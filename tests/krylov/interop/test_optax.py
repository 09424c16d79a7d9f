"""Second-order steps in an optax chain."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import krylov
from krylov.interop.optax import gauss_newton, natural_gradient
from tests import networks, problems
from tests.krylov.test_recompilation import compiling

REAL = jnp.result_type(float)
TOLERANCE = 1e-9 if jax.config.jax_enable_x64 else 1e-3
X = networks.samples(16, REAL)
LABELS = jnp.arange(16) % 3
PARAMS = {
    "in": jnp.asarray(problems.random_vector(REAL, 5, 4) / 2),
    "out": jnp.asarray(problems.random_vector(REAL, 4, 3, seed=1)),
}


def logits(params, batch):
    return jnp.tanh(batch[0] @ params["in"]) @ params["out"]


def cross_entropy(outputs, batch):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, batch[1])


def mean_loss(params, batch):
    return cross_entropy(logits(params, batch), batch).mean()


def close(tree, expected):
    flat = lambda t: np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)])
    assert problems.norm(flat(tree) - flat(expected)) <= TOLERANCE * problems.norm(flat(expected))


def test_a_chain_with_a_schedule_takes_the_gauss_newton_step_and_compiles_once():
    batch = X, LABELS
    schedule = lambda count: 0.1 * 0.5**count
    tx = optax.chain(gauss_newton(logits, cross_entropy, shift=schedule, rtol=1e-12, chunk_size=5), optax.sgd(0.5))

    @jax.jit
    def step(params, state, batch):
        updates, state = tx.update(jax.grad(mean_loss)(params, batch), state, params, batch=batch)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    expected = PARAMS
    moved, next_state = step(params, state, batch)
    G = np.asarray(krylov.gauss_newton(logits, cross_entropy, expected, batch).as_matrix(), np.float64)
    flat, unravel = jax.flatten_util.ravel_pytree(jax.grad(mean_loss)(expected, batch))
    dense = np.linalg.solve(G + 0.1 * np.eye(len(G)), np.asarray(flat, np.float64))
    close(jax.tree.map(lambda a, b: (a - b) / 0.5, params, moved), unravel(jnp.asarray(dense, flat.dtype)))
    assert int(next_state[0].steps) == 1 and int(next_state[0].iterations) > 0
    step(moved, next_state, (X + 1, LABELS))
    with compiling(0):
        moved, next_state = step(moved, next_state, (X + 1, LABELS))
    assert float(mean_loss(moved, batch)) < float(mean_loss(params, batch))


def test_momentum_and_warm_starts_of_a_natural_gradient_in_mixed_parameters():
    params = networks.mixed_params(REAL)
    gradient = jax.tree.map(lambda p: jnp.asarray(problems.random_vector(p.dtype, *p.shape, seed=5)), params)
    tx = natural_gradient(networks.mixed, shift=0.1, mu=0.7, warm_start=True, rtol=1e-6)
    first, state = tx.update(gradient, tx.init(params), params, samples=X)
    second, again = tx.update(gradient, state, params, samples=X, shift=jnp.asarray(0.2))
    S = krylov.quantum_geometric_tensor(networks.mixed, params, X)
    residual = jax.tree.map(lambda s, x, g, p: s + 0.2 * x - g - 0.2 * 0.7 * p, S @ second, second, gradient, first)
    norm = lambda t: float(sum(jnp.sum(jnp.abs(x) ** 2) for x in jax.tree.leaves(t))) ** 0.5
    assert norm(residual) <= 1e-5 * norm(gradient)
    assert bool(again.converged) and float(again.residual_norm) <= 1e-6


def test_fisher_of_a_classifier_preconditions_its_gradient():
    tx = natural_gradient(lambda p, x: logits(p, (x,)), distribution="categorical", shift=1e-2, rtol=1e-5)
    gradient = jax.grad(mean_loss)(PARAMS, (X, LABELS))
    weights = jnp.linspace(0.5, 1, 16)
    step, state = tx.update(gradient, tx.init(PARAMS), PARAMS, samples=X, weights=weights, unrelated=3)
    F = krylov.fisher(lambda p, x: logits(p, (x,)), PARAMS, X, weights=weights)
    residual = jax.tree.map(lambda f, x, g: f + 1e-2 * x - g, F @ step, step, gradient)
    norm = lambda t: float(sum(jnp.sum(x**2) for x in jax.tree.leaves(t))) ** 0.5
    assert norm(residual) <= 1.1e-5 * norm(gradient)
    assert bool(state.converged)


def test_what_is_missing_is_named():
    tx = natural_gradient(networks.mixed)
    params = networks.mixed_params(REAL)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(params, tx.init(params))
    with pytest.raises(ValueError, match="samples="):
        tx.update(params, tx.init(params), params, batch=X)
    with pytest.raises(ValueError, match="natural_gradient: shift must be real and not negative"):
        tx.update(params, tx.init(params), params, samples=X, shift=-1.0)


def test_gradients_that_are_not_finite_are_said_so():
    tx = natural_gradient(logits, distribution="categorical")
    nothing = jax.tree.map(lambda p: jnp.nan * p, PARAMS)
    _, state = tx.update(nothing, tx.init(PARAMS), PARAMS, samples=(X,))
    assert not bool(state.converged) and bool(jnp.isnan(state.residual_norm))
