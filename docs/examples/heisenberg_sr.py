"""Ground state of a Heisenberg chain by stochastic reconfiguration, from random parameters.

The periodic spin-1/2 chain H = sum_i S_i . S_{i+1} has its ground state at zero magnetisation. A complex restricted
Boltzmann machine gives log psi(s), a Metropolis sampler draws configurations s from |psi|^2, and each step moves the
parameters along the natural gradient dp, the solution of

    (S + shift) dp = F,    S = J^H J,    F = J^H E_loc,

with J the centred Jacobian of log psi over the samples. ``krylov`` multiplies by S without ever forming it.

Run ``python heisenberg_sr.py``; then put your own network in place of ``log_psi`` and ``random_params``.
"""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import scipy.sparse.linalg
import tqdm

import krylov

PLOT = Path(__file__).with_suffix(".png")

# --- The wave function: any function log_psi(params, spins) in JAX ----------------------------------------------------


def log_cosh(z):
    z = jnp.where(z.real < 0, -z, z)  # cosh is even; this side of the axis exp(-2 z) cannot overflow
    return z + jnp.log1p(jnp.exp(-2 * z)) - np.log(2.0)


def log_psi(params, spins):
    """Complex restricted Boltzmann machine; spins (..., sites) with entries +1 and -1, result (...)."""
    hidden = spins @ params["kernel"] + params["bias"]
    return log_cosh(hidden).sum(-1) + spins @ params["visible_bias"]


def random_params(key, sites, hidden, scale=0.05):
    shapes = {"kernel": (sites, hidden), "bias": (hidden,), "visible_bias": (sites,)}
    keys = jax.random.split(key, len(shapes))
    return {name: scale * jax.random.normal(k, shapes[name], complex) for name, k in zip(shapes, keys, strict=True)}


# --- The Hamiltonian --------------------------------------------------------------------------------------------------
# Every second spin is turned by 180 degrees about z (Marshall's sign rule; the length must be even): the exchange terms
# change sign and the ground state becomes positive, which is easier to learn. The energies stay as they are.


def local_energy(params, spins):
    """E_loc(s) = sum_s' H_ss' psi(s') / psi(s) of one configuration (sites,)."""
    sites = spins.size
    one_site = jnp.eye(sites)
    exchange_bond = 1 - 2 * (one_site + jnp.roll(one_site, 1, axis=1))  # row i flips spins i and i + 1
    ratios = jnp.exp(log_psi(params, spins * exchange_bond) - log_psi(params, spins))
    neighbour = jnp.roll(spins, -1)
    return jnp.sum(spins * neighbour / 4 - jnp.where(spins != neighbour, ratios / 2, 0))


