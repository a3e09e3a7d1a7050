"""Kernels for aarch64, run on this machine: assembled by LLVM, linked by Debian's gcc, executed by qemu."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seedbed.llvm import Target, compile_object
from seedbed.simd.cpu.compiler import program_module
from seedbed.simd.cpu.stack_budget import MOST_STACK
from seedbed.simd.ir.program import Program

LANES = 4
GENERIC = Target("aarch64-unknown-linux-gnu", "generic")
PACKAGES = {
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
    "qemu-aarch64": "qemu-user",
}
MISSING = [packages for command, packages in PACKAGES.items() if shutil.which(command) is None]
_DRIVER = Path(__file__).parent / "aarch64_driver.c"


def results(program: Program, rows: int) -> list[Any]:
    """Arrays for the results of a program on a number of rows."""
    return [np.zeros((rows, *output.shape), output.dtype) for output in program.outputs]


def on_aarch64(
    program: Program,
    operands: Sequence[np.ndarray],
    rows: int,
    folder: Path,
    target: Target = GENERIC,
    machine: str = "max",
) -> list[np.ndarray]:
    """Compiles a program for an aarch64 CPU, runs it under qemu as `machine`, and returns its results."""
    kernel, executable = folder / "kernel.o", folder / "kernel"
    kernel.write_bytes(compile_object(program_module(program, LANES, target), target))
    link = ["aarch64-linux-gnu-gcc", "-O1", "-static", "-pthread", "-o", executable]
    subprocess.run([*link, _DRIVER, kernel, "-lm"], check=True)
    made = results(program, rows)
    shapes = [(a.ndim > 0, len(a) if a.ndim else 0, a.nbytes) for a in (*operands, *made)]
    given, found = folder / "in", folder / "out"
    head = np.array([len(operands), len(made), *np.ravel(shapes)], np.int64)
    given.write_bytes(head.tobytes() + b"".join(a.tobytes() for a in operands))
    subprocess.run(["qemu-aarch64", "-cpu", machine, executable, given, found], check=True)
    content = found.read_bytes()
    (stack,) = np.frombuffer(content[:8], np.int64)
    assert 0 < stack <= MOST_STACK
    at = 8
    for array in made:
        array[...] = np.frombuffer(content, array.dtype, array.size, at).reshape(array.shape)
        at += array.nbytes
    assert at == len(content)
    return made
