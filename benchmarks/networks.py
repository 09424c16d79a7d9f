"""The networks that the benchmarks differentiate, with random parameters: log psi(params, spins) (N,), complex."""

import itertools
import math

import jax
import jax.numpy as jnp


def log_cosh(z):
    z = jnp.where(z.real < 0, -z, z)
    return z + jnp.log1p(jnp.exp(-2 * z)) - math.log(2)


def random_spins(key, samples, sites, dtype):
    return jax.random.rademacher(key, (samples, sites), dtype)


# --- Complex restricted Boltzmann machine, holomorphic in its parameters ----------------------------------------------


def rbm(params, spins):
    hidden = spins @ params["kernel"] + params["bias"]
    return log_cosh(hidden).sum(-1) + spins @ params["visible_bias"]


def random_rbm(key, sites, alpha, dtype):
    shapes = {"kernel": (sites, alpha * sites), "bias": (alpha * sites,), "visible_bias": (sites,)}
    keys = jax.random.split(key, len(shapes))
    return {name: 0.05 * jax.random.normal(k, shapes[name], dtype) for name, k in zip(shapes, keys)}


def rbm_apart(params, spins):
    """Without visible bias. Real spins multiply the real and the imaginary part apart: half of a complex product."""
    kernel, bias = params["kernel"], params["bias"]
    x = spins.astype(kernel.real.dtype)
    return log_cosh(jax.lax.complex(x @ kernel.real, x @ kernel.imag) + bias).sum(-1)


def random_rbm_apart(key, sites, hidden, dtype):
    keys = jax.random.split(key)
    kernel = jax.random.normal(keys[0], (sites, hidden), dtype) / math.sqrt(sites)
    return {"kernel": 0.25 * kernel, "bias": 0.1 * jax.random.normal(keys[1], (hidden,), dtype)}


# --- Multilayer perceptron: real --------------------------------------------------------------------------------------


def mlp(params, spins):
    x = spins.astype(params["out"].dtype)
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x @ params["out"]


def random_mlp(key, widths, dtype):
    """``widths`` begin with the number of sites."""
    *keys, last = jax.random.split(key, len(widths))
    layers = [
        {"kernel": jax.random.normal(k, (a, b), dtype) / math.sqrt(a), "bias": jnp.zeros(b, dtype)}
        for k, a, b in zip(keys, widths[:-1], widths[1:], strict=True)
    ]
    return {"layers": layers, "out": jax.random.normal(last, widths[-1:], dtype) / math.sqrt(widths[-1])}


# --- Convolutions on a torus of spins: real parameters, complex output ------------------------------------------------


def conv(params, spins):
    side = math.isqrt(spins.shape[-1])
    x = spins.astype(params["out"].dtype).reshape(-1, side, side, 1)
    for kernel, bias in zip(params["kernels"], params["biases"], strict=True):
        around = [(0, 0), (1, 1), (1, 1), (0, 0)]
        x = jnp.pad(x, around, mode="wrap")
        x = jax.nn.gelu(
            jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")) + bias
        )
    out = x.mean((1, 2)) @ params["out"]
    return out[:, 0] + 1j * out[:, 1]


def random_conv(key, channels, dtype, width=3):
    """``channels`` begin with that of the spins."""
    *keys, last = jax.random.split(key, len(channels))
    shapes = [(width, width, a, b) for a, b in itertools.pairwise(channels)]
    return {
        "kernels": [jax.random.normal(k, s, dtype) / math.sqrt(math.prod(s[:-1])) for k, s in zip(keys, shapes)],
        "biases": [jnp.zeros(b, dtype) for b in channels[1:]],
        "out": jax.random.normal(last, (channels[-1], 2), dtype),
    }


# --- Vision transformer on a 6x6 lattice in 2x2 patches: real parameters, complex output ------------------------------


def normalised(x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def vit(params, spins):
    x = spins.reshape(-1, 3, 2, 3, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 9, 4)
    x = x @ params["embed"] + params["position"]
    for block in params["blocks"]:
        q, k, v = jnp.moveaxis((normalised(x) @ block["qkv"]).reshape(*x.shape[:2], 3, 4, -1), 2, 0)
        attention = jax.nn.softmax(jnp.einsum("nthd,nshd->nhts", q, k) / math.sqrt(q.shape[-1]), axis=-1)
        x = x + jnp.einsum("nhts,nshd->nthd", attention, v).reshape(x.shape) @ block["out"]
        x = x + jax.nn.gelu(normalised(x) @ block["up"]) @ block["down"]
    out = normalised(x).mean(1) @ params["head"]
    return log_cosh(out[:, 0::2] + 1j * out[:, 1::2]).sum(-1)


def random_vit(key, depth, dtype, width=32):
    keys = iter(jax.random.split(key, 4 * depth + 3))

    def dense(inputs, outputs, scale=1.0):
        return scale * jax.random.normal(next(keys), (inputs, outputs), dtype) / math.sqrt(inputs)

    def block():
        return {
            "qkv": dense(width, 3 * width),
            "out": dense(width, width, 0.5),
            "up": dense(width, 2 * width),
            "down": dense(2 * width, width, 0.5),
        }

    return {
        "embed": dense(4, width),
        "position": 0.1 * jax.random.normal(next(keys), (9, width), dtype),
        "blocks": [block() for _ in range(depth)],
        "head": dense(width, 64, 0.5),
    }


# --- What a user of plain JAX writes for S v --------------------------------------------------------------------------


def push(f, params, chunks, v):
    """The uncentred J v without weights: jvp in each chunk."""
    with jax.default_matmul_precision("highest"):
        return jax.lax.map(lambda x: jax.jvp(lambda p: f(p, x), (params,), (v,))[1], chunks)


def pull(f, params, chunks, y):
    """The uncentred J^H y without weights: vjp in each chunk."""
    with jax.default_matmul_precision("highest"):
        return _pull(f, params, chunks, lambda x, t: t, y)


def two_scans(f, params, chunks, v):
    """The centred J^H J v: push v forward over all chunks of samples, subtract the mean, pull back over all chunks."""
    tangents = push(f, params, chunks, v)
    tangents = (tangents - tangents.mean()) / tangents.size
    return pull(f, params, chunks, tangents)


def one_scan_uncentred(f, params, chunks, v):
    """J^H J v without centring, which needs one scan only: jvp, then vjp, in each chunk."""
    samples = chunks.shape[0] * chunks.shape[1]

    def tangent(x, _):
        return jax.jvp(lambda p: f(p, x), (params,), (v,))[1] / samples

    with jax.default_matmul_precision("highest"):
        return _pull(f, params, chunks, tangent, None)


def _pull(f, params, chunks, tangent, given):
    def body(total, chunk):
        x, t = chunk
        (gradient,) = jax.vjp(lambda p: f(p, x), params)[1](tangent(x, t).conj())
        return jax.tree.map(jnp.add, total, gradient), None

    total = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), (chunks, given))[0]
    return jax.tree.map(jnp.conj, total)
