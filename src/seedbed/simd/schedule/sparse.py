"""Loops that have an effect only in rows in which some lane is active, and so can skip the other rows.

Such a loop writes everything that it carries under `where(active[i], new, old)`: i is the loop's
iteration, and `active` is an array in memory that the loop does not change. The rows in which `active`
holds in some lane are listed once for all loops over them, in ascending order.
"""

from __future__ import annotations

from collections.abc import Iterable

from seedbed.simd.ir.graph import Graph, Loop, LoopCarry, Node


def masked(item: Node) -> tuple[Node, ...]:
    """Returns the selects of a masked write `store(a, i, where(mask, new, a[i]))`; () for any other node.

    `new` may be such a select, too; the outermost comes first. The write changes nothing in the lanes in
    which one of the masks does not hold.
    """
    selects: list[Node] = []
    if item.op == "store":
        value = item.args[2]
        while value.op == "select" and _is_old(item, value.args[2]):
            selects.append(value)
            value = value.args[1]
    return tuple(selects)


def _is_old(store: Node, value: Node) -> bool:
    """Returns whether a value is what the element that `store` writes was before."""
    state, base, _ = store.args
    if value.op != "load" or value.args[1] is not base or value.value != store.value:
        return False
    # skip earlier writes to other elements of the same row
    while state is not value.args[0]:
        if state.op != "store" or state.args[1] is not base or state.value == store.value:
            return False
        state = state.args[0]
    return True


def listed(graph: Graph, loop: Loop, carries: Iterable[LoopCarry]) -> Node | None:
    """Returns a node that lists the rows that a loop must visit, or None if it must visit all.

    `carries` are the loop's live carries. The node's argument is the array of masks. While loops and
    reversed loops visit all rows.
    """
    if loop.length is None or loop.reverse:
        return None
    gates: set[Node] | None = None
    for carry in carries:
        for mask in _masks(graph, carry):
            held = set() if mask is None else _conjuncts(mask)
            gates = held if gates is None else gates & held
    for gate in sorted(gates or (), key=lambda node: node.id):
        if gate.op != "load" or gate.uniform or gate.value or loop in gate.args[0].loops:
            continue
        if gate.args[1].op == "index" and gate.args[1].value[0] == loop.number:
            state = gate.args[0]
            return graph.make("rows", (state,), loop.length, "int32", uniform=True)
    return None


def _masks(graph: Graph, carry: LoopCarry) -> Iterable[Node | None]:
    """Yields the masks outside which a carry keeps its value; yields None for an update without a mask."""
    state = carry.final
    if carry.size is None:
        if state is not carry.variable:
            kept = state.op == "select" and state.args[2] is carry.variable
            yield state.args[0] if kept else None
        return
    while state is not carry.variable:
        # the array was carried by a loop inside this one
        if state.op == "result":
            inner = graph.loops[state.value[0]].carries[state.value[1]]
            yield from _masks(graph, inner)
            state = inner.init
            continue
        selects = masked(state)
        if not selects:
            yield None
            return
        yield selects[0].args[0]
        state = state.args[0]


def _conjuncts(mask: Node) -> set[Node]:
    """Returns a mask and all masks of which it is the conjunction."""
    found, waiting = set[Node](), [mask]
    while waiting:
        node = waiting.pop()
        found.add(node)
        waiting += node.args if node.op == "and" else ()
    return found
