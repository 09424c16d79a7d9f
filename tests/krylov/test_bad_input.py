"""What cannot be solved is refused where the user calls: each error names the argument, what came, and what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import krylov
from krylov.operators import DiagonalOperator, FunctionOperator, Jacobian, MatrixOperator
from tests import networks, problems

A, b = problems.definite("float32")
ONE_NEGATIVE, ONE_NAN = np.array([1, 1, 1, 1, 1, -1.0]), np.array([1, 1, 1, 1, 1, np.nan])
C = problems.definite("complex64").matrix
TREE = {"kernel": np.ones((2, 3), "float32"), "bias": np.ones(4, "float32")}
ON_TREE = MatrixOperator(A, positive=True, in_structure=TREE, out_structure=TREE)
ON_COMPLEX = FunctionOperator(lambda x: 2 * x, jnp.zeros(10, jnp.complex64), field="complex")
ON_REAL = FunctionOperator(lambda x: 2 * x, jnp.zeros(10, jnp.float32), field="real")


def jacobian(**options):
    return Jacobian(networks.mixed, networks.mixed_params(), networks.samples(6), **options)


def solve_with(op=A, rhs=b, method="cg", **options):
    return lambda: krylov.solve(op, rhs, method, **options)


# The call, the error, and words that its message must hold, in any order.
CASES = {
    # the right-hand side
    "b of another tree": (solve_with(ON_TREE, b), ValueError, ["solve: b", "float32[10]", "float32[2,3]", "tree"]),
    "b with other keys": (
        solve_with(ON_TREE, {"kernel": TREE["kernel"], "offset": TREE["bias"]}),
        ValueError,
        ["solve: b", "offset", "bias"],
    ),
    "b of another shape": (solve_with(rhs=b[:9]), ValueError, ["solve: b", "float32[9]", "float32[10]", "shape"]),
    "b with one column": (solve_with(rhs=b[:, None]), ValueError, ["solve: b", "float32[10,1]", "float32[10]"]),
    "b of another precision": (
        solve_with(MatrixOperator(C), b.astype("float32")),
        ValueError,
        ["solve: b", "float32[10]", "complex64[10]", "astype"],
    ),
    "a function that returns nothing": (
        solve_with(lambda x: None, method="gmres"),
        ValueError,
        ["solve: the operator", "return statement"],
    ),
    "a complex function of a real b": (
        solve_with(lambda x: 1j * x, method="gmres"),
        ValueError,
        ["solve: the operator", "float32[10]", "complex64[10]", "give a complex b"],
    ),
    "b of integers": (solve_with(rhs=np.arange(10)), TypeError, ["solve: b", "int", "cast"]),
    "b of bools": (solve_with(rhs=np.ones(10, bool)), TypeError, ["solve: b", "bool"]),
    "b of words": (solve_with(rhs=["word"]), TypeError, ["solve: b"]),
    "b a list": (solve_with(rhs=[1.0] * 10), ValueError, ["solve: b", "jnp.asarray(b)"]),
    "a network in NumPy": (
        lambda: Jacobian(lambda w, x: np.asarray(x) @ w, b, np.ones((3, 10), "float32")),
        TypeError,
        ["Jacobian: f", "looks at the values", "jax.numpy"],
    ),
    "a loss that branches": (
        lambda: krylov.gauss_newton(lambda w, x: x @ w, lambda y, x: y if y.sum() > 0 else -y, b, A),
        TypeError,
        ["loss", "looks at the values", "jax.lax.cond"],
    ),
    "a matrix of objects": (lambda: MatrixOperator(np.ones((2, 2), object)), TypeError, ["MatrixOperator", "object"]),
    "a matrix of bools": (lambda: MatrixOperator([[True]]), TypeError, ["MatrixOperator", "bool"]),
    "b missing": (solve_with(rhs=None), (TypeError, ValueError), ["solve: b"]),
    "complex b on an operator over the reals": (
        solve_with(ON_REAL, b.astype("complex64")),
        ValueError,
        ["solve: b", "complex64[10]", "float32[10]", "imaginary"],
    ),
    "real b on an operator over the complex field": (
        solve_with(ON_COMPLEX, b),
        ValueError,
        ["solve: b", "float32[10]", "complex64[10]"],
    ),
    # the operator
    "operator that is not square": (
        solve_with(A[:7], b[:7]),
        ValueError,
        ["solve", "square", "float32[10]", "float32[7]", "gram"],
    ),
    "operator to another space": (
        solve_with(lambda x: x[:5]),
        ValueError,
        ["solve", "square", "float32[10]", "float32[5]"],
    ),
    "operator that changes the precision": (
        solve_with(lambda x: x.astype("complex64")),
        ValueError,
        ["solve", "square"],
    ),
    "operator that is a word": (solve_with("identity"), TypeError, ["solve", "str", "function"]),
    "operator that is a number": (solve_with(2.0), TypeError, ["solve", "float", "function"]),
    "operator that is a vector": (solve_with(b), ValueError, ["solve", "(10,)", "DiagonalOperator"]),
    "operator of integers": (solve_with(np.eye(10, dtype=int)), TypeError, ["int", "cast"]),
    "sparse operator of integers": (solve_with(scipy.sparse.eye_array(10, dtype=int)), TypeError, ["int", "cast"]),
    "Jacobian in place of its Gram matrix": (
        lambda: krylov.solve(jacobian(), jnp.zeros(6, jnp.complex64)),
        ValueError,
        ["solve", "square", "gram"],
    ),
    "preconditioner of many shifts": (
        lambda: krylov.solve_shifted(A, b, np.ones(2), preconditioner=krylov.Jacobi()),
        ValueError,
        ["solve_shifted", "Krylov space changes", "Jacobi", "vmap"],
    ),
    "preconditioner of least squares": (
        lambda: krylov.lstsq(A, b, preconditioner=np.eye(10)),
        ValueError,
        ["lstsq", "least norm", "ndarray", "J @ M"],
    ),
    # the method
    "unknown method": (solve_with(method="cgs"), ValueError, ["solve", "'cgs'", "'cg'", "minres", "gmres"]),
    "method misspelt": (solve_with(method="gmers"), ValueError, ["'gmers'", "did you mean 'gmres'"]),
    "method like nothing": (solve_with(method="zzz"), ValueError, ["'zzz'", "bicgstab"]),
    "method of another kind": (solve_with(method=3), TypeError, ["method", "int", "name"]),
    "method missing": (solve_with(method=None), TypeError, ["method", "name"]),
    "restart of nothing": (lambda: krylov.GMRES(restart=0), ValueError, ["restart", "0", "positive"]),
    "restart of a half": (lambda: krylov.GMRES(restart=2.5), ValueError, ["restart", "2.5"]),
    # tolerances and limits
    "negative rtol": (solve_with(rtol=-1e-3), ValueError, ["solve: rtol", "negative", "-0.001", ">= 0"]),
    "negative atol": (solve_with(atol=-1), ValueError, ["solve: atol", "negative", "-1"]),
    "rtol not a number": (solve_with(rtol=np.nan), ValueError, ["solve: rtol", "nan"]),
    "rtol a word": (solve_with(rtol="small"), TypeError, ["solve: rtol", "small"]),
    "rtol an array": (solve_with(rtol=np.ones(2)), TypeError, ["solve: rtol"]),
    "rtol complex": (solve_with(rtol=1j), TypeError, ["solve: rtol", "real"]),
    "rtol missing": (solve_with(rtol=None), TypeError, ["solve: rtol", "None"]),
    "negative maxiter": (solve_with(maxiter=-1), ValueError, ["solve: maxiter", "-1"]),
    "maxiter of a half": (solve_with(maxiter=1.5), ValueError, ["solve: maxiter", "1.5", "whole"]),
    # guess and shift
    "x0 of another shape": (solve_with(x0=b[:9]), ValueError, ["solve: x0", "float32[9]", "float32[10]"]),
    "x0 of another dtype": (solve_with(x0=b.astype("complex64")), ValueError, ["solve: x0", "complex64", "float32"]),
    "x0 of another tree": (solve_with(x0={"x": b}), ValueError, ["solve: x0", "float32[10]"]),
    "shift of another tree": (solve_with(shift={"x": 1.0}), ValueError, ["solve: shift", "float32[10]"]),
    "shift of another length": (solve_with(shift=np.ones(9)), ValueError, ["solve: shift", "[9]", "float32[10]"]),
    "complex shift of a real system": (solve_with(shift=1j), ValueError, ["solve", "complex shift", "real part"]),
    "complex shift of cg": (
        solve_with(MatrixOperator(C), b.astype("complex64"), shift=1j),
        ValueError,
        ["cg", "hermitian", "gmres"],
    ),
    "shift a word": (solve_with(shift="large"), TypeError, ["solve: shift", "large"]),
    "shift missing": (solve_with(shift=None), TypeError, ["solve: shift", "None"]),
    # the preconditioner
    "preconditioner of another size": (
        solve_with(preconditioner=np.eye(9, dtype="float32")),
        ValueError,
        ["preconditioner", "float32[9]", "float32[10]"],
    ),
    "preconditioner of another dtype": (
        solve_with(preconditioner=DiagonalOperator(np.ones(10, "complex64"))),
        ValueError,
        ["preconditioner", "complex64[10]", "float32[10]"],
    ),
    "preconditioner a word": (solve_with(preconditioner="jacobi"), TypeError, ["preconditioner", "str"]),
    "preconditioner of a direct method": (
        solve_with(method="lu", preconditioner=np.eye(10, dtype="float32")),
        ValueError,
        ["lu", "preconditioner"],
    ),
    # the Jacobian
    "chunk_size 0": (lambda: jacobian(chunk_size=0), ValueError, ["chunk_size", "0"]),
    "chunk_size of a half": (lambda: jacobian(chunk_size=2.5), (TypeError, ValueError), ["chunk_size", "2.5"]),
    "weights of the wrong length": (lambda: jacobian(weights=np.ones(5)), ValueError, ["weights", "5", "6"]),
    "negative weights": (
        lambda: jacobian(weights=ONE_NEGATIVE),
        ValueError,
        ["weights", "negative"],
    ),
    "a class as preconditioner": (
        solve_with(preconditioner=krylov.Nystrom),
        TypeError,
        ["solve: preconditioner", "the class Nystrom", "Nystrom(rank=256)", "Nystrom(...)"],
    ),
    "weights that sum to zero": (lambda: jacobian(weights=np.zeros(6)), ValueError, ["weights"]),
    "weights that are not finite": (
        lambda: jacobian(weights=ONE_NAN),
        ValueError,
        ["weights"],
    ),
    "samples of unequal lengths": (
        lambda: Jacobian(lambda p, x: x[0] @ p, jnp.ones(5), (np.ones((6, 5)), np.ones((7, 5)))),
        ValueError,
        ["sample", "[6,5]", "[7,5]", "length"],
    ),
    "values of the wrong length": (
        lambda: jacobian().sample_vector(jnp.zeros(5, jnp.complex64)),
        ValueError,
        ["values", "complex64[5]", "complex64[6]"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_error_names_the_argument_and_what_to_do(name):
    call, kind, words = CASES[name]
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value).lower()
    missing = [word for word in words if word.lower() not in message]
    assert not missing, f"{missing} not in:\n{caught.value}"


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("rtol a word", "b of words")])
def test_the_same_error_comes_at_trace_time(name):
    call, kind, _ = CASES[name]
    with pytest.raises(kind):
        jax.eval_shape(call)


def test_a_traced_system_is_refused_at_trace_time_too():
    for arguments, word in (((A, b[:9]), "solve: b"), ((A[:7], b[:7]), "square")):
        with pytest.raises(ValueError, match=word):
            jax.jit(krylov.solve)(*arguments)


def test_weights_that_do_not_sum_to_one_are_normalised():
    weights = np.array([1.0, 2, 3, 4, 5, 6])
    v = jacobian().in_structure()
    v = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), v)
    np.testing.assert_allclose(jacobian(weights=weights) @ v, jacobian(weights=weights / 21) @ v, rtol=1e-5)


def test_names_are_taken_in_any_case_and_classes_as_methods():
    for method in ("CG", "Cg", krylov.CG, krylov.CG()):
        assert krylov.solve(MatrixOperator(A), b, method).method == "cg"
