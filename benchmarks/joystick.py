"""Trains robots that follow a joystick and judges them in MuJoCo's C code, for docs/results/.

Each policy drives 64 robots for 20 s in EnvPool's copy of MuJoCo Playground's task, as it is, and Go1's once
more with pushes. Both have noise on what is observed and commands that change. Seeds run one after another,
each with the whole machine; an interrupted series goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import mujoco
import numpy as np

import learning
from central import split_overrides

ROBOTS, STEPS, SEED = 64, 1000, 1
TASKS = {
    "go1/joystick/ppo": "Go1JoystickFlatTerrain-v1",
    "go1/rough/ppo": "Go1JoystickRoughTerrain-v1",
    "spot/joystick/ppo": "SpotFlatTerrainJoystick-v1",
    "t1/joystick/ppo": "T1JoystickFlatTerrain-v1",
    "g1/joystick/ppo": "G1JoystickFlatTerrain-v1",
    "h1/joystick/ppo": "H1JoystickGaitTracking-v1",
    "g1/rough/ppo": "G1JoystickRoughTerrain-v1",
    "apollo/joystick/ppo": "ApolloJoystickFlatTerrain-v1",
    "berkeley/joystick/ppo": "BerkeleyHumanoidJoystickFlatTerrain-v1",
    "op3/joystick/ppo": "Op3Joystick-v1",
}
"""EnvPool's tasks, by what is trained."""
VELOCITY = {"ApolloJoystickFlatTerrain-v1": 6}
"""The place of the velocity in a task's privileged part, behind the state; in others it is 9."""
LARGEST_PUSH = 1.0  # m/s; the trunk's speed changes by a third of it
REMARK = (
    f"A policy drives {ROBOTS} robots for {STEPS // 50} s with the newest checkpoint, without noise on its "
    "actions, with the task's noise on what is seen. The error is the root of the mean square of what is "
    "missing from the commanded velocity, forward and sideways together, from the first step on, with the "
    "time that a robot takes to obey a new command; steps after a fall are left out. EnvPool's task is "
    "MuJoCo's C code with {} of the solver for each step of {} ms, as Playground and training have it. The "
    "curve is of the return in training, with the preset's weights. Wall-clock counts from the start of the "
    "command but for imports."
)
PUSHED = (
    " Pushes come every one to three seconds, with up to "
    f"{LARGEST_PUSH:g} m/s times the mass over pi, in MuJoCo's C code from the same file, with a solver that "
    "converges."
)
TILES = (
    " That ground is a height field of 5 cm. On the tiles and stairs of training, in MuJoCo's C code with a "
    "solver that converges, robots are pushed as well, every one to three seconds, with up to "
    f"{LARGEST_PUSH:g} m/s times the mass over pi."
)
SECOND = {
    "go1/joystick/ppo": (("error with pushes", "upright then"), PUSHED),
    "go1/rough/ppo": (("error on tiles, with pushes", "upright on tiles"), TILES),
}
"""Columns and remark of a second judge, by what is trained; it sees what Go1 sees."""


class Found(NamedTuple):
    """What came of driving the robots."""

    upright: int
    error: float  # m/s
    turning: float  # rad/s


def judged(errors: list[np.ndarray], upright: np.ndarray) -> Found:
    """Sums up errors of the commands [n, 3], one array a step; NaN after a fall."""
    squared = np.square(np.array(errors))
    along = math.sqrt(np.nanmean(squared[..., :2].sum(-1)))
    return Found(int(upright.sum()), along, math.sqrt(np.nanmean(squared[..., 2])))


def in_envpool(run: str, task: str) -> Found:
    """Drives the robots in EnvPool's task."""
    import envpool  # type: ignore[import-not-found]

    import seedbed
    from seedbed.config.resolve import resolve_env

    policy = seedbed.load(run, newest=True)
    envs: Any = envpool.make_gymnasium(task, num_envs=ROBOTS, seed=SEED)
    usual: Any = resolve_env(task_of(task))
    observation, info = envs.reset()
    upright, errors = np.ones(ROBOTS, bool), []
    for _ in range(STEPS):
        command = info["command"]
        whole = isinstance(observation, dict)
        state = observation["state"] if whole else observation
        action = policy.act({"state": state.astype(np.float32)})
        observation, _, terminated, _, info = envs.step(np.asarray(action, np.float64))
        if whole:
            known = observation["privileged_state"][:, observation["state"].shape[1] :]
            velocity = known[:, VELOCITY.get(task, 9) :][:, :2]
            off = np.hstack([command[:, :2] - velocity, command[:, 2:] - known[:, 2:3]])
        else:
            off = told_by_rewards(info, usual)
        errors.append(np.where(upright[:, None], off, np.nan))
        upright &= ~terminated
    return judged(errors, upright)


