"""`check_operator` passes what is right, whatever its size and precision, and says what is wrong and by how much."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.sparse.linalg

import krylov
from krylov.operators import (
    DiagonalOperator,
    FunctionOperator,
    IdentityOperator,
    Jacobian,
    LinearOperator,
    MatrixOperator,
    OperatorError,
    OperatorReport,
    as_operator,
    check_operator,
    shifted,
)
from tests.operators import networks, zoo
from tests.operators.networks import COMPLEX, FLOAT, array
from tests.operators.test_jacobian import CHUNKED, jacobian, large_mean, slow
from tests.operators.zoo import normal

A = np.random.default_rng(0).normal(size=(6, 6))
S = A @ A.T
TWO_SAMPLES = np.ones((2, 3), FLOAT)


def names(report):
    return {f.name for f in report.findings}


def fails(op, *expected, **options):
    """The checks that fail, of which the error must name each with a figure."""
    with pytest.raises(OperatorError) as info:
        check_operator(op, **options)
    assert isinstance(info.value, ValueError)
    report, message = info.value.report, str(info.value)
    assert {f.name for f in report.failures} == set(expected)
    assert message.startswith("check_operator: ")
    for name in expected:
        assert f"\n  {name}: " in message
    assert message.count("    got       ") == message.count("    expected  ") == len(expected)
    return report


@pytest.mark.parametrize(
    "build",
    [
        zoo.matrix,
        zoo.positive_matrix,
        pytest.param(zoo.wide_matrix, marks=slow),
        pytest.param(zoo.bcoo_matrix, marks=slow),
        pytest.param(zoo.diagonal, marks=slow),
        zoo.function_with_adjoint,
        pytest.param(zoo.hermitian_function, marks=slow),
        pytest.param(zoo.sum_of_positive, marks=slow),
        pytest.param(zoo.composed_gram, marks=slow),
        pytest.param(zoo.adjoint, marks=slow),
        pytest.param(zoo.blocks, marks=slow),
        zoo.low_rank_plus_tree,
        pytest.param(zoo.from_lineax, marks=slow),
        pytest.param(zoo.from_scipy, marks=slow),
        zoo.mixed_positive_function,
        pytest.param(zoo.mixed_blocks, marks=slow),
        pytest.param(zoo.mixed_low_rank, marks=slow),
        pytest.param(zoo.complex_of_real, marks=slow),
    ],
    ids=lambda b: b.__name__,
)
def test_right_operators_pass(build, rng):
    report = check_operator(build(rng, COMPLEX).op)
    assert report.passed and not report.failures
    for f in report.findings:
        assert f.figure < 1e-3 * f.allowed or f.figure == 0 or f.allowed > 1e-5, f


@pytest.mark.parametrize(
    "make",
    [pytest.param(m, marks=[] if m is networks.not_holomorphic else slow) for m in networks.ALL],
    ids=lambda m: m.__name__,
)
def test_jacobians_and_their_grams_pass(make):
    J = jacobian(make(), **CHUNKED)
    assert {"samples apart", "f repeatable", "f finite", "adjoint", "transpose"} <= names(check_operator(J))
    report = check_operator(J.gram(), jax.random.key(1))
    assert {"samples apart", "hermitian", "positive", "diagonal"} <= names(report)
    assert ("C-linear" in names(report)) == (J.field == "complex")


@slow
def test_jacobians_inside_other_operators_are_found():
    J = jacobian(networks.real(), **CHUNKED)
    for op in (J.cogram(), J.H, 2.0 * J.gram() + IdentityOperator(J.in_structure()), J.H @ J, J.gram().as_real()):
        assert "samples apart" in names(check_operator(op))


def test_a_report_has_figures_and_prints_as_a_table():
    report = check_operator(S, 3)
    assert isinstance(report, OperatorReport)
    assert report["adjoint"].figure < 1e-6 < report["adjoint"].allowed * 1e3
    lines = repr(report).splitlines()
    assert lines[0] == f"check_operator: MatrixOperator {FLOAT}[6] -> {FLOAT}[6] over the real field"
    assert [line.split()[0] for line in lines[1:]] == [f.name for f in report.findings]
    assert all(" ok " in line for line in lines[1:])
    with pytest.raises(KeyError, match="nonsense"):
        report["nonsense"]
    assert krylov.check_operator is check_operator and krylov.OperatorError is OperatorError


@pytest.mark.parametrize("key", [None, 7, np.int64(7), jax.random.key(7), jax.random.PRNGKey(7)])
def test_keys_of_any_kind(key):
    assert check_operator(S, key).passed


def test_same_key_same_figures_other_key_others():
    wrong = MatrixOperator(A, hermitian=True)
    first, second, third = (check_operator(wrong, k, throw=False)["hermitian"].figure for k in (1, 1, 2))
    assert first == second != third


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=slow), 100.0])
def test_half_precision_passes(dtype, scale, rng):
    a = normal(rng, np.float32, 40, 40)
    a = (scale * (a @ a.T / 40 + np.eye(40))).astype(dtype)
    assert check_operator(MatrixOperator(a, positive=True)).passed
    bad = (scale * normal(rng, np.float32, 40, 40)).astype(dtype)
    fails(MatrixOperator(bad, hermitian=True), "hermitian")


def test_single_precision_of_size_1e6_passes():
    n = 1_000_000
    entries = np.geomspace(1e-6, 1, n).astype(np.float32)
    u = (np.random.default_rng(0).normal(size=n) / n**0.5).astype(np.float32)

    def fn(x):
        return entries * x + u * jnp.vdot(u, x) + jnp.roll(x, 1) - jnp.roll(x, -1)

    def adjoint(y):
        return entries * y + u * jnp.vdot(u, y) + jnp.roll(y, -1) - jnp.roll(y, 1)

    x = np.zeros(n, np.float32)
    assert check_operator(FunctionOperator(fn, x, adjoint), probes=1).passed
    fails(FunctionOperator(fn, x, fn), "adjoint", probes=1)
    assert check_operator(DiagonalOperator(entries), probes=1).passed


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_units_do_not_matter(scale):
    dtype = np.float32
    assert check_operator(MatrixOperator((scale * S).astype(dtype), positive=True)).passed
    fails(MatrixOperator((scale * A).astype(dtype), hermitian=True), "hermitian")


def test_functions_that_are_not_linear():
    x = np.zeros(6, FLOAT)
    for fn in (lambda x: A @ x + 1e-2 * x**2, lambda x: A @ jnp.clip(x, -5, 5)):
        report = check_operator(fn, structure=x, throw=False)
        assert not report["scaling"].passed
    report = fails(lambda x: A @ x + 1.0, "additive", "scaling", "adjoint", structure=x)
    assert 0.01 < report["additive"].figure < 10


def test_functions_that_are_only_r_linear(rng):
    a = normal(rng, COMPLEX, 3, 3)
    fn = lambda x: a @ x + 0.1 * x.conj()
    x = np.zeros(3, COMPLEX)
    report = fails(fn, "C-linear", "adjoint", structure=x)
    assert "field='real'" in str(OperatorError(report))
    assert check_operator(FunctionOperator(fn, x, field="real")).passed


def test_a_false_holomorphic_promise():
    network = networks.not_holomorphic()
    J = Jacobian(network.f, network.params, network.samples, holomorphic=True)
    report = fails(J, "C-linear", "adjoint")
    assert "leave out holomorphic=True" in str(OperatorError(report))


@pytest.mark.parametrize("error", [1.0, 1e-3])
def test_false_adjoints(error, rng):
    a = normal(rng, COMPLEX, 3, 4)
    wrong = a + error * normal(rng, COMPLEX, 3, 4)
    op = FunctionOperator(lambda x: a @ x, np.zeros(4, COMPLEX), adjoint=lambda y: wrong.conj().T @ y)
    report = fails(op, "adjoint")
    assert 0.01 * error < report["adjoint"].figure < 10 * error


def test_an_adjoint_that_is_only_the_transpose(rng):
    a = normal(rng, COMPLEX, 3, 4)
    fails(FunctionOperator(lambda x: a @ x, np.zeros(4, COMPLEX), adjoint=lambda y: a.T @ y), "adjoint")


def test_a_transpose_that_jax_sees_otherwise():
    class TwoMinds(LinearOperator):
        """Its adjoint is right, but not what JAX makes of its product."""

        def _product(self, vector):
            return krylov.operators.linear_call(lambda _, x: 2 * x, lambda _, y: 3 * y, None, vector)

        def _adjoint_product(self, vector):
            return 2 * vector

        def in_structure(self):
            return jax.ShapeDtypeStruct((3,), np.float32)

        out_structure = in_structure

        @property
        def field(self):
            return "real"

    report = fails(TwoMinds(), "transpose")
    np.testing.assert_allclose(report["transpose"].figure, 0.5, rtol=1e-5)


def test_false_claims_of_hermitian_and_positive():
    fails(MatrixOperator(A, hermitian=True), "hermitian")
    report = fails(MatrixOperator(-S, positive=True), "positive")
    np.testing.assert_allclose(report["positive"].figure, 1, rtol=0.01)
    fails(MatrixOperator(A - A.T, positive=True), "hermitian")


def test_one_negative_eigenvalue_among_many_is_found():
    d = np.ones(2000, FLOAT)
    d[77] = -0.05
    report = fails(DiagonalOperator(d, positive=True), "positive")
    assert 0.03 < report["positive"].figure < 0.06
    d[77] = 0
    assert check_operator(DiagonalOperator(d, positive=True)).passed


def test_a_false_diagonal():
    class Wrong(MatrixOperator):
        def diagonal(self):
            return 1.1 * super().diagonal()

    fails(Wrong(np.diag([1.0, 2, 3])), "diagonal")


def test_structures_that_are_not_what_is_declared():
    class Declares(LinearOperator):
        def _product(self, vector):
            return vector.astype(np.float32)

        def in_structure(self):
            return jax.ShapeDtypeStruct((3,), np.float16)

        out_structure = in_structure

        @property
        def field(self):
            return "real"

    report = fails(Declares(), "structure")
    message = str(OperatorError(report))
    assert "got       float32[3]" in message and "expected  float16[3]" in message


def test_products_that_are_not_finite_are_named_and_nothing_else():
    report = fails(DiagonalOperator(np.array([1.0, np.nan, np.inf, 2])), "finite")
    assert report["finite"].figure == 0.5
    assert "adjoint" not in names(report)


def test_an_adjoint_that_is_not_finite():
    op = FunctionOperator(lambda x: x, np.zeros(3, FLOAT), adjoint=lambda y: y / jnp.where(y > 0, 0, 1))
    assert fails(op, "adjoint", "transpose")["adjoint"].figure == np.inf


def test_noise_in_a_product():
    draw = np.random.default_rng(0).normal

    def fn(x):
        noise = jax.pure_callback(lambda: draw(size=3).astype(FLOAT), jax.ShapeDtypeStruct((3,), FLOAT))
        return x + 0.01 * jax.lax.stop_gradient(noise) * x

    assert not check_operator(fn, structure=np.ones(3, FLOAT), throw=False)["repeatable"].passed


def test_adjoints_that_do_not_exist_are_no_failure_but_are_told():
    loop = FunctionOperator(
        lambda x: jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, 2 * s[1]), (0, x))[1], np.zeros(3, FLOAT)
    )
    report = check_operator(loop)
    assert report.passed
    assert "the adjoint fails with" in report["adjoint"].skipped
    assert "not made" in repr(report)
    one_way = scipy.sparse.linalg.LinearOperator((3, 3), matvec=lambda x: 2 * x, dtype=FLOAT)
    assert check_operator(one_way)["adjoint"].skipped


def test_operators_on_nothing_and_the_zero_operator():
    assert check_operator(FunctionOperator(lambda x: x, {})).passed
    assert check_operator(MatrixOperator(np.zeros((3, 3)), positive=True)).passed
    assert check_operator(0.0 * IdentityOperator(np.zeros(2))).passed
    assert check_operator(MatrixOperator(np.ones((1, 1)), positive=True)).passed


@slow
@pytest.mark.parametrize("copies", [1, 20])
def test_centring_that_cancels_digits_is_allowed_for(copies):
    x, _, _ = large_mean(3e3)
    f = lambda p, x: jnp.repeat((x @ p)[:, None], copies, 1)
    J = Jacobian(f, np.zeros(5, np.float32), x, center=True, chunk_size=50)
    assert check_operator(J).passed
    assert check_operator(shifted(J.gram(), 1e-3)).passed
    constant = Jacobian(lambda p, x: x[:, 0] * 0 + p, np.ones((), np.float32), x, center=True)  # J = 0
    assert check_operator(constant.gram()).passed


# What no product shows of a network. The Jacobian is made first: making it checks the first chunk.


def switched(f, other):
    """``f``, and ``other`` from when the switch is thrown."""
    state = {"on": False}

    def g(p, x):
        on = jax.pure_callback(lambda: np.asarray(state["on"]), jax.ShapeDtypeStruct((), bool))
        return jnp.where(on, other(p, x), f(p, x))

    return state, g


def test_samples_that_see_each_other_in_a_later_chunk():
    def f(p, x):
        h = jnp.tanh(x @ p)
        return h - jnp.where(jnp.any(jnp.abs(x) > 100), h.mean(), 0.0)

    x = np.asarray(networks.spins()).copy()
    x[-1, 0] = 1e3
    J = Jacobian(f, array(1, FLOAT, 3), x, chunk_size=3)
    report = fails(J, "samples apart")
    assert report["samples apart"].figure > 0.01
    assert "batch statistics" in str(OperatorError(report))


def test_a_network_that_does_not_give_the_same_twice():
    draw = np.random.default_rng(0).normal

    def noisy(p, x):
        noise = jax.pure_callback(lambda: draw(size=x.shape[0]).astype(FLOAT), jax.ShapeDtypeStruct(x.shape[:1], FLOAT))
        return x @ p + 0.1 * noise

    state, f = switched(lambda p, x: x @ p, noisy)
    J = Jacobian(f, array(1, FLOAT, 3), networks.spins(), chunk_size=3)
    assert check_operator(J).passed
    state["on"] = True
    report = check_operator(J, throw=False)
    assert not report["f repeatable"].passed
    assert report["f repeatable"].figure > 0.01
    assert "drawn on the host" in report["f repeatable"].cure


def test_networks_that_are_not_finite():
    x = np.asarray(networks.spins()).copy()
    x[4] = 0
    J = Jacobian(lambda p, x: jnp.log(jnp.abs(x @ p)), array(1, FLOAT, 3), x, chunk_size=3)
    report = check_operator(J, throw=False)
    assert {f.name for f in report.failures} == {"f finite", "finite"}
    assert 0 < report["f finite"].figure < 1


def test_one_sample_shows_nothing_of_others():
    J = Jacobian(lambda p, x: x @ p, array(1, FLOAT, 3), networks.spins()[:1])
    assert check_operator(J)["samples apart"].skipped == "there is one sample"
    J = Jacobian(lambda p, x: x @ p, array(1, FLOAT, 3), networks.spins(), chunk_size=1)
    assert "when the Jacobian was made" in check_operator(J)["samples apart"].skipped


# How it is called.


def test_operators_of_others_and_functions_with_a_structure():
    assert check_operator(lx.MatrixLinearOperator(jnp.asarray(S), lx.positive_semidefinite_tag)).passed
    assert check_operator(lambda x: 2 * x, structure=np.ones(2)).passed
    assert check_operator(as_operator(scipy.sparse.linalg.aslinearoperator(A))).passed
    with pytest.raises(ValueError, match="check_operator: a function needs the structure"):
        check_operator(lambda x: 2 * x)
    with pytest.raises(TypeError, match="check_operator: cannot make an operator of"):
        check_operator(3)


def test_tolerance_and_probes():
    nearly = S.copy()
    nearly[0, 1] += 1e-3
    op = MatrixOperator(nearly, hermitian=True)
    fails(op, "hermitian", tolerance=1e-7 if np.float64 == FLOAT else 1e-5)
    assert check_operator(op, tolerance=0.1).passed
    assert check_operator(op, tolerance=0.1, probes=1)["hermitian"].allowed == 0.1
    for probes in (0, -1, 1.5):
        with pytest.raises(ValueError, match="probes must be a positive whole number"):
            check_operator(op, probes=probes)


def test_under_a_transformation_it_says_so():
    with pytest.raises(TypeError, match="outside jit, grad and vmap"):
        jax.jit(lambda a: check_operator(MatrixOperator(a)) and a)(jnp.eye(2))
