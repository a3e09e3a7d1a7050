"""The scalar form of each elementwise JAX primitive: a rule that makes a node from the operands' nodes.

A rule is called with the graph, the equation's parameters and one node for each operand. Types of 64
bits occur only in programs that the reference evaluates, so each elementary function of float64 stays
one node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from seedbed.simd.frontend import elementary, trigonometry
from seedbed.simd.ir.graph import FLOATS, Graph, Node
from seedbed.simd.ir.program import DTYPES, Unsupported
from seedbed.simd.ir.scalar import Scalar, copysign

Params = dict[str, Any]
Rule = Callable[[Graph, Params, tuple[Node, ...]], Node]
_SIGN_BIT = -0x80000000
_TYPES = (*DTYPES, "float64", "int64", "uint64")


def _direct(op: str) -> Rule:
    """Returns the rule of a primitive that is one operation of the graph."""

    def rule(g: Graph, params: Params, args: tuple[Node, ...]) -> Node:
        return g.apply(op, *args)

    return rule


def _formula(function: Callable[..., Scalar]) -> Rule:
    """Returns the rule of a primitive that is a formula in Scalars of any type."""

    def rule(g: Graph, params: Params, args: tuple[Node, ...]) -> Node:
        return function(*(Scalar(g, a) for a in args)).node

    return rule


def _elementary(name: str, function: Callable[..., Scalar]) -> Rule:
    """Returns the rule of a primitive that is a formula in float32 and one node in float64."""

    def rule(g: Graph, params: Params, args: tuple[Node, ...]) -> Node:
        if args[0].dtype == "float64":
            return g.make(name, args, None, "float64")
        return function(*(Scalar(g, a) for a in args)).node

    return rule


def _identity(g: Graph, params: Params, args: tuple[Node, ...]) -> Node:
    return args[0]


def _comparison(op: str, of_bools: Callable[[Scalar, Scalar], Scalar]) -> Rule:
    """Returns the rule of a comparison, max or min; `of_bools` is its formula for bools (False < True)."""

    def rule(g: Graph, params: Params, args: tuple[Node, ...]) -> Node:
        if args[0].dtype == "bool":
            return of_bools(*(Scalar(g, a) for a in args)).node
        return g.apply(op, *args)

    return rule


def _sign(x: Scalar) -> Scalar:
    positive = (x > 0).where(x.like(1), 0)
    if x.dtype == "uint32":
        return positive
    # the sign of +0, -0 and NaN is the number itself
    if x.dtype in FLOATS:
        return (x > 0).where(1.0, (x < 0).where(-1.0, x))
    return (x < 0).where(-1, positive)


def _round(g: Graph, params: Params, args: tuple[Node, ...]) -> Node:
    if params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN:
        return g.apply("round", *args)
    x = Scalar(g, args[0])
    size = abs(x)
    whole = size.apply("floor")
    away = (size - whole >= 0.5).where(whole + 1.0, whole)
    if x.dtype == "float64":
        return (x < 0.0).where(-away, away).node
    return copysign(away, x).node


def _remainder(g: Graph, params: Params, args: tuple[Node, ...]) -> Node:
    if args[0].dtype != "float32":
        return g.apply("rem", *args)
    return elementary.remainder(*(Scalar(g, a) for a in args)).node


def _rsqrt(x: Scalar) -> Scalar:
    return 1.0 / x.apply("sqrt")


def _integer_pow(g: Graph, params: Params, args: tuple[Node, ...]) -> Node:
    """Computes an integer power by repeated squaring, in XLA's order of products."""
    x, exponent = Scalar(g, args[0]), params["y"]
    if exponent == 0:
        return x.like(1).node
    left, square, product = abs(exponent), x, None
    while left:
        if left & 1:
            product = square if product is None else product * square
        left >>= 1
        if left:
            square = square * square
    assert product is not None
    return (1 / product if exponent < 0 else product).node


def _power(g: Graph, params: Params, args: tuple[Node, ...]) -> Node:
    # y may be an integer
    x, y = args
    return _ELEMENTARY["pow"](g, params, (x, g.convert(y, x.dtype)))


