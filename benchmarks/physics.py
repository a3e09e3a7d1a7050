"""Physics steps per second against MuJoCo's C code on the same cores, from the same settled states.

MuJoCo runs through a persistent `rollout.Rollout` with a thread a core, with the fastest of its solvers for
the model; ours through `simd.vectorize` inside `jax.jit`. Both begin 1,500 substeps into random control and
hold a control for five substeps. They take turns, each from the states that MuJoCo reached in its turn before
and under the same controls; ours, which is done sooner, makes its turn several times. Afterwards both step
once from the states that ours ended in, and the velocities must agree. Cold compilation is timed in a process
of its own.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from mujoco import rollout

from _stamp import stamp
from seedbed import physics, simd
from seedbed.machine import cpu_name
from seedbed.physics.mjcf import from_mujoco

RESULT = Path(__file__).parent / "results" / "physics.json"
ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
MODELS = (
    "ant",
    "half_cheetah",
    "hopper",
    "walker2d_v5",
    "swimmer",
    "reacher",
    "inverted_pendulum",
    "inverted_double_pendulum",
    "pusher_v5",
    "humanoid",
    "humanoidstandup",
)
SOLVERS = {"PGS": 0, "CG": 1, "Newton": 2}
HOLD, SETTLE, AGAIN, TRIES = 5, 1500, 8, 5
MOST_DIVERGED = 0.01  # of the environments in a turn: ours stand still then, MuJoCo's begin again
TOLERANCE = 1e-3  # of the velocity change, on the last lanes


def read(name: str, integrator: str) -> Any:
    """Compiles a model; `integrator` is euler or rk4."""
    model = mujoco.MjModel.from_xml_path(str(ASSETS / f"{name}.xml"))
    model.opt.integrator = {"euler": 0, "rk4": 1}[integrator]
    return model


class MujocoRollout:
    """MuJoCo's C code on a thread a core."""

    def __init__(self, model: Any, threads: int) -> None:
        self.model, self.rollout = model, rollout.Rollout(nthread=threads)
        self.data = [mujoco.MjData(model) for _ in range(threads)]
        self.spec = mujoco.mjtState.mjSTATE_FULLPHYSICS
        self._out: tuple[np.ndarray, ...] = (np.empty((0, 0, 0)),)

    def start(self, batch: int, seed: int) -> np.ndarray:
        """Returns states at rest, a little off their default."""
        rng, data = np.random.default_rng(seed), mujoco.MjData(self.model)
        states = np.empty((batch, mujoco.mj_stateSize(self.model, self.spec)))
        for row in states:
            mujoco.mj_resetData(self.model, data)
            data.qvel[:] = 0.1 * rng.normal(size=self.model.nv)
            mujoco.mj_getState(self.model, data, row, self.spec)
        return states

    def run(self, states: np.ndarray, ctrl: np.ndarray) -> np.ndarray:
        """Steps [B] states under controls [B, T, nu], each held; returns the last states."""
        held = np.repeat(ctrl, HOLD, axis=1)
        if self._out[0].shape[:2] != held.shape[:2]:  # once, as a program that goes on would
            sizes = states.shape[1], self.model.nsensordata
            self._out = tuple(np.empty((*held.shape[:2], size)) for size in sizes)
        state, sensordata = self._out
        self.rollout.rollout(
            self.model, self.data, states, held, state=state, sensordata=sensordata
        )
        return state[:, -1].copy()

    def fastest(self, call: Callable[[], Any]) -> str:
        """Chooses the solver by the best of several calls: a disturbed one would choose a slow solver."""
        call()  # its threads have begun
        times = dict.fromkeys(SOLVERS, math.inf)
        for _ in range(TRIES):
            for name, number in SOLVERS.items():
                self.model.opt.solver = number
                begin = time.perf_counter()
                call()
                times[name] = min(times[name], time.perf_counter() - begin)
        best = min(times, key=lambda name: times[name])
        self.model.opt.solver = SOLVERS[best]
        return best


def ours(model: physics.Model) -> Any:
    """Returns the jitted function of (state, controls [T, B, nu]) to the last state."""

    def hold(state: physics.State, ctrl: jax.Array) -> physics.State:
        def substep(state: physics.State, _: None) -> tuple[physics.State, None]:
            return physics.step(model, state, ctrl), None

        return jax.lax.scan(substep, state, None, length=HOLD)[0]

    kernel = simd.vectorize(hold)

    @jax.jit
    def run(state: physics.State, ctrl: jax.Array) -> physics.State:
        return jax.lax.scan(lambda s, c: (kernel(s, c), None), state, ctrl)[0]

    return run


