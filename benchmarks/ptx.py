"""What a physics step takes of an NVIDIA GPU: registers, memory of a thread, and bytes moved there a step.

No GPU is needed: ptxas (package nvidia-cuda-nvcc-cu12) reports registers, frame and spills, which are part of
the frame. The same code runs on this CPU, on states 300 random steps into MuJoCo rollouts, and counts how
often each block of it runs. The bytes of arrays are those that a block's LLVM IR moves, before ptxas keeps
some in registers. The bytes of spills are those that the GPU's own instructions move (nvdisasm, package
nvidia-cuda-nvdisasm), as often as the block runs from which ptxas made most of the instructions around them.

    seedbed bench ptx [--models hopper ant humanoid] [--architecture sm_90]
"""

from __future__ import annotations

import argparse
import ctypes
import re
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np

import _ptxas as ptxas
from _ptx_host import HostKernel
from _stamp import write_result
from seedbed import physics
from seedbed.simd.frontend.trace import trace
from seedbed.simd.gpu.compiler import compile_program
from seedbed.simd.gpu.kernel import kernel_ir
from seedbed.simd.ir.program import Program
from seedbed.simd.vectorize import trace_example

RESULT = Path(__file__).parent / "results" / "ptx.json"
ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
ROWS, SETTLE = 64, 300
_ACCESS = re.compile(r"(?:%\w+ = load|store) (?:i8|i32|float).*ptr (%\w+), align (\d)$")
_ADDRESS = re.compile(r"(%\w+) = getelementptr .*ptr (%\w+), i64")
_LABEL, _TARGET = re.compile(r"(\w+):$"), re.compile(r"label %(\w+)")
_PTX_LABEL = re.compile(r"(?:\$\w+|// %bb\.\d+):\s+// %(\S+)")
_COPY = re.compile(r"call void @llvm\.memcpy\S+\(ptr %m\d+, ptr (\S+), i64 (\d+)")


class Tools(NamedTuple):
    """NVIDIA's tools."""

    ptxas: Path
    nvdisasm: Path


def read(name: str) -> tuple[physics.Model, Program]:
    """Loads a model and makes the program of one step of it, which returns the state."""
    model = physics.load(ASSETS / f"{name}.xml")

    def step(state: physics.State, ctrl: jax.Array) -> physics.State:
        after = physics.step(model, state, ctrl)
        return physics.State(*(getattr(after, field) for field in physics.State._fields))

    one = physics.init(model), jnp.zeros(model.nu, jnp.float32)
    closed = trace_example(step, "step", (one, {})).closed
    return model, trace(closed, [False] * len(closed.in_avals))


def settled(name: str, model: physics.Model) -> list[np.ndarray]:
    """Returns the operands of ROWS steps: states along MuJoCo rollouts of random controls."""
    compiled, rng = (
        mujoco.MjModel.from_xml_path(str(ASSETS / f"{name}.xml")),
        np.random.default_rng(0),
    )
    data, rows = mujoco.MjData(compiled), []
    blank = physics.init(model)
    for _ in range(ROWS):
        mujoco.mj_resetData(compiled, data)
        for _ in range(SETTLE):
            data.ctrl[:] = rng.uniform(-1, 1, compiled.nu)
            mujoco.mj_step(compiled, data)
        state = blank._replace(
            qpos=data.qpos.copy(), qvel=data.qvel.copy(), qacc_warmstart=data.qacc_warmstart.copy()
        )
        rows.append(jax.tree.leaves((state, data.ctrl.copy())))
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(blank)] + [jnp.float32]
    return [
        np.stack(leaf).astype(d) for leaf, d in zip(zip(*rows, strict=True), dtypes, strict=True)
    ]


class Counted(NamedTuple):
    """A kernel's IR that counts how often its blocks run."""

    ir: str
    # for each block, the bytes of arrays that it reads and writes each time
    moved: dict[str, int]
    # how often each block has run, in the same order
    counters: ctypes.Array[ctypes.c_int64]


