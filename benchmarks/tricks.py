"""Trains robots that nobody steers and judges them in MuJoCo's C code, for docs/results/.

Each policy plays 64 episodes: Go1's and the LEAP hand's in EnvPool's copies of MuJoCo Playground's tasks, as
they are; G1's, which follows a motion, in MuJoCo's C code from the same model, with a solver that converges.
Seeds run one after another, each with the whole machine; an interrupted series goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import mujoco
import numpy as np

import learning
from central import split_overrides

ROBOTS, SEED = 64, 1
TASKS = {
    "go1/handstand/ppo": ("Go1Handstand-v1", 500),
    "go1/footstand/ppo": ("Go1Footstand-v1", 500),
    "go1/getup/ppo": ("Go1Getup-v1", 300),
    "leap/rotate/ppo": ("LeapCubeRotateZAxis-v1", 500),
    "g1/motion/ppo": ("", 500),
}
"""EnvPool's tasks and the steps of an episode, by what is trained."""
SECONDS = {
    "go1/getup/ppo": "up at the end",
    "leap/rotate/ppo": "cube kept",
    "g1/motion/ppo": "followed to the end",
}
REMARK = (
    f"A policy plays {ROBOTS} episodes with the newest checkpoint, without noise on its actions, with the "
    "task's noise on what is seen. The curve is of the return in training. Wall-clock counts from the start "
    "of the command but for imports."
)
IN_ENVPOOL = (
    " EnvPool's task is MuJoCo's C code with one iteration of the solver for each step of 4 ms, as "
    "Playground and training have it; a robot that has fallen earns nothing more."
)
TURNED = (
    " The return is the angle in rad by which the cube turns about the vertical in 25 s, less 5 if it is "
    "dropped, which ends the episode. EnvPool's task is MuJoCo's C code with five iterations of the solver "
    "for each step of 10 ms, as Playground and training have it."
)
FOLLOWED = (
    " Episodes open where the motion does and end as the task's do, ten seconds later or with a fall. Steps "
    "are those of MuJoCo's C code from the same model, with a solver that converges; the error is the mean "
    "distance of the trunk from the motion's, until the robot falls."
)


class Found(NamedTuple):
    """What came of the episodes."""

    mean: float  # return, or the error in m
    worst: float
    whole: int  # episodes without a fall, or up at the end


def in_envpool(run: str, preset: str) -> Found:
    """Plays episodes of EnvPool's task."""
    import envpool  # type: ignore[import-not-found]

    import seedbed

    task, steps = TASKS[preset]
    policy = seedbed.load(run, newest=True)
    envs: Any = envpool.make_gymnasium(task, num_envs=ROBOTS, seed=SEED)
    observation, info = envs.reset()
    upright, total = np.ones(ROBOTS, bool), np.zeros(ROBOTS)
    for _ in range(steps):
        state = observation["state"] if isinstance(observation, dict) else observation
        action = policy.act({"state": state.astype(np.float32)})
        observation, reward, terminated, _, info = envs.step(np.asarray(action, np.float64))
        total += np.where(upright, reward, 0.0)
        upright &= ~terminated
    if preset == "go1/getup/ppo":
        # It is paid for its posture only while it is upright.
        upright = info["reward_posture"] > 0
    return Found(float(total.mean()), float(total.min()), int(upright.sum()))


def followed(run: str, preset: str) -> Found:
    """Lets robots follow the motion in MuJoCo's C code; each sees noise of its own."""
    import seedbed
    from seedbed.config.saved import saved_config
    from seedbed.run.folder import RunFolder

    task: Any = saved_config(RunFolder.read(Path(run))).env
    model, motion, steps = task.compiled(), task.followed, TASKS[preset][1]
    model.opt.iterations, model.opt.ls_iterations = 100, 50
    policy, rng = seedbed.load(run, newest=True), np.random.default_rng(SEED)
    robots = [mujoco.MjData(model) for _ in range(ROBOTS)]
    for data in robots:
        data.qpos[:], data.qvel[:] = motion.qpos[0], motion.qvel[0]
        mujoco.mj_forward(model, data)
    action, whole = np.zeros((ROBOTS, model.nu)), np.ones(ROBOTS, bool)
    errors: list[np.ndarray] = []
    for frame in range(steps):
        seen = np.stack(
            [
                _sees(task, data, motion, frame, last, rng)
                for data, last in zip(robots, action, strict=True)
            ]
        )
        action = np.asarray(policy.act({"state": seen.astype(np.float32)}))
        after = np.float64(motion.qpos[(frame + 1) % len(motion.qpos)])
        off = np.full(ROBOTS, np.nan)
        for i in np.flatnonzero(whole):
            robots[i].ctrl[:] = after[7:] + task.reach * action[i]
            mujoco.mj_step(model, robots[i], task.frame_skip)
            mujoco.mj_forward(model, robots[i])
            aside = robots[i].qpos[:3] - after[:3]
            whole[i] = (
                abs(aside[2]) < 0.25
                and np.hypot(*aside[:2]) < 0.5
                and _leans(robots[i], after) < 0.8
            )
            off[i] = np.linalg.norm(aside) if whole[i] else np.nan
        errors.append(off)
    apart = np.nanmean(errors, axis=0)
    return Found(float(np.nanmean(apart)), float(np.nanmax(apart)), int(whole.sum()))