def _select(g: Graph, params: Params, args: tuple[Node, ...]) -> Node:
    """Selects a case by a bool (False selects case 0), or by an int32, clamped to the valid cases."""
    which, *cases = args
    if which.dtype == "bool":
        return g.select(which, cases[-1], cases[0])
    chosen = cases[-1]
    for k in range(len(cases) - 2, -1, -1):
        here = g.apply("le", which, g.constant(k, "int32"))
        chosen = g.select(here, cases[k], chosen)
    return chosen


def _clamp(g: Graph, params: Params, args: tuple[Node, ...]) -> Node:
    low, x, high = args
    return g.apply("min", high, g.apply("max", low, x))


def _convert(g: Graph, params: Params, args: tuple[Node, ...]) -> Node:
    dtype = str(np.dtype(params["new_dtype"]))
    _check(dtype)
    return g.convert(args[0], dtype)


def _bitcast(g: Graph, params: Params, args: tuple[Node, ...]) -> Node:
    dtype = str(np.dtype(params["new_dtype"]))
    _check(dtype)
    if "bool" in (dtype, args[0].dtype) and dtype != args[0].dtype:
        raise Unsupported("the bits of a bool have no scalar form: convert it to int32")
    return g.bitcast(args[0], dtype)


def _check(dtype: str) -> None:
    if dtype not in _TYPES:
        raise Unsupported(
            f"numbers of type {dtype} have no scalar form: use float32, int32, uint32 or bool"
        )


def _reduce_precision(g: Graph, params: Params, args: tuple[Node, ...]) -> Node:
    exponent, mantissa = params["exponent_bits"], params["mantissa_bits"]
    kept = np.finfo(args[0].dtype)
    if exponent < kept.nexp or mantissa < kept.nmant:
        raise Unsupported(
            f"reduce_precision to {exponent} exponent and {mantissa} mantissa bits has no scalar form: "
            "compute in float32"
        )
    return args[0]


def _shift_right_arithmetic(x: Scalar, places: Scalar) -> Scalar:
    """Shifts right and fills with copies of the highest bit, also for unsigned numbers."""
    return x.bits().apply("shift_right_arithmetic", places.bits()).bits(x.dtype)


def _population_count(x: Scalar) -> Scalar:
    """Counts the one bits: adds neighbouring fields of 1, 2 and 4 bits, and then the bytes.

    Source: Warren, Hacker's Delight, section 5-1.
    """
    v = x.bits("uint32")
    v = v - (v.shift_right(1) & 0x55555555)
    v = (v & 0x33333333) + (v.shift_right(2) & 0x33333333)
    v = (v + v.shift_right(4)) & 0x0F0F0F0F
    return (v * 0x01010101).shift_right(24).bits(x.dtype)


def _clz(x: Scalar) -> Scalar:
    """Counts the leading zeros: sets all bits below the highest one bit, and counts the other bits."""
    v = x.bits("uint32")
    for places in (1, 2, 4, 8, 16):
        v = v | v.shift_right(places)
    return _population_count(~v).bits(x.dtype)


def _mulhi(x: Scalar, y: Scalar) -> Scalar:
    """Returns the upper 32 bits of a product, computed from products of 16-bit halves.

    Source: Warren, Hacker's Delight, section 8-2.
    """
    u, v = x.bits("uint32"), y.bits("uint32")
    u_low, u_high, v_low, v_high = u & 0xFFFF, u.shift_right(16), v & 0xFFFF, v.shift_right(16)
    middle = u_high * v_low + (u_low * v_low).shift_right(16)
    other = (middle & 0xFFFF) + u_low * v_high
    high = u_high * v_high + middle.shift_right(16) + other.shift_right(16)
    if x.dtype == "uint32":
        return high
    # as an unsigned number, a negative operand is too large by 2^32
    high = high.bits("int32")
    return high - (x < 0).where(y, 0) - (y < 0).where(x, 0)


