"""Every kind of operator, in every form of its interface, against its dense matrix."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from krylov.operators import MatrixOperator, split_real
from tests.operators import zoo
from tests.operators.zoo import flat, is_complex, unflat, vector

SINGLE, DOUBLE = [np.float32, np.complex64], [np.float64, np.complex128]
x64_only = pytest.mark.x64_only


def _cases():
    for build in zoo.UNIFORM:
        for dtype in SINGLE + DOUBLE:
            if build is zoo.real_on_complex and np.issubdtype(dtype, np.complexfloating):
                continue
            yield pytest.param(build, dtype, marks=[x64_only] if dtype in DOUBLE else [])
    for build in zoo.MIXED:
        for dtype in (np.complex64, np.complex128):
            yield pytest.param(build, dtype, marks=[x64_only] if dtype in DOUBLE else [])


every_case = pytest.mark.parametrize("build, dtype", list(_cases()), ids=lambda p: getattr(p, "__name__", None))
# What is the same code in every precision is compiled in one.
every_kind = pytest.mark.parametrize(
    "build, dtype",
    [
        pytest.param(p.values[0], p.values[1], marks=[x64_only])
        for p in _cases()
        if p.values[1] in DOUBLE and (p.values[1] is np.complex128 or p.values[0] is zoo.real_on_complex)
    ],
    ids=lambda p: getattr(p, "__name__", None),
)

# What is compiled once and run once is not worth optimising.
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def quick_jit(f, *args):
    dynamic, static = eqx.partition(args, eqx.is_array)
    return jax.jit(lambda dynamic: f(*eqx.combine(dynamic, static)), compiler_options=_QUICK)(dynamic)


def signs(structure):
    """Of conjugation on `flat` vectors."""
    leaves = jax.tree.leaves(structure)
    size = lambda chosen: sum(int(np.prod(s.shape)) for s in chosen)
    return np.concatenate([np.ones(size(leaves)), -np.ones(size(filter(is_complex, leaves)))])


def assert_close(got, expected, structure, dtype):
    """A vector against a flat reference, to some hundred roundings."""
    assert jax.tree.structure(got) == jax.tree.structure(structure)
    for x, s in zip(jax.tree.leaves(got), jax.tree.leaves(structure)):
        assert (x.shape, x.dtype) == (s.shape, s.dtype)
    tolerance = 300 * float(jnp.finfo(dtype).eps) * max(1, np.max(np.abs(expected), initial=0))
    np.testing.assert_allclose(flat(got), expected, rtol=0, atol=tolerance)


def plain_matrix(case):
    """The matrix that `as_matrix` promises."""
    ins, outs = case.op.in_structure(), case.op.out_structure()
    if case.op.field == "complex":
        rows, columns = case.op.shape
        return case.matrix[:rows, :columns] + 1j * case.matrix[rows:, :columns]
    del ins, outs
    return case.matrix


@every_case
def test_products_and_claims(build, dtype, rng):
    case = build(rng, dtype)
    op, dense = case.op, case.matrix
    ins, outs = op.in_structure(), op.out_structure()
    x, y = vector(rng, ins), vector(rng, outs)
    assert_close(op.mv(x), dense @ flat(x), outs, dtype)
    assert_close(op.rmv(y), dense.T @ flat(y), ins, dtype)
    assert (op.is_hermitian, op.is_positive) == (case.hermitian, case.positive)
    if case.hermitian:
        np.testing.assert_allclose(dense, dense.T, atol=1e-5)
    if case.positive:
        assert np.linalg.eigvalsh(dense)[0] > -1e-5
    c_linear = all(map(is_complex, jax.tree.leaves((ins, outs)))) and build not in zoo.MIXED
    assert op.field == ("complex" if c_linear else "real")
    rows, columns = (sum(int(np.prod(s.shape)) for s in jax.tree.leaves(t)) for t in (outs, ins))
    assert op.shape == (rows, columns)
    assert (op.in_size(), op.out_size()) == (columns, rows)


@every_kind
def test_every_form_under_jit(build, dtype, rng):
    case = build(rng, dtype)
    op, dense = case.op, case.matrix
    ins, outs = op.in_structure(), op.out_structure()
    # An operator without complex leaves is its own real form.
    split = split_real if any(map(is_complex, jax.tree.leaves((ins, outs)))) else lambda tree: tree
    split_ins, split_outs = split(ins), split(outs)
    x, y = vector(rng, ins), vector(rng, outs)

    def forms(op, x, y):
        found = {
            "op @ x": op @ x,
            "H @ y": op.H @ y,
            "H.H @ x": op.H.H @ x,
            "T @ y": op.T @ y,
            "T.T @ x": op.T.T @ x,
            "as_real() @ x": op.as_real() @ split(x),
            "as_real().H @ y": op.as_real().H @ split(y),
            "linear_transpose": jax.linear_transpose(op.mv, ins)(y)[0],
            "linear_transpose twice": jax.linear_transpose(lambda y: jax.linear_transpose(op.mv, ins)(y)[0], outs)(x)[
                0
            ],
            "matrix": op.as_matrix(),
            "real matrix": op.as_real().as_matrix(),
        }
        if op.is_square:
            found["diagonal"] = op.diagonal()
        return found

    found = quick_jit(forms, op, x, y)
    transposed = signs(ins)[:, None] * dense.T * signs(outs)
    expected = {
        "op @ x": (dense @ flat(x), outs),
        "H @ y": (dense.T @ flat(y), ins),
        "H.H @ x": (dense @ flat(x), outs),
        "T @ y": (transposed @ flat(y), ins),
        "T.T @ x": (dense @ flat(x), outs),
        "as_real() @ x": (dense @ flat(x), split_outs),
        "as_real().H @ y": (dense.T @ flat(y), split_ins),
        "linear_transpose": (transposed @ flat(y), ins),
        "linear_transpose twice": (dense @ flat(x), outs),
    }
    for name, (reference, structure) in expected.items():
        assert_close(found[name], reference, structure, dtype)
    np.testing.assert_allclose(found["real matrix"], dense, atol=1e-12)
    np.testing.assert_allclose(found["matrix"], plain_matrix(case), atol=1e-12)
    assert found["matrix"].dtype == (np.complex128 if op.field == "complex" else np.float64)
    if op.is_square:
        structure = split_ins if op.field == "real" else ins
        diagonal = np.diagonal(plain_matrix(case))
        np.testing.assert_allclose(
            np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(found["diagonal"])]), diagonal, atol=1e-12
        )
        assert jax.tree.structure(found["diagonal"]) == jax.tree.structure(structure)


@every_kind
def test_vmap_and_derivatives_in_what_it_holds(build, dtype, rng):
    op = build(rng, dtype).op
    held, rest = eqx.partition(op, eqx.is_inexact_array)
    # A list: JAX's vmap makes an exception of sparse matrices.
    values, tree = jax.tree.flatten(held)
    if not values:
        pytest.skip("holds no array")
    x, y = vector(rng, op.in_structure()), vector(rng, op.out_structure())
    step = jax.tree.map(lambda v: jnp.asarray(zoo.normal(rng, v.dtype, *v.shape)), values)

    def product(values):
        return eqx.combine(jax.tree.unflatten(tree, values), rest).mv(x)

    def loss(values):
        return sum(
            jnp.sum((a.conj() * b).real) ** 2 for a, b in zip(jax.tree.leaves(product(values)), jax.tree.leaves(y))
        )

    def along(t):
        return jax.tree.map(lambda v, d: v + t * d, values, step)

    many = jax.tree.map(lambda *leaves: jnp.stack(leaves), values, along(1.0))
    batch, slope, gradient = quick_jit(
        lambda many, values: (
            jax.vmap(product)(many),
            jax.jvp(loss, (values,), (step,))[1],
            jax.grad(lambda t: loss(along(t)))(0.0),
        ),
        many,
        values,
    )
    for i, t in enumerate((0.0, 1.0)):
        single = flat(product(along(t)))
        np.testing.assert_allclose(flat(jax.tree.map(lambda leaf, i=i: leaf[i], batch)), single, atol=1e-12)
    h = 1e-6
    numerical = (loss(along(h)) - loss(along(-h))) / (2 * h)
    np.testing.assert_allclose(slope, numerical, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradient, numerical, rtol=1e-6, atol=1e-6)
