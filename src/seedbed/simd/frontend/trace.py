"""Translation of the jaxpr of one example to a scalar graph.

Every array becomes a numpy array of nodes, or an array in memory if it is indexed at run time. A
primitive that only moves elements is run by numpy on the array of nodes.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from seedbed.jaxprs import CALLS, called, interpret
from seedbed.simd.frontend import control, memory
from seedbed.simd.frontend.keys import without_keys
from seedbed.simd.frontend.memory import Memory, Value
from seedbed.simd.frontend.rules import RULES
from seedbed.simd.ir.graph import Graph, GraphTooLarge, Loop
from seedbed.simd.ir.program import Operand, Program, Unsupported

LIMIT = 400_000
"""Most nodes (scalar operations, constants and inputs) in the graph of one function."""


def trace(closed: Any, shared: Sequence[bool], *, limit: int | None = None) -> Program:
    """Turns a closed jaxpr into a program. Random keys become their data.

    Raises Unsupported if an operation has no scalar form, or if the graph is larger than `limit` nodes (by
    default LIMIT). The message names the primitive, or the lines that made the most nodes.
    """
    limit = LIMIT if limit is None else limit
    tracer = Tracer(Graph(limit))
    try:
        # A kernel is of one example: where it is lowered inside shard_map, JAX would put reshards into it.
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            return _program(tracer, without_keys(closed), shared)
    except GraphTooLarge:
        raise Unsupported(tracer.explain(limit)) from None


_NO_MESH = jax.sharding.AbstractMesh((), ())


def _program(tracer: Tracer, closed: Any, shared: Sequence[bool]) -> Program:
    inputs, values = [], list[Value]()
    for position, (variable, is_shared) in enumerate(zip(closed.jaxpr.invars, shared, strict=True)):
        shape, dtype = variable.aval.shape, str(variable.aval.dtype)
        value = _operand(tracer.graph, position, variable.aval, shared=is_shared)
        values.append(value)
        in_memory = isinstance(value, Memory)
        nodes = np.broadcast_to(np.array(value.node, object), shape) if in_memory else value
        inputs.append(Operand(shape, dtype, is_shared, nodes))
    results = tracer.run(closed, values)
    outputs = []
    for variable, value in zip(closed.jaxpr.outvars, results, strict=True):
        nodes = tracer.elements(value)
        # a kernel writes exactly the elements that XLA expects
        assert nodes.shape == variable.aval.shape
        outputs.append(Operand(nodes.shape, str(variable.aval.dtype), False, nodes))
    return Program(tracer.graph, tuple(inputs), tuple(outputs))


def _operand(graph: Graph, position: int, aval: Any, *, shared: bool) -> Value:
    """Returns the value of an operand: a large one that all examples share is an array in memory.

    A bool has another form outside of a kernel, so it has nodes.
    """
    dtype, size = str(aval.dtype), math.prod(aval.shape)
    if shared and size > memory.LARGE and dtype != "bool":
        node = graph.make("operand", (), (position, size), dtype, uniform=True)
        return Memory(node, aval.shape, None)
    nodes = np.empty(aval.shape, object)
    for i in range(nodes.size):
        nodes.flat[i] = graph.make("input", (), (position, i), dtype, uniform=shared)
    return nodes


class Tracer:
    """An interpreter of jaxprs over arrays of nodes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        # the loops whose bodies are being traced, outermost first
        self.around: list[Loop] = []
        # node id of each overwritten state of memory -> node id of the store that overwrote it
        self.superseded: dict[int, int] = {}
        # equations, and how many nodes each made
        self._made: list[tuple[Any, int]] = []

    def run(self, closed: core.ClosedJaxpr, args: Sequence[Value]) -> list[Value]:
        """Interprets a closed jaxpr and returns its results."""
        return interpret(
            closed, args, self._count, lambda value, aval: self.lift(value, aval.dtype)
        )

    def _count(self, equation: Any, args: list[Value]) -> Sequence[Value]:
        """Interprets an equation, and notes how many nodes it made."""
        before = len(self.graph.nodes)
        results = self.apply(equation, args)
        if equation.primitive.name not in (*CALLS, *control.CONTROL):
            self._made.append((equation, len(self.graph.nodes) - before))
        return results

    def apply(self, equation: Any, args: list[Value]) -> Sequence[Value]:
        """Interprets one equation and returns its results. Raises Unsupported if it has no scalar form."""
        name = equation.primitive.name
        special = _SPECIAL.get(name) or control.CONTROL.get(name) or memory.INDEXED.get(name)
        if special is not None:
            return special(self, equation, args)
        if (inner := called(equation)) is not None:
            return self.run(inner, args)
        arrays = [self.elements(a) for a in args]
        if name in RULES:
            return [self.elementwise(name, equation.params, arrays)]
        if name in _MOVES:
            return [_MOVES[name](equation, *arrays)]
        if name in _REDUCTIONS:
            return [self.reduce(_REDUCTIONS[name], equation, arrays[0])]
        raise Unsupported(f"no scalar form of {name!r} is known ({_where(equation)})")

    def lift(self, constant: Any, dtype: Any) -> Value:
        """Returns a known array, converted to `dtype`: constant nodes, or a table if it is large."""
        if dtype == jax.dtypes.float0:
            # The tangent of an integer, which has no number and which nothing reads.
            dtype, constant = np.bool_, np.zeros(np.shape(constant), bool)
        array = np.asarray(constant).astype(dtype)
        if array.size > memory.LARGE:
            return Memory(memory.table(self.graph, array), array.shape, None)
        nodes = np.empty(array.shape, object)
        for i, number in enumerate(array.reshape(-1)):
            nodes.flat[i] = self.graph.constant(number, str(array.dtype))
        return nodes

    def elements(self, value: Value) -> Any:
        """Returns the nodes of a value; an array in memory is read element by element."""
        return memory.elements(self, value) if isinstance(value, Memory) else value

    def elementwise(self, name: str, params: dict[str, Any], arrays: list[np.ndarray]) -> Any:
        """Applies the rule of a primitive element by element; the arrays are broadcast as in numpy."""
        rule, graph, (shape, *others) = RULES[name], self.graph, {a.shape for a in arrays}
        if others:
            shape = np.broadcast_shapes(shape, *others)
            arrays = [np.broadcast_to(a, shape) for a in arrays]
        result = np.empty(shape, object)
        flat = (a.reshape(-1).tolist() for a in arrays)
        for i, nodes in enumerate(zip(*flat, strict=True)):
            result.flat[i] = rule(graph, params, nodes)
        return result

    def reduce(self, op: str, equation: Any, array: np.ndarray) -> np.ndarray:
        """Reduces the equation's axes by the operation `op`, from the first element to the last."""
        axes = equation.params["axes"]
        kept = [i for i in range(array.ndim) if i not in axes]
        shape = tuple(array.shape[i] for i in kept)
        length = math.prod(array.shape[i] for i in axes)
        rows = array.transpose(*kept, *axes).reshape(math.prod(shape), length)
        result = np.empty(len(rows), object)
        dtype = equation.outvars[0].aval.dtype
        for i, row in enumerate(rows):
            total = row[0] if len(row) else self.graph.constant(_start(op, dtype), str(dtype))
            for node in row[1:]:
                total = RULES[op](self.graph, {}, (total, node))
            result[i] = total
        return result.reshape(shape)

    def explain(self, limit: int) -> str:
        """Returns a message that names the three source lines that made the most nodes."""
        made: collections.Counter[str] = collections.Counter()
        for equation, count in self._made:
            made[_where(equation)] += count
        most = ", ".join(f"{where} ({count})" for where, count in made.most_common(3))
        return (
            f"the function has more than {limit} scalar values; most come from "
            f"{most or 'its arguments'}: "
            "loops over tables (lax.scan, lax.fori_loop) keep it small, unrolled ones do not"
        )