def _leans(data: Any, wanted: np.ndarray) -> float:
    turn = np.zeros(4)
    mujoco.mju_mulQuat(turn, data.qpos[3:7] * [1, -1, -1, -1], wanted[3:7])
    return float(2 * np.arctan2(np.linalg.norm(turn[1:]), abs(turn[0])))


def _sees(
    task: Any, data: Any, motion: Any, frame: int, action: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Returns the observation, with noise, as the task has it."""
    row, later = frame % len(motion.qpos), (frame + 1) % len(motion.qpos)
    axes, wanted = np.zeros(9), np.zeros(9)
    mujoco.mju_quat2Mat(axes, data.sensor("orientation_pelvis").data)
    mujoco.mju_quat2Mat(wanted, np.float64(motion.qpos[row, 3:7]))
    noisy = [
        x + size * rng.uniform(-1, 1, x.shape)
        for x, size in (
            (data.sensor("gyro_pelvis").data, 0.2),
            (axes, 0.02),
            (data.qpos[7:], 0.01),
            (data.qvel[6:], 0.5),
        )
    ]
    turning, axes, joints, speeds = noisy[0], noisy[1].reshape(3, 3), noisy[2], noisy[3]
    return np.concatenate(
        [
            turning,
            axes[2],
            (axes.T @ wanted.reshape(3, 3))[:, :2].T.ravel(),
            joints - motion.qpos[row, 7:],
            speeds - motion.qvel[row, 6:],
            action,
            motion.qpos[later, 7:] - task.posture,
            motion.qvel[later, 6:],
        ]
    )


def row(preset: str, seed: int, lines: list[dict[str, Any]], found: dict[str, Any]) -> str:
    """Writes a line of the table."""
    last, each = lines[-1], Found(**found)
    form = "{:.3f} m" if preset == "g1/motion/ppo" else "{:.2f}"
    return (
        f"| {seed} | {form.format(each.mean)} | {form.format(each.worst)} | {each.whole} of {ROBOTS} | "
        f"{last['wall_s']:.0f} s | {last['env_steps']:,} | {last['env_steps'] / last['wall_s']:,.0f} |"
    )


def main() -> None:
    """Trains, then writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("preset", nargs="?", default="go1/handstand/ppo", choices=TASKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--runs", type=Path, default=learning.ROOT / "runs" / "tricks")
    parser.add_argument(
        "--commit", default=learning.head(), help="that trained runs which are there already"
    )
    parser.add_argument("--judge", metavar="RUN", help=argparse.SUPPRESS)
    own, overrides = split_overrides(sys.argv[1:])
    args = parser.parse_args(own)
    follows = args.preset == "g1/motion/ppo"
    if args.judge:
        found = (followed if follows else in_envpool)(args.judge, args.preset)
        print(json.dumps(found._asdict()))
        return
    runs: dict[int, learning.JudgedRun] = {}
    commands: list[str] = []
    for seed in args.seeds:
        command = ["seedbed", "train", args.preset, "--seed", str(seed), *overrides]
        commands.append(" ".join(command))
        run = args.runs / f"{args.preset.replace('/', '-')}-{seed}"
        runs[seed] = learning.judged(__file__, args.preset, command, run)
        seconds = [lines[-1]["wall_s"] for lines, _ in runs.values()]
        what = (
            ("error", "worst error") if follows else ("return in EnvPool's task", "worst episode")
        )
        whole = SECONDS.get(args.preset, "without a fall")
        columns = ["seed", *what, whole, "wall-clock", "env steps", "env steps/s"]
        table = [
            f"| {' | '.join(columns)} |",
            "|---" * len(columns) + "|",
            *(row(args.preset, each, *result) for each, result in sorted(runs.items())),
            f"| median | | | | {statistics.median(seconds):.0f} s | | |",
            f"| worst | | | | {max(seconds):.0f} s | | |",
        ]
        remark = REMARK + {"g1/motion/ppo": FOLLOWED, "leap/rotate/ppo": TURNED}.get(
            args.preset, IN_ENVPOOL
        )
        page = learning.Page(table, remark, commands, args.commit)
        curves = {each: lines for each, (lines, _) in runs.items()}
        learning.write(args.preset.replace("/", "-"), curves, None, page)
    print("\n".join(table))


if __name__ == "__main__":
    main()
