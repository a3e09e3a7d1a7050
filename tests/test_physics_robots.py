"""What robots have: servos, friction loss, flags, keyframes, and the forms in which a model can be given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import dog
import mujoco_states as oracle
import random_models
from numpy_jaxpr import evaluate
from seedbed import cli, physics, simd
from seedbed.physics import slots
from seedbed.physics.summary import summary
from seedbed.types import SeedbedError

ARM = """
<mujoco>
  <option timestep="0.004" {option}><flag {flags}/></option>
  <worldbody>
    <geom type="plane" size="5 5 .1"/>
    <body pos="0 0 .4">
      <joint name="a" axis="0 1 0" range="-60 60" frictionloss=".3" stiffness="2" damping=".05"/>
      <geom type="capsule" size=".03" fromto="0 0 0 .2 0 0"/>
      <body pos=".2 0 0" gravcomp=".5">
        <joint name="b" axis="0 1 0" frictionloss=".1" solreflimit=".004 1" range="-90 10"/>
        <geom type="capsule" size=".03" fromto="0 0 0 .3 0 0"/>
      </body>
    </body>
  </worldbody>
  <actuator>
    <position joint="a" kp="20" kv=".5" ctrlrange="-.5 .5"/><velocity joint="b" kv=".2"/>
  </actuator>
  <sensor><jointpos joint="a"/></sensor>
  <keyframe><key name="up" qpos=".3 -.5" qvel="1 0" time="2"/></keyframe>