def _start(op: str, dtype: np.dtype) -> Any:
    """Returns the neutral element of an operation, which is the reduction of no elements."""
    if op in ("add", "or", "xor"):
        return 0
    if op == "mul":
        return 1
    if op == "and":
        return np.bitwise_not(dtype.type(0))
    if dtype.kind == "b":
        return op == "min"
    limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    if dtype.kind == "f":
        return -np.inf if op == "max" else np.inf
    return limits.min if op == "max" else limits.max


def _where(equation: Any) -> str:
    frame = equation.source_info.traceback
    if frame is None:
        return equation.primitive.name
    for entry in frame.frames:
        if "/jax/" not in entry.file_name and not entry.file_name.endswith("frontend/trace.py"):
            return f"{entry.file_name}:{entry.line_num}"
    return equation.primitive.name


def _broadcast(equation: Any, array: np.ndarray) -> np.ndarray:
    shape, dims = equation.params["shape"], equation.params["broadcast_dimensions"]
    wide = [1] * len(shape)
    for size, dim in zip(array.shape, dims, strict=True):
        wide[dim] = size
    return np.broadcast_to(array.reshape(wide), shape)


def _slice(equation: Any, array: np.ndarray) -> np.ndarray:
    params = equation.params
    strides = params["strides"] or (1,) * array.ndim
    return array[
        tuple(
            slice(a, b, s)
            for a, b, s in zip(
                params["start_indices"], params["limit_indices"], strides, strict=True
            )
        )
    ]


