"""The library's main job on a real quantum system; what ``make demo`` runs.

(a) One step of stochastic reconfiguration of a trained wave function, solved by krylov, by SciPy and densely.
(b) A whole run from random parameters, heisenberg_sr.py next to this file.
"""

import functools
import sys
import time
from pathlib import Path
from typing import NamedTuple

import heisenberg_sr
import jax
import numpy as np
import scipy.linalg
import scipy.sparse.linalg
from heisenberg_sr import log_psi
from jax.flatten_util import ravel_pytree

import krylov

SHIFT, RTOL, RESTART = 1e-3, 1e-6, 100


def load(path=Path(__file__).parent / "data" / "heisenberg_chain20_rbm.npz"):
    """A complex restricted Boltzmann machine trained on the 20-site chain: parameters, samples, local energies."""
    data = np.load(path)
    params = {
        "kernel": data["param/Dense/kernel"],
        "bias": data["param/Dense/bias"],
        "visible_bias": data["param/visible_bias"],
    }
    return jax.tree.map(jax.numpy.asarray, (params, data["samples"].astype(float), data["local_energies"]))


class Answer(NamedTuple):
    x: np.ndarray  # flat
    status: str
    iterations: int | str = ""
    products: int | str = ""


def by_krylov(S, F, method):
    sol = krylov.solve(S, F, method=method, shift=SHIFT, rtol=RTOL)
    x, _ = ravel_pytree(sol.x)
    return Answer(np.asarray(x), sol.status.name, int(sol.iterations), int(sol.matvecs))


@functools.partial(jax.jit, static_argnames="unravel")
def flat_product(S, unravel, v):
    return ravel_pytree(S @ unravel(v))[0] + SHIFT * v


def by_scipy(S, F, solver, dtype=complex, **options):
    """Through a LinearOperator on flat vectors, complex or (dtype=float) their real and imaginary parts."""
    rhs, unravel = ravel_pytree(F)
    rhs = np.asarray(rhs).view(dtype)
    iterations = products = 0

    def product(v):
        nonlocal products
        products += 1
        return np.array(flat_product(S, unravel, v.view(complex))).view(dtype)  # a copy: gmres writes into it

    def count(_):
        nonlocal iterations
        iterations += 1

    operator = scipy.sparse.linalg.LinearOperator((rhs.size, rhs.size), product, dtype=dtype)
    x, info = solver(operator, rhs, rtol=RTOL, callback=count, **options)
    return Answer(x.view(complex), "CONVERGED" if info == 0 else "MAX_ITERATIONS", iterations, products)


def dense_system(params, samples, local_energies):
    """S + shift and the forces by plain differentiation and NumPy: a reference that owes nothing to krylov."""

    @jax.jit
    @jax.vmap
    def derivatives(spins):
        return ravel_pytree(jax.grad(log_psi, holomorphic=True)(params, spins))[0]

    O = np.asarray(derivatives(samples))
    O = (O - O.mean(0)) / np.sqrt(len(O))
    energies = (local_energies - local_energies.mean()) / np.sqrt(len(O))
    return O.conj().T @ O + SHIFT * np.eye(O.shape[1]), O.conj().T @ energies


def by_cholesky(params, samples, local_energies):
    matrix, rhs = dense_system(params, samples, local_energies)
    return Answer(scipy.linalg.solve(matrix, rhs, assume_a="pos"), "the reference")


def compare_solvers():
    params, samples, local_energies = load()
    J = krylov.Jacobian(log_psi, params, samples, center=True, holomorphic=True)
    S = J.gram()
    F = J.H @ J.sample_vector(local_energies)

    matrix, rhs = dense_system(params, samples, local_energies)
    exact = scipy.linalg.solve(matrix, rhs, assume_a="pos")
    print(f"(S + {SHIFT:g}) dp = F: {rhs.size} complex parameters, {len(samples)} samples, float64, rtol {RTOL:g}")
    print(f"F from krylov and from plain NumPy differ by {relative(ravel_pytree(F)[0] - rhs, rhs):.0e}\n")

    sparse = scipy.sparse.linalg
    solvers = {
        "krylov cg": lambda: by_krylov(S, F, "cg"),
        "krylov minres": lambda: by_krylov(S, F, "minres"),
        f"krylov gmres({RESTART})": lambda: by_krylov(S, F, krylov.GMRES(restart=RESTART)),
        "SciPy cg": lambda: by_scipy(S, F, sparse.cg),
        "SciPy minres (*)": lambda: by_scipy(S, F, sparse.minres, dtype=float),
        f"SciPy gmres({RESTART})": lambda: by_scipy(S, F, sparse.gmres, restart=RESTART, callback_type="pr_norm"),
        "dense Cholesky": lambda: by_cholesky(params, samples, local_energies),
    }
    header = f"{'':18}{'its':>6}{'products':>10}{'residual':>11}{'error':>10}{'first':>10}{'again':>10}  status"
    print(header, "-" * (len(header) + 20), sep="\n")
    for name, solver in solvers.items():
        answer, first = timed(solver)
        answer, again = timed(solver)
        residual, error = relative(rhs - matrix @ answer.x, rhs), relative(answer.x - exact, exact)
        status = answer.status if residual <= RTOL else f"{answer.status}, yet residual > rtol"
        counts = f"{answer.iterations:>6}{answer.products:>10}"
        print(f"{name:18}{counts}{residual:>11.1e}{error:>10.1e}{first:>8.2f} s{again:>8.2f} s  {status}", flush=True)
    print(
        "\nresidual: |F - (S + shift) x| / |F|, from the dense matrix. error: |x - x_dense| / |x_dense|.\n"
        "first, again: wall time of the first call, compilation included, and of the second.\n"
        "dense Cholesky: includes building the matrix.\n"
        "(*) for real matrices only: gets S on real and imaginary parts. Its rtol is relative to |S| |x|, not |F|."
    )


def relative(difference, reference):
    return np.linalg.norm(difference) / np.linalg.norm(reference)


def timed(function):
    start = time.perf_counter()
    return function(), time.perf_counter() - start


def main():
    jax.config.update("jax_enable_x64", True)
    print("(a) One step for a trained 20-site Heisenberg chain\n")
    compare_solvers()
    print("\n(b) Stochastic reconfiguration of a 16-site chain from random parameters\n")
    result = heisenberg_sr.main()
    if not (result.relative_error + 3 * result.uncertainty < 1e-3 and result.steps.converged.all()):
        sys.exit("FAILED: the goal is a relative error below 1e-3 and every solve converged")


if __name__ == "__main__":
    main()