def task_of(name: str) -> str:
    """Returns our name of one of EnvPool's tasks."""
    return next(preset.removesuffix("/ppo") for preset, task in TASKS.items() if task == name)


def remark(preset: str) -> str:
    """Returns how a preset's policies are judged."""
    from seedbed.config.resolve import resolve_env

    task: Any = resolve_env(task_of(TASKS[preset]))
    count = task.solver_iterations
    iterations = f"{count} iteration{'s' if count > 1 else ''}"
    return REMARK.format(iterations, f"{1000 * task.dt / task.frame_skip:g}")


def told_by_rewards(info: dict[str, np.ndarray], task: Any) -> np.ndarray:
    """Returns errors [n, 3] as large as those of the command, of what a step was paid for following it.

    Of a task whose observation has no speeds; the error along the ground stands in the first number.
    """
    parts = []
    for name in ("tracking_lin_vel", "tracking_ang_vel"):
        share = info[f"reward_{name}"] / getattr(task.scales, name)
        parts.append(np.sqrt(-task.tracking_sigma * np.log(np.clip(share, 1e-300, 1.0))))
    return np.stack([parts[0], np.zeros_like(parts[0]), parts[1]], axis=1)


class Robot:
    """A robot of a task in MuJoCo's C code, its command and its pushes."""

    def __init__(self, task: Any, model: Any, rng: np.random.Generator) -> None:
        self.task, self.model, self.rng = task, model, rng
        self.data = mujoco.MjData(model)
        mujoco.mj_resetDataKeyframe(model, self.data, model.key(task.home).id)
        self.data.qvel[:6] = rng.uniform(-0.5, 0.5, 6)
        mujoco.mj_forward(model, self.data)
        self.command = rng.uniform(-1, 1, 3) * task.command_ranges
        self.shown = self.command
        self.until = self._steps(rng.exponential(5.0))
        self.action = self.earlier = np.zeros(model.nu)
        self.wait = self._steps(rng.uniform(1, 3))
        self.seconds, self.speed = rng.uniform(0.05, 0.2), rng.uniform(0, LARGEST_PUSH)
        self.since, self.pushing, self.way = 0, 0, np.zeros(3)

    def _steps(self, seconds: float) -> int:
        return round(seconds / self.task.dt)

    def read(self, sensor: str) -> np.ndarray:
        """Returns the value of a sensor."""
        return self.data.sensor(sensor).data

    def sees(self) -> np.ndarray:
        """Returns the observation, with noise."""
        gravity = -self.data.site("imu").xmat.reshape(3, 3)[2]
        joints = self.data.qpos[7:] - self.task.posture
        parts = [self.read("local_linvel"), self.read("gyro"), gravity, joints, self.data.qvel[6:]]
        sizes = np.repeat([0.1, 0.2, 0.05, 0.03, 1.5], [3, 3, 3, len(joints), len(joints)])
        clean = np.concatenate(parts)
        noisy = clean + sizes * self.rng.uniform(-1, 1, clean.size)
        return np.concatenate([noisy, self.earlier, self.shown]).astype(np.float32)

    def step(self, action: np.ndarray) -> np.ndarray:
        """Takes an action; returns what is missing from the command [3]."""
        self.data.ctrl[:] = self.task.posture + self.task.action_scale * action
        self.data.xfrc_applied[1, :3] = self._force()
        mujoco.mj_step(self.model, self.data, self.task.frame_skip)
        off = self.command - [*self.read("local_linvel")[:2], self.read("gyro")[2]]
        self.earlier, self.action, self.shown = self.action, action, self.command
        self.until -= 1
        if self.until <= 0:
            share = self.rng.random(3) < (0.9, 0.25, 0.5)
            new = self.rng.uniform(-1, 1, 3) * self.task.command_ranges * share
            self.command = np.where(self.rng.random(3) < 0.5, new, self.command)
            self.until = self._steps(self.rng.exponential(5.0))
        return off

    def _force(self) -> np.ndarray:
        """Returns the push of a step, in N: half a sine over its time."""
        if self.since < self.wait:
            self.since += 1
            angle = self.rng.uniform(0, 2 * math.pi)
            self.pushing, self.way = 0, np.array([math.cos(angle), math.sin(angle), 0])
            return np.zeros(3)
        phase = math.pi * self.pushing * self.task.dt / self.seconds
        size = 0.5 * math.sin(phase) * self.model.body_mass.sum() * self.speed / self.seconds
        self.pushing += 1
        if self.pushing > self._steps(self.seconds):
            self.since = 0
        return size * self.way

    def feet(self) -> np.ndarray:
        """Returns where the feet are along the ground, [4, 2], in m."""
        return np.float32([self.data.site(foot).xpos[:2] for foot in self.task.feet])

    @property
    def fallen(self) -> bool:
        """Returns whether it lies on its back."""
        return bool(self.read("upvector")[2] < 0)


