"""A hand that turns a cube: MuJoCo's C code and the published formulas, written plainly, are the oracle."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from seedbed import simd
from seedbed.config.defaults import configure
from seedbed.config.device_recipes import joystick_ppo
from seedbed.envs.device.mujoco import TaskState
from seedbed.envs.device.robots.leap import LeapRotate
from seedbed.envs.device.robots.servoed import Effort
from seedbed.testing.checks import check_task
from seedbed.types import SeedbedError

STEPS = 72
TIPS = {"th_tip": (-0.03, 0), "if_tip": (0.05, 0.04), "mf_tip": (0.05, 0), "rf_tip": (0.05, -0.04)}
_FINGER = """
  <body pos="{x} {y} 0">
    <joint name="{tip}0" axis="0 -1 0" range="-.3 1.5"/>
    <geom type="box" size=".006 .006 .02" pos="0 0 .02"/>
    <body pos="0 0 .045">
      <joint name="{tip}1" axis="{axis}" range="-1 1"/>
      <geom name="{tip}" type="box" size=".008 .008 .015" pos="0 0 .015" friction=".7"/>
      <site name="{tip}" pos="0 0 .03"/>
    </body>
  </body>"""


def hand() -> str:
    """Returns the MJCF of a palm with four fingers of two joints each, and of a cube on it."""
    fingers = "".join(
        _FINGER.format(tip=tip, x=x, y=y, axis="0 -1 0" if x > 0 else "1 0 0")
        for tip, (x, y) in TIPS.items()
    )
    servos = "".join(
        f'<position joint="{tip}{i}" kp="3" inheritrange="1"/>' for tip in TIPS for i in (0, 1)
    )
    places = "".join(
        f'<framepos name="{tip}_position" objtype="site" objname="{tip}" reftype="site" '
        'refname="grasp_site"/>'
        for tip in TIPS
    )
    cube = ("pos", "quat", "linvel", "angvel")
    names = ("position", "orientation", "linvel", "angvel")
    seen = "".join(
        f'<frame{kind} name="cube_{name}" objtype="body" objname="cube"/>'
        for kind, name in zip(cube, names, strict=True)
    )
    return f"""
<mujoco>
  <option timestep=".01"><flag eulerdamp="disable"/></option>
  <compiler angle="radian"/>
  <default><joint damping=".2" armature=".0015" frictionloss=".02"/></default>
  <worldbody>
    <geom name="floor" type="plane" pos="0 0 -.25" size="0 0 .01" contype="2" conaffinity="2"/>
    <body name="palm" pos=".09 0 -.02">
      <geom type="box" size=".05 .06 .01"/>
      <site name="grasp_site" pos=".01 0 .03"/>
      {fingers}
    </body>
    <body name="cube" pos=".1 0 .1">
      <freejoint/>
      <geom type="box" size=".025 .025 .025" mass=".1" friction=".3" conaffinity="2"/>
    </body>
    <body name="goal" mocap="true" pos=".3 .2 .05"><geom type="box" size=".03 .03 .03"/></body>
  </worldbody>
  <actuator>{servos}</actuator>
  <sensor>
    {seen}
    <framepos name="palm_position" objtype="site" objname="grasp_site"/>
    {places}
  </sensor>
  <keyframe><key name="home" qpos="{"0.3 0.1 " * 4} .1 0 .05 1 0 0 0"/></keyframe>
