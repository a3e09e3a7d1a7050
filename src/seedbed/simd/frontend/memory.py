"""Arrays in memory: if an index is only known when the program runs, the elements have addresses.

A state of an array is a node: "pack" (elements, never written), "table" (known numbers), "operand" (an
operand that all examples share), "memory" (a new copy, which may be written), "store" (the state after a
write), "variable" or "result" (an array that a loop carries) or "record" (an array that a loop writes row by
row).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from jax.extend import core

from seedbed.jaxprs import inner_jaxprs
from seedbed.simd.ir.graph import Graph, Loop, Node, is_constant
from seedbed.simd.ir.program import Unsupported

# the most positions that are compared with an index that differs between lanes; beyond, each lane has an
# address of its own (docs/simd.md tells how both were timed)
POSITIONS = 16
# the most elements of a constant, or of an operand that all examples share, that have nodes from the start
LARGE = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class Memory:
    """A state of an array in memory."""

    node: Node
    shape: tuple[int, ...]
    # the loop in whose body it may be written; None: only outside loops, or nowhere
    home: Loop | None

    @property
    def dtype(self) -> str:
        """Data type of the elements."""
        return self.node.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


Value = np.ndarray | Memory
"""An array of nodes, or an array in memory."""


class Tracer(Protocol):
    """The part of the interpreter that reads and writes use."""

    graph: Graph
    around: list[Loop]
    superseded: dict[int, int]

    def elements(self, value: Value) -> Any:
        """Returns the nodes of a value."""
        ...

    def run(self, closed: core.ClosedJaxpr, args: Sequence[Value]) -> list[Value]:
        """Interprets a closed jaxpr and returns its results."""
        ...


Special = Callable[[Any, Any, list[Value]], Sequence[Value]]


def load(g: Graph, state: Node, base: Node, offset: int) -> Node:
    """Returns the element at the flat index `base + offset`. `base` is an int32 node."""
    if is_constant(base):
        offset, base = offset + int(base.value), g.constant(0, "int32")
        if state.op == "pack":
            return state.args[offset]
        if state.op == "table":
            return g.constant(np.frombuffer(state.value[0], state.dtype)[offset], state.dtype)
    uniform = state.uniform and base.uniform
    return g.make("load", (state, base), offset, state.dtype, uniform=uniform)


def table(g: Graph, numbers: np.ndarray) -> Node:
    """Returns the node of an array of known numbers."""
    value = (numbers.tobytes(), numbers.size)
    return g.make("table", (), value, str(numbers.dtype), uniform=True)


def elements(tracer: Tracer, memory: Memory) -> np.ndarray:
    """Returns the nodes of all elements, in the shape of the array."""
    zero = tracer.graph.constant(0, "int32")
    nodes = np.empty(memory.size, object)
    for i in range(memory.size):
        nodes[i] = load(tracer.graph, memory.node, zero, i)
    return nodes.reshape(memory.shape)


def readable(tracer: Tracer, value: Value) -> Memory:
    """Returns a value, of one element or more, as an addressable array.

    If the state has been overwritten since, this is a copy made before the write.
    """
    if isinstance(value, Memory):
        if value.node.id not in tracer.superseded:
            return value
        value = elements(tracer, value)
    g, nodes = tracer.graph, [*value.reshape(-1)]
    dtype = nodes[0].dtype
    if all(is_constant(n) for n in nodes):
        node = table(g, np.array([n.value for n in nodes], dtype))
    else:
        node = g.make("pack", nodes, len(nodes), dtype)
    return Memory(node, value.shape, None)


def writable(tracer: Tracer, value: Value) -> Memory:
    """Returns a state that the loop body being traced may write: the value itself, or a new copy."""
    here = tracer.around[-1] if tracer.around else None
    memory = readable(tracer, value)
    if memory.node.op in ("memory", "store", "variable", "result") and memory.home is here:
        return memory
    loops = frozenset[Loop]() if here is None else frozenset((here,))
    node = tracer.graph.make(
        "memory", (memory.node,), memory.size, memory.dtype, uniform=False, loops=loops
    )
    return Memory(node, memory.shape, here)


def store(tracer: Tracer, memory: Memory, base: Node, offset: int, value: Node) -> Memory:
    """Returns the state after a write at `base + offset`, and marks `memory` as overwritten."""
    if is_constant(base):  # as in `load`
        offset, base = offset + int(base.value), tracer.graph.constant(0, "int32")
    args = (memory.node, base, value)
    node = tracer.graph.make("store", args, offset, memory.dtype, uniform=False)
    tracer.superseded[memory.node.id] = node.id
    return dataclasses.replace(memory, node=node)


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _address(g: Graph, starts: Sequence[Node], strides: Sequence[int]) -> Node:
    total = g.constant(0, "int32")
    for start, stride in zip(starts, strides, strict=True):
        total = g.apply("add", total, g.apply("mul", start, g.constant(stride, "int32")))
    return total


def _clamped(g: Graph, start: Node, last: int) -> Node:
    """Returns an index as int32, clamped to 0..last."""
    if last == 0:
        return g.constant(0, "int32")
    if start.dtype == "uint32":
        start = g.apply("min", start, g.constant(last, "uint32"))
    start = g.convert(start, "int32")
    return g.apply("min", g.constant(last, "int32"), g.apply("max", g.constant(0, "int32"), start))


def _chosen(g: Graph, base: Node, count: int, at: Callable[[int], Node]) -> Node:
    """Returns `at(base)` for a `base` that differs between lanes."""
    chosen = at(0)
    for i in range(1, count):
        chosen = g.select(g.apply("eq", base, g.constant(i, "int32")), at(i), chosen)
    return chosen


def _is_early(tracer: Tracer, memory: Memory, base: Node) -> bool:
    """Returns whether an element can be read before its state is overwritten."""
    if memory.node.id not in tracer.superseded:
        return True
    here, store = tracer.around[-1] if tracer.around else None, tracer.superseded[memory.node.id]
    # the nodes that the index is computed from; only results of loops can depend on the write
    newer = [base]
    while newer:
        node = newer.pop()
        if node.id > store and node.op in ("result", "record"):
            return False
        newer += node.args if node.id > store else ()
    return memory.home is here


def read(tracer: Tracer, value: Value, base: Node, offset: int) -> Node:
    """Returns the element at the flat index `base + offset`; `base` may differ between lanes."""
    g = tracer.graph
    if base.uniform or math.prod(value.shape) - offset > POSITIONS:
        if not (isinstance(value, Memory) and _is_early(tracer, value, base)):
            value = readable(tracer, value)
        return load(g, value.node, base, offset)
    nodes = tracer.elements(value).reshape(-1)
    last = len(nodes) - 1
    return _chosen(g, base, len(nodes) - offset, lambda i: nodes[min(i + offset, last)])


def write(tracer: Tracer, value: Value, base: Node, offset: int, new: Node) -> Value:
    """Returns the array after a write at the flat index `base + offset`; `base` may differ between lanes."""
    g = tracer.graph
    one_address = base.uniform and not (is_constant(base) and not isinstance(value, Memory))
    if one_address or not (base.uniform or math.prod(value.shape) <= POSITIONS):
        return store(tracer, writable(tracer, value), base, offset, new)
    nodes = tracer.elements(value).copy()
    if is_constant(base):
        nodes.flat[int(base.value) + offset] = new
        return nodes
    for i in range(nodes.size):
        hit = g.apply("eq", base, g.constant(i - offset, "int32"))
        nodes.flat[i] = g.select(hit, new, nodes.flat[i])
    return nodes


def _dynamic_slice(tracer: Tracer, equation: Any, args: list[Value]) -> list[Value]:
    operand, g = args[0], tracer.graph
    sizes, shape = equation.params["slice_sizes"], operand.shape
    starts = [
        _clamped(g, tracer.elements(a)[()], whole - size)
        for a, whole, size in zip(args[1:], shape, sizes, strict=True)
    ]
    strides = _strides(shape)
    base = _address(g, starts, strides)
    result = np.empty(sizes, object)
    for place in np.ndindex(*sizes):
        offset = sum(i * s for i, s in zip(place, strides, strict=True))
        result[place] = read(tracer, operand, base, offset)
    return [result]


def _dynamic_update_slice(tracer: Tracer, equation: Any, args: list[Value]) -> list[Value]:
    value, g = args[0], tracer.graph
    update = tracer.elements(args[1])
    starts = [
        _clamped(g, tracer.elements(a)[()], whole - size)
        for a, whole, size in zip(args[2:], value.shape, update.shape, strict=True)
    ]
    strides = _strides(value.shape)
    base = _address(g, starts, strides)
    for place in np.ndindex(*update.shape):
        offset = sum(i * s for i, s in zip(place, strides, strict=True))
        value = write(tracer, value, base, offset, update[place])
    return [value]


def _mode(equation: Any) -> str:
    mode = equation.params["mode"]
    return str(getattr(mode, "name", mode))


def _start(
    g: Graph, indices: Sequence[Node], dims: Sequence[int], lasts: Sequence[int], mode: str
) -> tuple[list[Node], Node]:
    """Returns the index along each dimension, clamped to its bounds, and whether all were in bounds.

    The second is a bool node. It is always True unless the mode is FILL_OR_DROP.
    """
    starts, inside = [g.constant(0, "int32")] * len(lasts), g.constant(True, "bool")
    for index, dim in zip(indices, dims, strict=True):
        starts[dim] = _clamped(g, index, lasts[dim])
        index = g.convert(index, "int32")
        if mode == "FILL_OR_DROP":
            low = g.apply("ge", index, g.constant(0, "int32"))
            high = g.apply("le", index, g.constant(lasts[dim], "int32"))
            inside = g.apply("and", inside, g.apply("and", low, high))
    return starts, inside


def _fill(value: Any, dtype: np.dtype) -> Any:
    """Returns the number that a gather gives beyond an array; `value` None means jax.numpy's default."""
    if value is not None:
        return value
    if dtype.kind == "f":
        return np.nan
    if dtype.kind == "b":
        return True
    return np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max


