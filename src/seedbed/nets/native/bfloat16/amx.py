"""Sums of products of bfloat16 numbers by the tiles of Intel's AMX.

A tile is a register of at most 16 rows of 64 bytes. One instruction adds to a tile C of float32 [rows, 16]
the product of a tile A of bfloat16 [rows, depth] and a tile B [depth / 2, 16, 2]. A task has one
configuration, which says how many rows and bytes of each tile are in use.
"""

from __future__ import annotations

from seedbed.llvm import Function
from seedbed.nets.native.bfloat16.product import LANES, Blocking, Product

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


class Tiles:
    """The `Instructions` of AMX."""

    longest = 2 * LANES
    tile_rows = 16
    # With eight tiles in all.
    sizes = ((2, 2), (3, 1), (1, 3), (2, 1), (1, 2), (1, 1))

    def cycles(self, block: Blocking, depth: int) -> float:
        """Estimates the cycles of one chunk of the sum for a block.

        The model is a CPU that multiplies a row of A a cycle, and loads two rows of tiles a cycle. Results
        wait for their own last step.
        """
        products = block.high * block.wide * block.rows
        loads = (block.high * block.rows + block.wide * depth / 2) / 2
        return max(products, loads, _LATENCY)

    def preamble(self, product: Product) -> str:
        """Returns the IR of the intrinsics and of the constant `@tiles` that configures the tiles."""
        return _DECLARATIONS + _configuration(product.blocking, product.depth)

    def begin(self, f: Function) -> None:
        """Emits the configuration of this thread's tiles by the constant `@tiles`."""
        f.line("call void @llvm.x86.ldtilecfg(ptr @tiles)")

    def end(self, f: Function) -> None:
        """Emits the end of this thread's use of tiles."""
        f.line("call void @llvm.x86.tilerelease()")

    def block_function(self, name: str, p: Product, high: int, wide: int) -> str:
        """Returns the IR of `void @name(ptr a, ptr b, ptr c, ptr start)` for a block of tiles.

        The tiles must be configured.
        """
        f = Function(
            f"internal void @{name}(ptr noalias %a, ptr noalias %b, ptr %c, ptr %start)", "noinline"
        )
        cells = [(i, j, i * p.blocking.wide + j) for i in range(high) for j in range(wide)]
        for i, j, tile in cells:
            if p.start is None:
                f.line(f"call void @llvm.x86.tilezero(i8 {tile})")
            else:
                start = f.at("%start", i * p.blocking.rows * p.start + j * 4 * LANES, "i8")
                _load(f, tile, start, p.start)
        with f.repeat(p.steps.windows.number) as window:
            a1 = p.steps.windows.at(f, "%a", window.index)
            b1 = f.scaled("%b", window.index, p.steps.chunks * p.steps.b_step, "i8")
            with f.repeat(p.steps.chunks) as chunk:
                a2 = p.steps.a_chunk(f, a1, chunk.index)
                b2 = f.scaled(b1, chunk.index, p.steps.b_step, "i8")
                for i in range(high):
                    _load(f, _a(p.blocking, i), f.at(a2, p.a_tiles[i], "i8"), p.a_row)
                for j in range(wide):
                    _load(f, _b(p.blocking, j), f.at(b2, j * p.b_panel, "i8"), p.b_row)
                for i, j, tile in cells:
                    a, b = _a(p.blocking, i), _b(p.blocking, j)
                    f.line(f"call void @llvm.x86.tdpbf16ps(i8 {tile}, i8 {a}, i8 {b})")
        for i, j, tile in cells:
            c = f.at("%c", i * p.c_tile + j * 4 * LANES, "i8")
            f.line(f"call void @llvm.x86.tilestored64(i8 {tile}, ptr {c}, i64 {p.c_row})")
        return f.text()


def _a(block: Blocking, i: int) -> int:
    """Returns the number of the tile for block `i` of A's rows. Before it are those of results."""
    return block.high * block.wide + i


def _b(block: Blocking, j: int) -> int:
    """Returns the number of the tile for panel `j` of B."""
    return block.high * block.wide + block.high + j


def _configuration(block: Blocking, depth: int) -> str:
    rows, width = [0] * 16, [0] * 16
    for tile in range(_b(block, block.wide)):
        is_b = tile >= _b(block, 0)
        rows[tile] = depth // 2 if is_b else block.rows
        width[tile] = 2 * depth if _a(block, 0) <= tile < _b(block, 0) else 4 * LANES
    numbers = [1, *[0] * 15, *(byte for n in width for byte in (n, 0)), *rows]
    text = "".join(f"\\{number:02X}" for number in numbers)
    return f'@tiles = internal constant [64 x i8] c"{text}", align 64\n'


def _load(f: Function, tile: int, base: str, stride: int) -> None:
    f.line(f"call void @llvm.x86.tileloadd64(i8 {tile}, ptr {base}, i64 {stride})")
