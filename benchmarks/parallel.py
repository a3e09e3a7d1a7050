"""Environment steps a second over the number of environments, and training on two devices against one.

    python benchmarks/parallel.py                 # Ant, Grasp and Humanoid, 1 to 131,072 environments
    python benchmarks/parallel.py --devices       # `seedbed train ant` on two CPU devices and on one

The first is the figure of Brax's paper (2021): whole steps of a task under random actions, with observation,
reward and resets, in one program; beside it MuJoCo's C code steps the same model as often, on all cores,
through `rollout` with the fastest of its solvers, without observation, reward and resets. Each call of it
begins in states of ours, as without resets its own would lie on the ground before long. The second gives each
device a core: one device runs on one core, two on two, with the same batch; they take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import mujoco
import numpy as np

# The folder of this script is on the path.
import physics as peers
from _stamp import stamp
from _training import run_training
from seedbed import simd
from seedbed.config import resolve
from seedbed.envs.device.mujoco import MujocoTask, TaskState
from seedbed.envs.device.wrappers import episode_statistics, training

RESULT = Path(__file__).parent / "results" / "parallel.json"
TASKS = ("ant", "grasp", "humanoid")
COUNTS = (1, 8, 64, 512, 4096, 32768, 131072)
SECONDS = 2.0
"""The least that a measurement takes."""
THEIRS = 512
"""MuJoCo's environments."""
STEPS = 8
"""MuJoCo's steps in a call: the first has no warm start, and a fall that would end ours remains short."""


def paced(call: Any, steps: int) -> float:
    """Calls for SECONDS or longer; returns steps a second."""
    begun, calls = time.perf_counter(), 0
    while (took := time.perf_counter() - begun) < SECONDS:
        call()
        calls += 1
    return calls * steps / took


def ours(env: MujocoTask, count: int) -> tuple[Any, int, list[Any]]:
    """Returns a call that steps `count` environments, how many steps it makes, and a list of their state."""
    task = episode_statistics(training(env))
    low, high = (np.asarray(x) for x in (task.spec.action.low, task.spec.action.high))
    kernel, length = simd.vectorize(task.step), max(1, 4096 // count)

    @jax.jit
    def run(state: Any, key: jax.Array) -> Any:
        def one(carry: Any, key: jax.Array) -> Any:
            action = jax.random.uniform(key, (count, len(low)), minval=low, maxval=high)
            return kernel(carry, action), None

        return jax.lax.scan(one, state, jax.random.split(key, length))[0]

    held = [simd.vectorize(task.reset)(jax.random.split(jax.random.key(0), count))]
    keys = iter(jax.random.split(jax.random.key(1), 1_000_000))

    def call() -> None:
        held[0] = jax.block_until_ready(run(held[0], next(keys)))

    # Episodes of random play are at all their moments after this, and it is compiled.
    for _ in range(max(1, 64 // length)):
        call()
    return call, count * length, held


def bodies(state: Any) -> TaskState:
    """Returns the physics' part `[B, ...]` of a state of a wrapped task."""
    (found,) = (
        x
        for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, TaskState))
        if isinstance(x, TaskState)
    )
    return found


def theirs(env: MujocoTask, states: TaskState) -> tuple[Any, int]:
    """Returns a call that steps MuJoCo's environments from such states, and how many steps that makes."""
    model = mujoco.MjModel.from_xml_path(str(env.model_path))
    threads = len(os.sched_getaffinity(0))
    peer, rng = peers.MujocoRollout(model, threads), np.random.default_rng(0)
    low, high = model.actuator_ctrlrange.T
    data, starts = mujoco.MjData(model), np.empty((THEIRS, mujoco.mj_stateSize(model, peer.spec)))
    mocap = jax.vmap(env.mocap)(states.kept)
    for i, row in enumerate(starts):
        mujoco.mj_resetData(model, data)
        data.qpos[:], data.qvel[:] = states.qpos[i], states.qvel[i]
        for name, poses in mocap.items():
            getattr(data, name)[:] = poses[i]
        mujoco.mj_getState(model, data, row, peer.spec)
    ctrl = rng.uniform(low, high, (THEIRS, STEPS, model.nu))
    held = np.repeat(ctrl, env.frame_skip, axis=1)

    def call() -> None:
        peer.rollout.rollout(peer.model, peer.data, starts, held)

    peer.fastest(call)
    return call, THEIRS * STEPS


def measure(name: str, counts: list[int], repeats: int) -> list[dict[str, Any]]:
    """Measures a task with each number of environments."""
    env: Any = resolve.train_config(name).env
    *_, usual = ours(env, THEIRS)
    rows = []
    for count in counts:
        call, steps, _ = ours(env, count)
        found: dict[str, list[float]] = {"ours": [], "mujoco": []}
        for _ in range(repeats):
            found["ours"].append(paced(call, steps))
            found["mujoco"].append(paced(*theirs(env, bodies(usual[0]))))
        row: dict[str, Any] = {"task": name, "envs": count}
        for side, rates in found.items():
            row[side] = {
                "median": statistics.median(rates),
                "least": min(rates),
                "most": max(rates),
            }
        row["ratio"] = row["ours"]["median"] / row["mujoco"]["median"]
        rows.append(row)
        print(
            f"{name:10}{count:8,} environments: {row['ours']['median']:11,.0f} steps/s, "
            f"MuJoCo C with {THEIRS}: {row['mujoco']['median']:9,.0f}, {row['ratio']:.2f} x",
            flush=True,
        )
    return rows


def devices(repeats: int, steps: int) -> dict[str, Any]:
    """Trains Ant on one device with one core and on two with two, in turn; returns rates and their ratio."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    ours_only = sorted(os.sched_getaffinity(0))
    for _ in range(repeats):
        for count, found in rates.items():
            flag = f"--xla_force_host_platform_device_count={count}"
            command = ["seedbed", "train", "ant", "--steps", str(steps), "--evaluate-every", "0"]
            command += ["--devices", *map(str, range(count))]
            os.sched_setaffinity(0, ours_only[:count])  # which children inherit
            with tempfile.TemporaryDirectory() as folder:
                environment = {**os.environ, "XLA_FLAGS": flag}
                took = run_training(command, Path(folder, "run"), environment)
            os.sched_setaffinity(0, ours_only)
            found.append(took["env_steps_per_s"])
    pairs = [two / one for one, two in zip(rates[1], rates[2], strict=True)]
    result = {"one": rates[1], "two": rates[2], "ratios": pairs, "ratio": statistics.median(pairs)}
    print(f"two devices with a core each: {result['ratio']:.2f} x one with one core {pairs}")
    return result


def main() -> None:
    """Measures and adds to the result what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", action="store_true", help="two devices against one")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1_500_000, help="of a run with --devices")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    saved = json.loads(args.out.read_text()) if args.out.exists() else {}
    part = "devices" if args.devices else "rows"
    for old in ("machine", "cores"):  # of files that were made before there were stamps
        saved.pop(old, None)
    saved |= {"stamps": saved.get("stamps", {}) | {part: stamp()}}
    if args.devices:
        saved["devices"] = devices(args.repeats, args.steps)
    else:
        saved["rows"] = [
            row for name in args.tasks for row in measure(name, args.counts, args.repeats)
        ]
    args.out.write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
