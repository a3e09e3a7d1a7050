"""LLVM IR that applies a program, which works on the lanes of vectors, to the rows of arrays.

A tile has one row for each lane. Its rows are transposed in registers into one vector for each element.
Then the program runs, and its results are transposed back. If the last tile has fewer rows than lanes,
its last row is repeated in the other lanes. Each task sets the modes of rounding and denormal numbers,
and restores the previous modes at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from seedbed.llvm import Function
from seedbed.simd.cpu.stack_budget import ALIGN, PROBE, RESERVE, Room, aligned, stack_use

_TASK = "internal void @task(ptr %data, ptr %dims, i64 %chunk, i64 %chunks)"
HEAD = """
define internal void @program(ptr noalias %in, ptr noalias %out, ptr noalias %shared, ptr noalias %memory)
nounwind alignstack(64) "prefer-vector-width"="512" "min-legal-vector-width"="512" #0 {
"""
"""The start of the IR of `@program`. The addresses of its arrays, ENTRY and its instructions follow."""
ENTRY = PROBE.format(first="%in", second="%out") + "\nwork:"
_TILE = "internal void @tile(ptr %from, ptr %to, ptr %shared, ptr %memory)"
# A program with at most so many lines of IR is inlined into `@tile`.
_INLINED = 2000
# 128 bits hold so many 32-bit columns. Vectors are joined from pieces of this size, and split into them.
_COLUMNS = 4

# Copies the rows of a partial tile, then copies its last row into each remaining lane.
_STAGE = """
define internal void @stage(ptr %to, ptr %from, i64 %row, i64 %valid, i64 %lanes) nounwind {
entry:
  %size = mul i64 %row, %valid
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %size, i1 false)
  %before = sub i64 %size, %row
  %last = getelementptr i8, ptr %from, i64 %before
  br label %head
head:
  %lane = phi i64 [%valid, %entry], [%next, %body]
  %more = icmp slt i64 %lane, %lanes
  br i1 %more, label %body, label %done
body:
  %place = mul i64 %row, %lane
  %copy = getelementptr i8, ptr %to, i64 %place
  call void @llvm.memcpy.p0.p0.i64(ptr %copy, ptr %last, i64 %row, i1 false)
  %next = add i64 %lane, 1
  br label %head
done:
  ret void
}
"""
_MEMCPY = "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)\n"

# Sets rounding to nearest, and treats denormal numbers as zero, as XLA's own threads do.
FLOATS = {
    "x86_64": """
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)
define internal i64 @set_floats() nounwind {
  %slot = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %slot)
  %before = load i32, ptr %slot
  store i32 40896, ptr %slot ; 0x9FC0: flush, denormals are zero, no traps, to nearest
  call void @llvm.x86.sse.ldmxcsr(ptr %slot)
  %wide = zext i32 %before to i64
  ret i64 %wide
}
define internal void @restore_floats(i64 %before) nounwind {
  %slot = alloca i32
  %narrow = trunc i64 %before to i32
  store i32 %narrow, ptr %slot
  call void @llvm.x86.sse.ldmxcsr(ptr %slot)
  ret void
}
""",
    "aarch64": """
