"""What NVIDIA's assembler says of a kernel. Only tests and measurements need it: drivers have one."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PACKAGES = {"ptxas": "nvidia-cuda-nvcc-cu12", "nvdisasm": "nvidia-cuda-nvdisasm"}
"""The packages that contain NVIDIA's tools; ptxas knows sm_100 since 12.8."""
_PTX_LINE = re.compile(r'//## File "\.nv_debug_ptx_txt", line (\d+)')
_LABEL = re.compile(r"\s*\.L_\w+:")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?(\w+)")
_JUMPS = frozenset({"BRA", "BRX", "CALL", "EXIT", "RET"})
_SPILL = re.compile(r"\b(?:STL|LDL)([.\w]*) .*SpillRefill")
# by the end of an instruction's name
_SIZES = {"64": 8, "128": 16}


class Usage(NamedTuple):
    """What one thread of a kernel takes: registers, and bytes."""

    registers: int
    # memory of the thread: its arrays, and behind them the registers that are spilled
    frame: int
    # bytes that instructions in the text write to and read from spilled registers
    spill_stores: int
    spill_loads: int
    # bytes of constant memory
    constant: int


def find(tool: str) -> Path | None:
    """Returns the path of a tool of PACKAGES: that of a package, else that in PATH, else None."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for path in sorted(Path(folder).glob(f"*/bin/{tool}")):
            return path
    found = shutil.which(tool)
    return Path(found) if found else None


def assemble(ptxas: Path, ptx: str, architecture: str) -> Usage:
    """Assembles PTX for an architecture, such as "sm_90", and returns what it takes.

    Raises RuntimeError, with ptxas's own message, if the text is not valid.
    """
    with tempfile.TemporaryDirectory() as folder:
        said = _assemble(ptxas, ptx, ["-v", f"-arch={architecture}"], Path(folder))

    def number(pattern: str) -> int:
        found = re.search(pattern, said)
        return int(found[1]) if found else 0

    return Usage(
        registers=number(r"Used (\d+) registers"),
        frame=number(r"(\d+) bytes stack frame"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        constant=number(r"(\d+) bytes cmem\[3\]"),
    )


class Block(NamedTuple):
    """A stretch of a GPU's own instructions that run together."""

    # for each instruction, the line of PTX from which it was made; the first is 1
    lines: list[int]
    # bytes that the instructions move to and from spilled registers
    spilled: int


def blocks(ptxas: Path, nvdisasm: Path, ptx: str, architecture: str) -> list[Block]:
    """Assembles PTX and returns what became of it.

    Raises RuntimeError, with ptxas's own message, if the text is not valid.
    """
    with tempfile.TemporaryDirectory() as folder:
        _assemble(ptxas, ptx, ["-lineinfo", f"-arch={architecture}"], Path(folder))
        command = [str(nvdisasm), "-c", "-gp", f"{folder}/kernel.cubin"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found, line = [Block([], 0)], 0
    for row in text.splitlines():
        at, instruction = _PTX_LINE.search(row), _INSTRUCTION.match(row)
        if at is not None:
            line = int(at[1])
        if _LABEL.match(row):
            found.append(Block([], 0))
        if instruction is not None:
            lines, spilled = found[-1]
            spill = _SPILL.search(row)
            size = _SIZES.get((spill[1] or "").split(".")[-1], 4) if spill is not None else 0
            found[-1] = Block([*lines, line], spilled + size)
            if instruction[1] in _JUMPS:
                found.append(Block([], 0))
    return [block for block in found if block.lines]


def _assemble(ptxas: Path, ptx: str, options: Sequence[str], folder: Path) -> str:
    """Writes `kernel.cubin` into a folder, and returns what ptxas says."""
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [str(ptxas), *options, "-o", str(folder / "kernel.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas refuses the kernel ({' '.join(options)}): {done.stderr}")
    return done.stderr
