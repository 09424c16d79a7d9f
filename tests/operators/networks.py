"""Small networks of every kind that a Jacobian must take, and their dense Jacobians by plain differentiation."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from tests.operators.zoo import is_complex, normal

NUM_SAMPLES = 7
FLOAT, COMPLEX = np.dtype(jnp.result_type(float)), np.dtype(jnp.result_type(complex))
EPS = float(jnp.finfo(FLOAT).eps)


class Network(NamedTuple):
    """``f(params, samples)`` with what `Jacobian` needs to know of it."""

    f: Callable[[Any, Any], Any]
    params: Any
    samples: Any
    options: Any = MappingProxyType({})

    @property
    def trained(self) -> Any:
        """The parameters that take part, None in place of the others."""
        chosen = eqx.filter(self.params, eqx.is_inexact_array)
        trainable = self.options.get("trainable")
        return chosen if trainable is None else eqx.filter(chosen, trainable)

    def at(self, trained: Any, samples: Any) -> Any:
        """The outputs for other values of the trained parameters."""
        return self.f(eqx.combine(trained, self.params), samples)


def array(seed: int, dtype: Any, *shape: int) -> jax.Array:
    return jnp.asarray(normal(np.random.default_rng(seed), dtype, *shape) / 2)


def spins(seed: int = 0) -> jax.Array:
    return array(seed, FLOAT, NUM_SAMPLES, 3)


def real() -> Network:
    def f(params, x):
        return jnp.tanh(x @ params["w"] + params["b"]).sum(-1) * params["b"]

    return Network(f, {"w": array(1, FLOAT, 3, 2), "b": jnp.asarray(0.3, FLOAT)}, spins())


def _log_amplitude(params, x):
    return jnp.log(jnp.cosh(x @ params["w"] + params["b"])).sum(-1) + x @ params["a"]


def _complex_params():
    return {"w": array(1, COMPLEX, 3, 2), "b": array(2, COMPLEX, 2), "a": array(3, COMPLEX, 3)}


def holomorphic() -> Network:
    return Network(_log_amplitude, _complex_params(), spins(), {"holomorphic": True})


def holomorphic_without_saying() -> Network:
    return Network(_log_amplitude, _complex_params(), spins())


def not_holomorphic() -> Network:
    def f(params, x):
        h = x @ params["w"]
        return jnp.sum(jnp.abs(h) ** 2 + h * params["b"].conj(), -1) + x @ params["a"]

    return Network(f, _complex_params(), spins())


def complex_output_of_real_params() -> Network:
    def f(params, x):
        h = jnp.tanh(x @ params)
        return jax.lax.complex(h[:, 0], h[:, 1] ** 2)

    return Network(f, array(1, FLOAT, 3, 2), spins())


def mixed_tree() -> Network:
    """Real, complex, integer, frozen, missing, function, scalar and empty leaves; a frozen one is complex."""

    def f(params, x):
        h = (x @ params["real"]).astype(COMPLEX) @ params["complex"] + params["scalar"]
        h = params["activation"](h) * params["power"] + x[:, params["index"]] @ params["frozen"].conj()
        return h**2 + jnp.abs(h) + params["empty"].sum()

    params = {
        "real": array(1, FLOAT, 3, 2),
        "complex": array(2, COMPLEX, 2),
        "frozen": array(3, COMPLEX, 2),
        "scalar": jnp.asarray(0.2, FLOAT),
        "empty": jnp.zeros((0, 2), FLOAT),
        "index": np.array([2, 0]),
        "power": 2,
        "none": None,
        "activation": jnp.sin,
    }
    trainable = {k: k != "frozen" for k in params if k != "none"} | {"none": None}
    return Network(f, params, spins(), {"trainable": trainable})


def module_as_params() -> Network:
    mlp = eqx.nn.MLP(3, "scalar", 4, 1, activation=jax.nn.gelu, key=jax.random.key(0))
    return Network(lambda model, x: jax.vmap(model)(x), mlp, spins())


class _Module(eqx.Module):
    layer: jax.Array
    scale: float

    def __call__(self, params, x):
        return jnp.tanh(x @ self.layer) @ params * self.scale


def module_as_function() -> Network:
    return Network(_Module(array(1, COMPLEX, 3, 2), 2.0), array(2, COMPLEX, 2), spins())


def trees_in_and_out() -> Network:
    """Samples of several leaves, one of integers; outputs of several leaves, real and complex."""

    def f(params, samples):
        x, (kind, scale) = samples["x"], samples["rest"]
        h = jnp.sin(x @ params["w"]) * scale[:, None] + params["table"][kind]
        return {"real": h**2, "complex": [jax.lax.complex(h[:, 0], h[:, 1] ** 3) * params["c"]]}

    params = {"w": array(1, FLOAT, 3, 2), "table": array(2, FLOAT, 2, 2), "c": array(3, COMPLEX)}
    rest = (np.array([0, 1, 1, 0, 1, 0, 0]), array(4, FLOAT, NUM_SAMPLES))
    return Network(f, params, {"x": spins(), "rest": rest})


def many_outputs() -> Network:
    """Too many numbers per sample to keep a mean row for each."""

    def f(params, x):
        h = jnp.sin(x @ params["w"])  # (N, 3)
        return {"r": h[:, :, None] * params["v"], "c": h[:, :1] * params["c"]}

    params = {"w": array(1, FLOAT, 3, 3), "v": array(2, FLOAT, 5), "c": array(3, COMPLEX, 2)}
    return Network(f, params, spins())


def control_flow() -> Network:
    """Branches, a loop, and activations with derivative rules of their own."""

    def f(params, x):
        def one(x):
            h = jax.lax.cond(x[0] > 0, lambda h: jnp.sin(h), lambda h: h * params["b"], x @ params["w"])
            h, _ = jax.lax.scan(lambda h, _: (jax.nn.gelu(h @ params["v"]), None), h, None, length=3)
            return jnp.sum(jax.nn.relu(h) + jax.nn.softplus(h))

        return jax.vmap(one)(x)

    params = {"w": array(1, FLOAT, 3, 2), "v": array(2, FLOAT, 2, 2), "b": array(3, FLOAT, 2)}
    return Network(f, params, spins())


ALL = [
    real,
    holomorphic,
    holomorphic_without_saying,
    not_holomorphic,
    complex_output_of_real_params,
    mixed_tree,
    module_as_params,
    module_as_function,
    trees_in_and_out,
    many_outputs,
    control_flow,
]


def ravel_real(tree: Any) -> jax.Array:
    """`zoo.flat` in JAX."""
    leaves = jax.tree.leaves(tree)
    parts = [x.real.ravel() for x in leaves] + [x.imag.ravel() for x in leaves if is_complex(x)]
    return jnp.concatenate(parts)


def unravel_real(values: jax.Array, structure: Any) -> Any:
    """`zoo.unflat` in JAX."""
    leaves, tree = jax.tree.flatten(structure)
    sizes = [x.size for x in leaves] + [x.size for x in leaves if is_complex(x)]
    parts = jnp.split(values, np.cumsum(sizes)[:-1])
    imaginary = iter(parts[len(leaves) :])
    out = []
    for part, x in zip(parts, leaves):
        part = jax.lax.complex(part, next(imaginary)) if is_complex(x) else part
        out.append(part.reshape(x.shape))
    return jax.tree.unflatten(tree, out)


def dense_jacobian(network: Network, trained: Any, samples: Any, weights: Any, center: bool) -> jax.Array:
    """The Jacobian between real parts, by forward differentiation of the whole, and its definition."""
    weights = weights / weights.sum()
    of_flat = lambda flat: network.at(unravel_real(flat, trained), samples)
    derivative = jax.jacfwd(of_flat)(ravel_real(trained))  # leaves (N, ..., parameters)

    def rows(o):
        if center:
            o = o - jnp.tensordot(weights, o, axes=1)
        root = jnp.where(weights > 0, jnp.sqrt(jnp.where(weights > 0, weights, 1)), 0)
        return root.reshape(-1, *(1 for _ in o.shape[1:])) * o

    return jax.vmap(ravel_real, in_axes=-1, out_axes=-1)(jax.tree.map(rows, derivative))
