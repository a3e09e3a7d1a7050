"""LLVM IR of max pooling on NHWC float32 images, and of its gradient."""

from __future__ import annotations

from dataclasses import dataclass

from seedbed.llvm import Function, VectorUnit
from seedbed.nets.native.rows import TASK, Rows, buffers, copy_rows, share
from seedbed.nets.native.tile import declarations, load, store

_MINUS_INFINITY = "0xFFF0000000000000"


@dataclass(frozen=True)
class Pooling:
    """The static description of one layer: everything but the batch size. Windows are square."""

    height: int
    width: int
    channels: int
    window: int
    stride: int
    margins: tuple[tuple[int, int], tuple[int, int]]  # (above, below), (left, right)
    unit: VectorUnit

    @property
    def padded(self) -> tuple[int, int]:
        """Height and width of a padded image."""
        return self.height + sum(self.margins[0]), self.width + sum(self.margins[1])

    @property
    def output(self) -> tuple[int, int]:
        """Height and width of the result."""
        rows, columns = self.padded
        return (rows - self.window) // self.stride + 1, (columns - self.window) // self.stride + 1

    @property
    def origin(self) -> int:
        """Offset of an image inside its padded copy, in floats."""
        return (self.margins[0][0] * self.padded[1] + self.margins[1][0]) * self.channels

    @property
    def copy_size(self) -> int:
        """Number of floats in a padded image."""
        return self.padded[0] * self.padded[1] * self.channels


def forward_ir(p: Pooling) -> str:
    """Returns the IR of a task over buffers (x) -> (y, scratch of `copy_size` floats for each chunk)."""
    f = Function(TASK)
    x, y, scratch = buffers(f, 3)
    image_size, out_size = p.height * p.width * p.channels, p.output[0] * p.output[1] * p.channels
    vector = f"<{p.unit.width} x float>"
    padded = f.scaled(scratch, "%chunk", p.copy_size)
    _fill(f, p, padded)
    with f.between(*share(f)) as image:
        _pad(f, p, f.scaled(x, image, image_size), padded)
        out = f.scaled(y, image, out_size)
        with f.repeat(p.output[0]) as row, f.repeat(p.output[1]) as column:
            source = _corner(f, p, padded, row.index, column.index)
            place = _place(f, p, out, row.index, column.index)
            for first, lanes in _lanes(p):
                values = [load(f, f.at(source, t + first), lanes, p.unit.width) for t in _taps(p)]
                best = values[0]
                for value in values[1:]:
                    best = f.op(
                        f"call {vector} @llvm.maximum.v{p.unit.width}f32"
                        f"({vector} {best}, {vector} {value})"
                    )
                store(f, best, f.at(place, first), lanes, p.unit.width)
    return _declarations(p) + f.text()


def gradient_ir(p: Pooling) -> str:
    """Returns the IR of a task over buffers (x, y, dy) -> (dx, scratch).

    The scratch has 2 `copy_size` floats for each chunk. If a window has equal maxima, the first of them
    in row-major order takes the gradient.
    """
    f = Function(TASK)
    x, y, dy, dx, scratch = buffers(f, 5)
    image_size, out_size = p.height * p.width * p.channels, p.output[0] * p.output[1] * p.channels
    padded = f.scaled(scratch, "%chunk", 2 * p.copy_size)
    total = f.at(padded, p.copy_size)
    _fill(f, p, padded)
    with f.between(*share(f)) as image:
        _pad(f, p, f.scaled(x, image, image_size), padded)
        f.line(f"call void @llvm.memset.p0.i64(ptr {total}, i8 0, i64 {4 * p.copy_size}, i1 false)")
        results = f.scaled(y, image, out_size), f.scaled(dy, image, out_size)
        with f.repeat(p.output[0]) as row, f.repeat(p.output[1]) as column:
            at = (row.index, column.index)
            source, target = _corner(f, p, padded, *at), _corner(f, p, total, *at)
            places = [_place(f, p, base, *at) for base in results]
            for first, lanes in _lanes(p):
                best, gradient = (load(f, f.at(b, first), lanes, p.unit.width) for b in places)
                _scatter(f, p, source, target, first, lanes, best, gradient)
        line = p.width * p.channels
        rows = Rows(p.height, line, p.padded[1] * p.channels, line)
        source, target = f.at(total, p.origin), f.scaled(dx, image, image_size)
        copy_rows(f, rows, source, target, p.unit.width)
    return _declarations(p) + f.text()


def _declarations(p: Pooling) -> str:
    vector = f"<{p.unit.width} x float>"
    maximum = f"declare {vector} @llvm.maximum.v{p.unit.width}f32({vector}, {vector})\n"
    return declarations(p.unit.width) + maximum


def _fill(f: Function, p: Pooling, target: str) -> None:
    """Emits stores of minus infinity, the neutral element of the maximum, to a padded image."""
    width = p.unit.width
    value = f"<{', '.join([f'float {_MINUS_INFINITY}'] * width)}>"
    whole, rest = divmod(p.copy_size, width)
    if whole:
        with f.repeat(whole) as step:
            store(f, value, f.scaled(target, step.index, width), width, width)
    if rest:
        store(f, value, f.at(target, whole * width), rest, width)


def _pad(f: Function, p: Pooling, source: str, padded: str) -> None:
    line = p.width * p.channels
    rows = Rows(p.height, line, line, p.padded[1] * p.channels)
    copy_rows(f, rows, source, f.at(padded, p.origin), p.unit.width)


def _corner(f: Function, p: Pooling, base: str, row: str, column: str) -> str:
    """Returns the address of the first tap of a window in a padded image."""
    line = f.scaled(base, row, p.stride * p.padded[1] * p.channels)
    return f.scaled(line, column, p.stride * p.channels)


def _place(f: Function, p: Pooling, base: str, row: str, column: str) -> str:
    """Returns the address of the first channel of a result, or of its gradient."""
    return f.scaled(f.scaled(base, row, p.output[1] * p.channels), column, p.channels)


def _taps(p: Pooling) -> list[int]:
    return [(i * p.padded[1] + j) * p.channels for i in range(p.window) for j in range(p.window)]


def _lanes(p: Pooling) -> list[tuple[int, int]]:
    """Returns (first channel, number of channels) of each vector."""
    width = p.unit.width
    return [(i, min(width, p.channels - i)) for i in range(0, p.channels, width)]


def _scatter(
    f: Function,
    p: Pooling,
    source: str,
    target: str,
    first: int,
    lanes: int,
    best: str,
    gradient: str,
) -> None:
    """Emits the addition of a result's gradient to the first tap of its window that equals the maximum.

    `source` and `target` are the addresses of the window in the padded image and in its gradient. The vector
    has `lanes` channels from `first` on; `best` names their maxima and `gradient` the result's gradient.
    """
    width = p.unit.width
    vector, mask = f"<{width} x float>", f"<{width} x i1>"
    for tap in _taps(p):
        value = load(f, f.at(source, tap + first), lanes, width)
        found = f.op(f"fcmp oeq {vector} {value}, {best}")
        place = f.at(target, tap + first)
        share = f.op(f"select {mask} {found}, {vector} {gradient}, {vector} zeroinitializer")
        store(
            f, f.op(f"fadd {vector} {load(f, place, lanes, width)}, {share}"), place, lanes, width
        )
        gradient = f.op(f"select {mask} {found}, {vector} zeroinitializer, {vector} {gradient}")
