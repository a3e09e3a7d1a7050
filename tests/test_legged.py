"""A legged robot of which only the file is known: what is found in it, and what is refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import quadruped
from seedbed import cli, physics, simd
from seedbed.config.env_options import Words
from seedbed.config.resolve import train_config
from seedbed.envs.device.robots.legged import Legged
from seedbed.run.trust import OWN
from seedbed.testing.checks import check_task
from seedbed.types import SeedbedError

DOG = Path(__file__).parent.parent / "examples" / "dog.xml"
FEET = ("FL_shin", "FR_shin", "RL_shin", "RR_shin")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dog(Legged):
    """A robot with a file of its own."""

    xml_file: str = str(DOG)


@pytest.fixture(scope="module")
def dog() -> Legged:
    return Legged(xml_file=str(DOG), noise_level=0.0, push_speed=0.0)


def test_the_feet_are_what_it_stands_on(dog):
    assert set(dog.feet) == set(FEET) and dog.frame_skip == 5
    heights, contacts = settled(dog)
    np.testing.assert_allclose(heights, 0.0, atol=0.01)
    assert contacts.all()


def settled(task: Legged) -> tuple[Any, Any]:
    """The heights of the feet and which are touched, where MuJoCo's robot has come to rest."""
    compiled: Any = mujoco.MjModel.from_xml_path(task.xml_file)
    data: Any = mujoco.MjData(compiled)
    data.qpos[:], data.ctrl[:] = task.at_home, task.at_home[task._stands.servos]
    mujoco.mj_step(compiled, data, 20)  # contacts need a depth
    model = task.physics_model()

    def seen(qpos: Any) -> tuple[Any, Any]:
        now = physics.step_data(model, physics.init(model, qpos), np.float32(data.ctrl))
        return task.heights(now), task.contacts(now)

    heights, contacts = simd.vectorize(seen)(np.float32(data.qpos)[None])
    return heights[0], contacts[0]


def test_episodes_open_with_the_feet_on_the_ground(dog):
    """In the posture they are 7 to 9 mm in it, as the weight bends the joints."""
    compiled, depths = dog.compiled(), []
    for qpos in (dog.opening, dog.at_home):
        data: Any = mujoco.MjData(compiled)
        data.qpos[:] = qpos
        mujoco.mj_forward(compiled, data)
        depths.append(min(contact.dist for contact in data.contact))
    assert -0.002 < depths[0] < 0 and depths[1] < -0.005
    qpos, _ = jax.jit(dog.initial)(jax.random.key(0))
    np.testing.assert_array_equal(qpos[7:], dog.opening[7:])
    np.testing.assert_array_equal(dog.opening[:2], 0.0)


def test_velocities_are_mujocos(dog):
    """Of the trunk in its frame and in the world, and of the feet, against MuJoCo's own."""
    model, rng = dog.physics_model(), np.random.default_rng(0)
    compiled: Any = mujoco.MjModel.from_xml_path(str(DOG))
    data: Any = mujoco.MjData(compiled)
    turned = rng.standard_normal(4)
    data.qpos[:] = dog.at_home
    data.qpos[3:7] = np.float32(turned / np.linalg.norm(turned))
    data.qvel[:] = np.float32(rng.standard_normal(compiled.nv))
    mujoco.mj_forward(compiled, data)

    def moving(qpos: Any, qvel: Any) -> tuple[Any, ...]:
        now = physics.forward(model, physics.init(model, qpos, qvel))
        told = dog.turning(now), dog.velocity(now), dog.in_world(now), dog.up(now)
        return *told, dog.foot_velocities(now), dog.heights(now)

    state = np.float32(data.qpos)[None], np.float32(data.qvel)[None]
    told = jax.jit(simd.vectorize(moving))(*state)
    turning, velocity, in_world, up, feet, heights = jax.tree.map(lambda x: x[0], told)
    found = np.zeros(6)
    mujoco.mj_objectVelocity(compiled, data, mujoco.mjtObj.mjOBJ_XBODY, 1, found, 1)
    np.testing.assert_allclose(turning, found[:3], atol=1e-5)
    np.testing.assert_allclose(velocity, found[3:], atol=1e-5)
    mujoco.mj_objectVelocity(compiled, data, mujoco.mjtObj.mjOBJ_XBODY, 1, found, 0)
    np.testing.assert_allclose(np.concatenate(in_world[::-1]), found, atol=1e-5)
    np.testing.assert_allclose(up, data.xmat[1].reshape(3, 3)[:, 2], atol=1e-6)
    jacobian = np.zeros((3, compiled.nv))
    for i, body in enumerate(dog._stands.feet):
        at = data.xpos[body] + data.xmat[body].reshape(3, 3) @ dog._stands.soles[i]
        mujoco.mj_jac(compiled, data, jacobian, None, at, body)
        np.testing.assert_allclose(feet[i], jacobian @ data.qvel, atol=1e-4)
        np.testing.assert_allclose(heights[i], at[2] - dog._stands.ground, atol=1e-5)


