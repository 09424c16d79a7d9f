"""A convolutional classifier with pooling layers by natural gradient, beside Adam.

The images are made here: one of six shapes, moved, scaled and buried in noise. The natural gradient preconditions the
gradient of a batch by the Fisher matrix of the network's logits on that batch,

    dp = (F + shift)^-1 g,

which ``krylov.interop.optax.natural_gradient`` solves by conjugate gradients without forming F, in an ordinary optax
chain. The network pools with ``krylov.operators.max_pool``, whose derivatives of every order are right, batched and
chunked; ``flax.linen.max_pool`` and ``lax.reduce_window`` have none that matrix-free second-order methods can use under
``jit`` with a traced initial value.

Run ``python classifier.py``. Needs ``optax``.
"""

import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from krylov.interop.optax import natural_gradient
from krylov.operators import max_pool

PLOT = Path(__file__).with_suffix(".png")
CLASSES, SIDE = 6, 16


def images(key, count, noise=0.6):
    """Images (count, SIDE, SIDE, 1) and labels (count,): ring, disc, square, cross, horizontal and vertical bars."""
    keys = jax.random.split(key, 4)
    labels = jax.random.randint(keys[0], (count,), 0, CLASSES)
    centre = jax.random.uniform(keys[1], (count, 2, 1, 1), minval=5.5, maxval=SIDE - 6.5)
    size = jax.random.uniform(keys[2], (count, 1, 1), minval=3.0, maxval=5.0)
    y, x = jnp.meshgrid(*2 * [jnp.arange(SIDE)], indexing="ij")
    y, x = y - centre[:, 0], x - centre[:, 1]
    radius, reach = jnp.hypot(x, y), jnp.maximum(abs(x), abs(y))
    inside = reach <= size
    shapes = jnp.stack(
        [
            abs(radius - size) < 0.9,
            radius <= size,
            abs(reach - size) < 0.7,
            inside & (jnp.minimum(abs(x), abs(y)) < 1),
            inside & (jnp.floor(y + 50) % 4 < 2),
            inside & (jnp.floor(x + 50) % 4 < 2),
        ]
    )
    clean = jnp.take_along_axis(shapes, labels[None, :, None, None], 0)[0]
    return (clean + noise * jax.random.normal(keys[3], clean.shape))[..., None], labels


def random_params(key, channels):
    keys = jax.random.split(key, 3)
    first, second = channels
    features = (SIDE // 4) ** 2 * second

    def scaled(key, shape, fan_in):
        return jax.random.normal(key, shape) * (2 / fan_in) ** 0.5

    return {
        "conv1": {"w": scaled(keys[0], (3, 3, 1, first), 9), "b": jnp.zeros(first)},
        "conv2": {"w": scaled(keys[1], (3, 3, first, second), 9 * first), "b": jnp.zeros(second)},
        "out": {"w": scaled(keys[2], (features, CLASSES), 4 * features), "b": jnp.zeros(CLASSES)},
    }


def logits(params, x):
    for name in "conv1", "conv2":
        layer = params[name]
        x = jax.lax.conv_general_dilated(x, layer["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = max_pool(jax.nn.silu(x + layer["b"]), (2, 2), strides=(2, 2))
    return x.reshape(x.shape[0], -1) @ params["out"]["w"] + params["out"]["b"]


def loss(params, x, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), labels).mean()


class Run(NamedTuple):
    losses: np.ndarray  # of each batch, before the step
    accuracy: float  # on images that were not trained on
    seconds: float  # a step, compilation left out
    iterations: np.ndarray


def train(optimizer, params, key, steps, batch, test):
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, key):
        x, labels = images(key, batch)
        value, gradient = jax.value_and_grad(loss)(params, x, labels)
        updates, state = optimizer.update(gradient, state, params, samples=x)
        return optax.apply_updates(params, updates), state, value

    losses, iterations = [], []
    for i in range(steps):
        params, state, value = step(params, state, jax.random.fold_in(key, i))
        losses.append(float(value))
        iterations.append(int(getattr(state[0], "iterations", 0)))
        if i == 0:
            started = time.perf_counter()
    seconds = (time.perf_counter() - started) / max(steps - 1, 1)
    found = jnp.argmax(jax.jit(logits)(params, test[0]), -1)
    return Run(np.array(losses), float(jnp.mean(found == test[1])), seconds, np.array(iterations))


class Result(NamedTuple):
    natural: Run
    adam: Run
    plot: Path | None


def main(channels=(6, 12), steps=50, batch=512, test_images=2000, adam_factor=5, chunk_size=None, seed=0, plot=PLOT):
    """Adam takes ``adam_factor`` times the steps."""
    keys = jax.random.split(jax.random.key(seed), 3)
    params, test = random_params(keys[0], channels), images(keys[1], test_images)
    natural = optax.chain(
        natural_gradient(
            logits, distribution="categorical", shift=3e-2, mu=0.9, warm_start=True, rtol=0.1, chunk_size=chunk_size
        ),
        optax.sgd(optax.cosine_decay_schedule(0.6, steps)),
    )
    schedule = optax.cosine_decay_schedule(5e-3, adam_factor * steps)
    adam = optax.chain(optax.with_extra_args_support(optax.identity()), optax.adam(schedule))
    by_natural = train(natural, params, keys[2], steps, batch, test)
    by_adam = train(adam, params, keys[2], adam_factor * steps, batch, test)
    print(f"{sum(p.size for p in jax.tree.leaves(params))} parameters, batches of {batch} images")
    for name, run in ("natural gradient", by_natural), ("Adam", by_adam):
        print(
            f"{name + ':':18}accuracy {100 * run.accuracy:.1f} % after {len(run.losses)} steps of {run.seconds:.3f} s",
            f"({run.iterations.mean():.0f} iterations of CG each)" if run.iterations.any() else "",
        )
    first, last = by_adam.losses[steps - 1], by_natural.losses[-1]
    print(f"loss of the batch after {steps} steps: natural gradient {last:.3f}, Adam {first:.3f}")
    if plot is not None:
        plot_losses(by_natural, by_adam, test, plot)
        print(f"plot: {plot}")
    return Result(by_natural, by_adam, plot)


def plot_losses(natural, adam, test, path):
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), width_ratios=[1, 1.6], layout="constrained")
    chosen = [int(jnp.argmax(test[1] == label)) for label in range(CLASSES)]
    tiles = np.asarray(test[0])[chosen, ..., 0].reshape(2, 3, SIDE, SIDE)
    axes[0].imshow(tiles.transpose(0, 2, 1, 3).reshape(2 * SIDE, 3 * SIDE), cmap="gray")
    axes[0].set(xticks=[], yticks=[], title="one image of each class")
    axes[1].loglog(np.arange(1, len(adam.losses) + 1), adam.losses, color="tab:orange", lw=1, label="Adam")
    axes[1].loglog(np.arange(1, len(natural.losses) + 1), natural.losses, color="tab:blue", label="natural gradient")
    axes[1].set(xlabel="step", ylabel="loss of the batch", title="A classifier with pooling layers")
    axes[1].legend(frameon=False)
    axes[1].spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
