"""A progress bar for loops that run inside jit."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int
from tqdm import tqdm

from .vectors import RealScalar

_bar: tqdm | None = None


def report_progress(
    iteration: Int[Array, ""], residual: RealScalar, last: Bool[Array, ""], maxiter: Int[Array, ""]
) -> None:
    """Show the iteration and the relative residual, now and then, on a bar that closes after the last one."""
    now = last | (iteration % 10 == 0)
    jax.lax.cond(
        now,
        lambda: jax.debug.callback(_show, iteration, residual, last, maxiter, ordered=False),
        lambda: None,
    )


def _show(iteration, residual, last, maxiter) -> None:
    global _bar
    if _bar is None:
        _bar = tqdm(total=None, desc="krylov.solve", unit="it")
    _bar.n = int(jnp.max(iteration))
    _bar.set_postfix_str(f"relative residual {float(jnp.max(residual)):.1e}")
    if last:
        _bar.close()
        _bar = None
