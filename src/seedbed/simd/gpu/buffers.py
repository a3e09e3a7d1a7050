"""The operands and results of a program on a GPU: buffers in which the rows are the fastest axis.

Element e of row r is at e * B + r, so the threads of a warp, which have neighbouring rows, read and write
neighbouring numbers. An operand that all examples share is row-major.
"""

from __future__ import annotations

from seedbed.simd.cpu.instructions import Writer
from seedbed.simd.ir.graph import Node
from seedbed.simd.ir.program import Program

ROW, ROWS = "%row", "%rows"
"""Names of the i64 values that hold the thread's own row, and the number of rows."""


class Buffers:
    """The buffers of a program: `%in0`, `%in1` and so on, then `%batch`, then `%out0` and so on."""

    def __init__(self, program: Program, writer: Writer) -> None:
        """Takes the program and what writes its code."""
        self._program, self._w = program, writer

    def parameters(self) -> str:
        """Returns the parameters of the entry function: pointers to the buffers."""
        inputs = [f"%in{i}" for i in range(len(self._program.inputs))]
        results = [f"%out{i}" for i in range(len(self._program.outputs))]
        # Operands may be the same buffer, which is no alias for LLVM, since nothing is written there.
        pointers = [f"ptr addrspace(1) noalias readonly {name}" for name in (*inputs, "%batch")]
        return ", ".join([*pointers, *(f"ptr addrspace(1) noalias {name}" for name in results)])

    def read(self, node: Node, kind: str) -> str:
        """Writes the load of an "input" node of the LLVM type `kind`; returns its name."""
        w, (operand, element) = self._w, node.value
        memory, align = ("i8", 1) if node.dtype == "bool" else (kind, 4)
        index = str(element) if node.uniform else self._index(element)
        address = w.op(f"getelementptr {memory}, ptr addrspace(1) %in{operand}, i64 {index}")
        name = w.op(f"load {memory}, ptr addrspace(1) {address}, align {align}")
        return w.op(f"icmp ne i8 {name}, 0") if node.dtype == "bool" else name

    def whole(self, node: Node) -> str:
        """Writes what gives the address of an "operand" node; returns its name."""
        return self._w.op(f"addrspacecast ptr addrspace(1) %in{node.value[0]} to ptr")

    def at(self, result: int, element: int) -> str:
        """Returns the address of an element of a result."""
        size = "i8" if self._program.outputs[result].dtype == "bool" else "i32"
        index = self._index(element)
        return self._w.op(f"getelementptr {size}, ptr addrspace(1) %out{result}, i64 {index}")

    def write(self, dtype: str, address: str, name: str) -> None:
        """Writes the store of an element, a vector, of a result of type `dtype`."""
        w, kind, align = self._w, self._w.kind(dtype), 4
        if dtype == "bool":
            name, kind, align = w.op(f"zext i1 {name} to i8"), "i8", 1
        w.line(f"store {kind} {name}, ptr addrspace(1) {address}, align {align}")

    def _index(self, element: int) -> str:
        if not element:
            return ROW
        return self._w.op(f"add i64 {ROW}, {self._w.op(f'mul i64 {ROWS}, {element}')}")
