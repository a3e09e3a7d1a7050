"""LLVM IR of a program for an NVIDIA GPU: an entry function in which each thread runs one example."""

from __future__ import annotations

import hashlib

from seedbed.simd.cpu.arrays import Arrays
from seedbed.simd.cpu.codegen import write
from seedbed.simd.cpu.instructions import Writer
from seedbed.simd.cpu.remainder import REMAINDER
from seedbed.simd.gpu.buffers import ROW, ROWS, Buffers
from seedbed.simd.gpu.memory import DeviceMemory
from seedbed.simd.gpu.places import shared_places
from seedbed.simd.ir.program import Program

# Denormal numbers count as zero, as on a CPU: every float instruction carries `.ftz`.
_ATTRIBUTES = (
    'attributes #0 = { nounwind "denormal-fp-math"="preserve-sign,preserve-sign" '
    '"denormal-fp-math-f32"="preserve-sign,preserve-sign" }'
)
_REGISTERS = ("ctaid.x", "ntid.x", "tid.x")
_DECLARED = [f"declare i32 @llvm.nvvm.read.ptx.sreg.{name}()" for name in _REGISTERS]
_BEGIN = f"""
  %block = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  %size = call i32 @llvm.nvvm.read.ptx.sreg.ntid.x()
  %thread = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %first = mul i32 %block, %size
  %own = add i32 %first, %thread
  %count = load i32, ptr addrspace(1) %batch, align 4
  {ROW} = zext i32 %own to i64
  {ROWS} = zext i32 %count to i64
  %mine = icmp ult i32 %own, %count
  br i1 %mine, label %work, label %beyond
work:"""


def kernel_ir(program: Program) -> str:
    """Returns the LLVM IR of a program as the entry function of a GPU; it names no target.

    The entry function has a pointer for each operand in turn, one to the number of rows (int32), and one
    for each result, laid out as `Buffers` says. Its name is made from its text.

    Raises Unsupported if the program contains other types than DTYPES, or needs too much memory for arrays.
    """
    writer = Writer(1, fma=True, functions={"rem": "remainder"})
    arrays = Arrays(writer, DeviceMemory())
    buffers = Buffers(program, writer)
    write(program, writer, arrays, buffers)
    places = shared_places(arrays.made, writer.lines)
    body = [
        *places.addresses,
        _BEGIN,
        *places.lines,
        "br label %beyond",
        "beyond:",
        "ret void",
        "}",
    ]
    name = hashlib.sha256("\n".join([*arrays.globals, *body]).encode()).hexdigest()[:16]
    head = f"define ptx_kernel void @seedbed_{name}({buffers.parameters()}) #0 {{\nentry:"
    remainder = [REMAINDER] if any("@remainder" in line for line in writer.lines) else []
    declared = [*_DECLARED, *writer.declarations(), *remainder]
    return "\n".join([*arrays.globals, *declared, _ATTRIBUTES, head, *body, ""])
