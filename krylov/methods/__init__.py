"""The methods, by name."""

import difflib
from typing import Any

from .bicgstab import BiCGStab
from .bicgstabl import BiCGStabL
from .cg import CG
from .cgls import CGLS
from .cr import CR
from .craig import CRAIG
from .direct import LU, Cholesky
from .fcg import FCG
from .gmres import GMRES
from .least_squares import LeastSquares
from .lsmr import LSMR
from .lsqr import LSQR
from .minres import MINRES
from .minres_qlp import MINRESQLP
from .recurrence import Direct, Method, Recurrence
from .spectral import SVD, Eigh

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (CG, MINRES, MINRESQLP, CR, FCG, GMRES, BiCGStab, BiCGStabL, Cholesky, LU, Eigh, SVD)
}

LEAST_SQUARES_METHODS: dict[str, type[Method]] = {method.name: method for method in (LSMR, LSQR, CGLS, CRAIG)}


def method_named(method: Any, methods: dict[str, type[Method]] = METHODS, where: str = "solve") -> Method:
    """The method object for a name, with its default options; a method object is returned as it is.

    Raises:
        ValueError: no method has this name.
        TypeError: neither a name nor a method object.
    """
    if isinstance(method, Method):
        return method
    if isinstance(method, type) and issubclass(method, Method):
        return method()
    if not isinstance(method, str):
        raise TypeError(f"{where}: method must be a name or a method object, not {type(method).__name__}.")
    found = methods.get(method.lower())
    if found is None:
        names = [*(["auto"] if methods is METHODS else []), *methods]
        near = difflib.get_close_matches(method.lower(), names, n=1, cutoff=0.4)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"{where}: unknown method {method!r}. {hint}Known: {', '.join(names)}.")
    return found()


__all__ = [
    "CG",
    "CGLS",
    "CR",
    "CRAIG",
    "FCG",
    "GMRES",
    "LEAST_SQUARES_METHODS",
    "LSMR",
    "LSQR",
    "LU",
    "METHODS",
    "MINRES",
    "MINRESQLP",
    "SVD",
    "BiCGStab",
    "BiCGStabL",
    "Cholesky",
    "Direct",
    "Eigh",
    "LeastSquares",
    "Method",
    "Recurrence",
    "method_named",
]
