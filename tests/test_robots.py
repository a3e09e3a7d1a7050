"""Robots with a joystick: MuJoCo's C code and the published formulas, written plainly, are the oracle."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import mirrored
import quadruped
from seedbed import simd
from seedbed.config.presets import PRESETS
from seedbed.config.resolve import resolve_env
from seedbed.envs.device.mujoco import TaskState
from seedbed.envs.device.packaged import packaged_file
from seedbed.envs.device.robots.go1 import Go1Joystick
from seedbed.envs.device.robots.legged import Legged
from seedbed.envs.device.robots.mirror import Asymmetric, sides_of
from seedbed.envs.device.robots.spot import SpotJoystick
from seedbed.testing.checks import check_task
from seedbed.types import SeedbedError

STEPS = 120


@pytest.fixture(scope="module")
def robots(tmp_path_factory: pytest.TempPathFactory) -> dict[type, str]:
    """A file for each task."""
    folder, files = tmp_path_factory.mktemp("robots"), {}
    for kind in (Go1Joystick, SpotJoystick):
        path = folder / f"{kind.__name__}.xml"
        # Spot's feet are in another order than its legs.
        names = quadruped.GO1 if kind is Go1Joystick else ("FR", "FL", "HR", "HL")
        path.write_text(quadruped.xml(names=names))
        files[kind] = str(path)
    return files


@pytest.fixture(scope="module")
def robot(robots: dict[type, str]) -> str:
    return robots[Go1Joystick]


def unit(kind: type, robot: str, **options: Any) -> Any:
    """A task whose terms all have the weight 1, without noise."""
    scales = type(kind.scales)  # type: ignore[attr-defined]
    ones = scales(**{field.name: 1.0 for field in dataclasses.fields(scales)})
    return kind(
        **{"xml_file": robot, "noise_level": 0.0, "scales": ones, "solver_iterations": 0} | options
    )


class SlowGo1:
    """MuJoCo Playground's Go1JoystickFlatTerrain, step by step on mjData; the command is given."""

    feet, scale, clearance, reach = ("FR", "FL", "RR", "RL"), 0.5, 0.1, (1.5, 0.8, 1.2)
    stiffness, damping = 35.0, 0.5

    def __init__(self, robot: str) -> None:
        self.model = mujoco.MjModel.from_xml_path(robot)
        self.model.opt.jacobian = mujoco.mjtJacobian.mjJAC_DENSE
        self.model.opt.tolerance = 0
        self.model.dof_damping[6:] = self.damping
        self.model.actuator_gainprm[:, 0] = self.stiffness
        self.model.actuator_biasprm[:, 1] = -self.stiffness
        self.data = mujoco.MjData(self.model)
        self.home = self.model.key("home").qpos[7:]
        self.action = self.earlier = np.zeros(12)
        self.air, self.contact, self.peak = np.zeros(4), np.zeros(4, bool), np.zeros(4)

    def read(self, name: str) -> np.ndarray:
        return self.data.sensor(name).data.copy()

    def step(self, action: np.ndarray, command: np.ndarray) -> dict[str, Any]:
        self.data.ctrl[:] = self.targets(action)
        mujoco.mj_step(self.model, self.data, 5)
        contact = np.array([self.read(f"{foot}_floor_found")[0] > 0 for foot in self.feet])
        first = (self.air > 0) & (contact | self.contact)
        self.air = self.air + 0.02
        height = np.array([self.data.site(foot).xpos[2] for foot in self.feet])
        self.peak = np.maximum(self.peak, height)
        seen = {"state": self.state(command), "privileged": self.privileged()}
        terms = self.terms(action, command, contact, first, height)
        self.earlier, self.action = self.action, action
        self.air, self.contact = self.air * ~contact, contact
        self.peak = self.peak * ~contact
        return {"seen": seen, "terms": terms, "fallen": self.fallen()}

    def targets(self, action: np.ndarray) -> np.ndarray:
        return self.home + self.scale * action

    def fallen(self) -> bool:
        return self.read("upvector")[2] < 0

    def gravity(self) -> np.ndarray:
        return self.data.site("imu").xmat.reshape(3, 3).T @ [0, 0, -1]

    def state(self, command: np.ndarray) -> np.ndarray:
        body = [self.read("local_linvel"), self.read("gyro"), self.gravity()]
        joints = [self.data.qpos[7:] - self.home, self.data.qvel[6:]]
        return np.hstack([*body, *joints, self.action, command])

    def privileged(self) -> np.ndarray:
        body = ["gyro", "accelerometer"]
        feet = np.hstack([self.read(f"{foot}_global_linvel") for foot in self.feet])
        return np.hstack(
            [
                *map(self.read, body),
                self.gravity(),
                self.read("local_linvel"),
                self.read("global_angvel"),
                self.data.qpos[7:] - self.home,
                self.data.qvel[6:],
                self.data.actuator_force,
                self.contact,
                feet,
                self.air,
                np.zeros(4),
            ]
        )

    def terms(self, action, command, contact, first, height) -> dict[str, float]:
        joints, force = self.data.qpos[7:], self.data.actuator_force
        low, high = self.model.jnt_range[1:].T * 0.95
        speed = np.array([np.hypot(*self.read(f"{foot}_global_linvel")[:2]) for foot in self.feet])
        told = np.linalg.norm(command) > 0.01
        off = np.sum((command[:2] - self.read("local_linvel")[:2]) ** 2)
        return {
            "tracking_lin_vel": np.exp(-off / 0.25),
            "tracking_ang_vel": np.exp(-((command[2] - self.read("gyro")[2]) ** 2) / 0.25),
            "lin_vel_z": self.read("global_linvel")[2] ** 2,
            "ang_vel_xy": np.sum(self.read("global_angvel")[:2] ** 2),
            "orientation": np.sum(self.read("upvector")[:2] ** 2),
            "dof_pos_limits": np.sum(np.maximum(low - joints, 0) + np.maximum(joints - high, 0)),
            "pose": np.exp(-np.sum((joints - self.home) ** 2 * ([1, 1, 0.1] * 4))),
            "termination": float(self.fallen()),
            "stand_still": 0.0 if told else np.abs(joints - self.home).sum(),
            "torques": np.linalg.norm(force) + np.abs(force).sum(),
            "action_rate": np.sum((action - self.action) ** 2),
            "energy": np.sum(np.abs(self.data.qvel[6:]) * np.abs(force)),
            "feet_clearance": np.sum(np.abs(height - self.clearance) * np.sqrt(speed)),
            "feet_height": np.sum((self.peak / self.clearance - 1) ** 2 * first) * told,
            "feet_slip": np.sum(speed**2 * contact) * told,
            "feet_air_time": np.sum((self.air - 0.1) * first) * told,
        }


