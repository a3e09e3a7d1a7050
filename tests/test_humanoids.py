"""Humanoids with a joystick: MuJoCo's C code and the published formulas, written plainly, are the oracle."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import biped
import mirrored
import plain_humanoids as plain
from seedbed import simd
from seedbed.envs.device.mujoco import TaskState
from seedbed.envs.device.robots.humanoid import Gait
from seedbed.envs.names import ON_DEVICE
from seedbed.testing.checks import check_task
from seedbed.types import SeedbedError

STEPS = 72
PLAIN = {
    "t1": plain.PlainT1,
    "g1": plain.PlainG1,
    "h1": plain.PlainH1,
    "berkeley": plain.PlainBerkeley,
    "apollo": plain.PlainApollo,
    "op3": plain.PlainOp3,
}


@pytest.fixture(scope="module")
def bipeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A file for each task."""
    folder, files = tmp_path_factory.mktemp("bipeds"), {}
    for kind in PLAIN:
        path = folder / f"{kind}.xml"
        path.write_text(biped.xml(kind))
        files[kind] = str(path)
    return files


def task_of(kind: str, file: str, **options: Any) -> Any:
    module, name = ON_DEVICE[f"{kind}/joystick"].split(":")
    return getattr(importlib.import_module(module), name)(xml_file=file, **options)


def unit(kind: str, file: str) -> Any:
    """A task whose terms all have the weight 1, without noise and kicks, with a solver that converges."""
    scales = type(task_of(kind, file).scales)
    ones = scales(**{field.name: 1.0 for field in dataclasses.fields(scales)})
    options = {"noise_level": 0.0, "push_speed": 0.0, "solver_iterations": 0}
    return task_of(kind, file, scales=ones, **options)