def _pad(equation: Any, array: np.ndarray, value: np.ndarray) -> np.ndarray:
    result = np.empty(equation.outvars[0].aval.shape, object)
    result[...] = value[()]
    where, what = [], []
    for (low, _, inner), size, out in zip(
        equation.params["padding_config"], array.shape, result.shape, strict=True
    ):
        places = [low + i * (inner + 1) for i in range(size)]
        what.append([i for i, place in enumerate(places) if 0 <= place < out])
        where.append([place for place in places if 0 <= place < out])
    result[np.ix_(*where)] = array[np.ix_(*what)]
    return result


_MOVES: dict[str, Callable[..., np.ndarray]] = {
    "reshape": lambda e, a: a.reshape(e.params["new_sizes"]),
    "squeeze": lambda e, a: a.reshape(e.outvars[0].aval.shape),
    "expand_dims": lambda e, a: a.reshape(e.outvars[0].aval.shape),
    "broadcast_in_dim": _broadcast,
    "transpose": lambda e, a: a.transpose(e.params["permutation"]),
    "slice": _slice,
    "concatenate": lambda e, *a: np.concatenate(a, e.params["dimension"]),
    "stack": lambda e, *a: np.stack(a, e.params["axis"]),
    "tile": lambda e, a: np.tile(a, e.params["reps"]),
    "rev": lambda e, a: np.flip(a, e.params["dimensions"]),
    "pad": _pad,
}

_REDUCTIONS = {
    "reduce_sum": "add",
    "reduce_prod": "mul",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
}


def _iota(tracer: Tracer, equation: Any, args: list[Value]) -> list[Value]:
    params = equation.params
    shape, dim = params["shape"], params["dimension"]
    wide = [1] * len(shape)
    wide[dim] = shape[dim]
    numbers = np.arange(shape[dim]).astype(params["dtype"]).reshape(wide)
    return [tracer.lift(np.broadcast_to(numbers, shape), params["dtype"])]


def _split(tracer: Tracer, equation: Any, args: list[Value]) -> list[Value]:
    ends = np.cumsum(equation.params["sizes"])[:-1]
    return list(np.split(tracer.elements(args[0]), ends, equation.params["axis"]))


def _dot(tracer: Tracer, equation: Any, args: list[Value]) -> list[Value]:
    """Computes dot_general; each result adds its products in the order of the contracted elements."""
    g = tracer.graph
    (contract_a, contract_b), (batch_a, batch_b) = equation.params["dimension_numbers"]
    if isinstance(args[1], Memory) and not batch_b and len(args[1].shape) == len(contract_b) + 1:
        return tracer.run(_column_by_column(equation), args)
    a, b = (tracer.elements(x) for x in args)
    free_a = [i for i in range(a.ndim) if i not in (*contract_a, *batch_a)]
    free_b = [i for i in range(b.ndim) if i not in (*contract_b, *batch_b)]

    def rows(x: np.ndarray, groups: Sequence[Sequence[int]]) -> np.ndarray:
        sizes = [math.prod(x.shape[i] for i in group) for group in groups]
        return x.transpose([i for group in groups for i in group]).reshape(sizes)

    left = rows(a, (batch_a, free_a, contract_a))
    right = rows(b, (batch_b, free_b, contract_b))
    result = np.empty((left.shape[0], left.shape[1], right.shape[1]), object)
    dtype = str(equation.outvars[0].aval.dtype)
    add, multiply = ("or", "and") if dtype == "bool" else ("add", "mul")
    for n, i, j in np.ndindex(*result.shape):
        total = g.constant(0, dtype)
        for x, y in zip(left[n, i], right[n, j], strict=True):
            product = g.apply(multiply, g.convert(x, dtype), g.convert(y, dtype))
            total = g.apply(add, total, product)
        result[n, i, j] = total
    return [result.reshape(equation.outvars[0].aval.shape)]