def test_actions_move_the_servos_about_the_posture(dog):
    kept = dog.begin(jax.random.key(0))
    np.testing.assert_allclose(
        dog.control(kept, jnp.full(12, 0.5)) - dog.control(kept, jnp.zeros(12)), 0.25, atol=1e-6
    )
    np.testing.assert_allclose(dog.control(kept, jnp.zeros(12)), dog.posture)


@pytest.mark.parametrize(("name", "value"), [("kp", 50.0), ("kd", 0.9), ("solver_iterations", 4)])
def test_options_that_a_given_model_does_not_have_are_refused(name, value):
    with pytest.raises(SeedbedError, match=f"Legged.{name} is {value}, but its model"):
        Legged(xml_file=str(DOG), model=physics.load(DOG), **{name: value})
    changed = Legged(xml_file=str(DOG), **{name: value})
    dataclasses.replace(changed, model=changed._model)


def test_a_file_is_a_name(monkeypatch, tmp_path):
    monkeypatch.chdir(DOG.parent)
    config = train_config("dog.xml")
    assert config.env == Legged(xml_file=str(DOG)) and config.name == "dog.xml/ppo"
    assert config.agent == train_config("./dog.xml/ppo").agent
    assert config.agent.minibatches == 32  # as other robots
    assert "seedbed.envs.device.robots.legged:Legged" in OWN


@pytest.mark.slow
def test_it_passes_the_checks_of_tasks():
    check_task(Dog())


@pytest.mark.slow
def test_a_robot_trains_from_its_file_and_is_evaluated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "robot.xml").write_text(quadruped.xml())
    size = ["--steps", "1024", "--agent.batch", "32", "--agent.minibatches", "2"]
    size += ["--evaluate-episodes", "2", "--run", "run", "--env.episode-steps", "20"]
    assert cli.main(["train", "robot.xml", *size]) == 0
    monkeypatch.chdir("/")
    (tmp_path / "robot.xml").unlink()
    assert cli.main(["evaluate", str(tmp_path / "run"), "--episodes", "2"]) == 0
    assert "return" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("<freejoint/>", "", "no robot that walks: its first joint must be free"),
        (
            'mass="5.2"',
            'mass="900"',
            "does not stand in its posture for a second: its trunk sinks from",
        ),
        (
            "<position joint",
            "<velocity joint",
            "are no position servos of joints, .*: give each joint",
        ),
        (
            'kp="35"',
            'kp="35" timeconst=".1"',
            "are no position servos of joints, without an activation",
        ),
        (
            'kp="35"',
            'kp="35" gear="2"',
            "the servo 0 has the gear 2, by .*: give it the gear 1, kp and",
        ),
        (
            '<body name="RL_calf"',
            "<body",
            "body 13, a foot, which RL_thigh carries, has no name: give",
        ),
        ("</worldbody>", "<worldbody>", "no model that MuJoCo compiles"),
    ],
)
def test_what_cannot_walk_is_refused(tmp_path, old, new, words):
    text = quadruped.xml()
    if not new:
        text = text[: text.index("<keyframe>")] + "</mujoco>"
    if "velocity" in new:
        text = text.replace(' kp="35" inheritrange="1"', "")
    path = tmp_path / "robot.xml"
    path.write_text(text.replace(old, new))
    with pytest.raises(SeedbedError, match=words):
        _ = Legged(xml_file=str(path)).feet


