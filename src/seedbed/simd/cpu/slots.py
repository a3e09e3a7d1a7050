"""The operands and results of `@program` on a CPU: slots of one vector for each element."""

from __future__ import annotations

from seedbed.simd.cpu.arrays import Arrays, Storage
from seedbed.simd.cpu.instructions import Writer
from seedbed.simd.ir.graph import Node
from seedbed.simd.ir.program import Program, slots


class Slots:
    """The slots of a program: operands are in `%in` and `%shared`, results in `%out`."""

    def __init__(self, program: Program, writer: Writer, arrays: Arrays) -> None:
        """Takes the program and what writes its code."""
        self._w, self._arrays = writer, arrays
        self._inputs, self._outputs = slots(program.inputs), slots(program.outputs)
        self._dtypes = [operand.dtype for operand in program.outputs]

    def read(self, node: Node, kind: str) -> str:
        """Writes the load of an "input" node of the LLVM type `kind`; returns its name."""
        w, (operand, element) = self._w, node.value
        slot = self._inputs[operand]
        if node.uniform:
            pointer = w.op(f"getelementptr ptr, ptr %shared, i64 {slot}")
            data = w.op(f"load ptr, ptr {pointer}")
            memory = "i8" if node.dtype == "bool" else kind
            address = w.op(f"getelementptr {memory}, ptr {data}, i64 {element}")
            name = w.op(f"load {memory}, ptr {address}, align {1 if memory == 'i8' else 4}")
            return w.op(f"icmp ne i8 {name}, 0") if memory == "i8" else name
        storage = Storage("%in", node.dtype, 0, False)
        return self._arrays.get(
            storage, self._arrays.at(storage, str(slot + element)), uniform=False
        )

    def whole(self, node: Node) -> str:
        """Writes what gives the address of an "operand" node; returns its name."""
        slot = self._inputs[node.value[0]]
        return self._w.op(
            f"load ptr, ptr {self._w.op(f'getelementptr ptr, ptr %shared, i64 {slot}')}"
        )

    def at(self, result: int, element: int) -> str:
        """Returns the address of an element of a result."""
        storage = Storage("%out", self._dtypes[result], 0, False)
        return self._arrays.at(storage, str(self._outputs[result] + element))

    def write(self, dtype: str, address: str, name: str) -> None:
        """Writes the store of an element, a vector, of a result of type `dtype`."""
        w = self._w
        if dtype != "bool":
            self._arrays.put(Storage("%out", dtype, 0, False), address, name)
            return
        # outside, a bool is 0 or 1
        wide = w.op(f"zext {w.kind('bool')} {name} to {w.kind('int32')}")
        w.line(f"store {w.kind('int32')} {wide}, ptr {address}, align {4 * w.width}")