def _column_by_column(equation: Any) -> core.ClosedJaxpr:
    """Returns the jaxpr of a dot_general as a loop over the only free axis of its right operand."""
    contract_a, contract_b = equation.params["dimension_numbers"][0]
    wanted = equation.outvars[0].aval.dtype
    left, right = (variable.aval for variable in equation.invars)
    (free,) = {*range(right.ndim)} - {*contract_b}
    rest = [i - (free < i) for i in contract_b]

    def columns(a: jax.Array, b: jax.Array) -> jax.Array:
        def column(_: None, j: jax.Array) -> tuple[None, jax.Array]:
            picked = jax.lax.dynamic_index_in_dim(b, j, free, keepdims=False)
            dims = ((contract_a, rest), ((), ()))
            return None, jax.lax.dot_general(a, picked, dims, preferred_element_type=wanted)

        _, made = jax.lax.scan(column, None, jnp.arange(right.shape[free]))
        return jnp.moveaxis(made, 0, -1)

    return jax.make_jaxpr(columns)(left, right)


def _argument(tracer: Tracer, equation: Any, args: list[Value]) -> list[Value]:
    """Computes argmax or argmin: the index of the first NaN, or else of the first extreme element."""
    g, op = tracer.graph, "gt" if equation.primitive.name == "argmax" else "lt"
    (axis,) = equation.params["axes"]
    array = np.moveaxis(tracer.elements(args[0]), axis, -1)
    dtype = str(np.dtype(equation.params["index_dtype"]))
    result = np.empty(array.shape[:-1], object)
    for place in np.ndindex(*result.shape):
        best, where = array[place][0], g.constant(0, dtype)
        for i, node in enumerate(array[place][1:], 1):
            known = g.apply("eq", best, best)
            better = g.apply("or", g.apply(op, node, best), g.apply("ne", node, node))
            better = g.apply("and", better, known)
            best = g.select(better, node, best)
            where = g.select(better, g.constant(i, dtype), where)
        result[place] = where
    return [result]


def _cumulative(op: str) -> Callable[[Tracer, Any, list[Value]], list[Value]]:
    def run(tracer: Tracer, equation: Any, args: list[Value]) -> list[Value]:
        array = np.moveaxis(tracer.elements(args[0]), equation.params["axis"], 0).copy()
        order = list(range(len(array)))
        if equation.params["reverse"]:
            order.reverse()
        for before, i in itertools.pairwise(order):
            for place in np.ndindex(*array.shape[1:]):
                array[(i, *place)] = tracer.graph.apply(
                    op, array[(before, *place)], array[(i, *place)]
                )
        return [np.moveaxis(array, 0, equation.params["axis"])]

    return run


def _unstack(tracer: Tracer, equation: Any, args: list[Value]) -> list[Value]:
    array = np.moveaxis(tracer.elements(args[0]), equation.params["axis"], 0)
    return [np.asarray(row, object) for row in array]


def _empty(tracer: Tracer, equation: Any, args: list[Value]) -> list[Value]:
    """Makes what a branch that is not taken leaves of a derivative: nobody reads it."""
    dtype = equation.params["dtype"]
    return [tracer.lift(np.zeros((), dtype), dtype)]


def _barrier(tracer: Tracer, equation: Any, args: list[Value]) -> list[Value]:
    return args


_SPECIAL: dict[str, Callable[[Tracer, Any, list[Value]], Sequence[Value]]] = {
    "iota": _iota,
    "empty2": _empty,
    "split": _split,
    "unstack": _unstack,
    "optimization_barrier": _barrier,
    "name": _barrier,
    "dot_general": _dot,
    "argmax": _argument,
    "argmin": _argument,
    "cumsum": _cumulative("add"),
    "cumprod": _cumulative("mul"),
    "cummax": _cumulative("max"),
    "cummin": _cumulative("min"),
}
