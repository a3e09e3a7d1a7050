"""Sums of products of bfloat16 numbers by the tiles of Intel's AMX, accumulated in float32.

This module emits their LLVM IR. A tile is a register of at most 16 rows of 64 bytes. One instruction adds to
a tile C of float32 [rows, 16] the product of a tile A of bfloat16 [rows, depth] and a tile B
[depth / 2, 16, 2], whose rows hold pairs of neighbouring rows of a matrix [depth, 16]. A task has one
configuration, which says how many rows and bytes of each tile are in use.
"""

from __future__ import annotations

from typing import NamedTuple

from seedbed.llvm import Function
from seedbed.nets.native.rows import narrow_declarations
from seedbed.nets.native.tile import Span, declarations, spans

LANES = 16
"""Rows of a tile, and float32 numbers in a row of it."""
TILES = 8
"""The number of tiles of a CPU."""
_DECLARATIONS = """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8 immarg)
declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)
declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8 immarg, i8 immarg, i8 immarg)
"""
# Cycles between an instruction that multiplies tiles and the next that may add to its result.
_LATENCY = 52


class Blocking(NamedTuple):
    """How many tiles of A (`high`) and of B (`wide`) meet in one block of results, and the tiles' rows."""

    high: int
    wide: int
    rows: int

    def a(self, i: int) -> int:
        """The number of the tile for block `i` of A's rows. Before it are those of results."""
        return self.high * self.wide + i

    def b(self, j: int) -> int:
        """The number of the tile for block `j` of B's columns."""
        return self.high * self.wide + self.high + j

    def cycles(self, high: int, wide: int, depth: int) -> float:
        """Estimates the cycles of one step of the sum, for a block of `high` by `wide` tiles.

        The model is a CPU that multiplies a row of A a cycle, and loads two rows of tiles a cycle. Results
        wait for their own last step.
        """
        products = high * wide * self.rows
        loads = (high * self.rows + wide * depth / 2) / 2
        return max(products, loads, _LATENCY)


