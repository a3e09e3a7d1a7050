"""Go1 without a joystick: MuJoCo's C code and the published formulas, written plainly, are the oracle."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import plain_tricks as plain
import quadruped
from seedbed import simd
from seedbed.config.defaults import configure
from seedbed.config.device_recipes import joystick_ppo
from seedbed.envs.device.mujoco import TaskState
from seedbed.envs.device.robots.deployment import deployment
from seedbed.envs.names import ON_DEVICE
from seedbed.testing.checks import check_task
from seedbed.types import SeedbedError

STEPS = 72
PLAIN = {"getup": plain.Getup, "handstand": plain.Handstand, "footstand": plain.Footstand}
HOME = [0.1, 0.9, -1.8, -0.1, 0.9, -1.8]
PLACES = {
    # In the air, in the posture; on a side; on the back.
    "getup": (
        [0, 0, 0.3, 1, 0, 0, 0, *HOME, *HOME],
        [0, 0, 0.2, 0.7, 0.7, 0.1, 0, *HOME, *[0.3, 1.5, -2.5] * 2],
        [0, 0, 0.2, 0.1, 0.9, 0.1, 0.4, *[0.2, 3.0, -1.2] * 4],
    ),
    # In the posture; on the front feet; on the front knees.
    "handstand": (
        [0, 0, 0.278, 1, 0, 0, 0, *HOME, *HOME],
        [0, 0, 0.5, 0.7, 0, 0.7, 0, *[0, -0.68, -1.2] * 2, *[0, 1.7, -1.9] * 2],
        [0, 0, 0.25, 0.9, 0, 0.4, 0, *[0, 2.0, -2.7] * 2, *HOME],
    ),
    "footstand": (
        [0, 0, 0.278, 1, 0, 0, 0, *HOME, *HOME],
        [0, 0, 0.5, 0.7, 0, -0.7, 0, *[0, 0.8, -1.6] * 2, *[0, 1.8, -1.2] * 2],
        [0, 0, 0.25, 0.3, 0, 0.95, 0, *HOME, *HOME],
    ),
}


@pytest.fixture(scope="module")
def robots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A file for each task."""
    folder, files = tmp_path_factory.mktemp("tricks"), {}
    for kind in PLAIN:
        path = folder / f"{kind}.xml"
        path.write_text(quadruped.xml(touch="all" if kind == "getup" else "floor"))
        files[kind] = str(path)
    return files


def task_of(kind: str, file: str, **options: Any) -> Any:
    module, name = ON_DEVICE[f"go1/{kind}"].split(":")
    return getattr(importlib.import_module(module), name)(xml_file=file, **options)


class Rollout(NamedTuple):
    """A rollout of MuJoCo, and our steps from each of its states."""

    kind: str
    task: Any
    ours: Any
    actions: np.ndarray
    theirs: dict[str, Any]


