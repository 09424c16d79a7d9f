"""Every kind of operator, in every form of its interface, against its dense matrix."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from krylov.operators import FunctionOperator, IdentityOperator, LinearOperator, MatrixOperator, split_real
from tests.operators import zoo
from tests.operators.zoo import flat, is_complex, vector

x64_only, slow = pytest.mark.x64_only, pytest.mark.slow


def cases(uniform, mixed, quick=None, without=()):
    """Kinds of operators with a dtype. Single precision has its run with x64 off; kinds not in ``quick`` are slow."""
    for build, dtypes in [*((b, uniform) for b in zoo.UNIFORM), *((b, mixed) for b in zoo.MIXED)]:
        if build in without:
            continue
        for dtype in dtypes:
            marks = [] if quick is None or build in quick else [slow]
            if np.finfo(dtype).eps < 1e-10:
                marks.append(x64_only)
            elif jax.config.jax_enable_x64:
                marks.append(slow)
            if not (build is zoo.real_on_complex and np.issubdtype(dtype, np.complexfloating)):
                yield pytest.param(build, dtype, marks=marks)


def over(found):
    return pytest.mark.parametrize("build, dtype", list(found), ids=lambda p: getattr(p, "__name__", None))


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
    if case.op.field == "complex":
        rows, columns = case.op.shape
        return case.matrix[:rows, :columns] + 1j * case.matrix[rows:, :columns]
    return case.matrix


@over(cases([np.float32, np.complex64, np.float64], [np.complex64]))
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


@over(
    cases(
        [np.complex128],
        [np.complex128],
        quick=(
            zoo.matrix,
            zoo.bcoo_matrix,
            zoo.matrix_on_trees,
            zoo.diagonal,
            zoo.function,
            zoo.function_with_adjoint,
            zoo.hermitian_function,
            zoo.identity,
            zoo.sum_of_three,
            zoo.divided,
            zoo.composed,
            zoo.adjoint,
            zoo.conjugated,
            zoo.blocks,
            zoo.low_rank_plus_tree,
            zoo.from_scipy,
            zoo.real_on_complex,
            zoo.mixed_function_with_adjoint,
            zoo.mixed_matrix,
            zoo.mixed_blocks,
            zoo.mixed_low_rank,
            zoo.mixed_sum,
            zoo.conjugation_times_i,
            zoo.complex_of_real,
        ),
    )
)
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


@over(
    cases(
        [np.complex128],
        [np.complex128],
        quick=(
            zoo.matrix,
            zoo.bcoo_matrix,
            zoo.function,
            zoo.function_with_adjoint,
            zoo.sum_of_three,
            zoo.composed,
            zoo.low_rank_plus_tree,
            zoo.mixed_function_with_adjoint,
            zoo.mixed_low_rank,
            zoo.mixed_product,
        ),
        without=(zoo.identity, zoo.mixed_identity, zoo.from_scipy),  # which hold no array of JAX
    )
)
def test_vmap_and_derivatives_in_what_it_holds(build, dtype, rng):
    op = build(rng, dtype).op
    held, rest = eqx.partition(op, eqx.is_inexact_array)
    # A list: JAX's vmap makes an exception of sparse matrices.
    values, tree = jax.tree.flatten(held)
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


@pytest.mark.parametrize("structure", [{}, (), {"a": np.zeros((0, 3), np.float32)}])
def test_an_operator_on_nothing(structure):
    op = FunctionOperator(lambda x: x, structure)
    assert op.shape == (0, 0)
    assert op.as_matrix().shape == (0, 0)
    x = jax.tree.map(jnp.asarray, structure)
    for found in (op @ x, op.H @ x, op.diagonal(), (2.0 * op + op) @ x):
        assert jax.tree.structure(found) == jax.tree.structure(structure)


def test_scalar_and_size_one_leaves():
    op = FunctionOperator(lambda x: {"a": 2 * x["a"], "b": 3 * x["b"]}, {"a": 1.0, "b": np.ones((1, 1))})
    assert op.shape == (2, 2)
    assert jax.tree.map(np.shape, op @ {"a": 1.0, "b": np.ones((1, 1))}) == {"a": (), "b": (1, 1)}
    np.testing.assert_allclose(op.as_matrix(), np.diag([2, 3]))


def test_vectors_may_be_numpy_arrays_and_python_numbers():
    dtype = np.dtype(jnp.result_type(float))
    op = FunctionOperator(lambda x: 2 * x, 1.0)
    assert (op @ 3.0).dtype == dtype
    assert (op @ np.asarray(3.0)).dtype == dtype  # float64 is taken for float32 with x64 off, as everywhere in JAX
    matrix = MatrixOperator(np.eye(2))
    for x in (np.ones(2), jnp.ones(2)):
        assert isinstance(matrix @ x, jax.Array)
        assert isinstance(matrix.rmv(x), jax.Array)


@pytest.mark.parametrize(
    "vector, cure",
    [
        (np.ones((2, 1), np.float32), "Give vector the expected shapes."),
        ({"a": np.ones(2, np.float32)}, "Give vector the pytree structure"),
        (np.ones(2, np.complex64), "The imaginary part of vector would be lost"),
        (np.ones(2, np.float16), "Cast vector with"),
        (np.ones(2, np.int32), "Cast vector with"),
        (None, "Give vector the pytree structure"),
    ],
)
@pytest.mark.parametrize("method", ["mv", "rmv"])
def test_a_vector_that_does_not_match_is_named_with_what_to_do(vector, cure, method):
    op = MatrixOperator(np.eye(2, dtype=np.float32))
    with pytest.raises(ValueError, match="does not match what is expected") as info:
        getattr(op, method)(vector)
    message = str(info.value)
    assert message.startswith(f"MatrixOperator.{method}: vector")
    assert "expected  float32[2]" in message
    assert cure in message


def test_several_products_at_once_and_stacks_that_do_not_fit():
    A, V = np.arange(6.0).reshape(2, 3).astype("f"), np.arange(12.0).reshape(4, 3).astype("f")
    op = MatrixOperator(A)
    np.testing.assert_allclose(op.mm(V), V @ A.T)
    np.testing.assert_allclose(op.H.mm(np.ones((5, 2), "f")), np.ones((5, 2)) @ A)
    for wrong in (V[0], V.T, np.float32(1)):
        with pytest.raises(ValueError, match=r"mm: vectors .*[\s\S]*along a new first axis"):
            op.mm(wrong)


def test_a_vector_that_is_no_array_is_refused():
    with pytest.raises(ValueError, match="vector is not a pytree of arrays"):
        MatrixOperator(np.eye(2)).mv("text")


def test_mismatch_is_raised_at_trace_time():
    op = MatrixOperator(np.eye(2, dtype=np.float32))
    with pytest.raises(ValueError, match="expected  float32"):
        jax.eval_shape(op.mv, jax.ShapeDtypeStruct((3,), np.float32))


def test_the_diagonal_of_what_is_not_square_is_refused():
    with pytest.raises(ValueError, match=r"not square but \(2, 3\)"):
        MatrixOperator(np.ones((2, 3))).diagonal()


def test_columns_beyond_one_batch():
    # Dense matrices are made some columns at a time, and the last batch is not full.
    n = 130
    a = np.random.default_rng(0).normal(size=(n, n))
    op = FunctionOperator(lambda x: a @ x, np.zeros(n))
    tolerance = 1e-5 if op.in_structure().dtype == np.float32 else 1e-12
    np.testing.assert_allclose(op.as_matrix(), a, atol=tolerance)
    np.testing.assert_allclose(op.diagonal(), np.diagonal(a), atol=tolerance)


def test_a_subclass_needs_only_its_product():
    class Reverse(LinearOperator):
        def _product(self, vector):
            return 1j * vector[::-1]

        def in_structure(self):
            return jax.ShapeDtypeStruct((3,), np.complex64)

        def out_structure(self):
            return self.in_structure()

        @property
        def field(self):
            return "complex"

    op, x = Reverse(), np.array([1, 2j, 3], np.complex64)
    np.testing.assert_allclose(op @ x, 1j * x[::-1])
    np.testing.assert_allclose(op.H @ x, -1j * x[::-1])
    np.testing.assert_allclose(op.T @ x, 1j * x[::-1])
    np.testing.assert_allclose(op.as_matrix(), 1j * np.eye(3)[::-1])
    assert not op.is_hermitian and not op.is_positive


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision(dtype, rng):
    a = rng.normal(size=(4, 4)).astype(dtype)
    op, x = MatrixOperator(a), rng.normal(size=4).astype(dtype)
    shifted_twice = 2.0 * op + IdentityOperator(x) * 0.5
    dense = a.astype(np.float64)
    tolerance = 10 * float(jnp.finfo(dtype).eps)
    for found, expected in [
        (op @ x, dense @ x.astype(np.float64)),
        (op.H @ x, dense.T @ x.astype(np.float64)),
        (shifted_twice @ x, (2 * dense + 0.5 * np.eye(4)) @ x.astype(np.float64)),
    ]:
        assert found.dtype == dtype
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=tolerance * np.abs(dense).sum())
    assert op.as_matrix().dtype == dtype
