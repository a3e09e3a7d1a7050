"""Scalar expression graphs: hash-consed nodes that fold constants as they are made.

A node is one scalar of a single example. Loops and arrays in memory have nodes too, so that a graph keeps the
loops of the program. A `Loop` lists the values that go round it, and the `loops` of a node are those on whose
iteration it depends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from seedbed.simd.ir.arithmetic import convert, numpy_operation

FLOATS = ("float32", "float64")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
COMMUTATIVE = ("add", "mul", "max", "min", "and", "or", "xor", "eq", "ne")
EFFECTS = ("memory", "store")  # never shared: each has its own place and time


class Node:
    """One scalar, or one state of an array in memory; `uniform` if it is the same for all examples."""

    __slots__ = ("args", "dtype", "id", "loops", "op", "uniform", "value")

    def __init__(
        self, number: int, op: str, args: tuple[Node, ...], value: Any, dtype: str
    ) -> None:
        self.id, self.op, self.args, self.value, self.dtype = number, op, args, value, dtype
        self.loops: frozenset[Loop] = frozenset()
        self.uniform = False

    def __repr__(self) -> str:
        inside = " ".join(f"%{a.id}" for a in self.args)
        value = "" if self.value is None else f" [{self.value}]"
        return f"%{self.id} = {self.op}{value} {inside}: {self.dtype}"


@dataclasses.dataclass(eq=False)
class LoopCarry:
    """A scalar or an array in memory that goes round a loop."""

    variable: Node  # the value that the body reads
    init: Node
    final: Node  # the value at the end of the body
    size: int | None  # elements of an array in memory; None for a scalar


@dataclasses.dataclass(eq=False)
class Record:
    """The values that a counted loop records in each iteration; after it they are an array in memory."""

    values: tuple[Node, ...]
    array: Node


@dataclasses.dataclass(eq=False)
class Loop:
    """A loop that stays a loop: it runs `length` times, or while `condition` holds in any lane.

    In the graph, `variable` and `index` nodes stand for the values that its body reads, `result` and `record`
    nodes for its carries and records after it. The `value` of these nodes begins with the loop's number.
    """

    number: int
    depth: int
    length: int | None
    reverse: bool
    index: Node | None = None  # the iteration of a counted loop, which indexes its arrays
    condition: Node | None = None
    carries: list[LoopCarry] = dataclasses.field(default_factory=list)
    records: list[Record] = dataclasses.field(default_factory=list)
    loops: frozenset[Loop] = frozenset()  # the loops around it on whose iteration it depends


def innermost(loops: Iterable[Loop]) -> Loop | None:
    """Returns the deepest of the loops; None if there are none."""
    return max(loops, key=lambda loop: loop.depth, default=None)


def is_constant(node: Node) -> bool:
    """Returns whether the value of a node is known."""
    return node.op == "constant"


def _is(node: Node, number: float) -> bool:
    return node.op == "constant" and node.value == number


class GraphTooLarge(Exception):
    """Raised when a graph would have more nodes than its limit."""


class Graph:
    """A graph that makes its nodes; equal nodes are made once."""

    def __init__(self, limit: int) -> None:
        """Makes an empty graph; `make` raises GraphTooLarge if there are `limit` nodes already."""
        self.nodes: list[Node] = []
        self.loops: list[Loop] = []  # by number
        self._limit = limit
        self._known: dict[Any, Node] = {}

    def make(
        self,
        op: str,
        args: Sequence[Node] = (),
        value: Any = None,
        dtype: str = "float32",
        *,
        uniform: bool | None = None,
        loops: frozenset[Loop] | None = None,
    ) -> Node:
        """Returns an equal node if there is one, else a new node.

        Nodes in EFFECTS are always new. By default, a node is uniform if all its arguments are. `loops` are
        added to those of the arguments. Raises GraphTooLarge.
        """
        args = tuple(args)
        key = (op, value, dtype, *(a.id for a in args))
        node = None if op in EFFECTS else self._known.get(key)
        if node is None:
            if len(self.nodes) >= self._limit:
                raise GraphTooLarge
            node = Node(len(self.nodes), op, args, value, dtype)
            node.uniform = all(a.uniform for a in args) if uniform is None else uniform
            around = frozenset[Loop]().union(*(a.loops for a in args))
            node.loops = around if loops is None else around | loops
            self.nodes.append(node)
            if op not in EFFECTS:
                self._known[key] = node
        return node

    def constant(self, value: Any, dtype: str) -> Node:
        """Returns the node of a known number; 0.0 and -0.0 have different nodes."""
        number = np.asarray(value).astype(dtype)[()]
        key = ("constant", dtype, number.tobytes())
        node = self._known.get(key)
        if node is None:
            node = Node(len(self.nodes), "constant", (), number, dtype)
            node.uniform = True
            self.nodes.append(node)
            self._known[key] = node
        return node

    def apply(self, op: str, *args: Node) -> Node:
        """Returns an arithmetic, bit or comparison operation, simplified if that is exact.

        A product with a literal zero is 0, and a literal zero is left out of a sum: NaN, infinities and the
        sign of a zero beside it are lost. All other arithmetic is IEEE's.
        """
        if all(a.op == "constant" for a in args):
            with np.errstate(all="ignore"):
                value = numpy_operation(op)(*(a.value for a in args))
            return self.constant(value, "bool" if op in COMPARISONS else args[0].dtype)
        if args[0].dtype == "int32" and op in _ORDERED:
            found = _by_range(self, op, *args)
            if found is not None:
                return found
        simple = _SIMPLER.get(op)
        if simple is not None:
            found = simple(self, *args)
            if found is not None:
                return found
        if op in COMMUTATIVE and args[0].id > args[1].id:
            args = args[::-1]
        return self.make(op, args, None, "bool" if op in COMPARISONS else args[0].dtype)

    def select(self, condition: Node, true: Node, false: Node) -> Node:
        """Returns a node that is `true` if `condition` holds, else `false`."""
        if condition.op == "constant":
            return true if condition.value else false
        if true is false:
            return true
        if condition.op == "not":
            return self.select(condition.args[0], false, true)
        if true.dtype == "bool":
            if is_constant(true) and is_constant(false):
                return condition if true.value else self.apply("not", condition)
            if is_constant(false) and not false.value:
                return self.apply("and", condition, true)
            if is_constant(true) and true.value:
                return self.apply("or", condition, false)
        return self.make("select", (condition, true, false), None, true.dtype)

    def convert(self, node: Node, dtype: str) -> Node:
        """Returns the number converted to type `dtype`."""
        if node.dtype == dtype:
            return node
        if node.op == "constant":
            return self.constant(convert(node.value, dtype), dtype)
        if node.op == "select" and is_constant(node.args[1]) and is_constant(node.args[2]):
            # Under jax_enable_x64, literals that are selected have 64 bits, which no kernel has.
            condition, true, false = node.args
            return self.select(condition, self.convert(true, dtype), self.convert(false, dtype))
        if dtype == "bool":
            return self.apply("ne", node, self.constant(0, node.dtype))
        if node.dtype == "bool":
            return self.select(node, self.constant(1, dtype), self.constant(0, dtype))
        return self.make("convert", (node,), None, dtype)

    def bitcast(self, node: Node, dtype: str) -> Node:
        """Returns the same bits read as another type of the same size."""
        if node.dtype == dtype:
            return node
        if node.op == "constant":
            return self.constant(np.asarray(node.value).view(dtype), dtype)
        if node.op == "bitcast":
            return self.bitcast(node.args[0], dtype)
        return self.make("bitcast", (node,), None, dtype)


_ORDERED = ("lt", "le", "gt", "ge", "max", "min")


def _range(g: Graph, node: Node) -> tuple[int, int] | None:
    """Returns the least and the greatest value of an index, or None if they are not known.

    They are known for a constant, the iteration of a loop, and an element of a table.
    """
    if node.op == "constant":
        return int(node.value), int(node.value)
    if node.op == "index":
        return 0, (g.loops[node.value[0]].length or 1) - 1
    if node.op == "load" and node.args[0].op == "table":
        numbers = np.frombuffer(node.args[0].value[0], node.dtype)
        return int(numbers.min()), int(numbers.max())
    return None


def _by_range(g: Graph, op: str, a: Node, b: Node) -> Node | None:
    """Folds a comparison, max or min that the ranges of its operands decide, such as `index < 0`."""
    first, second = _range(g, a), _range(g, b)
    if first is None or second is None:
        return None
    below, above = first[1] <= second[0], first[0] >= second[1]  # for all values
    if op in ("max", "min"):
        if not (below or above):
            return None
        return (a if above else b) if op == "max" else (a if below else b)
    strictly_below, strictly_above = first[1] < second[0], first[0] > second[1]
    true = {"lt": strictly_below, "le": below, "gt": strictly_above, "ge": above}[op]
    false = {"lt": above, "le": strictly_above, "gt": below, "ge": strictly_below}[op]
    return g.constant(true, "bool") if true or false else None


def _add(g: Graph, a: Node, b: Node) -> Node | None:
    if _is(a, 0):
        return b
    if _is(b, 0):
        return a
    if a.dtype in FLOATS and b.op == "neg":
        return g.apply("sub", a, b.args[0])
    if a.dtype in FLOATS and a.op == "neg":
        return g.apply("sub", b, a.args[0])
    return None


def _sub(g: Graph, a: Node, b: Node) -> Node | None:
    if _is(b, 0):
        return a
    if _is(a, 0):
        return g.apply("neg", b)
    if a.dtype in FLOATS and b.op == "neg":
        return g.apply("add", a, b.args[0])
    return None


def _mul(g: Graph, a: Node, b: Node) -> Node | None:
    for x, y in ((a, b), (b, a)):
        if x.op != "constant":
            continue
        if x.value == 0:
            return g.constant(0, x.dtype)
        if x.value == 1:
            return y
        if x.value == -1 and x.dtype in FLOATS:
            return g.apply("neg", y)
        if x.dtype in FLOATS and y.op == "neg":
            return g.apply("mul", g.apply("neg", x), y.args[0])
    if a.dtype in FLOATS:
        if a.op == "neg" and b.op == "neg":
            return g.apply("mul", a.args[0], b.args[0])
        if a.op == "neg":
            return g.apply("neg", g.apply("mul", a.args[0], b))
        if b.op == "neg":
            return g.apply("neg", g.apply("mul", a, b.args[0]))
    return None


def _div(g: Graph, a: Node, b: Node) -> Node | None:
    if a.dtype not in FLOATS:
        return a if _is(b, 1) else None
    if b.op == "constant" and b.value != 0 and np.isfinite(b.value):
        mantissa, exponent = np.frexp(b.value)
        if abs(mantissa) == 0.5 and abs(exponent) < 100:  # a power of two has an exact reciprocal
            return g.apply("mul", a, g.constant(1 / b.value, a.dtype))
    return None


def _neg(g: Graph, a: Node) -> Node | None:
    if a.op == "neg":
        return a.args[0]
    return None


def _not(g: Graph, a: Node) -> Node | None:
    return a.args[0] if a.op == "not" else None


def _and(g: Graph, a: Node, b: Node) -> Node | None:
    for x, y in ((a, b), (b, a)):
        if x.op == "constant" and x.dtype == "bool":
            return y if x.value else x
        if _is(x, 0):
            return x
    return a if a is b else None


def _or(g: Graph, a: Node, b: Node) -> Node | None:
    for x, y in ((a, b), (b, a)):
        if x.op == "constant" and x.dtype == "bool":
            return x if x.value else y
        if _is(x, 0):
            return y
    return a if a is b else None


def _xor(g: Graph, a: Node, b: Node) -> Node | None:
    for x, y in ((a, b), (b, a)):
        if x.op == "constant" and x.dtype == "bool":
            return g.apply("not", y) if x.value else y
        if _is(x, 0):
            return y
    return None


def _same(g: Graph, a: Node, b: Node) -> Node | None:
    return a if a is b else None


def _shifted(g: Graph, a: Node, b: Node) -> Node | None:
    return a if _is(b, 0) else None


_SIMPLER: dict[str, Callable[..., Node | None]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "neg": _neg,
    "not": _not,
    "and": _and,
    "or": _or,
    "xor": _xor,
    "max": _same,
    "min": _same,
    "shift_left": _shifted,
    "shift_right_logical": _shifted,
    "shift_right_arithmetic": _shifted,
}