def inside(text: str, place: str, turned: str = "") -> str:
    """The dog with its trunk's frame on the ground, or turned: all that it has is in a body of its own."""
    text = text.replace('<body name="trunk" pos="0 0 .27">', f'<body name="trunk" {place}>')
    text = text.replace("<freejoint/>", f'<freejoint/><body name="inner" {turned}>')
    return text.replace("</worldbody>", "</body></worldbody>")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda text: text.replace('"FL_knee" ctrlrange="-0.75', '"FL_knee" ctrlrange="0.1'),
            "the joint FL_knee at 0, outside of 0.1 to 0.75, the ctrlrange of its servo: widen",
        ),
        (
            lambda text: inside(text, 'pos="0 0 0"', 'pos="0 0 .27"'),
            r"the frame of trunk, .*, is 0.0\d m above .* mass 0.2\d m: put the free joint into",
        ),
        (
            lambda text: inside(text, 'pos="0 0 .27" euler="1.5708 0 0"', 'euler="-1.5708 0 0"'),
            r"leans: the z axis of its trunk, the body trunk, is -?0.0\d of upright \(x is forward",
        ),
    ],
)
def test_a_dog_that_stands_is_refused_for(tmp_path, change, words):
    path = tmp_path / "robot.xml"
    path.write_text(change(DOG.read_text()))
    with pytest.raises(SeedbedError, match=words):
        _ = Legged(xml_file=str(path)).feet


def test_feet_that_are_named_need_not_carry_the_robot(tmp_path, dog):
    path = tmp_path / "robot.xml"
    path.write_text(DOG.read_text().replace('kp="40"', 'kp="3"'))
    named = ("RL_shin", "FL_shin")
    task = Legged(xml_file=str(path), foot_bodies=named)
    assert task.feet == named[::-1]
    np.testing.assert_allclose(task.opening[:3], [0, 0, dog.at_home[2]], atol=0.01)
    np.testing.assert_array_equal(task.rest, 0.0)
    assert train_config(str(path), env={"foot_bodies": Words(named)}).env == task
    stiff: Any = train_config(str(path), env={"kp": Words(("4e1",))}).env
    assert stiff.feet == dog.feet
    for names, words in (
        (("FL_shin", "paw"), r"foot_bodies names 'paw', .* it has trunk, FL_hip"),
        (("FL_shin", "FL_shin"), "foot_bodies names 'FL_shin', .* or is twice there"),
        (("FL_shin", "FR_hip"), "the foot FR_hip does not touch the ground within a second"),
    ):
        with pytest.raises(SeedbedError, match=words):
            _ = Legged(xml_file=str(path), foot_bodies=names).feet


def test_only_critics_see_the_velocity_of_a_robot_that_does_not_measure_it(dog):
    blind = dataclasses.replace(dog, base_velocity=False)
    assert [sight.name for sight in blind.sights] == [sight.name for sight in dog.sights[1:]]
    for task in (dog, blind):
        sizes = (sum(sight.size for sight in seen) for seen in (task.sights, task.insights))
        shapes = {name: each.shape for name, each in task.spec.observation.items()}
        assert shapes == dict(zip(("state", "privileged"), ((n,) for n in sizes), strict=True))
        assert "base_lin_vel" in [sight.name for sight in task.insights]
        assert task.mirror() is not None


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("FL_roll", "FL_roll", "; posture of qpos0; mirror symmetry"),
        ('"FL_roll" ctrl', '"FL_roll" kp="50" ctrl', "a gain of the joint FL_roll is 50, and in "),
        (
            '"FL_hip" pos="0.18',
            '"FL_hip" pos="0.21',
            "the foot FL_shin has no image on the other",
        ),
    ],
)
def test_it_is_told_what_keeps_a_robot_from_its_mirror_image(tmp_path, old, new, words):
    path = tmp_path / "robot.xml"
    path.write_text(DOG.read_text().replace(old, new))
    assert words in Legged(xml_file=str(path)).described()


def test_what_holds_a_foot_is_no_contact(tmp_path):
    """In the air, a linkage pulls at a foot's body."""
    path = tmp_path / "robot.xml"
    bar = '<equality><connect body1="FL_shin" body2="FL_thigh" anchor="0 0 -.1"/></equality>'
    path.write_text(DOG.read_text().replace("<actuator>", f"{bar}<actuator>"))
    task = Legged(xml_file=str(path))
    model = task.physics_model()

    def hanging(qpos: Any) -> tuple[Any, Any]:
        now = physics.forward(model, physics.init(model, qpos))
        return now.cfrc_ext[task._stands.feet[0]], task.contacts(now)

    bent = task.at_home + np.float32([0, 0, 1, *[0] * 6, 0.3, *[0] * 9])
    wrench, contacts = simd.vectorize(hanging)(bent[None])
    assert np.abs(wrench).max() > 1 and not contacts.any()


