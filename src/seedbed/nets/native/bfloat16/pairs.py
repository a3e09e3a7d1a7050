"""Sums of products of bfloat16 numbers by the vectors of AVX512-BF16.

One instruction adds to each of 16 float32 numbers the two products of a pair of bfloat16 numbers of A, the
same for all, with one of 16 pairs of B. A tile is one row of A.
"""

from __future__ import annotations

from collections.abc import Sequence

from seedbed.llvm import Function
from seedbed.nets.native.bfloat16.product import LANES, Blocking, Product

# Cycles between an instruction and the next that may add to its result.
_LATENCY = 6
_REGISTERS = 32
SUMS, PAIRS = f"<{LANES} x float>", f"<{2 * LANES} x bfloat>"
"""The LLVM types of sums and of pairs."""
ADD_PAIRS = "@llvm.x86.avx512bf16.dpbf16ps.512"
"""The instruction, from sums and two vectors of pairs to sums."""
DECLARATION = f"declare {SUMS} {ADD_PAIRS}({SUMS}, {PAIRS}, {PAIRS})\n"
"""The instruction's declaration."""


class Pairs:
    """The `Instructions` of AVX512-BF16."""

    longest = None
    tile_rows = 1
    # Results, a row of B and a pair of A have registers; beside one panel three rows of B, see `_turns`.
    sizes = tuple(
        (high, wide)
        for wide, most in ((2, 14), (3, 9), (4, 6), (1, 27))
        for high in range(most, 0, -1)
    )

    def cycles(self, block: Blocking, depth: int) -> float:
        """Estimates the cycles of one chunk of the sum for a block.

        The model is a CPU that multiplies a vector of pairs a cycle, and loads a vector or a pair a cycle.
        """
        products, loads = block.high * block.wide, block.high + block.wide
        return depth / 2 * (max(products, loads, _LATENCY) + 0.5)

    def preamble(self, product: Product) -> str:
        """Returns the IR of the intrinsic's declaration."""
        del product
        return DECLARATION

    def begin(self, f: Function) -> None:
        """Leaves the task as it is: vectors need no preparation."""

    def end(self, f: Function) -> None:
        """Leaves the task as it is: vectors need no release."""

    def block_function(self, name: str, p: Product, high: int, wide: int) -> str:
        """Returns the IR of `void @name(ptr a, ptr b, ptr c, ptr start)` for a block of `high` rows."""
        f = Function(
            f"internal void @{name}(ptr noalias %a, ptr noalias %b, ptr %c, ptr %start)", "noinline"
        )
        totals = ["zeroinitializer"] * (high * wide)
        if p.start is not None:
            places = [i * p.start + j * 4 * LANES for i in range(high) for j in range(wide)]
            totals = [_load(f, SUMS, f.at("%start", place, "i8")) for place in places]
        turns = _turns(p, high, wide)
        step = p.depth // 2 // turns
        with f.repeat(p.steps.windows.number, _carried(totals)) as window:
            a1 = p.steps.windows.at(f, "%a", window.index)
            b1 = f.scaled("%b", window.index, p.steps.chunks * p.steps.b_step, "i8")
            with f.repeat(p.steps.chunks, _carried(window.values)) as chunk:
                a2 = p.steps.a_chunk(f, a1, chunk.index)
                b2 = f.scaled(b1, chunk.index, p.steps.b_step, "i8")
                with f.repeat(step, _carried(chunk.values)) as pair:
                    a3 = f.scaled(a2, pair.index, 4, "i8")
                    b3 = f.scaled(b2, pair.index, p.b_row, "i8")
                    rows = [
                        [_load(f, PAIRS, f.at(b4, j * p.b_panel, "i8")) for j in range(wide)]
                        for b4 in (f.at(b3, n * step * p.b_row, "i8") for n in range(turns))
                    ]
                    for place, uses in _uses(p.a_tiles[:high], turns, 4 * step):
                        a = _spread(f, f.at(a3, place, "i8"))
                        for i, turn in uses:
                            for j, b in enumerate(rows[turn], i * wide):
                                pair.next[j] = f.op(
                                    f"call {SUMS} {ADD_PAIRS}"
                                    f"({SUMS} {pair.next[j]}, {PAIRS} {a}, {PAIRS} {b})"
                                )
                chunk.next = pair.next
            window.next = chunk.next
        for k, total in enumerate(window.next):
            c = f.at("%c", k // wide * p.c_tile + k % wide * 4 * LANES, "i8")
            f.line(f"store {SUMS} {total}, ptr {c}, align 4")
        return f.text()


def _turns(p: Product, high: int, wide: int) -> int:
    """Returns how many rows of A, one after the other, a pair is loaded for at once.

    Neighbouring positions see a pixel in turn, as windows of a convolution overlap. That many rows of B must
    fit in the registers beside results and a pair of A; else it is 1.
    """
    if high == 1:
        return 1
    turns, rest = divmod(2 * p.depth, p.a_tiles[1] - p.a_tiles[0])
    return turns if turns and not rest and wide * (high + turns) < _REGISTERS else 1


def _uses(
    tiles: Sequence[int], turns: int, distance: int
) -> list[tuple[int, list[tuple[int, int]]]]:
    """Returns the places of pairs in A, and for each the rows that it is in, with its turn in that row."""
    uses: dict[int, list[tuple[int, int]]] = {}
    for i, tile in enumerate(tiles):
        for turn in range(turns):
            uses.setdefault(tile + turn * distance, []).append((i, turn))
    return sorted(uses.items())


def _carried(totals: list[str]) -> list[tuple[str, str]]:
    return [(SUMS, total) for total in totals]


def _load(f: Function, kind: str, pointer: str) -> str:
    return f.op(f"load {kind}, ptr {pointer}, align 4")


def _spread(f: Function, pointer: str) -> str:
    """Loads a pair and returns a vector that holds it 16 times."""
    words = f"<{LANES} x i32>"
    first = f.op(f"insertelement {words} poison, i32 {_load(f, 'i32', pointer)}, i32 0")
    spread = f.op(f"shufflevector {words} {first}, {words} poison, {words} zeroinitializer")
    return f.op(f"bitcast {words} {spread} to {PAIRS}")
