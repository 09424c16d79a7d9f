"""Networks in plain JAX: two trained wave functions with their samples, and small ones of every field."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

_ROOT = Path(__file__).parents[1]
_RBM = _ROOT / "docs" / "examples" / "data" / "heisenberg_chain20_rbm.npz"
_VIT = _ROOT / "tests" / "data" / "j1j2_6x6_vit.npz"


def log_cosh(z):
    z = jnp.where(z.real < 0, -z, z)
    return z + jnp.log1p(jnp.exp(-2 * z)) - float(np.log(2.0))


def rbm(params, samples):
    """Complex restricted Boltzmann machine, holomorphic in its parameters."""
    kernel = params["Dense"]["kernel"]
    x = samples.astype(kernel.real.dtype)
    theta = x @ kernel + params["Dense"]["bias"]
    return log_cosh(theta).sum(-1) + x @ params["visible_bias"]


def _normalised(x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def vit(params, samples):
    """Small vision transformer on a 6x6 lattice: 2x2 patches, real parameters, complex output."""
    embed = params["embed"]["kernel"]
    x = samples.astype(embed.dtype).reshape(-1, 3, 2, 3, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 9, 4)
    x = x @ embed + params["embed"]["position"]
    for name in sorted(k for k in params if k.startswith("block")):
        block = params[name]
        q, k, v = jnp.moveaxis((_normalised(x) @ block["qkv"]).reshape(*x.shape[:2], 3, 4, -1), 2, 0)
        weights = jax.nn.softmax(jnp.einsum("nthd,nshd->nhts", q, k) / float(np.sqrt(q.shape[-1])), axis=-1)
        x = x + jnp.einsum("nhts,nshd->nthd", weights, v).reshape(x.shape) @ block["out"]
        x = x + jax.nn.gelu(_normalised(x) @ block["up"]) @ block["down"]
    out = _normalised(x).mean(1) @ params["head"]["kernel"]
    return log_cosh(out[:, 0::2] + 1j * out[:, 1::2]).sum(-1)


def trained_rbm(count):
    """Parameters, samples and local energies of a 20-site Heisenberg chain."""
    return _load(_RBM, count)


def trained_vit(count):
    """Parameters, samples and local energies of the 6x6 J1-J2 model."""
    return _load(_VIT, count)


def _load(path, count):
    data = np.load(path)
    params = {}
    for key in data.files:
        if key.startswith("param/"):
            *parents, leaf = key.removeprefix("param/").split("/")
            node = params
            for name in parents:
                node = node.setdefault(name, {})
            node[leaf] = data[key]
    return params, data["samples"][:count], data["local_energies"][:count]


def mixed(params, samples):
    """Complex output of real and complex parameters; not holomorphic in the complex ones."""
    hidden = jnp.tanh(samples @ params["real"])
    z = hidden @ params["complex"]
    return (
        jnp.sum(z * jnp.exp(-(jnp.abs(z) ** 2) / 10) + 0.3 * z.conj() ** 2, axis=-1) + params["offset"] * z[:, 0].real
    )


def mixed_params(dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    to_complex = jnp.result_type(dtype, jnp.complex64)
    kernel = rng.normal(size=(4, 3)) + 1j * rng.normal(size=(4, 3))
    return {
        "real": jnp.asarray(rng.normal(size=(5, 4)) / 2, dtype),
        "complex": jnp.asarray(kernel / 2, to_complex),
        "offset": jnp.asarray(0.3 - 0.8j, to_complex),
    }


def samples(count, dtype=jnp.float32, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(count, 5)), dtype)


def wide_layer(params, x):
    """Activations much larger than the parameters: what memory is measured with."""
    hidden = jnp.tanh(x @ params["kernel"])
    return jnp.sum(jnp.sin(hidden) * params["scale"], axis=-1)


def wide_layer_params(width, dtype):
    rng = np.random.default_rng(0)
    return {"kernel": jnp.asarray(rng.normal(size=(5, width)), dtype), "scale": jnp.ones(width, dtype)}
