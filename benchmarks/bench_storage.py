"""Time of S v for each storage of a Jacobian, and of making it, beside NetKet's quantum geometric tensors.

NetKet's QGTOnTheFly differentiates anew in each product as `recompute` does, QGTJacobianDense keeps a matrix as `dense`
does. All have the same samples and precision, and but for one the same chunk size. Ratios aimed at: RBM and transformer
at most 0.70 and 1.0 of QGTOnTheFly (`recompute`), 0.45 and 0.80 (`linearized`), at most that of QGTJacobianDense
(`dense`).
"""

from functools import partial

import jax
import numpy as np
import pytest

import krylov
from benchmarks.systems import CHUNK, SYSTEMS, complex_rbm, transformer, vector_like

nk = pytest.importorskip("netket")

ROUNDS = 7
ON_THE_FLY, UNCHUNKED, DENSE = "QGTOnTheFly", "QGTOnTheFly, all at once", "QGTJacobianDense"
AIMS = {
    ("recompute", complex_rbm): 0.70,
    ("recompute", transformer): 1.0,
    ("linearized", complex_rbm): 0.45,
    ("linearized", transformer): 0.80,
}


def state_of(system, chunk_size=CHUNK):
    """NetKet's variational state with these very samples."""
    spins = system.spins
    state = nk.vqs.MCState(
        nk.sampler.MetropolisLocal(nk.hilbert.Spin(0.5, spins.shape[-1]), n_chains=16),
        apply_fun=lambda variables, x: system.network(variables["params"], x.astype(spins.dtype)),
        variables={"params": system.params},
        n_samples=len(spins),
        chunk_size=chunk_size,
    )
    state._samples = spins.reshape(16, -1, spins.shape[-1])
    return state


def qgts(system):
    """NetKet's, by name."""
    qgt, holomorphic = nk.optimizer.qgt, system.holomorphic
    return {
        ON_THE_FLY: qgt.QGTOnTheFly(state_of(system), holomorphic=holomorphic),
        UNCHUNKED: qgt.QGTOnTheFly(state_of(system, None), holomorphic=holomorphic),
        DENSE: qgt.QGTJacobianDense(state_of(system), holomorphic=holomorphic),
    }


def jacobian(system, storage):
    return krylov.Jacobian(
        system.network,
        system.params,
        system.spins,
        center=True,
        chunk_size=CHUNK,
        holomorphic=system.holomorphic,
        storage=storage,
    )


@pytest.mark.parametrize("precision", [32, 64])
@pytest.mark.parametrize("storage", ["recompute", "linearized", "dense"])
@pytest.mark.parametrize("make", SYSTEMS)
def test_product(versus, make, storage, precision):
    system = make(precision)
    product = jax.jit(lambda op, v: op @ v)
    S, v, theirs = jacobian(system, storage).gram(), vector_like(system.params), qgts(system)
    for got, expected in zip(jax.tree.leaves(S @ v), jax.tree.leaves(theirs[ON_THE_FLY] @ v), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=2e-3 * float(abs(expected).max()))
    target = {DENSE: 1.0} if storage == "dense" else {ON_THE_FLY: AIMS.get((storage, make), 1.0)}
    peers = {name: partial(product, peer, v) for name, peer in theirs.items()}
    versus(partial(product, S, v), peers, ROUNDS, target=target)


@pytest.mark.parametrize("precision", [32, 64])
@pytest.mark.parametrize("make", SYSTEMS)
def test_making_a_dense_one(versus, make, precision):
    system = make(precision)
    state, plain = state_of(system), jacobian(system, "recompute")
    ours = lambda: plain.with_storage("dense").storage.rows
    theirs = lambda: nk.optimizer.qgt.QGTJacobianDense(state, holomorphic=system.holomorphic).O
    versus(ours, {DENSE: theirs}, 3, target={DENSE: 1.0})
