"""Speed against accuracy of our physics and of MuJoCo's C code over the time step, for Humanoid.

After Erez, Tassa and Todorov (2015): short segments are simulated again with a very small time step, and
what a larger one ends at is compared. 128 states of random control, with their contacts, are each simulated
for 128 ms under a control that is held; the error is the mean distance of the bodies from where MuJoCo's
RK4, in float64 with steps of 1/64 ms and a converged solver, has them at the end. Speeds are of the same
segments on all cores: MuJoCo through `rollout` with its Newton solver as it comes, ours in float32 as
kernels. Both take turns, and medians are kept.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

# The folder of this script is on the path.
import physics as peers
from _stamp import write_result
from conservation import INTEGRATORS
from seedbed import physics, simd
from seedbed.machine import cpu_name
from seedbed.physics.mjcf import from_mujoco

RESULT = Path(__file__).parent / "results" / "accuracy.json"
PICTURE = Path(__file__).parents[1] / "docs" / "results" / "accuracy.svg"
STEPS_MS = (16.0, 8.0, 4.0, 2.0, 1.0, 0.5)
SEGMENT_MS, EXACT_MS = 128.0, 1 / 64
SEEDS, COPIES = 128, 8


def begin(threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns states [SEEDS, S] from a second or so of random control, and the controls [SEEDS, nu]."""
    model = humanoid("Euler", 3.0)
    peer, rng = peers.MujocoRollout(model, threads), np.random.default_rng(0)
    states, draw = peer.start(SEEDS, 0), functools.partial(rng.uniform, -0.4, 0.4)
    for moments in np.split(np.arange(SEEDS), 4):
        # Of falling, of meeting the ground, and of lying there.
        count = 20 * (1 + int(moments[0]) * 4 // SEEDS)
        states[moments] = peer.run(states[moments], draw((len(moments), count, model.nu)))
    nq, nv = model.nq, model.nv
    # What float32 can hold, and nothing that a solver remembers.
    states[:, 1 : 1 + nq + nv] = np.float32(states[:, 1 : 1 + nq + nv])
    states[:, 0] = 0
    return states, np.float64(np.float32(draw((SEEDS, model.nu))))


def humanoid(integrator: str, step_ms: float) -> Any:
    """Compiles Humanoid."""
    model = mujoco.MjModel.from_xml_path(str(peers.ASSETS / "humanoid.xml"))
    model.opt.integrator, model.opt.timestep = INTEGRATORS[integrator], step_ms / 1000
    model.opt.solver, model.opt.iterations = mujoco.mjtSolver.mjSOL_NEWTON, 100
    return model


def bodies(model: Any, qpos: np.ndarray) -> np.ndarray:
    """Returns where bodies are [n, nbody, 3], in m; NaN where a state is not finite."""
    data, found = mujoco.MjData(model), np.full((len(qpos), model.nbody, 3), np.nan)
    for row, place in zip(found, qpos, strict=True):
        if np.isfinite(place).all():
            data.qpos[:] = place
            mujoco.mj_kinematics(model, data)
            row[:] = data.xpos
    return found


def theirs(model: Any, threads: int, states: np.ndarray, ctrl: np.ndarray) -> Callable[[], Any]:
    """Returns a call that simulates the segments with MuJoCo and returns the last positions."""
    peer, steps = peers.MujocoRollout(model, threads), round(SEGMENT_MS / 1000 / model.opt.timestep)

    def run() -> np.ndarray:
        held = np.broadcast_to(ctrl[:, None], (len(ctrl), steps, model.nu))
        out: Any = peer.rollout.rollout(peer.model, peer.data, states, np.ascontiguousarray(held))
        return out[0][:, -1, 1 : 1 + model.nq]

    return run


def ours(model: Any, states: np.ndarray, ctrl: np.ndarray) -> Callable[[], Any]:
    """Returns a call that simulates COPIES of the segments with our physics and returns the last state."""
    read, steps = from_mujoco(model), round(SEGMENT_MS / 1000 / model.opt.timestep)
    kernel = simd.vectorize(functools.partial(physics.step, read))

    @jax.jit
    def run(state: physics.State, held: jax.Array) -> physics.State:
        return jax.lax.fori_loop(0, steps, lambda _, s: kernel(s, held), state)

    begun = peers.state_of(model, np.tile(states, (COPIES, 1)))
    held = jnp.asarray(np.tile(ctrl, (COPIES, 1)), jnp.float32)
    return lambda: jax.block_until_ready(run(begun, held))


def error(exact: np.ndarray, found: np.ndarray) -> dict[str, float]:
    """Returns the mean and median error of the segments that stayed finite, in m, and how many did not."""
    apart = np.linalg.norm(found - exact, axis=2)[:, 1:].mean(1)
    lost = ~np.isfinite(apart)
    return {
        "median_m": float(np.median(apart[~lost])),
        "mean_m": float(apart[~lost].mean()),
        "lost": float(lost.sum()),
    }


def draw(rows: list[dict[str, Any]]) -> None:
    """Draws the errors over the speeds."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "accuracy"
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5))
    for number, integrator in enumerate(INTEGRATORS):
        for side, name, line in (("mujoco", "MuJoCo C", "o-"), ("ours", "ours, float32", "s--")):
            mine = [r for r in rows if r["integrator"] == integrator]
            speeds = [r[side]["simulated_s_per_s"] for r in mine]
            errors = [1000 * r[side]["median_m"] for r in mine]
            axis.loglog(speeds, errors, line, color=f"C{number}", label=f"{name}, {integrator}")
            for row, x, y in zip(mine, speeds, errors, strict=True):
                axis.annotate(f" {row['step_ms']:g} ms", (x, y), fontsize=7)
    axis.set_xlabel("simulated seconds per second, all cores")
    axis.set_ylabel("median error after 128 ms, mm")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    """Measures, prints a table, and saves it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    states, ctrl = begin(threads)
    truth = humanoid("RK4", EXACT_MS)
    truth.opt.tolerance = 1e-12
    exact = bodies(truth, theirs(truth, threads, states, ctrl)())
    rows = []
    print(
        f"{'integrator':14}{'step':>8}{'MuJoCo C: mm':>14}{'s/s':>10}{'ours: mm':>12}{'s/s':>10}{'ratio':>8}"
    )
    for integrator in INTEGRATORS:
        for step_ms in STEPS_MS:
            model = humanoid(integrator, step_ms)
            calls = {
                "mujoco": (theirs(model, threads, states, ctrl), 1),
                "ours": (ours(model, states, ctrl), COPIES),
            }
            row: dict[str, Any] = {"integrator": integrator, "step_ms": step_ms}
            mine = calls["ours"][0]()
            last = np.float64(mine.qpos[:SEEDS])
            last[:, : mine.qpos_low.shape[1]] += mine.qpos_low[:SEEDS]
            last[np.asarray(mine.diverged[:SEEDS])] = np.nan
            row["mujoco"] = error(exact, bodies(model, calls["mujoco"][0]()))
            row["ours"] = error(exact, bodies(model, last))
            speeds: dict[str, list[float]] = {side: [] for side in calls}
            for _ in range(args.repeats):
                for side, (call, copies) in calls.items():
                    begun = time.perf_counter()
                    call()
                    took = time.perf_counter() - begun
                    speeds[side].append(SEEDS * copies * SEGMENT_MS / 1000 / took)
            for side, found in speeds.items():
                row[side]["simulated_s_per_s"] = statistics.median(found)
                row[side]["spread"] = [min(found), max(found)]
            a, b = row["mujoco"], row["ours"]
            row["ratio"] = b["simulated_s_per_s"] / a["simulated_s_per_s"]
            rows.append(row)
            print(
                f"{integrator:14}{step_ms:5g} ms{1000 * a['median_m']:14.4f}{a['simulated_s_per_s']:10.1f}"
                f"{1000 * b['median_m']:12.4f}{b['simulated_s_per_s']:10.1f}{row['ratio']:8.1f}",
                flush=True,
            )
    result = {"machine": cpu_name(), "threads": threads, "seeds": SEEDS, "rows": rows}
    write_result(args.out, result)
    if args.out == RESULT:  # the picture is of the file that is committed
        draw(rows)


if __name__ == "__main__":
    main()