def counted(ir: str) -> Counted:
    """Returns a kernel's IR that counts how often its blocks run."""
    begin = ir.index("define ptx_kernel")
    end = ir.index("\n}\n", begin)
    names = re.findall(r"^(\w+):", ir[begin:end], re.M)
    counters = (ctypes.c_int64 * len(names))()
    root, lines, moved, block = set[str](), [], dict.fromkeys(names, 0), ""
    for line in ir[begin:end].splitlines():
        label, address = _LABEL.match(line), _ADDRESS.match(line)
        access, copy = _ACCESS.match(line), _COPY.match(line)
        if label is not None:
            block = label[1]
        if address is not None and (address[2] in root or address[2] == "%local"):
            root.add(address[1])
        if access is not None and access[1] in root:
            moved[block] += int(access[2])
        if copy is not None:
            moved[block] += int(copy[2]) * (2 if copy[1] in root else 1)
        if line.lstrip().startswith(("br ", "ret ")):
            place = ctypes.addressof(counters) + 8 * names.index(block)
            lines += [
                f"%old.{block} = load i64, ptr inttoptr (i64 {place} to ptr)",
                f"%new.{block} = add i64 %old.{block}, 1",
                f"store i64 %new.{block}, ptr inttoptr (i64 {place} to ptr)",
            ]
        lines.append(line)
    return Counted(ir[:begin] + "\n".join(lines) + ir[end:], moved, counters)


def entered_from(ir: str) -> dict[str, str]:
    """Returns, for each block that another jumps to, the first of these, or what enters that one's loop."""
    block, first, loops = "", dict[str, str](), set[str]()
    for line in ir.splitlines():
        label = _LABEL.match(line)
        if label is not None:
            block = label[1]
        for target in _TARGET.findall(line):
            if target in first and block != first[target]:
                loops.add(target)
            first.setdefault(target, block)
    return {t: first[b] if b in loops and b in first else b for t, b in first.items()}


def runs_of_lines(ptx: str, runs: dict[str, int], entered: dict[str, str]) -> list[int]:
    """Returns how often each line of PTX runs: as often as the block of IR whose name LLVM left there.

    What LLVM puts before a loop, such as `loop4.preheader`, runs as often as the block that enters the loop.
    """
    lines, now = [], 0
    for line in ptx.splitlines():
        label = _PTX_LABEL.match(line)
        if label is not None:
            name, _, added = label[1].partition(".")
            now = runs[entered[name] if added else name]
        lines.append(now)
    return lines


def measure(tools: Tools, name: str, architecture: str) -> dict[str, Any]:
    """Returns the figures of one model."""
    model, program = read(name)
    begin = time.perf_counter()
    text = compile_program(program)
    compiled = time.perf_counter()
    usage = ptxas.assemble(tools.ptxas, text, architecture)
    assembled = time.perf_counter()
    ir = kernel_ir(program)
    count = counted(ir)
    HostKernel(program, count.ir).run(settled(name, model), ROWS, blocks=2, threads=32)
    runs = dict(zip(count.moved, count.counters, strict=True))
    of_arrays = sum(runs[block] * size for block, size in count.moved.items())
    lines = runs_of_lines(text, runs, entered_from(ir))
    # ptxas moves some instructions into other blocks, and most into none.
    of_spills = sum(
        block.spilled * statistics.median_low([lines[line - 1] for line in block.lines])
        for block in ptxas.blocks(tools.ptxas, tools.nvdisasm, text, architecture)
    )
    arrays = re.search(r"%local = alloca \[(\d+) x i8\]", ir)
    return {
        **usage._asdict(),
        "arrays": int(arrays[1]) if arrays else 0,
        "array bytes moved a step": of_arrays // ROWS,
        "spill bytes moved a step": of_spills // ROWS,
        "PTX bytes": len(text),
        "seconds to PTX": round(compiled - begin, 1),
        "seconds of ptxas": round(assembled - compiled, 1),
    }


def main() -> None:
    """Prints the figures of each model, and saves them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["hopper", "ant", "humanoid"])
    parser.add_argument("--architecture", default="sm_90")
    args = parser.parse_args()
    found = {tool: ptxas.find(tool) for tool in Tools._fields}
    for tool, path in found.items():
        if path is None:
            parser.error(f"there is no {tool}: pip install {ptxas.PACKAGES[tool]}")
    tools = Tools(**found)
    result: dict[str, Any] = {"architecture": args.architecture, "models": {}}
    for name in args.models:
        figures = result["models"][name] = measure(tools, name, args.architecture)
        print(f"{name:12s} " + ", ".join(f"{key} {value:,}" for key, value in figures.items()))
    write_result(RESULT, result)


if __name__ == "__main__":
    main()
