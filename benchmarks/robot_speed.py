"""How fast robots of others are simulated, against MuJoCo's rollout on all cores, in one run.

The scenes are those of `robots`. Both sides begin with the same states: the first keyframe with small random
velocities, after 600 steps of MuJoCo under random controls about the keyframe's, so that most robots have
fallen. Then they take turns. MuJoCo runs with the faster of its solvers, until it has converged; the mean
number of contacts of both sides is in the result.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from physics import HOLD, SOLVERS, MujocoRollout, ours, state_of
from robots import PATTERNS, compiled, fetch, name_of
from seedbed import physics, simd
from seedbed.machine import cpu_name

RESULT = Path(__file__).parent / "results" / "robot_speed.json"
SCENES = (
    "go1/scene_mjx_feetonly_flat_terrain",
    "spot/scene_mjx_feetonly_flat_terrain",
    "h1/scene_mjx_feetonly",
    "op3/scene_mjx_feetonly",
    "berkeley_humanoid/scene_mjx_feetonly_flat_terrain",
    "t1/scene_mjx_feetonly_flat_terrain",
    "g1/scene_mjx_feetonly_flat_terrain",
    "apollo/scene_mjx_feetonly_flat_terrain",
    "leap_hand/scene_mjx_cube",
)
SETTLE = 600


def converged(model: Any) -> Any:
    """Gives a model MuJoCo's own limits of the solver, which Playground's scenes lower."""
    model.opt.iterations, model.opt.tolerance = 100, 1e-8
    model.opt.ls_iterations, model.opt.ls_tolerance = 50, 0.01
    return model


class Robot:
    """A scene: its states at the start, and controls."""

    def __init__(self, model: Any, batch: int, amplitude: float) -> None:
        self.model, self._rng, self._batch = model, np.random.default_rng(0), batch
        data = mujoco.MjData(model)
        if model.nkey:
            mujoco.mj_resetDataKeyframe(model, data, 0)
        self._middle, self._start = data.ctrl.copy(), data
        limited = model.actuator_ctrllimited.astype(bool)[:, None]
        low, high = np.where(limited, model.actuator_ctrlrange, [[-1, 1]]).T
        self._ways = amplitude * (low - self._middle), amplitude * (high - self._middle)

    def controls(self, count: int) -> np.ndarray:
        """Draws controls [B, T, nu] about the keyframe's."""
        shape = self._batch, count, self.model.nu
        return self._middle + self._rng.uniform(*self._ways, shape)

    def states(self, peer: MujocoRollout) -> np.ndarray:
        """Returns states [B, ...] after the first steps."""
        size = mujoco.mj_stateSize(self.model, peer.spec)
        states = np.empty((self._batch, size))
        for row in states:
            self._start.qvel[:] = 0.1 * self._rng.normal(size=self.model.nv)
            mujoco.mj_getState(self.model, self._start, row, peer.spec)
        return peer.run(states, self.controls(SETTLE // HOLD))


def contacts(
    model: Any, own: physics.Model, states: np.ndarray, mine: physics.State
) -> list[float]:
    """Returns the mean number of contacts of our states, and of MuJoCo's."""
    count = simd.vectorize(lambda s: physics.step_data(own, s, jnp.zeros(model.nu)).ncon)
    data, found = mujoco.MjData(model), []
    for row in states:
        mujoco.mj_setState(model, data, row, mujoco.mjtState.mjSTATE_FULLPHYSICS)
        mujoco.mj_fwdPosition(model, data)
        found.append(data.ncon)
    return [float(np.mean(jax.jit(count)(mine))), float(np.mean(found))]


def measure(model: Any, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Compares one scene."""
    threads = len(os.sched_getaffinity(0))
    peer, robot = MujocoRollout(converged(model), threads), Robot(model, args.batch, args.amplitude)
    own = physics.load(model)
    model.opt.solver = SOLVERS["Newton"]
    states = robot.states(peer)
    few = slice(0, 16 * threads)
    solver = peer.fastest(states[few], robot.controls(20)[few])
    run, mine = ours(own), state_of(model, states)
    rates: dict[str, list[float]] = {"ours": [], "mujoco": []}
    steps = args.batch * args.controls * HOLD
    begun = time.perf_counter()
    for turn in range(args.repeats + 1):
        ctrl = robot.controls(args.controls)
        given = jnp.asarray(ctrl.transpose(1, 0, 2), jnp.float32)
        begin = time.perf_counter()
        mine = jax.block_until_ready(run(mine, given))
        between = time.perf_counter()
        if not turn:  # it is compiled in the first
            first_s = between - begun
            continue
        states = peer.run(states, ctrl)
        rates["ours"].append(steps / (between - begin))
        rates["mujoco"].append(steps / (time.perf_counter() - between))
    ratios = [a / b for a, b in zip(rates["ours"], rates["mujoco"], strict=True)]
    counts = contacts(model, own, states, mine)
    return {
        "scene": name,
        "nv": int(model.nv),
        "ratio": statistics.median(ratios),
        "least_ratio": min(ratios),
        "steps_per_s": statistics.median(rates["ours"]),
        "mujoco_steps_per_s": statistics.median(rates["mujoco"]),
        "mujoco_solver": solver,
        "contacts": counts[0],
        "mujoco_contacts": counts[1],
        "diverged": int(np.asarray(mine.diverged).sum()),
        "first_call_s": first_s,
    }


def main() -> None:
    """Measures the scenes, prints a line for each, and saves JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenes", nargs="*", default=list(SCENES))
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--controls", type=int, default=4, help="of five steps, a repetition")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--amplitude", type=float, default=0.5, help="share of the controls' range")
    home = Path.home() / ".cache" / "seedbed" / "robots"
    parser.add_argument("--packages", type=Path, default=home, help="where the wheels are unpacked")
    args = parser.parse_args()
    fetch(args.packages)
    rows = []
    for pattern in PATTERNS:
        for path in sorted(args.packages.glob(pattern)):
            name = name_of(path, args.packages)
            if name not in args.scenes:
                continue
            row = measure(compiled(path), name, args)
            rows.append(row)
            print(
                f"{name:52} nv {row['nv']:2}  {row['ratio']:5.1f} x MuJoCo ({row['mujoco_solver']})  "
                f"{row['steps_per_s'] / 1e6:.2f} M/s  contacts {row['contacts']:.2f} and "
                f"{row['mujoco_contacts']:.2f}  first call {row['first_call_s']:.0f} s",
                flush=True,
            )
    if args.scenes == list(SCENES):
        content = {"cpu": cpu_name(), "mujoco": mujoco.__version__, "rows": rows}
        RESULT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
