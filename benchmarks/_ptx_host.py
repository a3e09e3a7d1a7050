"""Runs kernels for GPUs on this CPU, with loops instead of blocks and threads: for tests and measurements."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from seedbed.llvm import compile_ir, host_target
from seedbed.simd.cpu.kernel import FLOATS
from seedbed.simd.ir.program import Operand, Program

_INTRINSICS = "llvm.nvvm.read.ptx.sreg."
_REGISTERS = {"ctaid.x": "%block", "ntid.x": "%threads", "tid.x": "%thread"}
_MARGIN = 64  # bytes behind each result, to notice a kernel that writes there
_FILL = 0xA5

_GRID = """
define void @grid(ptr %addresses, i32 %blocks, i32 %threads) nounwind {{
entry:
  %before = call i64 @set_floats()
{loads}
  br label %block_head
block_head:
  %block = phi i32 [0, %entry], [%next_block, %block_done]
  br label %thread_head
thread_head:
  %thread = phi i32 [0, %block_head], [%next_thread, %thread_head]
{stores}
  call void {entry}({given})
  %next_thread = add i32 %thread, 1
  %more_threads = icmp ult i32 %next_thread, %threads
  br i1 %more_threads, label %thread_head, label %block_done
block_done:
  %next_block = add i32 %block, 1
  %more_blocks = icmp ult i32 %next_block, %blocks
  br i1 %more_blocks, label %block_head, label %done
done:
  call void @restore_floats(i64 %before)
  ret void
}}
"""


def host_ir(ir: str, buffers: int) -> str:
    """Returns the IR of `@grid(ptr addresses, i32 blocks, i32 threads)`, which runs a kernel's whole grid.

    The kernel stays as it is, but for its calling convention and the names of the thread's registers.
    """
    registers = []
    for name in _REGISTERS:
        ir = ir.replace(f"declare i32 @{_INTRINSICS}{name}()", "")
        registers.append(
            f"@{name} = internal global i32 0\n"
            f"define internal i32 @register.{name}() nounwind {{\n"
            f"%value = load i32, ptr @{name}\nret i32 %value\n}}"
        )
    loads = [
        f"%slot{i} = getelementptr ptr, ptr %addresses, i64 {i}\n"
        f"%buffer{i} = load ptr addrspace(1), ptr %slot{i}"
        for i in range(buffers)
    ]
    begin = ir.index("@seedbed_")
    grid = _GRID.format(
        loads="\n".join(loads),
        stores="\n".join(f"store i32 {value}, ptr @{name}" for name, value in _REGISTERS.items()),
        entry=ir[begin : ir.index("(", begin)],
        given=", ".join(f"ptr addrspace(1) %buffer{i}" for i in range(buffers)),
    )
    ir = ir.replace(_INTRINSICS, "register.").replace("ptx_kernel ", "")
    return "\n".join([*registers, FLOATS[host_target().architecture], ir, grid])


class HostKernel:
    """A kernel for GPUs, compiled for this CPU; it takes and returns arrays [B, ...]."""

    def __init__(self, program: Program, ir: str) -> None:
        """Compiles the IR of the program's kernel. Raises RuntimeError if it is not valid LLVM IR."""
        self._program = program
        self._buffers = len(program.inputs) + 1 + len(program.outputs)
        address = compile_ir(host_ir(ir, self._buffers), "grid")
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32)
        self._grid = kind(address)

    def run(self, operands: list[Any], rows: int, *, blocks: int, threads: int) -> list[np.ndarray]:
        """Runs `blocks` blocks of `threads` threads and returns the results, [rows, ...].

        Rows that no thread runs hold undefined numbers. Raises RuntimeError if the kernel writes beyond the
        end of a result.
        """
        # As XLA does: an operand that is given twice is one buffer.
        flat = {
            (id(o), operand.shared): _flat(np.asarray(o), operand)
            for o, operand in zip(operands, self._program.inputs, strict=True)
        }
        given = [flat[id(o), p.shared] for o, p in zip(operands, self._program.inputs, strict=True)]
        sizes = [rows * o.nodes.size * np.dtype(o.dtype).itemsize for o in self._program.outputs]
        results = [np.full(size + _MARGIN, _FILL, np.uint8) for size in sizes]
        buffers = [*given, np.array([rows], np.int32), *results]
        self._grid(
            (ctypes.c_void_p * len(buffers))(*(b.ctypes.data for b in buffers)), blocks, threads
        )
        for i, (result, size) in enumerate(zip(results, sizes, strict=True)):
            if (result[size:] != _FILL).any():
                raise RuntimeError(f"the kernel writes beyond the end of result {i}")
        return [
            np.moveaxis(r[:s].view(o.dtype).reshape(*o.shape, rows), -1, 0)
            for r, s, o in zip(results, sizes, self._program.outputs, strict=True)
        ]


def _flat(array: np.ndarray, operand: Operand) -> np.ndarray:
    """Returns an operand as the kernel reads it: the rows are the fastest axis of what is not shared."""
    moved = array if operand.shared else np.moveaxis(array, 0, -1)
    return np.ascontiguousarray(moved, operand.dtype).reshape(-1)
