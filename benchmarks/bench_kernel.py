"""Time of the matrices J J^H and J^H J, beside NetKet's dense Jacobian multiplied by itself, and its kernel.

The first is the neural tangent kernel of minSR, centred. NetKet builds it from all rows at once, or with
``on_the_fly=True`` from chunks of them; of that the inner function is called here, and its result not centred.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.bench_storage import jacobian
from benchmarks.systems import CHUNK, complex_rbm, transformer

nk = pytest.importorskip("netket")

SAMPLES = 256
ROWS, CHUNKED = "NetKet, from all rows", "NetKet, by chunks"


def their_rows(system):
    """Theirs, with real and imaginary parts where the network is not holomorphic: (N or 2 N, parameters)."""
    O = nk.jax.jacobian(
        lambda variables, x: system.network(variables["params"], x),
        system.params,
        system.spins,
        mode="holomorphic" if system.holomorphic else "complex",
        dense=True,
        center=True,
        chunk_size=CHUNK,
        _sqrt_rescale=True,
    )
    return O if system.holomorphic else O.transpose(1, 0, 2).reshape(-1, O.shape[-1])


def their_kernel_by_chunks(system):
    def parts(params, x):
        out = system.network(params, x)
        return jnp.stack([out.real, out.imag], axis=-1)

    kernel = nk.jax._ntk.empirical_ntk_by_jacobian(f=parts, trace_axes=(), vmap_axes=0)
    shift = jax.tree.map(lambda p: jnp.zeros((2, *p.shape), p.dtype), system.params)
    return jax.lax.map(lambda chunk: kernel(system.spins, chunk, system.params, jacobian_shift=shift), system.chunks)


def few(make, precision):
    system = make(precision)
    return system._replace(spins=system.spins[:SAMPLES])


@pytest.mark.parametrize("precision", [32, 64])
@pytest.mark.parametrize("make", [complex_rbm, transformer])
def test_kernel(versus, make, precision):
    system = few(make, precision)
    T = jacobian(system, "recompute").cogram()

    def theirs(system):
        O = their_rows(system)
        return O @ O.conj().T

    ours = partial(jax.jit(lambda T: T.as_matrix()), T)
    peers = {ROWS: partial(jax.jit(partial(_of, theirs, system)), _arrays(system))}
    if not system.holomorphic:
        peers[CHUNKED] = partial(jax.jit(partial(_of, their_kernel_by_chunks, system)), _arrays(system))
    expected = peers[ROWS]()
    np.testing.assert_allclose(ours(), expected, atol=1e-3 * float(abs(expected).max()))
    versus(ours, peers, 3, target={ROWS: 1.0})


@pytest.mark.parametrize("precision", [32, 64])
@pytest.mark.parametrize("make", [complex_rbm])
def test_gram(versus, make, precision):
    system = few(make, precision)
    S = jacobian(system, "recompute").gram()

    def theirs(system):
        O = their_rows(system)
        return O.conj().T @ O

    peer = partial(jax.jit(partial(_of, theirs, system)), _arrays(system))
    versus(partial(jax.jit(lambda S: S.as_matrix()), S), {ROWS: peer}, 3, target={ROWS: 1.0})


def _arrays(system):
    return system.params, system.spins


def _of(function, system, arrays):
    params, spins = arrays
    return function(system._replace(params=params, spins=spins))
