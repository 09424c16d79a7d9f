"""The three dtypes of a Jacobian: of the network, of the sums over samples, of the vectors."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import krylov
from krylov.operators import Jacobian
from tests import networks
from tests.problems import wide

STORAGES = ("recompute", "linearized", "dense")
EPS = {"bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
DOUBLE = (None, "float32", "float64")


def network(params, x):
    return jnp.tanh(x @ params["w"] + params["b"]) @ params["c"] + 3


def system(dtype):
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(5, 4)) / 2, "b": rng.normal(size=4), "c": rng.normal(size=(4, 2))}
    x = rng.normal(size=(23, 5))
    return jax.tree.map(lambda p: jnp.asarray(p, dtype), (params, x))


def flat(tree):
    return np.concatenate([wide(x).ravel() for x in jax.tree.leaves(tree)])


def dense_rows(params, x):
    """The centred rows in double precision on the host, from the derivative written out."""
    w, b, c, x = (wide(a).real for a in (params["w"], params["b"], params["c"], x))
    h = np.tanh(x @ w + b)
    d = (1 - h**2)[:, None, :] * c.T[None]  # (N, outputs, hidden)
    of_c = np.einsum("nh,op->nohp", h, np.eye(2)).reshape(len(x), 2, -1)
    of_w = np.einsum("ni,noh->noih", x, d).reshape(len(x), 2, -1)
    rows = np.concatenate([d, of_c, of_w], axis=-1)  # in the order of the leaves: b, c, w
    return ((rows - rows.mean(0)) / np.sqrt(len(x))).reshape(len(x) * 2, -1)


def check_products(compute, accumulate, vectors, storage, given):
    params, x = system(given)
    options = dict(compute_dtype=compute, accumulate_dtype=accumulate, vector_dtype=vectors)
    J = Jacobian(network, params, x, center=True, chunk_size=5, storage=storage, **options)
    dtype, rows = jnp.dtype(vectors or given), dense_rows(params, x)
    for s in jax.tree.leaves((J.in_structure(), J.out_structure())):
        assert s.dtype == dtype
    rng = np.random.default_rng(1)
    v, y = (
        jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), s.dtype), structure)
        for structure in (J.in_structure(), J.out_structure())
    )
    # The widest error of all that take part, vectors that are rounded included.
    names = [d for d in (compute or given, vectors or given, accumulate) if d is not None]
    tolerance = 50 * max(EPS[name] for name in names)

    @jax.jit
    def forms(J, v, y):
        S, T = J.gram(), J.cogram()
        return J @ v, J.H @ y, S @ v, T @ y, S.diagonal(), S.as_matrix(), jax.tree.leaves(S.diagonal_blocks())[0]

    S, V, Y = rows.T @ rows, flat(v), flat(y)
    expected = (rows @ V, rows.T @ Y, S @ V, rows @ (rows.T @ Y), np.diag(S), S.ravel(), S[:4, :4].ravel())
    names = ("J", "J.H", "S", "T", "diagonal", "matrix", "block")
    for name, a, b in zip(names, forms(J, v, y), expected, strict=True):
        assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(a)), name
        assert np.linalg.norm(flat(a) - b) <= tolerance * np.linalg.norm(b), name
    return J


ALL = [
    (c, a, v, s)
    for c, a, v in itertools.product(DOUBLE, (None, "float64"), DOUBLE)
    for s in STORAGES
    if (c, a, v) != (None,) * 3
]
QUICK = {("float32", None, "float64", s) for s in STORAGES} | {("float64", "float64", "float32", "dense")}


@pytest.mark.x64_only
@pytest.mark.parametrize(
    "compute, accumulate, vectors, storage",
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in ALL],
)
def test_products_are_right_to_the_coarsest_of_three_dtypes(compute, accumulate, vectors, storage):
    check_products(compute, accumulate, vectors, storage, "float32")


@pytest.mark.parametrize("storage", STORAGES)
def test_a_network_in_half_precision_has_vectors_in_single(storage):
    J = check_products("bfloat16", None, None, storage, "float32")
    assert all(p.dtype == jnp.bfloat16 for p in jax.tree.leaves(J.params))
    if storage == "dense":
        assert J.storage.entries.dtype == jnp.bfloat16


@pytest.mark.x64_only
@pytest.mark.parametrize("storage", STORAGES)
def test_double_vectors_over_a_single_network_are_solved_and_the_residual_is_honest(storage):
    params, x = system("float32")
    J = Jacobian(network, params, x, center=True, chunk_size=5, vector_dtype="float64", storage=storage)
    b = J.H @ J.sample_vector(jnp.asarray(np.random.default_rng(2).normal(size=(23, 2))))
    sol = krylov.solve(J.gram(), b, "cg", shift=1e-2, rtol=1e-5)
    rows = dense_rows(params, x)
    residual = np.linalg.norm(rows.T @ (rows @ flat(sol.x)) + 1e-2 * flat(sol.x) - flat(b))
    assert bool(sol.converged) and residual <= 1.1e-5 * np.linalg.norm(flat(b))
    if storage == "dense":  # kept in single, but multiplied in double: a linear map to the last digit
        assert J.storage.entries.dtype == jnp.float32
        assert bool(krylov.solve(J.gram(), b, "cg", shift=1e-2, rtol=1e-13).converged)


@pytest.mark.x64_only
@pytest.mark.parametrize("storage", STORAGES)
def test_many_small_chunks_need_sums_in_double(storage):
    """1e5 equal contributions whose exact sum is known: in single precision each addition rounds the same way."""
    count, value = 100_000, np.float32(0.1)
    x = jnp.full((count, 1), value)

    def error(**options):
        J = Jacobian(lambda p, x: x @ p, jnp.ones(1, jnp.float32), x, chunk_size=10, storage=storage, **options)
        return abs(float((J.gram() @ jnp.ones(1, jnp.float32))[0]) / float(value) ** 2 - 1)

    assert error(accumulate_dtype="float64") <= 4 * EPS["float32"]
    if storage != "dense":  # whose sum is one product with a matrix
        assert error() >= 30 * EPS["float32"]


@pytest.mark.slow
def test_single_precision_cg_reaches_1e_minus_5_on_the_trained_rbm():
    params, samples, energies = networks.trained_rbm(1000)
    single = jax.tree.map(lambda p: jnp.asarray(p, jnp.complex64), params)
    J = Jacobian(networks.rbm, single, samples, center=True, chunk_size=256, holomorphic=True)
    b = J.H @ J.sample_vector(jnp.asarray(energies - energies.mean(), jnp.complex64))
    sol = krylov.solve(J.gram(), b, "cg", shift=1e-3, rtol=1e-5)
    assert bool(sol.converged)
    kernel, bias = (wide(single["Dense"][k]) for k in ("kernel", "bias"))
    t = np.tanh(samples @ kernel + bias)
    rows = np.concatenate([t, np.einsum("ni,nh->nih", samples, t).reshape(len(t), -1), samples], axis=1)
    rows = (rows - rows.mean(0)) / np.sqrt(len(rows))
    residual = rows.conj().T @ (rows @ flat(sol.x)) + 1e-3 * flat(sol.x) - flat(b)
    assert np.linalg.norm(residual) <= 1e-5 * np.linalg.norm(flat(b))


@pytest.mark.x64_only
def test_derivatives_in_the_parameters_go_through_the_casts():
    params, x = system("float64")

    def size(params, **options):
        J = Jacobian(network, params, x, chunk_size=5, center=True, **options)
        return sum(jnp.vdot(y, y) for y in jax.tree.leaves(J.gram() @ jax.tree.map(jnp.ones_like, params)))

    single = jax.jit(jax.grad(lambda p: size(p, compute_dtype="float32", accumulate_dtype="float64")))(params)
    double = jax.jit(jax.grad(size))(params)
    assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(single))
    assert np.linalg.norm(flat(single) - flat(double)) <= 1e-5 * np.linalg.norm(flat(double))


def test_another_storage_and_chunk_size_keep_the_dtypes():
    params, x = system("float32")
    J = Jacobian(network, params, x, center=True, compute_dtype="bfloat16", accumulate_dtype="float32")
    for other in (J.with_chunk_size(4), J.with_storage("dense"), J.with_chunk_size("auto"), J.with_storage("auto")):
        assert other.chunks.accumulate == np.float32 and other.in_structure() == J.in_structure()
        assert other.out_structure() == J.out_structure()
    kept = {c.storage: c.kept_bytes for c in krylov.plan(J).candidates}
    assert kept["dense"] == 23 * 2 * 32 * 2  # two bytes an entry


@pytest.mark.parametrize(
    "options, message",
    [
        ({"compute_dtype": "float16"}, "compute_dtype must be a real floating-point dtype"),
        ({"vector_dtype": "complex64"}, "vector_dtype must be a real floating-point dtype"),
        ({"accumulate_dtype": "bfloat16"}, "Sums in half precision stop growing"),
        ({"compute_dtype": 3}, "compute_dtype must be a real floating-point dtype"),
    ],
)
def test_another_dtype_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Jacobian(network, *system("float32"), **options)


@pytest.mark.parametrize("option", ["compute_dtype", "vector_dtype"])
def test_complex_leaves_in_half_precision_are_refused(option):
    params = jnp.ones(3, jnp.complex64)
    with pytest.raises(ValueError, match="no complex numbers in half precision"):
        Jacobian(lambda p, x: x @ p, params, jnp.ones((4, 3)), **{option: "bfloat16"})


def test_double_precision_is_refused_where_it_is_switched_off():
    with jax.enable_x64(False), pytest.raises(ValueError, match="needs double precision, which is switched off"):
        Jacobian(network, *system("float32"), vector_dtype="float64")
