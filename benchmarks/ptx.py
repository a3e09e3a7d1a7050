"""What a physics step takes of an NVIDIA GPU: registers, memory of a thread, and bytes moved there a step.

No GPU is needed: ptxas (package nvidia-cuda-nvcc-cu12) reports registers, frame and spills. Bytes of arrays
are counted while the same code runs on this CPU, on states 300 random steps into MuJoCo rollouts; that is
before ptxas keeps some in registers, and without the registers it spills.

    seedbed bench ptx [--models hopper ant humanoid] [--architecture sm_90]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import time
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from seedbed import physics
from seedbed.simd.frontend.trace import trace
from seedbed.simd.gpu import ptxas
from seedbed.simd.gpu.compiler import compile_program
from seedbed.simd.gpu.host import HostKernel
from seedbed.simd.gpu.kernel import kernel_ir
from seedbed.simd.ir.program import Program
from seedbed.simd.vectorize import trace_example

RESULT = Path(__file__).parent / "results" / "ptx.json"
ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
ROWS, SETTLE = 64, 300
_ACCESS = re.compile(r"(?:%\w+ = load|store) (?:i8|i32|float).*ptr (%\w+), align (\d)$")
_ADDRESS = re.compile(r"(%\w+) = getelementptr .*ptr (%\w+), i64")
_COPY = re.compile(r"call void @llvm\.memcpy\S+\(ptr %m\d+, ptr (\S+), i64 (\d+)")


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


def counted(ir: str, counter: ctypes.c_int64) -> str:
    """Returns a kernel's IR that adds to a counter the bytes that it reads from and writes to its arrays."""
    place, root, lines, bytes_moved = ctypes.addressof(counter), set[str](), [], 0
    for number, line in enumerate(ir.splitlines()):
        address, access, copy = _ADDRESS.match(line), _ACCESS.match(line), _COPY.match(line)
        if address is not None and (address[2] in root or address[2] == "%local"):
            root.add(address[1])
        if access is not None and access[1] in root:
            bytes_moved += int(access[2])
        if copy is not None:
            bytes_moved += int(copy[2]) * (2 if copy[1] in root else 1)
        if line.startswith(("br ", "ret ")) and bytes_moved:
            pointer = f"ptr inttoptr (i64 {place} to ptr)"
            lines += [
                f"%old.{number} = load i64, {pointer}",
                f"%new.{number} = add i64 %old.{number}, {bytes_moved}",
                f"store i64 %new.{number}, {pointer}",
            ]
            bytes_moved = 0
        lines.append(line)
    return "\n".join([*lines, ""])


def measure(assembler: Path, name: str, architecture: str) -> dict[str, Any]:
    """Returns the figures of one model."""
    model, program = read(name)
    begin = time.perf_counter()
    text = compile_program(program)
    compiled = time.perf_counter()
    usage = ptxas.assemble(assembler, text, architecture)
    assembled = time.perf_counter()
    ir, counter = kernel_ir(program), ctypes.c_int64(0)
    HostKernel(program, counted(ir, counter)).run(settled(name, model), ROWS, blocks=2, threads=32)
    arrays = re.search(r"%local = alloca \[(\d+) x i8\]", ir)
    return {
        **usage._asdict(),
        "arrays": int(arrays[1]) if arrays else 0,
        "array bytes moved a step": counter.value // ROWS,
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
    assembler = ptxas.find()
    if assembler is None:
        parser.error(f"there is no ptxas: pip install {ptxas.PACKAGE}")
    result: dict[str, Any] = {"architecture": args.architecture, "models": {}}
    for name in args.models:
        figures = result["models"][name] = measure(assembler, name, args.architecture)
        print(f"{name:12s} " + ", ".join(f"{key} {value:,}" for key, value in figures.items()))
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
