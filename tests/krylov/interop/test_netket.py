"""NetKet's states, preconditioners and drivers on krylov: the same steps, the same energies, nothing traced twice."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import netket as nk
import numpy as np
import pytest

import krylov
from krylov.interop.netket import QGT, Solver, VMC_MatrixFree, bicgstab, cg, gmres, lsmr, minres
from tests import problems
from tests.krylov.test_recompilation import compiling

pytestmark = [
    pytest.mark.x64_only,  # as NetKet sets it
    pytest.mark.filterwarnings("ignore::UserWarning"),  # what NetKet thinks of holomorphic networks and few samples
]

SITES = 5
HILBERT = nk.hilbert.Spin(0.5, SITES)
GRAPH = nk.graph.Chain(SITES)
TRACES = [0]


@functools.cache
def hamiltonian():
    """Made in a test: NetKet's operators are in double precision."""
    exchange = sum(
        nk.operator.spin.sigmay(HILBERT, i, dtype=complex) @ nk.operator.spin.sigmaz(HILBERT, (i + 1) % SITES)
        for i in range(SITES)
    )
    return (nk.operator.Ising(HILBERT, GRAPH, h=1.1) + 0.3 * exchange).to_jax_operator()


class Network(nn.Module):
    """Log-amplitudes of every kind of parameters and outputs; counts how often it is traced."""

    kind: str

    @nn.compact
    def __call__(self, x):
        TRACES[0] += 1
        first, second = {
            "real": (float, float),
            "complex output": (float, float),
            "holomorphic": (complex, complex),
            "not holomorphic": (complex, complex),
            "mixed": (float, complex),
        }[self.kind]
        init = nn.initializers.normal(0.3)
        hidden = nn.Dense(4, param_dtype=first, kernel_init=init, bias_init=init)(x)
        hidden = nk.nn.activation.log_cosh(hidden)
        if self.kind == "not holomorphic":
            hidden = hidden + 0.3 * hidden.conj() * jnp.abs(hidden)
        out = nn.Dense(2, param_dtype=second, kernel_init=init, use_bias=False)(hidden)
        if self.kind == "real":
            return out.sum(-1)
        return out[..., 0] + 1j * out[..., 1]


def full_sum(kind, **options):
    return nk.vqs.FullSumState(HILBERT, Network(kind), seed=1, **options)


def monte_carlo(kind, n_samples=64):
    sampler = nk.sampler.MetropolisLocal(HILBERT, n_chains=16)
    return nk.vqs.MCState(sampler, Network(kind), n_samples=n_samples, seed=1, sampler_seed=2)


def assert_close(tree, expected, tolerance):
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale)


REGULARISED = dict(diag_shift=0.02, diag_scale=0.05)


def dense_step(state, gradient, **shifts):
    """By NetKet's dense tensor on real parts and Cholesky."""
    tensor = nk.optimizer.qgt.QGTJacobianPyTree(state, holomorphic=False, **shifts)
    return tensor.solve(nk.optimizer.solver.cholesky, gradient)[0]


def some_vector(state):
    return jax.tree.map(lambda p: jnp.asarray(problems.random_vector(p.dtype, *p.shape)), state.parameters)


@pytest.mark.parametrize(
    "make, kind",
    [
        (full_sum, "not holomorphic"),
        (monte_carlo, "mixed"),
        pytest.param(full_sum, "real", marks=pytest.mark.slow),
    ],
)
def test_one_update_agrees_with_dense_cholesky(make, kind):
    state = make(kind)
    gradient = some_vector(state)
    tensor = QGT(state, **REGULARISED)
    expected = dense_step(state, gradient, **REGULARISED)
    found, info = tensor.solve(cg(rtol=1e-12), gradient)
    assert_close(found, expected, 1e-8)
    assert bool(info["converged"]) and float(info["relative_residual"]) <= 1e-12
    assert_close(tensor @ found, gradient, 1e-9)
    if kind == "not holomorphic":
        for solver in gmres, bicgstab:
            x, info = tensor.solve(solver(rtol=1e-11), gradient)
            assert bool(info["converged"])
            assert_close(x, expected, 1e-8)
        assert_close(tensor.solve(nk.optimizer.solver.cholesky, gradient)[0], expected, 1e-8)


