"""Writes the LLVM IR of arrays in memory: where they are, and reads and writes of their elements."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from seedbed.simd.cpu.instructions import SCALARS, Writer, literal
from seedbed.simd.ir.graph import Node
from seedbed.simd.ir.program import Unsupported

MOST_BYTES = 4 << 20
"""Most bytes that the arrays of one kernel may take, in each thread that runs it."""


@dataclasses.dataclass(frozen=True)
class Storage:
    """The place of an array in memory. A bool is an integer there, 0 or -1 (in `%in` and `%out`, 0 or 1)."""

    address: str
    dtype: str
    size: int
    # One number for each element, instead of one for each lane of each element.
    uniform: bool
    # Written only in the lanes that have not left the while loop around the write.
    masked: bool = False


class Lanes(str):
    """The name of a vector of addresses, one for each lane."""


class Memory(Protocol):
    """The memory of a processor in which arrays have their places."""

    bool_bits: int
    """Bits of the integer as which a bool is stored."""

    def place(self, size: int, array: str) -> str:
        """Takes `size` bytes for an array of LLVM type `array`; returns the instruction for its address."""
        ...

    def table(self, name: str, size: int, constants: str) -> tuple[str, str]:
        """Returns the definition of a constant array of `size` bytes, and the operand for its address."""
        ...


class Arrays:
    """The arrays of one LLVM function. `writer` receives their instructions, `room` gives their memory."""

    def __init__(self, writer: Writer, room: Memory) -> None:
        # IR lines: the addresses of arrays (on the stack, or in `%memory`), and the constant arrays.
        self.places: list[str] = []
        self.globals: list[str] = []
        # Address, block in which the array begins, and bytes of each array that is not constant.
        self.made: list[tuple[str, str, int]] = []
        self._w = writer
        self._room = room
        self._bytes = 0

    def kind(self, storage: Storage) -> str:
        """Returns the LLVM type of a stored element."""
        if storage.dtype == "bool":
            kind = self._w.kind("int32", uniform=storage.uniform)
            return kind.replace("i32", f"i{self._room.bool_bits}")
        return self._w.kind(storage.dtype, uniform=storage.uniform)

    def new(self, dtype: str, size: int, *, uniform: bool) -> Storage:
        """Reserves memory for an array of `size` elements.

        Raises Unsupported if the arrays of the kernel then take more than MOST_BYTES.
        """
        storage = Storage(f"%{self._w.fresh('m')}", dtype, size, uniform)
        count = size * self._size_of(storage)
        self._bytes += count
        if self._bytes > MOST_BYTES:
            raise Unsupported(
                f"the arrays that loops index or write down take more than {MOST_BYTES >> 20} MiB for "
                "the examples of one kernel: use smaller arrays or shorter loops"
            )
        place = self._room.place(count, f"[{size} x {self.kind(storage)}]")
        self.places.append(f"{storage.address} = {place}")
        self.made.append((storage.address, self._w.block, count))
        return storage

    def table(self, node: Node) -> Storage:
        """Makes a constant array from a "table" node."""
        data, size = node.value
        numbers = np.frombuffer(data, node.dtype)
        if node.dtype == "bool":
            numbers = -numbers.astype(np.int32)
        storage = Storage("", node.dtype, size, True)
        scalar, dtype = self.kind(storage), "int32" if node.dtype == "bool" else node.dtype
        text = ", ".join(f"{scalar} {literal(x, dtype)}" for x in numbers)
        constants = f"[{size} x {scalar}] [{text}]"
        count = size * self._size_of(storage)
        definition, address = self._room.table(f"@table{len(self.globals)}", count, constants)
        self.globals.append(definition)
        return dataclasses.replace(storage, address=address)

    def at(self, storage: Storage, index: str | int) -> str:
        """Returns the address of element `index`."""
        return self._w.op(f"getelementptr {self.kind(storage)}, ptr {storage.address}, i64 {index}")

    def beyond(self, storage: Storage, base: str, offset: int) -> str:
        """Returns the address of element `base + offset`; `base` is a 32-bit operand."""
        first = self.at(storage, self._w.op(f"sext i32 {base} to i64"))
        if not offset:
            return first
        return self._w.op(f"getelementptr {self.kind(storage)}, ptr {first}, i64 {offset}")

    def own(self, storage: Storage, base: str, offset: int) -> str:
        """Returns the addresses of the elements `base + offset`; each lane has its own 32-bit `base`."""
        w, kind = self._w, self._w.kind("int32")
        if w.width == 1:
            return self.beyond(storage, base, offset)
        index = w.op(f"add {kind} {base}, {w.constant(offset, 'int32', uniform=False)}")
        if not storage.uniform:
            lanes = ", ".join(f"i32 {lane}" for lane in range(w.width))
            index = w.op(f"mul {kind} {index}, {w.constant(w.width, 'int32', uniform=False)}")
            index = w.op(f"add {kind} {index}, <{lanes}>")
        scalar = "i32" if storage.dtype == "bool" else SCALARS[storage.dtype]
        return Lanes(w.op(f"getelementptr {scalar}, ptr {storage.address}, {kind} {index}"))

    def _each(self, storage: Storage, verb: str) -> tuple[str, str, str]:
        """Declares a gather or scatter; returns its name, the type of its vector, and all lanes as a mask."""
        w = self._w
        kind = w.kind("int32" if storage.dtype == "bool" else storage.dtype)
        pointers, mask = f"<{w.width} x ptr>", w.kind("bool")
        number = "f32" if storage.dtype == "float32" else "i32"
        name = f"llvm.masked.{verb}.v{w.width}{number}.v{w.width}p0"
        if verb == "gather":
            declared = f"declare {kind} @{name}({pointers}, i32, {mask}, {kind})"
        else:
            declared = f"declare void @{name}({kind}, {pointers}, i32, {mask})"
        w.declared[name] = declared
        return name, kind, f"{mask} {w.constant(True, 'bool', uniform=False)}"

    def get(self, storage: Storage, address: str, *, uniform: bool) -> str:
        """Loads an element: a scalar if `uniform` (of a uniform array only), else a vector."""
        w, kind = self._w, self.kind(storage)
        if isinstance(address, Lanes):
            name, kind, every = self._each(storage, "gather")
            pointers = f"<{w.width} x ptr> {address}"
            name = w.op(f"call {kind} @{name}({pointers}, i32 4, {every}, {kind} poison)")
            return (
                w.op(f"icmp ne {kind} {name}, zeroinitializer") if storage.dtype == "bool" else name
            )
        name = w.op(f"load {kind}, ptr {address}, align {self._size_of(storage)}")
        if storage.dtype == "bool":
            zero = "0" if storage.uniform else "zeroinitializer"
            name = w.op(f"icmp ne {kind} {name}, {zero}")
        return w.splat(name, storage.dtype) if storage.uniform and not uniform else name

    def put(self, storage: Storage, address: str, name: str) -> None:
        """Stores an element: a scalar if the array is uniform, else a vector."""
        w, kind = self._w, self.kind(storage)
        if storage.dtype == "bool":
            name = w.op(f"sext {w.kind('bool', uniform=storage.uniform)} {name} to {kind}")
        if isinstance(address, Lanes):
            verb, kind, every = self._each(storage, "scatter")
            pointers = f"<{w.width} x ptr> {address}"
            w.line(f"call void @{verb}({kind} {name}, {pointers}, i32 4, {every})")
            return
        w.line(f"store {kind} {name}, ptr {address}, align {self._size_of(storage)}")

    def _size_of(self, storage: Storage) -> int:
        """Returns the size of a stored element, for all lanes, and its alignment."""
        one = self._room.bool_bits // 8 if storage.dtype == "bool" else 4
        return one if storage.uniform else one * self._w.width

    def copy(self, source: Storage, target: Storage, mask: str | None = None) -> None:
        """Copies an array; with a mask, only in the lanes where the mask holds."""
        w = self._w
        if source.address == target.address:
            return
        if source.uniform == target.uniform and mask is None:
            size = self._size_of(source) * target.size
            name = "llvm.memcpy.p0.p0.i64"
            w.declared[name] = f"declare void @{name}(ptr, ptr, i64, i1)"
            w.line(
                f"call void @{name}(ptr {target.address}, ptr {source.address}, i64 {size}, i1 false)"
            )
            return
        before, head, done = w.block, w.fresh("copy"), w.fresh("copied")
        w.jump(head)
        w.label(head)
        index, after = f"%{w.fresh()}", f"%{w.fresh()}"
        w.line(f"{index} = phi i64 [0, %{before}], [{after}, %{head}]")
        new = self.get(source, self.at(source, index), uniform=target.uniform)
        address = self.at(target, index)
        if mask is not None:
            old = self.get(target, address, uniform=target.uniform)
            kind = w.kind(target.dtype, uniform=target.uniform)
            new = w.select(mask, kind, new, old, uniform=target.uniform)
        self.put(target, address, new)
        w.line(f"{after} = add i64 {index}, 1")
        more = w.op(f"icmp slt i64 {after}, {target.size}")
        w.line(f"br i1 {more}, label %{head}, label %{done}")
        w.label(done)

    def rows(
        self, masks: Storage, count: int, among: Storage | None = None, alive: str | None = None
    ) -> Storage:
        """Lists the rows of `masks`, among the first `count`, that hold in some lane.

        Rows that the list `among` lacks, and lanes outside the mask `alive`, do not count. The result is a
        uniform int32 array [count + 1]: the row numbers from the start, and their number in the last element.
        """
        w, target = self._w, self.new("int32", count + 1, uniform=True)
        end = str(count) if among is None else self.get(among, self.at(among, count), uniform=True)
        before, head, done = w.block, w.fresh("rows"), w.fresh("listed")
        w.jump(head)
        w.label(head)
        index, after = f"%{w.fresh()}", f"%{w.fresh()}"
        place, next_place = f"%{w.fresh()}", f"%{w.fresh()}"
        w.line(f"{index} = phi i32 [0, %{before}], [{after}, %{head}]")
        w.line(f"{place} = phi i32 [0, %{before}], [{next_place}, %{head}]")
        row = index
        # If `among` lists no row, its element 0 is a row that holds in no lane, and is not listed again.
        if among is not None:
            row = self.get(among, self.beyond(among, index, 0), uniform=True)
        mask = self.get(masks, self.beyond(masks, row, 0), uniform=False)
        if alive is not None:
            mask = w.op(f"and {w.kind('bool')} {mask}, {alive}")
        self.put(target, self.beyond(target, place, 0), row)
        w.line(f"{next_place} = add i32 {place}, {w.op(f'zext i1 {w.any_lane(mask)} to i32')}")
        w.line(f"{after} = add i32 {index}, 1")
        more = w.op(f"icmp slt i32 {after}, {end}")
        w.line(f"br i1 {more}, label %{head}, label %{done}")
        w.label(done)
        self.put(target, self.at(target, count), next_place)
        return target

    def move(self, moves: list[tuple[Storage, Storage, str | None]]) -> None:
        """Copies each source to its target as if all at once; with a mask, only in the mask's lanes.

        Changes the list `moves`.
        """
        written = {target.address for _, target, _ in moves}
        for i, (source, target, mask) in enumerate(moves):
            if source.address in written:
                spare = self.new(source.dtype, source.size, uniform=source.uniform)
                self.copy(source, spare)
                moves[i] = spare, target, mask
        for source, target, mask in moves:
            self.copy(source, target, mask)
