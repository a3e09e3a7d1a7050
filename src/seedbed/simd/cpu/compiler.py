"""Compiles a program to the machine code of a custom call, which applies it to the rows of arrays."""

from __future__ import annotations

import ctypes
import time
from importlib.metadata import version
from typing import NamedTuple

from seedbed.ffi import Chunks, kernel_module
from seedbed.llvm import Target, compile_object, host_target, host_vector_unit, load_object
from seedbed.simd.cpu.codegen import emit
from seedbed.simd.cpu.kernel import ARCHITECTURES, Port, kernel_ir
from seedbed.simd.cpu.stack_budget import MOST_STACK, Room
from seedbed.simd.ir.program import Program, Unsupported
from seedbed.simd.schedule.measure import work
from seedbed.simd.schedule.plan import Liveness

OLDEST_LLVMLITE = (0, 45)  # earlier versions do not parse opaque pointers
# The time that a chunk should take: to hand one out costs about 0.2 us.
_CHUNK_SECONDS = 20e-6
_OPERATION_SECONDS = 0.3e-9  # rough time of one vector operation
_MOST_TILES = 64  # in one chunk


class CompiledKernel(NamedTuple):
    """The machine code of a kernel, its LLVM IR, and the seconds that each took to make."""

    code: bytes
    text: str  # LLVM IR
    emit_seconds: float
    compile_seconds: float


def lanes() -> int:
    """Returns the number of examples that a kernel works on at once."""
    return host_vector_unit().width


def unsupported() -> str | None:
    """Returns why kernels do not run on this machine, or None if they do."""
    name, found = host_target().architecture, version("llvmlite")
    if name not in ARCHITECTURES:
        return f"there is no code generator for {name} CPUs"
    if tuple(map(int, found.split(".")[:2])) < OLDEST_LLVMLITE:
        return (
            f"llvmlite {found} is too old; install {'.'.join(map(str, OLDEST_LLVMLITE))} or later"
        )
    return None


def compile_program(program: Program, width: int) -> CompiledKernel:
    """Compiles a program for this machine and vectors of `width` lanes.

    Raises:
        Unsupported: the kernel needs more stack than a thread has to spare, or too much memory for its
            arrays, or the program contains other types than DTYPES.
    """
    begin, target = time.perf_counter(), host_target(width)
    text = program_module(program, width, target)
    middle = time.perf_counter()
    code = compile_object(text, target)
    _check_stack(code)
    return CompiledKernel(code, text, middle - begin, time.perf_counter() - middle)


def program_module(program: Program, width: int, target: Target) -> str:
    """Returns the IR of a custom call that applies a program to rows, for vectors of `width` lanes.

    Raises:
        Unsupported: the kernel needs too much memory for its arrays, or the program contains other types
            than DTYPES.
    """
    read = {node.value[0] for node in Liveness(program).nodes if node.op in ("input", "operand")}
    inputs, outputs = (
        [Port(o.nodes.size, o.dtype, o.shared, i in read) for i, o in enumerate(side)]
        for side in (program.inputs, program.outputs)
    )
    seconds = work(program.graph) * _OPERATION_SECONDS
    tiles = max(1, min(_MOST_TILES, round(_CHUNK_SECONDS / max(seconds, 1e-9))))
    room = Room()
    ir = emit(program, width, fma=target.fused_multiply_add, room=room)
    return kernel_module(
        kernel_ir(ir, inputs, outputs, width, tiles, room, target.architecture),
        arguments=len(inputs),
        results=len(outputs),
        chunks=Chunks(len(inputs), tiles * width),
    )


def _check_stack(code: bytes) -> None:
    """Raises Unsupported if a kernel takes more than MOST_STACK bytes of the stack."""
    measure = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(load_object(code, "stack_use"))
    used = measure(None)
    if used > MOST_STACK:
        raise Unsupported(
            f"the kernel takes {used >> 10} KiB of stack, more than {MOST_STACK >> 10}, for numbers that it "
            "needs all at once: keep them in an array that lax.scan or lax.fori_loop goes through"
        )
