"""Time of J v, J^H y and S v for each storage of a Jacobian, beside plain JAX over the same chunks of samples.

The first column is that of `recompute`, which keeps nothing as plain JAX does. For S v, "limit" is the time of the
matrix products with weights alone.
"""

from functools import partial

import jax
import numpy as np
import pytest

import krylov
from benchmarks import networks
from benchmarks.systems import CHUNK, SYSTEMS, multiplications, vector_like

ROUNDS = 5


def jacobians(system, *, center=True):
    """By storage."""
    network, params, spins, holomorphic = system.network, system.params, system.spins, system.holomorphic
    J = krylov.Jacobian(network, params, spins, center=center, chunk_size=CHUNK, holomorphic=holomorphic)
    return {name: J.with_storage(name) for name in ("recompute", "linearized", "dense")}


def compare(versus, product, by_storage, argument, peers, expected):
    """Time ``product(J, argument)``, with the result of `recompute` checked against the expected one."""
    multiply = jax.jit(product)
    for J in by_storage.values():
        found = multiply(J, argument)
        for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=2e-3 * float(abs(wanted).max()))
    ours, *others = ((name, partial(multiply, J, argument)) for name, J in by_storage.items())
    versus(ours[1], {**dict(others), **peers}, ROUNDS)


@pytest.mark.parametrize("precision", [32, 64])
@pytest.mark.parametrize("make", SYSTEMS)
def test_gram(versus, make, precision):
    system = make(precision)
    v = vector_like(system.params)
    args = system.params, system.chunks, v
    two, one = (
        partial(jax.jit(partial(f, system.network)), *args) for f in (networks.two_scans, networks.one_scan_uncentred)
    )
    peers = {"two scans": two, "one scan, not centred": one, "limit": multiplications(system)}
    compare(versus, lambda J, v: J.gram() @ v, jacobians(system), v, peers, two())


@pytest.mark.parametrize("precision", [32, 64])
@pytest.mark.parametrize("make", SYSTEMS)
def test_push_forward(versus, make, precision):
    system = make(precision)
    v = vector_like(system.params)
    peer = partial(jax.jit(partial(networks.push, system.network)), system.params, system.chunks, v)
    expected = peer().reshape(-1) / np.sqrt(len(system.spins))
    compare(versus, lambda J, v: J @ v, jacobians(system, center=False), v, {"jvp": peer}, expected)


@pytest.mark.parametrize("precision", [32, 64])
@pytest.mark.parametrize("make", SYSTEMS)
def test_pull_back(versus, make, precision):
    system = make(precision)
    J = jacobians(system, center=False)
    y = vector_like(J["recompute"].out_structure())
    cut = (y / np.sqrt(len(y))).reshape(-1, CHUNK).astype(y.dtype)
    peer = partial(jax.jit(partial(networks.pull, system.network)), system.params, system.chunks, cut)
    compare(versus, lambda J, y: J.H @ y, J, y, {"vjp": peer}, peer())


@pytest.mark.parametrize("precision", [32, 64])
@pytest.mark.parametrize("make", SYSTEMS)
def test_auto(versus, make, precision):
    """Storage and chunk size chosen by the planner, beside the three storages at the usual chunk size."""
    system = make(precision)
    J = krylov.Jacobian(
        system.network,
        system.params,
        system.spins,
        center=True,
        holomorphic=system.holomorphic,
        storage="auto",
        chunk_size="auto",
    )
    v = vector_like(system.params)
    multiply = jax.jit(lambda J, v: J.gram() @ v)
    peers = {name: partial(multiply, K, v) for name, K in jacobians(system).items()}
    versus(partial(multiply, J, v), peers, ROUNDS, target=dict.fromkeys(peers, 1.15))
