"""Curvature operators against dense derivatives of the loss as a function of real numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import krylov
from krylov.operators import Jacobian, check_operator, join_real, split_real
from krylov.operators.metric import MetricGramOperator, PartsDiagonal
from tests import networks, problems

N, CLASSES = 12, 3
REAL, COMPLEX = jnp.result_type(float), jnp.result_type(complex)
TOLERANCE = 1e-12 if jax.config.jax_enable_x64 else 2e-5
WEIGHTS = np.random.default_rng(3).uniform(0.2, 1, N)
X = networks.samples(N, REAL)
LABELS = jnp.arange(N) % CLASSES
rng = np.random.default_rng(0)
PARAMS = {"in": jnp.asarray(rng.normal(size=(5, 4)) / 2, REAL), "out": jnp.asarray(rng.normal(size=(4, CLASSES)), REAL)}


def logits(params, batch):
    return jnp.tanh(batch[0] @ params["in"]) @ params["out"]


def cross_entropy(outputs, batch):
    return jax.nn.logsumexp(outputs, -1) - jnp.take_along_axis(outputs, batch[1][:, None], 1)[:, 0]


def weighted(losses):
    return jnp.sum(WEIGHTS / WEIGHTS.sum() * losses)


def real_hessian(function, params):
    """The dense Hessian in real and imaginary parts."""
    reals = split_real(params)
    flat, unravel = jax.flatten_util.ravel_pytree(reals)
    return np.asarray(jax.hessian(lambda v: function(join_real(unravel(v), params)))(flat))


def same(found, expected):
    assert problems.norm(np.asarray(found) - expected) <= TOLERANCE * problems.norm(expected)


def linearized_loss(f, loss, params):
    """The loss of the network linearized at the parameters: its Hessian is the Gauss-Newton matrix."""

    def of(moved):
        out, tangent = jax.jvp(f, (params,), (jax.tree.map(jnp.subtract, moved, params),))
        return weighted(loss(jax.tree.map(jnp.add, out, tangent)))

    return of


def test_gauss_newton_is_the_hessian_of_the_loss_of_the_linearized_network():
    batch = X, LABELS
    G = krylov.gauss_newton(logits, cross_entropy, PARAMS, batch, weights=WEIGHTS, chunk_size=5)
    of = linearized_loss(lambda p: logits(p, batch), lambda z: cross_entropy(z, batch), PARAMS)
    same(G.as_matrix(), real_hessian(of, PARAMS))
    assert G.is_positive
    assert check_operator(G, throw=False).passed


def test_fisher_of_logits_is_their_gauss_newton_matrix_and_needs_no_labels():
    F = krylov.fisher(lambda p, x: logits(p, (x,)), PARAMS, X, weights=WEIGHTS)
    of = linearized_loss(lambda p: logits(p, (X,)), lambda z: cross_entropy(z, (X, LABELS)), PARAMS)
    same(F.as_matrix(), real_hessian(of, PARAMS))


@pytest.mark.parametrize("distribution", ["bernoulli", "poisson", "gaussian", "categorical"])
def test_fisher_is_the_mean_square_of_the_score_over_the_distribution(distribution):
    """Scores of all labels, weighted by their probabilities; of quadrature points for the Gaussian."""

    def f(params, x):
        return logits(params, (x,)) if distribution == "categorical" else logits(params, (x,))[:, 0]

    def log_prob(z, label):
        if distribution == "categorical":
            return z[..., label] - jax.nn.logsumexp(z, -1)
        if distribution == "bernoulli":
            return label * z - jax.nn.softplus(z)
        if distribution == "poisson":
            return label * z - jnp.exp(z) - jax.scipy.special.gammaln(label + 1.0)
        return -0.5 * label**2 + 0.0 * z

    z = f(PARAMS, X)
    jacobian = jax.jacobian(lambda v: f(unravel(v), X))
    flat, unravel = jax.flatten_util.ravel_pytree(PARAMS)
    rows = np.asarray(jacobian(flat)).reshape(N, -1, flat.size)
    total = 0
    labels = {"categorical": range(CLASSES), "bernoulli": range(2), "poisson": range(60), "gaussian": ()}[distribution]
    for label in labels:
        score = np.asarray(jax.grad(lambda z, label=label: log_prob(z, label).sum())(z)).reshape(N, -1)
        probability = np.exp(np.asarray(log_prob(z, label)))
        per_sample = np.einsum("nk,nkp->np", score, rows)
        total = total + np.einsum("n,np,nq->pq", WEIGHTS / WEIGHTS.sum() * probability, per_sample, per_sample)
    if distribution == "gaussian":
        total = np.einsum("n,nkp,nkq->pq", WEIGHTS / WEIGHTS.sum(), rows, rows)
    F = krylov.fisher(f, PARAMS, X, distribution=distribution, weights=WEIGHTS, chunk_size=5)
    same(F.as_matrix(), total)


def test_fisher_of_log_probabilities_is_the_second_moment_of_the_score():
    f = lambda p, x: jax.nn.log_softmax(logits(p, (x,)))[:, 0]
    assert krylov.fisher(f, PARAMS, X, distribution="log_prob").is_positive
    rows = jax.jacobian(lambda p: f(p, X))(PARAMS)
    rows = np.concatenate([np.reshape(r, (N, -1)) for r in jax.tree.leaves(rows)], 1)
    same(krylov.fisher(f, PARAMS, X, distribution="log_prob").as_matrix(), rows.T @ rows / N)


def loss_of_complex(params, x):
    return jnp.abs(networks.mixed(params, x)) ** 2 + jnp.cos(params["offset"].imag * x[:, 0])


@pytest.mark.slow
def test_hessian_in_mixed_parameters():
    params = networks.mixed_params(REAL)
    H = krylov.hessian(loss_of_complex, params, X, weights=WEIGHTS, chunk_size=5)
    same(H.as_matrix(), real_hessian(lambda p: weighted(loss_of_complex(p, X)), params))
    assert H.is_hermitian and not H.is_positive and H.field == "real"
    assert check_operator(H, throw=False).passed


@pytest.mark.slow
def test_gauss_newton_of_complex_outputs_and_mixed_parameters():
    """A loss that mixes real and imaginary parts: its Hessian is only R-linear."""
    params = networks.mixed_params(REAL)
    loss = lambda z, _: jnp.cosh(z.real + 0.5 * z.imag) + z.imag**2
    G = krylov.gauss_newton(networks.mixed, loss, params, X, weights=WEIGHTS, chunk_size=5)
    of = linearized_loss(lambda p: networks.mixed(p, X), lambda z: loss(z, None), params)
    same(G.as_matrix(), real_hessian(of, params))
    b = jax.tree.map(jnp.ones_like, params)
    for method in "cg", "gmres":
        sol = krylov.solve(G, b, method, shift=0.1, rtol=1e-4)
        assert bool(sol.converged)


def test_metrics_given_as_arrays():
    J = Jacobian(logits, PARAMS, (X, LABELS))
    matrix = np.asarray(J.as_matrix()).reshape(N, CLASSES, -1)
    diagonal = np.random.default_rng(1).uniform(0.1, 1, (N, CLASSES))
    same(
        MetricGramOperator(J, diagonal.astype(REAL)).as_matrix(), np.einsum("nkp,nk,nkq->pq", matrix, diagonal, matrix)
    )
    blocks = np.einsum("nij,nkj->nik", *2 * [np.random.default_rng(2).normal(size=(N, CLASSES, CLASSES))])
    op = MetricGramOperator(J, blocks.astype(REAL))
    same(op.as_matrix(), np.einsum("nkp,nkl,nlq->pq", matrix, blocks, matrix))
    assert op.is_positive and op.is_hermitian
    with pytest.raises(ValueError, match="does not fit the outputs"):
        MetricGramOperator(J, np.ones(N, REAL))


def test_operators_by_the_names_of_the_field():
    f = networks.mixed
    params = networks.mixed_params(REAL)
    S = krylov.quantum_geometric_tensor(f, params, X, weights=WEIGHTS, chunk_size=5)
    T = krylov.neural_tangent_kernel(f, params, X, weights=WEIGHTS, center=True)
    J = np.asarray(Jacobian(f, params, X, weights=WEIGHTS, center=True).as_matrix())
    same(S.as_matrix(), J.T @ J)
    same(T.as_matrix(), J @ J.T)
    assert S.is_positive and T.is_positive


def test_a_diagonal_of_parts():
    params = networks.mixed_params(REAL)
    parts = jax.tree.map(lambda x: 1 + x**2, split_real(params))
    D = PartsDiagonal(parts, params, positive=True)
    expected = np.concatenate([np.ravel(x) for x in jax.tree.leaves(parts)])
    same(D.as_matrix(), np.diag(expected))
    same(np.concatenate([np.ravel(x) for x in jax.tree.leaves(D.diagonal())]), expected)
    assert check_operator(D, throw=False).passed


@pytest.mark.slow
def test_products_differentiate_and_batch():
    """In the parameters too, through the metric and the Hessian."""
    v = jax.tree.map(lambda p: jnp.ones_like(p), PARAMS)

    def scalar(build):
        def of(params):
            out = build(params).mv(v)
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(out))

        return of

    def chunked(params):
        return krylov.gauss_newton(logits, cross_entropy, params, (X, LABELS), chunk_size=5)

    def whole(params):
        return krylov.gauss_newton(logits, cross_entropy, params, (X, LABELS))

    def hessian(params):
        return krylov.hessian(lambda p, b: cross_entropy(logits(p, b), b), params, (X, LABELS), chunk_size=5)

    a, b = (jax.grad(scalar(build))(PARAMS) for build in (chunked, whole))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e3 * TOLERANCE, atol=1e2 * TOLERANCE), a, b)
    direction = jax.tree.map(lambda p: 0.5 * jnp.cos(p), PARAMS)
    forward = jax.jvp(scalar(hessian), (PARAMS,), (direction,))[1]
    backward = jax.grad(scalar(hessian))(PARAMS)
    dot = sum(jnp.vdot(x, y) for x, y in zip(*map(jax.tree.leaves, (backward, direction))))
    np.testing.assert_allclose(forward, dot, rtol=1e3 * TOLERANCE)
    stacked = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), v)
    twice = jax.vmap(chunked(PARAMS).mv)(stacked)
    jax.tree.map(lambda y: np.testing.assert_allclose(2 * y[0], y[1], rtol=1e3 * TOLERANCE, atol=TOLERANCE), twice)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="one real loss for each sample"):
        krylov.gauss_newton(logits, lambda z, b: cross_entropy(z, b).mean(), PARAMS, (X, LABELS))
    with pytest.raises(ValueError, match="one real loss for each sample"):
        krylov.hessian(lambda p, b: logits(p, b), PARAMS, (X, LABELS))
    with pytest.raises(ValueError, match="unknown distribution"):
        krylov.fisher(logits, PARAMS, (X, LABELS), distribution="cauchy")
    with pytest.raises(ValueError, match="do not fit the distribution"):
        krylov.fisher(networks.mixed, networks.mixed_params(REAL), X, distribution="bernoulli")
    with pytest.raises(ValueError, match="last axis of classes"):
        krylov.fisher(lambda p, b: logits(p, b)[:, 0], PARAMS, (X, LABELS))
