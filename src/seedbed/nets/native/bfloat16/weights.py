"""Writes the LLVM IR of the weight gradient of convolutions in bfloat16."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

from seedbed.llvm import Function
from seedbed.nets.native.bfloat16.correlation import forward
from seedbed.nets.native.bfloat16.layout import (
    Layout,
    change_of_images,
    copy_gradient,
    count_floats,
)
from seedbed.nets.native.bfloat16.product import (
    LANES,
    Blocking,
    Instructions,
    Product,
    Steps,
    Windows,
    choose_rows,
    module,
)
from seedbed.nets.native.bfloat16.words import interleave, transpose
from seedbed.nets.native.convolution import Convolution
from seedbed.nets.native.rows import TASK, buffers, clear, load_kind, load_words, share, store_words
from seedbed.nets.native.tile import load, spans, store


@dataclass(frozen=True)
class Gradient:
    """The sums of a layer's weight gradient: over positions, of results' gradients times windows.

    A is the results' gradient, transposed to [features, positions]. B is the image with each number beside
    that of the next position, so that neighbouring numbers of two positions' windows are a row of pairs.
    Between rows of the result the gradient is 0: where a pixel is not finite, sums that it is no part of may
    not be finite either.
    """

    unit: Instructions
    image: Layout
    kernel_rows: int
    segment: int
    positions: int  # with those between rows of the result
    gradient: Layout

    @property
    def features(self) -> int:
        """The number of features, rounded up to whole vectors."""
        return self.gradient.depth

    @property
    def taps(self) -> int:
        """The numbers of a window in one row of the image, rounded up to whole vectors."""
        return -(-self.segment // LANES) * LANES

    @property
    def panels(self) -> tuple[int, int]:
        """How many windows of kernel rows are summed one after another, and the panels of B in each.

        Where 16 numbers are a whole row of a window, its rows are panels of one window.
        """
        if self.taps == LANES and self.image.stride == 1:
            return 1, self.kernel_rows
        return self.kernel_rows, self.taps // LANES

    @property
    def depth(self) -> int:
        """The count of positions in a row of A."""
        even = -(-self.positions // 2) * 2
        limit = self.unit.longest
        if limit is None:
            return even
        return LANES if self.positions <= LANES else limit

    @property
    def chunks(self) -> int:
        """The number of rows of A that an image's positions are cut into."""
        return -(-self.positions // self.depth)

    @property
    def sum_shape(self) -> tuple[int, ...]:
        """The shape of the sums: feature, kernel row, number in that row of a window."""
        return (self.features, self.kernel_rows, self.taps)

    @property
    def rounded(self) -> int:
        """The number of positions, rounded up to whole vectors; those added have no gradient."""
        return -(-self.chunks * self.depth // LANES) * LANES

    @property
    def pairs(self) -> int:
        """The count of pairs, in whole vectors."""
        furthest = self.image.windows(self.kernel_rows, 1).furthest
        read = furthest + (self.chunks * self.depth - 2) * self.image.step + self.taps
        return -(-read // LANES) * LANES

    @property
    def places(self) -> tuple[int, int, int, int]:
        """The offsets in scratch memory of the pairs, of the gradient, of its transpose, and of the end."""
        image = max(self.image.stride * self.image.plane, self.pairs + self.image.step)
        sizes = (image, 2 * self.pairs, *[self.rounded * self.features] * 2)
        a, b, c, d = itertools.accumulate(map(count_floats, sizes))
        return a, b, c, d

    @functools.cached_property
    def blocking(self) -> Blocking:
        """A block of sums."""
        return choose_rows(self.unit, self.features, self.panels[1], self.depth)

    @property
    def product(self) -> Product:
        """The sum of one block."""
        step, blocking = self.image.step * 4, self.blocking
        row, c_row = 2 * self.rounded, self.kernel_rows * self.taps * 4
        last = 2 * (self.chunks - 1) * self.depth
        joined = self.panels[0] < self.kernel_rows
        return Product(
            blocking,
            self.depth,
            Steps(Windows(1, 1, 0, 0), self.chunks, 2 * self.depth, last, self.depth * step),
            a_row=row,
            a_tiles=tuple(row * blocking.rows * i for i in range(blocking.high)),
            b_row=2 * step,
            b_panel=self.image.windows(self.kernel_rows, 4).line if joined else 4 * LANES,
            c_row=c_row,
            start=c_row,
        )


def weight_gradient(c: Convolution, unit: Instructions) -> Gradient:
    """Returns the sums of a layer's weight gradient."""
    sums, (rows, columns) = forward(c, unit), c.output
    layout = Layout(
        height=rows,
        width=columns,
        channels=c.features,
        top=0,
        left=0,
        rows=rows,
        columns=sums.layout.period,
        depth=sums.panels * LANES,
        stride=1,
    )
    return Gradient(
        sums.unit, sums.layout, c.kernel_height, sums.segment, sums.positions.length, layout
    )


def weight_gradient_ir(c: Convolution, unit: Instructions) -> str:
    """Returns the IR of a task with the buffers (x, dy[, y][, offset, scale]) -> (sums, dbias, scratch).

    Each chunk writes sums of its own: those of `weight_gradient(c, unit)` and dbias [chunks, F], float32.
    `dy` and `y` are bfloat16. `scratch` has the floats of all `places` for each chunk.
    """
    g = weight_gradient(c, unit)
    pairs, gradient, transposed, end = g.places
    f = Function(TASK)
    x, dy, *rest, sums, dbias, scratch = buffers(f, 5 + c.relu + (0 if c.clip is None else 2))
    y, tables = rest[: c.relu], rest[c.relu :]
    size = math.prod(g.sum_shape)
    sums = f.scaled(sums, "%chunk", size)
    dbias = f.scaled(dbias, "%chunk", c.features)
    scratch = f.scaled(scratch, "%chunk", end)
    clear(f, sums, size)
    clear(f, dbias, c.features)
    clear(f, scratch, end)
    paired, lines, a = (f.at(scratch, place) for place in (pairs, gradient, transposed))
    g.unit.begin(f)
    with f.between(*share(f)) as image:
        source = f.scaled(x, image, c.image_size, c.source)
        g.image.copy(f, source, scratch, c.source, change_of_images(c, tables))
        _pair(f, g, scratch, paired)
        copy_gradient(f, c, g.gradient, (dy, *y), image, lines)
        _transpose(f, g, lines, a)
        _sum_positions(f, g, lines, dbias, c.features)
        sizes = _accumulate(f, g, a, paired, sums)
    g.unit.end(f)
    return module(g.unit, g.product, sizes, f)


def _pair(f: Function, g: Gradient, image: str, pairs: str) -> None:
    """Writes each number of the image beside that of the next position."""
    with f.repeat(g.pairs // LANES) as some:
        here = f.scaled(image, some.index, LANES, "bfloat")
        both = interleave(
            f, *(load_words(f, p, LANES, LANES) for p in (here, f.at(here, g.image.step, "bfloat")))
        )
        f.line(f"store <32 x i16> {both}, ptr {f.scaled(pairs, some.index, LANES)}, align 2")


def _transpose(f: Function, g: Gradient, lines: str, target: str) -> None:
    """Writes bfloat16 `lines` [positions, features] as [features, positions], in blocks of 16 by 16."""
    with f.repeat(g.rounded // LANES) as some, f.repeat(g.features // LANES) as block:
        source = f.scaled(lines, some.index, LANES * g.features, "bfloat")
        source = f.scaled(source, block.index, LANES, "bfloat")
        out = f.scaled(target, block.index, LANES * g.rounded, "bfloat")
        out = f.scaled(out, some.index, LANES, "bfloat")
        rows = [
            load_words(f, f.at(source, i * g.features, "bfloat"), LANES, LANES)
            for i in range(LANES)
        ]
        for i, column in enumerate(transpose(f, rows, "i16")):
            store_words(f, column, f.at(out, i * g.rounded, "bfloat"), LANES, LANES)


def _sum_positions(f: Function, g: Gradient, lines: str, total: str, features: int) -> None:
    """Adds every position of bfloat16 `lines` [positions, features] to `total` [features]."""
    for first in range(0, features, LANES):
        lanes, place = min(LANES, features - first), f.at(total, first)
        held = [("<16 x float>", load(f, place, lanes, LANES))]
        with f.repeat(g.rounded, held) as carry:
            line = f.scaled(lines, carry.index, g.features, "bfloat")
            part = load_kind(f, "bfloat", f.at(line, first, "bfloat"), LANES, LANES)
            carry.next = [f.op(f"fadd <16 x float> {carry.values[0]}, {part}")]
        store(f, carry.next[0], place, lanes, LANES)


def _accumulate(f: Function, g: Gradient, a: str, pairs: str, sums: str) -> list[tuple[int, int]]:
    """Emits the loops over kernel rows, panels of their numbers and features. Returns the sizes of blocks."""
    p, sizes = g.product, {}
    windows, panels = g.panels
    with f.repeat(windows) as window:
        b0 = g.image.windows(g.kernel_rows, 4).at(f, pairs, window.index)
        c0 = f.scaled(sums, window.index, g.taps)
        for left, wide, times in spans(panels, p.blocking.wide):
            with f.repeat(times) as column:
                b1, c1 = (
                    f.at(f.scaled(q, column.index, wide * size, "i8"), left * size, "i8")
                    for q, size in ((b0, p.b_panel), (c0, 4 * LANES))
                )
                rows = p.blocking.rows
                for top, high, many in spans(g.features // rows, p.blocking.high):
                    sizes[high, wide] = None
                    with f.repeat(many) as row:
                        a2, c2 = (
                            f.at(f.scaled(q, row.index, high * tile, "i8"), top * tile, "i8")
                            for q, tile in ((a, rows * p.a_row), (c1, p.c_tile))
                        )
                        f.line(
                            f"call void @block_{high}_{wide}"
                            f"(ptr {a2}, ptr {b1}, ptr {c2}, ptr {c2})"
                        )
    return list(sizes)
