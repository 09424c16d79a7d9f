"""Vectors with real and complex leaves, and maps that are only R-linear: every method reaches the true solution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import krylov
from krylov import Status
from krylov.operators import FunctionOperator, Jacobian, join_real, split_real
from tests import networks, problems
from tests.problems import METHODS, norm, wide

SHIFT, RTOL = 0.1, 1e-4


def flat(tree) -> np.ndarray:
    """Real parts of all leaves, then imaginary parts of the complex ones."""
    return np.concatenate([wide(leaf).ravel() for leaf in jax.tree.leaves(split_real(tree))])


def real_matrix(op) -> np.ndarray:
    """By columns, from the operator's own product."""
    structure = op.in_structure()
    size = len(flat(jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), structure)))
    leaves, tree = jax.tree.flatten(split_real(structure))
    ends = np.cumsum([int(np.prod(leaf.shape)) for leaf in leaves])

    def column(unit):
        parts = [p.reshape(s.shape).astype(s.dtype) for p, s in zip(jnp.split(unit, ends[:-1]), leaves, strict=True)]
        return split_real(op.mv(join_real(jax.tree.unflatten(tree, parts), structure)))

    columns = jax.jit(jax.vmap(column))(jnp.eye(size, dtype=leaves[0].dtype))
    return np.concatenate([wide(leaf).reshape(size, -1) for leaf in jax.tree.leaves(columns)], axis=1).T


def mixed_gram(precision):
    """Real and complex parameters, complex output that is holomorphic in none."""
    J = Jacobian(networks.mixed, networks.mixed_params(precision), networks.samples(40, precision), center=True)
    return J.gram()


def nonholomorphic_gram(precision):
    """All leaves complex, where the complex inner product would look right and fail."""

    def network(params, x):
        z = x @ params["kernel"]
        return jnp.sum(jnp.abs(z) ** 2 + z**2 / 3 + 1j * z.conj(), axis=-1)

    kernel = problems.random_vector(jnp.result_type(precision, jnp.complex64), 5, 3)
    J = Jacobian(network, {"kernel": jnp.asarray(kernel)}, networks.samples(40, precision))
    return J.gram()


def real_cogram(precision):
    """Real parameters, complex output: on samples the kernel is R-linear."""

    def network(params, x):
        hidden = jnp.tanh(x @ params)
        return jnp.sum(jax.lax.complex(jnp.sin(hidden), hidden**2), axis=-1)

    params = jnp.asarray(problems.random_vector(precision, 5, 8))
    return Jacobian(network, params, networks.samples(12, precision), chunk_size=5).cogram()


def indefinite(op):
    """Hermitian with eigenvalues of both signs: the operator in a frame that is turned in the field of the reals."""

    def turned(x):
        signs = jax.tree.map(lambda leaf: jnp.where(jnp.arange(leaf.size).reshape(leaf.shape) % 3 == 0, -1, 1), x)
        flip = lambda y: jax.tree.map(lambda leaf, s: leaf.conj() * s.astype(leaf.real.dtype), y, signs)
        return jax.tree.map(lambda a, b: a + b, flip(x), jax.tree.map(lambda y: 0.02 * y, op.mv(x)))

    return FunctionOperator(turned, op.in_structure(), hermitian=True, field="real")


def not_hermitian(op):
    """R-linear and not hermitian: the real and the imaginary part of what comes out are mixed."""

    def mixed(x):
        y = op.mv(x)
        return jax.tree.map(lambda a, b: b + 0.3 * (a + (0.5j if jnp.iscomplexobj(a) else 0.5) * a.conj()), x, y)

    return FunctionOperator(mixed, op.in_structure(), field="real")


def system_for(method, gram):
    if method == "minres":
        return indefinite(gram)
    return gram if method in ("cg", "cholesky") else not_hermitian(gram)


def cases():
    """Every method on the mixed tree, and those with a complex inner product to get wrong on the other two."""
    for method in METHODS:
        for build in (mixed_gram, nonholomorphic_gram, real_cogram):
            for precision in ("float32", "float64"):
                if build is not mixed_gram and (method not in ("cg", "gmres", "bicgstab") or precision == "float64"):
                    continue
                quick = precision == "float32" and (method, build) in QUICK
                marks = [] if quick else [pytest.mark.slow]
                if precision == "float64":
                    marks.append(pytest.mark.x64_only)
                yield pytest.param(method, build, precision, marks=marks, id=f"{method}-{build.__name__}-{precision}")


