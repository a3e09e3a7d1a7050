"""Cost of a gradient through physics steps over the forward step, from the same settled states.

Forward is a kernel from a state and a control to qpos and qvel; backward is the kernel that turns cotangents
of qpos and qvel into those of the state and the control, with all that it computes again. Both run over the
same states and take turns. What a step saves for the way back is the size of what `jax.vjp` of a rollout
keeps, a step and an environment. Compilation is timed in processes of their own. The loop of the README, a
kernel call for each step, is compared with the loop of benchmarks/physics.py, which holds a control for five
substeps in a kernel.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import physics as stepping
from _stamp import stamp
from seedbed import physics, simd
from seedbed.machine import cpu_name
from seedbed.physics.mjcf import from_mujoco

RESULT = Path(__file__).parent / "results" / "gradients.json"
COST = {
    "ant": 6.0,
    "humanoid": 6.0,
    "hopper": 4.0,
    "inverted_pendulum": 3.0,
    "inverted_double_pendulum": 3.0,
}
"""The goals: backward over forward."""
COLD = {"ant": 15.0, "humanoid": 45.0}
"""The goals: seconds to compile a gradient in a fresh process without a cache."""
CACHED, NATURAL = 3.0, 0.9
"""The goals: seconds with a cache, and the rate of the README's loop over that of the benchmark's."""
STEPS = 20


def stepper(model: physics.Model) -> Callable[..., Any]:
    """Returns the batched function of (state, ctrl) to qpos and qvel."""

    def one(state: physics.State, ctrl: jax.Array) -> tuple[jax.Array, jax.Array]:
        after = physics.step(model, state, ctrl)
        return after.qpos, after.qvel

    return simd.vectorize(one)


def pullback(model: physics.Model, state: physics.State, ctrl: jax.Array) -> Any:
    """Returns the function from cotangents of qpos and qvel to those of qpos, qvel and ctrl."""

    def moved(qpos: jax.Array, qvel: jax.Array, ctrl: jax.Array) -> tuple[jax.Array, jax.Array]:
        return stepper(model)(state._replace(qpos=qpos, qvel=qvel), ctrl)

    return jax.vjp(moved, state.qpos, state.qvel, ctrl)[1]


@functools.cache
def natural(model: physics.Model) -> Callable[..., physics.State]:
    """Returns the step of the README: State in, State out."""
    return jax.jit(simd.vectorize(lambda state, ctrl: physics.step(model, state, ctrl)))


def rollout(model: physics.Model, state: physics.State, ctrl: jax.Array) -> physics.State:
    """Returns the state after steps under ctrl [T, B, nu], a kernel call each."""
    step = natural(model)
    return jax.lax.scan(lambda s, c: (step(s, c), None), state, ctrl)[0]


def visited(model: physics.Model, state: physics.State, ctrl: jax.Array) -> physics.State:
    """Returns the states [T, B, ...] before each step of a rollout."""
    step = natural(model)
    return jax.lax.scan(lambda s, c: (step(s, c), s), state, ctrl)[1]


def settled(name: str, integrator: str, batch: int) -> tuple[physics.Model, physics.State]:
    """Returns the model and its states after random control, by MuJoCo."""
    compiled = stepping.read(name, integrator)
    compiled.opt.solver = stepping.SOLVERS["Newton"]
    peer = stepping.MujocoRollout(compiled, len(os.sched_getaffinity(0)))
    count = stepping.SETTLE // stepping.HOLD
    ctrl = np.random.default_rng(1).uniform(-1, 1, (batch, count, compiled.nu))
    states = peer.run(peer.start(batch, 0), ctrl)
    return from_mujoco(compiled), stepping.state_of(compiled, states)


def turns(sides: dict[str, Callable[[], Any]], repeats: int, seconds: float) -> dict[str, Any]:
    """Runs the sides in turns of `seconds` each; returns the wall and the CPU seconds of a call, by side."""
    counts, found = {}, {name: {"wall": [], "cpu": []} for name in sides}
    for name, call in sides.items():
        jax.block_until_ready(call())
        begin = time.perf_counter()
        jax.block_until_ready(call())
        counts[name] = max(1, round(seconds / (time.perf_counter() - begin)))
    for _ in range(repeats):
        for name, call in sides.items():
            begin, before = time.perf_counter(), time.process_time()
            for _ in range(counts[name]):
                result = call()
            jax.block_until_ready(result)
            found[name]["wall"].append((time.perf_counter() - begin) / counts[name])
            found[name]["cpu"].append((time.process_time() - before) / counts[name])
    return found


def ratio(found: dict[str, Any], above: str, below: str, clock: str = "wall") -> float:
    """Returns the median over the turns of one side's time over the other's."""
    pairs = zip(found[above][clock], found[below][clock], strict=True)
    return statistics.median(a / b for a, b in pairs)


def cost(
    model: physics.Model, state: physics.State, args: argparse.Namespace, rng: np.random.Generator
) -> dict[str, Any]:
    """Compares backward and forward kernels, and a rollout with its gradient and without."""
    batch = len(state.qpos)
    ctrl = jnp.asarray(rng.uniform(-1, 1, (STEPS, batch, model.nu)), jnp.float32)
    each = jax.jit(functools.partial(visited, model))(state, ctrl), ctrl
    shapes = [(STEPS, batch, n) for n in (model.nq, model.nv)]
    given = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    step = stepper(model)
    forward = jax.jit(lambda each: jax.lax.map(lambda x: step(*x), each))
    saved = jax.jit(lambda each: jax.lax.map(lambda x: pullback(model, *x), each))(each)
    backward = jax.jit(lambda saved, given: jax.lax.map(lambda x: x[0](x[1]), (saved, given)))
    if not all(bool(jnp.isfinite(g).all()) for g in backward(saved, given)):
        raise SystemExit("a gradient is not finite")

    def loss(ctrl: jax.Array) -> jax.Array:
        last = rollout(model, state, ctrl)
        return (last.qpos * given[0][0]).sum() + (last.qvel * given[1][0]).sum()

    value, gradient = jax.jit(loss), jax.jit(jax.grad(loss))
    sides = {
        "forward": lambda: forward(each),
        "backward": lambda: backward(saved, given),
        "rollout": lambda: value(ctrl),
        "gradient": lambda: gradient(ctrl),
    }
    found = turns(sides, args.repeats, args.seconds)
    return {
        "ratio": ratio(found, "backward", "forward"),
        "ratio_cpu": ratio(found, "backward", "forward", "cpu"),
        "rollout_ratio": ratio(found, "gradient", "rollout"),
        "forward_us": 1e6 * statistics.median(found["forward"]["wall"]) / STEPS,
        "backward_us": 1e6 * statistics.median(found["backward"]["wall"]) / STEPS,
        "forward_cpu_us": 1e6 * statistics.median(found["forward"]["cpu"]) / STEPS,
        "backward_cpu_us": 1e6 * statistics.median(found["backward"]["cpu"]) / STEPS,
        "saved_bytes": saved_bytes(model, state, ctrl),
        "step_bytes": 4 * (model.nq + 2 * model.nv + model.nu + len(model.root_dofs)),
    }


def saved_bytes(model: physics.Model, state: physics.State, ctrl: jax.Array) -> float:
    """Returns the bytes that a rollout keeps for its gradient, of an environment and each further step."""

    def kept(length: int) -> int:
        run = functools.partial(rollout, model)
        pull = jax.eval_shape(lambda s, c: jax.vjp(run, s, c)[1], state, ctrl[:length])
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))

    half = STEPS // 2
    return (kept(STEPS) - kept(half)) / (STEPS - half) / len(state.qpos)


def loops(
    model: physics.Model, state: physics.State, args: argparse.Namespace, rng: np.random.Generator
) -> dict[str, float]:
    """Compares the README's loop, from Python and in `lax.scan`, with the one that holds controls."""
    batch, hold = len(state.qpos), stepping.HOLD
    held = jnp.asarray(rng.uniform(-1, 1, (STEPS, batch, model.nu)), jnp.float32)
    ctrl = jnp.repeat(held, hold, axis=0)
    one_by_one = list(ctrl)
    holding, step = stepping.ours(model), natural(model)
    scanning = jax.jit(functools.partial(rollout, model))

    def calling() -> physics.State:
        now = state
        for c in one_by_one:
            now = step(now, c)
        return now

    sides = {
        "held": lambda: holding(state, held),
        "scan": lambda: scanning(state, ctrl),
        "calls": calling,
    }
    found = turns(sides, args.repeats, args.seconds)
    wall = {name: statistics.median(times["wall"]) for name, times in found.items()}
    rates = {f"{name}_steps_per_s": STEPS * hold * batch / wall[name] for name in sides}
    shares = {f"{name}_over_held": ratio(found, "held", name) for name in ("scan", "calls")}
    return rates | shares