def _gather(tracer: Tracer, equation: Any, args: list[Value]) -> list[Value]:
    operand, indices = args[0], tracer.elements(args[1])
    params, g = equation.params, tracer.graph
    dims, sizes, shape = params["dimension_numbers"], params["slice_sizes"], operand.shape
    if dims.operand_batching_dims:
        raise Unsupported("gather with batching dimensions has no scalar form: index by one array")
    out_shape = equation.outvars[0].aval.shape
    dropped = [d for d in range(len(shape)) if d not in dims.collapsed_slice_dims]
    batch_dims = [d for d in range(len(out_shape)) if d not in dims.offset_dims]
    lasts = [whole - size for whole, size in zip(shape, sizes, strict=True)]
    strides, result = _strides(shape), np.empty(out_shape, object)
    fill = _fill(params["fill_value"], equation.outvars[0].aval.dtype)
    for place in np.ndindex(*out_shape):
        vector = indices[tuple(place[d] for d in batch_dims)]
        starts, inside = _start(g, vector, dims.start_index_map, lasts, _mode(equation))
        offset = sum(place[d] * strides[k] for d, k in zip(dims.offset_dims, dropped, strict=True))
        node = read(tracer, operand, _address(g, starts, strides), offset)
        result[place] = g.select(inside, node, g.constant(fill, node.dtype))
    return [result]