class SlowSpot(SlowGo1):
    """SpotFlatTerrainJoystick."""

    feet, scale, clearance, reach = ("FL", "FR", "HL", "HR"), 0.3, 0.12, (1.0, 0.8, 1.0)
    stiffness, damping = 300.0, 1.0
    told = np.zeros(12)  # to the servos in the last step
    history = np.zeros(36)

    def targets(self, action: np.ndarray) -> np.ndarray:
        low, high = self.model.actuator_ctrlrange.T
        self.told = np.clip(super().targets(action), low, high)
        return self.told

    def fallen(self) -> bool:
        return self.read("upvector")[2] < 0.85

    def places(self) -> np.ndarray:
        return np.hstack([self.read(f"{foot}_pos") for foot in self.feet])

    def state(self, command: np.ndarray) -> np.ndarray:
        self.history = np.roll(self.history, 12)
        self.history[:12] = self.data.qpos[7:] - self.told
        body = [self.read("gyro"), self.read("upvector"), self.data.qpos[7:] - self.home]
        return np.hstack([*body, self.history, self.places(), self.action, command])

    def privileged(self) -> np.ndarray:
        names = ("gyro", "accelerometer", "upvector", "local_linvel", "global_angvel")
        feet = np.hstack([self.read(f"{foot}_global_linvel") for foot in self.feet])
        joints = [self.data.qpos[7:] - self.home, self.places(), self.data.qvel[6:]]
        rest = [self.data.actuator_force, self.contact, feet, self.air, np.zeros(3)]
        return np.hstack([*map(self.read, names), *joints, *rest])

    def terms(self, action, command, contact, first, height) -> dict[str, float]:
        terms = super().terms(action, command, contact, first, height)
        for name in ("dof_pos_limits", "pose", "stand_still"):
            del terms[name]
        still = np.linalg.norm(command) < 0.01
        bent = np.sum((self.data.qpos[7:] - self.home) ** 2)
        speed = [np.hypot(*self.read(f"{foot}_global_linvel")[:2]) for foot in self.feet]
        return terms | {
            "posture": np.exp(-10 * bent) if still else 1.0,
            "action_rate": terms["action_rate"]
            + np.sum((action - 2 * self.action + self.earlier) ** 2),
            "feet_slip": np.sum(np.square(speed) * contact),
        }


