"""A quench of the transverse-field Ising chain: imaginary time to the ground state, then real time, against exact.

The time-dependent variational principle moves the parameters so that the network follows the Schroedinger equation as
well as it can:

    min ||J dp/dt - e||,    e = -E_loc in imaginary time,   e = -i E_loc in real time,

which is the call ``krylov.natural_gradient`` with these values: one line for both kinds of time, right for real and
complex parameters. Here all configurations are summed over with their probabilities as weights, so that the only
errors are those of the network, the shift and the integrator; with samples from a Markov chain leave out ``weights``.

Run ``python tdvp_quench.py``.
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import krylov

PLOT = Path(__file__).with_suffix(".png")


def log_cosh(z):
    z = jnp.where(z.real < 0, -z, z)
    return z + jnp.log1p(jnp.exp(-2 * z)) - np.log(2.0)


def log_psi(params, spins):
    """Complex restricted Boltzmann machine, made invariant under translations: its kernel is one filter a feature."""
    sites = spins.shape[-1]
    shifts = (jnp.arange(sites)[:, None] + jnp.arange(sites)) % sites
    hidden = jnp.einsum("nts,fs->nft", spins[:, shifts], params["filters"]) + params["bias"][:, None]
    return log_cosh(hidden).sum((-1, -2))


def random_params(key, sites, features, scale=0.1):
    keys = jax.random.split(key)
    return {
        "filters": scale * jax.random.normal(keys[0], (features, sites), complex),
        "bias": scale * jax.random.normal(keys[1], (features,), complex),
    }


def all_spins(sites):
    """All configurations, (2**sites, sites), +1 and -1."""
    return 1.0 - 2.0 * ((np.arange(2**sites)[:, None] >> np.arange(sites)) & 1)


def local_energies(params, spins, field):
    """Of H = -sum_i z_i z_{i+1} - field sum_i x_i, for each configuration."""
    flips = 1 - 2 * jnp.eye(spins.shape[-1])
    here = log_psi(params, spins)
    there = jax.vmap(lambda flip: log_psi(params, spins * flip))(flips)
    return -jnp.sum(spins * jnp.roll(spins, 1, -1), -1) - field * jnp.exp(there - here).sum(0)


def probabilities(params, spins):
    weights = 2 * log_psi(params, spins).real
    return jax.nn.softmax(weights)


class Observed(NamedTuple):
    energy: jax.Array
    magnetisation: jax.Array  # <x> per site
    residual: jax.Array  # of the linear system, relative
    iterations: jax.Array


def velocity(params, spins, field, factor, shift, rtol):
    """dp/dt; factor -1 for imaginary time, -1j for real time."""
    weights = probabilities(params, spins)
    energies = local_energies(params, spins, field)
    dp, solution = krylov.natural_gradient(
        log_psi, params, spins, factor * energies, weights=weights, shift=shift, rtol=rtol, holomorphic=True
    )
    flips = -local_energies(params, spins, 1.0) - jnp.sum(spins * jnp.roll(spins, 1, -1), -1)
    return dp, Observed(
        energy=jnp.sum(weights * energies).real,
        magnetisation=jnp.sum(weights * flips).real / spins.shape[-1],
        residual=solution.residual_norm / solution.rhs_norm,
        iterations=solution.iterations,
    )


@partial(jax.jit, static_argnames="steps")
def evolve(params, spins, field, factor, dt, steps, shift=1e-6, rtol=1e-8):
    """Runge-Kutta of fourth order; returns the parameters and what was observed at the beginning of each step."""

    def step(params, _):
        def stage(carry, weights):  # the four stages share one compiled velocity
            slope, total = carry
            h, share = weights
            here = jax.tree.map(lambda p, d: p + h * d, params, slope)
            slope, observed = velocity(here, spins, field, factor, shift, rtol)
            return (slope, jax.tree.map(lambda t, d: t + share * d, total, slope)), observed

        nothing = jax.tree.map(jnp.zeros_like, params)
        weights = dt * jnp.array([0, 0.5, 0.5, 1]), dt * jnp.array([1, 2, 2, 1]) / 6
        (_, total), observed = jax.lax.scan(stage, (nothing, nothing), weights)
        return jax.tree.map(jnp.add, params, total), jax.tree.map(lambda x: x[0], observed)

    return jax.lax.scan(step, params, None, length=steps)


def exact(sites, before, after, times):
    """Ground energy at the field before, and <x> per site at each time after it has changed."""
    spins = all_spins(sites)
    size = len(spins)
    diagonal = np.diag(-np.sum(spins * np.roll(spins, 1, -1), -1))
    flips = sum(np.eye(size)[np.arange(size) ^ (1 << i)] for i in range(sites))
    energies, states = np.linalg.eigh(diagonal - before * flips)
    levels, modes = np.linalg.eigh(diagonal - after * flips)
    psi = modes @ (np.exp(-1j * np.outer(levels, times)) * (modes.T @ states[:, 0])[:, None])
    return energies[0], np.einsum("at,ab,bt->t", psi.conj(), flips, psi).real / sites


class Result(NamedTuple):
    ground_error: float  # relative
    largest_error: float  # of <x> over the run
    times: np.ndarray
    magnetisation: np.ndarray
    exact: np.ndarray
    residual: float  # largest relative residual of a linear system
    plot: Path | None


def main(sites=8, features=3, before=2.0, after=0.5, imaginary=(0.02, 150), real=(0.01, 150), seed=0, plot=PLOT):
    """Imaginary and real: the time step and the number of steps."""
    jax.config.update("jax_enable_x64", True)
    spins = jnp.asarray(all_spins(sites))
    params = random_params(jax.random.key(seed), sites, features)
    params, cooling = evolve(params, spins, before, -1.0 + 0j, *imaginary)
    _, observed = evolve(params, spins, after, -1j, *real)
    times = real[0] * np.arange(real[1])
    ground, reference = exact(sites, before, after, times)
    ground_error = float((cooling.energy[-1] - ground) / abs(ground))
    magnetisation = np.asarray(observed.magnetisation)
    largest = float(np.abs(magnetisation - reference).max())
    residual = float(max(cooling.residual.max(), observed.residual.max()))
    print(f"ground state at field {before}: relative error of the energy {ground_error:.1e}")
    print(f"after the quench to {after}: largest error of <x> up to t = {times[-1]:.2f} is {largest:.1e}")
    print(f"linear systems: largest residual {residual:.0e}, {float(observed.iterations.mean()):.0f} iterations each")
    print(f"energy after the quench: {observed.energy[0]:.6f} at the start, {observed.energy[-1]:.6f} at the end")
    if plot is not None:
        plot_quench(times, magnetisation, reference, plot)
        print(f"plot: {plot}")
    return Result(ground_error, largest, times, magnetisation, reference, residual, plot)


def plot_quench(times, found, reference, path):
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, height_ratios=[3, 1], layout="constrained")
    top.plot(times, reference, color="0.6", lw=4, label="exact")
    top.plot(times, found, color="tab:blue", lw=1.5, label="network, TDVP")
    top.set(ylabel=r"$\langle\sigma^x\rangle$ per site", title="Quench of a transverse-field Ising chain")
    top.legend(frameon=False)
    bottom.semilogy(times, np.maximum(np.abs(found - reference), 1e-16), color="tab:red", lw=1)
    bottom.set(xlabel="time", ylabel="error")
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