</mujoco>
"""
FLAGS = (
    ("contact", "gravity", "clampctrl"),
    ("limit", "frictionloss", "spring"),
    ("constraint", "damper"),
    ("actuation", "refsafe"),
    ("spring", "damper"),
)


def arm(*flags: str, option: str = "") -> str:
    return ARM.format(option=option, flags=" ".join(f'{flag}="disable"' for flag in flags))


@pytest.mark.slow
@pytest.mark.parametrize("flags", FLAGS, ids="-".join)
def test_flags_do_what_mujocos_do(flags):
    found = random_models.judge(arm(*flags), 0, 24)
    assert len(found.error) >= 16 and not found.flagged.any(), found.error.max()
    # One of its trajectories may come to rest.
    assert found.excused.sum() <= 4


def test_a_flag_lets_parents_and_children_touch():
    pairs = [list(slots.pairs(physics.load(arm(*flags)))) for flags in ((), ("filterparent",))]
    assert pairs == [[(0, 1), (0, 2)], [(0, 1), (0, 2), (1, 2)]]


@pytest.mark.slow
def test_joints_stick_until_a_force_is_larger_than_their_friction_loss():
    text = arm("gravity", "contact", option='integrator="implicitfast"')
    model = physics.load(text)
    states = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (16, *jnp.shape(x))),
        physics.init(model, jnp.zeros(2, jnp.float32)),
    )
    step = jax.jit(simd.vectorize(lambda state, ctrl: physics.step_data(model, state, ctrl)))
    # The servo's 0.2 N m are below the loss of 0.3, its 8 N m above.
    for ctrl, force in ((0.01, -0.2), (0.4, -0.3)):
        data = step(states, jnp.full((16, 2), ctrl))
        for _ in range(20):
            data = step(data.state, jnp.full((16, 2), ctrl))
        np.testing.assert_allclose(data.qfrc_constraint[:, 0], force, rtol=0.1)


@pytest.mark.slow
def test_derivatives_go_through_servos_and_friction_loss():
    model = physics.load(arm("contact"))
    compiled = mujoco.MjModel.from_xml_string(arm("contact"))
    compiled.opt.tolerance, compiled.opt.iterations = 1e-15, 300
    qpos, qvel, ctrl = np.array([0.1, -0.4]), np.array([0.8, 1e-3]), np.array([0.2, 0.1])
    with jax.enable_x64(True):

        def after(qvel: jax.Array, ctrl: jax.Array) -> jax.Array:
            return physics.step(model, physics.init(model, jnp.asarray(qpos), qvel), ctrl).qvel

        ours = jax.jit(jax.jacfwd(after, (0, 1)))(jnp.asarray(qvel), jnp.asarray(ctrl))
    data, h = mujoco.MjData(compiled), 1e-6
    for ours_by, given in zip(ours, (qvel, ctrl), strict=True):
        for k in range(2):
            ends = []
            for sign in (1, -1):
                mujoco.mj_resetData(compiled, data)
                data.qpos, data.qvel, data.ctrl = qpos, qvel, ctrl
                (data.qvel if given is qvel else data.ctrl)[k] += sign * h
                mujoco.mj_step(compiled, data)
                ends.append(np.array(data.qvel))
            np.testing.assert_allclose(ours_by[:, k], (ends[0] - ends[1]) / (2 * h), atol=1e-6)


def test_keyframes_begin_where_the_file_says():
    model = physics.load(arm())
    for key in ("up", 0, np.int64(0)):
        state = physics.init(model, keyframe=key)
        np.testing.assert_allclose(state.qpos, [0.3, -0.5], rtol=1e-6)
        np.testing.assert_allclose(state.qvel, [1, 0])
        assert state.time == 2
    for key in ("down", 1, -1):
        with pytest.raises(SeedbedError, match=f"no keyframe {key!r}.*: up"):
            physics.init(model, keyframe=key)


def test_a_model_that_was_edited_is_taken_as_it_is():
    spec = mujoco.MjSpec.from_string(arm())
    compiled = spec.compile()
    compiled.actuator_gainprm[0, 0] = 7
    assert physics.load(spec).actuator_gainprm[0, 0] == 20
    assert physics.load(compiled).actuator_gainprm[0, 0] == 7
    assert physics.load(compiled).actuator_biasprm[0].tolist() == [0, -20, -0.5]
    # Loading leaves it alone.
    disabled = mujoco.MjModel.from_xml_string(arm("contact"))
    physics.load(disabled)
    assert disabled.geom_contype.any() and disabled.opt.disableflags


def test_what_is_easily_overlooked_in_a_model_is_told():
    xml = """<mujoco><worldbody><geom type="plane" size="5 5 .1"/><body>
      <joint name="knee" axis="0 1 0" range="20 90" limited="true"/><geom size=".1" condim="1"/></body>
      </worldbody><actuator><motor joint="knee"/></actuator>
      <keyframe><key name="home" qpos="1"/><key qpos="2"/></keyframe></mujoco>"""
    told = "\n".join(summary(xml))
    assert "1; 1 of them without a range of controls" in told and "condim 3" in told
    assert "qpos0 has knee at 0, outside of 0.3491 to 1.571" in told
    assert "keyframe 1 has knee at 2" in told and "home has" not in told


@pytest.mark.slow
def test_a_robot_of_ones_own_is_told_of_and_can_be_trained(capsys):
    examples = Path(__file__).parents[1] / "examples"
    assert cli.main(["check", str(examples / "dog.xml")]) == 0
    page = (examples.parent / "docs" / "train-your-robot.md").read_text()
    assert f"```\n{capsys.readouterr().out}```" in page
    assert cli.main(["check", str(examples / "nowhere.xml")]) == 1
    assert "cannot compile" in capsys.readouterr().err
    task = dog.Dog()
    state = jax.jit(simd.vectorize(task.reset))(jax.random.split(jax.random.key(0), 16))
    step = jax.jit(simd.vectorize(task.step))
    for _ in range(20):
        state = step(state, jnp.zeros((16, 12)))
    now = state.timestep
    assert now.observation.shape == (16, 30) and np.isfinite(now.observation).all()
    # It stands by its servos.
    assert not now.terminated.any() and (now.reward > 0).all()


WELDED = '<body pos=".1 .05 .02" euler="20 0 0"><geom type="box" size=".03 .04 .05"/></body>'


def test_a_free_body_without_joints_turns_as_mujocos_implicitfast():
    welded = WELDED + WELDED.replace(".1 .", "-.1 .")
    text = (
        '<mujoco><option integrator="implicitfast" timestep=".01"/><worldbody><body pos="0 0 1">'
        f'<freejoint/><geom type="capsule" size=".05 .2" pos=".1 0 .05" euler="30 0 0"/>{welded}</body>'
        "</worldbody></mujoco>"
    )
    compiled = oracle.oracle(text)
    rng, n = np.random.default_rng(0), 16
    qpos = np.tile(compiled.qpos0, (n, 1))
    qvel = np.float64(np.float32(rng.normal(size=(n, 6)) * 5))
    cases = oracle.Cases(np.float64(np.float32(qpos)), qvel, np.zeros((n, 0)), np.zeros((n, 6)))
    own = random_models.own_step(text, cases)
    assert oracle.step_error(compiled, cases, np.asarray(own[1], np.float64)).max() < 1e-5


BOXES = """
<mujoco>
  <option timestep="0.004"/>
  <worldbody>
    <geom type="plane" size="5 5 .1" euler="3 -2 0" contype="2"/>
    <geom type="box" pos=".6 0 .1" size=".3 .2 .1" euler="0 10 20" conaffinity="4"/>
    <body pos="0 0 .2"><freejoint/><geom type="box" size=".1 .05 .2" contype="0" conaffinity="2"/></body>
    <body pos=".5 0 .4"><freejoint/><geom size=".07" pos=".1 0 0" contype="4" conaffinity="2"/>
      <geom size=".03" contype="4" conaffinity="2"/></body>
  </worldbody>
