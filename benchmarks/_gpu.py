"""The parts of gpu.py that need JAX, each in a process of its own: a fault on a GPU ends its process.

    python _gpu.py PART [NAME ...]

Prints a JSON object for each figure as it comes. The functions take the device, so tests run them on a CPU.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import _ptxas as ptxas
import ptx
from central import cpu_name
from seedbed import physics, simd
from seedbed.config import resolve, scaling
from seedbed.envs.device.wrappers import auto_reset, episode_statistics, time_limit
from seedbed.envs.host import registry
from seedbed.fused.program import Program
from seedbed.machine import usable_cores

Figures = Iterator[dict[str, Any]]
ROWS = 61  # no whole number of warps
EPISODE, STEPS = 5, 13  # steps of an episode, and of all in parity's environments
SIZES = tuple(1 << i for i in range(10, 18))
STEPPED, PLAYED = 20, 4  # steps of a model, and of a task, in a call
TURNS, TURN_S = 5, 0.1  # turns of so many seconds, of one call at least
COPIED = 1 << 27  # floats
ITERATIONS, SHOWN = 3, 12  # of training in the profile, and operations that it lists


def describe(device: Any) -> dict[str, Any]:
    """Returns what is known of a device and of the software that drives it."""
    versions = {d.name: d.version for d in distributions() if d.name.startswith(("jax", "nvidia-"))}
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "capability": str(getattr(device, "compute_capability", "")),
        "devices": len(jax.local_devices()),
        "memory": (device.memory_stats() or {}).get("bytes_limit"),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "versions": dict(sorted(versions.items())),
        "driver": driver(),
    }


def driver() -> dict[str, str]:
    """Asks nvidia-smi about the first GPU."""
    asked = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.memory"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"absent": f"nvidia-smi: {error}"}
    rows = [row.strip() for row in done.stdout.splitlines() if row.strip()]
    if done.returncode or not rows:
        return {"absent": f"nvidia-smi: {done.stderr.strip() or done.stdout.strip()}"}
    return dict(zip(asked.split(","), map(str.strip, rows[0].split(",")), strict=False))


def bandwidth(device: Any, count: int) -> float:
    """Returns the bytes a second of a program that reads `count` floats and writes as many."""
    x = jax.device_put(np.zeros(count, np.float32), device)
    add = jax.jit(lambda x: x + 1)
    return 8 * count * rate(lambda: add(x), 1)


def rate(call: Callable[[], Any], count: int) -> float:
    """Returns how many things a second a call makes that makes `count`: the median of some turns."""
    jax.block_until_ready(call())
    begun, calls = time.perf_counter(), 0
    while time.perf_counter() - begun < TURN_S:
        jax.block_until_ready(call())
        calls += 1
    calls, rates = max(1, calls), []
    for _ in range(TURNS):
        begun = time.perf_counter()
        last = None
        # Calls follow one another on the device, which waits for no host between them.
        for _ in range(calls):
            last = call()
        jax.block_until_ready(last)
        rates.append(calls * count / (time.perf_counter() - begun))
    return statistics.median(rates)


# Parity


def on(device: Any, fn: Callable[..., Any], *args: Any) -> Any:
    """Runs a batched function on a device; its results stay there."""
    return jax.jit(fn)(*jax.device_put(args, device))


def plain(leaf: Any) -> np.ndarray:
    """Returns a leaf as numpy, the data of keys."""
    key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if key else leaf)


def first_difference(got: Any, want: Any) -> str | None:
    """Names the first leaf in which two trees of equal shapes differ in a bit, and how; None if none does.

    Any NaN equals any other.
    """
    leaves = jax.tree_util.tree_leaves_with_path(want)
    for (path, b), a in zip(leaves, map(plain, jax.tree.leaves(got)), strict=True):
        b = plain(b)
        other = a != b
        if a.dtype == np.float32:
            other = (a.view(np.int32) != b.view(np.int32)) & ~(np.isnan(a) & np.isnan(b))
        if other.any():
            where = tuple(int(i) for i in np.argwhere(other)[0])
            return (
                f"{jax.tree_util.keystr(path)}{list(where)} is {a[where]!r} and not {b[where]!r}; "
                f"{other.sum()} of {other.size} numbers differ"
            )
    return None


def parity(device: Any, task: str) -> Figures:
    """Compares a step of a task's model, and steps of the task with resets, with the CPU's: bit for bit."""
    (cpu,) = jax.local_devices(backend="cpu")[:1]
    env: Any = registry.resolve(task)
    name = env.model_path.stem
    model = physics.load(env.model_path)
    structure = jax.tree.structure((physics.init(model), np.zeros(0)))
    state, ctrl = structure.unflatten(x[:ROWS] for x in ptx.settled(name, model))
    step = simd.vectorize(lambda state, ctrl: physics.step(model, state, ctrl))
    found = first_difference(on(device, step, state, ctrl), on(cpu, step, state, ctrl))
    yield {f"{name}, a step": found or "the same bits"}
    yield {task: environment_difference(device, cpu, env) or "the same bits"}


def environment_difference(device: Any, cpu: Any, env: Any) -> str | None:
    """Compares whole steps of an environment with short episodes, each from the CPU's state before."""
    reset, step = kernels(env, EPISODE)
    keys, rng = jax.random.split(jax.random.key(7), ROWS), np.random.default_rng(0)
    state = on(cpu, reset, keys)
    if difference := first_difference(on(device, reset, keys), state):
        return f"reset: {difference}"
    again = 0
    for number in range(STEPS):
        drawn = drawn_actions(env, rng, (ROWS,))
        before, state = state, on(cpu, step, state, drawn)
        if difference := first_difference(on(device, step, before, drawn), state):
            return f"step {number}: {difference}"
        again += int(np.sum(state.timestep.first))
    assert again, "no episode has begun anew"
    return None


