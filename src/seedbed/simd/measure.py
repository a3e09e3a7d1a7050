"""How much work a graph is."""

from __future__ import annotations

import collections
import math

from seedbed.simd.graph import Graph, Loop, Node

FREE = frozenset(
    {"constant", "input", "variable", "index", "result", "record", "table", "pack", "memory"}
)
"""Nodes that compute nothing."""
_COSTS = {"div": 8.0, "sqrt": 8.0, "rem": 16.0}
_WHILE = 4  # iterations of a loop of unknown length, for want of better


def cost(node: Node) -> float:
    """About how many additions a node is worth."""
    return 0.0 if node.op in FREE else _COSTS.get(node.op, 1.0)


def around(node: Node | Loop) -> tuple[Loop, ...]:
    """The loops in whose bodies a node, or another loop, is done; outermost first."""
    inner = max(node.loops, key=lambda loop: loop.depth, default=None)
    return () if inner is None else (*around(inner), inner)


def work(graph: Graph) -> float:
    """About how many vector operations a run takes."""
    by_loops: dict[frozenset[Loop], float] = collections.defaultdict(float)
    for node in graph.nodes:
        by_loops[node.loops] += cost(node)
    total = 0.0
    for loops, each in by_loops.items():
        inner = max(loops, key=lambda loop: loop.depth, default=None)
        path = () if inner is None else (*around(inner), inner)
        total += each * math.prod(loop.length or _WHILE for loop in path)
    return total