</mujoco>
"""


def test_boxes_touch_planes_and_spheres_as_mujocos_do():
    found = random_models.judge(BOXES, 3, 60)
    assert len(found.error) > 40 and not found.flagged.any(), found.error.max()
    assert found.excused.mean() < 0.2


@pytest.mark.slow
def test_a_sphere_inside_a_box_leaves_by_the_nearest_face():
    text = BOXES.replace('pos=".5 0 .4"', 'pos=".55 .05 .1"')
    compiled, rng, n = oracle.oracle(text), np.random.default_rng(0), 32
    qpos = np.tile(compiled.qpos0, (n, 1))
    qpos[:, 7:10] += rng.uniform(-0.05, 0.05, (n, 3))
    qpos[:, :2] += 5
    cases = oracle.Cases(
        np.float64(np.float32(qpos)), np.zeros((n, 12)), np.zeros((n, 0)), np.zeros((n, 12))
    )
    own = random_models.own_step(text, cases)
    error = oracle.step_error(compiled, cases, np.asarray(own[1], np.float64))
    assert np.median(error) < 1e-5 and np.quantile(error, 0.9) < 1e-3


SENSORS = """
<mujoco>
  <option timestep="0.004" integrator="{integrator}"/>
  <worldbody>
    <geom type="plane" size="5 5 .1"/>
    <site name="post" pos=".3 .2 .1" euler="10 20 30"/>
    <body name="trunk" pos="0 0 .3"><freejoint/>
      <geom name="trunk" type="box" size=".15 .1 .05" pos=".02 0 0" euler="0 5 0"/>
      <site name="imu" pos=".05 .02 .03" euler="30 40 50"/>
      <body name="leg" pos=".15 0 0"><joint name="hip" axis="0 1 0"/><site name="ankle" euler="10 0 5"/>
        <geom type="capsule" size=".03" fromto="0 0 0 0 0 -.2" contype="0" conaffinity="0"/>
        <body pos="0 0 -.2"><joint name="knee" axis="0 1 0"/>
          <geom name="shin" type="capsule" size=".03" fromto="0 0 0 0 0 -.2" contype="0" conaffinity="0"/>
          <site name="toe" pos="0 0 -.2" euler="0 30 0"/></body></body></body>
  </worldbody>
  <actuator><position name="servo" joint="hip" kp="20" gear="2"/>
    <motor name="drive" joint="knee" forcerange="-1 1"/></actuator>
  <sensor>
    <gyro name="gyro" site="imu"/><velocimeter site="imu"/><accelerometer name="up" site="imu"/>
    <accelerometer site="toe"/><accelerometer site="post"/><gyro site="post" cutoff="1"/>
    <framepos objtype="site" objname="toe"/>
    <framepos objtype="geom" objname="shin" reftype="site" refname="imu"/>
    <framequat objtype="site" objname="toe"/><framequat objtype="xbody" objname="leg"/>
    <framequat objtype="geom" objname="shin" reftype="site" refname="post"/>
    <framequat objtype="body" objname="trunk" reftype="body" refname="leg"/>
    <framexaxis objtype="site" objname="imu"/><frameyaxis objtype="body" objname="trunk"/>
    <framezaxis objtype="xbody" objname="leg" reftype="body" refname="trunk"/>
    <framelinvel objtype="body" objname="leg"/><frameangvel objtype="geom" objname="shin"/>
    <framelinvel objtype="site" objname="toe" reftype="site" refname="imu"/>
    <frameangvel objtype="site" objname="toe" reftype="xbody" refname="trunk"/>
    <framelinvel objtype="site" objname="post" reftype="site" refname="imu"/>
    <framelinacc objtype="site" objname="toe"/><frameangacc objtype="body" objname="leg"/>
    <jointpos joint="hip"/><jointvel joint="knee" cutoff=".2"/><jointactuatorfrc joint="hip"/>
    <actuatorpos actuator="servo"/><actuatorvel actuator="servo"/><actuatorfrc actuator="drive"/>
    <subtreecom body="leg"/><subtreelinvel body="trunk"/><clock/>
    <force site="toe"/><torque site="toe"/><force site="ankle"/><torque site="ankle"/>
    <subtreeangmom body="leg"/><subtreeangmom body="trunk"/><magnetometer name="compass" site="toe"/>
  </sensor>