def compile_seconds(name: str, integrator: str, *, cold: bool) -> dict[str, float]:
    """Times the first gradient of a rollout in a fresh process, with an empty cache if `cold`."""
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[3])\n"
        "import gradients as b, jax, jax.numpy as jnp\n"
        "model = b.from_mujoco(b.stepping.read(sys.argv[1], sys.argv[2]))\n"
        "qpos = jnp.tile(jnp.asarray(model.qpos0, jnp.float32), (16, 1)).block_until_ready()\n"
        "state = jax.vmap(lambda q: b.physics.init(model, q))(qpos)\n"
        "ctrl = jnp.zeros((2, 16, model.nu))\n"
        "loss = lambda c: b.rollout(model, state, c).qpos.sum()\n"
        "wall, cpu = time.perf_counter(), time.process_time()\n"
        "jax.block_until_ready(jax.jit(jax.grad(loss))(ctrl))\n"
        "print(time.perf_counter() - wall, time.process_time() - cpu)\n"
    )
    with tempfile.TemporaryDirectory() as empty:
        env = {**os.environ, "SEEDBED_CACHE": empty} if cold else None
        command = [sys.executable, "-c", code, name, integrator, str(Path(__file__).parent)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    wall, cpu = map(float, done.stdout.split()[-2:])
    return {"wall": wall, "cpu": cpu}


def measure(name: str, integrator: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measures one model."""
    rng = np.random.default_rng(2)
    row: dict[str, Any] = {"model": name, "integrator": integrator, "batch": args.batch}
    model, state = settled(name, integrator, args.batch)
    row |= cost(model, state, args, rng)
    if not args.no_loops:
        row |= loops(model, state, args, rng)
    if not args.no_compile:
        compile_seconds(name, integrator, cold=False)  # fills the cache
        for kind in ("cold", "cached"):
            times = compile_seconds(name, integrator, cold=kind == "cold")
            row |= {f"{kind}_compile_s": times["wall"], f"{kind}_compile_cpu_s": times["cpu"]}
    return row


def judged(row: dict[str, Any]) -> str:
    """Returns a line about a row, with its goals; what misses one has an exclamation mark."""
    name = row["model"]

    def against(key: str, goal: float | None, *, least: bool = False) -> str:
        value = row[key]
        missed = goal is not None and (value < goal if least else value > goal)
        bound = "" if goal is None else f" ({'>=' if least else '<='} {goal:g})"
        return f"{value:.2f}{'!' if missed else ''}{bound}"

    parts = [
        f"{name:26} {row['integrator']:5} backward / forward {against('ratio', COST.get(name))}",
        f"CPU {row['ratio_cpu']:.2f}",
        f"gradient / rollout {row['rollout_ratio']:.2f}",
        f"{row['forward_us']:.0f} and {row['backward_us']:.0f} us",
        f"keeps {row['saved_bytes']:.0f} B a step",
    ]
    if "scan_over_held" in row:
        shares = [against(f"{kind}_over_held", NATURAL, least=True) for kind in ("scan", "calls")]
        parts.append(f"scan {shares[0]} and calls {shares[1]} of {row['held_steps_per_s']:.3g}/s")
    if "cold_compile_s" in row:
        cold, cached = (
            against("cold_compile_s", COLD.get(name)),
            against("cached_compile_s", CACHED),
        )
        parts.append(f"compile {cold} s, cached {cached} s")
    return "  ".join(parts)


def save(row: dict[str, Any]) -> None:
    """Puts a row in the place of the one of the same model and integrator; rows of another CPU go."""
    saved = json.loads(RESULT.read_text()) if RESULT.exists() else {"cpu": "", "rows": []}
    old = saved["rows"] if saved["cpu"] == cpu_name() else []
    same = ("model", "integrator")
    rows = [r for r in old if any(r[k] != row[k] for k in same)] + [row | {"stamp": stamp()}]
    rows.sort(key=lambda r: (stepping.MODELS.index(r["model"]), r["integrator"]))
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({"cpu": cpu_name(), "rows": rows}, indent=1) + "\n")


def main() -> None:
    """Measures the models, prints a line for each, and saves JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(COST))
    parser.add_argument("--integrators", nargs="+", default=["euler", "rk4"])
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn")
    parser.add_argument("--no-loops", action="store_true", help="leave out the README's loop")
    parser.add_argument("--no-compile", action="store_true", help="leave out compilation")
    args = parser.parse_args()
    for name in args.models:
        for integrator in args.integrators:
            row = measure(name, integrator, args)
            print(judged(row), flush=True)
            if not (args.no_loops or args.no_compile):
                save(row)


if __name__ == "__main__":
    main()