def choose_blocking(rows: int, panels: int, depth: int, even: bool) -> Blocking:
    """Returns the blocking with the fewest estimated cycles for `rows` of A by `panels` of 16 columns of B.

    If `even`, all blocks have the same number of tiles of A, whose rows are as few as cover `rows`. If not,
    tiles have 16 rows, and the last block may have fewer tiles.
    """
    best: tuple[float, Blocking] | None = None
    for high, wide in ((2, 2), (3, 1), (1, 3), (2, 1), (1, 2), (1, 1)):
        blocks = -(-rows // (high * LANES))
        block = Blocking(high, wide, -(-rows // (blocks * high)) if even else LANES)
        heights = [Span(0, high, blocks)] if even else spans(-(-rows // LANES), high)
        cost = sum(
            block.cycles(h.size, w.size, depth) * h.blocks * w.blocks
            for h in heights
            for w in spans(panels, wide)
        )
        if best is None or cost < best[0]:
            best = cost, block
    assert best is not None
    return best[1]


class Windows(NamedTuple):
    """Parts of a matrix: window w begins at plane `w % planes`, line `w // planes`, both of so many bytes."""

    number: int
    planes: int
    plane: int
    line: int

    def at(self, f: Function, base: str, window: str) -> str:
        """Returns the address of window `window`, the name of a value, of the matrix at `base`."""
        if self.planes == 1:
            return f.scaled(base, window, self.line, "i8")
        plane = f.op(f"urem i64 {window}, {self.planes}")
        line = f.op(f"udiv i64 {window}, {self.planes}")
        return f.scaled(f.scaled(base, plane, self.plane, "i8"), line, self.line, "i8")

    @property
    def furthest(self) -> int:
        """The bytes from the base to the window that begins last."""
        return max(
            w % self.planes * self.plane + w // self.planes * self.line for w in range(self.number)
        )


class Steps(NamedTuple):
    """The loops of a sum: windows of A, each in `chunks` of as many numbers as a row of a tile has.

    Chunks of A are `a_step` bytes apart, but the last begins at `a_last`, and so may overlap the one before.
    Chunks of B, one after the other through all windows, are `b_step` bytes apart.
    """

    windows: Windows
    chunks: int
    a_step: int
    a_last: int
    b_step: int

    def a_chunk(self, f: Function, window: str, chunk: str) -> str:
        """Returns the address of chunk `chunk`, the name of a value, of the window at `window`."""
        offset = f.op(f"mul i64 {chunk}, {self.a_step}")
        if self.a_last != (self.chunks - 1) * self.a_step:
            beyond = f.op(f"icmp ugt i64 {offset}, {self.a_last}")
            offset = f.op(f"select i1 {beyond}, i64 {self.a_last}, i64 {offset}")
        return f.at(window, offset, "i8")


class Matrix(NamedTuple):
    """Where a matrix lies: bytes between rows of a tile, and between the tiles of neighbouring blocks."""

    row: int
    tile: int


class Product(NamedTuple):
    """A block of results `c = start + sum over steps of a * b`, tiles of C side by side 64 bytes apart."""

    blocking: Blocking
    depth: int  # bfloat16 numbers in a row of a tile of A
    steps: Steps
    a: Matrix
    b: Matrix
    c: Matrix
    start: int | None  # bytes between rows of a tile of what C starts at, or None for zero


def configuration(blocking: Blocking, depth: int) -> str:
    """Returns the IR of the constant `@tiles` that configures the tiles of a blocking."""
    rows, width = [0] * 16, [0] * 16
    for tile in range(blocking.b(blocking.wide)):
        is_b = tile >= blocking.b(0)
        rows[tile] = depth // 2 if is_b else blocking.rows
        width[tile] = 2 * depth if blocking.a(0) <= tile < blocking.b(0) else 4 * LANES
    numbers = [1, *[0] * 15, *(byte for n in width for byte in (n, 0)), *rows]
    text = "".join(f"\\{number:02X}" for number in numbers)
    return f'@tiles = internal constant [64 x i8] c"{text}", align 64\n'


def configure(f: Function) -> None:
    """Emits the configuration of this thread's tiles by the constant `@tiles`."""
    f.line("call void @llvm.x86.ldtilecfg(ptr @tiles)")


def release(f: Function) -> None:
    """Emits the end of this thread's use of tiles."""
    f.line("call void @llvm.x86.tilerelease()")


def _load(f: Function, tile: int, base: str, stride: int) -> None:
    f.line(f"call void @llvm.x86.tileloadd64(i8 {tile}, ptr {base}, i64 {stride})")


def block_function(name: str, p: Product, high: int, wide: int) -> str:
    """Returns the IR of `void @name(ptr a, ptr b, ptr c, ptr start)` for a block of `high` by `wide` tiles.

    Results stay in tiles during the whole sum. The tiles must be configured.
    """
    f = Function(
        f"internal void @{name}(ptr noalias %a, ptr noalias %b, ptr %c, ptr %start)", "noinline"
    )
    cells = [(i, j, i * p.blocking.wide + j) for i in range(high) for j in range(wide)]
    for i, j, tile in cells:
        if p.start is None:
            f.line(f"call void @llvm.x86.tilezero(i8 {tile})")
        else:
            start = f.at("%start", (i * p.c.tile if p.start else 0) + j * 4 * LANES, "i8")
            _load(f, tile, start, p.start)
    with f.repeat(p.steps.windows.number) as window:
        a1 = p.steps.windows.at(f, "%a", window.index)
        b1 = f.scaled("%b", window.index, p.steps.chunks * p.steps.b_step, "i8")
        with f.repeat(p.steps.chunks) as chunk:
            a2 = p.steps.a_chunk(f, a1, chunk.index)
            b2 = f.scaled(b1, chunk.index, p.steps.b_step, "i8")
            for i in range(high):
                _load(f, p.blocking.a(i), f.at(a2, i * p.a.tile, "i8"), p.a.row)
            for j in range(wide):
                _load(f, p.blocking.b(j), f.at(b2, j * p.b.tile, "i8"), p.b.row)
            for i, j, tile in cells:
                a, b = p.blocking.a(i), p.blocking.b(j)
                f.line(f"call void @llvm.x86.tdpbf16ps(i8 {tile}, i8 {a}, i8 {b})")
    for i, j, tile in cells:
        c = f.at("%c", i * p.c.tile + j * 4 * LANES, "i8")
        f.line(f"call void @llvm.x86.tilestored64(i8 {tile}, ptr {c}, i64 {p.c.row})")
    return f.text()


def module(product: Product, sizes: list[tuple[int, int]], task: Function) -> str:
    """Returns the IR of a module: blocks of a product of the given (high, wide) sizes, and the task."""
    functions = [
        block_function(f"block_{high}_{wide}", product, high, wide) for high, wide in sizes
    ]
    tiles = configuration(product.blocking, product.depth)
    return "".join(
        [declarations(LANES), narrow_declarations(), _DECLARATIONS, tiles, *functions, task.text()]
    )