</mujoco>
"""


@pytest.mark.slow
@pytest.mark.parametrize("integrator", ["Euler", "RK4"])
def test_sensors_read_what_mujocos_read(integrator):
    text = SENSORS.format(integrator=integrator)
    compiled, model = oracle.oracle(text), physics.load(text)
    cases = random_models.states(compiled, 36, 0)
    step = jax.jit(simd.vectorize(lambda q, v, c, w: physics.step_data(
        model, physics.init(model, q, v)._replace(qacc_warmstart=w), c
    )))  # fmt: skip
    data = step(*(jnp.asarray(x, jnp.float32) for x in cases))
    wanted = oracle.after_step(compiled, cases, ["sensordata", "actuator_force"])
    np.testing.assert_allclose(data.actuator_force, wanted["actuator_force"], rtol=1e-4, atol=1e-5)
    for sensor in model.sensors[:-1]:
        ours, theirs = (
            np.asarray(x)[:, sensor.adr : sensor.adr + sensor.dim]
            for x in (data.sensordata, wanted["sensordata"])
        )
        scale = max(np.abs(theirs).max(), 1e-2)
        np.testing.assert_allclose(ours / scale, theirs / scale, atol=1e-4, err_msg=str(sensor))
    assert np.isnan(data.sensordata[:, model.sensors[-1].adr]).all()
    one = jax.tree.map(lambda x: x[0], data)
    np.testing.assert_array_equal(physics.sensor(model, one, "up"), one.sensordata[6:9])
    with pytest.raises(SeedbedError, match="no sensor 'gyr'; did you mean gyro"):
        physics.sensor(model, one, "gyr")
    with pytest.raises(SeedbedError, match="compass is of a kind that is not simulated"):
        physics.sensor(model, one, "compass")


def test_a_sensor_of_a_batch_is_that_of_each():
    model = physics.load(SENSORS.format(integrator="Euler"))
    data = physics.make_data(model, physics.init(model))
    read = np.arange(2.0 * data.sensordata.size).reshape(2, -1)
    found = physics.sensor(model, data._replace(sensordata=read), "up")
    np.testing.assert_array_equal(found, read[:, 6:9])


TOUCH = """
<mujoco>
  <worldbody>
    <geom type="plane" size="5 5 .1"/>
    <site name="ground" type="box" size=".1 .2 .1"/>
    <body name="trunk" pos="0 0 .12"><freejoint/>
      <geom type="box" size=".15 .1 .05"/>
      <site name="ball" pos=".15 .1 -.05" size=".02"/>
      <site name="pill" type="capsule" pos="-.15 .1 -.05" size=".03 .05" euler="90 20 0"/>
      <site name="egg" type="ellipsoid" pos=".15 -.1 -.05" size=".03 .01 .05" euler="40 20 0"/>
      <site name="can" type="cylinder" pos="-.15 -.1 -.05" size=".03 .02" euler="10 20 30"/>
      <site name="bar" type="box" pos="0 0 -.05" size=".2 .02 .03" euler="0 0 40"/>
      <site name="far" pos=".15 .1 -.3" size=".05"/>
      <body pos=".2 0 0"><joint axis="0 1 0" damping=".1"/>
        <geom type="capsule" size=".03" fromto="0 0 0 .1 0 -.1"/><site name="toe" pos=".1 0 -.1" size=".03"/>
      </body></body>
    <body name="load" pos="0 0 .3"><freejoint/><geom size=".06"/><site name="skin" size=".061"/></body>
  </worldbody>
  <sensor>%s</sensor>
