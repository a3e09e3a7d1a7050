"""An exported policy tells how it drives a robot: a program that has only the file sees what training saw."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import onnx
import pytest

import biped
import quadruped
from seedbed import api, cli, simd
from seedbed.agents.ppo import Ppo
from seedbed.config.configuration import TrainConfig
from seedbed.config.resolve import resolve_env
from seedbed.envs.device.changes import delay, scale_reward
from seedbed.envs.device.randomisation import Scale, randomise
from seedbed.envs.device.robots.deployment import deployment, metadata
from seedbed.envs.device.robots.go1 import Go1Joystick
from seedbed.envs.device.robots.legged import Legged
from seedbed.envs.device.robots.spot import SpotJoystick
from seedbed.envs.device.wrappers import time_limit
from seedbed.exporting import driving
from seedbed.exporting.command import _robot
from seedbed.exporting.driving import Robot
from seedbed.run.options import FusedConfig
from seedbed.types import SeedbedError
from untrained_run import write_run

BALL = '<body name="ball" pos="2 0 .1"><freejoint/><geom size=".1"/></body>'
DOG = Path(__file__).parents[1] / "examples" / "dog.xml"
KINDS = {
    "go1": lambda path: Go1Joystick(xml_file=path, noise_level=0.0, solver_iterations=0),
    "late": lambda path: Go1Joystick(
        xml_file=path, noise_level=0.0, solver_iterations=0, action_latency=1, base_velocity=False
    ),
    "spot": lambda path: SpotJoystick(xml_file=path, noise_level=0.0, solver_iterations=0),
    "legged": lambda path: Legged(xml_file=path, noise_level=0.0, push_speed=0.0),
    "legged-blind": lambda path: Legged(
        xml_file=path, noise_level=0.0, push_speed=0.0, base_velocity=False
    ),
    **{
        name: lambda path, name=name: dataclasses.replace(
            resolve_env(f"{name}/joystick"),
            xml_file=path,
            noise_level=0.0,
            push_speed=0.0,
            solver_iterations=0,
        )
        for name in biped.STYLES
    },
}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("scenes"), {}
    for kind in KINDS:
        names = ("FR", "FL", "HR", "HL") if kind == "spot" else quadruped.GO1
        found[kind] = folder / f"{kind}.xml"
        is_biped = kind in biped.STYLES
        found[kind].write_text(biped.xml(kind) if is_biped else quadruped.xml(names=names))
    return found


def middling(task, state):
    """The state with the gait that the file tells of: the middle of those in training."""
    if not task.rhythm:
        return state
    ride, hertz = state.inner.kept, jnp.full(1, task.rhythm.hertz)
    gait = ride.memory.gait if task.rhythm.height else ride.memory
    memory = gait._replace(advance=2 * np.pi * task.dt * hertz)
    if task.rhythm.height:
        top = jnp.full(1, task.rhythm.height)
        memory = ride.memory._replace(gait=memory, hertz=hertz, top=top)
    return state._replace(inner=state.inner._replace(kept=ride._replace(memory=memory)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS])
def test_a_program_with_the_file_alone_sees_what_training_saw(kind, scenes):
    """Ten steps of the same actions, in MuJoCo's C code and in ours."""
    task = KINDS[kind](str(scenes[kind]))
    robot = Robot(scenes[kind], metadata(deployment(task)))
    robot.model.opt.iterations = 100
    data, command = robot.data, np.float32([0.4, -0.2, 0.3])
    reset, step = simd.vectorize(task.reset), simd.vectorize(task.step)
    commanded = simd.vectorize(task.commanded)
    state = middling(task, reset(jax.random.key(0)[None]))
    data.qpos[:], data.qvel[:] = state.inner.qpos[0], state.inner.qvel[0]
    mujoco.mj_forward(robot.model, data)
    rng = np.random.default_rng(0)
    robot.see(command)
    for number in range(10):
        if number == 6 and task.rhythm:
            command = np.zeros(3, np.float32)  # a gait may rest
            robot.past.popleft(), robot.errors.popleft()
            robot.see(command)
        action = rng.uniform(-1, 1, (1, len(task.rest))).astype(np.float32)
        state = step(commanded(state, command[None]), jnp.asarray(action))
        robot.act(action[0], task.dt)
        seen = np.asarray(state.timestep.observation["state"][0])
        np.testing.assert_allclose(robot.see(command), seen, atol=5e-3)


