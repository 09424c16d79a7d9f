"""In which precision a network is evaluated, sums over samples are taken, and vectors are."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .structure import describe, is_complex, of_precision, structure_of

_NAMES = ("bfloat16", "float32", "float64")


class Precision(NamedTuple):
    """The three dtypes of a Jacobian, each a real one or None; complex arrays have the complex one like it."""

    compute: np.dtype | None
    accumulate: np.dtype | None
    vectors: np.dtype | None

    @classmethod
    def of(cls, compute_dtype: Any, accumulate_dtype: Any, vector_dtype: Any) -> "Precision":
        """The dtypes as a user names them.

        Raises:
            ValueError: another dtype, or one that JAX does not have at present.
        """
        return cls(
            _checked("compute_dtype", compute_dtype, _NAMES),
            # A sum in half precision stops growing once it is some hundred times larger than its terms.
            _checked("accumulate_dtype", accumulate_dtype, _NAMES[1:]),
            _checked("vector_dtype", vector_dtype, _NAMES),
        )

    def network(
        self, f: Callable[[Any, Any], PyTree], trained: PyTree, rest: PyTree, samples: PyTree
    ) -> tuple[Callable[[Any, Any], PyTree], PyTree, PyTree]:
        """The network of trained parameters and samples, with outputs in the dtype of vectors; and where it computes.

        Returns:
            The function, and the parameters and samples in the dtype that it computes in.

        Raises:
            ValueError: complex leaves in half precision.
        """
        if self.compute is None:
            return lambda p, x: cast(f(eqx.combine(p, rest), x), self.vectors, "vector_dtype"), trained, samples
        samples = jax.tree.map(jnp.asarray, samples)
        own_params, own_samples = structure_of((trained, samples))
        inside, rest_inside, trained, samples = cast((f, rest, trained, samples), self.compute, "compute_dtype")

        def network(p, x):
            out = inside(eqx.combine(p, rest_inside), x)
            if self.vectors is not None:
                return cast(out, self.vectors, "vector_dtype")
            own = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, s.dtype), x, own_samples)
            return cast_like(out, jax.eval_shape(lambda p, x: f(eqx.combine(p, rest), x), own_params, own))

        return network, trained, samples

    def widest(self, dtype: Any) -> np.dtype:
        """A real dtype, or that of vectors or sums where it is wider: what weights are kept in."""
        return np.dtype(jnp.result_type(dtype, *(d for d in (self.accumulate, self.vectors) if d is not None)))


def _checked(name: str, dtype: Any, names: tuple[str, ...]) -> np.dtype | None:
    if dtype is None:
        return None
    try:
        found = np.dtype(getattr(jnp, dtype) if isinstance(dtype, str) and dtype in _NAMES else dtype)
    except TypeError:
        found = None
    if found is None or found.name not in names:
        why = "  Sums in half precision stop growing.\n" if found is not None and found.name in _NAMES else ""
        raise ValueError(
            f"Jacobian: {name} must be a real floating-point dtype.\n"
            f"  got       {dtype!r}\n  expected  one of {', '.join(names)}, or None\n{why}"
            "  Complex arrays take the complex dtype of that precision."
        )
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise ValueError(
            f"Jacobian: {name}={found.name!r} needs double precision, which is switched off.\n"
            '  Call jax.config.update("jax_enable_x64", True) before any array is made, or take float32.'
        )
    return found


def cast(tree: PyTree, dtype: np.dtype | None, name: str) -> PyTree:
    """Floating-point arrays (or their shapes) in another precision, all other leaves as they are.

    Raises:
        ValueError: complex leaves in half precision.
    """
    if dtype is None:
        return tree

    def leaf(x):
        if not (hasattr(x, "shape") and hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)):
            return x
        if is_complex(x) and dtype.itemsize < 4:
            raise ValueError(
                f"Jacobian: there are no complex numbers in half precision.\n  got       {name}={dtype.name!r}, and "
                f"{describe(x)}\n  expected  'float32' or 'float64'"
            )
        wanted = of_precision(x.dtype, dtype)
        return jax.ShapeDtypeStruct(x.shape, wanted) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(wanted)

    return jax.tree.map(leaf, tree)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Arrays in the dtypes of others."""
    return jax.tree.map(lambda x, s: x if x.dtype == s.dtype else x.astype(s.dtype), tree, like)