def kernels(env: Any, episode: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns reset and step, [B, ...], of an environment that resets itself after so many steps at most."""
    whole = auto_reset(time_limit(episode_statistics(env), episode))
    return simd.vectorize(whole.reset), simd.vectorize(whole.step)


def drawn_actions(env: Any, rng: np.random.Generator, rows: tuple[int, ...]) -> np.ndarray:
    """Draws actions within their bounds, at most 1."""
    low, high = (np.clip(bound, -1, 1) for bound in (env.spec.action.low, env.spec.action.high))
    return rng.uniform(low, high, (*rows, *env.spec.action.shape)).astype(np.float32)


# Rates


def rates(device: Any, name: str, sizes: tuple[int, ...]) -> Figures:
    """Measures steps of a model, which return its state, from settled states, under changing controls."""
    model = physics.load(ptx.ASSETS / f"{name}.xml")
    structure = jax.tree.structure((physics.init(model), np.zeros(0)))
    settled = structure.unflatten(ptx.settled(name, model))
    kernel = simd.vectorize(lambda state, ctrl: physics.step(model, state, ctrl))

    @jax.jit
    def run(state: physics.State, ctrl: jax.Array) -> physics.State:
        return jax.lax.scan(lambda s, c: (kernel(s, c), None), state, ctrl)[0]

    rng = np.random.default_rng(0)
    for size in sizes:
        rows = np.arange(size) % ptx.ROWS
        state, _ = jax.tree.map(lambda x, rows=rows: x[rows], settled)
        ctrl = rng.uniform(-1, 1, (STEPPED, size, model.nu)).astype(np.float32)
        now, given = jax.device_put((state, ctrl), device)

        def advance(given: jax.Array = given) -> Any:
            nonlocal now
            now = run(now, given)
            return now.qpos

        yield {str(size): rate(advance, STEPPED * size)}


def environment_rates(device: Any, task: str, sizes: tuple[int, ...]) -> Figures:
    """Measures steps of an environment that resets itself, with its observations and rewards."""
    env: Any = registry.resolve(task)
    reset, kernel = kernels(env, env.episode_steps)
    rng = np.random.default_rng(0)

    @jax.jit
    def run(state: Any, actions: jax.Array) -> Any:
        return jax.lax.scan(lambda s, a: (kernel(s, a), None), state, actions)[0]

    for size in sizes:
        given = jax.device_put(drawn_actions(env, rng, (PLAYED, size)), device)
        now = on(device, reset, jax.random.split(jax.random.key(0), size))

        def advance(given: jax.Array = given) -> Any:
            nonlocal now
            now = run(now, given)
            return now.timestep.reward

        yield {str(size): rate(advance, PLAYED * size)}


def memory(name: str, architecture: str) -> dict[str, Any]:
    """Returns what a step takes of a thread, and the bytes that it moves there and to and from its row."""
    ptxas_path, nvdisasm = (ptxas.find(tool) for tool in ptx.Tools._fields)
    assert ptxas_path is not None and nvdisasm is not None, "who asks has looked for them"
    figures = ptx.measure(ptx.Tools(ptxas_path, nvdisasm), name, architecture)
    _, program = ptx.read(name)
    operands = (*program.inputs, *program.outputs)
    row = sum(each.nodes.size * np.dtype(each.dtype).itemsize for each in operands)
    return {**figures, "bytes of operands and results": row}


def lower(preset: str) -> dict[str, Any]:
    """Compiles the kernels of a preset's training and of its task for GPUs: they stay on disk."""
    config: Any = resolve.train_config(preset)
    program = Program(config.env, config.agent, config.runtime)
    begun = time.perf_counter()
    carry = jax.eval_shape(program.first)
    env: Any = config.env
    reset, step = kernels(env, env.episode_steps)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), ROWS))
    actions = drawn_actions(env, np.random.default_rng(0), (ROWS,))
    for traced in (
        program.traced(carry),
        jax.jit(program.first).trace(),
        jax.jit(reset).trace(keys),
        jax.jit(step).trace(jax.eval_shape(reset, keys), actions),
    ):
        traced.lower(lowering_platforms=("cuda",))
    return {f"{preset}, seconds to its kernels": round(time.perf_counter() - begun, 1)}


