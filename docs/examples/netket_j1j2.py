"""The frustrated J1-J2 model on a square lattice with a vision transformer in NetKet: minSR with and without a matrix.

NetKet's ``VMC_SR`` forms the neural tangent kernel, samples by samples, and factorizes it. ``VMC_MatrixFree`` of
``krylov.interop.netket`` takes the same step by conjugate gradients on products with the network alone: its memory
does not grow with the square of the number of samples, nor with samples times parameters. Both start from the same
parameters and samples and should go the same way.

Run ``python netket_j1j2.py``. Needs ``netket``.
"""

import functools
import time
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import matplotlib.pyplot as plt
import netket as nk
import numpy as np
import optax

from krylov.interop.netket import VMC_MatrixFree

PLOT = Path(__file__).with_suffix(".png")


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, param_dtype=x.dtype, dtype=x.dtype)
        z = nn.LayerNorm(param_dtype=x.dtype)(x)
        q, k, v = jnp.split(dense(3 * x.shape[-1], use_bias=False)(z), 3, -1)
        q, k, v = (a.reshape(*a.shape[:-1], self.heads, -1) for a in (q, k, v))
        weights = nn.softmax(jnp.einsum("...thd,...shd->...hts", q, k) / q.shape[-1] ** 0.5)
        x = x + dense(x.shape[-1])(jnp.einsum("...hts,...shd->...thd", weights, v).reshape(x.shape))
        z = nn.gelu(dense(2 * x.shape[-1])(nn.LayerNorm(param_dtype=x.dtype)(x)))
        return x + dense(x.shape[-1])(z)


class VisionTransformer(nn.Module):
    """Patches of 2 x 2 spins, real parameters, complex log-amplitude."""

    side: int
    width: int = 16
    heads: int = 4
    depth: int = 2

    @nn.compact
    def __call__(self, spins):
        half = self.side // 2
        x = spins.reshape(-1, half, 2, half, 2).swapaxes(2, 3).reshape(-1, half * half, 4).astype(float)
        x = nn.Dense(self.width, param_dtype=float)(x)
        x = x + self.param("position", nn.initializers.normal(0.1), (half * half, self.width), float)
        for _ in range(self.depth):
            x = Block(self.heads)(x)
        z = nn.LayerNorm(param_dtype=float)(x.mean(1))
        z = nn.Dense(2 * self.width, param_dtype=float)(z)
        real, imag = jnp.split(z, 2, -1)
        return nk.nn.activation.log_cosh(real + 1j * imag).sum(-1).reshape(spins.shape[:-1])


def hamiltonian(side, j2):
    """Spins with spin exchange of nearest neighbours 1 and of next nearest ones j2; Marshall's rule on nearest ones."""
    lattice = nk.graph.Square(side, max_neighbor_order=2)
    hilbert = nk.hilbert.Spin(0.5, side * side, total_sz=0)
    model = nk.operator.Heisenberg(hilbert, lattice, J=[1.0, j2], sign_rule=[True, False])
    return lattice, hilbert, model.to_jax_operator()


class Run(NamedTuple):
    energies: np.ndarray  # per site, in units of J1 with spins of length one half
    errors: np.ndarray
    seconds: float  # a step, the first two left out
    iterations: np.ndarray | None
    residuals: np.ndarray | None  # true ones, relative


def run(driver, steps, sites):
    log, clock = nk.logging.RuntimeLog(), []

    def tick(step, data, driver):
        clock.append(time.perf_counter())
        return True

    driver.run(steps, out=log, show_progress=False, callback=tick)
    energy, info = log.data["Energy"], log.data.get("info")
    return Run(
        np.asarray(energy["Mean"]).real / (4 * sites),
        np.asarray(energy["Sigma"]).real / (4 * sites),
        (clock[-1] - clock[1]) / (len(clock) - 2),
        None if info is None or "iterations" not in info else np.asarray(info["iterations"]["value"]),
        None if info is None or "iterations" not in info else np.asarray(info["relative_residual"]["value"]),
    )


class Result(NamedTuple):
    matrix_free: Run
    dense: Run
    plot: Path | None


def main(
    side=4, j2=0.5, width=8, depth=1, samples=256, steps=40, learning_rate=0.03, shift=1e-3, chunk_size=None,
    rtol=1e-3, seed=0, on_the_fly=True, plot=PLOT,
):  # fmt: skip
    """Sizes for some minutes on two cores; ``on_the_fly`` says by which of its two ways NetKet makes its kernel."""
    lattice, hilbert, model = hamiltonian(side, j2)
    optimizer = optax.sgd(learning_rate)

    def state():
        sampler = nk.sampler.MetropolisExchange(hilbert, graph=lattice, d_max=2, n_chains=min(samples, 256))
        network = VisionTransformer(side, width, depth=depth)
        return nk.vqs.MCState(
            sampler, network, n_samples=samples, seed=seed, sampler_seed=seed + 1, n_discard_per_chain=4
        )

    mine = VMC_MatrixFree(
        model, optimizer, variational_state=state(), diag_shift=shift, route="samples", rtol=rtol, chunk_size=chunk_size
    )
    print(f"{side} x {side} sites, {mine.state.n_parameters} parameters, {samples} samples")
    free = run(mine, steps, side**2)
    theirs = nk.driver.VMC_SR(
        model, optimizer, variational_state=state(), diag_shift=shift, use_ntk=True, on_the_fly=on_the_fly
    )
    dense = run(theirs, steps, side**2)
    for name, found in ("matrix-free minSR", free), ("NetKet's dense minSR", dense):
        last = found.energies[-max(steps // 6, 1) :]
        print(f"{name + ':':22}energy per site {last.mean():.5f}, {found.seconds:.2f} s a step")
    print(
        f"CG: {free.iterations.mean():.0f} +- {free.iterations.std():.0f} iterations a step, "
        f"largest true residual {free.residuals.max():.0e}"
    )
    if plot is not None:
        plot_energies(free, dense, plot)
        print(f"plot: {plot}")
    return Result(free, dense, plot)


def plot_energies(free, dense, path):
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, height_ratios=[3, 1], layout="constrained")
    step = np.arange(1, len(free.energies) + 1)
    top.plot(step, dense.energies, color="0.6", lw=4, label=f"NetKet, dense: {dense.seconds:.2f} s a step")
    top.plot(step, free.energies, color="tab:blue", lw=1.5, label=f"matrix-free: {free.seconds:.2f} s a step")
    top.set(ylabel="energy per site", title="minSR of the J1-J2 model with a vision transformer")
    top.legend(frameon=False)
    bottom.plot(step, free.iterations, color="tab:blue", lw=1)
    bottom.set(xlabel="step", ylabel="CG iterations", ylim=(0, None))
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
