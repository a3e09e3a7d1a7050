"""Copies of images in scratch memory, as zero-padded bfloat16, that products read."""

from __future__ import annotations

from typing import NamedTuple

from seedbed.llvm import Function
from seedbed.nets.native.bfloat16.product import LANES, Windows
from seedbed.nets.native.convolution import Convolution
from seedbed.nets.native.rows import Change, Kind, Passed, Rectified, Rows, Tables, copy_rows


class Layout(NamedTuple):
    """A zero-padded bfloat16 image in scratch memory; sizes are counts of numbers.

    Rows with the same remainder by `stride` are neighbours and form a plane. So the windows of two
    neighbouring positions are `step` apart, also over the end of a row of the result, which has `period`
    positions with those between rows.
    """

    height: int
    width: int
    channels: int
    top: int  # rows of zeros above the image
    left: int
    rows: int  # of the padded image
    columns: int  # a multiple of `stride`
    depth: int  # channels and zeros after them
    stride: int

    @property
    def line(self) -> int:
        """The size of a row."""
        return self.columns * self.depth

    @property
    def plane(self) -> int:
        """The size of a plane."""
        return -(-self.rows // self.stride) * self.line

    @property
    def step(self) -> int:
        """The distance between the windows of neighbouring positions."""
        return self.stride * self.depth

    @property
    def period(self) -> int:
        """The number of positions from one row of the result to the next."""
        return self.columns // self.stride

    def windows(self, count: int, size: int) -> Windows:
        """Returns the places of the first `count` rows of a window, with numbers of `size` bytes."""
        return Windows(count, self.stride, size * self.plane, size * self.line)

    def copy(
        self, f: Function, source: str, target: str, kind: Kind, change: Change | None
    ) -> None:
        """Copies an image of numbers of a kind; leaves the zeros around it as they are."""
        line = self.width * self.channels
        for plane in range(self.stride):
            first = (plane - self.top) % self.stride
            count = -(-(self.height - first) // self.stride)
            if count <= 0:
                continue
            to_row = (first + self.top) // self.stride * self.line + self.left * self.depth
            from_row = f.at(source, first * line, kind)
            to_row = f.at(target, plane * self.plane + to_row, "bfloat")
            changed = None if change is None else change.rows(f, str(first), line)
            shape = Rows(count, line, self.stride * line, self.line)
            if self.depth == self.channels:
                copy_rows(f, shape, from_row, to_row, LANES, kind, "bfloat", changed)
                continue
            pixels = Rows(self.width, self.channels, self.channels, self.depth)
            with f.repeat(count) as row:
                inner = None
                if changed is not None:
                    inner = changed.rows(f, row.index, shape.source_stride)
                begin = f.scaled(from_row, row.index, shape.source_stride, kind)
                end = f.scaled(to_row, row.index, shape.target_stride, "bfloat")
                copy_rows(f, pixels, begin, end, LANES, kind, "bfloat", inner)


def count_floats(words: int) -> int:
    """Returns the floats of memory, in whole cache lines, that hold `words` 16-bit numbers."""
    return -(-words // 32) * 16


def change_of_images(c: Convolution, tables: list[str]) -> Change | None:
    """Returns the change that a layer makes to its images, with `tables` [offset, scale], or None."""
    if c.block == "first":
        return Rectified()
    return None if c.clip is None else Tables(tables[0], tables[1], c.clip)


def copy_gradient(
    f: Function, c: Convolution, layout: Layout, outputs: tuple[str, ...], image: str, target: str
) -> None:
    """Copies an image's gradient before the activation; `outputs` is (dy[, y])."""
    dy, *y = (f.scaled(buffer, image, c.output_size, "bfloat") for buffer in outputs)
    layout.copy(f, dy, target, "bfloat", Passed(y[0]) if y else None)