def state_of(model: Any, states: np.ndarray) -> physics.State:
    """Turns MuJoCo's states into ours."""
    nq, nv, batch = model.nq, model.nv, len(states)
    return physics.State(
        time=jnp.zeros(batch),
        qpos=jnp.asarray(states[:, 1 : 1 + nq], jnp.float32),
        qpos_low=jnp.zeros((batch, len(from_mujoco(model).root_dofs))),
        qvel=jnp.asarray(states[:, 1 + nq : 1 + nq + nv], jnp.float32),
        qvel_low=jnp.zeros((batch, nv)),
        act=jnp.zeros((batch, model.na)),
        qacc_warmstart=jnp.zeros((batch, nv)),
        diverged=jnp.zeros(batch, bool),
    )


def parity(model: Any, name: str, last: physics.State, rng: Any) -> float:
    """Steps the last lanes once on both sides; returns the 99th percentile of the relative error."""
    exact = read(name, "rk4" if model.opt.integrator == 1 else "euler")
    exact.opt.solver, exact.opt.tolerance, exact.opt.iterations = 2, 1e-12, 100
    data = mujoco.MjData(exact)
    ctrl = rng.uniform(-1, 1, (64, model.nu))
    step = jax.jit(simd.vectorize(lambda s, c: physics.step(from_mujoco(model), s, c).qvel))
    state = jax.tree.map(lambda x: x[-64:], last)
    after = np.asarray(step(state, jnp.asarray(ctrl, jnp.float32)))
    errors = []
    for i in range(64):
        mujoco.mj_resetData(exact, data)
        data.qpos[:], low = state.qpos[i], np.asarray(state.qpos_low[i])
        for k, d in enumerate(from_mujoco(model).root_dofs):
            j = exact.dof_jntid[d]
            data.qpos[exact.jnt_qposadr[j] + d - exact.jnt_dofadr[j]] += low[k]
        data.qvel[:], data.ctrl[:] = state.qvel[i], np.float32(ctrl[i])
        before = data.qvel.copy()
        mujoco.mj_step(exact, data)
        if bool(state.diverged[i]) or data.warning.number.any():
            continue  # where MuJoCo resets, ours is frozen and marked
        change = np.abs(data.qvel - before).max()
        smooth = exact.opt.timestep * np.abs(data.qacc_smooth).max()
        scale = max(change, smooth, 0.02 * np.abs(before).max(), 1e-9)
        errors.append(np.abs(after[i] - data.qvel).max() / scale)
    return float(np.quantile(errors, 0.99))


def measure(name: str, integrator: str, args: argparse.Namespace) -> dict[str, Any]:
    """Compares one model."""
    rng = np.random.default_rng(1)
    model = read(name, integrator)
    threads = len(os.sched_getaffinity(0))
    peer, batch = MujocoRollout(model, threads), args.batch

    def controls(count: int) -> np.ndarray:
        return rng.uniform(-args.amplitude, args.amplitude, (batch, count, model.nu))

    few = slice(0, 16 * threads)
    states = peer.start(batch, 0)
    ctrl = controls(SETTLE // HOLD)
    model.opt.solver = SOLVERS["Newton"]
    states = peer.run(states, ctrl)
    tried = controls(20)[few]
    solver = peer.fastest(lambda: peer.run(states[few], tried))
    run = ours(from_mujoco(model))
    mine, diverged = state_of(model, states), 0
    rates: dict[str, list[float]] = {"ours": [], "mujoco": []}
    cpu: dict[str, list[float]] = {"ours": [], "mujoco": []}
    steps = batch * args.controls * HOLD

    def timed(side: str, call: Any, repeats: int) -> Any:
        begin, before, result = time.perf_counter(), time.process_time(), None
        for _ in range(repeats):
            result = call()
        rates[side].append(repeats * steps / (time.perf_counter() - begin))
        cpu[side].append(repeats * steps / (time.process_time() - before))
        return result

    for turn in range(args.repeats + 1):
        ctrl, start = controls(args.controls), jax.block_until_ready(state_of(model, states))
        given = jnp.asarray(ctrl.transpose(1, 0, 2), jnp.float32)
        move = functools.partial(lambda *told: jax.block_until_ready(run(*told)), start, given)
        if not turn:
            move()  # it is compiled
        states = timed("mujoco", functools.partial(peer.run, states, ctrl), 1)
        mine = timed("ours", move, AGAIN)
        diverged = max(diverged, int(np.asarray(mine.diverged).sum()))
    for each in (rates, cpu):
        del each["ours"][0], each["mujoco"][0]
    error = parity(model, name, mine, rng)
    if not error <= TOLERANCE or diverged > MOST_DIVERGED * batch:
        raise SystemExit(
            f"{name}: {diverged} of {batch} diverged, error {error:.1e} after one step"
        )
    median = {side: statistics.median(values) for side, values in rates.items()}
    return {
        "model": name,
        "integrator": integrator,
        "ratio": statistics.median(
            a / b for a, b in zip(rates["ours"], rates["mujoco"], strict=True)
        ),
        "steps_per_s": median["ours"],
        "mujoco_steps_per_s": median["mujoco"],
        "steps_per_cpu_s": statistics.median(cpu["ours"]),
        "mujoco_steps_per_cpu_s": statistics.median(cpu["mujoco"]),
        "mujoco_solver": solver,
        "diverged": diverged,
        "parity_99": error,
        "cold_compile_cpu_s": compile_seconds(name, integrator, cold=True),
    }


def compile_seconds(name: str, integrator: str, *, cold: bool) -> float:
    """Times tracing and compiling in a fresh process, with an empty cache if `cold`."""
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[3])\n"
        "import physics as b, jax, jax.numpy as jnp, mujoco\n"
        "model = b.read(sys.argv[1], sys.argv[2]); jnp.zeros(1).block_until_ready()\n"
        "start = time.process_time()\n"
        "run = b.ours(b.from_mujoco(model))\n"
        "states = b.np.zeros((16, 1 + model.nq + model.nv)); states[:, 1:1 + model.nq] = model.qpos0\n"
        "jax.block_until_ready(run(b.state_of(model, states), jnp.zeros((1, 16, model.nu))))\n"
        "print(time.process_time() - start)\n"
    )
    with tempfile.TemporaryDirectory() as empty:
        env = {**os.environ, "SEEDBED_CACHE": empty} if cold else None
        command = [sys.executable, "-c", code, name, integrator, str(Path(__file__).parent)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout.split()[-1])


