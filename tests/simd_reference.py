"""An evaluator of programs in numpy, for all examples at once: the reference in tests.

float32 programs run in float32 without fused multiply-adds. Programs traced in float64 run in float64;
numpy and Python compute their elementary functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from seedbed.simd.ir.arithmetic import convert, numpy_operation
from seedbed.simd.ir.graph import Loop, LoopCarry, Node, Record
from seedbed.simd.ir.program import Program


def evaluate(program: Program, operands: Sequence[Any]) -> list[np.ndarray]:
    """Returns the results `[B, ...]` for operands `[B, ...]`; shared operands have no axis B.

    If all operands are shared, B is 1. Raises ValueError if the operands differ in B.
    """
    arrays = [np.asarray(o) for o in operands]
    sizes = {len(a) for a, o in zip(arrays, program.inputs, strict=True) if not o.shared}
    if len(sizes) > 1:
        raise ValueError(f"the operands' batches differ in size: {sorted(sizes)}")
    batch = sizes.pop() if sizes else 1
    with np.errstate(all="ignore"):
        values = _Evaluation(program, arrays).run()
    results = []
    for operand in program.outputs:
        columns = [np.broadcast_to(values[n], (batch,)) for n in operand.nodes.reshape(-1)]
        stacked = np.stack(columns, -1) if columns else np.empty((batch, 0))
        results.append(stacked.astype(operand.dtype).reshape(batch, *operand.shape))
    return results


class _Evaluation:
    """One evaluation of a program, with the values of its nodes.

    A number is `[B]` and an array in memory `[size, B]`; if all examples share it, `[]` and `[size]`.
    """

    def __init__(self, program: Program, arrays: Sequence[np.ndarray]) -> None:
        self._loops = program.graph.loops
        self._inputs = [
            a.reshape(-1) if o.shared else a.reshape(len(a), math.prod(o.shape)).T
            for a, o in zip(arrays, program.inputs, strict=True)
        ]
        self._values: dict[Node, Any] = {}
        self._outputs = [n for o in program.outputs for n in o.nodes.reshape(-1)]
        # the carries and records that the results need
        self._carries: dict[Loop, dict[int, LoopCarry]] = {}
        self._records: dict[Loop, dict[int, Record]] = {}
        live = self._mark(self._outputs)
        # a node is made after all nodes that it reads, so the order of their numbers is a valid one
        self._bodies: dict[Loop | None, list[Node]] = {}
        self._results: dict[Loop, list[Node]] = {}
        for node in sorted(live, key=lambda n: n.id):
            home = max(node.loops, key=lambda loop: loop.depth, default=None)
            self._bodies.setdefault(home, []).append(node)
            if node.op == "result":
                self._results.setdefault(self._loops[node.value[0]], []).append(node)

    def run(self) -> dict[Node, Any]:
        self._compute(self._bodies.get(None, []), np.True_)
        return self._values

    def _mark(self, roots: Iterable[Node]) -> set[Node]:
        """Returns the nodes that the roots need, also inside loops, and notes the carries and records."""
        live, waiting = set[Node](), [*roots]
        while waiting:
            node = waiting.pop()
            if node in live:
                continue
            live.add(node)
            waiting += node.args
            if node.op not in ("variable", "result", "record"):
                continue
            loop, k = self._loops[node.value[0]], node.value[1]
            carries = self._carries.setdefault(loop, {})
            records = self._records.setdefault(loop, {})
            waiting += [loop.condition] if loop.condition is not None else []
            if node.op == "record":
                records[k] = loop.records[k]
                waiting += records[k].values
            else:
                carries[k] = loop.carries[k]
                waiting += [carries[k].variable, carries[k].init, carries[k].final]
        return live

    def _needed(self, root: Node) -> set[Node]:
        """Returns the nodes that a loop's condition needs in each iteration."""
        needed, waiting = set[Node](), [root]
        while waiting:
            node = waiting.pop()
            if node in needed:
                continue
            needed.add(node)
            waiting += node.args
            if node.op in ("result", "record"):
                inner = self._loops[node.value[0]]
                waiting += [n for c in self._carries[inner].values() for n in (c.init, c.final)]
                waiting += [n for r in self._records[inner].values() for n in r.values]
                waiting += [inner.condition] if inner.condition is not None else []
        return needed

    def _compute(self, nodes: Sequence[Node], active: Any) -> None:
        """Computes nodes in order; `active` is a mask of the examples that still run."""
        finished = set[Loop]()
        for node in nodes:
            if node.op in ("variable", "index"):
                continue
            if node.op in ("result", "record"):
                loop = self._loops[node.value[0]]
                if loop not in finished:
                    finished.add(loop)
                    self._run_loop(loop, active)
                continue
            self._values[node] = self._operation(node)

    def _run_loop(self, loop: Loop, active: Any) -> None:
        values, carries = self._values, self._carries[loop]
        for carry in carries.values():
            values[carry.variable] = values[carry.init]
        if loop.length is None:
            self._run_while(loop, active)
        else:
            self._run_counted(loop, loop.length, active)
        for node in self._results.get(loop, ()):
            values[node] = values[carries[node.value[1]].variable]

    def _run_counted(self, loop: Loop, length: int, active: Any) -> None:
        values, carries, records = self._values, self._carries[loop], self._records[loop]
        rows: dict[int, list[list[Any]]] = {k: [[]] * length for k in records}
        order = range(length)
        for i in reversed(order) if loop.reverse else order:
            for node in self._bodies.get(loop, []):
                if node.op == "index":
                    values[node] = np.int32(i)
            self._compute(self._bodies.get(loop, []), active)
            for k, record in records.items():
                rows[k][i] = [values[n] for n in record.values]
            finals = [values[c.final] for c in carries.values()]
            for carry, final in zip(carries.values(), finals, strict=True):
                values[carry.variable] = final
        for k, record in records.items():
            values[record.array] = _stack([x for row in rows[k] for x in row])

    def _run_while(self, loop: Loop, active: Any) -> None:
        """Runs a while loop until all examples have stopped. An example that has stopped keeps its values."""
        values, carries, condition = self._values, self._carries[loop], loop.condition
        assert condition is not None
        body, first = self._bodies.get(loop, []), self._needed(condition)
        before, after = [n for n in body if n in first], [n for n in body if n not in first]
        while True:
            self._compute(before, active)
            going = np.logical_and(active, values[condition])
            if not going.any():
                return
            self._compute(after, going)
            finals = [values[c.final] for c in carries.values()]
            for carry, final in zip(carries.values(), finals, strict=True):
                old, wide = values[carry.variable], going
                if carry.size is not None:
                    old, final, wide = _columns(old), _columns(final), going.reshape(1, -1)
                values[carry.variable] = np.where(wide, final, old)

    def _operation(self, node: Node) -> Any:
        args = [self._values[a] for a in node.args]
        op = node.op
        if op == "constant":
            return node.value
        if op == "input":
            operand, element = node.value
            return self._inputs[operand][element]
        if op == "select":
            return np.where(*args)
        if op == "convert":
            return convert(args[0], node.dtype)
        if op == "bitcast":
            return np.ascontiguousarray(args[0]).view(node.dtype).reshape(np.shape(args[0]))
        if op == "pack":
            return _stack(args)
        if op == "operand":
            return np.asarray(self._inputs[node.value[0]])
        if op == "table":
            return np.frombuffer(node.value[0], node.dtype)
        if op == "memory":
            return args[0]
        if op == "load":
            if np.ndim(args[1]) == 0:
                return args[0][int(args[1]) + node.value]
            places = args[1] + node.value
            return args[0][places] if args[0].ndim == 1 else args[0][places, np.arange(len(places))]
        if op == "store":
            return _stored(args[0], args[1] + node.value, args[2])
        if op == "rem" and node.dtype not in ("float32", "float64"):
            return np.where(args[1] == 0, args[0], numpy_operation("rem")(*args))
        return (_FUNCTIONS.get(op) or numpy_operation(op))(*args)