def _nextafter(x: Scalar, y: Scalar) -> Scalar:
    """Returns the next float32 from x towards y, by one step of its bits.

    A kernel treats denormal numbers as zero, as XLA does.
    """
    bits = x.bits()
    outwards = (x > 0.0).where(y > x, y < x)
    stepped = (bits + outwards.where(bits.like(1), -1)).bits("float32")
    smallest = ((y.bits() & _SIGN_BIT) | 1).bits("float32")
    moved = x.equals(0.0).where(smallest, stepped)
    unknown = x.differs(x) | y.differs(y)
    return unknown.where(elementary.NAN, x.equals(y).where(y, moved))


def _total_order(name: str) -> Rule:
    """Makes the rule of a comparison in which -0 is before 0 and every NaN has a place, by its bits."""

    def place(x: Scalar) -> Scalar:
        bits = x.bits()
        return bits ^ (_shift_right_arithmetic(bits, bits.like(31)) & 0x7FFFFFFF)

    def rule(g: Graph, params: Params, args: tuple[Node, ...]) -> Node:
        if args[0].dtype != "float32":
            return RULES[name](g, params, args)
        places = (place(Scalar(g, x)).node for x in args)
        return g.apply(name, *places)

    return rule


_GRAPH_OPS = {
    **{name: name for name in ("add", "sub", "mul", "div", "neg", "abs", "sqrt")},
    **{name: name for name in ("floor", "ceil", "and", "or", "xor", "not")},
    **{name: name for name in ("shift_left", "shift_right_logical")},
    "add_any": "add",
}
_EXPONENTIAL = [
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log1p",
    "logistic",
    "tanh",
    "sinh",
    "cosh",
    "asinh",
    "acosh",
    "atanh",
    "erf",
    "erfc",
    "erf_inv",
    "cbrt",
]
"""The functions of `elementary` that have a primitive of the same name."""
_ELEMENTARY: dict[str, Rule] = {
    **{name: _elementary(name, getattr(elementary, name)) for name in _EXPONENTIAL},
    **{
        name: _elementary(name, getattr(trigonometry, name))
        for name in ("sin", "cos", "tan", "asin", "acos", "atan", "atan2")
    },
    "pow": _elementary("pow", elementary.power),
    "nextafter": _elementary("nextafter", _nextafter),
}

RULES: dict[str, Rule] = {
    **{name: _direct(op) for name, op in _GRAPH_OPS.items()},
    **_ELEMENTARY,
    "max": _comparison("max", lambda a, b: a | b),
    "min": _comparison("min", lambda a, b: a & b),
    "eq": _comparison("eq", lambda a, b: ~(a ^ b)),
    "ne": _comparison("ne", lambda a, b: a ^ b),
    "lt": _comparison("lt", lambda a, b: ~a & b),
    "le": _comparison("le", lambda a, b: ~a | b),
    "gt": _comparison("gt", lambda a, b: a & ~b),
    "ge": _comparison("ge", lambda a, b: a | ~b),
    "eq_to": _total_order("eq"),
    "lt_to": _total_order("lt"),
    "le_to": _total_order("le"),
    "sign": _formula(_sign),
    "rem": _remainder,
    "round": _round,
    "rsqrt": _formula(_rsqrt),
    "square": _formula(lambda x: x * x),
    "one_minus_square": _formula(lambda x: (x + 1) * (1 - x)),
    "integer_pow": _integer_pow,
    "pow": _power,
    "is_finite": _formula(lambda x: abs(x) < elementary.INFINITY),
    "select_n": _select,
    "clamp": _clamp,
    "convert_element_type": _convert,
    "bitcast_convert_type": _bitcast,
    "reduce_precision": _reduce_precision,
    "shift_right_arithmetic": _formula(_shift_right_arithmetic),
    "population_count": _formula(_population_count),
    "clz": _formula(_clz),
    "mulhi": _formula(_mulhi),
    "copy": _identity,
    "stop_gradient": _identity,
    "pvary": _identity,
}
"""The rule of each elementwise primitive of JAX, by the primitive's name."""
