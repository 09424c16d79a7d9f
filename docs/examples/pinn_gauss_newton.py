"""A physics-informed network by Gauss-Newton, beside Adam.

The network u(x, y) is to solve the Poisson equation -laplace(u) = source on the unit square, u = 0 on its boundary. Its
residuals at random points are made small in least squares. Adam, the usual choice, needs thousands of steps for three
digits; Gauss-Newton takes the step that solves the linearized problem,

    min ||residuals - J dp||^2 + shift ||dp||^2,

which ``krylov.natural_gradient`` does without forming J: its values are the residuals, uncentred. The shift follows the
rule of Levenberg and Marquardt: less after a step that went down, more after one that did not.

Run ``python pinn_gauss_newton.py``. Needs ``optax``, for Adam.
"""

import functools
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import krylov

PLOT = Path(__file__).with_suffix(".png")


def solution(points):
    x, y = points[..., 0], points[..., 1]
    return jnp.sin(jnp.pi * x) * jnp.sin(2 * jnp.pi * y)


def source(points):
    return 5 * jnp.pi**2 * solution(points)


def random_params(key, widths):
    keys = jax.random.split(key, len(widths) + 1)
    shapes = zip(keys, [2, *widths], [*widths, 1], strict=True)
    return [{"w": jax.random.normal(k, (m, n)) * (2 / (m + n)) ** 0.5, "b": jnp.zeros(n)} for k, m, n in shapes]


def network(params, point):
    """u at one point; the factor in front is zero on the boundary."""
    z = point
    for layer in params[:-1]:
        z = jnp.tanh(z @ layer["w"] + layer["b"])
    z = z @ params[-1]["w"] + params[-1]["b"]
    return jnp.prod(point * (1 - point)) * z[0]


def residuals(params, points):
    """(N,): what is left of the equation at each point."""

    def laplacian(point):
        # Forward over forward: two directions only.
        def second(direction):
            along = lambda t: network(params, point + t * direction)
            return jax.jvp(lambda t: jax.jvp(along, (t,), (1.0,))[1], (0.0,), (1.0,))[1]

        return sum(second(direction) for direction in jnp.eye(2))

    return -jax.vmap(laplacian)(points) - source(points)


@jax.jit
def loss(params, points):
    return jnp.mean(residuals(params, points) ** 2)


@functools.partial(jax.jit, static_argnames="chunk_size")
def gauss_newton_step(params, points, shift, chunk_size=None):
    """The step, accepted if the loss falls; returns the parameters, the next shift and the iterations taken."""
    step, found = krylov.natural_gradient(
        residuals,
        params,
        points,
        residuals(params, points),
        shift=shift,
        center=False,
        chunk_size=chunk_size,
        rtol=1e-3,
        maxiter=500,
    )
    moved = jax.tree.map(lambda p, d: p - d, params, step)
    better = loss(moved, points) < loss(params, points)
    params = jax.tree.map(lambda new, old: jnp.where(better, new, old), moved, params)
    return params, jnp.where(better, shift / 3, shift * 4), found.iterations


class Run(NamedTuple):
    seconds: list
    errors: list  # relative, of u in the 2-norm

    def add(self, started, params, grid):
        self.errors.append(float(relative_error(params, grid)))
        self.seconds.append(time.perf_counter() - started)


@jax.jit
def relative_error(params, grid):
    found = jax.vmap(lambda point: network(params, point))(grid)
    return jnp.linalg.norm(found - solution(grid)) / jnp.linalg.norm(solution(grid))


def by_gauss_newton(params, key, count, grid, steps):
    run, shift, iterations = Run([], []), jnp.asarray(1.0), 0
    points = jax.random.uniform(key, (count, 2))
    jax.block_until_ready(gauss_newton_step(params, points, shift))  # compiled before the clock starts
    started = time.perf_counter()
    for step in range(steps):
        # New points now and then; in between the same ones, so that a fall of the loss means something.
        points = jax.random.uniform(jax.random.fold_in(key, step // 10), (count, 2))
        params, shift, taken = gauss_newton_step(params, points, shift)
        iterations += int(taken)
        run.add(started, params, grid)
    return params, run, iterations


def by_adam(params, key, count, grid, steps, seconds, every=100):
    """Until it has taken as many steps, or seconds."""
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps))

    @jax.jit
    def some_steps(params, state, key):
        def step(carry, key):
            params, state = carry
            gradient = jax.grad(loss)(params, jax.random.uniform(key, (count, 2)))
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), jax.random.split(key, every))[0]

    run, state = Run([], []), optimizer.init(params)
    jax.block_until_ready(some_steps(params, state, key))
    started = time.perf_counter()
    for block in range(steps // every):
        params, state = some_steps(params, state, jax.random.fold_in(key, block))
        run.add(started, params, grid)
        if seconds is not None and run.seconds[-1] > seconds:
            break
    return params, run


class Result(NamedTuple):
    gauss_newton: Run
    adam: Run
    plot: Path | None


def main(widths=(24, 24), count=1000, steps=80, adam_steps=20000, seconds_for_adam=2.0, seed=0, plot=PLOT):
    """Adam gets ``seconds_for_adam`` times Gauss-Newton's time (None: any), and at most ``adam_steps`` steps."""
    jax.config.update("jax_enable_x64", True)
    params = random_params(jax.random.key(seed), widths)
    grid = jnp.stack(jnp.meshgrid(*2 * [jnp.linspace(0, 1, 41)[1:-1]]), -1).reshape(-1, 2)
    _, newton, iterations = by_gauss_newton(params, jax.random.key(seed + 1), count, grid, steps)
    budget = None if seconds_for_adam is None else seconds_for_adam * newton.seconds[-1]
    _, adam = by_adam(params, jax.random.key(seed + 2), count, grid, adam_steps, budget)
    size = sum(p.size for p in jax.tree.leaves(params))
    print(f"{size} parameters, {count} points")
    print(f"Gauss-Newton: error {newton.errors[-1]:.1e} after {steps} steps in {newton.seconds[-1]:.1f} s", end="")
    print(f", {iterations / steps:.0f} iterations of CG a step")
    print(f"Adam:         error {adam.errors[-1]:.1e} after {100 * len(adam.errors)} steps in {adam.seconds[-1]:.1f} s")
    if plot is not None:
        plot_errors(newton, adam, plot)
        print(f"plot: {plot}")
    return Result(newton, adam, plot)


def plot_errors(newton, adam, path):
    figure, axis = plt.subplots(layout="constrained")
    axis.loglog(adam.seconds, adam.errors, color="tab:orange", label="Adam")
    axis.loglog(newton.seconds, newton.errors, color="tab:blue", label="Gauss-Newton, matrix-free")
    axis.set(xlabel="seconds", ylabel="relative error of u", title="Poisson equation by a network")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
