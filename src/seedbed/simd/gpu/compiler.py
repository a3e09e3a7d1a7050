"""Compiles a program to PTX, the text that the driver of an NVIDIA GPU compiles for the GPU it finds."""

from __future__ import annotations

import re

import llvmlite
import llvmlite.binding as llvm

from seedbed.llvm import Target, compile_assembly
from seedbed.simd.gpu.kernel import kernel_ir
from seedbed.simd.ir.program import Program

DEVICE = Target("nvptx64-nvidia-cuda", cpu="sm_75", features="+ptx63")
"""The oldest GPUs that CUDA 13 supports (Turing, 2018), and the oldest PTX that knows them."""
# LLVM lets these count denormal operands as zero, as sums do. On a CPU they change the sign and nothing else.
_SIGNS = re.compile(r"\b(abs|neg)\.ftz\.f32\b")


def compile_program(program: Program) -> str:
    """Compiles a program to PTX for every GPU since DEVICE. Any thread may call this.

    Raises:
        Unsupported: the program needs too much memory for its arrays, or contains other types than DTYPES.
    """
    return _SIGNS.sub(r"\1.f32", compile_assembly(kernel_ir(program), DEVICE))


def toolchain() -> str:
    """Describes everything about LLVM on which PTX depends."""
    return f"llvmlite {llvmlite.__version__}, LLVM {llvm.llvm_version_info}, {DEVICE}"


def entry_name(ptx: str) -> str:
    """Returns the name of the entry function of PTX."""
    found = re.search(r"\.entry (\w+)\(", ptx)
    assert found is not None
    return found[1]