SLOW = {Go1Joystick: SlowGo1, SpotJoystick: SlowSpot}


def commands(reach: tuple[float, ...]) -> np.ndarray:
    """A command for each step; a third of them are 0."""
    drawn = np.random.default_rng(1).uniform(-1, 1, (STEPS // 10, 3)) * reach
    drawn[::3] = 0
    return np.repeat(drawn, 10, axis=0)


@pytest.fixture(
    scope="module", params=[Go1Joystick, pytest.param(SpotJoystick, marks=pytest.mark.slow)]
)
def rolled(request: Any, robots: dict[type, str]) -> tuple[Any, Any, dict[str, Any]]:
    """A rollout of MuJoCo from the posture, and ours from each of its states."""
    kind = request.param
    task, slow = unit(kind, robots[kind]), SLOW[kind](robots[kind])
    rng = np.random.default_rng(0)
    data = slow.data
    mujoco.mj_resetDataKeyframe(slow.model, data, 0)
    data.qvel[:6] = rng.uniform(-0.5, 0.5, 6)
    mujoco.mj_forward(slow.model, data)
    kept = jax.tree.map(np.asarray, task.begin(jax.random.key(0))._replace(key=()))
    before, actions, found = [], [], []
    for command in commands(slow.reach):
        for name in ("qpos", "qvel", "qacc_warmstart"):
            getattr(data, name)[:] = np.float32(getattr(data, name))
        state = [np.float32(getattr(data, name)) for name in ("qpos", "qvel", "qacc_warmstart")]
        feet = kept.feet._replace(
            contact=slow.contact.copy(),
            air_time=np.float32(slow.air),
            peak=np.float32(slow.peak),
        )
        action = np.float32(np.clip(0.25 / slow.scale * rng.standard_normal(12), -1, 1))
        ride = kept._replace(
            command=np.float32(command),
            action=np.float32(slow.action),
            earlier=np.float32(slow.earlier),
            feet=feet,
            memory=np.float32(slow.history) if kind is SpotJoystick else (),
            until=np.int32(9),
        )
        before.append(TaskState(state[0], np.zeros(3, np.float32), *state[1:], ride))
        actions.append(action)
        found.append(slow.step(np.float64(action), command))

    def step(inner: TaskState, action: Any) -> Any:
        ride = inner.kept._replace(key=jax.random.key(0))
        return task.step(blank._replace(inner=inner._replace(kept=ride)), action)

    shapes = jax.eval_shape(task.reset, jax.random.key(0))
    blank = shapes._replace(
        timestep=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes.timestep),
        metrics=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes.metrics),
    )
    stacked, acted = jax.tree.map(lambda *leaves: np.stack(leaves), *before), np.stack(actions)
    theirs = jax.tree.map(lambda *leaves: np.stack(leaves), *found)
    return jax.jit(simd.vectorize(step))(stacked, acted), acted, theirs


