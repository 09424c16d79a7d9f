"""The methods, by name."""

import difflib
from typing import Any

from .bicgstab import BiCGStab
from .cg import CG
from .direct import LU, Cholesky
from .gmres import GMRES
from .minres import MINRES
from .recurrence import Direct, Method, Recurrence

METHODS: dict[str, type[Method]] = {method.name: method for method in (CG, MINRES, GMRES, BiCGStab, Cholesky, LU)}


def method_named(method: Any) -> Method:
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
        raise TypeError(f"solve: method must be a name or a method object, not {type(method).__name__}.")
    found = METHODS.get(method.lower())
    if found is None:
        near = difflib.get_close_matches(method.lower(), [*METHODS, "auto"], n=1, cutoff=0.4)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"solve: unknown method {method!r}. {hint}Known: {', '.join(['auto', *METHODS])}.")
    return found()


__all__ = [
    "CG",
    "GMRES",
    "LU",
    "METHODS",
    "MINRES",
    "BiCGStab",
    "Cholesky",
    "Direct",
    "Method",
    "Recurrence",
    "method_named",
]
