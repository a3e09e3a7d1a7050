"""Reports the cost of a function as a kernel."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from seedbed.arguments import checked, shown
from seedbed.simd.frontend.trace import trace
from seedbed.simd.ir.graph import FLOATS, Loop, Node
from seedbed.simd.schedule.guards import guarded
from seedbed.simd.schedule.measure import FREE, around
from seedbed.simd.schedule.plan import Guard, Item, Liveness, Schedule
from seedbed.simd.vectorize import trace_example
from seedbed.types import SeedbedError

_NO_FLOPS = frozenset({"load", "store", "select", "bitcast", "convert", "lt", "le", "gt", "ge"})


@dataclasses.dataclass(frozen=True)
class Report:
    """The cost of a function as a kernel, in counts for one example.

    `flops` maps the loops around operations, outermost first, to the float operations of one iteration.
    """

    name: str  # of the function
    operations: int  # machine operations, without moves of elements
    guards: int  # branches that skip what no lane needs
    guarded: int  # operations that run only if some lane needs them
    flops: dict[tuple[str, ...], int]  # by the loops around them; a fused multiply-add is two
    lanes: int  # examples that run together
    ir_bytes: int  # of LLVM IR as text
    code_bytes: int  # of machine code
    seconds: dict[str, float]  # by stage of the compilation

    def __str__(self) -> str:
        share = self.guarded / max(self.operations, 1)
        guards = "1 guard holds" if self.guards == 1 else f"{self.guards} guards hold"
        lines = [
            f"simd.vectorize({self.name})",
            f"  operations    {self.operations:,}; {guards} {share:.0%} of them",
            f"  flops         {self.flops.get((), 0):,} outside loops",
        ]
        for loops, count in sorted(self.flops.items()):
            if loops:
                lines.append(f"                {count:,} in an iteration of {', '.join(loops)}")
        stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in self.seconds.items())
        return "\n".join(
            [
                *lines,
                f"  machine code  {self.code_bytes:,} bytes for {self.lanes} lanes, from "
                f"{self.ir_bytes:,} bytes of LLVM IR",
                f"  seconds       {sum(self.seconds.values()):.2f}: {stages}",
            ]
        )


@checked
def inspect(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Compiles `fn` for one example and returns a report on it.

    The arguments `args` and `kwargs` are those of one example, without a batch axis: arrays, or their
    shapes and types. The kernel is compiled anew; the cache is neither read nor written.

    Raises:
        Unsupported: `fn` has no kernel; the message names the primitive, or the lines that made it too large.
        SeedbedError: an argument is no array, or `fn` has side effects.
    """
    # The import needs llvmlite. Without it this module still loads, and functions run as jax.vmap.
    from seedbed.simd.cpu.compiler import compile_program, lanes

    name = getattr(fn, "__qualname__", repr(fn))
    begin = time.perf_counter()
    for leaf in jax.tree.leaves((args, kwargs)):
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise SeedbedError(f"simd.inspect({name}): {shown(leaf)}: pass an array of one example")
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (args, kwargs))
    example = trace_example(fn, name, one)
    traced = time.perf_counter()
    shared = [False] * (len(example.closed.in_avals) - len(example.shared))
    shared += [True] * len(example.shared)
    program = trace(example.closed, shared)
    made = time.perf_counter()
    compiled = compile_program(program, lanes())
    live = Liveness(program)
    working = [node for node in live.nodes if node.op not in FREE]
    masks, within = _guards(live)
    return Report(
        name,
        operations=len(working),
        guards=masks,
        guarded=within,
        flops=_flops(live, working),
        lanes=lanes(),
        ir_bytes=len(compiled.text),
        code_bytes=len(compiled.code),
        seconds={
            "jaxpr": traced - begin,
            "graph": made - traced,
            "IR": compiled.emit_seconds,
            "machine code": compiled.compile_seconds,
        },
    )


def _flops(live: Liveness, nodes: Iterable[Node]) -> dict[tuple[str, ...], int]:
    """Returns the float operations by the loops around them; a fused multiply-add counts as two."""
    totals: collections.Counter[tuple[Loop, ...]] = collections.Counter()
    for node in nodes:
        if node.dtype in FLOATS and node.op not in _NO_FLOPS:
            totals[around(node)] += 1 + (node in live.fused)
    return {tuple(map(_describe, path)): count for path, count in totals.items()}


def _describe(loop: Loop) -> str:
    kind = "a while loop" if loop.length is None else f"{loop.length}"
    return f"loop {loop.number} ({kind})"


def _guards(live: Liveness) -> tuple[int, int]:
    """Returns the number of guards, and the number of operations inside them."""
    schedule = Schedule(live)

    def body(loop: Loop | None) -> list[tuple[Item, bool]]:
        return [(item, False) for item in guarded(schedule, schedule.items.get(loop, []))]

    count = within = 0
    waiting = body(None)
    while waiting:
        item, inside = waiting.pop()
        if isinstance(item, Guard):
            count += 1
            waiting += [(i, True) for i in item.items]
        elif isinstance(item, Loop):
            waiting += [(i, inside) for i, _ in body(item)]
        else:
            within += inside and item.op not in FREE
    return count, within
