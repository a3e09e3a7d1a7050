"""Traces the control flow of jaxprs: loops stay loops, unless they are tiny; all branches run."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from seedbed.jaxprs import count_equations, inner_jaxprs, scan_parts
from seedbed.simd.frontend.memory import (
    Memory,
    Special,
    Tracer,
    Value,
    indexed_variables,
    load,
    readable,
)
from seedbed.simd.ir.graph import Graph, Loop, LoopCarry, Node, Record, innermost, is_constant

TINY = 48
"""Most equations that an unrolled scan may become: its length times the equations of its body."""


def uniform_results(jaxpr: Any, uniform: Sequence[bool]) -> list[bool]:
    """Returns for each result whether it is the same for all examples; `uniform` says so of the arguments."""
    known = dict(zip(jaxpr.invars, uniform, strict=True))
    known.update(dict.fromkeys(jaxpr.constvars, True))

    def read(atom: Any) -> bool:
        return isinstance(atom, core.Literal) or known[atom]

    for equation in jaxpr.eqns:
        given = [read(a) for a in equation.invars]
        params, name = equation.params, equation.primitive.name
        if name == "scan":
            results = _uniform_scan(equation, given)
        elif name == "while":
            results = _uniform_while(params, given)
        elif name == "cond":
            each = [uniform_results(b.jaxpr, given[1:]) for b in params["branches"]]
            results = [given[0] and all(r) for r in zip(*each, strict=True)]
        elif inner := inner_jaxprs(equation):
            results = uniform_results(inner[0][0], given)
        else:
            results = [all(given)] * len(equation.outvars)
        known.update(zip(equation.outvars, results, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _uniform_scan(equation: Any, given: list[bool]) -> list[bool]:
    body, (consts, count) = equation.params["jaxpr"].jaxpr, scan_parts(equation)
    carry = given[consts : consts + count]
    while True:
        args = [*given[:consts], *carry, *given[consts + count :]]
        results = uniform_results(body, args)
        after = [a and b for a, b in zip(carry, results[:count], strict=True)]
        if after == carry:
            return [*carry, *results[count:]]
        carry = after


def _uniform_while(params: Any, given: list[bool]) -> list[bool]:
    cond, body = params["cond_nconsts"], params["body_nconsts"]
    carry = given[cond + body :]
    while True:
        goes_on = uniform_results(params["cond_jaxpr"].jaxpr, [*given[:cond], *carry])[0]
        results = uniform_results(params["body_jaxpr"].jaxpr, [*given[cond : cond + body], *carry])
        after = [goes_on and a and b for a, b in zip(carry, results, strict=True)]
        if after == carry:
            return carry
        carry = after


def _is_uniform(value: Value) -> bool:
    if isinstance(value, Memory):
        return value.node.uniform
    return all(node.uniform for node in value.reshape(-1))


class _LoopTrace:
    """A loop whose body is being traced."""

    def __init__(self, tracer: Tracer, length: int | None, reverse: bool) -> None:
        g = tracer.graph
        self._tracer = tracer
        self.loop = Loop(len(g.loops), len(tracer.around) + 1, length, reverse)
        g.loops.append(self.loop)
        self._inside = frozenset((self.loop,))
        # Carries as the body reads them, and the nodes of their initial values.
        self._values: list[tuple[Value, list[Node]]] = []
        self._index = g.make(
            "index", (), (self.loop.number,), "int32", uniform=True, loops=self._inside
        )

    def carry(self, init: Value, *, uniform: bool, indexed: bool) -> Value:
        """Adds a carry that starts as `init`; returns the value that the body reads.

        It is an array in memory if the body indexes it or `init` is one, and then it is never uniform.
        """
        count = sum(len(nodes) for _, nodes in self._values)
        if (indexed and init.size) or isinstance(init, Memory):
            memory = readable(self._tracer, init)
            node = self._variable(count, memory.dtype, uniform=False)
            # A while loop masks its carries at the end of its body: the body must not overwrite them.
            home = self.loop if self.loop.length is not None else None
            value: Value = Memory(node, memory.shape, home)
            inits = [memory.node]
        else:
            inits = [*init.reshape(-1)]
            value = np.empty(init.shape, object)
            for i, node in enumerate(inits):
                value.flat[i] = self._variable(count + i, node.dtype, uniform=uniform)
        self._values.append((value, inits))
        return value

    def _variable(self, k: int, dtype: str, *, uniform: bool) -> Node:
        value = (self.loop.number, k)
        return self._tracer.graph.make(
            "variable", (), value, dtype, uniform=uniform, loops=self._inside
        )

    def element(self, array: Value) -> np.ndarray:
        """Returns the row of an array [length, ...] that belongs to the current iteration."""
        if not array.size:
            return np.empty(array.shape[1:], object)
        memory, g = readable(self._tracer, array), self._tracer.graph
        shape = memory.shape[1:]
        stride = math.prod(shape)
        base = g.apply("mul", self._index, g.constant(stride, "int32"))
        nodes = np.empty(shape, object)
        for i in range(stride):
            nodes.flat[i] = load(g, memory.node, base, i)
        return nodes

    def stays_uniform(self, finals: Sequence[Value]) -> list[bool]:
        """Returns for each carry whether it can stay marked as uniform, given its value after the body.

        An array in memory counts as True, because it is never marked. A value that is read from one varies,
        which the jaxpr does not show: hence this second check.
        """
        condition = self.loop.condition
        leaves_together = condition is None or condition.uniform
        return [
            isinstance(value, Memory)
            or ((leaves_together or value is final) and _is_uniform(self._tracer.elements(final)))
            for (value, _), final in zip(self._values, finals, strict=True)
        ]

    def finish(self, finals: Sequence[Value], written: Sequence[Value]) -> list[Value]:
        """Ends the body; returns the carries after the loop, then the recorded arrays [length, ...]."""
        tracer, loop = self._tracer, self.loop
        for (value, inits), final in zip(self._values, finals, strict=True):
            if isinstance(value, Memory):
                ends, variables = [readable(tracer, final).node], [value.node]
            else:
                ends, variables = [*tracer.elements(final).reshape(-1)], [*value.reshape(-1)]
            size = value.size if isinstance(value, Memory) else None
            loop.carries += [
                LoopCarry(variable=variable, init=init, final=end, size=size)
                for variable, init, end in zip(variables, inits, ends, strict=True)
            ]
        rows = [tuple(tracer.elements(value).reshape(-1)) for value in written]
        read = [n for c in loop.carries for n in (c.init, c.final)] + [n for r in rows for n in r]
        if loop.condition is not None:
            read.append(loop.condition)
        loop.loops = frozenset[Loop]().union(*(n.loops for n in read)) - self._inside
        arrays = [self._record(*pair) for pair in zip(written, rows, strict=True)]
        return [*self._results(), *arrays]

    def _results(self) -> list[Value]:
        home = innermost(self.loop.loops)
        carries, results = iter(enumerate(self.loop.carries)), list[Value]()
        for value, inits in self._values:
            nodes = np.empty(len(inits), object)
            for i in range(len(inits)):
                k, carry = next(carries)
                nodes[i] = self._tracer.graph.make(
                    "result",
                    (),
                    (self.loop.number, k),
                    carry.variable.dtype,
                    uniform=carry.variable.uniform,
                    loops=self.loop.loops,
                )
            if isinstance(value, Memory):
                results.append(Memory(nodes[0], value.shape, home))
            else:
                results.append(nodes.reshape(value.shape))
        return results

    def _record(self, value: Value, nodes: tuple[Node, ...]) -> Value:
        length = self.loop.length
        assert length is not None
        shape = (length, *value.shape)
        if not nodes:
            return np.empty(shape, object)
        array = self._tracer.graph.make(
            "record",
            (),
            (self.loop.number, len(self.loop.records)),
            nodes[0].dtype,
            uniform=all(n.uniform for n in nodes),
            loops=self.loop.loops,
        )
        self.loop.records.append(Record(nodes, array))
        return Memory(array, shape, None)


def _scan(tracer: Tracer, equation: Any, args: list[Value]) -> Sequence[Value]:
    params = equation.params
    body, length, reverse = params["jaxpr"], params["length"], params["reverse"]
    first, count = scan_parts(equation)
    last = first + count
    consts, inits, arrays = args[:first], args[first:last], args[last:]
    if length * count_equations(body.jaxpr) <= TINY or length <= 1:
        return _unrolled(tracer, equation, consts, inits, arrays)
    uniform = _uniform_scan(equation, [_is_uniform(a) for a in args])
    indexed = indexed_variables(body.jaxpr)
    variables = body.jaxpr.invars[first:last]
    while True:
        traced = _LoopTrace(tracer, length, reverse)
        carries = [
            traced.carry(init, uniform=u, indexed=v in indexed)
            for init, u, v in zip(inits, uniform, variables, strict=False)
        ]
        tracer.around.append(traced.loop)
        rows = [traced.element(a) for a in arrays]
        results = tracer.run(body, [*consts, *carries, *rows])
        tracer.around.pop()
        stays = traced.stays_uniform(results[:count])
        if all(s or not u for s, u in zip(stays, uniform, strict=False)):
            return traced.finish(results[:count], results[count:])
        uniform = [u and s for u, s in zip(uniform, stays, strict=False)]


def _unrolled(
    tracer: Tracer,
    equation: Any,
    consts: list[Value],
    carries: list[Value],
    arrays: list[Value],
) -> Sequence[Value]:
    params, body = equation.params, equation.params["jaxpr"]
    count, length = len(carries), params["length"]
    xs = [tracer.elements(a) for a in arrays]
    written: list[list[np.ndarray]] = []
    order = range(length)
    for t in reversed(order) if params["reverse"] else order:
        rows = [np.asarray(x[t], object) for x in xs]
        results = tracer.run(body, [*consts, *carries, *rows])
        carries = results[:count]
        written.append([tracer.elements(value) for value in results[count:]])
    if params["reverse"]:
        written.reverse()
    ys: list[Value] = []
    for k, variable in enumerate(equation.outvars[count:]):
        stacked = np.empty(variable.aval.shape, object)
        for t, row in enumerate(written):
            stacked[t, ...] = row[k]
        ys.append(stacked)
    return [*carries, *ys]


def _while(tracer: Tracer, equation: Any, args: list[Value]) -> Sequence[Value]:
    params = equation.params
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    inits = args[split[1] :]
    uniform = _uniform_while(params, [_is_uniform(a) for a in args])
    indexed = indexed_variables(body.jaxpr) | indexed_variables(cond.jaxpr)
    variables = zip(
        body.jaxpr.invars[split[1] - split[0] :], cond.jaxpr.invars[split[0] :], strict=True
    )
    in_memory = [bool(indexed & {*v}) for v in variables]
    while True:
        traced = _LoopTrace(tracer, None, False)
        carries = [
            traced.carry(init, uniform=u, indexed=i)
            for init, u, i in zip(inits, uniform, in_memory, strict=True)
        ]
        tracer.around.append(traced.loop)
        result = tracer.run(cond, [*args[: split[0]], *carries])[0]
        goes_on = tracer.elements(result)
        traced.loop.condition = functools.reduce(
            lambda a, b: tracer.graph.apply("or", a, b), goes_on.reshape(-1)
        )
        results = tracer.run(body, [*args[split[0] : split[1]], *carries])
        if goes_on.ndim:
            results = [
                _while_going(tracer, goes_on, *pair) for pair in zip(results, carries, strict=True)
            ]
        tracer.around.pop()
        stays = traced.stays_uniform(results)
        if all(s or not u for s, u in zip(stays, uniform, strict=True)):
            return traced.finish(results, [])
        uniform = [u and s for u, s in zip(uniform, stays, strict=True)]


def _while_going(tracer: Tracer, goes_on: np.ndarray, new: Value, old: Value) -> np.ndarray:
    """Returns a carry of a loop under `jax.vmap`, whose examples leave it one by one: `new` if it goes on.

    The examples are the first axes of the carry, as those of `goes_on`.
    """
    after, before = tracer.elements(new), tracer.elements(old)
    places = goes_on.reshape(goes_on.shape + (1,) * (after.ndim - goes_on.ndim))
    nodes = np.empty(after.shape, object)
    triples = zip(np.broadcast_to(places, after.shape).flat, after.flat, before.flat, strict=True)
    for i, (going, x, y) in enumerate(triples):
        nodes.flat[i] = tracer.graph.select(going, x, y)
    return nodes


def _cond(tracer: Tracer, equation: Any, args: list[Value]) -> Sequence[Value]:
    """Runs every branch and selects between their results; a constant index runs one branch only."""
    g, (which, *operands) = tracer.graph, args
    branches = equation.params["branches"]
    index = g.convert(tracer.elements(which)[()], "int32")
    if is_constant(index):
        branch = branches[min(max(int(index.value), 0), len(branches) - 1)]
        return tracer.run(branch, operands)
    taken = [[tracer.elements(v) for v in tracer.run(b, operands)] for b in branches]
    results = taken[0]
    for k in range(1, len(branches)):
        # An index below 0 selects the first branch, an index beyond the end the last one.
        here = _at_least(g, index, k)
        merged = []
        for mine, other in zip(taken[k], results, strict=True):
            nodes = np.empty(mine.shape, object)
            for i in range(mine.size):
                nodes.flat[i] = g.select(here, mine.flat[i], other.flat[i])
            merged.append(nodes)
        results = merged
    return results


def _at_least(g: Graph, index: Node, k: int) -> Node:
    """Returns `index >= k`. For an index made from a bool, this is the bool, so that guards can use it."""
    if k == 1 and index.op == "select" and all(is_constant(n) for n in index.args[1:]):
        yes, no = (n.value >= k for n in index.args[1:])
        return g.select(index.args[0], g.constant(yes, "bool"), g.constant(no, "bool"))
    return g.apply("ge", index, g.constant(k, "int32"))


CONTROL: dict[str, Special] = {"scan": _scan, "while": _while, "cond": _cond}
