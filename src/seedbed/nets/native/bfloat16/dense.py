"""Writes the LLVM IR of dense layers in bfloat16: products, their gradients, and the packing of matrices.

All matrices are row-major and hold float32 or bfloat16 numbers, which are rounded to bfloat16 on the way in.
Sums are float32. No sum is divided among chunks, so the number of chunks changes no bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from seedbed.llvm import Function
from seedbed.nets.native.bfloat16.layout import count_floats
from seedbed.nets.native.bfloat16.product import (
    LANES,
    Blocking,
    Cover,
    Grid,
    Instructions,
    Product,
    Steps,
    Windows,
    choose_positions,
    module,
)
from seedbed.nets.native.bfloat16.words import interleave, shuffle, transpose
from seedbed.nets.native.rows import (
    TASK,
    Kind,
    buffers,
    clear,
    each_vector,
    load_kind,
    narrow_declarations,
    round_words,
    share,
    store_kind,
    store_words,
)
from seedbed.nets.native.tile import declarations, spans

_LONGEST = 2 * LANES  # numbers in a row of A in one chunk, at most: what a tile takes
_NEAR = 256 << 10  # bytes of a core's second cache that a part of A may fill
_ONE = Windows(1, 1, 0, 0)
# A share of less takes less time than waking a thread for it: products of numbers, and numbers moved.
_PRODUCTS, _MOVES = 1 << 20, 1 << 14


def _count_shares(work: int, least: int) -> int:
    """Returns how many shares work is divided into: at most 32, each of at least so much."""
    return max(1, min(32, work // least))


class Packed(NamedTuple):
    """A matrix B [numbers, columns] as pairs: [panel, chunk, pair, 16, 2], with zeros after its ends.

    There are `chunks` chunks of `depth` numbers, which is even.
    """

    numbers: int
    columns: int
    chunks: int
    depth: int

    @property
    def panels(self) -> int:
        """The number of blocks of 16 columns."""
        return -(-self.columns // LANES)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the packed matrix."""
        return (self.panels, self.chunks, self.depth // 2, LANES, 2)

    @property
    def chunk(self) -> int:
        """The bytes of a chunk of a panel."""
        return self.depth * 2 * LANES

    @property
    def shares(self) -> int:
        """The number of shares of the work of packing."""
        return _count_shares(self.numbers * self.columns, _MOVES)


def packed(numbers: int, columns: int) -> Packed:
    """Returns how a matrix B [numbers, columns] is packed for `RowProduct`."""
    chunks = -(-numbers // _LONGEST)
    return Packed(numbers, columns, chunks, -(-numbers // (2 * chunks)) * 2)


@dataclass(frozen=True)
class RowProduct:
    """The product of `rows` rows of numbers with a packed matrix."""

    unit: Instructions
    rows: int
    matrix: Packed
    source: Kind

    @functools.cached_property
    def blocks(self) -> tuple[Blocking, Cover]:
        """A block of results, and how such blocks cover the rows."""
        return choose_positions(
            self.unit, Grid(1, self.rows, self.rows), self.matrix.panels, self.matrix.depth
        )

    @property
    def block_rows(self) -> int:
        """The rows of a block."""
        return self.blocks[1].block.columns

    @property
    def block_bytes(self) -> int:
        """The bytes of a block's rows in scratch memory: [chunk, row, depth]."""
        return 2 * self.block_rows * self.matrix.chunks * self.matrix.depth

    @property
    def group(self) -> int:
        """The blocks whose rows are in scratch memory together: few, so that threads have equal shares."""
        return max(1, min(_NEAR // self.block_bytes, self.count // 16))

    @property
    def count(self) -> int:
        """The number of blocks of rows."""
        return self.blocks[1].counts[1]

    @property
    def chunks(self) -> int:
        """The number of shares of the work."""
        products = self.rows * self.matrix.numbers * self.matrix.columns
        return min(_count_shares(products, _PRODUCTS), -(-self.count // self.group))

    @property
    def result_shape(self) -> tuple[int, int]:
        """The shape of the results: whole panels."""
        return self.rows, self.matrix.panels * LANES

    @property
    def scratch_size(self) -> int:
        """The scratch memory of one chunk, in floats."""
        return count_floats(self.group * self.block_bytes // 2)

    @property
    def product(self) -> Product:
        """The sum of one block."""
        (blocking, _), matrix = self.blocks, self.matrix
        row, step = 2 * matrix.depth, 2 * matrix.depth * self.block_rows
        return Product(
            blocking,
            matrix.depth,
            Steps(_ONE, matrix.chunks, step, (matrix.chunks - 1) * step, matrix.chunk),
            a_row=row,
            a_tiles=tuple(i * blocking.rows * row for i in range(blocking.high)),
            b_row=4 * LANES,
            b_panel=matrix.chunks * matrix.chunk,
            c_row=matrix.panels * LANES * 4,
            start=None,
        )


def row_product_ir(p: RowProduct) -> str:
    """Returns the IR of a task with the buffers (x [rows, numbers], packed matrix) -> (y, scratch).

    y is float32 of `result_shape`. `scratch` has `scratch_size` floats for each chunk.
    """
    f = Function(TASK)
    x, matrix, y, scratch = buffers(f, 4)
    scratch = f.scaled(scratch, "%chunk", p.scratch_size)
    clear(f, scratch, p.scratch_size)
    (blocking, cover), product = p.blocks, p.product
    p.unit.begin(f)
    with f.between(*share(f, -(-p.count // p.group))) as group:
        begin = f.op(f"mul i64 {group}, {p.group}")
        left = f.op(f"sub i64 {p.count}, {begin}")
        count = f.op(f"call i64 @llvm.umin.i64(i64 {left}, i64 {p.group})")
        with f.repeat(count) as block:
            _, first = cover.first(f, "0", f.op(f"add i64 {begin}, {block.index}"))
            to = f.scaled(scratch, block.index, p.block_bytes, "i8")
            _copy_rows(f, p, f.scaled(x, first, p.matrix.numbers, p.source), to)
        for panel, wide, times in spans(p.matrix.panels, blocking.wide):
            with f.repeat(times) as some:
                b, c = (
                    f.at(f.scaled(q, some.index, wide * size, "i8"), panel * size, "i8")
                    for q, size in ((matrix, product.b_panel), (y, 4 * LANES))
                )
                with f.repeat(count) as block:
                    _, first = cover.first(f, "0", f.op(f"add i64 {begin}, {block.index}"))
                    a = f.scaled(scratch, block.index, p.block_bytes, "i8")
                    to = f.scaled(c, first, product.c_row, "i8")
                    f.line(
                        f"call void @block_{blocking.high}_{wide}"
                        f"(ptr {a}, ptr {b}, ptr {to}, ptr null)"
                    )
    p.unit.end(f)
    sizes = [(blocking.high, wide) for _, wide, _ in spans(p.matrix.panels, blocking.wide)]
    return module(p.unit, product, sizes, f)


def _copy_rows(f: Function, p: RowProduct, source: str, target: str) -> None:
    """Writes a block's rows as bfloat16 [chunk, row, depth]; leaves the zeros after their ends."""
    matrix = p.matrix
    with f.repeat(p.block_rows) as row:
        begin = f.scaled(source, row.index, matrix.numbers, p.source)
        end = f.scaled(target, row.index, 2 * matrix.depth, "i8")
        for first, numbers, times in spans(matrix.numbers, matrix.depth):
            with f.repeat(times) as chunk:
                at = f.op(f"add i64 {first // matrix.depth}, {chunk.index}")
                part = f.scaled(begin, at, matrix.depth, p.source)
                to = f.scaled(end, at, p.block_rows * 2 * matrix.depth, "i8")

                def move(place: str, lanes: int, part: str = part, to: str = to) -> None:
                    value = load_kind(f, p.source, f.at(part, place, p.source), lanes, LANES)
                    store_kind(f, "bfloat", value, f.at(to, place, "bfloat"), lanes, LANES)

                each_vector(f, numbers, LANES, move)


def pack_rows_ir(matrix: Packed, source: Kind) -> str:
    """Returns the IR of a task with the buffer (B [numbers, columns]) -> (packed matrix, one float a share).

    The floats are not written: they say how many shares there are.
    """
    f = Function(TASK)
    b, packed = buffers(f, 2)
    pairs = matrix.depth // 2
    # All panels of a few rows together, so that memory is read in order.
    with f.between(*share(f, matrix.chunks)) as chunk, f.repeat(matrix.panels) as panel:
        to = f.scaled(packed, panel.index, matrix.chunks * matrix.chunk, "i8")
        to = f.scaled(to, chunk, matrix.chunk, "i8")
        begin = f.scaled(b, panel.index, LANES, source)
        for lanes in _each_width(f, panel.index, matrix.columns):
            with f.repeat(pairs) as pair:
                place = f.op(f"add i64 {f.op(f'mul i64 {chunk}, {pairs}')}, {pair.index}")
                row = f.scaled(begin, place, 2 * matrix.columns, source)
                end = f.scaled(to, pair.index, LANES)
                whole, odd = divmod(matrix.numbers, 2)
                # Two rows; the last, if their number is odd; and none after it.
                for rows, condition in (
                    (2, f"ult i64 {place}, {whole}"),
                    (1, f"eq i64 {place}, {whole}"),
                    (0, f"ugt i64 {place}, {whole - 1 + odd}"),
                ):
                    if rows == 1 and not odd:
                        continue
                    with f.when(f.op(f"icmp {condition}")):
                        words = [
                            round_words(
                                f, source, f.at(row, i * matrix.columns, source), lanes, LANES
                            )
                            for i in range(rows)
                        ] + ["zeroinitializer"] * (2 - rows)
                        both = interleave(f, *words)
                        f.line(f"store <32 x i16> {both}, ptr {end}, align 4")
    return _plain_module(f)


def pack_columns_ir(matrix: Packed, source: Kind) -> str:
    """Returns the IR of a task with the buffer (transposed B [columns, numbers]), else as `pack_rows_ir`."""
    f = Function(TASK)
    b, packed = buffers(f, 2)
    with f.between(*share(f, matrix.panels)) as panel:
        to = f.scaled(packed, panel, matrix.chunks * matrix.chunk, "i8")
        begin = f.scaled(b, panel, LANES * matrix.numbers, source)
        for rows in _each_width(f, panel, matrix.columns):
            for first, numbers, times in spans(matrix.numbers, matrix.depth):
                with f.repeat(times) as chunk:
                    at = f.op(f"add i64 {chunk.index}, {first // matrix.depth}")
                    here = f.scaled(begin, at, matrix.depth, source)
                    end = f.scaled(to, at, matrix.chunk, "i8")
                    pairs = [
                        _load_pairs(f, source, f.at(here, i * matrix.numbers, source), numbers)
                        for i in range(rows)
                    ] + ["zeroinitializer"] * (LANES - rows)
                    columns = transpose(f, pairs, "i32")[: matrix.depth // 2]
                    for i, column in enumerate(columns):
                        f.line(f"store <16 x i32> {column}, ptr {f.at(end, LANES * i)}, align 4")
    return _plain_module(f)


def _load_pairs(f: Function, source: Kind, pointer: str, numbers: int) -> str:
    """Loads at most 32 numbers as 16 pairs of bfloat16; zeros follow them."""
    parts = [
        round_words(f, source, f.at(pointer, first, source), lanes, LANES)
        for first, lanes in ((0, min(numbers, LANES)), (LANES, numbers - LANES))
        if lanes > 0
    ]
    parts += ["zeroinitializer"] * (2 - len(parts))
    joined = shuffle(f, (parts[0], parts[1]), list(range(2 * LANES)), "i16")
    return f.op(f"bitcast <32 x i16> {joined} to <16 x i32>")


@dataclass(frozen=True)
class Transpose:
    """The transpose of a matrix [rows, columns], in bfloat16."""

    rows: int
    columns: int
    source: Kind

    @property
    def chunks(self) -> int:
        """The number of shares of the work."""
        return _count_shares(self.rows * self.columns, _MOVES)


def transpose_ir(m: Transpose) -> str:
    """Returns the IR of a task with the buffer (matrix [rows, columns]) -> (transpose, one float a chunk).

    The floats are not written: they say how many chunks there are.
    """
    f = Function(TASK)
    matrix, to = buffers(f, 2)
    with f.between(*share(f, -(-m.columns // LANES))) as vector:
        source = f.scaled(matrix, vector, LANES, m.source)
        target = f.scaled(to, vector, LANES * m.rows, "bfloat")
        for columns in _each_width(f, vector, m.columns):
            for first, rows, times in spans(m.rows, LANES):
                with f.repeat(times) as block:
                    place = f.op(f"add i64 {first}, {f.op(f'mul i64 {block.index}, {LANES}')}")
                    begin = f.scaled(source, place, m.columns, m.source)
                    end = f.at(target, place, "bfloat")
                    words = [
                        round_words(
                            f, m.source, f.at(begin, i * m.columns, m.source), columns, LANES
                        )
                        for i in range(rows)
                    ] + ["zeroinitializer"] * (LANES - rows)
                    for i, column in enumerate(transpose(f, words, "i16")[:columns]):
                        store_words(f, column, f.at(end, i * m.rows, "bfloat"), rows, LANES)
    return _plain_module(f)


def _each_width(f: Function, vector: str, total: int) -> Iterator[int]:
    """Yields the numbers of a vector that is whole, and of the last vector of `total` numbers if it is not.

    What the loop over them emits runs if the vector with the index `vector`, the name of a value, is such.
    """
    for first, lanes, _ in spans(total, LANES):
        compare = "ult" if lanes == LANES else "uge"
        limit = total // LANES if lanes == LANES else first // LANES
        with f.when(f.op(f"icmp {compare} i64 {vector}, {limit}")):
            yield lanes


def _plain_module(task: Function) -> str:
    return declarations(LANES) + narrow_declarations() + task.text()