# A profile


def profile(preset: str, **options: int) -> Figures:
    """Yields the operations that take most time in iterations of training; `options` are of the agent."""
    config: Any = scaling.for_this_device(resolve.train_config(preset))
    program = Program(config.env, dataclasses.replace(config.agent, **options), config.runtime)
    carry = program.place(program.first())
    program.compile(carry)
    carry, _ = program.run(carry, [0])
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            begun = time.perf_counter()
            for _ in range(ITERATIONS):
                carry, report = program.run(carry, [0])
            seconds = time.perf_counter() - begun
        (path,) = Path(folder).rglob("*.xplane.pb")
        tables = operations(jax.profiler.ProfileData.from_file(str(path)))
    steps = int(report.transitions) * ITERATIONS
    yield {"env_steps_per_s": steps / seconds, "ms an iteration": 1e3 * seconds / ITERATIONS}
    yield {"ms of operations": tables}


def operations(data: Any) -> dict[str, dict[str, float]]:
    """Sums the milliseconds of each operation, line by line: a GPU's, or else those of the host's threads."""
    planes = list(data.planes)
    ours = [plane for plane in planes if plane.name.startswith("/device:")]
    tables: dict[str, dict[str, float]] = {}
    for plane in ours or planes:
        for line in plane.lines:
            if line.name == "python":
                continue
            sums: dict[str, float] = {}
            for event in line.events:
                sums[event.name] = sums.get(event.name, 0.0) + 1e-6 * event.duration_ns
            most = sorted(sums.items(), key=lambda pair: -pair[1])[:SHOWN]
            tables[f"{plane.name} {line.name}"] = {key: round(ms, 3) for key, ms in most if ms}
    return {name: table for name, table in tables.items() if table}


def main() -> None:
    """Runs a part on the first device, and prints its figures."""
    part, *names = sys.argv[1:]

    def told() -> Figures:
        if part in ("memory", "lower"):
            yield memory(*names) if part == "memory" else lower(*names)
            return
        device = jax.local_devices()[0]
        if part == "device":
            yield describe(device)
        elif part == "bandwidth":
            yield {"bytes_per_s": bandwidth(device, COPIED)}
        elif part == "parity":
            yield from parity(device, *names)
        elif part == "rates":
            yield from rates(device, *names, SIZES)  # pyright: ignore[reportCallIssue]
        elif part == "environment":
            yield from environment_rates(device, *names, SIZES[2::2])  # pyright: ignore[reportCallIssue]
        elif part == "profile":
            yield from profile(*names)

    for figures in told():
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