declare i64 @llvm.aarch64.get.fpcr()
declare void @llvm.aarch64.set.fpcr(i64)
define internal i64 @set_floats() nounwind {
  %before = call i64 @llvm.aarch64.get.fpcr()
  %nearest = and i64 %before, -12582913 ; all but the rounding mode, bits 22 and 23
  %flush = or i64 %nearest, 16777216 ; bit 24
  call void @llvm.aarch64.set.fpcr(i64 %flush)
  ret i64 %before
}
define internal void @restore_floats(i64 %before) nounwind {
  call void @llvm.aarch64.set.fpcr(i64 %before)
  ret void
}
""",
}

ARCHITECTURES = tuple(FLOATS)
"""Instruction sets for which there are kernels."""


class Port(NamedTuple):
    """An operand or result: how many elements a row has, their type, and whether all rows share it."""

    size: int
    dtype: str
    shared: bool = False
    # if False, the program never reads the operand: it has slots, but they are not filled
    read: bool = True

    @property
    def bytes(self) -> int:
        """Size of one element in a buffer, in bytes."""
        return 1 if self.dtype == "bool" else 4


def kernel_ir(
    program: str,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    width: int,
    tiles: int,
    room: Room,
    architecture: str,
) -> str:
    """Returns the IR of a task that runs `@program` on the rows of `inputs`, `tiles` tiles in a chunk.

    The text `program` defines `void @program(ptr in, ptr out, ptr shared, ptr memory)`, which begins
    with HEAD and ENTRY. `in` holds one vector of `width` lanes, 32 bits each, for every element of the
    operands that are not shared; `out` holds one for every element of the results. `shared` holds the
    addresses of the shared operands. `memory` is a block of the heap; the offsets that the program uses
    in it are already taken in `room`, and the slots of a tile are taken here. The number of rows is the
    leading dimension of the first result. The IR also has `i64 @stack_use(ptr null)`, which returns the
    bytes of stack that a task takes. `architecture` is one of ARCHITECTURES.
    """
    f = Function(_TASK)
    before = f.op("call i64 @set_floats()")
    rows = f.op(f"load i64, ptr {f.at('%dims', len(inputs), 'i64')}")
    buffers = [
        f.op(f"load ptr, ptr {f.at('%data', i, 'ptr')}") for i in range(len(inputs) + len(outputs))
    ]
    mapped = [i for i, port in enumerate(inputs) if not port.shared and port.size]
    results = [i for i, port in enumerate(outputs) if port.size]
    sides = (
        [(inputs[i], buffers[i]) for i in mapped],
        [(outputs[i], buffers[len(inputs) + i]) for i in results],
    )
    shared = [b for b, port in zip(buffers, inputs, strict=False) if port.shared]
    tables = [_pointers(f, len(side)) for side in (*sides, shared)]
    for i, buffer in enumerate(shared):
        f.line(f"store ptr {buffer}, ptr {f.at(tables[2], i, 'ptr')}")
    tile_text = _tile([port for port, _ in sides[0]], [port for port, _ in sides[1]], width, room)
    memory = f.op(f"call ptr @reserve(i64 {room.heap})") if room.heap else "null"
    first = f.op(f"mul i64 %chunk, {tiles}")
    beyond = f.op(f"add i64 {first}, {tiles}")
    count = f.op(f"sdiv i64 {f.op(f'add i64 {rows}, {width - 1}')}, {width}")
    fewer = f.op(f"icmp slt i64 {beyond}, {count}")
    with f.between(first, f.op(f"select i1 {fewer}, i64 {beyond}, i64 {count}")) as tile:
        row = f.op(f"mul i64 {tile}, {width}")
        left = f.op(f"sub i64 {rows}, {row}")
        places = [
            [f.scaled(buffer, row, port.size * port.bytes, "i8") for port, buffer in side]
            for side in sides
        ]
        _run_tile(f, sides, places, tables, memory, left, width)
    if room.heap:
        f.line(f"call void @free(ptr {memory})")
    f.line(f"call void @restore_floats(i64 {before})")
    memcpy = "" if _MEMCPY in program else _MEMCPY
    called = program.count("\n") > _INLINED
    use = stack_use(len(buffers), ("tile", "program") if called else ("tile",))
    attributes = f"attributes #0 = {{ {'noinline' if called else 'alwaysinline'} }}\n"
    around = memcpy + FLOATS[architecture] + RESERVE + _STAGE + use + attributes
    return program + around + tile_text + f.text()


def _run_tile(
    f: Function,
    sides: Sequence[Sequence[tuple[Port, str]]],
    places: list[list[str]],
    tables: list[str],
    memory: str,
    left: str,
    width: int,
) -> None:
    """Emits the call of `@tile` for one tile: on the rows in place, or on copies if too few rows are left.

    `tables` hold the addresses of the rows, `memory` is the block of the heap. `left` is the number of rows
    left, `width` the number of lanes.
    """
    pointers = ", ".join(f"ptr {pointer}" for pointer in (*tables, memory))
    whole, part, after = f.fresh("whole"), f.fresh("part"), f.fresh("after")
    f.line(f"br i1 {f.op(f'icmp sge i64 {left}, {width}')}, label %{whole}, label %{part}")
    f.open(whole)
    _point(f, tables, places)
    f.line(f"call void @tile({pointers})")
    f.line(f"br label %{after}")
    f.open(part)
    sizes = [aligned(port.size * port.bytes * width) for side in sides for port, _ in side]
    copies = f.op(f"call ptr @reserve(i64 {sum(sizes) + ALIGN})")
    each = iter(
        f.at(copies, end - size, "i8") for end, size in zip(accumulate(sizes), sizes, strict=True)
    )
    spare = [[next(each) for _ in side] for side in sides]
    for (port, _), source, copy in zip(sides[0], places[0], spare[0], strict=True):
        row = port.size * port.bytes
        f.line(f"call void @stage(ptr {copy}, ptr {source}, i64 {row}, i64 {left}, i64 {width})")
    _point(f, tables, spare)
    f.line(f"call void @tile({pointers})")
    for (port, _), target, copy in zip(sides[1], places[1], spare[1], strict=True):
        size = f.op(f"mul i64 {left}, {port.size * port.bytes}")
        f.line(f"call void @llvm.memcpy.p0.p0.i64(ptr {target}, ptr {copy}, i64 {size}, i1 false)")
    f.line(f"call void @free(ptr {copies})")
    f.line(f"br label %{after}")
    f.open(after)


def _point(f: Function, tables: list[str], places: list[list[str]]) -> None:
    for table, addresses in zip(tables, places, strict=False):
        for i, address in enumerate(addresses):
            f.line(f"store ptr {address}, ptr {f.at(table, i, 'ptr')}")


def _pointers(f: Function, count: int) -> str:
    return f.op(f"alloca [{count} x ptr], align 16")


def _tile(inputs: Sequence[Port], outputs: Sequence[Port], width: int, room: Room) -> str:
    """Returns the IR of `@tile`, which runs the program on a whole tile.

    `%from` and `%to` hold the address of the tile's first row in each operand and result. The memory of
    the slots is taken from `room`.
    """
    # Not inlined: otherwise LLVM could move a float operation to before the rounding mode is set.
    f = Function(_TILE, "noinline")

    def slots_for(count: int) -> str:
        size = 4 * width * count
        offset = room.take(size)
        if offset is None:
            return f.op(f"alloca [{size} x i8], align {ALIGN}")
        return f.op(f"getelementptr i8, ptr %memory, i64 {offset}")

    slots = [slots_for(sum(p.size for p in side)) for side in (inputs, outputs)]
    bools = [port.size for port in (*inputs, *outputs) if port.dtype == "bool"]
    wide = slots_for(max(bools, default=0))
    f.line(PROBE.format(first="%from", second="%to"))
    f.open("work")
    at = 0
    for i, port in enumerate(inputs):
        if port.read:
            rows = f.op(f"load ptr, ptr {f.at('%from', i, 'ptr')}")
            _gather(f, port, rows, f.at(slots[0], at * width), wide, width)
        at += port.size
    f.line(f"call void @program(ptr {slots[0]}, ptr {slots[1]}, ptr %shared, ptr %memory)")
    at = 0
    for i, port in enumerate(outputs):
        rows = f.op(f"load ptr, ptr {f.at('%to', i, 'ptr')}")
        _scatter(f, port, f.at(slots[1], at * width), rows, wide, width)
        at += port.size
    return f.text()


def _gather(f: Function, port: Port, rows: str, slots: str, wide: str, width: int) -> None:
    """Emits the transposition of a tile's rows into slots. Bools are first widened to 32 bits.

    `rows` and `slots` are addresses; `wide` is the address of scratch memory for the widened bools.
    """
    if port.size < _COLUMNS:
        vectors = [_load(f, port, rows, str(i), width) for i in range(port.size)]
        places = [[lane * port.size + i for lane in range(width)] for i in range(port.size)]
        for i, place in enumerate(places):
            _store(f, _pick(f, vectors, place, width), f.at(slots, i * width), width)
        return
    if port.dtype == "bool":
        with f.repeat(port.size) as step:
            vector = _load(f, port, rows, step.index, width)
            _store(f, vector, f.scaled(wide, step.index, width), width)
        rows = wide
    for base, target in _units(f, port.size, rows, slots, width):
        vectors = []
        for k in range(_COLUMNS):
            parts = [
                f.op(f"load <4 x i32>, ptr {f.at(base, r * port.size, 'i32')}, align 4")
                for r in range(k, width, _COLUMNS)
            ]
            vectors.append(_join(f, parts))
        for k, vector in enumerate(_turn(f, vectors, width)):
            _store(f, vector, f.at(target, k * width), width)


def _scatter(f: Function, port: Port, slots: str, rows: str, wide: str, width: int) -> None:
    """Emits the transposition of slots into a tile's rows. Bools are narrowed to 8 bits at the end.

    `slots` and `rows` are addresses; `wide` is the address of scratch memory for the bools before that.
    """
    if port.size < _COLUMNS:
        vectors = [_slot(f, f.at(slots, i * width), width) for i in range(port.size)]
        for i in range(port.size):
            elements = range(i * width, (i + 1) * width)
            place = [e % port.size * width + e // port.size for e in elements]
            _put(f, port, _pick(f, vectors, place, width), rows, str(i), width)
        return
    target = wide if port.dtype == "bool" else rows
    for base, source in _units(f, port.size, target, slots, width):
        vectors = [_slot(f, f.at(source, k * width), width) for k in range(_COLUMNS)]
        for k, vector in enumerate(_turn(f, vectors, width)):
            for quarter, r in enumerate(range(k, width, _COLUMNS)):
                lanes = range(_COLUMNS * quarter, _COLUMNS * (quarter + 1))
                part = _shuffle(f, vector, vector, lanes, width)
                f.line(f"store <4 x i32> {part}, ptr {f.at(base, r * port.size)}, align 4")
    if port.dtype == "bool":
        with f.repeat(port.size) as step:
            vector = _slot(f, f.scaled(target, step.index, width), width)
            _put(f, port, vector, rows, step.index, width)


def _units(f: Function, size: int, rows: str, slots: str, width: int) -> Iterator[tuple[str, str]]:
    """Yields the addresses at which each unit of `_COLUMNS` columns begins in the rows and in the slots.

    The first pair is inside an emitted loop over the whole units. If `size` is not a multiple of
    `_COLUMNS`, a last unit covers the end and overlaps the one before. `size` is at least `_COLUMNS`.
    """
    whole = size // _COLUMNS
    with f.repeat(whole) as unit:
        yield f.scaled(rows, unit.index, _COLUMNS), f.scaled(slots, unit.index, _COLUMNS * width)
    if size % _COLUMNS:
        yield f.at(rows, size - _COLUMNS), f.at(slots, (size - _COLUMNS) * width)


def _turn(f: Function, vectors: Sequence[str], width: int) -> list[str]:
    """Transposes 4 x 4 blocks: the same 128 bits of each of the four vectors form one block."""
    low = [lane + half for lane in (0, 1) for half in (0, width)]
    high = [lane + half for lane in (2, 3) for half in (0, width)]
    first, last = [0, 1, width, width + 1], [2, 3, width + 2, width + 3]

    def pair(a: str, b: str, pattern: Sequence[int]) -> str:
        blocks = range(0, width, _COLUMNS)
        return _shuffle(f, a, b, [block + lane for block in blocks for lane in pattern], width)

    v = vectors
    a, b = pair(v[0], v[1], low), pair(v[0], v[1], high)
    c, d = pair(v[2], v[3], low), pair(v[2], v[3], high)
    return [pair(a, c, first), pair(a, c, last), pair(b, d, first), pair(b, d, last)]


def _pick(f: Function, vectors: Sequence[str], places: Sequence[int], width: int) -> str:
    """Returns a vector of the elements at `places` in the concatenation of `vectors`."""
    result = vectors[0]
    for i, vector in enumerate(vectors[1:], 1):
        lanes = [
            place - (i - 1) * width if place // width == i else lane
            for lane, place in enumerate(places)
        ]
        if i == 1:
            lanes = [place if place < 2 * width else 0 for place in places]
        result = _shuffle(f, result, vector, lanes, width)
    return result


def _join(f: Function, parts: list[str]) -> str:
    """Returns the concatenation of vectors of four lanes; their number is a power of two."""
    lanes = _COLUMNS
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [_shuffle(f, a, b, range(2 * lanes), lanes) for a, b in pairs]
        lanes *= 2
    return parts[0]


def _shuffle(f: Function, a: str, b: str, lanes: Sequence[int], width: int) -> str:
    vector, places = f"<{width} x i32>", ", ".join(f"i32 {lane}" for lane in lanes)
    return f.op(f"shufflevector {vector} {a}, {vector} {b}, <{len(lanes)} x i32> <{places}>")


def _load(f: Function, port: Port, rows: str, number: str, width: int) -> str:
    """Emits a load of vector `number` of the consecutive elements of a tile, bools as 32 bits."""
    kind = "i8" if port.dtype == "bool" else "i32"
    place = f.scaled(rows, number, width, kind)
    vector = f.op(f"load <{width} x {kind}>, ptr {place}, align {port.bytes}")
    return f.op(f"zext <{width} x i8> {vector} to <{width} x i32>") if kind == "i8" else vector


def _put(f: Function, port: Port, vector: str, rows: str, number: str, width: int) -> None:
    """Emits a store of vector `number` of the consecutive elements of a tile, bools as 8 bits."""
    kind = "i8" if port.dtype == "bool" else "i32"
    if kind == "i8":
        vector = f.op(f"trunc <{width} x i32> {vector} to <{width} x i8>")
    place = f.scaled(rows, number, width, kind)
    f.line(f"store <{width} x {kind}> {vector}, ptr {place}, align {port.bytes}")


def _slot(f: Function, place: str, width: int) -> str:
    return f.op(f"load <{width} x i32>, ptr {place}, align {4 * width}")


def _store(f: Function, vector: str, slot: str, width: int) -> None:
    f.line(f"store <{width} x i32> {vector}, ptr {slot}, align {4 * width}")