def test_observations_are_the_published_ones(rolled):
    ours, _, theirs = rolled
    assert (theirs["terms"]["feet_slip"] > 0).any() and not theirs["fallen"][:5].any()
    for name, wanted in theirs["seen"].items():
        scale = np.maximum(1.0, np.abs(wanted).max(axis=0))
        np.testing.assert_array_less(np.abs(ours.timestep.observation[name] - wanted) / scale, 1e-4)


def test_rewards_are_the_published_ones(rolled):
    ours, _, theirs = rolled
    for name, wanted in theirs["terms"].items():
        assert np.abs(wanted).max() > 0 or name in ("termination", "dof_pos_limits"), name
        np.testing.assert_allclose(
            ours.metrics[f"reward_{name}"], wanted, rtol=2e-4, atol=1e-4, err_msg=name
        )
    total = np.maximum(0.02 * sum(theirs["terms"].values()), 0)
    np.testing.assert_allclose(ours.timestep.reward, total, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(ours.timestep.terminated, theirs["fallen"])


def test_a_robot_whose_sensor_is_turned_to_a_side_has_no_mirror(robot, tmp_path):
    xml, path = Path(robot).read_text(), tmp_path / "robot.xml"

    def has_mirror(sensor: str) -> bool:
        path.write_text(
            quadruped.straight(xml).replace('pos="-.016 0 -.006" euler="0 .1 0"', sensor)
        )
        return unit(Go1Joystick, str(path)).spec.mirror is not None

    assert unit(Go1Joystick, robot).spec.mirror is None
    assert has_mirror('pos="-.016 0 -.006" euler="0 .1 0"')
    assert not has_mirror('pos="-.016 0 -.006" euler="0 0 .1"')
    assert has_mirror('pos="-.016 -.066 -.006"'), "where it sits is not compared"
    assert not has_mirror('pos="-.016 -.066 -.006" euler=".1 0 0"')
    assert Legged(xml_file=str(path)).spec.mirror is not None, "its task reads no sensor"


def test_feet_are_not_seen_in_a_mirror_from_a_frame_that_is_turned(robots, tmp_path):
    xml, path = quadruped.straight(Path(robots[SpotJoystick]).read_text()), tmp_path / "robot.xml"
    for turn in ("0 .1 0", "0 0 .1"):
        site = f'<site name="other" pos="0 0 0" euler="{turn}"/><site name="imu"'
        path.write_text(xml.replace('<site name="imu"', site).replace('"imu"/>', '"other"/>', 1))
        assert (unit(SpotJoystick, str(path)).spec.mirror is None) == (turn == "0 0 .1")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Go1Joystick, SpotJoystick])
def test_a_step_in_the_mirror_shows_the_image_of_the_step(kind, robots, tmp_path):
    even = tmp_path / "even.xml"
    even.write_text(quadruped.straight(Path(robots[kind]).read_text()))
    task, rng = unit(kind, str(even)), np.random.default_rng(0)
    model = task.compiled()
    feet = task.feet
    sides = sides_of(model, task.at_home, feet)
    # A servo that turns its joint the other way has the other sign; a stronger one has no image.
    model.actuator_gear[0, 0] = -1
    geared = sides_of(model, task.at_home, feet)
    assert geared.joints == sides.joints
    wrong = np.array(geared.servos.signs) != sides.servos.signs
    assert sorted(np.flatnonzero(wrong)) == sorted([0, sides.servos.order[0]])
    model.actuator_gainprm[0, 0] *= 2
    with pytest.raises(Asymmetric, match="a gain of the joint FR_hip is .*, and in the mirror"):
        sides_of(model, task.at_home, feet)
    opened = jax.jit(simd.vectorize(task.reset))(jax.random.split(jax.random.key(0), 64))
    actions = np.float32(rng.uniform(-1, 1, (64, 12)))
    ride = opened.inner.kept
    kept = ride._replace(
        action=np.float32(rng.uniform(-1, 1, (64, 12))),
        memory=np.float32(rng.uniform(-1, 1, (64, 36))) if kind is SpotJoystick else (),
        key=None,
    )
    before = opened.inner._replace(
        qpos=opened.inner.qpos
        + rng.uniform(-0.05, 0.05, opened.inner.qpos.shape).astype(np.float32),
        qvel=np.float32(rng.uniform(-1, 1, opened.inner.qvel.shape)),
        kept=kept,
    )

    def memory(turned: mirrored.Turned, feet: list[int]) -> Any:
        if kind is not SpotJoystick:
            return ()
        parts = np.split(kept.memory, 3, axis=1)
        return np.concatenate([turned("servo_error", part) for part in parts], axis=1)

    def step(inner: TaskState, action: Any) -> Any:
        ride = inner.kept._replace(key=jax.random.key(0))
        opened = task.reset(jax.random.key(0))
        return task.step(opened._replace(inner=inner._replace(kept=ride)), action)

    forward = jax.jit(simd.vectorize(step))
    ours = forward(before, actions)
    image = forward(*mirrored.shown(task, before, actions, memory))
    mirrored.require_image(task, ours.timestep, image.timestep)


