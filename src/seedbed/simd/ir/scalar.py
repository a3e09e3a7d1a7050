"""Arithmetic on nodes, written as formulas: `x * y + 1.0` makes the nodes of that formula."""

from __future__ import annotations

from collections.abc import Sequence

from seedbed.simd.ir.graph import Graph, Node


class Scalar:
    """A node with its graph. A Python number in an operation with it takes its type."""

    __slots__ = ("graph", "node")

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node

    @property
    def dtype(self) -> str:
        """Data type of the number."""
        return self.node.dtype

    def like(self, number: Number) -> Scalar:
        """Returns a Python number as a constant of this one's type; a Scalar is returned as it is."""
        if isinstance(number, Scalar):
            return number
        return Scalar(self.graph, self.graph.constant(number, self.dtype))

    def apply(self, op: str, *others: Number) -> Scalar:
        """Returns the result of the graph operation `op` on this number and others."""
        nodes = [self.like(other).node for other in others]
        return Scalar(self.graph, self.graph.apply(op, self.node, *nodes))

    def to(self, dtype: str) -> Scalar:
        """Returns this number converted to another type."""
        return Scalar(self.graph, self.graph.convert(self.node, dtype))

    def bits(self, dtype: str = "int32") -> Scalar:
        """Returns the 32 bits of this number, read as another type."""
        return Scalar(self.graph, self.graph.bitcast(self.node, dtype))

    def where(self, true: Number, false: Number) -> Scalar:
        """Returns `true` if this bool holds, else `false`; at least one of them must be a Scalar."""
        kind = true if isinstance(true, Scalar) else false
        assert isinstance(kind, Scalar)
        chosen = self.graph.select(self.node, kind.like(true).node, kind.like(false).node)
        return Scalar(self.graph, chosen)

    def clamp(self, low: float, high: float) -> Scalar:
        """Returns this number limited to low..high; NaN stays NaN."""
        return self.apply("max", low).apply("min", high)

    def __add__(self, other: Number) -> Scalar:
        return self.apply("add", other)

    def __sub__(self, other: Number) -> Scalar:
        return self.apply("sub", other)

    def __rsub__(self, other: float) -> Scalar:
        return self.like(other).apply("sub", self)

    def __mul__(self, other: Number) -> Scalar:
        return self.apply("mul", other)

    def __rmul__(self, other: float) -> Scalar:
        return self.like(other).apply("mul", self)

    def __truediv__(self, other: Number) -> Scalar:
        return self.apply("div", other)

    def __rtruediv__(self, other: float) -> Scalar:
        return self.like(other).apply("div", self)

    def __neg__(self) -> Scalar:
        return self.apply("neg")

    def __abs__(self) -> Scalar:
        return self.apply("abs")

    def __and__(self, other: Number) -> Scalar:
        return self.apply("and", other)

    def __or__(self, other: Number) -> Scalar:
        return self.apply("or", other)

    def __xor__(self, other: Number) -> Scalar:
        return self.apply("xor", other)

    def __invert__(self) -> Scalar:
        return self.apply("not")

    def __lshift__(self, other: Number) -> Scalar:
        return self.apply("shift_left", other)

    def shift_right(self, places: int) -> Scalar:
        """Returns the bits shifted right, with zeros from the left."""
        return self.apply("shift_right_logical", places)

    def __lt__(self, other: Number) -> Scalar:
        return self.apply("lt", other)

    def __le__(self, other: Number) -> Scalar:
        return self.apply("le", other)

    def __gt__(self, other: Number) -> Scalar:
        return self.apply("gt", other)

    def __ge__(self, other: Number) -> Scalar:
        return self.apply("ge", other)

    def equals(self, other: Number) -> Scalar:
        """Returns the bool `self == other` of the graph; the operator `==` keeps Python's meaning."""
        return self.apply("eq", other)

    def differs(self, other: Number) -> Scalar:
        """Returns the bool `self != other` of the graph; the operator `!=` keeps Python's meaning."""
        return self.apply("ne", other)


Number = Scalar | float


def polynomial(x: Scalar, coefficients: Sequence[float]) -> Scalar:
    """Evaluates c0 + c1 x + c2 x^2 + ... by Horner's rule, which fits fused multiply-adds."""
    total = x.like(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def copysign(magnitude: Scalar, sign: Scalar) -> Scalar:
    """Returns `magnitude`, whose sign bit must be 0, with the sign bit of `sign`. Both are float32."""
    return (magnitude.bits() | (sign.bits() & -0x80000000)).bits("float32")
