"""How jaxprs are traced, and the jaxprs inside their equations: those of calls, branches and loops."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax.extend import core

F = TypeVar("F", bound=Callable[..., Any])


def count_equations(jaxpr: Any) -> int:
    """Counts the equations of a jaxpr and of the jaxprs inside it; a call or a loop itself does not count."""
    inner = [list(core.jaxprs_in_params(e.params)) for e in jaxpr.eqns]
    return sum(sum(map(count_equations, i)) if i else 1 for i in inner)


def inner_jaxprs(equation: Any) -> list[tuple[Any, Sequence[Any], Sequence[Any]]]:
    """Returns (jaxpr, operands, results) for each inner jaxpr; a while loop's condition has no results."""
    params, atoms = equation.params, equation.invars
    name = equation.primitive.name
    if name == "cond":
        return [(b.jaxpr, atoms[1:], equation.outvars) for b in params["branches"]]
    if name == "while":
        cond, body = params["cond_nconsts"], params["body_nconsts"]
        inits = atoms[cond + body :]
        return [
            (params["cond_jaxpr"].jaxpr, [*atoms[:cond], *inits], ()),
            (params["body_jaxpr"].jaxpr, [*atoms[cond : cond + body], *inits], equation.outvars),
        ]
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in params:
            inner = params[key]
            return [(getattr(inner, "jaxpr", inner), atoms, equation.outvars)]
    return []


def scan_parts(equation: Any) -> tuple[int, int]:
    """Returns how many operands of a scan are constants, and how many it carries; of the rest it reads rows.

    JAX's versions name these numbers differently, but in all of them a row has one axis less than its array.
    """
    body = equation.params["jaxpr"].jaxpr

    def whole(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        return sum(o.aval.ndim == i.aval.ndim for o, i in zip(outside, inside, strict=True))

    carried = whole(equation.outvars, body.outvars)
    return whole(equation.invars, body.invars) - carried, carried


def without_collector(function: F) -> F:
    """Makes a function run without Python's collector of cycles, which takes a quarter of long traces."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if enabled:
                gc.enable()

    return run  # type: ignore[return-value]