def test_what_is_kept_follows_the_step(rolled):
    ours, actions, _ = rolled
    kept = ours.inner.kept
    np.testing.assert_array_equal(kept.action, actions)
    np.testing.assert_array_equal(kept.earlier[1:], actions[:-1])
    assert not kept.feet.air_time[kept.feet.contact].any()
    assert (kept.feet.air_time[~kept.feet.contact] > 0).all()


def play(task: Any, count: int, steps: int, actions: float = 0.0) -> Any:
    """Episodes of a task with one action; leaves [steps, count, ...]."""
    opened = jax.jit(jax.vmap(task.reset))(jax.random.split(jax.random.key(0), count))
    action = jnp.full((count, 12), actions, jnp.float32)
    step = simd.vectorize(task.step)

    def forward(state: Any, _: None) -> Any:
        now = step(state, action)
        return now, now

    return opened, jax.jit(lambda state: jax.lax.scan(forward, state, None, length=steps))(opened)[
        1
    ]


@pytest.mark.slow
def test_commands_change_and_stand_still(robot):
    """An episode opens with any command; later each number is anew with probability 1/2, and often 0."""
    task = Go1Joystick(xml_file=robot)
    opened, played = play(task, 512, 300)
    first = np.asarray(opened.inner.kept.command)
    assert (np.abs(first).max(0) > 0.98 * np.array([1.5, 0.8, 1.2])).all() and (first != 0).all()
    command = np.asarray(played.inner.kept.command)
    changed = (command[1:] != command[:-1]).any(-1)
    # An exponential time of 5 s is over in a step of 0.02 s with probability 1/250; one draw in eight
    # changes no number, and a number that is 0 already may stay so.
    assert changed.mean() == pytest.approx(0.8 / 250, rel=0.15)
    still = (command[-1] == 0).mean(0) / (command[-1] != first).mean(0)
    np.testing.assert_allclose(still, [0.1, 0.75, 0.5], atol=0.08)
    shown = np.asarray(played.timestep.observation["state"][..., -3:])
    np.testing.assert_array_equal(shown[1:], command[:-1])


@pytest.mark.slow
def test_spots_commands_last_four_seconds(robots):
    opened, played = play(SpotJoystick(xml_file=robots[SpotJoystick]), 256, 405)
    first, command = np.asarray(opened.inner.kept.command), np.asarray(played.inner.kept.command)
    changed = (command[1:] != command[:-1]).any((1, 2))
    assert np.flatnonzero(changed).tolist() == [199, 400]
    assert (first == 0).all(1).mean() == pytest.approx(0.1, abs=0.06)
    assert (np.abs(command).max((0, 1)) > 0.97 * np.array([1.0, 0.8, 1.0])).all()


