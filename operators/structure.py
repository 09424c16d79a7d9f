"""Shapes and dtypes of vectors that are pytrees of arrays, and the words that errors use for them."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

Structure = PyTree[jax.ShapeDtypeStruct]


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array, tracer or abstract value, with its sharding and varying mesh axes if it has any."""
    aval, options = _type_of(x), {}
    sharding = getattr(aval, "sharding", None)
    explicit = sharding is not None and not sharding.mesh.empty and sharding.mesh.are_all_axes_explicit
    # The mesh axes that a value varies over inside shard_map; JAX changed the attribute's name.
    axes = getattr(aval, "manual_axis_type", None)
    if axes is not None and axes.varying:
        options["manual_axis_type"] = axes
    elif getattr(aval, "vma", None):
        options["vma"] = aval.vma
    if explicit or options:
        options["sharding"] = sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, **options)


def _type_of(x: Any) -> Any:
    return x if hasattr(x, "shape") and hasattr(x, "dtype") and not hasattr(x, "__array__") else jax.typeof(x)


def varies(x: Any) -> bool:
    """Whether a value is known to vary over the axes of a mesh, inside ``jax.shard_map`` with ``check_vma``."""
    aval = _type_of(x)
    axes = getattr(aval, "manual_axis_type", None)
    return bool(axes.varying if axes is not None else getattr(aval, "vma", None))


def is_traced(x: Any) -> bool:
    """Whether a value is unknown because a transformation is looking on."""
    return isinstance(x, jax.core.Tracer)


def structure_of(tree: PyTree) -> Structure:
    """Shapes and dtypes of a pytree of arrays, without weak types or shardings; Python scalars become arrays."""

    def leaf(x):
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            x = jnp.asarray(x)
        return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype) if _is_numeric(x) else x.dtype)

    return jax.tree.map(leaf, tree)


def _is_numeric(x) -> bool:
    return not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)


def same_structure(a: PyTree, b: PyTree) -> bool:
    """Whether two pytrees have the same tree, shapes and dtypes."""
    leaves_a, tree_a = jax.tree.flatten(structure_of(a))
    leaves_b, tree_b = jax.tree.flatten(structure_of(b))
    return tree_a == tree_b and all(
        x.shape == y.shape and x.dtype == y.dtype for x, y in zip(leaves_a, leaves_b, strict=True)
    )


def describe(tree: PyTree) -> str:
    """A pytree of arrays in words, as in ``{'kernel': float32[20,80], 'bias': float32[80]}``."""

    class Word(str):
        def __repr__(self):
            return str(self)

    def leaf(x):
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            return Word(f"{np.dtype(x.dtype).name if _is_numeric(x) else x.dtype}[{','.join(map(str, x.shape))}]")
        return Word(f"{type(x).__name__} {x!r}")

    text = repr(jax.tree.map(leaf, tree))
    return text if len(text) <= 1200 else text[:1200] + " ..."


def size_of(structure: Structure) -> int:
    """Number of scalars, complex ones counted once."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(structure))


def is_complex(leaf: Any) -> bool:
    """Whether an array or a shape has a complex dtype."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.complexfloating))


def has_complex(structure: PyTree) -> bool:
    """Whether any leaf is complex."""
    return any(is_complex(leaf) for leaf in jax.tree.leaves(structure))


def all_complex(structure: PyTree) -> bool:
    """Whether there are leaves and all of them are complex."""
    leaves = jax.tree.leaves(structure)
    return bool(leaves) and all(is_complex(leaf) for leaf in leaves)


def known_not_negative(values: PyTree) -> bool:
    """Whether all entries of all leaves are real, known (not traced) and at least zero."""
    leaves = jax.tree.leaves(values)
    if any(isinstance(x, jax.core.Tracer) or np.iscomplexobj(x) for x in leaves):
        return False
    with jax.ensure_compile_time_eval():  # known values stay known inside a jitted function
        return all(bool(jnp.all(jnp.asarray(x) >= 0)) for x in leaves)


def common_dtype(structure: PyTree) -> np.dtype:
    """The dtype that all leaves fit into; the default float where there is no leaf."""
    leaves = jax.tree.leaves(structure)
    return np.dtype(jnp.result_type(*(leaf.dtype for leaf in leaves)) if leaves else jnp.result_type(float))


def real_dtype(dtype: Any) -> np.dtype:
    """The real dtype of the same precision."""
    return np.dtype(jnp.finfo(dtype).dtype)


