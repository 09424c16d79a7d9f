"""Products of real arrays with complex ones, taken apart: two real products instead of a complex one.

NumPy's rules of promotion turn the real factor, samples say, into a complex one without imaginary part. XLA then
multiplies by its zeros, in every product with the derivative too, at twice the cost.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from .structure import abstract, is_complex, real_dtype

_PRODUCTS = ("dot_general", "conv_general_dilated")


def real_factors_apart(jaxpr: Jaxpr) -> Jaxpr:
    """A program with the same results, without complex products (of matrices, or with a kernel) of a real factor.

    Args:
        jaxpr: the program. Those of functions jitted inside it are looked into, loops and branches are not.
    """
    converted: dict[Any, Any] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _PRODUCTS and is_complex(eqn.outvars[0].aval):
            factors = [v if isinstance(v, Literal) else converted.get(v, v) for v in eqn.invars]
            if sum(is_complex(v.aval) for v in factors) == 1:
                eqns.extend(_apart(eqn, factors))
                continue
        elif name == "convert_element_type" and is_complex(eqn.outvars[0].aval):
            converted[eqn.outvars[0]] = eqn.invars[0]
        elif name == "jit" and isinstance(inner := eqn.params.get("jaxpr"), ClosedJaxpr):
            inner = ClosedJaxpr(real_factors_apart(inner.jaxpr), inner.consts)
            eqn = eqn.replace(params={**eqn.params, "jaxpr": inner})
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def _apart(eqn: JaxprEqn, factors: list[Any]) -> list[JaxprEqn]:
    """The operations of a complex product one of whose factors is real."""
    dtype = real_dtype(abstract(eqn.outvars[0].aval).dtype)
    params = {**eqn.params, "preferred_element_type": dtype}

    def product(*factors):
        def part(of):
            return eqn.primitive.bind(*((of(x) if is_complex(x) else x).astype(dtype) for x in factors), **params)

        return jax.lax.complex(part(jnp.real), part(jnp.imag))

    traced = jax.make_jaxpr(product)(*(abstract(v.aval) for v in factors)).jaxpr
    atoms = dict(zip((*traced.invars, *traced.outvars), (*factors, *eqn.outvars), strict=True))

    def renamed(variables):
        return [v if isinstance(v, Literal) else atoms.get(v, v) for v in variables]

    return [
        e.replace(invars=renamed(e.invars), outvars=renamed(e.outvars), source_info=eqn.source_info)
        for e in traced.eqns
    ]