def peers(name: str, python: Path) -> dict[str, dict[str, float]]:
    """Simulated seconds per second of Brax's spring back end and of MJX (see peers/brax_setup.sh)."""
    if not python.exists():
        raise SystemExit(f"no {python}: make it with benchmarks/peers/brax_setup.sh")
    script, found = Path(__file__).parent / "peers" / "brax_physics.py", {}
    for kind, what in (("spring", name), ("mjx", str(ASSETS / f"{name}.xml"))):
        command = [str(python), str(script), kind, what]
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode:
            raise SystemExit(f"{kind}: {done.stderr[-2000:]}")
        found[kind] = json.loads(done.stdout.splitlines()[-1])
    return found


def save(row: dict[str, Any], path: Path) -> None:
    """Puts a row in the place of the one of the same model and integrator; rows of another CPU go."""
    saved = json.loads(path.read_text()) if path.exists() else {"cpu": "", "rows": []}
    old = saved["rows"] if saved["cpu"] == cpu_name() else []
    same = ("model", "integrator")
    rows = [r for r in old if any(r[k] != row[k] for k in same)] + [row]
    rows.sort(key=lambda r: (MODELS.index(r["model"]), r["integrator"]))
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"cpu": cpu_name(), "rows": rows}, indent=1) + "\n")


def main() -> None:
    """Measures the models, prints a line for each, and saves JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--integrators", nargs="+", default=["euler", "rk4"])
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--controls", type=int, default=20, help="of five substeps, a repetition")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--amplitude", type=float, default=1.0, help="of the uniform controls")
    parser.add_argument(
        "--peers", action="store_true", help="Brax's spring back end and MJX too (Ant, Humanoid)"
    )
    home = Path.home() / ".cache" / "seedbed" / "peers" / "brax" / "bin" / "python"
    parser.add_argument("--peers-python", type=Path, default=home)
    parser.add_argument("--out", type=Path, default=RESULT, help="the JSON that takes the rows")
    args = parser.parse_args()
    for name in args.models:
        for integrator in args.integrators:
            row = measure(name, integrator, args)
            if args.peers and name in ("ant", "humanoid") and integrator == "euler":
                row["peers"] = peers(name, args.peers_python)
                simulated = row["steps_per_s"] * float(read(name, integrator).opt.timestep)
                for kind, found in row["peers"].items():
                    found["ratio"] = simulated / found["simulated_s_per_s"]
                    print(f"{name}: {found['ratio']:.0f} x {kind} in simulated seconds a second")
            print(
                f"{name:26} {integrator:5} {row['ratio']:6.1f} x MuJoCo ({row['mujoco_solver']})  "
                f"{row['steps_per_s'] / 1e6:7.3f} M/s  {row['mujoco_steps_per_s'] / 1e3:7.0f} k/s  "
                f"per CPU s {row['steps_per_cpu_s'] / 1e6:.3f} M / "
                f"{row['mujoco_steps_per_cpu_s'] / 1e3:.0f} k  "
                f"compile {row['cold_compile_cpu_s']:.1f} CPU s  error {row['parity_99']:.0e}",
                flush=True,
            )
            save(row | {"stamp": stamp()}, args.out)


if __name__ == "__main__":
    main()