def test_tensor_as_a_matrix_with_a_shift_for_each_parameter():
    state = full_sum("mixed")
    gradient = some_vector(state)
    shift = jax.tree.map(lambda p: jnp.full(p.shape, 0.01 * p.ndim), state.parameters)
    tensor = QGT(state, diag_shift=shift, diag_scale=0.05)
    dense = tensor.to_dense()
    parts = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(krylov.operators.split_real(gradient))])
    expected = jnp.linalg.solve(dense, parts)
    found, _ = tensor.solve(cg(rtol=1e-12), gradient)
    found = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(krylov.operators.split_real(found))])
    assert_close(found, expected, 1e-9)
    assert_close((tensor + 0.5).to_dense(), dense + 0.5 * jnp.eye(len(dense)), 1e-12)


@pytest.mark.slow
def test_lsmr_is_right_on_tensors_and_matrices():
    state = full_sum("not holomorphic")
    gradient, solver = some_vector(state), lsmr(rtol=1e-11)
    shift = jax.tree.map(lambda p: jnp.full(p.shape, 0.02), state.parameters)
    found, info = QGT(state, diag_shift=shift, diag_scale=0.05).solve(solver, gradient)
    assert bool(info["converged"]) and float(info["relative_residual"]) <= 1e-11
    assert_close(found, dense_step(state, gradient, **REGULARISED), 1e-8)
    A = jnp.diag(jnp.array([1.0, 1e-4, 0.0]))
    x, info = solver(A, jnp.array([1.0, 1.0, 0.0]))
    assert_close(x, jnp.array([1.0, 1e4, 0.0]), 1e-8)
    assert bool(info["converged"])
    assert not bool(solver(A, jnp.array([1.0, 1.0, 1.0]))[1]["converged"])  # has no solution
    with pytest.raises(ValueError, match="lsmr takes no preconditioner"):
        lsmr(preconditioner=krylov.Nystrom(4))


@pytest.mark.slow
def test_the_planner_chooses_for_tensor_and_driver():
    state = monte_carlo("complex output")
    gradient = some_vector(state)
    options = dict(chunk_size="auto", storage="auto")
    tensor = QGT(state, **REGULARISED, **options)
    assert_close(tensor @ gradient, QGT(state, **REGULARISED) @ gradient, 1e-12)
    driver = matrix_free(state, **options)
    run(driver, 1)
    assert bool(driver.info["converged"])


def test_weights_of_samples_stand_for_repeated_samples():
    state = monte_carlo("not holomorphic", 32)
    weights = np.tile([0.5, 1.5], 16)
    samples = np.asarray(state.samples).reshape(-1, SITES)
    J = krylov.Jacobian(
        lambda p, x: state._apply_fun({"params": p}, x),
        state.parameters,
        np.repeat(samples, [1, 3] * 16, 0),
        center=True,
    )
    v = some_vector(state)
    assert_close(QGT(state, weights=weights, chunk_size=7) @ v, J.gram() @ v, 1e-12)


def test_our_solvers_on_netkets_lazy_tensors():
    state = full_sum("not holomorphic")
    gradient = some_vector(state)
    expected = dense_step(state, gradient, diag_shift=0.05)
    for make, solver in ("QGTOnTheFly", gmres), ("QGTJacobianPyTree", bicgstab):
        tensor = getattr(nk.optimizer.qgt, make)(state, diag_shift=0.05, holomorphic=False)
        found, info = tensor.solve(solver(rtol=1e-11), gradient)
        assert bool(info["converged"])
        assert_close(found, expected, 1e-8)


def run(driver, steps=20):
    log = nk.logging.RuntimeLog()
    driver.run(steps, out=log, show_progress=False)
    return log, driver.state


def sr(state, **options):
    return nk.driver.VMC(
        hamiltonian(),
        nk.optimizer.Sgd(0.05),
        variational_state=state,
        preconditioner=nk.optimizer.SR(diag_shift=0.02, **options),
    )


def vmc_sr(state, **options):
    return nk.driver.VMC_SR(hamiltonian(), nk.optimizer.Sgd(0.05), variational_state=state, diag_shift=0.02, **options)


def matrix_free(state, **options):
    options = dict(diag_shift=0.02, rtol=1e-10) | options
    return VMC_MatrixFree(hamiltonian(), nk.optimizer.Sgd(0.05), variational_state=state, **options)


def assert_same_run(mine, reference):
    (log, state), (expected_log, expected) = mine, reference
    assert_close(state.parameters, expected.parameters, 1e-6)
    a, b = (np.asarray(x.data["Energy"]["Mean"]).real for x in (log, expected_log))
    np.testing.assert_allclose(a, b, atol=1e-6)
    assert a[-1] < a[0] - 0.5


