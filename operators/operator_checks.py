"""What `check_operator` asks of the products of an operator."""

from collections.abc import Callable, Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .algebra import ScaledOperator, SumOperator
from .base import LinearOperator, Vector, adjoint_product, conjugate, product
from .blocks import BlockDiagonalOperator, IdentityOperator
from .gram import GramOperator
from .host_vectors import distance, from_parts, host, norm, to_parts, unit_vector
from .jacobian import Jacobian
from .matrix import DiagonalOperator, MatrixOperator
from .network_checks import findings_of_network, jacobians_inside, uncentred
from .report import Finding, relative
from .structure import (
    Structure,
    describe,
    is_complex,
    real_dtype,
    same_structure,
    size_of,
)

# Largest operator whose diagonal is checked even if it is made of products with unit vectors.
_SMALL = 64


def findings_of_operator(
    op: LinearOperator, rng: np.random.Generator, probes: int, tolerance: float | None
) -> Iterator[Finding]:
    """Everything, from the networks inside to the diagonal, until something forbids going on."""
    return _Session(op, rng, probes, tolerance).findings()


class _Session:
    """One operator, its random vectors and their products."""

    def __init__(self, op: LinearOperator, rng: np.random.Generator, probes: int, tolerance: float | None):
        self.op, self.rng, self.probes = op, rng, probes
        self.ins, self.outs = op.in_structure(), op.out_structure()
        leaves = jax.tree.leaves((self.ins, self.outs))
        dtypes = [real_dtype(leaf.dtype) for leaf in leaves] or [np.dtype(np.float32)]
        self.eps = max(float(jnp.finfo(dtype).eps) for dtype in dtypes)
        self.narrow = any(float(jnp.finfo(dtype).max) < 1e6 for dtype in dtypes)  # float16
        self.tolerance = self.eps**0.5 if tolerance is None else float(tolerance)
        self._noise: float | None = None

    def findings(self) -> Iterator[Finding]:
        for jacobian in jacobians_inside(self.op):
            yield from findings_of_network(jacobian)
        finding = self.of_structure(product, self.ins, self.outs, "product")
        yield finding
        if not finding.passed or size_of(self.ins) == 0 or size_of(self.outs) == 0:
            return
        self.xs = [self.random(self.ins) for _ in range(self.probes)]
        self.products = [product(self.op, x) for x in self.xs]
        finite = self.of_finite()
        yield finite
        if not finite.passed:  # then every other figure would be NaN
            return
        yield self.of_repetition()
        yield self.of_addition()
        yield self.of_scaling()
        if self.op.field == "complex":
            yield self.of_complex_scaling()
        yield from self.of_adjoint()
        if self.op.is_hermitian:
            yield self.of_hermitian()
        if self.op.is_positive:
            yield self.of_positive()
        if _diagonal_is_cheap(self.op):
            yield self.of_diagonal()

    def random(self, structure: Structure) -> Vector:
        """Entries of variance one; drawn by NumPy, since JAX's generator would be compiled for each shape."""

        def leaf(s):
            parts = self.rng.normal(size=(2, *s.shape))
            return jnp.asarray(parts[0] + 1j * parts[1] if is_complex(s) else parts[0], s.dtype)

        return jax.tree.map(leaf, structure)

    def judge(self, name: str, pairs: list[tuple[float, float]], about: str, cure: str) -> Finding:
        """The finding from (difference, size) of each probe."""
        worst, scale = max(pairs, key=lambda pair: relative(*pair))
        figure, allowed = relative(worst, scale), self.tolerance
        if not figure <= allowed and scale > 0:
            allowed += 16 * self.eps * self.noise / scale
        return Finding(name, figure, allowed, about, cure)

    @property
    def noise(self) -> float:
        """Size of the products without centring: rounding is relative to those."""
        if self._noise is None:
            self._noise = 0.0
            if any(j.center for j in jacobians_inside(self.op)):
                op = jax.tree.map(uncentred, self.op, is_leaf=lambda x: isinstance(x, Jacobian))
                self._noise = norm(product(op, self.xs[0]))
        return self._noise

    def of_structure(self, product_of: Callable, ins: Structure, outs: Structure, name: str) -> Finding:
        got = eqx.filter_eval_shape(product_of, self.op, ins)
        about = f"whether the {name} returns what is declared"
        cure = "Let in_structure and out_structure be what the product takes and gives, dtypes included."
        words = describe(got), describe(outs)
        return Finding("structure", float(not same_structure(got, outs)), 0.0, about, cure, structures=words)

    def of_finite(self) -> Finding:
        bad = sum(int(np.sum(~np.isfinite(leaf))) for leaf in host(self.products))
        share = bad / max(1, self.probes * size_of(self.outs))
        about = "share of entries of A x that are not finite, x of size one"
        return Finding("finite", share, 0.0, about, "Look for overflow, division by zero or NaN in what it holds.")

    def of_repetition(self) -> Finding:
        pairs = [(distance(product(self.op, self.xs[0]), self.products[0]), norm(self.products[0]))]
        about = "difference of two products with the same vector, relative to |A x|"
        return self.judge("repeatable", pairs, about, "Look for random numbers drawn in the product.")

    def of_addition(self) -> Finding:
        pairs = []
        for x, y in zip(self.xs, self.products, strict=True):
            z = self.random(self.ins)
            z_product = product(self.op, z)
            both = product(self.op, jax.tree.map(jnp.add, x, z))
            expected = [a + b for a, b in zip(host(y), host(z_product), strict=True)]
            pairs.append((distance(both, expected), norm(y) + norm(z_product)))
        about = "difference of A(x + z) and A x + A z, relative to |A x| + |A z|"
        return self.judge("additive", pairs, about, "The map is not linear; linearize it (jax.linearize) first.")

    def of_scaling(self) -> Finding:
        # Large factors show what is nonlinear, small ones a constant term.
        factors = (-8.0, 0.125) if self.narrow else (-1000.0, 0.001)
        pairs = [self.scaled(factor, x, y) for factor in factors for x, y in zip(self.xs, self.products, strict=True)]
        about = f"difference of A(c x) and c A x, c = {factors[0]:g} and {factors[1]:g}, relative to |c A x|"
        return self.judge("scaling", pairs, about, "The map is not linear; linearize it (jax.linearize) first.")

    def of_complex_scaling(self) -> Finding:
        pairs = [self.scaled(1j, x, y) for x, y in zip(self.xs, self.products, strict=True)]
        about = "difference of A(i x) and i A x, relative to |A x|"
        cure = "The map is only R-linear: declare field='real' (for a Jacobian leave out holomorphic=True)."
        return self.judge("C-linear", pairs, about, cure)

    def scaled(self, factor: complex, x: Vector, y: Vector) -> tuple[float, float]:
        got = product(self.op, jax.tree.map(lambda leaf: (factor * leaf).astype(leaf.dtype), x))
        return distance(got, [factor * leaf for leaf in host(y)]), abs(factor) * norm(y)

    def of_adjoint(self) -> Iterator[Finding]:
        about = "difference of <y, A x> and <A^H y, x>, relative to |A x| and |A^H y|, y and x of size one"
        cure = "The adjoint is the conjugate transpose, in the inner product of the field. Without one, JAX transposes."
        ys = [self.random(self.outs) for _ in range(self.probes)]
        try:
            backs = [adjoint_product(self.op, y) for y in ys]
        except Exception as error:  # no adjoint is no false adjoint: some solvers need none
            yield Finding("adjoint", 0.0, 0.0, about, cure, skipped=f"the adjoint fails with {_first_line(error)}")
            return
        structure = self.of_structure(adjoint_product, self.outs, self.ins, "adjoint product")
        if not structure.passed:
            yield structure
            return
        pairs = []
        for x, y, forward, back in zip(self.xs, ys, self.products, backs, strict=True):
            difference = self.inner(y, forward) - self.inner(back, x)
            pairs.append((abs(difference), max(norm(forward), norm(back))))
        yield self.judge("adjoint", pairs, about, cure)

        about = "difference of A^H y and JAX's transpose, relative to |A^H y|"
        cure = "Give the product its transpose with krylov.operators.linear_call, or leave the adjoint to JAX."
        try:
            transposed = [_transposed_by_jax(self.op, y) for y in ys]
        except Exception as error:
            reason = f"JAX cannot transpose it: {_first_line(error)}"
            yield Finding("transpose", 0.0, 0.0, about, cure, skipped=reason)
            return
        pairs = [(distance(a, b), norm(b)) for a, b in zip(transposed, backs, strict=True)]
        yield self.judge("transpose", pairs, about, cure)

    def inner(self, x: Vector, y: Vector) -> complex:
        total = complex(sum(np.vdot(a, b) for a, b in zip(host(x), host(y), strict=True)))
        return total if self.op.field == "complex" else total.real

    def of_hermitian(self) -> Finding:
        pairs = []
        for x, forward in zip(self.xs, self.products, strict=True):
            z = self.random(self.ins)
            other = product(self.op, z)
            difference = self.inner(z, forward) - self.inner(other, x)
            pairs.append((abs(difference), max(norm(forward), norm(other))))
        about = "difference of <z, A x> and <A z, x>, relative to |A x| and |A z|, x and z of size one"
        return self.judge("hermitian", pairs, about, "Drop hermitian=True or positive=True, or mend the product.")

    def of_positive(self) -> Finding:
        smallest, size = self.smallest_ritz_value()
        about = "smallest Ritz value, if negative, relative to the largest one or |A q|, q of norm one"
        cure = "Drop positive=True: cg needs it; minres takes hermitian operators that are not positive."
        return self.judge("positive", [(max(0.0, -smallest), size)], about, cure)

    def smallest_ritz_value(self) -> tuple[float, float]:
        """Of a Lanczos run in double precision, fully orthogonalised; and the size of the operator on its space."""
        basis, images = [], []
        q = to_parts(self.xs[0])
        for _ in range(min(4 * self.probes, q.size)):
            for _twice in range(2):
                q = q - sum((b * (b @ q) for b in basis), np.zeros_like(q))
            size = np.linalg.norm(q)
            if not size > 10 * self.eps * np.linalg.norm(images[-1] if images else q):
                break
            q = q / size
            # Vectors of entries about one survive half precision.
            unit = q.size**-0.5
            image = to_parts(product(self.op, from_parts(q / unit, self.ins))) * unit
            basis.append(q)
            images.append(image)
            q = image
        if not basis:
            return 0.0, 0.0
        projected = np.array(basis) @ np.array(images).T
        values = np.linalg.eigvalsh((projected + projected.T) / 2)
        return float(values[0]), float(max(np.abs(values).max(), np.linalg.norm(images, axis=1).max()))

    def of_diagonal(self) -> Finding:
        diagonal = host(self.op.diagonal())
        split = self.op.as_real() if self.op._needs_splitting else self.op
        entries = np.concatenate([leaf.ravel() for leaf in diagonal])
        pairs = []
        for i in self.rng.choice(entries.size, min(2 * self.probes, entries.size), replace=False):
            column = host(product(split, unit_vector(i, split.in_structure())))
            entry = np.concatenate([leaf.ravel() for leaf in column])[i]
            pairs.append((abs(entry - entries[i]), norm(column)))
        about = "difference of an entry of diagonal() and of A e_i, relative to |A e_i|"
        return self.judge("diagonal", pairs, about, "Mend diagonal(), or leave it to the base class.")


def _diagonal_is_cheap(op: LinearOperator) -> bool:
    if not op.is_square or type(op).diagonal is LinearOperator.diagonal:  # from unit vectors, as it would be checked
        return False
    if isinstance(op, GramOperator):
        return True
    if op._needs_splitting:
        return False
    if size_of(op.in_structure()) <= _SMALL or isinstance(op, (MatrixOperator, DiagonalOperator, IdentityOperator)):
        return True
    if isinstance(op, ScaledOperator):
        return _diagonal_is_cheap(op.operator)
    parts = {SumOperator: "terms", BlockDiagonalOperator: "blocks"}.get(type(op))
    return parts is not None and all(map(_diagonal_is_cheap, getattr(op, parts)))


@eqx.filter_jit
def _transposed_by_jax(op: LinearOperator, vector: Vector) -> Vector:
    (out,) = jax.linear_transpose(lambda x: product(op, x), op.in_structure())(conjugate(vector))
    return conjugate(out)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