</mujoco>"""


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("leap") / "hand.xml"
    path.write_text(hand())
    return str(path)


class Plain:
    """LeapCubeRotateZAxis, step by step on mjData."""

    def __init__(self, robot: str) -> None:
        self.model = mujoco.MjModel.from_xml_path(robot)
        self.model.opt.jacobian = mujoco.mjtJacobian.mjJAC_DENSE
        self.model.opt.tolerance, self.model.opt.ls_iterations = 0, 50
        self.data = mujoco.MjData(self.model)
        self.home = self.model.key("home").qpos[:-7]
        self.action = self.earlier = np.zeros(self.model.nu)

    def read(self, name: str) -> np.ndarray:
        return self.data.sensor(name).data.copy()

    def place(self, height: float, speed: float) -> None:
        self.data.qpos[:], self.data.qvel[:] = [*self.home, 0.1, 0, height, 0.9, 0.1, 0.2, 0.3], 0
        self.data.qvel[-1] = speed
        self.data.mocap_pos[:], self.data.qacc_warmstart[:] = -100, 0
        self.action = self.earlier = np.zeros(self.model.nu)

    def step(self, action: np.ndarray) -> dict[str, Any]:
        self.data.ctrl[:] = self.home + 0.6 * action
        mujoco.mj_step(self.model, self.data, 5)
        joints, speeds = self.data.qpos[:-7], self.data.qvel[:-6]
        force, dropped = self.data.actuator_force, self.read("cube_position")[2] < -0.05
        tips = [self.read(f"{tip}_position") for tip in TIPS]
        off = self.read("palm_position") - self.read("cube_position")
        cube = [self.read(f"cube_{name}") for name in ("orientation", "angvel", "linvel")]
        terms = {
            "angvel": self.read("cube_angvel") @ [0, 0, 1],
            "linvel": np.linalg.norm(self.read("cube_linvel"), ord=1),
            "pose": np.sum((joints - self.home) ** 2),
            "torques": np.sum(force**2),
            "energy": np.sum(np.abs(speeds) * np.abs(force)),
            "termination": float(dropped),
            "action_rate": np.sum((action - self.action) ** 2),
        }
        seen = {
            "state": np.hstack([joints, self.action]),
            "privileged": np.hstack([joints, speeds, force, *tips, off, *cube]),
        }
        self.earlier, self.action = self.action, action
        return {"seen": seen, "terms": terms, "dropped": dropped}


@pytest.fixture(scope="module")
def rolled(robot: str) -> tuple[Any, dict[str, Any]]:
    """A rollout of MuJoCo, and our steps from each of its states, of terms with weights of 1."""
    scales = type(LeapRotate.scales)
    ones = scales(**{field.name: 1.0 for field in dataclasses.fields(scales)})
    task = LeapRotate(xml_file=robot, noise_level=0.0, solver_iterations=0, scales=ones)
    plain, rng = Plain(robot), np.random.default_rng(0)
    before, actions, found = [], [], []
    for number in range(STEPS):
        if number % 36 == 0:
            plain.place(0.06 if number == 0 else 0.0, 3.0)
            plain.data.qpos[-7] = 0.1 if number == 0 else 0.3  # beside the palm, where it falls
        for name in ("qpos", "qvel", "qacc_warmstart"):
            getattr(plain.data, name)[:] = np.float32(getattr(plain.data, name))
        names = ("qpos", "qvel", "qacc_warmstart")
        state = [np.float32(getattr(plain.data, name)) for name in names]
        still = np.zeros(8, np.float32)
        last, earlier = np.float32(plain.action), np.float32(plain.earlier)
        effort = Effort(np.uint32(0), np.int32(0), still, last, earlier, still)
        before.append(TaskState(state[0], np.zeros(0, np.float32), *state[1:], effort))
        actions.append(np.float32(np.clip(0.4 * rng.standard_normal(8), -1, 1)))
        found.append(plain.step(np.float64(actions[-1])))
    shapes = jax.eval_shape(task.reset, jax.random.key(0))
    low = np.zeros(shapes.inner.qpos_low.shape, np.float32)
    before = [state._replace(qpos_low=low) for state in before]

    def step(inner: TaskState, action: Any) -> Any:
        kept = inner.kept._replace(key=jax.random.key(0))
        blank = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (shapes.timestep, shapes.metrics)
        )
        opened = shapes._replace(
            inner=inner._replace(kept=kept), timestep=blank[0], metrics=blank[1]
        )
        return task.step(opened, action)

    stacked, theirs = (jax.tree.map(lambda *x: np.stack(x), *rows) for rows in (before, found))
    return jax.jit(simd.vectorize(step))(stacked, np.stack(actions)), theirs


@pytest.mark.slow
def test_observations_are_the_published_ones(rolled):
    ours, theirs = rolled
    assert ours.timestep.observation.keys() == theirs["seen"].keys()
    for name, wanted in theirs["seen"].items():
        off = np.abs(ours.timestep.observation[name] - wanted)
        np.testing.assert_array_less(off / np.maximum(1.0, np.abs(wanted).max(axis=0)), 1e-4)


@pytest.mark.slow
def test_rewards_are_the_published_ones(rolled):
    ours, theirs = rolled
    assert theirs["dropped"].any() and not theirs["dropped"][:36].any()
    for name, wanted in theirs["terms"].items():
        scale = np.abs(wanted).max()
        assert scale > 0, name
        np.testing.assert_allclose(
            ours.metrics[f"reward_{name}"], wanted, rtol=2e-4, atol=1e-4 * scale, err_msg=name
        )
    total = 0.05 * sum(theirs["terms"].values())
    np.testing.assert_allclose(ours.timestep.reward, total, rtol=2e-4, atol=1e-4)
    np.testing.assert_array_equal(ours.timestep.terminated, theirs["dropped"])


def test_an_episode_opens_with_a_cube_above_the_palm(robot):
    task = LeapRotate(xml_file=robot)
    qpos, qvel = jax.vmap(task.initial)(jax.random.split(jax.random.key(0), 500))
    joints, cube = np.asarray(qpos[:, :-7]) - task.posture, np.asarray(qpos[:, -7:])
    assert not np.asarray(qvel).any() and joints.std() == pytest.approx(0.1, rel=0.05)
    assert np.abs(cube[:, :3] - [0.1, 0, 0.05]).max() < 0.0101
    assert np.abs(cube[:, :3] - [0.1, 0, 0.05]).max() > 0.0095
    np.testing.assert_allclose(np.linalg.norm(cube[:, 3:], axis=1), 1, rtol=1e-5)
    assert np.abs(cube[:, 3:].mean(axis=0)).max() < 0.1
    np.testing.assert_allclose(task.mocap(())["mocap_pos"], [[-100.0] * 3])


def test_weights_are_the_published_ones(robot):
    task = LeapRotate(xml_file=robot)
    weights = {name: x for name, x in dataclasses.asdict(task.scales).items() if x}
    assert weights == {"angvel": 1.0, "termination": -100.0}
    np.testing.assert_allclose(task._sizes, [0.05] * 8)
    assert task.dt == pytest.approx(0.05) and task.episode_steps == 500
    assert configure(task).agent == joystick_ppo(task, 1).agent


def test_damping_is_that_of_the_fingers(robot):
    model = LeapRotate(xml_file=robot, kd=0.5).physics_model()
    np.testing.assert_allclose(model.dof_damping, [0.5] * 8 + [0.0] * 6)


def test_wrong_options_are_named(robot):
    for options, words in (
        ({"noise_level": -1.0}, "noise_level is -1.0; give 0 or more"),
        ({"kp": -3.0}, "kp is -3.0; give 0 or more"),
        ({"solver_iterations": -1}, "solver_iterations is -1; give 0 or more"),
        ({"scales": 3}, "scales is 3, an int: give a LeapScales"),
    ):
        with pytest.raises(SeedbedError, match=words):
            LeapRotate(xml_file=robot, **options)


@pytest.mark.slow
def test_the_task_passes_the_checks_of_tasks(robot):
    check_task(LeapRotate(xml_file=robot))
