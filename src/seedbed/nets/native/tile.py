"""Register-tiled sums of products: `c[row, column, :] = start + sum_k a[row, column, k] * b[k, :]`.

This module emits their LLVM IR. `start` is a bias vector or what `c` holds before. The rows and
columns of `a` and `c` are affine in memory, so one emitter serves a convolution (positions x taps), its
weight gradient (taps x positions) and its input gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from seedbed.llvm import Function, VectorUnit


class Reduction(NamedTuple):
    """One loop of the sum: its number of trips, and how many floats `a` and `b` advance in each trip."""

    trips: int
    a_stride: int
    b_stride: int


@dataclass(frozen=True)
class Grid:
    """A block of results `c[row, column, lane]`.

    Strides are in floats. The `lanes` numbers of one row and column are contiguous in `b` and `c`.
    """

    rows: int
    columns: int
    lanes: int
    a_strides: tuple[int, int]  # (row, column)
    c_strides: tuple[int, int]
    reductions: tuple[Reduction, ...]  # outermost first
    # "bias": the sum starts at a vector of `lanes` floats; "add": the sum is added to what `c` holds
    start: Literal["bias", "add"]
    relu: bool = False


class Span(NamedTuple):
    """`blocks` consecutive blocks of `size` indices each; the first block starts at `begin`."""

    begin: int
    size: int
    blocks: int


def masked_lanes(lanes: int, width: int) -> str:
    """Returns the LLVM constant, without its type, that enables the first `lanes` of `width` lanes."""
    bits = ", ".join(f"i1 {'true' if i < lanes else 'false'}" for i in range(width))
    return f"<{bits}>"


def declarations(width: int) -> str:
    """Returns the declarations of the intrinsics that code for vectors of `width` lanes uses."""
    v, m = f"<{width} x float>", f"<{width} x i1>"
    return (
        f"declare {v} @llvm.fmuladd.v{width}f32({v}, {v}, {v})\n"
        f"declare {v} @llvm.masked.load.v{width}f32.p0(ptr, i32, {m}, {v})\n"
        f"declare void @llvm.masked.store.v{width}f32.p0({v}, ptr, i32, {m})\n"
        f"declare <{width} x i8> @llvm.masked.load.v{width}i8.p0(ptr, i32, {m}, <{width} x i8>)\n"
        "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)\n"
    )


def load(f: Function, pointer: str, lanes: int, width: int) -> str:
    """Emits a load of the first `lanes` floats of a vector; the other lanes are zero. Returns its name."""
    vector = f"<{width} x float>"
    if lanes == width:
        return f.op(f"load {vector}, ptr {pointer}, align 4")
    mask = f"<{width} x i1> {masked_lanes(lanes, width)}"
    return f.op(
        f"call {vector} @llvm.masked.load.v{width}f32.p0(ptr {pointer}, i32 4, {mask}, "
        f"{vector} zeroinitializer)"
    )


def store(f: Function, value: str, pointer: str, lanes: int, width: int) -> None:
    """Emits a store of the first `lanes` floats of a vector."""
    vector = f"<{width} x float>"
    if lanes == width:
        f.line(f"store {vector} {value}, ptr {pointer}, align 4")
        return
    mask = f"<{width} x i1> {masked_lanes(lanes, width)}"
    f.line(
        f"call void @llvm.masked.store.v{width}f32.p0({vector} {value}, "
        f"ptr {pointer}, i32 4, {mask})"
    )


def relu(f: Function, value: str, width: int) -> str:
    """Emits max(value, 0) of a float vector, which keeps NaN, and returns its name."""
    vector = f"<{width} x float>"
    negative = f.op(f"fcmp olt {vector} {value}, zeroinitializer")
    return f.op(f"select <{width} x i1> {negative}, {vector} zeroinitializer, {vector} {value}")


def _cycles(positions: int, vectors: int) -> float:
    """Estimates the cycles that a tile takes for one step of the sum.

    The model is a CPU with two FMA ports, two load ports and an FMA latency of four cycles.
    """
    return max(positions * vectors / 2, (positions + vectors) * 0.55, 4.0) + 0.5


def spans(total: int, size: int) -> list[Span]:
    """Returns the blocks of at most `size` indices that cover `total`: full ones, then the rest."""
    whole, rest = divmod(total, size)
    full = [Span(0, size, whole)] if whole else []
    return full + ([Span(whole * size, rest, 1)] if rest else [])


def _blocking(grid: Grid, unit: VectorUnit) -> tuple[int, int, int]:
    """Returns the tile (rows, columns, vectors) with the fewest estimated cycles over the whole grid.

    Its accumulators, one row of `b` and one number of `a` fit in the registers.
    """
    vectors = -(-grid.lanes // unit.width)
    best: tuple[float, tuple[int, int, int]] = (float("inf"), (1, 1, 1))
    for v in range(1, min(vectors, 4) + 1):
        room = (unit.registers - 1 - v) // v
        for r in range(1, min(grid.rows, room) + 1):
            for q in range(1, min(grid.columns, room // r) + 1):
                cost = sum(
                    _cycles(a.size * b.size, c.size) * a.blocks * b.blocks * c.blocks
                    for a in spans(grid.rows, r)
                    for b in spans(grid.columns, q)
                    for c in spans(vectors, v)
                )
                best = min(best, (cost, (r, q, v)))
    return best[1]


class _Tile(NamedTuple):
    rows: int
    columns: int
    lanes: tuple[int, ...]  # enabled lanes of each vector


def _tile_function(name: str, grid: Grid, tile: _Tile, width: int) -> str:
    """Returns the IR of one register tile: every accumulator stays in a register during the whole sum."""
    vector = f"<{width} x float>"
    f = Function(
        f"internal void @{name}(ptr noalias %a, ptr noalias %b, ptr noalias %c, ptr noalias %bias)",
        "noinline",
    )
    cells = [(r, q) for r in range(tile.rows) for q in range(tile.columns)]
    places = [r * grid.c_strides[0] + q * grid.c_strides[1] for r, q in cells]
    offsets = [r * grid.a_strides[0] + q * grid.a_strides[1] for r, q in cells]
    slots = list(enumerate(tile.lanes))
    if grid.start == "bias":
        row = [load(f, f.at("%bias", v * width), lanes, width) for v, lanes in slots]
        totals = row * len(cells)
    else:
        totals = ["zeroinitializer"] * (len(cells) * len(slots))
    totals = _sum(f, grid.reductions, "%a", "%b", totals, offsets, slots, width)
    for i, place in enumerate(places):
        for v, lanes in slots:
            value, pointer = totals[i * len(slots) + v], f.at("%c", place + v * width)
            if grid.start == "add":
                held = load(f, pointer, lanes, width)
                value = f.op(f"fadd {vector} {held}, {value}")
            store(f, relu(f, value, width) if grid.relu else value, pointer, lanes, width)
    return f.text()


def _sum(
    f: Function,
    reductions: Sequence[Reduction],
    a: str,
    b: str,
    totals: list[str],
    offsets: list[int],
    slots: list[tuple[int, int]],
    width: int,
) -> list[str]:
    """Emits nested loops over `reductions` around one step of the sum; returns the names of the totals.

    `a` and `b` are addresses. `offsets` holds the offset in `a` of each row and column of the tile, and
    `slots` holds (number, lanes) of each vector, which has `width` lanes at most.
    """
    vector = f"<{width} x float>"
    if reductions:
        loop, *inner = reductions
        carried = [("ptr", a), ("ptr", b), *((vector, t) for t in totals)]
        with f.repeat(loop.trips, carried) as carry:
            a, b, *held = carry.values
            held = _sum(f, inner, a, b, held, offsets, slots, width)
            carry.next = [f.at(a, loop.a_stride), f.at(b, loop.b_stride), *held]
        return carry.next[2:]
    weights = [load(f, f.at(b, v * width), lanes, width) for v, lanes in slots]
    result = []
    for i, offset in enumerate(offsets):
        scalar = f.op(f"load float, ptr {f.at(a, offset)}, align 4")
        first = f.op(f"insertelement {vector} poison, float {scalar}, i32 0")
        spread = f.op(
            f"shufflevector {vector} {first}, {vector} poison, <{width} x i32> zeroinitializer"
        )
        for v, weight in enumerate(weights):
            total = totals[i * len(weights) + v]
            result.append(
                f.op(
                    f"call contract {vector} @llvm.fmuladd.v{width}f32"
                    f"({vector} {spread}, {vector} {weight}, {vector} {total})"
                )
            )
    return result


def grid_function(name: str, grid: Grid, unit: VectorUnit) -> str:
    """Returns the IR of `void @name(ptr a, ptr b, ptr c, ptr bias)`, which computes the whole grid."""
    size = _blocking(grid, unit)
    f = Function(
        f"internal void @{name}(ptr noalias %a, ptr noalias %b, ptr noalias %c, ptr noalias %bias)",
        "noinline",
    )
    functions: dict[_Tile, str] = {}
    for lane, lanes, count in _vector_spans(grid.lanes, size[2], unit.width):
        block = sum(lanes)
        with f.repeat(count) as panel:
            b, bias = (f.at(f.scaled(p, panel.index, block), lane) for p in ("%b", "%bias"))
            c0 = f.at(f.scaled("%c", panel.index, block), lane)
            for rows in spans(grid.rows, size[0]):
                with f.repeat(rows.blocks) as row:
                    a1 = _advance(f, "%a", rows, row.index, grid.a_strides[0])
                    c1 = _advance(f, c0, rows, row.index, grid.c_strides[0])
                    for columns in spans(grid.columns, size[1]):
                        tile = _Tile(rows.size, columns.size, lanes)
                        callee = functions.setdefault(tile, f"{name}_{len(functions)}")
                        with f.repeat(columns.blocks) as column:
                            a2 = _advance(f, a1, columns, column.index, grid.a_strides[1])
                            c2 = _advance(f, c1, columns, column.index, grid.c_strides[1])
                            f.line(f"call void @{callee}(ptr {a2}, ptr {b}, ptr {c2}, ptr {bias})")
    tiles = [_tile_function(called, grid, t, unit.width) for t, called in functions.items()]
    return "".join([*tiles, f.text()])


def _advance(f: Function, base: str, span: Span, index: str, stride: int) -> str:
    return f.at(f.scaled(base, index, span.size * stride), span.begin * stride)


def _vector_spans(
    lanes: int, vectors: int, width: int
) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """Yields (first lane, lanes of each vector, repetitions) of the tiles that together cover `lanes`.

    If `lanes` is not a multiple of `width`, the last vector is partial.
    """
    whole, rest = divmod(lanes, width)
    for span in spans(whole, vectors):
        full = (width,) * span.size
        tail = rest and span.begin + span.size * span.blocks == whole and span.size < vectors
        # the last tile has room for the partial vector
        if tail:
            yield span.begin * width, (*full, rest), 1
            return
        yield span.begin * width, full, span.blocks
    if rest:
        yield whole * width, (rest,), 1
