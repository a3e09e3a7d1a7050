"""Sums of products of bfloat16 numbers, accumulated in float32, by the instructions that a CPU has for them.

A is a matrix of numbers [rows, depth], and B one of pairs of neighbouring rows of a matrix [depth, columns]:
[depth / 2, columns, 2]. B and the results C are cut into panels of 16 columns. A block of results, which
stays in registers during the whole sum, is `high` tiles of A's rows by `wide` panels.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from seedbed.llvm import Function
from seedbed.nets.native.rows import narrow_declarations
from seedbed.nets.native.tile import Span, declarations, spans

LANES = 16
"""The columns of a panel: as many as float32 numbers in a vector of 64 bytes."""


class Blocking(NamedTuple):
    """A block of results: `high` tiles of `rows` rows of A each, by `wide` panels of B."""

    high: int
    wide: int
    rows: int


class Grid(NamedTuple):
    """Rows of A, numbered along `lines` of `columns` rows each that begin `period` numbers apart."""

    lines: int
    columns: int
    period: int

    @property
    def size(self) -> int:
        """The count of rows."""
        return self.lines * self.columns

    def number(self, row: int) -> int:
        """Returns the number of the row that comes after `row` others."""
        return row // self.columns * self.period + row % self.columns

    @property
    def length(self) -> int:
        """The count of numbers from the first row to the last, with those of no row."""
        return self.number(self.size - 1) + 1


class Cover(NamedTuple):
    """Blocks of rows of A, alike, that cover a grid of rows. The last ones overlap their neighbours.

    What two blocks compute, on two threads perhaps, has the same bits.
    """

    whole: Grid
    block: Grid

    @property
    def counts(self) -> tuple[int, int]:
        """The number of blocks down the lines and along the columns."""
        return -(-self.whole.lines // self.block.lines), -(
            -self.whole.columns // self.block.columns
        )

    def first(self, f: Function, line: str, column: str) -> tuple[str, str]:
        """Returns the line and column of a block's first row; takes the names of the block's indices."""
        begin, end = (
            f.op(
                f"call i64 @llvm.umin.i64(i64 {f.op(f'mul i64 {index}, {size}')}, "
                f"i64 {total - size})"
            )
            for index, total, size in zip(
                (line, column), self.whole[:2], self.block[:2], strict=True
            )
        )
        return begin, end

    def number(self, f: Function, line: str, column: str) -> str:
        """Returns the number of the row at a line and column, all names of values."""
        return f.op(f"add i64 {f.op(f'mul i64 {line}, {self.whole.period}')}, {column}")


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
    """The loops of a sum: windows of A, each in `chunks` of as many numbers as a row of A has in a block.

    Chunks of A are `a_step` bytes apart, but the last begins at `a_last`, and so may overlap the one before;
    B has zeros for what the last repeats, so an infinite number there makes a sum NaN. Chunks of B, one after
    the other through all windows, are `b_step` bytes apart.
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


class Product(NamedTuple):
    """A block of results `c = start + sum over steps of a * b`, panels of C side by side 64 bytes apart.

    All distances are in bytes. The rows of a tile are `a_row`, `b_row` and `c_row` apart.
    """

    blocking: Blocking
    depth: int  # numbers in a row of A in one chunk
    steps: Steps
    a_row: int
    a_tiles: tuple[int, ...]  # where each tile of A begins
    b_row: int
    b_panel: int  # between panels of B
    c_row: int
    start: int | None  # between rows of what C starts at, or None for zero

    @property
    def c_tile(self) -> int:
        """The distance between tiles of C."""
        return self.blocking.rows * self.c_row


class Instructions(Protocol):
    """The instructions of a CPU that sum products of bfloat16 numbers."""

    @property
    def longest(self) -> int | None:
        """The most numbers in a row of A in one chunk, or None if there is no limit."""
        ...

    @property
    def tile_rows(self) -> int:
        """The most rows of a tile."""
        ...

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """The (high, wide) of all blocks that fit in the registers, those that are usually best first."""
        ...

    def cycles(self, block: Blocking, depth: int) -> float:
        """Estimates the cycles of one chunk of the sum for a block."""
        ...

    def preamble(self, product: Product) -> str:
        """Returns the IR of declarations and constants that the other functions need."""
        ...

    def begin(self, f: Function) -> None:
        """Emits what must precede all sums of a task."""
        ...

    def end(self, f: Function) -> None:
        """Emits what must follow all sums of a task."""
        ...

    def block_function(self, name: str, p: Product, high: int, wide: int) -> str:
        """Returns the IR of `void @name(ptr a, ptr b, ptr c, ptr start)` for a block of `high` by `wide`.

        Results stay in registers during the whole sum.
        """
        ...


def choose_positions(
    unit: Instructions, rows: Grid, panels: int, depth: int
) -> tuple[Blocking, Cover]:
    """Returns the blocking with the fewest estimated cycles for a grid of rows, and how blocks cover it.

    All blocks have the same number of tiles. If a tile has several rows, they are as few as cover the grid,
    whose lines are then joined, with what lies between them. If it has one, a block is a rectangle.
    """
    choices: list[tuple[Blocking, Cover]] = []
    joined = Grid(1, rows.length, rows.period)
    for high, wide in unit.sizes:
        if unit.tile_rows > 1:
            blocks = -(-joined.size // (high * unit.tile_rows))
            block = Blocking(high, wide, -(-joined.size // (blocks * high)))
            if high * block.rows <= joined.size:
                choices.append((block, Cover(joined, Grid(1, high * block.rows, rows.period))))
            continue
        for lines in range(1, min(high, rows.lines) + 1):
            if high % lines == 0 and high // lines <= rows.columns:
                cover = Cover(rows, Grid(lines, high // lines, rows.period))
                choices.append((Blocking(high, wide, 1), cover))

    def cost(choice: tuple[Blocking, Cover]) -> float:
        block, cover = choice
        return _cost(unit, block, [Span(0, block.high, math.prod(cover.counts))], panels, depth)

    return min(choices, key=cost)


def choose_rows(unit: Instructions, rows: int, panels: int, depth: int) -> Blocking:
    """Returns the blocking with the fewest estimated cycles for `rows` of A.

    Tiles are as high as they can be. The last block may have fewer of them.
    """
    blocks = [Blocking(high, wide, unit.tile_rows) for high, wide in unit.sizes]

    def cost(block: Blocking) -> float:
        return _cost(unit, block, spans(-(-rows // block.rows), block.high), panels, depth)

    return min(blocks, key=cost)


def _cost(
    unit: Instructions, block: Blocking, heights: list[Span], panels: int, depth: int
) -> float:
    return sum(
        unit.cycles(block._replace(high=high.size, wide=wide.size), depth)
        * high.blocks
        * wide.blocks
        for high in heights
        for wide in spans(panels, block.wide)
    )


def module(
    unit: Instructions, product: Product, sizes: list[tuple[int, int]], task: Function
) -> str:
    """Returns the IR of a module: blocks of a product of the given (high, wide) sizes, and the task."""
    functions = [
        unit.block_function(f"block_{high}_{wide}", product, high, wide) for high, wide in sizes
    ]
    return "".join(
        [
            declarations(LANES),
            narrow_declarations(),
            "declare i64 @llvm.umin.i64(i64, i64)\n",
            unit.preamble(product),
            *functions,
            task.text(),
        ]
    )