def exact_ground_energy(sites):
    """Lowest eigenvalue at zero magnetisation, by sparse diagonalisation."""
    states = np.arange(2**sites)
    states = states[np.bitwise_count(states) == sites // 2]
    hamiltonian = scipy.sparse.csr_array((states.size, states.size))
    for i in range(sites):
        bond = (1 << i) | (1 << (i + 1) % sites)
        antiparallel = np.bitwise_count(states & bond) == 1
        row = np.flatnonzero(antiparallel)
        column = np.searchsorted(states, states[row] ^ bond)
        hamiltonian += scipy.sparse.diags_array(np.where(antiparallel, -0.25, 0.25))
        hamiltonian += scipy.sparse.coo_array((np.full(row.size, -0.5), (row, column)), hamiltonian.shape)
    return scipy.sparse.linalg.eigsh(hamiltonian, k=1, which="SA", return_eigenvectors=False)[0]


# --- The sampler ------------------------------------------------------------------------------------------------------


def random_spins(key, chains, sites):
    """Random configurations (chains, sites) with as many spins up as down."""
    alternating = jnp.where(jnp.arange(sites) % 2 == 0, 1.0, -1.0)
    return jax.vmap(jax.random.permutation, (0, None))(jax.random.split(key, chains), alternating)


def metropolis(params, spins, key, moves):
    """Run one chain: exchange a random up spin with a random down spin, accept with probability |psi'/psi|^2."""

    def move(chain, key):
        spins, amplitude = chain
        pick_key, accept_key = jax.random.split(key)
        lottery = jax.random.uniform(pick_key, spins.shape)
        up, down = jnp.argmax(lottery * (spins > 0)), jnp.argmax(lottery * (spins < 0))
        exchanged = spins.at[up].set(-1).at[down].set(1)
        proposal = exchanged, log_psi(params, exchanged)
        accepted = jnp.log(jax.random.uniform(accept_key)) < 2 * (proposal[1] - amplitude).real
        return jax.tree.map(lambda new, old: jnp.where(accepted, new, old), proposal, chain), None

    (spins, _), _ = jax.lax.scan(move, (spins, log_psi(params, spins)), jax.random.split(key, moves))
    return spins


# --- Stochastic reconfiguration ---------------------------------------------------------------------------------------


class Record(NamedTuple):
    """What one step reports; after the run, arrays over the steps."""

    energy: np.ndarray
    error: np.ndarray  # statistical, one standard deviation
    iterations: np.ndarray  # of CG
    converged: np.ndarray


@jax.jit
def sr_step(params, spins, key, learning_rate, shift):
    """Draw one new sample from each chain and take one natural-gradient step. Compiled once for the whole run."""
    chains, sites = spins.shape
    keys = jax.random.split(key, chains)
    spins = jax.vmap(lambda s, k: metropolis(params, s, k, moves=2 * sites))(spins, keys)
    energies = jax.vmap(local_energy, (None, 0))(params, spins)

    J = krylov.Jacobian(log_psi, params, spins, center=True)  # add chunk_size=... when memory is short
    S = J.gram()  # the quantum geometric tensor
    F = J.H @ J.sample_vector(energies)  # the forces
    sol = krylov.solve(S, F, method="cg", shift=shift, rtol=1e-3)
    params = jax.tree.map(lambda p, d: p - learning_rate * d, params, sol.x)

    energies = energies.real
    return params, spins, Record(energies.mean(), energies.std() / chains**0.5, sol.iterations, sol.converged)


class Result(NamedTuple):
    exact: float
    steps: Record
    relative_error: float  # of the mean energy over the last steps
    uncertainty: float  # its standard error
    plot: Path | None


def main(
    sites=16,
    hidden=32,
    chains=1024,
    steps=120,
    learning_rate=0.1,
    shift=1e-3,
    average=40,
    seed=0,
    plot=PLOT,
):
    """Run ``steps`` steps, then hold the mean energy of the last ``average`` of them against exact diagonalisation."""
    exact = exact_ground_energy(sites)
    params_key, spins_key, run_key = jax.random.split(jax.random.key(seed), 3)
    params = random_params(params_key, sites, hidden)
    spins = random_spins(spins_key, chains, sites)  # psi is nearly flat at first, so these are already fair samples

    records = []
    with tqdm.trange(steps, desc="SR", dynamic_ncols=True, disable=None) as bar:
        for step in bar:
            params, spins, record = sr_step(params, spins, jax.random.fold_in(run_key, step), learning_rate, shift)
            records.append(jax.device_get(record))
            energy, error, iterations, converged = records[-1]
            solver = f"CG {iterations} its, {'converged' if converged else 'NOT CONVERGED'}"
            bar.set_postfix_str(f"E = {energy:.4f} +- {error:.4f}, exact {exact:.4f}, {solver}")
    record = Record(*map(np.array, zip(*records, strict=True)))

    last = record.energy[-average:]
    mean, uncertainty = mean_and_error(last)
    relative_error, uncertainty = (mean - exact) / abs(exact), uncertainty / abs(exact)
    print(f"energy of the last {len(last)} steps {mean:.5f}, exact {exact:.5f}")
    print(f"relative error {relative_error:.1e} +- {uncertainty:.0e}")
    print(f"CG: {record.iterations.mean():.0f} iterations a step, {record.converged.sum()} of {steps} solves converged")
    if plot is not None:
        plot_convergence(record, exact, plot)
        print(f"convergence plot: {plot}")
    return Result(exact, record, relative_error, uncertainty, plot)


def mean_and_error(energies, blocks=10):
    """Mean and standard error; from blocks of steps, as successive steps are correlated."""
    means = [block.mean() for block in np.array_split(energies.astype(float), min(blocks, len(energies)))]
    return np.mean(means), np.std(means, ddof=1) / len(means) ** 0.5


def plot_convergence(record, exact, path):
    step = np.arange(1, len(record.energy) + 1)
    excess, error = (record.energy.astype(float) - exact) / abs(exact), record.error / abs(exact)
    start = np.argmax(excess < 3 * error)  # from here on noise hides the progress of a single step
    window = min(20, len(step) - start)
    smooth = np.convolve(excess[start:], np.ones(window) / window, "valid")
    middle = step[start + window // 2 :][: smooth.size]

    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(6.4, 5.4), height_ratios=[3, 1], layout="constrained"
    )
    top.semilogy(step, abs(excess), ".", color="0.72", markersize=4, label="each step")
    top.semilogy(step, error, color="tab:orange", lw=1, label="statistical error of a step")
    top.semilogy(middle, abs(smooth), color="tab:blue", lw=2, label=f"mean of {window} steps")
    top.axhline(1e-3, color="0.3", lw=1, ls="--")
    top.text(step[-1], 1.1e-3, "goal", ha="right", va="bottom", color="0.3")
    top.set(ylabel=r"relative energy error $|E - E_0|\,/\,|E_0|$", ylim=(1e-5, 1))
    top.set_title("Stochastic reconfiguration of a Heisenberg chain")
    top.legend(frameon=False)
    bottom.plot(step, record.iterations, color="tab:blue", lw=1)
    bottom.set(xlabel="step", ylabel="CG iterations", ylim=(0, None))
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