def test_metadata_have_the_keys_that_others_read(scenes):
    told = metadata(deployment(KINDS["go1"](str(scenes["go1"]))))
    assert told["joint_names"].split(",")[0] and len(told["joint_names"].split(",")) == 12
    assert told["observation_names"] == (
        "base_lin_vel,base_ang_vel,projected_gravity,joint_pos,joint_vel,actions,command"
    )
    assert told["joint_stiffness"].split(",") == ["35"] * 12
    assert json.loads(told["kp"]) == [35.0] * 12 and json.loads(told["kd"]) == [0.5] * 12
    assert told["action_scale"].split(",") == ["0.5"] * 12 and told["rate_hz"] == "50"
    assert json.loads(told["command_ranges"]) == [[-1.5, 1.5], [-0.8, 0.8], [-1.2, 1.2]]


@pytest.fixture(scope="module")
def run(tmp_path_factory, scenes):
    """A run of the quadruped whose policy has learned nothing: it hardly moves, and stands."""
    task = Go1Joystick(xml_file=str(scenes["go1"]))
    agent = Ppo(hidden_sizes=(16,))
    path = tmp_path_factory.mktemp("runs") / "go1"
    return write_run(path, TrainConfig(task, agent, FusedConfig(), "go1/joystick/ppo"))