def test_a_servo_costs_what_its_joint_lets_through(tmp_path):
    text = DOG.read_text().replace(' forcerange="-18 18"', "")
    path = tmp_path / "robot.xml"
    path.write_text(
        text.replace('<joint axis="0 1 0"', '<joint actuatorfrcrange="-18 9" axis="0 1 0"')
    )
    task, asked = Legged(xml_file=str(path)), jnp.linspace(-30.0, 30.0, 12)
    now: Any = SimpleNamespace(actuator_force=asked, qvel=jnp.ones(18))
    np.testing.assert_array_equal(task.forces(now), jnp.clip(asked, -18.0, 9.0))
    np.testing.assert_array_equal(task.powers(now), jnp.clip(asked, -18.0, 9.0))


def test_servos_stand_as_stiff_as_the_task_says(tmp_path):
    path = tmp_path / "robot.xml"
    path.write_text(DOG.read_text().replace('kp="40"', 'kp="3"'))
    with pytest.raises(SeedbedError, match=r"not stand in .*: it.*stiffer servos \(--env.kp\)"):
        _ = Legged(xml_file=str(path)).feet
    assert Legged(xml_file=str(path), kp=40.0).feet
    with pytest.raises(SeedbedError, match="does not stand"):
        _ = Legged(xml_file=str(DOG), kp=3.0).feet
    with pytest.raises(SeedbedError, match="frame_skip is -1; give 0 or more"):
        Legged(xml_file=str(DOG), frame_skip=-1)


def test_a_damping_ratio_is_that_of_the_stiffness_of_the_task(tmp_path):
    path, text = tmp_path / "robot.xml", DOG.read_text().replace('kv=".5"', 'dampratio=".7"')
    path.write_text(text.replace('kp="40"', 'kp="80"'))
    stiff = Dog(xml_file=str(path)).compiled()
    path.write_text(text)
    stiffer = Dog(xml_file=str(path), kp=80.0).compiled()
    np.testing.assert_array_equal(stiffer.actuator_biasprm, stiff.actuator_biasprm)
    np.testing.assert_array_equal(stiffer.actuator_gainprm, stiff.actuator_gainprm)
    assert (stiff.actuator_biasprm[:, 2] < -0.1).all()


def test_a_file_that_was_edited_is_read_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "robot.xml"
    path.write_text(DOG.read_text())
    masses = [np.sum(Legged(xml_file="./robot.xml").physics_model().body_mass)]
    path.write_text(DOG.read_text().replace('mass="4.5"', 'mass="4.75"'))
    masses += [np.sum(Legged(xml_file="./robot.xml").physics_model().body_mass)]
    assert masses[1] - masses[0] == pytest.approx(0.25)
    path.write_text(DOG.read_text().replace('type="box"', 'type="ellipsoid"'))
    with pytest.raises(SeedbedError, match=r"robot\.xml: .*ellipsoid"):
        Legged(xml_file="./robot.xml").physics_model()


def test_heights_are_above_the_ground_and_pushes_by_the_robots_own_mass(dog, tmp_path):
    """A floor in a body of its own, 2 m up, and a rock of 99 kg in the scene."""
    floor = re.search(r'<geom name="floor"[^>]*/>', DOG.read_text())[0]  # type: ignore[index]
    text = quadruped.disordered(DOG.read_text()).replace('pos="0 0 .27"', 'pos="0 0 2.27"')
    path = tmp_path / "robot.xml"
    path.write_text(text.replace(floor, f'<body pos="0 0 2">{floor}</body>'))
    task = Legged(xml_file=str(path), noise_level=0.0)
    assert set(task.feet) == set(FEET) and task._stands.ground == pytest.approx(2.0, abs=0.005)
    assert task.clearance == pytest.approx(dog.clearance, rel=0.01)

    def fallen(height: float) -> Any:
        now: Any = SimpleNamespace(qpos=jnp.array([0, 0, height, 1.0, 0, 0, 0]))
        return task.fallen(now)

    assert fallen(2.12) and not fallen(2.15)
    push: Any = SimpleNamespace(force=lambda mass, dt: mass)
    tail = 0.05
    masses = [each.force(push) for each in (task, dataclasses.replace(dog, push_speed=1.0))]
    assert masses[0] == pytest.approx(masses[1] + tail)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SeedbedError, match=r"there is no MJCF file .*none.xml"):
        train_config(str(tmp_path / "none.xml"))


def test_options_are_kept(dog):
    slow = dataclasses.replace(dog, command_ranges=(0.5, 0.0, 0.0))
    commands = jax.vmap(slow.first_command)(jax.random.split(jax.random.key(0), 64))
    assert 0.45 < np.abs(commands[:, 0]).max() <= 0.5 and not commands[:, 1:].any()
