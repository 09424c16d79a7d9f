"""Time of S v for each storage of a Jacobian, and of making it, beside NetKet's quantum geometric tensors.

NetKet's QGTOnTheFly differentiates anew in each product as `recompute` does, QGTJacobianDense keeps a matrix as `dense`
does. All have the same samples, chunk size and precision. Another peer is a matrix product of the size of the network's
own, twice the cost of its forward pass: the rate that this machine can do.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import krylov
from benchmarks.bench_tangent import complex_rbm, transformer

nk = pytest.importorskip("netket")

ROUNDS, CHUNK = 5, 256
HOLOMORPHIC = {complex_rbm: True, transformer: False}
KINDS = {"recompute": "QGTOnTheFly", "linearized": "QGTOnTheFly", "dense": "QGTJacobianDense"}


def state_of(network, params, spins):
    """NetKet's variational state with these very samples."""
    hilbert = nk.hilbert.Spin(0.5, spins.shape[-1])
    state = nk.vqs.MCState(
        nk.sampler.MetropolisLocal(hilbert, n_chains=16),
        apply_fun=lambda variables, x: network(variables["params"], x.astype(spins.dtype)),
        variables={"params": params},
        n_samples=len(spins),
        chunk_size=CHUNK,
    )
    state._samples = spins.reshape(16, -1, spins.shape[-1])
    return state


def qgt(kind, state, holomorphic):
    options = {"holomorphic": holomorphic}
    return getattr(nk.optimizer.qgt, kind)(state, **options)


def real_vector(params):
    return jax.tree.map(lambda p: jnp.cos(jnp.arange(p.size)).astype(p.dtype).reshape(p.shape), params)


@pytest.mark.parametrize("precision", [32, 64])
@pytest.mark.parametrize("storage", KINDS)
@pytest.mark.parametrize("system", [complex_rbm, transformer])
def test_product(versus, system, storage, precision):
    network, params, spins = system(precision)
    J = krylov.Jacobian(
        network, params, spins, center=True, chunk_size=CHUNK, holomorphic=HOLOMORPHIC[system], storage=storage
    )
    theirs = qgt(KINDS[storage], state_of(network, params, spins), HOLOMORPHIC[system])
    S, v = J.gram(), real_vector(params)
    for got, expected in zip(jax.tree.leaves(S @ v), jax.tree.leaves(theirs @ v), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=2e-3 * float(abs(expected).max()))
    product = lambda op, v: op @ v
    versus(
        partial(jax.jit(product), S, v),
        {f"NetKet {KINDS[storage]}": partial(jax.jit(product), theirs, v)},
        ROUNDS,
    )


@pytest.mark.parametrize("system", [complex_rbm, transformer])
def test_making_a_dense_one(versus, system):
    network, params, spins = system(32)
    state, holomorphic = state_of(network, params, spins), HOLOMORPHIC[system]
    plain = krylov.Jacobian(network, params, spins, center=True, chunk_size=CHUNK, holomorphic=holomorphic)
    ours = lambda: plain.with_storage("dense").storage.rows
    theirs = lambda: qgt("QGTJacobianDense", state, holomorphic).O
    versus(ours, {"NetKet QGTJacobianDense": theirs}, 3)