def test_export_drives_a_robot_with_the_file_alone(run, scenes, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(driving, "SECONDS", 1.0)
    folder = tmp_path / "out"
    assert cli.main(["export", str(run), "-o", str(folder), "--robot"]) == 0
    told = capsys.readouterr()
    assert "1 s in MuJoCo's C code by policy.onnx alone" in told.out and "ms a step" in told.out
    assert "told: forward 0.90, left 0.00, turn left 0.00" in told.err
    model = onnx.load(folder / "policy.onnx")
    carried = {entry.key: entry.value for entry in model.metadata_props}
    contract = json.loads((folder / "contract.json").read_text())
    assert contract["robot"]["joint_names"] == carried["joint_names"].split(",")
    terms = contract["robot"]["observation_terms"]
    assert sum(term["size"] * term["history"] for term in terms) == 48
    # The example drives it without Seedbed.
    example = Path(__file__).parents[1] / "examples" / "drive_robot.py"
    hidden = "import sys, runpy; sys.modules['seedbed'] = sys.modules['jax'] = None; "
    hidden += "main = runpy.run_path(sys.argv[1])['main']; main(*sys.argv[2:4], seconds=0.5)"
    words = [example, folder / "policy.onnx", scenes["go1"]]
    done = subprocess.run([sys.executable, "-c", hidden, *words], capture_output=True, text=True)
    assert done.returncode == 0 and "told to walk" in done.stdout, done.stderr
    # A robot that falls is an error, and its files stay.
    monkeypatch.setattr(driving, "_FALLEN", 1.1)
    other = tmp_path / "other"
    assert cli.main(["export", str(run), "-o", str(other), "--robot", str(scenes["go1"])]) == 1
    assert "the robot fell after" in capsys.readouterr().err
    assert (other / "policy.onnx").exists()


def test_a_policy_that_knows_its_symmetry_is_loaded_from_the_file(tmp_path, scenes):
    even = tmp_path / "even.xml"
    even.write_text(quadruped.straight(scenes["go1"].read_text()))
    agent = Ppo(hidden_sizes=(16,), equivariant=True, normalise_observations=True)
    config = TrainConfig(Go1Joystick(xml_file=str(even)), agent, FusedConfig(), "go1/joystick/ppo")
    run, folder = write_run(tmp_path / "run", config), tmp_path / "out"
    assert cli.main(["export", str(run), "-o", str(folder)]) == 0
    seen = {"state": np.random.default_rng(0).normal(size=(5, 48)).astype(np.float32)}
    loaded, trained = (api.load(each) for each in (folder, run))
    np.testing.assert_array_equal(loaded.act(seen), trained.act(seen))


def test_a_scene_without_what_the_policy_needs_is_refused(scenes, tmp_path):
    told = metadata(deployment(KINDS["go1"](str(scenes["go1"]))))
    bare = tmp_path / "bare.xml"
    bare.write_text(Path(scenes["go1"]).read_text().replace('name="gyro"', 'name="turning"'))
    bare_of = tmp_path / "none.xml"
    with pytest.raises(SeedbedError, match=r"none\.xml is no scene that MuJoCo loads"):
        Robot(bare_of, told)
    with pytest.raises(SeedbedError, match=r"bare\.xml lacks gyro, which the policy needs"):
        Robot(bare, told)


@pytest.mark.parametrize("instead", ["", '<motor joint="RL_calf"/>', "gear"])
def test_a_scene_whose_joint_has_no_servo_is_refused(scenes, tmp_path, instead):
    told = metadata(deployment(KINDS["go1"](str(scenes["go1"]))))
    path, text = tmp_path / "other.xml", Path(scenes["go1"]).read_text()
    geared = '<position joint="RL_calf" gear="2" kp="35"/>'
    other = geared if instead == "gear" else instead
    path.write_text(re.sub('<position joint="RL_calf"[^>]*>', other, text))
    with pytest.raises(
        SeedbedError, match=r"other\.xml has no servo for RL_calf, which the policy"
    ):
        Robot(path, told)


def test_a_robot_s_first_targets_are_those_of_the_file(scenes):
    told = metadata(deployment(KINDS["go1"](str(scenes["go1"])))) | {"action_moves": "target"}
    first = np.array(told["default_joint_pos"].split(","), float) + 0.01
    robot = Robot(scenes["go1"], told | {"initial_target": ",".join(map(str, first))})
    robot.act(np.zeros(12), 0.02)
    np.testing.assert_allclose(robot.target, first)


@pytest.mark.parametrize("last", ["held", "wanted"])
def test_targets_are_sent_within_their_ranges_and_kept_as_in_training(scenes, last):
    told = metadata(deployment(KINDS["go1"](str(scenes["go1"])))) | {"action_moves": "target"}
    told |= {"last_target": last, "initial_target": told["default_joint_pos"]}
    robot = Robot(scenes["go1"], told)
    first, (low, high) = robot.target, robot.target_bounds.T
    for _ in range(9):
        robot.act(np.ones(12), 0.0)
    np.testing.assert_allclose(robot.data.ctrl, high)
    wound = first + 9 * robot.scale
    np.testing.assert_allclose(robot.target, high if last == "held" else wound)
    robot.act(-np.ones(12), 0.0)
    back = high - robot.scale if last == "held" else np.clip(wound - robot.scale, low, high)
    np.testing.assert_allclose(robot.data.ctrl, back)


def test_servos_with_a_gear_are_refused(tmp_path):
    path = tmp_path / "geared.xml"
    path.write_text(quadruped.xml().replace('joint="RL_calf"', 'joint="RL_calf" gear="2"'))
    for task in (Go1Joystick, Legged):
        with pytest.raises(
            SeedbedError, match=r"geared.xml: the servo .* has the gear 2, by which"
        ):
            task(xml_file=str(path)).spec  # noqa: B018


def test_joints_are_named_as_a_list_can_hold(tmp_path):
    path = tmp_path / "robot.xml"
    path.write_text(quadruped.xml().replace("RL_calf", "RL,calf"))
    with pytest.raises(
        SeedbedError, match=r"robot.xml: the name of joint \d+ is 'RL,calf', by which"
    ):
        deployment(Legged(xml_file=str(path)))


def test_damping_is_set_where_a_program_can_set_it(tmp_path):
    """A joint without a servo has the file's."""
    path = tmp_path / "robot.xml"
    path.write_text(quadruped.disordered(DOG.read_text()))
    task = Legged(xml_file=str(path), kd=0.7)
    robot, trained = Robot(path, metadata(deployment(task))), task.compiled()
    assert sorted({*trained.dof_damping[6:]}) == [0.1, 0.7]
    np.testing.assert_allclose(robot.model.dof_damping, trained.dof_damping)


def test_a_robot_of_a_file_is_seen_in_the_order_of_its_actuators(tmp_path):
    """Its servos are in no order of joints, one joint has none, and the trunk is not body 1."""
    path = tmp_path / "robot.xml"
    path.write_text(quadruped.disordered(DOG.read_text()))
    task = Legged(xml_file=str(path), noise_level=0.0, push_speed=0.0)
    told = metadata(deployment(task))
    robot, rng = Robot(path, told), np.random.default_rng(0)
    assert told["joint_names"].split(",")[:2] == ["RR_knee", "RR_pitch"] and task.trunk == 2
    robot.data.qpos[7:], robot.data.qvel[:] = rng.normal(size=13), rng.normal(size=19)
    now: Any = SimpleNamespace(qpos=jnp.asarray(robot.data.qpos), qvel=jnp.asarray(robot.data.qvel))
    ours = np.concatenate([part for part, _ in task.measured(now)])
    np.testing.assert_allclose(robot.see(np.zeros(3))[:33], ours, atol=1e-5)
    seen, action = task.spec.mirror.observation["state"], task.spec.mirror.action
    assert [place - 9 for place in seen.order[9:21]] == list(action.order)
    assert seen.signs[9:21] == seen.signs[21:33] == seen.signs[33:45] == action.signs
    force = rng.normal(size=12)
    acting: Any = SimpleNamespace(qvel=now.qvel, actuator_force=force)
    powers = robot.data.qvel[robot.dofs] * force
    np.testing.assert_allclose(task.powers(acting), powers, rtol=1e-5)


def test_a_robot_in_wrappers_is_described_unless_they_change_what_it_sees(scenes):
    task, said = Go1Joystick(xml_file=str(scenes["go1"])), []
    heavier = scale_reward(randomise(task, Scale("body_mass", 0.9, 1.1)), 2.0)
    assert _robot(heavier, said.append) == deployment(task) and not said
    late = time_limit(delay(heavier, observation=1), 10)
    assert _robot(late, said.append) is None
    assert said == [
        "the file does not say how it drives a robot: Delay may change what the policy sees, or its actions"
    ]
    assert _robot(resolve_env("CartPole-v1"), said.append) is None
    assert len(said) == 1


def test_the_example_damps_as_training_does(tmp_path):
    """The dog's servos have a damping of their own, and its joints another."""
    task = Legged(xml_file=str(DOG), kd=0.3)
    example: Any = runpy.run_path(str(DOG.parent / "drive_robot.py"))
    robot, trained = example["Robot"](str(DOG), metadata(deployment(task))), task.compiled()
    np.testing.assert_allclose(robot.model.actuator_biasprm, trained.actuator_biasprm)
    np.testing.assert_allclose(robot.model.dof_damping, trained.dof_damping, atol=1e-7)


def test_a_robot_of_a_task_has_its_servos_in_the_order_of_its_joints(tmp_path):
    path = tmp_path / "robot.xml"
    path.write_text(quadruped.disordered(quadruped.xml()))
    with pytest.raises(SeedbedError, match="joint of actuator 0 is RL_calf, and not FR_hip: give"):
        Go1Joystick(xml_file=str(path)).spec  # noqa: B018
    path.write_text(re.sub('<position joint="RL_calf"[^>]*>', "", quadruped.xml()))
    with pytest.raises(SeedbedError, match="joint of actuator 11 is none, and not RL_calf"):
        Go1Joystick(xml_file=str(path)).spec  # noqa: B018


def test_a_robot_of_a_file_stands_in_the_first_keyframe(tmp_path):
    """Whatever the names are: one of them may be that of other tasks' posture."""
    pose = "0 0 .278 1 0 0 0 .1 .9 -1.8 -.1 .9 -1.8 .1 .9 -1.8 -.1 .9 -1.8"
    fallen = pose.replace("0 0 .278 1 0 0 0", "0 0 2.5 0 1 0 0")
    path = tmp_path / "robot.xml"
    text = quadruped.xml(home="stand")
    path.write_text(text.replace("</keyframe>", f'<key name="home" qpos="{fallen}"/></keyframe>'))
    task = Legged(xml_file=str(path), noise_level=0.0, push_speed=0.0)
    assert task.home == "stand"
    told = metadata(deployment(task))
    np.testing.assert_allclose(Robot(path, told).data.qpos, task.opening, atol=1e-6)
    path.write_text(path.read_text().replace("</worldbody>", f"{BALL}</worldbody>"))
    with pytest.raises(
        SeedbedError, match=r"robot.xml has 26 positions, and the policy begins in 19"
    ):
        Robot(path, told)


def test_a_robot_begins_where_training_does(tmp_path):
    """Training corrects a posture that begins in the ground, which would throw a robot out of it."""
    path = tmp_path / "low.xml"
    path.write_text(DOG.read_text().replace('pos="0 0 .27"', 'pos="0 0 0"'))
    told = metadata(deployment(Legged(xml_file=str(path))))
    example: Any = runpy.run_path(str(DOG.parent / "drive_robot.py"))
    for robot in (Robot(path, told), example["Robot"](str(path), told)):
        mujoco.mj_forward(robot.model, robot.data)
        assert robot.data.ncon and min(each.dist for each in robot.data.contact) > -0.01


def test_a_robot_is_driven_within_the_ranges_of_the_training(tmp_path):
    """The scene has none of them, and the joints of the training bear less than its servos give."""
    bare, weak = tmp_path / "bare.xml", tmp_path / "weak.xml"
    bare.write_text(re.sub('(ctrl|force)range="[^"]*"', "", DOG.read_text()))
    weak.write_text(DOG.read_text().replace("<joint ", '<joint actuatorfrcrange="-5 9" ', 1))
    task = Legged(xml_file=str(weak))
    told, trained = metadata(deployment(task)), task.compiled()
    assert json.loads(told["torque_ranges"]) == [[-5, 9]] * 12
    assert json.loads(told["target_ranges"])[:2] == [[-0.5, 0.5], [-0.9, 0.9]]
    assert told["joint_frictionloss"].split(",") == ["0.1"] * 12
    assert told["joint_armature"].split(",") == ["0.005"] * 12 and told["base_body"] == "trunk"
    data, action = mujoco.MjData(trained), np.tile([3.0, -3.0, 3.0], 4)
    data.qpos[:], data.ctrl[:] = task.opening, task.rest + task.action_scale * action
    mujoco.mj_step(trained, data, 5)
    ours = Robot(bare, told)
    ours.act(action, 0.02)
    example: Any = runpy.run_path(str(DOG.parent / "drive_robot.py"))
    theirs = example["Robot"](str(bare), told)
    theirs.send(np.clip(data.ctrl, *example["bounds"](told["target_ranges"])), 0.02)
    for robot in (ours, theirs):
        np.testing.assert_allclose(
            robot.data.ctrl, np.clip(data.ctrl, *trained.actuator_ctrlrange.T)
        )
        np.testing.assert_allclose(robot.data.qfrc_actuator, data.qfrc_actuator, atol=1e-3)
        np.testing.assert_allclose(robot.data.qpos, data.qpos, atol=1e-4)
    assert np.isclose(np.abs(data.qfrc_actuator), [[5], [9]]).any(axis=1).all()
    free = metadata(deployment(Legged(xml_file=str(bare))))
    assert json.loads(free["target_ranges"]) == json.loads(free["torque_ranges"]) == [None] * 12
    Robot(bare, free)