def test_twenty_steps_of_sr_in_every_combination():
    kind, tight = "not holomorphic", cg(rtol=1e-10)
    dense = functools.partial(nk.optimizer.qgt.QGTJacobianDense, holomorphic=False)
    reference = run(sr(full_sum(kind), qgt=dense, solver=nk.optimizer.solver.cholesky))
    assert_same_run(run(sr(full_sum(kind), qgt=QGT(chunk_size=7), solver=tight, solver_restart=True)), reference)
    assert_same_run(run(sr(full_sum(kind), qgt=QGT(), solver=lsmr(rtol=1e-10))), reference)
    lazy = functools.partial(nk.optimizer.qgt.QGTOnTheFly, holomorphic=False)
    assert_same_run(run(sr(full_sum(kind), qgt=lazy, solver=minres(rtol=1e-10))), reference)


def test_twenty_steps_of_min_sr_and_spring_without_a_matrix():
    kind, options = "complex output", dict(use_ntk=True, on_the_fly=False, momentum=0.8)
    reference = run(vmc_sr(monte_carlo(kind), linear_solver=nk.optimizer.solver.cholesky, **options))
    mine = run(matrix_free(monte_carlo(kind), route="samples", momentum=0.8, chunk_size=25))
    assert_same_run(mine, reference)
    info = mine[0].data["info"]
    assert np.all(np.asarray(info["relative_residual"]["value"]) <= 1e-10)
    assert np.all(np.asarray(info["converged"]["value"]))
    assert np.all(np.asarray(info["iterations"]["value"]) > 0)
    assert_same_run(run(vmc_sr(monte_carlo(kind), linear_solver=cg(rtol=1e-10), **options)), reference)


def test_twenty_steps_of_sr_without_a_matrix():
    kind = "not holomorphic"
    reference = run(vmc_sr(full_sum(kind), use_ntk=False, linear_solver=nk.optimizer.solver.cholesky))
    assert_same_run(run(matrix_free(full_sum(kind), route="parameters")), reference)
    driver = matrix_free(full_sum(kind), route="parameters", recycler=krylov.Recycler(krylov.Nystrom(12)))
    mine = run(driver)
    assert_same_run(mine, reference)
    assert np.all(np.asarray(mine[0].data["info"]["relative_residual"]["value"]) <= 1e-10)
    assert int(driver._recycler_state.steps) == 20


@pytest.mark.parametrize(
    "build",
    [
        lambda state: matrix_free(
            state, momentum=0.5, diag_shift=lambda step: 0.1 / (1 + step), preconditioner=krylov.Nystrom(8)
        ),
        lambda state: sr(state, qgt=QGT(), solver=cg(preconditioner=krylov.Nystrom(8))),
        lambda state: matrix_free(state, route="samples", recycler=krylov.Recycler(krylov.Nystrom(8))),
    ],
)
def test_nothing_is_traced_or_compiled_again_from_step_to_step(build):
    driver = build(monte_carlo("mixed"))
    run(driver, 3)
    before = TRACES[0]
    with compiling(0):
        run(driver, 5)
    assert TRACES[0] == before


def test_time_evolution_with_our_tensor_and_solver():
    def evolve(qgt, solver):
        state = full_sum("not holomorphic")
        driver = nk.experimental.TDVP(
            hamiltonian(),
            state,
            nk.experimental.dynamics.Euler(dt=0.01),
            propagation_type="real",
            qgt=qgt,
            linear_solver=solver,
        )
        driver.run(0.05, show_progress=False)
        return state.parameters

    dense = functools.partial(nk.optimizer.qgt.QGTJacobianPyTree, holomorphic=False, diag_shift=1e-3)
    expected = evolve(dense, nk.optimizer.solver.cholesky)
    assert_close(evolve(QGT(diag_shift=1e-3), gmres(rtol=1e-10)), expected, 1e-6)


def test_solvers_are_equal_and_hash_alike_where_their_options_are():
    assert cg(rtol=1e-3) == cg(rtol=1e-3) == Solver("cg", rtol=1e-3) != cg
    assert hash(Solver(krylov.GMRES(restart=7))) == hash(Solver(krylov.GMRES(restart=7)))
    with pytest.raises(TypeError):
        cg(tolerance=1e-3)
    with pytest.raises(TypeError, match="both A and b"):
        cg(jnp.eye(2))


def test_bad_input_is_named():
    state = full_sum("real")
    with pytest.raises(ValueError, match="unknown mode"):
        QGT(state, mode="imaginary")
    with pytest.raises(ValueError, match="unknown route"):
        matrix_free(state, route="sideways")
    with pytest.raises(ValueError, match="VMC_MatrixFree: a recycler brings its own method"):
        matrix_free(state, method="minres", recycler=krylov.Recycler())
    with pytest.raises(ValueError, match="imaginary part"):
        QGT(state) @ jax.tree.map(lambda p: 1j * p, state.parameters)
