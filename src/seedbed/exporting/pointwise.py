"""JAX's primitives that act on each element alone, as nodes of ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from seedbed.exporting.graph import Graph

Pointwise = Callable[..., str]
"""Adds nodes to a graph for a primitive that acts on elements: (graph, params, *names) -> name."""


def _plain(kind: str) -> Pointwise:
    return lambda g, _, *names: g.node(kind, *names)


def _number(g: Graph, value: float) -> str:
    return g.constant(np.array(value, np.float32))


def _log1p(g: Graph, _: Any, x: str) -> str:
    """Adds log(1 + x) without its rounding error, after Kahan: log(u) x / (u - 1) for u = 1 + x."""
    one = _number(g, 1.0)
    u = g.node("Add", x, one)
    step, log = g.node("Sub", u, one), g.node("Log", u)
    close = g.node("Mul", log, g.node("Div", x, step))
    near = g.node("Where", g.node("Equal", step, _number(g, 0.0)), x, close)
    return g.node("Where", g.node("Equal", u, x), log, near)


def _expm1(g: Graph, _: Any, x: str) -> str:
    """Adds exp(x) - 1 without its rounding error, after Kahan: (y - 1) x / log(y) for y = exp(x)."""
    one = _number(g, 1.0)
    y = g.node("Exp", x)
    step = g.node("Sub", y, one)
    close = g.node("Mul", step, g.node("Div", x, g.node("Log", y)))
    near = g.node("Where", g.node("Equal", step, _number(g, 0.0)), x, close)
    far = g.node("Or", g.node("Equal", step, _number(g, -1.0)), g.node("Equal", step, y))
    return g.node("Where", far, step, near)


def _integer_pow(g: Graph, params: Any, x: str) -> str:
    return g.node("Pow", x, _number(g, params["y"]))


def _is_finite(g: Graph, _: Any, x: str) -> str:
    return g.node("Not", g.node("Or", g.node("IsInf", x), g.node("IsNaN", x)))


def _not_equal(g: Graph, _: Any, x: str, y: str) -> str:
    return g.node("Not", g.node("Equal", x, y))


def _clamp(g: Graph, _: Any, low: str, x: str, high: str) -> str:
    return g.node("Min", g.node("Max", x, low), high)


POINTWISE: dict[str, Pointwise] = {
    "abs": _plain("Abs"),
    "acos": _plain("Acos"),
    "acosh": _plain("Acosh"),
    "add": _plain("Add"),
    "add_any": _plain("Add"),
    "asin": _plain("Asin"),
    "asinh": _plain("Asinh"),
    "atan": _plain("Atan"),
    "atanh": _plain("Atanh"),
    "ceil": _plain("Ceil"),
    "clamp": _clamp,
    "convert_element_type": lambda g, params, x: g.cast(x, params["new_dtype"]),
    "copy": lambda g, _, x: x,
    "copy_p": lambda g, _, x: x,
    "cos": _plain("Cos"),
    "cosh": _plain("Cosh"),
    "div": _plain("Div"),
    "eq": _plain("Equal"),
    "erf": _plain("Erf"),
    "exp": _plain("Exp"),
    "expm1": _expm1,
    "floor": _plain("Floor"),
    "ge": _plain("GreaterOrEqual"),
    "gt": _plain("Greater"),
    "integer_pow": _integer_pow,
    "is_finite": _is_finite,
    "le": _plain("LessOrEqual"),
    "log": _plain("Log"),
    "log1p": _log1p,
    "logistic": _plain("Sigmoid"),
    "lt": _plain("Less"),
    "max": _plain("Max"),
    "min": _plain("Min"),
    "mul": _plain("Mul"),
    "ne": _not_equal,
    "neg": _plain("Neg"),
    "pow": _plain("Pow"),
    "rem": lambda g, _, x, y: g.node("Mod", x, y, fmod=1),
    "rsqrt": lambda g, _, x: g.node("Reciprocal", g.node("Sqrt", x)),
    "sign": _plain("Sign"),
    "sin": _plain("Sin"),
    "sinh": _plain("Sinh"),
    "sqrt": _plain("Sqrt"),
    "square": lambda g, _, x: g.node("Mul", x, x),
    "stop_gradient": lambda g, _, x: x,
    "sub": _plain("Sub"),
    "tan": _plain("Tan"),
    "tanh": _plain("Tanh"),
}
