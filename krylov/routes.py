"""Which of its routes a natural-gradient step takes."""

from typing import Any

from krylov.operators import Jacobian, LinearOperator
from krylov.operators.base import Vector
from krylov.operators.storage import Recomputed
from krylov.operators.structure import Structure, same_structure

from .arguments import real_unknowns
from .damping import Damping
from .methods import Direct, Method, method_named
from .recycler import RecyclerState

ROUTES = ("parameters", "samples", "least_squares")


def check_route(where: str, route: str) -> None:
    """Refuse a route that is none.

    Raises:
        ValueError: it is none.
    """
    if route not in ("auto", *ROUTES):
        raise ValueError(
            f"{where}: unknown route.\n  got       {route!r}\n  expected  'auto', {', '.join(map(repr, ROUTES))}"
        )


def choose_route(
    J: Jacobian,
    route: str,
    method: str | Method,
    preconditioner: Any,
    recycler_state: RecyclerState | None,
    x0: Vector | None,
    damping: Damping,
) -> tuple[str, str]:
    """The route asked for, or for ``"auto"`` the cheapest, and why.

    Raises:
        ValueError: an unknown route, or one that divides by a shift of zero.
    """
    check_route("natural_gradient", route)
    if damping.known_singular and (route == "samples" or (route == "least_squares" and damping.operator is not None)):
        raise ValueError(
            f"natural_gradient: route={route!r} divides by the shift, which must be positive.\n"
            "  got       a shift of zero\n  Give a shift, for every trained leaf, or take route='parameters'."
        )
    if route != "auto":
        return route, "asked for"
    sides = {"parameters": J.in_structure(), "samples": J.out_structure()}
    if damping.known_singular:
        return "parameters", "no shift"
    recycled = None if recycler_state is None else recycler_state.preconditioner
    for reason, structure in (
        ("that is where preconditioner acts", _domain(preconditioner)),
        ("that is where recycler_state belongs", _domain(recycled)),
        ("that is where x0 lies", x0),
    ):
        known = structure is not None
        fits = [side for side, expected in sides.items() if known and same_structure(structure, expected)]
        if fits:
            return fits[0], reason
    count = {side: real_unknowns(structure) for side, structure in sides.items()}
    sizes = f"{count['samples']} real unknowns on samples, {count['parameters']} on parameters"
    smaller = "samples" if count["samples"] < count["parameters"] else "parameters"
    chosen = method if isinstance(method, str) and method == "auto" else method_named(method)
    if isinstance(chosen, Direct):
        return smaller, f"the smaller matrix: {sizes}"
    if J.chunks.weights.shape[0] > 1 and isinstance(J.storage, Recomputed):
        return "parameters", "one pass over the chunks a product, not two"
    return smaller, f"products cost the same and vectors are shorter: {sizes}"


def _domain(preconditioner: Any) -> Structure | None:
    return preconditioner.in_structure() if isinstance(preconditioner, LinearOperator) else None
