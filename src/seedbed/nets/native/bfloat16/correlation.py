"""Writes the LLVM IR of convolutions in bfloat16: forward and input gradient.

A task copies one image at a time to scratch memory, as zero-padded bfloat16, and multiplies numbers that it
loads from there. Each row of A is one position of the result and what its window holds of one row of the
image: those numbers are neighbours, so no window is copied. Positions are counted along the rows of the
result and over their ends, in the same steps, so that tiles of several rows are full where rows are short;
what they hold between two rows is left out when results are stored. All sums are float32.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from seedbed.llvm import Function
from seedbed.nets.native.bfloat16.layout import (
    Layout,
    change_of_images,
    copy_gradient,
    count_floats,
)
from seedbed.nets.native.bfloat16.product import (
    LANES,
    Blocking,
    Cover,
    Grid,
    Instructions,
    Product,
    Steps,
    choose_positions,
    module,
)
from seedbed.nets.native.convolution import Convolution
from seedbed.nets.native.rows import (
    TASK,
    Added,
    Change,
    Kind,
    Passed,
    buffers,
    clear,
    each_vector,
    share,
    store_kind,
)
from seedbed.nets.native.tile import load, relu, spans


class Target(NamedTuple):
    """Images that results are stored to.

    The features (a, b, c) of position (u, v) are a square of `stride` by `stride` pixels. They go to row
    `stride * u + a + top`, column `stride * v + b + left`, channel c, where the image has these.
    """

    height: int
    width: int
    channels: int
    kind: Kind
    stride: int = 1
    top: int = 0
    left: int = 0


@dataclass(frozen=True)
class Correlation:
    """Sums of products of all windows of an image with kernels. Windows move by `layout.stride`."""

    unit: Instructions
    layout: Layout
    kernel_rows: int
    kernel_columns: int
    out_rows: int
    out_columns: int
    target: Target
    biased: bool = False  # sums start at a bias of each feature
    relu: bool = False

    @property
    def features(self) -> int:
        """The number of results of a position."""
        return self.target.stride**2 * self.target.channels

    @property
    def segment(self) -> int:
        """The count of neighbouring numbers that a window has in one row of the image."""
        return self.kernel_columns * self.layout.depth

    @property
    def chunks(self) -> int:
        """The number of rows of A that a segment is cut into."""
        return -(-self.segment // (self.unit.longest or self.segment))

    @property
    def depth(self) -> int:
        """The count of numbers in a row of A, which is even."""
        return -(-self.segment // (2 * self.chunks)) * 2

    @property
    def panels(self) -> int:
        """The number of blocks of 16 features."""
        return -(-self.features // LANES)

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """The shape of the packed kernels: panel, kernel row, chunk, pair, feature, number of the pair."""
        return (self.panels, self.kernel_rows, self.chunks, self.depth // 2, LANES, 2)

    @property
    def positions(self) -> Grid:
        """The positions, as rows of A."""
        return Grid(self.out_rows, self.out_columns, self.layout.period)

    @functools.cached_property
    def blocks(self) -> tuple[Blocking, Cover]:
        """A block of results, and how such blocks cover the positions."""
        return choose_positions(self.unit, self.positions, self.panels, self.depth)

    @property
    def block_size(self) -> int:
        """The count of numbers of a block of results in scratch memory."""
        blocking, cover = self.blocks
        return cover.block.size * blocking.wide * LANES

    @property
    def copy_size(self) -> int:
        """The scratch memory of an image in floats, in whole cache lines, with what blocks read beyond it."""
        windows = self.layout.windows(self.kernel_rows, 1)
        read = windows.furthest + (self.positions.length - 1) * self.layout.step + self.segment
        return count_floats(max(self.layout.stride * self.layout.plane, read))

    @property
    def scratch_size(self) -> int:
        """The scratch memory of one chunk, in floats."""
        return self.copy_size + self.block_size

    @property
    def product(self) -> Product:
        """The sum of one block."""
        (blocking, cover), pairs = self.blocks, self.depth // 2 * 4 * LANES
        windows = self.layout.windows(self.kernel_rows, 2)
        row = 2 * self.layout.step
        return Product(
            blocking,
            self.depth,
            Steps(windows, self.chunks, 2 * self.depth, 2 * (self.segment - self.depth), pairs),
            a_row=row,
            a_tiles=tuple(
                row * cover.block.number(i * blocking.rows) for i in range(blocking.high)
            ),
            b_row=4 * LANES,
            b_panel=self.kernel_rows * self.chunks * pairs,
            c_row=blocking.wide * 4 * LANES,
            start=0 if self.biased else None,
        )


def forward(c: Convolution, unit: Instructions) -> Correlation:
    """Returns the sums of a layer's forward pass."""
    rows, columns = c.padded
    layout = Layout(
        height=c.height,
        width=c.width,
        channels=c.channels,
        top=c.padding,
        left=c.padding,
        rows=rows,
        columns=-(-columns // c.stride) * c.stride,
        depth=c.channels + c.channels % 2,
        stride=c.stride,
    )
    target = Target(*c.output, c.features, "bfloat")
    kernel = (c.kernel_height, c.kernel_width)
    return Correlation(unit, layout, *kernel, *c.output, target, biased=True, relu=c.relu)


def input_gradient(c: Convolution, unit: Instructions) -> Correlation:
    """Returns the sums of a layer's input gradient, as a correlation of stride 1 with the results' gradient.

    Its positions are squares of `stride` by `stride` pixels, so the products of all of them with one window
    are features of one sum, and each pixel is stored once.
    """
    kernel = [-(-k // c.stride) for k in (c.kernel_height, c.kernel_width)]
    first = [min(c.padding // c.stride, k - 1) for k in kernel]
    sides = (c.height, c.width)
    count = [-(-(c.padding + n) // c.stride) - i for n, i in zip(sides, first, strict=True)]
    before = [k - 1 - i for k, i in zip(kernel, first, strict=True)]
    padded = [
        max(n + k - 1, b + o) for n, k, b, o in zip(count, kernel, before, c.output, strict=True)
    ]
    layout = Layout(
        height=c.output[0],
        width=c.output[1],
        channels=c.features,
        top=before[0],
        left=before[1],
        rows=padded[0],
        columns=padded[1],
        depth=c.features + c.features % 2,
        stride=1,
    )
    target = Target(
        *sides,
        c.channels,
        "float" if c.source != "bfloat" or c.clip is not None else "bfloat",
        c.stride,
        c.stride * first[0] - c.padding,
        c.stride * first[1] - c.padding,
    )
    return Correlation(unit, layout, kernel[0], kernel[1], count[0], count[1], target)


class Results(NamedTuple):
    """The place of an image's results and the change on their way; tables have the same layout."""

    address: str
    changes: tuple[Change, ...] = ()


def forward_ir(c: Convolution, unit: Instructions) -> str:
    """Returns the IR of a task with the buffers (x[, skip], packed kernels, bias[, tables]) -> (y, scratch).

    `skip`, bfloat16 numbers to add to the results, is there if `block` is "second". `bias` has 16 floats for
    each panel. The tables, offset and scale, are there if `clip` is set. `y` is bfloat16.
    `scratch` has `scratch_size` floats of the correlation `forward(c, unit)` for each chunk.
    """
    sums = forward(c, unit)
    f = Function(TASK)
    skips, tables = int(c.block == "second"), 0 if c.clip is None else 2
    x, *rest, y, scratch = buffers(f, 5 + skips + tables)
    skip, (kernel, bias, *tables) = rest[:skips], rest[skips:]
    scratch = f.scaled(scratch, "%chunk", sums.scratch_size)
    clear(f, scratch, sums.copy_size)
    sums.unit.begin(f)
    with f.between(*share(f)) as image:
        source = f.scaled(x, image, c.image_size, c.source)
        sums.layout.copy(f, source, scratch, c.source, change_of_images(c, tables))
        result = f.scaled(y, image, c.output_size, "bfloat")
        added = [Added(f.scaled(s, image, c.output_size, "bfloat")) for s in skip]
        _correlate(f, sums, scratch, kernel, bias, Results(result, tuple(added)))
    sums.unit.end(f)
    return module(sums.unit, sums.product, _widths(sums), f)


def input_gradient_ir(c: Convolution, unit: Instructions) -> str:
    """Returns the IR of a task with the buffers (dy[, y][, x, skip], packed kernels) -> (dx, scratch).

    All but the kernels are bfloat16; `y` is there if `relu` is set, `x` and `skip` if `block` is "first":
    the gradient passes where `x` is positive, and `skip`, the gradient of what skips the block, is added.
    `scratch` has `scratch_size` floats of the correlation `input_gradient(c, unit)` for each chunk.
    """
    sums = input_gradient(c, unit)
    f = Function(TASK)
    dy, *rest, kernel, dx, scratch = buffers(f, 4 + c.relu + 2 * (c.block == "first"))
    y, skips = rest[: c.relu], rest[c.relu :]
    scratch = f.scaled(scratch, "%chunk", sums.scratch_size)
    clear(f, scratch, sums.copy_size)
    sums.unit.begin(f)
    with f.between(*share(f)) as image:
        copy_gradient(f, c, sums.layout, (dy, *y), image, scratch)
        result = f.scaled(dx, image, c.image_size, sums.target.kind)
        beside = [f.scaled(s, image, c.image_size, "bfloat") for s in skips]
        changes = (Passed(beside[0]), Added(beside[1])) if beside else ()
        _correlate(f, sums, scratch, kernel, "null", Results(result, changes))
    sums.unit.end(f)
    return module(sums.unit, sums.product, _widths(sums), f)


def _widths(sums: Correlation) -> list[tuple[int, int]]:
    block, _ = sums.blocks
    return [(block.high, wide) for _, wide, _ in spans(sums.panels, block.wide)]


def _correlate(
    f: Function, sums: Correlation, image: str, kernel: str, bias: str, results: Results
) -> None:
    """Emits the loops over the panels of features and the positions of an image in scratch memory."""
    (block, cover), layout, product = sums.blocks, sums.layout, sums.product
    scratch, (down, along) = f.at(image, sums.copy_size), cover.counts
    for begin, wide, times in spans(sums.panels, block.wide):
        for panel in range(begin, begin + wide * times, wide):
            b, start = f.at(kernel, panel * product.b_panel, "i8"), f.at(bias, panel * LANES)
            with f.repeat(down) as line, f.repeat(along) as column:
                first = cover.first(f, line.index, column.index)
                a = f.scaled(image, cover.number(f, *first), layout.step, "bfloat")
                f.line(
                    f"call void @block_{block.high}_{wide}"
                    f"(ptr {a}, ptr {b}, ptr {scratch}, ptr {start})"
                )
                _store_block(f, sums, first, scratch, results, range(panel, panel + wide))


def _store_block(
    f: Function,
    sums: Correlation,
    first: tuple[str, str],
    held: str,
    results: Results,
    panels: range,
) -> None:
    """Stores the results of a block, those of some panels, but for what lies between lines of positions."""
    (block, cover), positions = sums.blocks, sums.positions
    with f.repeat(cover.block.lines) as i:
        u = f.op(f"add i64 {first[0]}, {i.index}")
        line = f.scaled(held, i.index, cover.block.columns * block.wide * LANES)
        with f.repeat(cover.block.columns) as j:
            v = f.op(f"add i64 {first[1]}, {j.index}")
            row = f.scaled(line, j.index, block.wide * LANES)
            if cover.whole == positions:
                _store_row(f, sums, (u, v), row, results, panels)
            else:
                at = [f.op(f"{kind} i64 {v}, {positions.period}") for kind in ("udiv", "urem")]
                with f.when(f.op(f"icmp ult i64 {at[1]}, {positions.columns}")):
                    _store_row(f, sums, (at[0], at[1]), row, results, panels)


def _store_row(
    f: Function,
    sums: Correlation,
    position: tuple[str, str],
    held: str,
    results: Results,
    panels: range,
) -> None:
    """Stores the results of one position that `held` has, those of some panels, where the image has them."""
    to, begin = sums.target, panels.start * LANES
    row, column = (
        f.op(f"add i64 {f.op(f'mul i64 {n}, {to.stride}')}, {first}")
        for n, first in zip(position, (to.top, to.left), strict=True)
    )
    pixel = f.op(f"add i64 {f.op(f'mul i64 {row}, {to.width}')}, {column}")
    corner = f.scaled(results.address, pixel, to.channels, to.kind)
    changes = [change.rows(f, pixel, to.channels) for change in results.changes]
    beyond_rows = _reaches_beyond(to.top, sums.out_rows, to.stride, to.height)
    beyond_columns = _reaches_beyond(to.left, sums.out_columns, to.stride, to.width)
    # numbers that are neighbours in the image and there together
    pixels = 1 if beyond_columns else to.stride
    run = pixels * to.channels
    for first in range(0, sums.features, run):
        low, high = max(first, begin), min(first + run, begin + len(panels) * LANES)
        if low >= high:
            continue
        a, b = divmod(first // to.channels, to.stride)
        checks = [(row, a, to.height)] * beyond_rows + [(column, b, to.width)] * beyond_columns
        with ExitStack() as stack:
            for start, offset, limit in checks:
                place = f.op(f"add i64 {start}, {offset}")
                stack.enter_context(f.when(f.op(f"icmp ult i64 {place}, {limit}")))
            offset = (a * to.width + b) * to.channels + low - first
            out, source = f.at(corner, offset, to.kind), f.at(held, low - begin)
            changed = [change.rows(f, str(offset), 1) for change in changes]

            def move(
                place: str,
                lanes: int,
                source: str = source,
                out: str = out,
                changed: list[Change] = changed,
            ) -> None:
                value = load(f, f.at(source, place), lanes, LANES)
                value = relu(f, value, LANES) if sums.relu else value
                for change in changed:
                    value = change.apply(f, value, place, lanes, LANES)
                store_kind(f, to.kind, value, f.at(out, place, to.kind), lanes, LANES)

            each_vector(f, high - low, LANES, move)


def _reaches_beyond(first: int, count: int, stride: int, limit: int) -> bool:
    """Whether squares of `stride` pixels, `count` of them from pixel `first` on, leave an image's axis."""
    return first < 0 or first + count * stride > limit