QUICK = (("cg", mixed_gram), ("bicgstab", nonholomorphic_gram))


@pytest.mark.parametrize("method, build, precision", list(cases()))
def test_reaches_the_true_solution(method, build, precision):
    op = system_for(method, build(precision))
    assert op.field == "real"
    matrix = real_matrix(op)
    structure = op.in_structure()
    leaves, tree = jax.tree.flatten(structure)
    rhs = [problems.random_vector(leaf.dtype, *leaf.shape, seed=i) for i, leaf in enumerate(leaves)]
    b = jax.tree.unflatten(tree, rhs)
    sol = krylov.solve(op, b, method, shift=SHIFT, rtol=RTOL)
    assert sol.status is Status.CONVERGED, sol
    assert jax.tree.map(lambda x: (x.shape, x.dtype), sol.x) == jax.tree.map(lambda x: (x.shape, x.dtype), structure)
    shifted = matrix + SHIFT * np.eye(len(matrix))
    assert norm(flat(b) - shifted @ flat(sol.x)) <= 1.02 * RTOL * norm(flat(b))
    dense = np.linalg.solve(shifted, flat(b))
    smallest = np.linalg.svd(shifted, compute_uv=False)[-1]
    assert norm(flat(sol.x) - dense) <= 1.02 * RTOL * norm(flat(b)) / smallest


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cg", "gmres"])
def test_gradients_in_b_and_in_mixed_parameters_are_those_of_the_real_dense_system(method):
    params, x = networks.mixed_params(), networks.samples(20)
    b = jax.tree.map(lambda p: jnp.asarray(problems.random_vector(p.dtype, *p.shape, seed=3)), params)

    def loss(solution):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(split_real(solution)))

    def by_solve(params, b):
        op = Jacobian(networks.mixed, params, x, center=True, chunk_size=7).gram()
        return loss(krylov.solve(op, b, method, shift=SHIFT, rtol=1e-6).x)

    def by_dense(params, b):
        leaves, unravel = jax.flatten_util.ravel_pytree(split_real(params))

        def outputs(flat_params):
            y = networks.mixed(join_real(unravel(flat_params), params), x)
            y = (y - y.mean()) / np.sqrt(len(x))
            return jnp.concatenate([y.real, y.imag])

        J = jax.jacfwd(outputs)(leaves)
        flat_b = jax.flatten_util.ravel_pytree(split_real(b))[0]
        solution = jnp.linalg.solve(J.T @ J + SHIFT * jnp.eye(J.shape[1], dtype=J.dtype), flat_b)
        return jnp.sum(jnp.sin(solution))

    got = jax.jit(jax.grad(by_solve, (0, 1)))(params, b)
    expected = jax.jit(jax.grad(by_dense, (0, 1)))(params, b)
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert g.dtype == e.dtype
        assert norm(wide(g) - wide(e)) <= 1e-3 * norm(wide(e))


@pytest.mark.slow
def test_diagonal_shift_and_preconditioner_of_a_mixed_tree():
    op = mixed_gram("float32")
    structure = op.in_structure()
    b = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), structure)
    shift = jax.tree.map(lambda x: 0.5 + jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape), b)
    inverse = krylov.operators.DiagonalOperator(jax.tree.map(lambda d: 1 / d, shift), structure)
    on_both_parts = jax.tree.map(lambda d, x: d * (1 + 1j) if jnp.iscomplexobj(x) else d, shift, b)
    matrix = real_matrix(op) + np.diag(flat(on_both_parts))
    for preconditioner in (None, inverse):
        sol = krylov.solve(op, b, "cg", shift=shift, preconditioner=preconditioner, rtol=1e-5)
        assert sol.status is Status.CONVERGED
        assert norm(flat(b) - matrix @ flat(sol.x)) <= 1.1e-5 * norm(flat(b))
