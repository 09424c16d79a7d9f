"""The systems that products are timed on: a network, its parameters and samples, and what it multiplies.

CHUNK samples at a time, for krylov and for every peer.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.networks import conv, mlp, random_conv, random_mlp, random_rbm, random_spins, rbm, vit

CHUNK = 256
_VIT = Path(__file__).parents[1] / "tests" / "data" / "j1j2_6x6_vit.npz"


class System(NamedTuple):
    """``layers``: for each weight matrix the rows of input a sample, its shape, and the products with it in S v.

    Real samples multiply real and imaginary parts of a complex matrix, which is a real one of twice the width.
    """

    network: Callable
    params: Any
    spins: jax.Array
    layers: list[tuple[int, tuple[int, int], int]]
    holomorphic: bool = False

    @property
    def chunks(self) -> jax.Array:
        """The samples, by chunks."""
        return self.spins.reshape(-1, CHUNK, self.spins.shape[-1])


# Evaluation, push forward, gradient; where the layer's input depends on parameters the two derivatives go through that
# as well.
FIRST, LATER = 3, 5


def complex_rbm(precision) -> System:
    """40 spins, 160 hidden units, holomorphic."""
    dtype = jnp.result_type(f"float{precision}", jnp.complex64)
    params = random_rbm(jax.random.key(0), sites=40, alpha=4, dtype=dtype)
    return System(rbm, params, _spins(4096, 40, precision), [(1, (40, 320), FIRST)], holomorphic=True)


def transformer(precision) -> System:
    """Trained on the 6x6 J1-J2 model, with its samples: real parameters, complex output."""
    data = np.load(_VIT)

    def array(*names):
        return jnp.asarray(data["/".join(["param", *names])], f"float{precision}")

    blocks = [{name: array(f"block{i}", name) for name in ("qkv", "out", "up", "down")} for i in range(2)]
    embedding = {"embed": array("embed", "kernel"), "position": array("embed", "position")}
    params = {**embedding, "blocks": blocks, "head": array("head", "kernel")}
    layers = [(9, params["embed"].shape, FIRST), (1, params["head"].shape, LATER)]
    layers += [(9, kernel.shape, LATER) for block in blocks for kernel in block.values()]
    return System(vit, params, jnp.asarray(data["samples"], f"float{precision}"), layers)


def periodic_conv(precision) -> System:
    """Two layers of 3x3 kernels on an 8x8 torus: real parameters, complex output."""
    params = random_conv(jax.random.key(0), (1, 8, 8), f"float{precision}")
    kernels = [(kernel.shape[0] * kernel.shape[1] * kernel.shape[2], kernel.shape[3]) for kernel in params["kernels"]]
    layers = [(64, shape, LATER if i else FIRST) for i, shape in enumerate(kernels)]
    return System(conv, params, _spins(512, 64, precision), layers)


def perceptron(precision) -> System:
    """40 spins, two hidden layers of 80: all real."""
    params = random_mlp(jax.random.key(0), (40, 80, 80), f"float{precision}")
    return System(mlp, params, _spins(4096, 40, precision), [(1, (40, 80), FIRST), (1, (80, 80), LATER)])


SYSTEMS = (complex_rbm, transformer, periodic_conv, perceptron)


def _spins(count, sites, precision):
    return random_spins(jax.random.key(1), count, sites, f"float{precision}")


def vector_like(params):
    """A vector of parameters."""
    return jax.tree.map(lambda p: jnp.cos(jnp.arange(p.size)).astype(p.dtype).reshape(p.shape), params)


def multiplications(system: System) -> Callable[[], jax.Array]:
    """The matrix products with weights that a product S v cannot do without, chunk by chunk: the limit."""
    dtype = jnp.finfo(jax.tree.leaves(system.params)[0].dtype).dtype
    factors = []
    for rows, shape, count in system.layers:
        keys = jax.random.split(jax.random.key(len(factors)))
        inputs = jax.random.normal(keys[0], (CHUNK * rows * count, shape[0]), dtype)
        factors.append((inputs, jax.random.normal(keys[1], shape, dtype)))

    def step(totals, _):
        # Added up, so that each pass is done.
        pairs = zip(totals, factors, strict=True)
        return [total + jnp.matmul(x, total[:1, :1] + w, precision="highest") for total, (x, w) in pairs], None

    def run(factors):
        zeros = [jnp.zeros((x.shape[0], w.shape[1]), dtype) for x, w in factors]
        return jax.lax.scan(step, zeros, length=len(system.spins) // CHUNK)[0]

    return partial(jax.jit(run), factors)
