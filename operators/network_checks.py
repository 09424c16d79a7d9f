"""What `check_operator` asks of the networks of the Jacobians inside an operator."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from .host_vectors import host
from .jacobian import Jacobian, copy_of
from .report import Finding, relative
from .samples_apart import Difference, apart_from_together, evaluate, repeated
from .storage import Recomputed


def findings_of_network(jacobian: Jacobian) -> Iterator[Finding]:
    """What no product can show of the network: that it is finite, gives the same twice, and treats samples apart."""
    count, size = jacobian.chunks.weights.shape
    chunks = [jax.tree.map(lambda x, k=k: x[k], jacobian.chunks.samples) for k in sorted({0, count // 2, count - 1})]
    network, params = jacobian.network, jacobian.params

    outputs = host([evaluate(network, params, chunk) for chunk in chunks])
    bad, total = sum(int(np.sum(~np.isfinite(y))) for y in outputs), sum(y.size for y in outputs)
    about = "share of outputs of f that are not finite"
    cure = "Look at f on these samples: infinite log-amplitudes, say. Leave such samples out."
    yield Finding("f finite", bad / max(1, total), 0.0, about, cure)

    twice = [repeated(network, params, chunk) for chunk in chunks]
    about = "difference of two evaluations of f on the same samples, relative to its largest output"
    cure = "Look for random numbers drawn on the host; pass noise or keys as a sample leaf."
    yield _worst("f repeatable", twice, about, cure)

    about = "difference of f on samples together and on each alone, relative to its largest output"
    cure = "Look for batch statistics, a mask or noise shaped like the batch, or a mean over samples inside f."
    if size == 1:
        reason = "checked when the Jacobian was made" if count > 1 else "there is one sample"
        yield Finding("samples apart", 0.0, 0.0, about, cure, skipped=reason)
    else:
        apart = [apart_from_together(network, jacobian.network_of_one, params, chunk) for chunk in chunks]
        yield _worst("samples apart", apart, about, cure)


def _worst(name: str, differences: list[Difference], about: str, cure: str) -> Finding:
    worst = max(differences, key=lambda d: relative(d.found, d.scale))
    allowed = relative(worst.allowed, worst.scale)
    return Finding(name, relative(worst.found, worst.scale), allowed, about, cure)


def jacobians_inside(op: Any) -> list[Jacobian]:
    """All Jacobians inside an operator, each once."""
    found = jax.tree.leaves(op, is_leaf=lambda x: isinstance(x, Jacobian))
    return list({id(j): j for j in found if isinstance(j, Jacobian)}.values())


def uncentred(part: Any) -> Any:
    """The Jacobian without centring; anything else as it is."""
    if not isinstance(part, Jacobian):
        return part
    copy = copy_of(part)
    for name, value in {"center": False, "mean_rows": None, "storage": Recomputed()}.items():
        object.__setattr__(copy, name, value)
    return copy
