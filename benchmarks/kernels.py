"""Times the kernels of convolutions and dense layers in bfloat16, each alone, against float32 on one core.

Float32 is our kernels for convolutions and XLA's product for dense layers. Both sides take turns; the least
CPU time of a kernel counts. What packs weights is part of a kernel's time.

    python benchmarks/kernels.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from _stamp import write_result
from seedbed.machine import cpu_name
from seedbed.nets.convolution import conv2d
from seedbed.nets.native.bfloat16.instructions import LABELS, host_instructions
from seedbed.nets.products import multiply

RESULT = Path(__file__).parent / "results" / "kernels.json"
IMAGES = 64
# image, kernel size, features, stride, padding, relu
CONVOLUTIONS = {
    "nature 1": ((84, 84, 4), 8, 32, 4, 0, True),
    "nature 2": ((20, 20, 32), 4, 64, 2, 0, True),
    "nature 3": ((9, 9, 64), 3, 64, 1, 0, True),
    "resnet 1": ((84, 84, 4), 3, 16, 1, 1, False),
    "resnet 16": ((42, 42, 16), 3, 16, 1, 1, True),
    "resnet 16 to 32": ((42, 42, 16), 3, 32, 1, 1, False),
    "resnet 32": ((21, 21, 32), 3, 32, 1, 1, True),
}
# rows, inputs, outputs
DENSE = (
    (640, 3136, 512),
    (32, 3136, 512),
    (8, 3136, 512),
    (2048, 256, 256),
    (256, 256, 256),
    (8192, 128, 128),
    (8192, 27, 128),
    (64, 512, 2048),
)
Program = tuple[Any, tuple[Any, ...]]


def least_seconds(programs: dict[str, Program], rounds: int) -> dict[str, float]:
    """Returns the least CPU time of a call of each program; they take turns."""
    for run, arguments in programs.values():
        jax.block_until_ready(run(*arguments))
    best = dict.fromkeys(programs, float("inf"))
    for _ in range(rounds):
        for name, (run, arguments) in programs.items():
            start = time.process_time()
            jax.block_until_ready(run(*arguments))
            best[name] = min(best[name], time.process_time() - start)
    return best


def passes(function: Any, inputs: tuple[Any, ...], names: tuple[str, ...]) -> dict[str, Program]:
    """Returns programs for a function's value and for its pull-back to each named input alone."""
    y = function(*inputs)
    dy = jnp.asarray(np.random.default_rng(0).normal(size=y.shape), y.dtype)
    programs: dict[str, Program] = {"forward": (jax.jit(function), inputs)}
    for i, name in enumerate(names):
        if not name:
            continue

        def one(value: Any, i: int = i) -> Any:
            return function(*inputs[:i], value, *inputs[i + 1 :])

        pull = jax.vjp(one, inputs[i])[1]
        programs[name] = (jax.jit(lambda pull, dy: pull(dy)[0]), (pull, dy))
    return programs


def convolution(name: str) -> tuple[float, dict[str, dict[str, Program]]]:
    """Returns a layer's operations of one pass, and its programs by dtype."""
    shape, size, features, stride, padding, relu = CONVOLUTIONS[name]
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 9, (IMAGES, *shape))
    kernel = jnp.asarray(rng.normal(size=(size, size, shape[2], features)), jnp.float32)
    bias, entry = jnp.zeros(features), shape[2] == 4
    found, operations = {}, 0.0
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jnp.asarray(pixels, jnp.uint8 if entry else dtype)
        run = functools.partial(
            conv2d,
            bias=bias,
            stride=stride,
            padding=padding,
            activation="relu" if relu else None,
            dtype=dtype,
        )
        operations = 2.0 * run(x, kernel).size * kernel[..., 0].size
        names = ("" if entry else "input gradient", "weight gradient")
        found[jnp.dtype(dtype).name] = passes(run, (x, kernel), names)
    return operations, found


def dense(rows: int, inputs: int, outputs: int) -> tuple[float, dict[str, dict[str, Program]]]:
    """Returns a layer's operations of one pass, and its programs by dtype."""
    rng = np.random.default_rng(0)
    x, kernel = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((rows, inputs), (inputs, outputs))
    )
    names = ("input gradient", "weight gradient")
    found = {
        "float32": passes(lax.dot, (x, kernel), names),
        "bfloat16": passes(functools.partial(multiply, dtype=jnp.bfloat16), (x, kernel), names),
    }
    return 2.0 * rows * inputs * outputs, found


def main() -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="calls of each kernel, turn about")
    args = parser.parse_args()
    unit = host_instructions()
    if unit is None:
        parser.error("this CPU is no faster with bfloat16, so it has no kernels for it")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    layers = {name: functools.partial(convolution, name) for name in CONVOLUTIONS}
    layers |= {" x ".join(map(str, shape)): functools.partial(dense, *shape) for shape in DENSE}
    result: dict[str, Any] = {"cpu": cpu_name(), "instructions": LABELS[unit], "GFLOP/s": {}}
    for name, make in layers.items():
        operations, found = make()
        row = {}
        for part in found["float32"]:
            best = least_seconds({d: programs[part] for d, programs in found.items()}, args.rounds)
            row[part] = {dtype: operations / spent / 1e9 for dtype, spent in best.items()}
        result["GFLOP/s"][name] = row
        told = (
            f"{part} {rate['float32']:5.0f} {rate['bfloat16']:5.0f} "
            f"({rate['bfloat16'] / rate['float32']:4.2f})"
            for part, rate in row.items()
        )
        print(f"{name:18s} GFLOP/s, float32 and bfloat16: {'   '.join(told)}", flush=True)
    write_result(RESULT, result)


if __name__ == "__main__":
    main()