def with_pushes(run: str) -> Found:
    """Drives the robots in MuJoCo's C code from the task's model, with a solver that converges."""
    import seedbed
    from seedbed.policy import restore

    task: Any = restore(run, lambda text: None, True, False).env
    policy, rng = seedbed.load(run, newest=True), np.random.default_rng(SEED)
    model: Any = task.compiled()
    model.opt.iterations, model.opt.ls_iterations = 100, 50
    robots = [Robot(task, model, rng) for _ in range(ROBOTS)]
    lay = tiles_of(task) if model.nmocap else None
    upright, errors = np.ones(ROBOTS, bool), []
    for _ in range(STEPS):
        actions = policy.act({"state": np.stack([robot.sees() for robot in robots])})
        off = np.full((ROBOTS, 3), np.nan)
        if lay is not None:
            places = lay(np.stack([robot.feet() for robot in robots]))
            for robot, boxes in zip(robots, np.asarray(places), strict=True):
                robot.data.mocap_pos[:] = boxes
        for i in np.flatnonzero(upright):
            off[i] = robots[i].step(np.asarray(actions[i], np.float64))
            upright[i] = not robots[i].fallen
        errors.append(off)
    return judged(errors, upright)


def tiles_of(task: Any) -> Any:
    """Draws ground for each robot; returns what turns the places of their feet into those of its boxes."""
    import jax

    from seedbed.envs.device.robots.tiles import Ground

    grounds = jax.vmap(lambda key: Ground.drawn(key, len(task.feet)))(
        jax.random.split(jax.random.key(SEED), ROBOTS)
    )

    def boxes(ground: Any, feet: Any) -> Any:
        return ground._replace(feet=feet).boxes(task.tile_size, task.step_height)

    forward = jax.jit(jax.vmap(boxes))
    return lambda feet: forward(grounds, feet)


def row(seed: int, lines: list[dict[str, Any]], found: dict[str, Any], pushed: bool) -> str:
    """Writes a line of the table; `pushed` is whether it tells of the second judge."""
    last, cells = lines[-1], []
    for name in ("envpool", *(["pushed"] if pushed else [])):
        each = Found(**found[name])
        cells.append(f"{each.error:.3f} m/s, {each.turning:.2f} rad/s | {each.upright} of {ROBOTS}")
    return (
        f"| {seed} | {' | '.join(cells)} | {last['wall_s']:.0f} s | {last['env_steps']:,} | "
        f"{last['env_steps'] / last['wall_s']:,.0f} |"
    )


def main() -> None:
    """Trains, then writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("preset", nargs="?", default="go1/joystick/ppo", choices=TASKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=learning.ROOT / "runs" / "joystick")
    parser.add_argument(
        "--commit", default=learning.head(), help="that trained runs which are there already"
    )
    parser.add_argument("--judge", metavar="RUN", help=argparse.SUPPRESS)
    own, overrides = split_overrides(sys.argv[1:])
    args = parser.parse_args(own)
    more, said = SECOND.get(args.preset, ((), ""))
    pushed = bool(more)
    if args.judge:
        found = {"envpool": in_envpool(args.judge, TASKS[args.preset])}
        if pushed:
            found["pushed"] = with_pushes(args.judge)
        print(json.dumps({name: each._asdict() for name, each in found.items()}))
        return
    runs: dict[int, learning.JudgedRun] = {}
    commands: list[str] = []
    for seed in args.seeds:
        command = ["seedbed", "train", args.preset, "--seed", str(seed), *overrides]
        commands.append(" ".join(command))
        run = args.runs / f"{args.preset.replace('/', '-')}-{seed}"
        runs[seed] = learning.judged(__file__, args.preset, command, run)
        seconds = [lines[-1]["wall_s"] for lines, _ in runs.values()]
        columns = ["seed", "error in EnvPool's task", "upright there"]
        columns += more
        columns += ["wall-clock", "env steps", "env steps/s"]
        blank = " |" * (len(columns) - 4)
        table = [
            f"| {' | '.join(columns)} |",
            "|---" * len(columns) + "|",
            *(row(each, *result, pushed) for each, result in sorted(runs.items())),
            f"| median |{blank} {statistics.median(seconds):.0f} s | | |",
            f"| worst |{blank} {max(seconds):.0f} s | | |",
        ]
        page = learning.Page(table, remark(args.preset) + said, commands, args.commit)
        curves = {each: lines for each, (lines, _) in runs.items()}
        learning.write(args.preset.replace("/", "-"), curves, None, page)
    print("\n".join(table))


if __name__ == "__main__":
    main()