@pytest.mark.slow
def test_noise_has_its_size_and_spares_critics(robot):
    options = {"xml_file": robot}
    noisy, clean = (
        jax.tree.map(
            lambda first, later: np.concatenate([first[None], later]),
            *(part.timestep.observation for part in play(task, 64, 20)),
        )
        for task in (Go1Joystick(**options, noise_level=level) for level in (1.0, 0.0))
    )
    off = np.asarray(noisy["state"] - clean["state"])
    for part, size in ((slice(0, 3), 0.1), (slice(3, 6), 0.2), (slice(6, 9), 0.05)):
        assert 0.95 * size < np.abs(off[..., part]).max() <= size * 1.001
    for part, size in ((slice(9, 21), 0.03), (slice(21, 33), 1.5)):
        assert 0.98 * size < np.abs(off[..., part]).max() <= size * 1.001
    assert not off[..., 33:].any() and (off[1:, :, 0] != off[:-1, :, 0]).all()
    np.testing.assert_array_equal(noisy["privileged"], clean["privileged"])


@pytest.mark.slow
def test_pushes_come_as_often_and_as_hard_as_they_should(robot):
    """A push is half a sine over its time, whose impulse is about the mass times the speed over pi."""
    task = Go1Joystick(xml_file=robot, push_speed=3.0, noise_level=0.0)
    opened, played = play(task, 64, 400)
    push = np.asarray(played.timestep.observation["privileged"][..., -4:-1])
    assert (push[..., 2] == 0).all()
    size = np.linalg.norm(push, axis=-1)
    kept = opened.inner.kept.push
    mass = float(np.sum(task.physics_model().body_mass))
    for i in range(64):
        waited, steps = int(kept.wait[i]), int(kept.steps[i])
        assert not size[:waited, i].any()
        one = size[waited : waited + steps + 1, i]
        phase = np.pi * np.arange(steps + 1) * 0.02 / float(kept.seconds[i])
        half_sine = 0.5 * np.sin(phase) * mass * float(kept.speed[i]) / float(kept.seconds[i])
        np.testing.assert_allclose(one, np.abs(half_sine), rtol=1e-3, atol=1e-2)
        assert not size[waited + steps + 2 : 2 * waited, i].any()
    # They push: an idle robot moves where it is pushed.
    still = play(dataclasses.replace(task, push_speed=0.0), 64, 400)[1]
    assert not np.asarray(still.timestep.observation["privileged"][..., -4:]).any()
    assert np.abs(np.asarray(played.inner.qpos - still.inner.qpos)).max() > 0.05


def test_an_action_may_come_a_step_late(robot):
    late = Go1Joystick(xml_file=robot, action_latency=1)
    kept = late.begin(jax.random.key(0))._replace(action=jnp.full(12, 0.5))
    np.testing.assert_allclose(late.control(kept, jnp.ones(12)), late.posture + 0.25)
    now = dataclasses.replace(late, action_latency=0)
    np.testing.assert_allclose(now.control(kept, jnp.ones(12)), now.posture + 0.5)


def test_a_robot_may_do_without_its_velocity(robot):
    blind = Go1Joystick(xml_file=robot, base_velocity=False).spec.observation
    assert blind["state"].shape == (45,) and blind["privileged"].shape == (75,)


@pytest.mark.slow
def test_the_task_passes_the_checks_of_tasks(robot):
    check_task(Go1Joystick(xml_file=robot, push_speed=1.0))


def test_weights_are_the_published_ones():
    """Of those that the two robots share, and of their own."""
    shared = {"ang_vel_xy": -0.05, "orientation": -5.0, "termination": -1.0, "torques": -0.0002}
    shared |= {"energy": -0.001, "feet_clearance": -2.0, "feet_slip": -0.1, "feet_air_time": 0.1}
    shared |= {"action_rate": -0.01}
    go1 = {"tracking_lin_vel": 1.0, "tracking_ang_vel": 0.5, "lin_vel_z": -0.5, "pose": 0.5}
    go1 |= {"dof_pos_limits": -1.0, "stand_still": -1.0, "feet_height": -0.2}
    spot = {"tracking_lin_vel": 1.5, "tracking_ang_vel": 0.8, "lin_vel_z": -2.0, "posture": 1.0}
    spot |= {"feet_height": -0.1}
    assert dataclasses.asdict(Go1Joystick.scales) == shared | go1
    assert dataclasses.asdict(SpotJoystick.scales) == shared | spot


