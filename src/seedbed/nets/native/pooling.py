"""LLVM IR of max pooling on NHWC images, float32 or bfloat16, and of its gradient.

Images are not padded: a tap beyond the image stands for the nearest pixel, which is in the window, too. That
changes neither the maximum nor which of equal pixels is the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from seedbed.llvm import Function
from seedbed.nets.native.rows import (
    TASK,
    Kind,
    buffers,
    clear,
    each_vector,
    load_kind,
    narrow_declarations,
    share,
    store_kind,
)
from seedbed.nets.native.tile import declarations, load, store


@dataclass(frozen=True)
class Pooling:
    """The static description of one layer: everything but the batch size. Windows are square."""

    height: int
    width: int
    channels: int
    window: int
    stride: int
    margins: tuple[tuple[int, int], tuple[int, int]]  # (above, below), (left, right)
    kind: Kind  # of images, results and gradients: "float", or "bfloat" by AVX512-BF16
    lanes: int  # of a vector; 16 for "bfloat"

    @property
    def output(self) -> tuple[int, int]:
        """Height and width of the result."""
        rows, columns = self.height + sum(self.margins[0]), self.width + sum(self.margins[1])
        return (rows - self.window) // self.stride + 1, (columns - self.window) // self.stride + 1

    @property
    def line(self) -> int:
        """Numbers in a row of an image."""
        return self.width * self.channels

    @property
    def ring_size(self) -> int:
        """Floats of scratch for the gradients of the rows of one window."""
        return self.window * self.line


def forward_ir(p: Pooling) -> str:
    """Returns the IR of a task over buffers (x) -> (y, a float for each chunk, which is not written)."""
    f = Function(TASK)
    x, y = buffers(f, 2)
    width = p.lanes
    vector = f"<{width} x float>"

    with f.between(*share(f)) as image:
        source = f.scaled(x, image, p.height * p.line, p.kind)
        results = f.scaled(y, image, p.output[0] * p.output[1] * p.channels, p.kind)
        with f.repeat(p.output[0]) as row:
            lines = [f.scaled(source, k, p.line, p.kind) for k in _rows(f, p, row.index)]
            places = f.scaled(results, row.index, p.output[1] * p.channels, p.kind)

            def pool(column: str, taps: list[str]) -> None:
                place = f.scaled(places, column, p.channels, p.kind)
                for first, lanes in _lanes(p):
                    each = [
                        f.at(f.at(line, t, p.kind), first, p.kind) for line in lines for t in taps
                    ]
                    best, *others = (
                        load_kind(f, p.kind, pointer, lanes, width) for pointer in each
                    )
                    for value in others:
                        best = f.op(
                            f"call nsz {vector} @llvm.maximum.v{width}f32"
                            f"({vector} {best}, {vector} {value})"
                        )
                    store_kind(f, p.kind, best, f.at(place, first, p.kind), lanes, width)

            _each_column(f, p, pool)
    return _declarations(p) + f.text()


def gradient_ir(p: Pooling) -> str:
    """Returns the IR of a task over buffers (x, y, dy) -> (dx, scratch of `ring_size` floats for each chunk).

    If a window has equal maxima, the first of them in row-major order takes the gradient. What a row of the
    image gets from several windows is summed in float32, in a ring of rows in scratch memory.
    """
    f = Function(TASK)
    x, y, dy, dx, scratch = buffers(f, 5)
    width = p.lanes
    vector, mask = f"<{width} x float>", f"<{width} x i1>"
    ring = f.scaled(scratch, "%chunk", p.ring_size)
    clear(f, ring, p.ring_size)

    with f.between(*share(f)) as image:
        source, target = (f.scaled(b, image, p.height * p.line, p.kind) for b in (x, dx))
        results = [
            f.scaled(b, image, p.output[0] * p.output[1] * p.channels, p.kind) for b in (y, dy)
        ]
        with f.repeat(p.output[0]) as row:
            rows = _rows(f, p, row.index)
            lines = [f.scaled(source, k, p.line, p.kind) for k in rows]
            sums = [_slot(f, p, ring, k) for k in rows]
            places = [f.scaled(b, row.index, p.output[1] * p.channels, p.kind) for b in results]

            def scatter(column: str, taps: list[str]) -> None:
                at = [f.scaled(b, column, p.channels, p.kind) for b in places]
                for first, lanes in _lanes(p):
                    best, gradient = (
                        load_kind(f, p.kind, f.at(b, first, p.kind), lanes, width) for b in at
                    )
                    for line, slot in zip(lines, sums, strict=True):
                        for tap in taps:
                            pointer = f.at(f.at(line, tap, p.kind), first, p.kind)
                            value = load_kind(f, p.kind, pointer, lanes, width)
                            found = f"{mask} " + f.op(f"fcmp oeq {vector} {value}, {best}")
                            part = f.op(
                                f"select {found}, {vector} {gradient}, {vector} zeroinitializer"
                            )
                            pointer = f.at(f.at(slot, tap), first)
                            total = load(f, pointer, lanes, width)
                            store(f, f.op(f"fadd {vector} {total}, {part}"), pointer, lanes, width)
                            gradient = f.op(
                                f"select {found}, {vector} zeroinitializer, {vector} {gradient}"
                            )

            _each_column(f, p, scatter)
            _put_out(f, p, row.index, ring, target)
    return _declarations(p) + f.text()


def _declarations(p: Pooling) -> str:
    vector = f"<{p.lanes} x float>"
    return (
        declarations(p.lanes)
        + (narrow_declarations() if p.kind == "bfloat" else "")
        + f"declare {vector} @llvm.maximum.v{p.lanes}f32({vector}, {vector})\n"
        + "declare i64 @llvm.smax.i64(i64, i64)\ndeclare i64 @llvm.smin.i64(i64, i64)\n"
    )


def _rows(f: Function, p: Pooling, row: str) -> list[str]:
    """Returns the rows of the image that the window of a result in row `row` has, in order."""
    start = f.op(f"mul i64 {row}, {p.stride}")
    taps = [f.op(f"add i64 {start}, {i - p.margins[0][0]}") for i in range(p.window)]
    return [_clamped(f, tap, p.height - 1) for tap in taps]


def _clamped(f: Function, index: str, most: int) -> str:
    least = f.op(f"call i64 @llvm.smax.i64(i64 {index}, i64 0)")
    return f.op(f"call i64 @llvm.smin.i64(i64 {least}, i64 {most})")


def _each_column(f: Function, p: Pooling, emit: Callable[[str, list[str]], None]) -> None:
    """Calls `emit(column, taps)` for each column at the edges, and in a loop for those between them.

    `taps` are the columns of the window, in order, as offsets in numbers from the start of a row.
    """
    left = p.margins[1][0]
    first, last = -(-left // p.stride), (p.width - p.window + left) // p.stride
    inner = range(first, last + 1)
    for column in (c for c in range(p.output[1]) if c not in inner):
        start = column * p.stride - left
        pixels = dict.fromkeys(min(max(start + j, 0), p.width - 1) for j in range(p.window))
        emit(str(column), [str(pixel * p.channels) for pixel in pixels])
    if inner:
        with f.repeat(len(inner)) as step:
            column = f.op(f"add i64 {step.index}, {first}")
            start = f.op(f"mul i64 {column}, {p.stride * p.channels}")
            taps = [f.op(f"add i64 {start}, {(j - left) * p.channels}") for j in range(p.window)]
            emit(column, taps)


def _lanes(p: Pooling) -> list[tuple[int, int]]:
    """Returns (first channel, number of channels) of each vector."""
    width = p.lanes
    return [(i, min(width, p.channels - i)) for i in range(0, p.channels, width)]


def _slot(f: Function, p: Pooling, ring: str, row: str) -> str:
    """Returns the address in the ring of the gradients of a row of the image."""
    return f.scaled(ring, f.op(f"urem i64 {row}, {p.window}"), p.line)


def _put_out(f: Function, p: Pooling, row: str, ring: str, target: str) -> None:
    """Emits stores of the rows of an image's gradient that no window after those of row `row` has.

    Their slots in the ring are zero afterwards.
    """
    following = f.op(f"add i64 {row}, 1")
    begin, end = (
        _clamped(
            f, f.op(f"sub i64 {f.op(f'mul i64 {r}, {p.stride}')}, {p.margins[0][0]}"), p.height
        )
        for r in (row, following)
    )
    over = f.op(f"icmp eq i64 {following}, {p.output[0]}")
    end = f.op(f"select i1 {over}, i64 {p.height}, i64 {end}")
    with f.between(begin, end) as k:
        slot, place = _slot(f, p, ring, k), f.scaled(target, k, p.line, p.kind)

        def move(at: str, lanes: int) -> None:
            value = load(f, f.at(slot, at), lanes, p.lanes)
            store_kind(f, p.kind, value, f.at(place, at, p.kind), lanes, p.lanes)

        each_vector(f, p.line, p.lanes, move)
        clear(f, slot, p.line)