def commands(reach: tuple[float, ...]) -> np.ndarray:
    """A command for each step: twelve each of six."""
    shares = [[0.7, 0.3, -0.5], [0, 0, 0], [-0.4, -0.6, 0.2], [0.3, 0.05, 0], [0, 0, 0], [0, 1, 0]]
    return np.float32(np.repeat(shares, STEPS // 6, axis=0) * np.array(reach))


def remembered(kind: str, robot: Any, memory: Any, seen: Any) -> tuple[Any, Any]:
    """What our task remembers, and shows, where the plain one is."""
    if kind == "op3":
        history = np.float32(robot.history)
        seen = seen._replace(command=history[6:9])
        return np.concatenate([history[:6], np.zeros(3, np.float32), history[9:]]), seen
    phase = np.float32(robot.phase)
    gait = Gait(phase, phase, np.float32(2 * np.pi * 0.02 * robot.hertz))
    if kind != "h1":
        return gait, seen
    told = {"hertz": robot.hertz, "top": robot.top, "targets": robot.data.ctrl}
    return memory._replace(gait=gait, **{name: np.float32(x) for name, x in told.items()}), seen


class Rollout(NamedTuple):
    """A rollout of MuJoCo, and what makes a step of ours from each of its states."""

    kind: str
    task: Any
    before: TaskState
    actions: np.ndarray
    found: dict[str, Any]
    step: Any


@pytest.fixture(scope="module", params=[*PLAIN])
def rollout(request: Any, bipeds: dict[str, str]) -> Rollout:
    """A rollout of MuJoCo from the posture."""
    kind = request.param
    task, robot = unit(kind, bipeds[kind]), PLAIN[kind](bipeds[kind])
    rng, data = np.random.default_rng(0), robot.data
    data.qvel[:6] = rng.uniform(-0.5, 0.5, 6)
    data.ctrl[:] = 0.0 if kind == "h1" else robot.pose
    mujoco.mj_forward(robot.model, data)
    kept = jax.tree.map(np.asarray, task.begin(jax.random.key(0))._replace(key=()))
    before, actions, found = [], [], []
    for command in commands(robot.reach):
        for name in ("qpos", "qvel", "qacc_warmstart"):
            getattr(data, name)[:] = np.float32(getattr(data, name))
        state = [np.float32(getattr(data, name)) for name in ("qpos", "qvel", "qacc_warmstart")]
        feet = kept.feet._replace(
            contact=robot.contact.copy(),
            air_time=np.float32(robot.air),
            peak=np.float32(robot.peak),
        )
        memory, seen = remembered(kind, robot, kept.memory, kept.seen)
        action = np.float32(
            np.clip(0.35 / robot.scale * rng.standard_normal(robot.model.nu), -1, 1)
        )
        ride = kept._replace(
            command=np.float32(command),
            action=np.float32(robot.action),
            earlier=np.float32(robot.earlier),
            feet=feet,
            memory=memory,
            seen=seen,
            until=np.int32(9),
        )
        before.append(TaskState(state[0], np.zeros(3, np.float32), *state[1:], ride))
        actions.append(action)
        found.append(robot.step(np.float64(action), np.float64(command)))

    def step(inner: TaskState, action: Any) -> Any:
        ride = inner.kept._replace(key=jax.random.key(0))
        opened = task.reset(jax.random.key(0))
        return task.step(opened._replace(inner=inner._replace(kept=ride)), action)

    stacked, theirs = (jax.tree.map(lambda *x: np.stack(x), *rows) for rows in (before, found))
    return Rollout(kind, task, stacked, np.stack(actions), theirs, jax.jit(simd.vectorize(step)))


@pytest.fixture(scope="module")
def rolled(rollout: Rollout) -> tuple[Any, Any, dict[str, Any]]:
    """Our steps from the states of a rollout of MuJoCo, the task, and MuJoCo's steps."""
    return rollout.step(rollout.before, rollout.actions), rollout.task, rollout.found


def memory_in_mirror(rollout: Rollout, turned: mirrored.Turned, feet: list[int]) -> Any:
    """What the robots of a rollout remember as a mirror shows it."""
    memory = rollout.before.kept.memory
    if rollout.kind == "op3":
        of = rollout.task.mirror().observation["state"]
        return memory[:, list(of.order)] * np.array(of.signs, np.float32)
    gait = memory.gait if rollout.kind == "h1" else memory
    gait = gait._replace(phase=gait.phase[:, feet], shown=gait.shown[:, feet])
    if rollout.kind != "h1":
        return gait
    servos = {x: turned("joint_pos", getattr(memory, x)) for x in ("targets", "speeds", "errors")}
    return memory._replace(gait=gait, **servos)


@pytest.mark.slow
def test_a_step_in_the_mirror_shows_the_image_of_the_step(rollout):
    def memory(turned: mirrored.Turned, feet: list[int]) -> Any:
        return memory_in_mirror(rollout, turned, feet)

    ours = rollout.step(rollout.before, rollout.actions).timestep
    image = rollout.step(*mirrored.shown(rollout.task, rollout.before, rollout.actions, memory))
    mirrored.require_image(rollout.task, ours, image.timestep)


@pytest.mark.slow
def test_observations_are_the_published_ones(rolled):
    ours, _, theirs = rolled
    assert ours.timestep.observation.keys() == theirs["seen"].keys()
    for name, wanted in theirs["seen"].items():
        scale = np.maximum(1.0, np.abs(wanted).max(axis=0))
        np.testing.assert_array_less(np.abs(ours.timestep.observation[name] - wanted) / scale, 1e-4)


@pytest.mark.slow
def test_rewards_are_the_published_ones(rolled):
    ours, task, theirs = rolled
    assert theirs["terms"].keys() == {field.name for field in dataclasses.fields(task.scales)}
    never = {"contact_force", "dof_pos_limits", "feet_distance", "collision", "termination"}
    if task.scales.__class__.__name__ == "H1Scales":
        never |= {"feet_air_time"}
    for name, wanted in theirs["terms"].items():
        assert np.abs(wanted).max() > 0 or name in never, name
        np.testing.assert_allclose(
            ours.metrics[f"reward_{name}"], wanted, rtol=2e-4, atol=1e-4, err_msg=name
        )
    total = np.maximum(0.02 * sum(theirs["terms"].values()), task.lowest_reward)
    np.testing.assert_allclose(ours.timestep.reward, total, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(ours.timestep.terminated, theirs["fallen"])


def test_a_gait_is_the_published_one():
    """Its phase goes round, and feet rise along a cubic, then sink."""
    gait = jax.tree.map(jnp.asarray, Gait.starting(jnp.float32(1.4), 0.02))
    np.testing.assert_allclose(gait.seen(), [1, -1, 0, 0], atol=1e-6)
    later, phase = jax.jit(Gait.later), np.array([0, np.pi])
    heights = jax.jit(lambda gait: gait.heights(0.15))
    for _ in range(60):
        shown, phase = phase, np.fmod(phase + 2 * np.pi * 0.028 + np.pi, 2 * np.pi) - np.pi
        gait = later(gait)
        np.testing.assert_allclose(gait.seen(), [*np.cos(shown), *np.sin(shown)], atol=1e-4)
        wanted = [plain.swing(each, 0.15) for each in phase]
        np.testing.assert_allclose(heights(gait), wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["t1", "g1"])
def test_a_gait_may_rest_while_the_command_is_none(kind, bipeds):
    task = task_of(kind, bipeds[kind])
    ride = task.begin(jax.random.key(0))
    for command, rests in ((jnp.zeros(3), kind == "t1"), (jnp.array([0.3, 0, 0]), False)):
        told = ride._replace(command=command)
        gait = task.remembered(told, None, None, jnp.zeros(13))
        wanted = np.full(2, np.pi) if rests else ride.memory.later().phase
        np.testing.assert_allclose(gait.phase, wanted, rtol=1e-6)
        np.testing.assert_array_equal(gait.shown, ride.memory.phase)
        assert task.remembered(told, None, None, None) is told.memory  # when an episode opens
    low, high = (1.25, 1.75) if kind == "t1" else (1.25, 1.5)
    draw = jax.vmap(lambda key: task.first_memory(key).advance)
    hertz = draw(jax.random.split(jax.random.key(1), 500)) / (2 * np.pi * 0.02)
    assert low <= hertz.min() < low + 0.01 and high - 0.01 < hertz.max() <= high


def test_kicks_come_at_equal_times_with_speeds_of_their_own(bipeds):
    """Between kicks are 5 to 10 s; one adds 0.1 to 2 m/s along the ground to the trunk's velocity."""
    task = task_of("g1", bipeds["g1"])
    keys = jax.random.split(jax.random.key(0), 64)
    opened = jax.vmap(lambda key: task.first_push(list(jax.random.split(key, 3))))(keys)

    def later(push: Any, key: Any) -> Any:
        moved = jax.vmap(task.next_push)(push, jax.random.split(key, 64))
        return moved, moved

    pushes = jax.lax.scan(later, opened, jax.random.split(jax.random.key(1), 1100))[1]
    struck = np.asarray(pushes.since >= pushes.wait)
    # A push that stands after n steps acts in step n + 1, as in Playground every INTERVAL steps.
    for i in range(64):
        interval = int(opened.wait[i]) + 1
        assert 250 <= interval <= 500
        at = np.flatnonzero(struck[:, i]) + 2
        np.testing.assert_array_equal(at, interval * np.arange(1, at.size + 1))
    speeds = np.asarray(pushes.speed)[struck]
    assert 0.1 <= speeds.min() < 0.25 and 1.8 < speeds.max() <= 2.0
    ride = task.begin(jax.random.key(0))
    number = int(np.flatnonzero(struck[:, 0])[0])
    for n, kicked in ((number, True), (number + 1, False)):
        push = jax.tree.map(lambda leaf, n=n: leaf[n, 0], pushes)
        state = TaskState((), (), jnp.ones(19), (), ride._replace(push=push))
        way = np.asarray(task.velocities(state)) - 1
        assert np.linalg.norm(way[:2]) == pytest.approx(
            float(push.speed) if kicked else 0, rel=1e-5
        )
        assert not way[2:].any() and task.applied(state, jnp.zeros(13)) == {}
    still = dataclasses.replace(task, push_speed=0.0)
    assert still.velocities(state) is state.qvel


@pytest.mark.parametrize(
    ("kind", "low", "high", "share"),
    [
        ("t1", (-1.0, -0.8, -1.0), (1.0, 0.8, 1.0), 0.1),
        ("h1", (-1.5, -0.5, -1.0), (1.5, 0.5, 1.0), 0.0),
        ("op3", (-0.6, -0.8, -0.7), (1.5, 0.8, 0.7), 0.1),
        ("apollo", (-1.5, -0.8, -1.5), (1.5, 0.8, 1.5), 0.0),
    ],
)
def test_commands_are_drawn_as_published(kind, low, high, share, bipeds):
    task = task_of(kind, bipeds[kind])
    drawn = np.asarray(jax.vmap(task.first_command)(jax.random.split(jax.random.key(0), 4000)))
    np.testing.assert_allclose(drawn.min(0), low, atol=0.01)
    np.testing.assert_allclose(drawn.max(0), high, atol=0.01)
    assert (drawn == 0).all(1).mean() == pytest.approx(share, abs=0.02)
    # Of H1's, small numbers become 0.
    small = (np.abs(drawn) < 0.1) & (drawn != 0)
    assert small.any() != (kind == "h1")
    assert [(command.low, command.high) for command in task.commands] == [
        *zip(low, high, strict=True)
    ]
    if kind == "apollo":
        wait = jax.vmap(task.lasting)(jax.random.split(jax.random.key(1), 4000))
        assert float(wait.mean()) == pytest.approx(250, rel=0.05)
    else:
        assert task.lasting(jax.random.key(0)) == 501


def test_joints_begin_around_the_posture(bipeds):
    task = task_of("t1", bipeds["t1"])
    qpos, qvel = jax.vmap(task.initial)(jax.random.split(jax.random.key(0), 300))
    share = np.asarray(qpos)[:, 8:] / task.posture[1:]  # the waist is straight
    assert 0.5 <= share.min() < 0.51 and 1.49 < share.max() <= 1.5
    assert np.abs(qpos[:, :2]).max() > 0.45 and np.abs(qvel[:, :6]).max() > 0.45
    assert not np.asarray(qvel[:, 6:]).any()


def test_weights_are_the_published_ones(bipeds):
    shared = {"tracking_lin_vel": 1.0, "tracking_ang_vel": 0.5, "ang_vel_xy": -0.15}
    shared |= {"orientation": -1.0, "feet_air_time": 2.0, "feet_slip": -0.25, "feet_phase": 1.0}
    shared |= {"joint_deviation_knee": -0.1, "joint_deviation_hip": -0.25, "dof_pos_limits": -1.0}
    shared |= {"pose": -1.0}
    own = {
        "t1": shared
        | {"alive": 0.25, "feet_distance": -1.0, "collision": -1.0, "joint_deviation_hip": -0.1},
        "g1": shared
        | {"tracking_ang_vel": 0.75, "orientation": -2.0, "stand_still": -1.0, "pose": -0.1}
        | {"termination": -100.0, "collision": -0.1, "contact_force": -0.01},
        "berkeley": shared | {"torques": -2.5e-5, "action_rate": -0.01, "termination": -1.0},
        "h1": {"feet_phase": 5.0, "tracking_lin_vel": 3.5, "tracking_ang_vel": 0.75}
        | {"pose": -2.5, "action_rate": -0.01},
        "apollo": {"tracking": 1.0, "ang_vel_xy": -0.15, "orientation": -1.0, "feet_phase": 1.0}
        | {"pose": -1.0, "collision": -1.0},
        "op3": {"tracking_lin_vel": 1.5, "tracking_ang_vel": 0.8, "lin_vel_z": -2.0}
        | {"ang_vel_xy": -0.05, "orientation": -5.0, "torques": -0.0002, "action_rate": -0.01}
        | {"zero_cmd": -0.5, "termination": -1.0, "feet_slip": -0.1, "energy": -0.0001},
    }
    for kind, weights in own.items():
        task = task_of(kind, bipeds[kind])
        found = dataclasses.asdict(task.scales)
        assert {name: weight for name, weight in found.items() if weight} == weights, kind
        pushes = {"t1": 1.0, "g1": 2.0, "berkeley": 2.0, "apollo": 2.0}
        assert task.push_speed == pushes.get(kind, 0.0) and task.dt == pytest.approx(0.02)


def test_servos_of_h1_damp_critically(bipeds):
    """By the inertia in qpos0, as MuJoCo 3 has it, whatever the compiler of the file says."""
    model, file = task_of("h1", bipeds["h1"]).physics_model(), bipeds["h1"]
    inertia = mujoco.MjModel.from_xml_path(file).dof_M0[6:]
    np.testing.assert_allclose(model.actuator_biasprm[:, 2], -2 * np.sqrt(80 * inertia), rtol=1e-6)


@pytest.mark.parametrize(("forward", "backward"), [(0.0, 0.6), (1.5, 0.0), (0.0, 0.0)])
def test_op3_may_be_told_never_to_go_forward_or_backward(forward, backward, bipeds):
    ranges = (forward, 0.8, 0.7)
    task = task_of("op3", bipeds["op3"], command_ranges=ranges, backward=backward)
    keys = jax.random.split(jax.random.key(0), 512)
    drawn = np.asarray(jax.vmap(task.first_command)(keys))
    assert (drawn[:, 0] >= -backward).all() and (drawn[:, 0] <= forward).all()
    assert drawn[:, 0].max() == pytest.approx(forward, abs=0.02)
    assert drawn[:, 0].min() == pytest.approx(-backward, abs=0.02)
    assert (drawn == 0).all(1).mean() == pytest.approx(0.1, abs=0.05)


def test_a_wrong_speed_backward_is_named(bipeds):
    with pytest.raises(SeedbedError, match=r"backward is -1\.0; give 0 or more"):
        task_of("op3", bipeds["op3"], backward=-1.0)


def test_noise_has_the_published_sizes(bipeds):
    """Berkeley's knees and ankles are seen worse than its hips."""
    sizes = task_of("berkeley", bipeds["berkeley"])._sizes
    names = task_of("berkeley", bipeds["berkeley"]).physics_model().names.joint[1:]
    wanted = {"KFE": 0.05, "FFE": 0.08}
    joints = [wanted.get(name.rpartition("_")[2], 0.03) for name in names]
    np.testing.assert_allclose(sizes, [*[0.1] * 3, *[0.2] * 3, *[0.05] * 3, *joints, *[1.5] * 13])
    h1 = task_of("h1", bipeds["h1"])
    assert h1.noise_level == 0.6
    np.testing.assert_allclose(h1._sizes, [*[0.2] * 3, *[0.05] * 3, *[0.01] * 13, *[1.5] * 13])


def play(task: Any, count: int, steps: int) -> Any:
    """Episodes of a task without actions; leaves [steps, count, ...]."""
    opened = jax.jit(simd.vectorize(task.reset))(jax.random.split(jax.random.key(0), count))
    step, action = simd.vectorize(task.step), jnp.zeros((count, 13), jnp.float32)

    def forward(state: Any, _: None) -> Any:
        now = step(state, action)
        return now, now

    return opened, jax.jit(lambda state: jax.lax.scan(forward, state, None, length=steps))(opened)[
        1
    ]


@pytest.mark.slow
def test_commands_change_and_kicks_act_in_an_episode(bipeds):
    task = task_of("t1", bipeds["t1"], noise_level=0.0)
    opened, played = play(task, 32, 520)
    command = np.asarray(played.inner.kept.command)
    changed = (command[1:] != command[:-1]).any((1, 2))
    assert np.flatnonzero(changed).tolist() == [499]
    seen = np.asarray(played.timestep.observation["state"])
    np.testing.assert_array_equal(seen[1:, :, 9:12], command[:-1])
    gait = opened.inner.kept.memory
    cosine = np.cos(np.asarray(gait.phase[:, 0] + 7 * gait.advance))
    walks = (command[0] != 0).any(1)
    np.testing.assert_allclose(seen[7, walks, -4], cosine[walks], atol=1e-4)
    assert (seen[1:500, ~walks, -4:-2] == seen[1, ~walks, -4:-2]).all()
    # Kicked robots are elsewhere than those that were let alone.
    alone = play(dataclasses.replace(task, push_speed=0.0), 32, 520)[1]
    apart = np.abs(np.asarray(played.inner.qpos - alone.inner.qpos)).max(-1) > 0
    first = np.asarray(opened.inner.kept.push.wait)
    assert apart[-1, first < 500].all() and not apart[:249].any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*PLAIN])
def test_the_tasks_pass_the_checks_of_tasks(kind, bipeds):
    check_task(task_of(kind, bipeds[kind]))
