"""Compares our tasks of dm_control with EnvPool's, MuJoCo's C code, along the same random actions.

EnvPool opens the episodes. Where its observation tells the whole state, ours begin in the same, and both take
the same 50 actions; nothing is set again in between, so differences grow where contacts make a body chaotic.
Each number is compared with the largest size that it had in any episode, at least 1.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import mujoco
import numpy as np

from _stamp import write_result
from seedbed import physics, simd
from seedbed.config.resolve import resolve_env
from seedbed.envs.device.mujoco import TaskState
from seedbed.machine import cpu_name
from suite import envpool_name

EPISODES, STEPS = 64, 50
SEEN = {
    "acrobot-swingup",
    "cartpole-swingup",
    "cheetah-run",
    "finger-spin",
    "hopper-hop",
    "humanoid-run_pure_state",
    "pendulum-swingup",
    "point_mass-easy",
    "reacher-easy",
    "swimmer-swimmer6",
    "walker-walk",
}
"""Tasks whose state can be read from what EnvPool shows."""
RESULT = Path(__file__).parent / "results" / "suite_parity.json"


def places(task: str, seen: dict[str, np.ndarray]) -> np.ndarray:
    """Returns qpos [n, nq] of the episodes, of what was seen when they opened."""
    count = len(next(iter(seen.values())))
    nothing = np.zeros((count, 1))
    angle = np.arctan2
    if task == "acrobot-swingup":
        x_1, x_2, z_1, z_2 = seen["orientations"].T
        return np.stack([angle(x_1, z_1), angle(x_2, z_2) - angle(x_1, z_1)], axis=1)
    if task == "cartpole-swingup":
        place, z, x = seen["position"].T
        return np.stack([place, angle(x, z)], axis=1)
    if task == "pendulum-swingup":
        z, x = seen["orientation"].T
        return angle(x, z)[:, None]
    if task == "finger-spin":
        proximal, distal, x, z = seen["position"].T
        return np.stack([proximal, distal, angle(-x, z)], axis=1)
    if task == "walker-walk":
        turned = seen["orientations"].reshape(count, -1, 2)
        turned = angle(turned[:, :, 1], turned[:, :, 0])
        torso, limbs = turned[:, :1], turned[:, 1:].reshape(count, 2, 3)
        parents = np.concatenate([torso[:, None].repeat(2, 1), limbs[:, :, :-1]], axis=2)
        # The joints of the legs turn about -y.
        joints = -(limbs - parents).reshape(count, 6)
        joints = (joints + np.pi) % (2 * np.pi) - np.pi
        return np.hstack([seen["height"][:, None] - 1.3, nothing, torso, joints])
    if task == "swimmer-swimmer6":
        return np.hstack([nothing, nothing, nothing, seen["joints"]])
    if task == "humanoid-run_pure_state":
        return seen["position"]
    return (
        np.hstack([nothing, seen["position"]])
        if task in ("cheetah-run", "hopper-hop")
        else seen["position"]
    )


def compare(name: str) -> dict[str, Any]:
    """Returns the largest differences of a task's observations and rewards, over their sizes."""
    import envpool  # type: ignore[import-not-found]

    task: Any = resolve_env(f"dm/{name}")
    envs: Any = envpool.make_gymnasium(envpool_name(name), num_envs=EPISODES, seed=0)
    seen, _ = envs.reset()
    seen = {key: np.asarray(value) for key, value in seen.items()}
    opened: Any = jax.jit(simd.vectorize(task.reset))(jax.random.split(jax.random.key(0), EPISODES))
    qpos = places(name, seen).astype(np.float32)
    inner = opened.inner._replace(qpos=qpos, qvel=_velocity(name, seen, task))
    inner = inner._replace(kept=_targets(name, seen, inner, task))
    state = opened._replace(inner=TaskState(*inner))
    step = jax.jit(simd.vectorize(task.step))
    rng, off, paid, size = np.random.default_rng(0), [], [], {}
    for _ in range(STEPS):
        action = rng.uniform(-1, 1, (EPISODES, *task.spec.action.shape)).astype(np.float32)
        state = step(state, action)
        seen, reward, *_ = envs.step(action.astype(np.float64))
        ours = state.timestep.observation
        for key in ours:
            size[key] = np.maximum(size.get(key, 1.0), np.abs(seen[key]).max(axis=0))
        off.append({key: np.abs(np.asarray(x) - seen[key]) for key, x in ours.items()})
        paid.append(np.abs(np.asarray(state.timestep.reward) - reward))
    worst = [
        [max(float((at[key][i] / size[key]).max()) for key in at) for i in range(EPISODES)]
        for at in off
    ]
    rewards = np.stack(paid)
    return {
        "task": name,
        "first_step": max(worst[0]),
        "median_of_episodes": float(np.median(np.max(worst, axis=0))),
        "worst": float(np.max(worst)),
        "reward_median": float(np.median(rewards.max(axis=0))),
        "reward_worst": float(rewards.max()),
    }


def _velocity(name: str, seen: dict[str, np.ndarray], task: Any) -> np.ndarray:
    if name == "swimmer-swimmer6":  # at rest, as all links are
        return np.zeros((EPISODES, task.physics_model().nv), np.float32)
    return seen["velocity"].astype(np.float32)


def _targets(name: str, seen: dict[str, np.ndarray], inner: Any, task: Any) -> Any:
    """Returns what an episode keeps: where its target is."""
    if not task.targets:
        return inner.kept
    near = "nose" if name.startswith("swimmer") else "finger"

    def place(inner: Any) -> Any:
        model = task.physics_model()
        now = physics.forward(model, physics.init(model, inner.qpos))
        return task.place(now, near)

    begun = np.asarray(jax.jit(jax.vmap(place))(inner))
    kept = np.array(inner.kept)
    # A swimmer opens with its head along the axes of the world here: its way is the world's.
    kept[:, 0, :2] = begun[:, :2] + seen["to_target"]
    return kept.astype(np.float32)


def main() -> None:
    """Compares, prints a table and saves it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.parse_args()
    rows = []
    for name in sorted(SEEN):
        rows.append(compare(name))
        print(json.dumps(rows[-1]), flush=True)
    content = {"cpu": cpu_name(), "mujoco": mujoco.__version__, "rows": rows}
    write_result(RESULT, content)


if __name__ == "__main__":
    main()