def of_precision(dtype: Any, real: np.dtype) -> np.dtype:
    """A real or a complex dtype, as the first is, of the precision of a real one."""
    return np.dtype(jnp.result_type(real, jnp.complex64) if jnp.issubdtype(dtype, jnp.complexfloating) else real)


def check_vector(where: str, name: str, vector: PyTree, expected: Structure, cure: str | None = None) -> PyTree:
    """Return ``vector`` as arrays if it has the ``expected`` structure, else raise an error that says what differs.

    Raises:
        ValueError: tree, shapes or dtypes differ.
    """
    try:
        got = structure_of(vector)
    except TypeError as error:
        raise ValueError(f"{where}: {name} is not a pytree of arrays: {error}") from None
    if not same_structure(got, expected):
        raise ValueError(
            f"{where}: {name} does not match what is expected.\n"
            f"  got       {describe(got)}\n  expected  {describe(expected)}\n  {cure or _cure(name, got, expected)}"
        )
    return jax.tree.map(jnp.asarray, vector)


def _cure(name: str, got: Structure, expected: Structure) -> str:
    tree_got, tree_expected = jax.tree.structure(got), jax.tree.structure(expected)
    if tree_got != tree_expected:
        numbers = all(leaf.shape == () for leaf in jax.tree.leaves(got))
        if tree_got != jax.tree.structure(0) == tree_expected and jax.tree.leaves(got) and numbers:
            return f"A list is a pytree of its numbers: for a vector pass jnp.asarray({name})."
        return f"Give {name} the pytree structure {tree_expected}; it came as {tree_got}."
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True))
    if any(x.shape != y.shape for x, y in pairs):
        return f"Give {name} the expected shapes."
    if any(is_complex(x) and not is_complex(y) for x, y in pairs):
        return f"The imaginary part of {name} would be lost: take {name}.real if meant, or use a complex operator."
    return f"Cast {name} with jax.tree.map(lambda x, s: x.astype(s.dtype), {name}, structure)."


def zeros(structure: Structure) -> PyTree[Array]:
    """The zero vector."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), structure)


def random_vector(key: Array, structure: Structure) -> PyTree[Array]:
    """A vector of independent standard normal entries; complex leaves have both parts random."""
    leaves, tree = jax.tree.flatten(structure)
    keys = jax.random.split(key, max(len(leaves), 1))
    drawn = [jax.random.normal(k, s.shape, s.dtype) for k, s in zip(keys, leaves, strict=False)]
    return jax.tree.unflatten(tree, drawn)


def ravel(tree: PyTree[Array], dtype: Any = None) -> Array:
    """All leaves in one flat array, in the order of ``jax.tree.leaves``."""
    leaves = jax.tree.leaves(tree)
    dtype = common_dtype(tree) if dtype is None else dtype
    if not leaves:
        return jnp.zeros(0, dtype)
    return jnp.concatenate([leaf.reshape(-1).astype(dtype) for leaf in leaves])


def unravel(flat: Array, structure: Structure) -> PyTree[Array]:
    """Inverse of `ravel`; a real leaf takes the real part of its entries."""
    leaves, tree = jax.tree.flatten(structure)
    out, start = [], 0
    for s in leaves:
        stop = start + int(np.prod(s.shape))
        part = flat[start:stop].reshape(s.shape)
        out.append((part if is_complex(s) else part.real).astype(s.dtype))
        start = stop
    return jax.tree.unflatten(tree, out)


def split_real(tree: PyTree) -> tuple[PyTree, list]:
    """Real parts of all leaves, and the imaginary parts of the complex ones as a list.

    The map is R-linear, invertible and keeps the real inner product. Works on arrays and on structures.
    """

    def part(x, which):
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, real_dtype(x.dtype))
        return which(x)

    real = jax.tree.map(lambda x: part(x, jnp.real), tree)
    return real, [part(x, jnp.imag) for x in jax.tree.leaves(tree) if is_complex(x)]


def join_real(parts: tuple[PyTree, list], structure: Structure) -> PyTree[Array]:
    """Inverse of `split_real` for a vector of the given structure."""
    real, imag = parts
    imag = list(imag)
    leaves, tree = jax.tree.flatten(structure)
    out = [
        jax.lax.complex(re, imag.pop(0)) if is_complex(s) else re
        for re, s in zip(jax.tree.leaves(real), leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, out)


def freeze(structure: Structure) -> tuple:
    """A hashable form of a structure, for static fields."""
    leaves, tree = jax.tree.flatten(structure_of(structure))
    return tuple(leaves), tree


def thaw(frozen: tuple) -> Structure:
    """Inverse of `freeze`."""
    leaves, tree = frozen
    return jax.tree.unflatten(tree, leaves)
