"""Which instructions sum products of bfloat16 numbers on this machine."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from typing import Literal

from seedbed import cache
from seedbed.llvm import (
    Function,
    compile_ir,
    host_has_pairs,
    host_has_tiles,
    host_vector_unit,
    toolchain,
)
from seedbed.nets.native.bfloat16.amx import Tiles
from seedbed.nets.native.bfloat16.pairs import ADD_PAIRS, DECLARATION, PAIRS, SUMS, Pairs
from seedbed.nets.native.bfloat16.product import LANES, Instructions

Name = Literal["tiles", "pairs"]
UNITS: dict[Name, Instructions] = {"tiles": Tiles(), "pairs": Pairs()}
"""The instructions by name: AMX's tiles, and AVX512-BF16's products of pairs."""
LABELS: dict[Name, str] = {"tiles": "AMX", "pairs": "AVX512-BF16"}
"""What the makers of CPUs call the instructions."""
# The gain from which pairs are used: copies and conversions cost a part of it.
_WORTHWHILE = 1.3
# Sums in registers, additions to each in a round, and rounds.
_TOTALS, _STEPS, _ROUNDS = 24, 1000, 25


@functools.cache
def host_instructions() -> Name | None:
    """Returns the instructions by which bfloat16 is faster than float32 on this machine, or None.

    Some CPUs have AVX512-BF16 and gain nothing by it (Intel's), others twice the speed (AMD's since Zen 4).
    So it is timed, in less than 0.1 s, when the machine first asks, and the answer is kept with the kernels.
    """
    if host_has_tiles():
        return "tiles"
    if not host_has_pairs():
        return None
    key = f"{_WORTHWHILE} times as fast by AVX512-BF16? {toolchain(host_vector_unit().width)}"
    answer = cache.load(key)
    if answer is None:
        answer = b"yes" if measure_gain() >= _WORTHWHILE else b"no"
        cache.save(key, answer)
    return "pairs" if answer == b"yes" else None


def measure_gain() -> float:
    """Times AVX512-BF16 in this thread: returns its products a second over those of float32.

    The fastest of several short rounds counts, so that other processes do not matter.
    """
    memory = (ctypes.c_float * (LANES * _TOTALS))()
    best = {PAIRS: float("inf"), SUMS: float("inf")}
    runs = {kind: _repeated_sums(kind) for kind in best}
    for _ in range(_ROUNDS):
        for kind, run in runs.items():
            start = time.perf_counter()
            run(memory)
            best[kind] = min(best[kind], time.perf_counter() - start)
    return 2 * best[SUMS] / best[PAIRS]


def _repeated_sums(kind: str) -> Callable[..., None]:
    """Returns a function that adds products of vectors of a kind in registers; it takes memory for them."""
    f = Function("void @sums(ptr %memory)")
    factor = f.op(f"load {kind}, ptr %memory, align 4")
    carried = [(SUMS, "zeroinitializer")] * _TOTALS
    with f.repeat(_STEPS, carried) as carry:
        carry.next = [
            f.op(
                f"call {SUMS} {ADD_PAIRS}({SUMS} {total}, {kind} {factor}, {kind} {factor})"
                if kind == PAIRS
                else f"call {SUMS} @llvm.fma.v16f32({SUMS} {factor}, {SUMS} {factor}, {SUMS} {total})"
            )
            for total in carry.values
        ]
    for i, total in enumerate(carry.next):
        f.line(f"store {SUMS} {total}, ptr {f.at('%memory', LANES * i)}, align 4")
    declarations = f"{DECLARATION}declare {SUMS} @llvm.fma.v16f32({SUMS}, {SUMS}, {SUMS})\n"
    address = compile_ir(declarations + f.text(), "sums")
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