def _stack(elements: Sequence[Any]) -> np.ndarray:
    return np.stack(np.broadcast_arrays(*elements)) if elements else np.empty(0)


def _columns(array: np.ndarray) -> np.ndarray:
    """Returns an array `[size, B]` as it is, and one that all examples share as `[size, 1]`."""
    return array if array.ndim == 2 else array[:, None]


def _stored(array: np.ndarray, index: Any, value: Any) -> np.ndarray:
    """Returns a copy of an array in which element `index` is `value`; each example may have its own index."""
    rows = [len(x) for x in (index, value) if np.ndim(x)]
    if array.ndim == 1 and rows:
        array = np.broadcast_to(array[:, None], (len(array), rows[0]))
    array = array.copy()
    if np.ndim(index):
        array[index, np.arange(len(index))] = value
    else:
        array[int(index)] = value
    return array


def _by_element(function: Callable[[float], float]) -> Callable[[Any], np.ndarray]:
    def apply(x: Any) -> np.ndarray:
        return np.vectorize(function, otypes=[np.float64])(x)

    return apply


def _erf_inv(y: Any) -> Any:
    """Computes the inverse of erf: solves erfc(x) = 1 - |y| by four steps of Halley's method.

    The start is S. Winitzki's approximation (2008).
    """
    rest = 1 - np.abs(y)
    log = np.log(rest * (2 - rest))
    a = 2 / (math.pi * 0.147) + log / 2
    x = np.sqrt(np.sqrt(a * a - log / 0.147) - a)
    for _ in range(4):
        error = (_FUNCTIONS["erfc"](x) - rest) * (math.sqrt(math.pi) / 2) * np.exp(x * x)
        x = x + error / (1 + error * x)
    return np.where(rest == 0, np.sign(y) * np.inf, np.where(y == 0, y, np.copysign(x, y)))


# The elementary functions of float64, each of which is one node.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in ("exp", "exp2", "expm1", "log", "log1p", "nextafter")},
    **{name: getattr(np, name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "cbrt")},
    **{name: getattr(np, name) for name in ("asin", "acos", "atan", "atan2")},
    **{name: getattr(np, name) for name in ("asinh", "acosh", "atanh", "pow")},
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "erf": _by_element(math.erf),
    "erfc": _by_element(math.erfc),
    "erf_inv": _erf_inv,
}
