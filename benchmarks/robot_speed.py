"""How fast robots of others are simulated, against MuJoCo's rollout and mjbatch on all cores, in one run.

The scenes are those of `robots`. They begin with the first keyframe and small random velocities, and 600
steps of MuJoCo under random controls about the keyframe's, so that most robots have fallen. Then the three
take turns: in each they begin with the states that MuJoCo's rollout has reached, under the same controls.
MuJoCo runs with the faster of its solvers, until it has converged; the mean number of contacts at the end of
all sides is in the result. The scenes' sensors are off, since our steps compute none. mjbatch pins another
MuJoCo: benchmarks/peers/mjbatch_setup.sh makes its environment.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from _peers import PEERS
from _stamp import write_result
from physics import HOLD, SOLVERS, MujocoRollout, ours, state_of
from robots import PATTERNS, compiled, fetch, name_of, specified
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
SETTLE, SENSORS = 600, int(mujoco.mjtDisableBit.mjDSBL_SENSOR)


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


class Mjbatch:
    """mjbatch in a process of its own, which sleeps between its turns."""

    def __init__(self, path: Path, threads: int, folder: Path) -> None:
        scene = folder / "scene.xml"
        scene.write_text(plain(path))
        script = Path(__file__).parent / "peers" / "mjbatch_steps.py"
        command = [PEERS / "mjbatch" / "bin" / "python", script, scene, threads, HOLD]
        self._turn, words = folder / "turn.npz", [str(word) for word in command]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, text=True, stdin=pipe, stdout=pipe)

    def run(self, model: Any, states: np.ndarray, ctrl: np.ndarray) -> dict[str, float]:
        """Steps [B] states under controls [B, T, nu]; returns seconds and contacts."""
        ends = np.cumsum([1, model.nq, model.nv, model.na])
        qpos, qvel, act = np.split(states, ends, axis=1)[1:4]
        fields = {"qpos": qpos, "qvel": qvel, "act": act, "ctrl": ctrl}
        np.savez(self._turn, solver=model.opt.solver, **fields)
        print(self._turn, file=self._process.stdin, flush=True)
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"mjbatch ended with {self._process.wait()}; its words are above")
        return json.loads(answer)

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def plain(path: Path) -> str:
    """Returns a scene as text without what is only drawn, which an older MuJoCo reads, too."""
    spec = specified(path)
    spec.compile()
    spec.option.disableflags |= SENSORS
    for geom in list(spec.geoms):
        if geom.type == mujoco.mjtGeom.mjGEOM_MESH and not (geom.contype or geom.conaffinity):
            spec.delete(geom)
    for element in (*spec.geoms, *spec.sites, *spec.tendons):
        element.material = ""
    for kind in (spec.meshes, spec.textures, spec.materials):
        for element in list(kind):
            spec.delete(element)
    # MuJoCo 4 writes the input of servos, which MuJoCo 3 knows only of other actuators.
    return re.sub(' (input|material)="[^"]*"', "", spec.to_xml())


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


def measure(path: Path, name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compares one scene; the folder holds what mjbatch reads."""
    threads, model = len(os.sched_getaffinity(0)), compiled(path)
    other = Mjbatch(path, threads, folder)
    peer, robot = MujocoRollout(converged(model), threads), Robot(model, args.batch, args.amplitude)
    own = physics.load(model)
    model.opt.disableflags |= SENSORS
    model.opt.solver = SOLVERS["Newton"]
    states = robot.states(peer)
    few = slice(0, 16 * threads)
    tried, begun_in = robot.controls(20)[few], states[few]
    solver = peer.fastest(lambda: peer.run(begun_in, tried))
    run = ours(own)
    rates: dict[str, list[float]] = {"ours": [], "mujoco": [], "mjbatch": []}
    steps = args.batch * args.controls * HOLD
    begun = time.perf_counter()
    for turn in range(args.repeats + 1):
        ctrl = robot.controls(args.controls)
        given = jnp.asarray(ctrl.transpose(1, 0, 2), jnp.float32)
        start = jax.block_until_ready(state_of(model, states))
        begin = time.perf_counter()
        mine = jax.block_until_ready(run(start, given))
        between = time.perf_counter()
        if not turn:  # it is compiled in the first
            first_s = between - begun
            continue
        reached = peer.run(states, ctrl)
        rates["ours"].append(steps / (between - begin))
        rates["mujoco"].append(steps / (time.perf_counter() - between))
        theirs = other.run(model, states, ctrl)
        rates["mjbatch"].append(steps / theirs["seconds"])
        states = reached
    other.close()
    ratios, mjbatch = (
        [a / b for a, b in zip(rates["ours"], rates[side], strict=True)]
        for side in ("mujoco", "mjbatch")
    )
    counts = contacts(model, own, states, mine)
    return {
        "scene": name,
        "nv": int(model.nv),
        "ratio": statistics.median(ratios),
        "least_ratio": min(ratios),
        "mjbatch_ratio": statistics.median(mjbatch),
        "mjbatch_least_ratio": min(mjbatch),
        "steps_per_s": statistics.median(rates["ours"]),
        "mujoco_steps_per_s": statistics.median(rates["mujoco"]),
        "mjbatch_steps_per_s": statistics.median(rates["mjbatch"]),
        "mujoco_solver": solver,
        "contacts": counts[0],
        "mujoco_contacts": counts[1],
        "mjbatch_contacts": theirs["contacts"],
        "diverged": int(np.asarray(mine.diverged).sum()),
        "first_call_s": first_s,
    }


def main() -> None:
    """Measures the scenes, prints a line for each, and saves JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenes", nargs="*", default=list(SCENES))
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--controls", type=int, default=16, help="of five steps, a repetition")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--amplitude", type=float, default=0.5, help="share of the controls' range")
    home = Path.home() / ".cache" / "seedbed" / "robots"
    parser.add_argument("--packages", type=Path, default=home, help="where the wheels are unpacked")
    args = parser.parse_args()
    if not (PEERS / "mjbatch").exists():
        parser.error(f"no {PEERS / 'mjbatch'}: make it with benchmarks/peers/mjbatch_setup.sh")
    fetch(args.packages)
    rows = []
    for pattern in PATTERNS:
        for path in sorted(args.packages.glob(pattern)):
            name = name_of(path, args.packages)
            if name not in args.scenes:
                continue
            with tempfile.TemporaryDirectory() as folder:
                row = measure(path, name, args, Path(folder))
            rows.append(row)
            print(
                f"{name:52} nv {row['nv']:2}  {row['ratio']:5.1f} x MuJoCo ({row['mujoco_solver']})  "
                f"{row['mjbatch_ratio']:5.1f} x mjbatch  {row['steps_per_s'] / 1e6:.2f} M/s  contacts "
                f"{row['contacts']:.2f}, {row['mujoco_contacts']:.2f}, {row['mjbatch_contacts']:.2f}  "
                f"first call {row['first_call_s']:.0f} s",
                flush=True,
            )
    if args.scenes == list(SCENES):
        sizes = {name: getattr(args, name) for name in ("batch", "controls", "repeats")}
        content = {"cpu": cpu_name(), "mujoco": mujoco.__version__, **sizes, "rows": rows}
        write_result(RESULT, content)


if __name__ == "__main__":
    main()
