"""What follows from the parts of an operator: claims, fields, errors, known adjoints."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

from krylov.operators import (
    BlockDiagonalOperator,
    DiagonalOperator,
    FunctionOperator,
    IdentityOperator,
    LinearOperator,
    LowRankPlusDiagonal,
    MatrixOperator,
    complexify,
    conjugate_operator,
    shifted,
)
from tests.operators.zoo import normal

FLOAT, COMPLEX = np.dtype(jnp.result_type(float)), np.dtype(jnp.result_type(complex))
PLAIN = MatrixOperator(np.array([[1.0, 2], [0, 1]]))
HERMITIAN = MatrixOperator(np.array([[1.0, 2], [2, 1]]), hermitian=True)
POSITIVE = MatrixOperator(np.array([[2.0, 1], [1, 2]]), positive=True)
NOTHING, JUST_HERMITIAN, BOTH = (False, False), (True, False), (True, True)


def claims(op):
    return op.is_hermitian, op.is_positive


@pytest.mark.parametrize(
    "op, expected",
    [
        (PLAIN + POSITIVE, NOTHING),
        (HERMITIAN + POSITIVE, JUST_HERMITIAN),
        (POSITIVE + POSITIVE, BOTH),
        (POSITIVE - POSITIVE, JUST_HERMITIAN),
        (-POSITIVE, JUST_HERMITIAN),
        (2 * POSITIVE, BOTH),
        (POSITIVE * 0.0, BOTH),
        (POSITIVE * np.nan, JUST_HERMITIAN),
        (-2.0 * POSITIVE, JUST_HERMITIAN),
        (POSITIVE / 2, BOTH),
        (POSITIVE / -2, JUST_HERMITIAN),
        (2 * PLAIN, NOTHING),
        (PLAIN @ POSITIVE, NOTHING),
        (POSITIVE @ POSITIVE, BOTH),  # the same object: its square
        (POSITIVE @ HERMITIAN, NOTHING),
        (HERMITIAN @ HERMITIAN, BOTH),
        (PLAIN @ PLAIN, NOTHING),
        (PLAIN.H @ PLAIN, BOTH),
        (PLAIN @ PLAIN.H, BOTH),
        (PLAIN.H @ MatrixOperator(np.eye(2)), NOTHING),
        (HERMITIAN.H, JUST_HERMITIAN),
        (POSITIVE.T, BOTH),
        (PLAIN.H, NOTHING),
        (shifted(POSITIVE, 0.5), BOTH),
        (shifted(POSITIVE, -0.5), JUST_HERMITIAN),
        (shifted(POSITIVE, np.array([1.0, 2])), BOTH),
        (shifted(POSITIVE, np.array([1.0, -2])), JUST_HERMITIAN),
        (shifted(PLAIN, 0.5), NOTHING),
        (IdentityOperator(np.zeros(2)), BOTH),
        (BlockDiagonalOperator([POSITIVE, POSITIVE]), BOTH),
        (BlockDiagonalOperator([POSITIVE, HERMITIAN]), JUST_HERMITIAN),
        (BlockDiagonalOperator([POSITIVE, PLAIN]), NOTHING),
        (BlockDiagonalOperator([]), BOTH),
        (complexify(POSITIVE), BOTH),
        (1j * complexify(POSITIVE), NOTHING),
        (complexify(POSITIVE).as_real(), BOTH),
        (conjugate_operator(complexify(HERMITIAN)), JUST_HERMITIAN),
        (LowRankPlusDiagonal(0.0, np.ones((2, 1)), np.array([1.0])), BOTH),
        (LowRankPlusDiagonal(-1.0, np.ones((2, 1)), np.array([1.0])), JUST_HERMITIAN),
        (LowRankPlusDiagonal(1.0, np.ones((2, 1)), np.array([-0.1])), JUST_HERMITIAN),
        (LowRankPlusDiagonal(1.0, np.ones((2, 1)), np.array([-0.1]), positive=True), BOTH),
    ],
)
def test_claims_follow_from_the_parts(op, expected):
    assert claims(op) == expected


def test_fields_follow_from_the_parts():
    whole = MatrixOperator(np.eye(2, dtype=COMPLEX))
    real_linear = FunctionOperator(jnp.conj, np.zeros(2, COMPLEX), field="real")
    assert (whole + whole).field == "complex"
    assert (whole + real_linear).field == "real"
    assert (whole @ real_linear).field == "real"
    assert (2.0 * real_linear).field == "real"
    assert real_linear.H.field == real_linear.T.field == "real"
    assert whole.as_real().field == "real"
    assert BlockDiagonalOperator([whole, PLAIN]).field == "real"
    assert BlockDiagonalOperator([whole, whole]).field == "complex"


def test_known_scalars_are_looked_at_inside_jit_and_traced_ones_are_not():
    found = []

    @jax.jit
    def f(traced):
        found.extend(claims(scalar * POSITIVE) for scalar in (2.0, np.float32(2), known, traced))
        found.append(claims(POSITIVE / 2))
        found.extend(claims(shifted(POSITIVE, shift)) for shift in (known, traced))
        found.extend(claims(LowRankPlusDiagonal(d, np.ones((2, 1)), np.ones(1))) for d in (known, traced))
        return traced * POSITIVE @ jnp.ones(2)

    known = jnp.asarray(2.0)
    np.testing.assert_allclose(f(known), [6, 6])
    assert found == [BOTH, BOTH, BOTH, JUST_HERMITIAN, BOTH, BOTH, JUST_HERMITIAN, BOTH, JUST_HERMITIAN]


@pytest.mark.parametrize("scalar", [2, True, np.float32(2), np.array(2.0), jnp.asarray(2.0), jnp.asarray(2), 2 + 0j])
def test_a_scalar_of_any_kind_on_either_side(scalar):
    op = MatrixOperator(np.eye(2, dtype=COMPLEX))
    x = np.ones(2, COMPLEX)
    for product in (scalar * op, op * scalar):
        assert isinstance(product, LinearOperator)
        assert (product @ x).dtype == COMPLEX
        np.testing.assert_allclose(product @ x, complex(scalar) * x)
    np.testing.assert_allclose((op / scalar) @ x, x / complex(scalar))


@pytest.mark.x64_only
def test_division_keeps_the_precision_of_the_operator():
    op = MatrixOperator(np.eye(2)) / np.float32(3)
    np.testing.assert_allclose(op @ np.ones(2), np.ones(2) / 3, rtol=1e-15)


def test_derivatives_with_respect_to_a_scalar_and_a_shift():
    x = jnp.array([1.0, 2.0])
    np.testing.assert_allclose(jax.grad(lambda s: jnp.sum((s * PLAIN) @ x))(2.0), jnp.sum(PLAIN @ x), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda s: jnp.sum((PLAIN / s) @ x))(2.0), -jnp.sum(PLAIN @ x) / 4, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda s: jnp.sum(shifted(PLAIN, s) @ x))(2.0), 3.0)
    np.testing.assert_allclose(jax.vmap(lambda s: (s * PLAIN) @ x)(jnp.arange(2.0))[1], PLAIN @ x)


def test_lineax_operators_mix_in():
    other = lx.MatrixLinearOperator(jnp.array([[0.0, 1], [1, 0]]))
    x = jnp.array([1.0, 2.0])
    swap = x[::-1]
    for op, expected in [
        (PLAIN + other, PLAIN @ x + swap),
        (PLAIN - other, PLAIN @ x - swap),
        (PLAIN @ other, PLAIN @ swap),
        (BlockDiagonalOperator([other]), (swap,)),
    ]:
        assert isinstance(op, LinearOperator)
        found = op @ ((x,) if isinstance(expected, tuple) else x)
        np.testing.assert_allclose(jax.tree.leaves(found), jax.tree.leaves(expected))
    np.testing.assert_allclose((other + PLAIN).mv(x), PLAIN @ x + swap)
    np.testing.assert_allclose((other @ PLAIN).mv(x), (PLAIN @ x)[::-1])


def test_double_views_undo_each_other():
    op = MatrixOperator(np.array([[1, 2j], [3, 4]], COMPLEX))
    assert op.H.H is op
    assert conjugate_operator(conjugate_operator(op)) is op
    assert HERMITIAN.H is HERMITIAN
    assert HERMITIAN.T is HERMITIAN
    assert conjugate_operator(PLAIN) is PLAIN
    assert PLAIN.as_real() is PLAIN
    np.testing.assert_allclose(op.T.H.as_matrix(), np.conj(op.as_matrix()))
    np.testing.assert_allclose(op.H.T.as_matrix(), np.conj(op.as_matrix()))


@pytest.mark.parametrize(
    "build, error, words",
    [
        (lambda: PLAIN + MatrixOperator(np.eye(3)), ValueError, ["same spaces", "left", "[2]", "right", "[3]"]),
        (lambda: PLAIN + MatrixOperator(np.ones((2, 3))), ValueError, ["same spaces"]),
        (lambda: PLAIN + 1, TypeError, ["cannot add the number 1", "shifted(op, number)"]),
        (lambda: PLAIN - 2.5, TypeError, ["cannot add the number -2.5", "shifted(op, number)"]),
        (lambda: PLAIN + np.ones(2), TypeError, ["ndarray", "wrap it as an operator"]),
        (lambda: PLAIN + np.eye(3), ValueError, ["same spaces"]),
        (lambda: PLAIN @ np.eye(3), ValueError, ["MatrixOperator.mv: vector does not match"]),
        (lambda: PLAIN @ MatrixOperator(np.ones((3, 2))), ValueError, ["right factor", "right gives", "left takes"]),
        (lambda: PLAIN * PLAIN, TypeError, ["a @ b"]),
        (lambda: PLAIN * np.ones(2), ValueError, ["scalar only", "(2,)"]),
        (lambda: 1j * PLAIN, ValueError, ["complex scalar", "real leaves", "complexify"]),
        (lambda: shifted(PLAIN, np.ones(3)), ValueError, ["DiagonalOperator", "do not fit"]),
        (lambda: shifted(PLAIN, 1j), ValueError, ["complex scalar"]),
        (lambda: shifted(MatrixOperator(np.ones((2, 3))), 1.0), ValueError, ["same spaces"]),
        (lambda: complexify(MatrixOperator(np.eye(2) + 0j)), ValueError, ["complex leaves already"]),
        (lambda: IdentityOperator(np.zeros(2, int)), TypeError, ["floating-point"]),
        (lambda: BlockDiagonalOperator([PLAIN, "block"]), TypeError, ["BlockDiagonalOperator", "str"]),
        (lambda: LowRankPlusDiagonal(1j, np.ones((2, 1)), np.ones(1)), ValueError, ["must be real"]),
        (lambda: LowRankPlusDiagonal(1.0, np.ones((2, 1)), np.ones(2)), ValueError, ["one weight each"]),
        (lambda: LowRankPlusDiagonal(np.ones(3), np.ones((2, 1)), np.ones(1)), ValueError, ["(3,)", "(2,)"]),
        (lambda: LowRankPlusDiagonal(1.0, np.ones((2, 1), int), np.ones(1)), TypeError, ["floating-point"]),
    ],
)
def test_what_does_not_go_together_is_refused(build, error, words):
    with pytest.raises(error) as info:
        build()
    for word in words:
        assert word in str(info.value)


def test_operators_sum_up_and_take_matrices():
    x, a = jnp.ones(2), np.array([[0.0, 1], [2, 0]])
    np.testing.assert_allclose(sum([PLAIN, PLAIN, PLAIN]) @ x, 3 * (PLAIN @ x))
    for matrix in (a, jnp.asarray(a)):
        for op, expected in [
            (PLAIN + matrix, PLAIN @ x + a @ x),
            (matrix + PLAIN, PLAIN @ x + a @ x),
            (PLAIN - matrix, PLAIN @ x - a @ x),
        ]:
            assert isinstance(op, LinearOperator)
            np.testing.assert_allclose(op @ x, expected)


def test_words_for_an_operator():
    assert repr(POSITIVE) == "MatrixOperator(positive 2 x 2, real field)"
    assert repr(HERMITIAN + POSITIVE) == "SumOperator(hermitian 2 x 2, real field)"
    assert repr(MatrixOperator(np.ones((2, 3), COMPLEX))) == "MatrixOperator(2 x 3, complex field)"


def test_diagonals_of_sums_products_and_blocks(rng):
    a, b = normal(rng, FLOAT, 3, 3), normal(rng, FLOAT, 3, 3)
    u = normal(rng, FLOAT, 3, 2)
    first, second = MatrixOperator(a), MatrixOperator(b)
    for op, dense in [
        (first + 2.0 * second, a + 2 * b),
        (first @ second, a @ b),
        (first.H, a.T),
        (first - second.H, a - b.T),
        (LowRankPlusDiagonal(2.0, u, np.array([1.0, -1])), 2 * np.eye(3) + u @ np.diag([1, -1]) @ u.T),
    ]:
        np.testing.assert_allclose(op.diagonal(), np.diagonal(dense), rtol=1e-5, atol=1e-5)
    pair = BlockDiagonalOperator([first, DiagonalOperator(np.ones(2))]).diagonal()
    np.testing.assert_allclose(pair[0], np.diagonal(a), rtol=1e-6)
    np.testing.assert_allclose(pair[1], np.ones(2))