</mujoco>
"""


@pytest.mark.slow
def test_touch_sensors_feel_the_forces_that_mujocos_feel():
    names = ("ground", "ball", "pill", "egg", "can", "bar", "far", "toe", "skin")
    text = TOUCH % "".join(f'<touch site="{name}"/>' for name in names)
    compiled, model = oracle.oracle(text), physics.load(text)
    data, rng, found = mujoco.MjData(compiled), np.random.default_rng(0), []
    while len(found) < 120:
        mujoco.mj_resetData(compiled, data)
        mujoco.mj_integratePos(compiled, data.qpos, 0.3 * rng.normal(size=compiled.nv), 1)
        data.qpos[[0, 1, 2, 8, 9, 10]] = (
            *rng.normal(size=2) * 0.05,
            0.2,
            *rng.normal(size=2) * 0.08,
            0.5,
        )
        for t in range(400):
            if t % 25 == 24:
                fields = data.qpos, data.qvel, data.ctrl, data.qacc_warmstart
                found.append([np.float64(np.float32(x)) for x in fields])
            mujoco.mj_step(compiled, data)
    cases = oracle.Cases(*(np.stack(column) for column in zip(*found, strict=True)))
    wanted = oracle.after_step(compiled, cases, ["sensordata"])["sensordata"]
    assert (np.delete(wanted, 6, axis=1) > 0).sum(0).min() >= 5, "each is touched"

    def step(*state: Any) -> Any:
        qpos, qvel, ctrl, warmstart = state
        now = physics.init(model, qpos, qvel)._replace(qacc_warmstart=warmstart)
        return physics.step_data(model, now, ctrl).sensordata

    exact = evaluate(jax.vmap(step), *cases)
    np.testing.assert_allclose(exact, wanted, rtol=1e-6, atol=1e-6 * wanted.max())
    single = jax.jit(simd.vectorize(step))(*(jnp.asarray(x, jnp.float32) for x in cases))
    close = np.isclose(single, wanted, rtol=1e-3, atol=1e-4 * wanted.max())
    assert close.mean() > 0.99  # a ray may graze a site


TENDONS = """
<mujoco>
  <option timestep="0.004" integrator="{integrator}"/>
  <worldbody>
    <geom type="plane" size="5 5 .1"/>
    <body pos="0 0 .4"><joint name="a" axis="0 1 0"/><geom type="capsule" size=".03" fromto="0 0 0 .2 0 0"/>
      <body pos=".2 0 0"><joint name="b" axis="0 1 0"/><geom type="capsule" size=".03" fromto="0 0 0 .3 0 0"/>
        <body pos=".3 0 0"><joint name="c" type="slide" axis="1 0 0" range="-.1 .1"/>
          <geom size=".05" name="hand"/></body></body></body>
  </worldbody>
  <tendon>
    <fixed name="pull" {spring}><joint joint="a" coef="1"/><joint joint="b" coef="-.7"/></fixed>
    <fixed name="reel"><joint joint="c" coef="2"/><joint joint="a" coef=".1"/></fixed>
  </tendon>
  <actuator>
    <position name="puller" tendon="pull" kp="9" {servo} ctrlrange="-1 1" gear="1.5"/>
    <motor tendon="reel" gear="3"/>
    <motor joint="b" gear=".5"/>
  </actuator>
  <sensor><tendonpos tendon="pull"/><tendonvel tendon="reel"/><actuatorpos actuator="puller"/></sensor>
</mujoco>
"""
SPRING, SERVO = 'stiffness="4" springlength=".1 .4" damping=".3"', 'kv=".2"'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("integrator", "spring", "servo"),
    [("Euler", SPRING, SERVO), ("RK4", SPRING, SERVO), ("implicitfast", 'stiffness="4"', "")],
)
def test_fixed_tendons_pull_as_mujocos_do(integrator, spring, servo):
    text = TENDONS.format(integrator=integrator, spring=spring, servo=servo)
    found = random_models.judge(text, 0, 40)
    assert len(found.error) > 30 and not found.flagged.any(), found.error.max()
    assert found.excused.mean() < 0.1


@pytest.mark.slow
def test_tendons_are_sensed_and_have_energy():
    text = TENDONS.format(integrator="Euler", spring=SPRING, servo=SERVO)
    compiled, model = mujoco.MjModel.from_xml_string(text), physics.load(text)
    compiled.opt.enableflags |= int(mujoco.mjtEnableBit.mjENBL_ENERGY)
    data, rng = mujoco.MjData(compiled), np.random.default_rng(0)
    cases = [rng.normal(size=(8, 3)) * size for size in (0.5, 1)]

    def both(qpos, qvel):
        state = physics.init(model, qpos, qvel)
        sensed = physics.step_data(model, state, jnp.zeros(3)).sensordata
        return sensed, physics.energy(model, state)

    sensed, energy = jax.jit(jax.vmap(both))(*(jnp.asarray(x, jnp.float32) for x in cases))
    for i in range(8):
        data.qpos, data.qvel = cases[0][i], cases[1][i]
        mujoco.mj_forward(compiled, data)
        np.testing.assert_allclose(sensed[i], data.sensordata, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(energy[i], data.energy, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("integrator", "spring", "servo", "told"),
    [
        ("implicitfast", SPRING, "", "implicitfast with damping of tendon"),
        ("implicitfast", "", SERVO, "implicitfast with a servo that damps a tendon or site"),
    ],
)
def test_tendons_that_are_not_simulated_are_refused(integrator, spring, servo, told):
    with pytest.raises(SeedbedError, match=told):
        physics.load(TENDONS.format(integrator=integrator, spring=spring, servo=servo))