def _scatter(tracer: Tracer, equation: Any, args: list[Value]) -> list[Value]:
    value, indices, updates = args[0], tracer.elements(args[1]), tracer.elements(args[2])
    g, dims = tracer.graph, equation.params["dimension_numbers"]
    op = {
        "scatter": None,
        "scatter-add": "add",
        "scatter-sub": "sub",
        "scatter-mul": "mul",
        "scatter-min": "min",
        "scatter-max": "max",
    }[equation.primitive.name]
    if op is None and equation.params["update_jaxpr"] is not None:
        raise Unsupported("scatter that applies a function has no scalar form: read, then set")
    if dims.operand_batching_dims:
        raise Unsupported("scatter with batching dimensions has no scalar form: index by one array")
    shape = value.shape
    window = [d for d in range(len(shape)) if d not in dims.inserted_window_dims]
    extent = [1] * len(shape)
    for d, k in zip(dims.update_window_dims, window, strict=True):
        extent[k] = updates.shape[d]
    lasts = [whole - size for whole, size in zip(shape, extent, strict=True)]
    batch_dims = [d for d in range(updates.ndim) if d not in dims.update_window_dims]
    strides = _strides(shape)
    for place in np.ndindex(*updates.shape):
        vector = indices[tuple(place[d] for d in batch_dims)]
        starts, inside = _start(
            g, vector, dims.scatter_dims_to_operand_dims, lasts, _mode(equation)
        )
        base = _address(g, starts, strides)
        offset = sum(
            place[d] * strides[k] for d, k in zip(dims.update_window_dims, window, strict=True)
        )
        new, old = updates[place], None
        if op is not None or not (is_constant(inside) and inside.value):
            old = read(tracer, value, base, offset)
            new = new if op is None else g.apply(op, old, new)
            new = g.select(inside, new, old)
        value = write(tracer, value, base, offset, new)
    return [value]


INDEXED: dict[str, Special] = {
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scatter-sub": _scatter,
    "scatter-mul": _scatter,
    "scatter-min": _scatter,
    "scatter-max": _scatter,
}


def indexed_variables(jaxpr: Any) -> set[Any]:
    """Returns the variables of a jaxpr that are indexed by a non-literal, also after indexed writes."""
    found: set[Any] = set()
    for equation in reversed(jaxpr.eqns):
        if equation.primitive.name in INDEXED and not isinstance(equation.invars[0], core.Literal):
            dynamic = any(not isinstance(atom, core.Literal) for atom in _places(equation))
            if dynamic or any(result in found for result in equation.outvars):
                found.add(equation.invars[0])
        for inner, atoms, results in inner_jaxprs(equation):
            inside = indexed_variables(inner)
            pairs = zip(inner.outvars, results, strict=False)
            outputs = {v: r for v, r in pairs if not isinstance(v, core.Literal)}
            for variable, atom in zip(inner.invars, atoms, strict=True):
                if isinstance(atom, core.Literal):
                    continue
                if variable in inside or outputs.get(variable) in found:
                    found.add(atom)
    return found


def _places(equation: Any) -> Sequence[Any]:
    """Returns the operands of an indexing operation that hold the indices."""
    name, operands = equation.primitive.name, equation.invars
    if name.startswith("scatter"):
        return operands[1:2]
    return operands[2:] if name == "dynamic_update_slice" else operands[1:]