@pytest.fixture(scope="module", params=[*PLAIN])
def rollout(request: Any, robots: dict[str, str]) -> Rollout:
    """Steps without noise, with a solver that converges, of terms whose weights are all 1."""
    kind = request.param
    scales = type(task_of(kind, robots[kind]).scales)
    ones = scales(**{field.name: 1.0 for field in dataclasses.fields(scales)})
    task = task_of(kind, robots[kind], noise_level=0.0, solver_iterations=0, scales=ones)
    robot, rng = PLAIN[kind](robots[kind]), np.random.default_rng(0)
    kept = jax.tree.map(np.asarray, task.begin(jax.random.key(0))._replace(key=()))
    before, actions, found = [], [], []
    for number in range(STEPS):
        if number % (STEPS // 3) == 0:
            robot.place(PLACES[kind][number // (STEPS // 3)], rng.uniform(-0.5, 0.5, 6))
        for name in ("qpos", "qvel", "qacc_warmstart"):
            getattr(robot.data, name)[:] = np.float32(getattr(robot.data, name))
        state = [
            np.float32(getattr(robot.data, name)) for name in ("qpos", "qvel", "qacc_warmstart")
        ]
        centre = robot.targets(np.zeros(12))
        earlier = {"action": robot.action, "earlier": robot.earlier, "centre": centre}
        effort = kept._replace(**{name: np.float32(x) for name, x in earlier.items()})
        before.append(TaskState(state[0], np.zeros(3, np.float32), *state[1:], effort))
        actions.append(np.float32(np.clip(0.5 * rng.standard_normal(12), -1, 1)))
        found.append(robot.step(np.float64(actions[-1])))

    def step(inner: TaskState, action: Any) -> Any:
        effort = inner.kept._replace(key=jax.random.key(0))
        opened = blank._replace(inner=inner._replace(kept=effort))
        return task.step(opened, action)

    shapes = jax.eval_shape(task.reset, jax.random.key(0))
    blank = shapes._replace(
        timestep=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes.timestep),
        metrics=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes.metrics),
    )
    stacked, theirs = (jax.tree.map(lambda *x: np.stack(x), *rows) for rows in (before, found))
    ours = jax.jit(simd.vectorize(step))(stacked, np.stack(actions))
    return Rollout(kind, task, ours, np.stack(actions), theirs)


@pytest.mark.slow
def test_observations_are_the_published_ones(rollout):
    assert rollout.ours.timestep.observation.keys() == rollout.theirs["seen"].keys()
    for name, wanted in rollout.theirs["seen"].items():
        off = np.abs(rollout.ours.timestep.observation[name] - wanted)
        np.testing.assert_array_less(off / np.maximum(1.0, np.abs(wanted).max(axis=0)), 1e-4)


@pytest.mark.slow
def test_rewards_are_the_published_ones(rollout):
    ours, theirs = rollout.ours, rollout.theirs
    assert theirs["terms"].keys() == {
        field.name for field in dataclasses.fields(rollout.task.scales)
    }
    for name, wanted in theirs["terms"].items():
        assert np.abs(wanted).max() > 0, name
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(
            ours.metrics[f"reward_{name}"], wanted, rtol=2e-4, atol=1e-4 * scale, err_msg=name
        )
    total = np.maximum(0.02 * sum(theirs["terms"].values()), 0)
    np.testing.assert_allclose(ours.timestep.reward, total, rtol=2e-4, atol=1e-4)
    np.testing.assert_array_equal(ours.timestep.terminated, theirs["fallen"])
    assert theirs["fallen"].any() == (rollout.kind != "getup") and not theirs["fallen"].all()


@pytest.mark.slow
def test_what_is_kept_follows_the_step(rollout):
    """Actions move the joints from where they are, or the targets from where those were."""
    kept, scale = rollout.ours.inner.kept, rollout.task.action_scale
    np.testing.assert_array_equal(kept.action, rollout.actions)
    centre = np.asarray(kept.centre)
    if rollout.kind == "getup":
        np.testing.assert_array_equal(centre, np.asarray(rollout.ours.inner.qpos)[:, 7:])
    else:
        moved = centre[1 : STEPS // 3] - centre[: STEPS // 3 - 1]
        np.testing.assert_allclose(moved, scale * rollout.actions[1 : STEPS // 3], atol=1e-5)


def test_weights_are_the_published_ones(robots):
    stand = {"height": 1.0, "orientation": 1.0, "contact": -0.1, "dof_pos_limits": -0.5}
    stand |= {"pose": -0.1}
    getup = {"orientation": 1.0, "torso_height": 1.0, "posture": 1.0, "stand_still": 1.0}
    getup |= {"action_rate": -0.001, "dof_pos_limits": -0.1, "torques": -1e-5}
    getup |= {"dof_acc": -2.5e-7, "dof_vel": -0.1}
    sizes = [0.2] * 3 + [0.05] * 3
    for kind in PLAIN:
        task = task_of(kind, robots[kind])
        weights = {name: x for name, x in dataclasses.asdict(task.scales).items() if x}
        assert weights == (getup if kind == "getup" else stand)
        joints, velocity = ([0.03], []) if kind == "getup" else ([0.01], [0.1] * 3)
        np.testing.assert_allclose(task._sizes, [*velocity, *sizes, *joints * 12, *[1.5] * 12])
        assert task.dt == pytest.approx(0.02)
        assert task.episode_steps == (300 if kind == "getup" else 500)


@pytest.mark.slow
def test_a_fall_is_over_when_the_episode_opens(robots):
    """Four in ten stand, the others lie in any way; the servos hold all joints where they are."""
    task = task_of("getup", robots["getup"])
    opened = jax.jit(simd.vectorize(task.reset))(jax.random.split(jax.random.key(0), 256))
    qpos, height = np.asarray(opened.inner.qpos), np.asarray(opened.inner.qpos)[:, 2]
    standing = (height > 0.24) & (qpos[:, 3] > 0.95)
    assert 0.3 < standing.mean() < 0.55 and (height < 0.4).all() and height.min() < 0.1
    force = np.asarray(opened.timestep.observation["privileged"])[:, 36:48]
    assert np.abs(force).max() < 35 * 1.0  # were the servos at home, it would be at their limits
    np.testing.assert_array_equal(opened.inner.kept.centre, qpos[:, 7:])
    speeds = np.asarray(opened.inner.qvel)
    assert np.median(np.abs(speeds[:, :6])) < 0.3 and np.isfinite(speeds).all()


def test_hips_need_not_touch_each_other(robots):
    """Their six pairs, of cylinders, are left out of what is simulated, and of nothing else."""
    task = task_of("getup", robots["getup"])
    assert len(task.compiled().exclude_signature) == 6
    assert len(task_of("handstand", robots["handstand"]).compiled().exclude_signature) == 0


@pytest.mark.parametrize("kind", [*PLAIN])
def test_the_tasks_have_a_mirror(kind, robots, tmp_path):
    even = tmp_path / "even.xml"
    even.write_text(quadruped.straight(Path(robots[kind]).read_text()))
    mirror = task_of(kind, str(even)).spec.mirror
    spec = task_of(kind, str(even)).spec.observation
    for name, of in mirror.observation.items():
        assert sorted(of.order) == [*range(spec[name].shape[0])]
    assert mirror.action.order == (3, 4, 5, 0, 1, 2, 9, 10, 11, 6, 7, 8)


@pytest.mark.parametrize("kind", [*PLAIN])
def test_wrong_options_are_named(kind, robots):
    for options, words in (
        ({"noise_level": -1.0}, "noise_level is -1.0; give 0 or more"),
        ({"kp": float("inf")}, "kp is inf; give 0 or more"),
        ({"kd": -0.5}, "kd is -0.5; give 0 or more"),
        ({"solver_iterations": -1}, "solver_iterations is -1; give 0 or more"),
        ({"base_velocity": 3.5}, "base_velocity is 3.5, a float: give"),
        ({"scales": 3}, "scales is 3, an int: give a .*Scales"),
    ):
        with pytest.raises(SeedbedError, match=words):
            task_of(kind, robots[kind], **options)


def test_an_exported_policy_tells_how_actions_move_the_servos(robots):
    getup, stand = (deployment(task_of(kind, robots[kind])) for kind in ("getup", "handstand"))
    assert getup["action_moves"] == "joints" and "initial_target" not in getup
    assert stand["action_moves"] == "target" and stand["last_target"] == "wanted"
    assert "last_target" not in getup
    np.testing.assert_allclose(stand["initial_target"], [*HOME, *HOME], rtol=1e-6)
    assert stand["action_scale"] == [0.3] * 12 and stand["command_names"] == []
    names = ["base_ang_vel", "projected_gravity", "joint_pos", "joint_vel", "actions"]
    assert getup["observation_names"] == names
    assert stand["observation_names"] == ["base_lin_vel", *names]


def test_ppo_learns_them_as_it_learns_to_follow_a_joystick(robots):
    task = task_of("handstand", robots["handstand"])
    assert configure(task).agent == joystick_ppo(task, 1).agent


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*PLAIN])
def test_the_tasks_pass_the_checks_of_tasks(kind, robots):
    check_task(task_of(kind, robots[kind]))