def test_servos_have_the_gains_of_the_task(robot):
    model = Go1Joystick(xml_file=robot, kp=20.0, kd=0.7).physics_model()
    assert (model.actuator_gainprm[:, 0] == 20).all() and (
        model.actuator_biasprm[:, 1] == -20
    ).all()
    assert not np.asarray(model.dof_damping[:6]).any()
    np.testing.assert_allclose(model.dof_damping[6:], 0.7)


def test_joints_and_servos_without_limits_may_go_anywhere(robot, tmp_path):
    """A range that a file does not have is 0 0 in MuJoCo's model."""
    free = tmp_path / "free.xml"
    text = Path(robot).read_text().replace('range="-2.8 -.9"', 'range="-2.8 -.9" limited="false"')
    free.write_text(text.replace('inheritrange="1"', ""))
    tasks = [Go1Joystick(xml_file=str(each)) for each in (robot, free)]
    far = jnp.full(12, 9.0)
    beyond = [float(task.beyond_limits(far)) for task in tasks]
    ranges = np.array([[-0.86, 0.86], [-0.7, 4.5], [-2.8, -0.9]])
    kept = 9 - ranges[:, 1] + 0.025 * (ranges[:, 1] - ranges[:, 0])
    np.testing.assert_allclose(beyond, [4 * kept.sum(), 4 * kept[:2].sum()], rtol=1e-5)
    assert (
        np.isfinite(tasks[0].target_bounds).all() and not np.isfinite(tasks[1].target_bounds).any()
    )


def test_wrong_options_are_named(robot, tmp_path):
    for options, words in (
        ({"action_latency": 2}, "action_latency is 2; give 0 or 1"),
        ({"noise_level": -1.0}, "noise_level is -1.0; give 0 or more"),
        ({"push_speed": float("nan")}, "push_speed is nan; give 0 or more"),
        ({"tracking_sigma": 0.0}, "tracking_sigma is 0.0; give more than 0"),
        ({"command_ranges": (1.0, 2.0)}, "command_ranges is .*, a tuple: give a tuple of a number"),
        ({"command_ranges": (1.0, 2.0, -1.0)}, "command_ranges are .*; give three, 0 or more"),
        ({"scales": 3}, "scales is 3, an int: give a Go1Scales"),
    ):
        with pytest.raises(SeedbedError, match=words):
            Go1Joystick(xml_file=robot, **options)
    other = tmp_path / "other.xml"
    other.write_text(quadruped.xml(home="stand"))
    with pytest.raises(SeedbedError, match="has no keyframe 'home', the posture"):
        Go1Joystick(xml_file=str(other)).spec  # noqa: B018


def test_missing_models_are_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SeedbedError, match=r'go1/.* pip install "seedbed\[robots\]"'):
        packaged_file("playground/locomotion/go1/xmls/scene.xml")


def test_a_file_of_the_packages_is_found(monkeypatch, tmp_path):
    folder = tmp_path / "mujoco/playground/assets/mujoco_playground/_src/locomotion"
    folder.mkdir(parents=True)
    (folder / "robot.xml").write_text(quadruped.xml())

    def find(name: str) -> Any:
        return type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})

    monkeypatch.setattr("importlib.util.find_spec", find)
    assert packaged_file("playground/locomotion/robot.xml") == folder / "robot.xml"
    with pytest.raises(SeedbedError, match=r"have no .*other.xml: check the name"):
        packaged_file("playground/locomotion/other.xml")


@pytest.mark.parametrize(
    ("robot", "changed"),
    [
        ("go1", {"push_speed": 1.0, "tracking_sigma": 0.5}),
        ("spot", {"push_speed": 1.0, "tracking_sigma": 0.5}),
    ],
)
def test_presets_train_the_task_of_their_name_with_other_weights_of_speed(robot, changed):
    env, usual = PRESETS[f"{robot}/joystick/ppo"]().env, resolve_env(f"{robot}/joystick")
    scales = dataclasses.replace(usual.scales, tracking_lin_vel=4.0, tracking_ang_vel=2.0)
    assert env == dataclasses.replace(usual, scales=scales, **changed)
