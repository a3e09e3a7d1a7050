"""Writes the LLVM IR of direct convolutions on NHWC images: forward, weight gradient, input gradient.

Images are independent. A task handles a contiguous share of the batch, one image at a time, so that an image,
its gradient and a panel of weights stay in cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from seedbed.llvm import Function, VectorUnit
from seedbed.nets.native.rows import (
    TASK,
    Rows,
    Tables,
    buffers,
    clear,
    copy_rows,
    each_vector,
    share,
)
from seedbed.nets.native.tile import Grid, Reduction, declarations, grid_function, load, store


@dataclass(frozen=True)
class Convolution:
    """A static description of one layer: everything except the batch size."""

    height: int
    width: int
    channels: int
    kernel_height: int
    kernel_width: int
    features: int
    stride: int
    padding: int
    relu: bool
    source: Literal["i8", "float", "bfloat"]  # the type of the images' numbers, in LLVM's words
    unit: VectorUnit
    clip: float | None = None  # if set, images become (x - offset) * scale within [-clip, clip]
    # of a residual block, x + second(first(max(x, 0))): by kernels in bfloat16
    block: Literal["first", "second"] | None = None

    @property
    def padded(self) -> tuple[int, int]:
        """The height and width of a padded image."""
        return self.height + 2 * self.padding, self.width + 2 * self.padding

    @property
    def output(self) -> tuple[int, int]:
        """The height and width of the result."""
        rows, columns = self.padded
        return (
            (rows - self.kernel_height) // self.stride + 1,
            (columns - self.kernel_width) // self.stride + 1,
        )

    @property
    def taps(self) -> int:
        """The number of products that are summed for one result."""
        return self.kernel_height * self.kernel_width * self.channels

    @property
    def image_size(self) -> int:
        """The count of numbers in one image."""
        return self.height * self.width * self.channels

    @property
    def output_size(self) -> int:
        """The count of numbers in the result for one image."""
        return self.output[0] * self.output[1] * self.features

    @property
    def copies_image(self) -> bool:
        """Whether an image is first copied to scratch memory, as zero-padded float32."""
        return self.source != "float" or self.padding > 0 or self.clip is not None

    @property
    def copy_size(self) -> int:
        """The size of the padded copy of an image, in floats, in whole cache lines; 0 without a copy."""
        rows, columns = self.padded
        return -(-rows * columns * self.channels // 16) * 16 if self.copies_image else 0

    @property
    def scratch_size(self) -> int:
        """The scratch memory of one chunk of a gradient, in floats; the forward task needs `copy_size`."""
        return self.copy_size + (-(-self.output_size // 16) * 16 if self.relu else 0)


def forward_ir(c: Convolution) -> str:
    """Returns the IR of a task with the buffers (x, kernel, bias[, offset, scale]) -> (y, scratch).

    `offset` and `scale` are there if `clip` is set. `scratch` has `copy_size` floats for each chunk.
    """
    (_, columns), (out_rows, out_columns) = c.padded, c.output
    segment, row = c.kernel_width * c.channels, columns * c.channels
    reductions = (
        Reduction(c.kernel_height, row, segment * c.features),
        Reduction(segment, 1, c.features),
    )
    grid = Grid(
        out_rows,
        out_columns,
        c.features,
        a_strides=(c.stride * row, c.stride * c.channels),
        c_strides=(out_columns * c.features, c.features),
        reductions=reductions,
        start="bias",
        relu=c.relu,
    )
    f = Function(TASK)
    x, kernel, bias, *tables, y, scratch = buffers(f, 5 + _tables(c))
    scratch = f.scaled(scratch, "%chunk", c.copy_size)
    _clear_copy(f, c, scratch)
    with f.between(*share(f)) as image:
        a = _image(f, c, (x, *tables), image, scratch)
        out = f.scaled(y, image, c.output_size)
        f.line(f"call void @forward(ptr {a}, ptr {kernel}, ptr {out}, ptr {bias})")
    return declarations(c.unit.width) + grid_function("forward", grid, c.unit) + f.text()


def weight_gradient_ir(c: Convolution) -> str:
    """Returns the IR of a task with the buffers (x, dy[, y][, offset, scale]) -> (dkernel, dbias, scratch).

    Each chunk writes sums of its own: dkernel [chunks, taps, F], dbias [chunks, F]. `y` is there if `relu` is
    set, `offset` and `scale` if `clip` is set. `scratch` has `scratch_size` floats for each chunk.
    """
    (_, columns), (out_rows, out_columns) = c.padded, c.output
    segment, row = c.kernel_width * c.channels, columns * c.channels
    reductions = (
        Reduction(out_rows, c.stride * row, out_columns * c.features),
        Reduction(out_columns, c.stride * c.channels, c.features),
    )
    grid = Grid(
        c.kernel_height,
        segment,
        c.features,
        a_strides=(row, 1),
        c_strides=(segment * c.features, c.features),
        reductions=reductions,
        start="add",
    )
    f = Function(TASK)
    x, dy, *rest, dkernel, dbias, scratch = buffers(f, 5 + c.relu + _tables(c))
    y, tables = rest[: c.relu], rest[c.relu :]
    dkernel = f.scaled(dkernel, "%chunk", c.taps * c.features)
    dbias = f.scaled(dbias, "%chunk", c.features)
    scratch = f.scaled(scratch, "%chunk", c.scratch_size)
    clear(f, dkernel, c.taps * c.features)
    clear(f, dbias, c.features)
    _clear_copy(f, c, scratch)
    with f.between(*share(f)) as image:
        a = _image(f, c, (x, *tables), image, scratch)
        b = _output_gradient(f, c, (dy, *y), image, f.at(scratch, c.copy_size))
        _sum_rows(f, c, b, dbias)
        f.line(f"call void @gradient(ptr {a}, ptr {b}, ptr {dkernel}, ptr null)")
    return declarations(c.unit.width) + grid_function("gradient", grid, c.unit) + f.text()


def input_gradient_ir(c: Convolution) -> str:
    """Returns the IR of a task with the buffers (dy[, y], kernel transposed to [F, taps]) -> (dx, scratch).

    `y` is there if `relu` is set. `scratch` has `scratch_size` floats for each chunk.
    """
    (rows, columns), (out_rows, out_columns) = c.padded, c.output
    segment, row = c.kernel_width * c.channels, columns * c.channels
    grid = Grid(
        out_rows,
        out_columns,
        segment,
        a_strides=(out_columns * c.features, c.features),
        c_strides=(c.stride * row, c.stride * c.channels),
        reductions=(Reduction(c.features, 1, c.taps),),
        start="add",
    )
    f = Function(TASK)
    dy, *y, kernel, dx, scratch = buffers(f, 5 if c.relu else 4)
    scratch = f.scaled(scratch, "%chunk", c.scratch_size)
    with f.between(*share(f)) as image:
        a = _output_gradient(f, c, (dy, *y), image, f.at(scratch, c.copy_size))
        result = f.scaled(dx, image, c.image_size)
        padded = scratch if c.padding else result
        clear(f, padded, rows * row)
        with f.repeat(c.kernel_height) as tap:
            b, out = f.scaled(kernel, tap.index, segment), f.scaled(padded, tap.index, row)
            f.line(f"call void @scatter(ptr {a}, ptr {b}, ptr {out}, ptr null)")
        if c.padding:
            inner = f.at(padded, (columns + 1) * c.padding * c.channels)
            line = c.width * c.channels
            copy_rows(f, Rows(c.height, line, row, line), inner, result, c.unit.width)
    return declarations(c.unit.width) + grid_function("scatter", grid, c.unit) + f.text()


def _clear_copy(f: Function, c: Convolution, scratch: str) -> None:
    # Once per chunk is enough: images overwrite only the interior.
    if c.padding:
        clear(f, scratch, c.copy_size)


def _tables(c: Convolution) -> int:
    return 0 if c.clip is None else 2


def _image(f: Function, c: Convolution, buffers: tuple[str, ...], image: str, scratch: str) -> str:
    """Returns the address of image number `image` of x as padded, scaled float32.

    `buffers` is (x[, offset, scale]). The address is in x itself if no copy is needed, else it is `scratch`.
    """
    source = f.scaled(buffers[0], image, c.image_size, c.source)
    if not c.copies_image:
        return source
    columns, line = c.padded[1], c.width * c.channels
    inner = f.at(scratch, (columns + 1) * c.padding * c.channels)
    rows = Rows(c.height, line, line, columns * c.channels)
    if not c.padding:
        rows = Rows(1, c.image_size, c.image_size, c.image_size)
    scaling = None if c.clip is None else Tables(buffers[1], buffers[2], c.clip)
    copy_rows(f, rows, source, inner, c.unit.width, c.source, change=scaling)
    return scratch


def _output_gradient(
    f: Function, c: Convolution, buffers: tuple[str, ...], image: str, scratch: str
) -> str:
    """Returns the address of an image's gradient before the activation.

    `buffers` is (dy[, y]). With ReLU the gradient is a copy in `scratch`: `dy` if `y` > 0, else 0. Without
    ReLU it is `dy` itself.
    """
    dy, *y = (f.scaled(buffer, image, c.output_size) for buffer in buffers)
    if not c.relu:
        return dy
    vector, mask = f"<{c.unit.width} x float>", f"<{c.unit.width} x i1>"

    def move(offset: str, lanes: int) -> None:
        gradient = load(f, f.at(dy, offset), lanes, c.unit.width)
        value = load(f, f.at(y[0], offset), lanes, c.unit.width)
        passed = f.op(f"fcmp ogt {vector} {value}, zeroinitializer")
        kept = f.op(f"select {mask} {passed}, {vector} {gradient}, {vector} zeroinitializer")
        store(f, kept, f.at(scratch, offset), lanes, c.unit.width)

    each_vector(f, c.output_size, c.unit.width, move)
    return scratch


def _sum_rows(f: Function, c: Convolution, source: str, total: str) -> None:
    """Adds every position of `source` [positions, F] to `total` [F]."""
    width, positions = c.unit.width, c.output[0] * c.output[1]
    vector = f"<{width} x float>"
    lanes = [min(width, c.features - i) for i in range(0, c.features, width)]
    for first in range(0, len(lanes), 8):
        block = list(enumerate(lanes))[first : first + 8]
        held = [(vector, load(f, f.at(total, v * width), n, width)) for v, n in block]
        with f.repeat(positions, held) as carry:
            row = f.scaled(source, carry.index, c.features)
            parts = [load(f, f.at(row, v * width), n, width) for v, n in block]
            carry.next = [
                f.op(f"fadd {vector} {a}, {b}") for a, b in zip(carry.values, parts, strict=True)
            ]
        for (v, n), value in zip(block, carry.next, strict=True):
            store(f, value, f.at(total, v * width), n, width)
