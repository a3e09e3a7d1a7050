"""Estimates of the work that a graph takes, in vector operations."""

from __future__ import annotations

import collections
import math

from seedbed.simd.ir.graph import Graph, Loop, Node

FREE = frozenset(
    {"constant", "input", "variable", "index", "result", "record", "table", "pack", "memory"}
)
"""Operations of the nodes that compute nothing."""
_COSTS = {"div": 8.0, "sqrt": 8.0, "rem": 16.0}
# A guess: the iterations of a loop whose length is unknown.
_WHILE = 4


def cost(node: Node) -> float:
    """Returns the cost of a node, in additions: a rough estimate."""
    return 0.0 if node.op in FREE else _COSTS.get(node.op, 1.0)


def around(node: Node | Loop) -> tuple[Loop, ...]:
    """Returns the loops in whose bodies a node, or a loop, runs; outermost first."""
    inner = max(node.loops, key=lambda loop: loop.depth, default=None)
    return () if inner is None else (*around(inner), inner)


def work(graph: Graph) -> float:
    """Returns about how many vector operations one run of all nodes takes, counted in additions."""
    by_loops: dict[frozenset[Loop], float] = collections.defaultdict(float)
    for node in graph.nodes:
        by_loops[node.loops] += cost(node)
    total = 0.0
    for loops, each in by_loops.items():
        inner = max(loops, key=lambda loop: loop.depth, default=None)
        path = () if inner is None else (*around(inner), inner)
        total += each * math.prod(loop.length or _WHILE for loop in path)
    return total
