"""Rough costs of operations, in additions: where a guard is worth a branch, and how long a call takes."""

from __future__ import annotations

import collections
import math
from typing import NamedTuple

from seedbed.simd.ir.graph import Graph, Loop, Node


class Cost(NamedTuple):
    """The cost of an operation, in additions."""

    time: float  # its part in the time of a run
    saved: float  # what a guard saves that skips it


ADDITION = Cost(time=1.0, saved=1.0)
GATHER = Cost(time=32.0, saved=32.0)
"""The cost of a read or write at a lane's own index, as measured: that of 16 comparisons and selects."""
# All others are guesses, and the two of an operation were guessed apart. To change a time changes how calls
# are cut into chunks; to change what is saved changes which guards there are.
COSTS = {
    **dict.fromkeys(
        ("constant", "variable", "index", "result", "record", "table", "operand"), Cost(0.0, 0.0)
    ),
    **dict.fromkeys(("input", "pack", "memory"), Cost(time=0.0, saved=1.0)),
    **dict.fromkeys(("load", "store"), Cost(time=1.0, saved=0.5)),
    **dict.fromkeys(("div", "sqrt"), Cost(time=8.0, saved=8.0)),
    "rem": Cost(time=16.0, saved=64.0),
}
"""The costs of operations; one that is not listed costs an ADDITION, but see `cost`."""
LOOP = 64.0
"""What a guard saves that skips a loop, however long: a guess."""
FREE = frozenset(op for op, cost in COSTS.items() if not cost.time)
"""Operations of the nodes that compute nothing."""
# A guess: the iterations of a loop whose length is unknown.
_WHILE = 4


def cost(node: Node) -> Cost:
    """Returns the cost of a node."""
    if node.op in ("load", "store") and not node.args[1].uniform:
        return GATHER
    return COSTS.get(node.op, ADDITION)


def around(node: Node | Loop) -> tuple[Loop, ...]:
    """Returns the loops in whose bodies a node, or a loop, runs; outermost first."""
    inner = max(node.loops, key=lambda loop: loop.depth, default=None)
    return () if inner is None else (*around(inner), inner)


def work(graph: Graph) -> float:
    """Returns about how many vector operations one run of all nodes takes, counted in additions."""
    by_loops: dict[frozenset[Loop], float] = collections.defaultdict(float)
    for node in graph.nodes:
        by_loops[node.loops] += cost(node).time
    total = 0.0
    for loops, each in by_loops.items():
        inner = max(loops, key=lambda loop: loop.depth, default=None)
        path = () if inner is None else (*around(inner), inner)
        total += each * math.prod(loop.length or _WHILE for loop in path)
    return total
