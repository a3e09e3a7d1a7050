"""What NVIDIA's assembler says of a kernel. Only tests and measurements need it: drivers have one."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

PACKAGE = "nvidia-cuda-nvcc-cu12"
"""A package that contains ptxas; since 12.8 it knows sm_100."""


class Usage(NamedTuple):
    """What one thread of a kernel takes: registers, and bytes."""

    registers: int
    # memory of the thread: its arrays, and registers that are spilled
    frame: int
    # bytes that instructions in the text write to and read from spilled registers
    spill_stores: int
    spill_loads: int
    # bytes of constant memory
    constant: int


def find() -> Path | None:
    """Returns the path of ptxas: that of a package, else that in PATH, else None."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for path in sorted(Path(folder).glob("*/bin/ptxas")):
            return path
    found = shutil.which("ptxas")
    return Path(found) if found else None


def assemble(ptxas: Path, ptx: str, architecture: str) -> Usage:
    """Assembles PTX for an architecture, such as "sm_90", and returns what it takes.

    Raises RuntimeError, with ptxas's own message, if the text is not valid.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [
            str(ptxas),
            "-v",
            f"-arch={architecture}",
            "-o",
            f"{folder}/kernel.cubin",
            str(source),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas refuses the kernel for {architecture}: {done.stderr}")

    def number(pattern: str) -> int:
        found = re.search(pattern, done.stderr)
        return int(found[1]) if found else 0

    return Usage(
        registers=number(r"Used (\d+) registers"),
        frame=number(r"(\d+) bytes stack frame"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        constant=number(r"(\d+) bytes cmem\[3\]"),
    )
