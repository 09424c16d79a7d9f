"""The product S v of a tangent operator, beside a hand-written jvp and vjp over the same chunks."""

import statistics
import time

import jax
import jax.numpy as jnp
import pytest

import krylov
from benchmarks.networks import random_rbm, random_spins, random_vit, rbm, vit

ROUNDS, CHUNK = 5, 256


def by_hand(network, params, chunks, v):
    """Two passes, as long as the mean is not known beforehand: forward for the mean, then forward and back."""
    count = chunks.shape[0] * chunks.shape[1]

    def push(chunk):
        return jax.jvp(lambda p: network(p, chunk), (params,), (v,))[1]

    _, sums = jax.lax.scan(lambda _, chunk: (None, push(chunk).sum()), None, chunks)
    mean = sums.sum() / count

    def body(total, chunk):
        _, pull = jax.vjp(lambda p: network(p, chunk), params)
        (back,) = pull(jnp.conj((push(chunk) - mean) / count))
        return jax.tree.map(jnp.add, total, back), None

    total, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), chunks)
    return jax.tree.map(jnp.conj, total)


@pytest.mark.benchmark(group="tangent product")
@pytest.mark.parametrize("name", ["rbm", "vit"])
def test_product_beside_jvp_and_vjp(benchmark, name):
    if name == "rbm":
        network, samples, sites = rbm, 4096, 40
        params = random_rbm(jax.random.key(0), sites, 4, jnp.complex64)
    else:
        network, samples, sites = vit, 2048, 36
        params = random_vit(jax.random.key(0), 2, jnp.float32)
    spins = random_spins(jax.random.key(1), samples, sites, jnp.float32)
    S = krylov.Jacobian(network, params, spins, center=True, chunk_size=CHUNK).gram()
    v = jax.tree.map(jnp.ones_like, params)
    hand = jax.jit(lambda params, chunks, v: by_hand(network, params, chunks, v))
    chunks = spins.reshape(-1, CHUNK, sites)
    runs = {"krylov": lambda: S @ v, "by hand": lambda: hand(params, chunks, v)}
    results = {run: jax.block_until_ready(call()) for run, call in runs.items()}
    for ours, theirs in zip(*map(jax.tree.leaves, results.values()), strict=True):
        assert jnp.allclose(ours, theirs, rtol=1e-3, atol=1e-4 * jnp.abs(theirs).max())
    seconds = {run: [] for run in runs}

    def interleaved():
        for run, call in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[run].append(time.perf_counter() - start)

    benchmark.pedantic(interleaved, rounds=ROUNDS)
    ratio = statistics.median(a / b for a, b in zip(seconds["krylov"], seconds["by hand"], strict=True))
    benchmark.extra_info.update({"krylov / by hand": ratio})
    print(f"\n{name}: krylov / by hand = {ratio:.2f}")
