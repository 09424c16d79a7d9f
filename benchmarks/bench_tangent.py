"""Time of the centred product S v of a tangent operator, beside plain JAX over the same chunks of samples."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import krylov
from benchmarks.networks import one_scan_uncentred, random_rbm, random_spins, random_vit, rbm, two_scans, vit

ROUNDS, CHUNK = 5, 256


def complex_rbm(precision):
    dtype = jnp.result_type(f"float{precision}", jnp.complex64)
    params = random_rbm(jax.random.key(0), sites=40, alpha=4, dtype=dtype)
    return rbm, params, random_spins(jax.random.key(1), 4096, 40, f"float{precision}")


def transformer(precision):
    params = random_vit(jax.random.key(0), depth=4, dtype=f"float{precision}")
    return vit, params, random_spins(jax.random.key(1), 2048, 36, f"float{precision}")


@pytest.mark.parametrize("precision", [32, 64])
@pytest.mark.parametrize("system", [complex_rbm, transformer])
def test_product(versus, system, precision):
    network, params, spins = system(precision)
    chunks = spins.reshape(-1, CHUNK, spins.shape[-1])
    S = krylov.Jacobian(network, params, spins, center=True, chunk_size=CHUNK).gram()
    v = jax.tree.map(lambda p: jnp.cos(jnp.arange(p.size)).astype(p.dtype).reshape(p.shape), params)

    def of(product, *args):
        return partial(jax.jit(product), *args, v)

    ours, centred = (lambda S, v: S @ v), partial(two_scans, network)
    for got, expected in zip(jax.tree.leaves(S @ v), jax.tree.leaves(centred(params, chunks, v))):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3 * float(abs(expected).max()))
    peers = {
        "two scans": of(centred, params, chunks),
        "one scan, not centred": of(partial(one_scan_uncentred, network), params, chunks),
    }
    versus(of(ours, S), peers, ROUNDS)
