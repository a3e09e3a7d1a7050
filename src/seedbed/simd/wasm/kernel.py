"""LLVM IR of programs for WebAssembly: functions of one module, each of which runs one example.

A function is `@NAME(ptr in, ptr out, ptr shared)`. `in` and `out` hold four bytes for each element of each
operand and result in turn (bools as 0 or 1). `shared` holds the addresses of the operands that are shared.
"""

from __future__ import annotations

from collections.abc import Mapping

from seedbed.simd.cpu.arrays import Arrays
from seedbed.simd.cpu.codegen import write
from seedbed.simd.cpu.instructions import Writer
from seedbed.simd.cpu.remainder import REMAINDER
from seedbed.simd.cpu.slots import Slots
from seedbed.simd.ir.program import Program
from seedbed.simd.wasm.arithmetic import ARITHMETIC, FUNCTIONS

_ALIGN = 16
_ATTRIBUTES = "attributes #0 = { nounwind }"


class _LinearMemory:
    """The memory of a module: a function's own arrays are on its stack, tables among the module's data."""

    bool_bits = 32

    def __init__(self, function: str) -> None:
        self.stack = 0  # bytes taken
        self._function = function

    def place(self, size: int, array: str) -> str:
        """Takes `size` bytes for an array of LLVM type `array`; returns the instruction for its address."""
        self.stack += -(-size // _ALIGN) * _ALIGN
        return f"alloca {array}, align {_ALIGN}"

    def table(self, name: str, size: int, constants: str) -> tuple[str, str]:
        """Returns the definition of a constant array, and the operand for its address."""
        del size
        own = f"@{self._function}.{name.removeprefix('@')}"
        return f"{own} = internal constant {constants}, align {_ALIGN}", own


def module_ir(programs: Mapping[str, Program]) -> tuple[str, int]:
    """Returns the LLVM IR of programs, by the names of their functions, and the bytes of stack they need.

    The IR names no target. Raises Unsupported if a program contains other types than DTYPES, or needs too
    much memory for arrays.
    """
    declared: dict[str, str] = {}
    lines: list[str] = []
    stack = 0
    for name, program in programs.items():
        writer, memory = Writer(1, fma=True, functions=FUNCTIONS), _LinearMemory(name)
        arrays = Arrays(writer, memory)
        write(program, writer, arrays, Slots(program, writer, arrays))
        declared |= writer.declared
        stack = max(stack, memory.stack)
        lines += [
            *arrays.globals,
            f"define void @{name}(ptr noalias %in, ptr noalias %out, ptr noalias %shared) #0 {{",
            *arrays.places,
            "br label %work",
            "work:",
            *writer.lines,
            "ret void",
            "}",
        ]
    head = [*(declared[name] for name in sorted(declared)), ARITHMETIC, REMAINDER, _ATTRIBUTES]
    return "\n".join([*head, *lines, ""]), stack
