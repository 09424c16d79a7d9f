"""The examples run, in a short setting, and show what they say they show."""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "examples"

pytestmark = pytest.mark.x64_only


@pytest.fixture(autouse=True)
def precision_restored():
    yield
    jax.config.update("jax_enable_x64", True)


def example(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_picture(path):
    assert path.read_bytes().startswith(b"\x89PNG")


def test_quench_follows_exact_dynamics(tmp_path):
    found = example("tdvp_quench").main(sites=6, imaginary=(0.03, 60), real=(0.02, 20), plot=tmp_path / "quench.png")
    assert found.ground_error < 1e-3
    assert found.largest_error < 5e-3
    assert np.ptp(found.exact) > 0.1
    assert found.residual < 1e-7
    assert_picture(found.plot)


def test_gauss_newton_solves_the_poisson_equation(tmp_path):
    found = example("pinn_gauss_newton").main(
        widths=(12,), count=150, steps=40, adam_steps=1000, seconds_for_adam=None, plot=tmp_path / "pinn.png"
    )
    assert found.gauss_newton.errors[-1] < 0.1 * found.adam.errors[-1]
    assert_picture(found.plot)


def test_natural_gradient_trains_a_classifier_with_pooling_layers(tmp_path):
    found = example("classifier").main(
        channels=(3, 4), steps=8, batch=100, test_images=100, adam_factor=1, chunk_size=40, plot=tmp_path / "c.png"
    )
    assert np.all(np.isfinite(found.natural.losses))
    assert found.natural.losses[-1] < found.natural.losses[0]
    assert found.natural.losses[-1] < found.adam.losses[-1]
    assert np.all(found.natural.iterations > 0)
    assert_picture(found.plot)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_min_sr_without_a_matrix_goes_the_way_of_the_dense_one(tmp_path):
    found = example("netket_j1j2").main(
        samples=48, steps=4, width=4, depth=1, rtol=1e-9, on_the_fly=False, plot=tmp_path / "j1j2.png"
    )
    np.testing.assert_allclose(found.matrix_free.energies, found.dense.energies, atol=1e-6)
    assert found.matrix_free.energies[-1] < found.matrix_free.energies[0]
    assert found.matrix_free.residuals.max() <= 1e-9
    assert_picture(found.plot)
