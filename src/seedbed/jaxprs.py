"""Jaxprs: tracing, interpreting, and the jaxprs inside equations: those of calls, branches and loops."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax.extend import core

F = TypeVar("F", bound=Callable[..., Any])
RULED = frozenset(("custom_jvp_call", "custom_vjp_call"))
"""Names of primitives that call a function with a derivative of its own."""
CALLS = RULED | {
    "call",
    "checkpoint",
    "closed_call",
    "composite",
    "custom_vmap_call",
    "eval_jaxpr",  # what JAX 0.11 calls closed_call
    "jit",
    "remat2",
}
"""Names of primitives that only call a function with their operands."""


def called(equation: Any) -> core.ClosedJaxpr | None:
    """Returns the function that an equation only calls with its operands; None if the equation does more.

    Other primitives can have a jaxpr too, such as the function that reduces two elements.
    """
    if equation.primitive.name not in CALLS:
        return None
    params = equation.params
    inner: Any = next(params[key] for key in ("jaxpr", "call_jaxpr", "call") if key in params)
    return inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())


def interpret(
    closed: core.ClosedJaxpr,
    operands: Sequence[Any],
    apply: Callable[[Any, list[Any]], Sequence[Any]],
    lift: Callable[[Any, Any], Any] = lambda value, aval: value,
) -> list[Any]:
    """Returns the results of a function: `apply(equation, operands)` returns those of each equation.

    `lift(value, aval)` makes an operand of a literal or a constant of the function.
    """
    jaxpr = closed.jaxpr
    held: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
    for variable, value in zip(jaxpr.constvars, closed.consts, strict=True):
        held[variable] = lift(value, variable.aval)

    def read(atom: Any) -> Any:
        return lift(atom.val, atom.aval) if isinstance(atom, core.Literal) else held[atom]

    for equation in jaxpr.eqns:
        results = apply(equation, [read(atom) for atom in equation.invars])
        held.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def bind(equation: Any, operands: Sequence[Any], **params: Any) -> Sequence[Any]:
    """Returns the results of an equation's primitive for other operands; `params` replace its own."""
    primitive = equation.primitive
    made = primitive.bind(*operands, **primitive.get_bind_params({**equation.params, **params}))
    return made if primitive.multiple_results else [made]


def count_equations(jaxpr: Any) -> int:
    """Counts the equations of a jaxpr and of the jaxprs inside it; a call or a loop itself does not count.

    An equation of n results, such as an array that is taken apart, counts as n.
    """
    inner = [(e, list(core.jaxprs_in_params(e.params))) for e in jaxpr.eqns]
    return sum(sum(map(count_equations, i)) if i else max(1, len(e.outvars)) for e, i in inner)


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
    inner = params["jaxpr"] if name == "scan" else called(equation)
    return [] if inner is None else [(inner.jaxpr, atoms, equation.outvars)]


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
