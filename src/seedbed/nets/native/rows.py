"""Writes the LLVM IR that tasks on images share: their buffers, their share of a batch, copies of rows.

Numbers in memory are bytes, float32 or bfloat16. Arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from seedbed.llvm import Function
from seedbed.nets.native.tile import load, masked_lanes, relu, store

TASK = "internal void @task(ptr %data, ptr %dims, i64 %chunk, i64 %chunks)"
Kind = Literal["i8", "float", "bfloat"]
"""The LLVM type of a number in memory."""
NARROW = "@llvm.x86.avx512bf16.cvtneps2bf16.512"
"""The instruction that rounds 16 float32 numbers to the nearest bfloat16, ties to even."""


def narrow_declarations() -> str:
    """Returns the declarations of the intrinsics that code with bfloat16 in memory uses, for 16 lanes."""
    v, m = "<16 x i16>", "<16 x i1>"
    return (
        f"declare <16 x bfloat> {NARROW}(<16 x float>)\n"
        f"declare {v} @llvm.masked.load.v16i16.p0(ptr, i32, {m}, {v})\n"
        f"declare void @llvm.masked.store.v16i16.p0({v}, ptr, i32, {m})\n"
    )


def buffers(f: Function, count: int) -> list[str]:
    """Returns the addresses of the first `count` buffers of a task."""
    return [f.op(f"load ptr, ptr {f.at('%data', i, 'ptr')}") for i in range(count)]


def share(f: Function, units: int | None = None) -> tuple[str, str]:
    """Returns the begin and end of the chunk's share of `units` units of work.

    By default, these are the rows of the leading axis of the first buffer, a batch.
    """
    images = f.op("load i64, ptr %dims") if units is None else units
    after = f.op("add i64 %chunk, 1")
    products = [f.op(f"mul i64 {chunk}, {images}") for chunk in ("%chunk", after)]
    begin, end = (f.op(f"sdiv i64 {product}, %chunks") for product in products)
    return begin, end


def clear(f: Function, pointer: str, floats: int) -> None:
    """Emits zeros for `floats` floats at `pointer`."""
    f.line(f"call void @llvm.memset.p0.i64(ptr {pointer}, i8 0, i64 {4 * floats}, i1 false)")


class Rows(NamedTuple):
    """Rows to copy: their count, the numbers in each, and the distance between rows on both sides."""

    rows: int
    numbers: int
    source_stride: int
    target_stride: int


class Change(Protocol):
    """The change that a copy makes to its numbers, with tables that have the layout of the source."""

    def rows(self, f: Function, index: str, stride: int) -> Change:
        """Returns the change with its tables from row `index` on; rows are `stride` numbers apart."""
        ...

    def apply(self, f: Function, value: str, place: str | int, lanes: int, width: int) -> str:
        """Returns the changed `value`, a vector of the numbers of a row from `place` on."""
        ...


class Tables(NamedTuple):
    """The change of a number x to (x - offset) * scale within [-clip, clip].

    Offset and scale are addresses of float32 tables with the layout of the source.
    """

    offset: str
    scale: str
    clip: float

    def rows(self, f: Function, index: str, stride: int) -> Tables:
        """Returns the tables from row `index` on; rows are `stride` numbers apart."""
        return self._replace(
            offset=f.scaled(self.offset, index, stride), scale=f.scaled(self.scale, index, stride)
        )

    def apply(self, f: Function, value: str, place: str | int, lanes: int, width: int) -> str:
        """Returns `value` scaled and clipped: a vector of the numbers of a row from `place` on. Keeps NaN."""
        vector = f"<{width} x float>"
        offset, scale = (load(f, f.at(p, place), lanes, width) for p in (self.offset, self.scale))
        centred = f.op(f"fsub {vector} {value}, {offset}")
        value = f.op(f"fmul {vector} {centred}, {scale}")
        for beyond, limit in (("ogt", self.clip), ("olt", -self.clip)):
            bound = f"<{', '.join([f'float {limit:e}'] * width)}>"
            outside = f.op(f"fcmp {beyond} {vector} {value}, {bound}")
            value = f.op(f"select <{width} x i1> {outside}, {vector} {bound}, {vector} {value}")
        return value


class Rectified:
    """The change of a number x to max(x, 0), which keeps NaN."""

    def rows(self, f: Function, index: str, stride: int) -> Rectified:
        """Returns the change itself: it has no tables."""
        del f, index, stride
        return self

    def apply(self, f: Function, value: str, place: str | int, lanes: int, width: int) -> str:
        """Returns the larger of `value` and zero."""
        del place, lanes
        return relu(f, value, width)


class Passed(NamedTuple):
    """The change of a gradient to its part that a relu passes: zero unless the result `y` is positive.

    `y` is the address of bfloat16 results with the layout of the gradient.
    """

    y: str

    def rows(self, f: Function, index: str, stride: int) -> Passed:
        """Returns the change from row `index` on; rows are `stride` numbers apart."""
        return Passed(f.scaled(self.y, index, stride, "bfloat"))

    def apply(self, f: Function, value: str, place: str | int, lanes: int, width: int) -> str:
        """Returns `value` where `y` is positive, else zero."""
        vector = f"<{width} x float>"
        y = load_kind(f, "bfloat", f.at(self.y, place, "bfloat"), lanes, width)
        passed = f.op(f"fcmp ogt {vector} {y}, zeroinitializer")
        return f.op(f"select <{width} x i1> {passed}, {vector} {value}, {vector} zeroinitializer")


class Added(NamedTuple):
    """The change of a result to its sum with bfloat16 numbers of the same layout, at the address `y`."""

    y: str

    def rows(self, f: Function, index: str, stride: int) -> Added:
        """Returns the change from row `index` on; rows are `stride` numbers apart."""
        return Added(f.scaled(self.y, index, stride, "bfloat"))

    def apply(self, f: Function, value: str, place: str | int, lanes: int, width: int) -> str:
        """Returns `value` plus the number at its place."""
        y = load_kind(f, "bfloat", f.at(self.y, place, "bfloat"), lanes, width)
        return f.op(f"fadd <{width} x float> {value}, {y}")


def copy_rows(
    f: Function,
    shape: Rows,
    source: str,
    target: str,
    width: int,
    kind: Kind = "float",
    into: Kind = "float",
    change: Change | None = None,
) -> None:
    """Copies rows of numbers of a kind from `source` to `target`, where they are of the kind `into`."""
    with f.repeat(shape.rows) as row:
        from_row = f.scaled(source, row.index, shape.source_stride, kind)
        to_row = f.scaled(target, row.index, shape.target_stride, into)
        changed = None if change is None else change.rows(f, row.index, shape.source_stride)

        def move(place: str, lanes: int) -> None:
            if kind == into == "bfloat" and changed is None:
                words = load_words(f, f.at(from_row, place, kind), lanes, width)
                store_words(f, words, f.at(to_row, place, into), lanes, width)
                return
            value = load_kind(f, kind, f.at(from_row, place, kind), lanes, width)
            if changed is not None:
                value = changed.apply(f, value, place, lanes, width)
            store_kind(f, into, value, f.at(to_row, place, into), lanes, width)

        each_vector(f, shape.numbers, width, move)


def load_kind(f: Function, kind: Kind, pointer: str, lanes: int, width: int) -> str:
    """Loads the first `lanes` numbers of a kind as a float32 vector; the other lanes are zero."""
    if kind == "float":
        return load(f, pointer, lanes, width)
    mask = f"<{width} x i1> {masked_lanes(lanes, width)}"
    if kind == "i8":
        octets = f"<{width} x i8>"
        raw = f.op(
            f"call {octets} @llvm.masked.load.v{width}i8.p0(ptr {pointer}, i32 1, "
            f"{mask}, {octets} zeroinitializer)"
        )
        return f.op(f"uitofp {octets} {raw} to <{width} x float>")
    raw = load_words(f, pointer, lanes, width)
    wide = f.op(f"zext <{width} x i16> {raw} to <{width} x i32>")
    sixteen = ", ".join(["i32 16"] * width)
    bits = f.op(f"shl <{width} x i32> {wide}, <{sixteen}>")
    return f.op(f"bitcast <{width} x i32> {bits} to <{width} x float>")


def load_words(f: Function, pointer: str, lanes: int, width: int) -> str:
    """Loads the first `lanes` 16-bit numbers of a vector; the other lanes are zero."""
    words = f"<{width} x i16>"
    if lanes == width:
        return f.op(f"load {words}, ptr {pointer}, align 2")
    return f.op(
        f"call {words} @llvm.masked.load.v{width}i16.p0(ptr {pointer}, i32 2, "
        f"<{width} x i1> {masked_lanes(lanes, width)}, {words} zeroinitializer)"
    )


def store_kind(f: Function, kind: Kind, value: str, pointer: str, lanes: int, width: int) -> None:
    """Stores the first `lanes` numbers of a float32 vector as float32, or rounded to bfloat16."""
    if kind == "float":
        store(f, value, pointer, lanes, width)
        return
    store_words(f, _narrow(f, value, width), pointer, lanes, width)


def round_words(f: Function, kind: Kind, pointer: str, lanes: int, width: int) -> str:
    """Loads the first `lanes` numbers of a kind, rounded to bfloat16, as words; the others are zero."""
    if kind == "bfloat":
        return load_words(f, pointer, lanes, width)
    return _narrow(f, load_kind(f, kind, pointer, lanes, width), width)


def _narrow(f: Function, value: str, width: int) -> str:
    narrow = f.op(f"call <{width} x bfloat> {NARROW}(<{width} x float> {value})")
    return f.op(f"bitcast <{width} x bfloat> {narrow} to <{width} x i16>")


def store_words(f: Function, value: str, pointer: str, lanes: int, width: int) -> None:
    """Stores the first `lanes` 16-bit numbers of a vector."""
    if lanes == width:
        f.line(f"store <{width} x i16> {value}, ptr {pointer}, align 2")
        return
    f.line(
        f"call void @llvm.masked.store.v{width}i16.p0(<{width} x i16> {value}, ptr {pointer}, "
        f"i32 2, <{width} x i1> {masked_lanes(lanes, width)})"
    )


def each_vector(f: Function, count: int, width: int, move: Callable[[str, int], None]) -> None:
    """Calls `move(place, lanes)` in a loop over the whole vectors of `count` numbers, then for the rest."""
    whole, rest = divmod(count, width)
    if whole:
        with f.repeat(whole) as step:
            move(f.op(f"mul i64 {step.index}, {width}"), width)
    if rest:
        move(str(whole * width), rest)
