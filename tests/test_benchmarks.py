"""Benchmarks scaled down: the products and flops of a million parameters, steps of stochastic reconfiguration."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import million, steps

PARAMETERS, SAMPLES, CHUNK = 1000, 599, 120
PROBLEMS = {"real": million.real_problem, "complex": million.complex_problem}

pytestmark = pytest.mark.x64_only


@pytest.fixture(params=PROBLEMS)
def problem(request):
    return PROBLEMS[request.param](PARAMETERS)


def reference(problem, samples, v):
    """S v in double precision from the rows of each chunk of samples."""
    wide = jnp.complex128 if any(map(jnp.iscomplexobj, jax.tree.leaves(problem.params))) else jnp.float64
    params = jax.tree.map(lambda p: p.astype(wide), problem.params)
    flat, unravel = jax.flatten_util.ravel_pytree(params)

    @jax.jit
    def rows_of(chunk):
        f = lambda flat: problem.network(unravel(flat), chunk)
        return jax.jacrev(f, holomorphic=wide == jnp.complex128)(flat)

    rows = np.concatenate([rows_of(samples[i : i + 100]) for i in range(0, len(samples), 100)])
    rows = rows - rows.mean(0)
    product = rows.conj().T @ (rows @ np.asarray(jax.flatten_util.ravel_pytree(v)[0]))
    return np.asarray(product) / len(samples)


def test_product_is_that_of_dense_rows_in_double_precision(problem):
    J, _ = million.make(problem, SAMPLES, CHUNK)
    keys = iter(jax.random.split(jax.random.key(5), 10))
    v = jax.tree.map(lambda p: jax.random.normal(next(keys), p.shape, p.dtype), problem.params)
    expected = reference(problem, million.random_samples(jax.random.key(2), SAMPLES, problem.sites), v)
    found = np.asarray(jax.flatten_util.ravel_pytree(J.gram() @ v)[0])
    assert found.dtype == (np.complex64 if np.iscomplexobj(expected) else np.float32)
    assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected)


def test_no_more_flops_are_counted_than_the_compiled_product_has(problem):
    J, _ = million.make(problem, CHUNK, CHUNK)
    v = problem.params
    compiled = jax.jit(lambda J, v: J.gram() @ v).lower(J, v).compile().cost_analysis()["flops"]
    counted = problem.flops * CHUNK
    assert 0.5 * compiled < counted <= compiled


def test_command_writes_its_figures_and_memory_is_flat(tmp_path, capsys):
    def figures(samples, iterations):
        file = tmp_path / f"{samples}.json"
        arguments = f"--parameters {PARAMETERS} --samples {samples} --chunk-size {CHUNK} --iterations {iterations}"
        million.main([*arguments.split(), "--seconds", "0.01", "--json", str(file), "--complex"])
        return json.loads(file.read_text())

    small, large = figures(SAMPLES, 3), figures(2 * SAMPLES, 0)
    assert small["parameters"] >= PARAMETERS and small["samples"] == SAMPLES
    assert small["CG iterations"] == 3 and 0 < small["residual / rhs"] < 0.9
    assert small["S v / matrix product"] == pytest.approx(small["rate of S v"] / small["rate of a matrix product"])
    assert large["temporary bytes"] == small["temporary bytes"]
    assert "S v / matrix product" in capsys.readouterr().out


@pytest.mark.parametrize("name", steps.SYSTEMS)
def test_local_energies_are_those_stored(name):
    system = steps.SYSTEMS[name]()
    params, spins, stored = system.trained(4)
    parts = (jnp.asarray(x) for x in (spins.astype(float), system.bonds, system.diagonal, system.exchange))
    np.testing.assert_allclose(steps.local_energies(system.log_psi, params, *parts), stored, rtol=1e-8)


@pytest.mark.slow
def test_steps_of_every_method_have_the_residuals_they_claim(tmp_path, capsys):
    file = tmp_path / "steps.json"
    steps.main(["--system", "rbm", "--steps", "2", "--samples", "64", "--rank", "8", "--json", str(file)])
    (found,) = json.loads(file.read_text())
    assert found["samples"] == 64 and len(found["steps"]) == 2
    for step in found["steps"]:
        assert step["cholesky"]["residual"] < 1e-8
        assert 1e-8 < step["recycled"]["residual"] <= 1.001e-5
        assert step["cg"]["iterations"] > 10 and step["recycled"]["iterations"] > 0
        assert -36 < step["energy"] < -35
    assert "1700 parameters, 64 samples" in capsys.readouterr().out
