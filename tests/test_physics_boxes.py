"""Contacts of boxes, against MuJoCo's: pairs of random boxes and capsules that just touch, and models."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import random_models
from seedbed import physics, simd
from seedbed.physics.boxes import box_box
from seedbed.physics.capsule_box import capsule_box
from seedbed.physics.narrow import Geom
from seedbed.types import SeedbedError

REACH = np.float32(0.002)
BOX = 'type="box" size=".1 .1 .1"'
CAPSULE = 'type="capsule" size=".1 .1"'


def pair(geom: str, other: str = BOX) -> Any:
    bodies = "".join(f'<body><freejoint/><geom {g} margin=".001"/></body>' for g in (geom, other))
    return mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{bodies}</worldbody></mujoco>")


def quaternion(rng: np.random.Generator, kind: int) -> np.ndarray:
    """Any turn, one about z, or nearly none."""
    drawn = rng.normal(size=4)
    if kind == 1:
        drawn[1:3] = 0
    if kind == 2:
        drawn = np.array([1, 0, 0, 0]) + 1e-3 * drawn
    return np.float32(drawn / np.linalg.norm(drawn))


def touch(model: Any, rng: np.random.Generator, kind: int) -> Any:
    """Data of two geoms of random sizes that touch, or overlap by up to a tenth of their distance."""
    data = mujoco.MjData(model)
    sizes = rng.uniform(0.05, 0.3, (2, 3))
    if model.geom_type[0] == mujoco.mjtGeom.mjGEOM_CAPSULE:
        sizes[0, 0] *= 0.3
    model.geom_size[:] = np.float32(sizes)
    model.geom_rbound[:] = 2
    data.qpos[3:7], data.qpos[10:14] = quaternion(rng, kind), quaternion(rng, kind)
    way = rng.normal(size=3)
    way /= np.linalg.norm(way)
    near, far = 0.0, 1.5
    for _ in range(12):
        data.qpos[7:10] = 0.5 * (near + far) * way
        mujoco.mj_forward(model, data)
        near, far = (0.5 * (near + far), far) if data.ncon else (near, 0.5 * (near + far))
    data.qpos[7:10] = np.float32(near * rng.uniform(0.9, 1) * way)
    mujoco.mj_forward(model, data)
    return data


def geom(model: Any, data: Any, g: int) -> Geom:
    turn, size = np.float32(data.geom_xmat[g]).reshape(3, 3), np.float32(model.geom_size[g])
    return Geom(np.float32(data.geom_xpos[g]), turn[:, 2], turn[:, 0], *size)


@pytest.mark.parametrize(("first", "collider"), [(BOX, box_box), (CAPSULE, capsule_box)])
def test_contacts_are_mujocos(first, collider):
    model, rng, cases, expected = pair(first), np.random.default_rng(0), [], []
    for case in range(300):
        data = touch(model, rng, case % 3)
        cases.append((geom(model, data, 0), geom(model, data, 1)))
        rows = [np.concatenate([[c.dist], c.pos, c.frame[:3]]) for c in data.contact]
        expected.append(np.array(rows).reshape(-1, 7))

    def collide(one: Geom, two: Geom) -> Any:
        touches = collider(one, two, REACH)
        rows = [jnp.concatenate([t.dist[None], t.pos, jnp.asarray(t.normal)]) for t in touches]
        return jnp.stack(rows), jnp.stack([t.exists & (t.dist <= REACH) for t in touches])

    given = jax.tree.map(lambda *leaves: np.stack(leaves), *cases)
    found, exists = jax.tree.map(np.asarray, jax.jit(simd.vectorize(collide))(*given))
    wrong = 0
    for rows, here, others in zip(found, exists, expected, strict=True):
        near = len(others) == here.sum() and all(
            np.abs(rows[here] - other).max(1).min() < 1e-5 for other in others
        )
        wrong += not near
    # A capsule that is as near to a face as to an edge may have its second point elsewhere.
    assert wrong <= 3
    assert {len(rows) for rows in expected} >= ({1, 2, 4, 5} if collider is box_box else {1, 2})


STACK = """
<mujoco>
  <option timestep="0.004"/>
  <worldbody>
    <geom type="plane" size="5 5 .1"/>
    <body pos="0 0 .1"><freejoint/><geom type="box" size=".1 .15 .1"/></body>
    <body pos=".03 .02 .28" euler="0 0 20"><freejoint/><geom type="box" size=".08 .1 .08"/></body>
    <body pos=".02 0 .45" euler="0 80 0"><freejoint/><geom type="capsule" size=".04 .1"/></body>
  </worldbody>
</mujoco>
"""


@pytest.mark.slow
def test_a_stack_moves_as_mujocos():
    found = random_models.judge(STACK, 0, 60)
    assert len(found.error) > 40 and not found.flagged.any(), found.error.max()
    assert found.excused.mean() < 0.2


PAIRS = """
<mujoco>
  <option timestep="0.004"><flag {flag}/></option>
  <worldbody>
    <geom name="floor" type="plane" size="5 5 .1" contype="0" conaffinity="0"/>
    <body name="trunk" pos="0 0 .3"><freejoint/><geom name="hull" type="box" size=".1 .1 .05" contype="0" conaffinity="0"/>
      <body name="leg" pos=".16 0 0"><joint axis="0 1 0"/>
        <geom name="foot" type="capsule" size=".03" fromto="0 0 0 .1 0 -.2" contype="0" conaffinity="0"/></body></body>
  </worldbody>
  <contact>
    <exclude body1="trunk" body2="leg"/>
    <pair geom1="foot" geom2="floor" condim="3" friction=".4 .4" solref=".01 1" solimp=".8 .9 .01" margin=".01" gap=".004"/>
    <pair geom1="hull" geom2="floor" condim="1"/>
    <pair geom1="hull" geom2="foot" condim="1" solref=".03 1"/>
  </contact>
  <sensor>{sensors}</sensor>
</mujoco>
"""  # noqa: E501


def ncon(model: physics.Model, qpos: np.ndarray) -> int:
    def count(qpos: Any) -> Any:
        start = physics.init(model, qpos, jnp.zeros(model.nv))
        return physics.step_data(model, start, jnp.zeros(0)).ncon

    return int(jax.jit(simd.vectorize(count))(qpos[None])[0])


@pytest.mark.slow
def test_named_pairs_have_their_own_constants():
    found = random_models.judge(PAIRS.format(flag="", sensors=""), 0, 60)
    assert len(found.error) > 40 and not found.flagged.any(), found.error.max()
    assert found.excused.mean() < 0.2


@pytest.mark.slow
def test_named_pairs_count_as_contacts():
    text = PAIRS.format(flag="", sensors="")
    compiled, model = mujoco.MjModel.from_xml_string(text), physics.load(text)
    data = mujoco.MjData(compiled)
    data.qpos[2] = 0.04
    mujoco.mj_forward(compiled, data)
    assert ncon(model, np.float32(data.qpos)) == data.ncon > 2


def test_no_contacts_means_no_named_pairs():
    model = physics.load(PAIRS.format(flag='contact="disable"', sensors=""))
    assert ncon(model, np.float32(model.qpos0)) == 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (('condim="3"', 'condim="4"'), "condim=4 of contact pair"),
        (('friction=".4 .4"', 'friction=".4 .3"'), "contact pair with two frictions"),
    ],
)
def test_pairs_that_are_not_simulated_are_refused(change, told):
    with pytest.raises(SeedbedError, match=told) as caught:
        physics.load(PAIRS.format(flag="", sensors="").replace(*change))
    assert "foot" in str(caught.value) and "floor" in str(caught.value)


@pytest.mark.slow
def test_friction_of_a_pair_and_gains_are_inputs():
    text = PAIRS.format(flag="", sensors="").replace(
        "<contact>", '<actuator><position joint="bend" kp="3" kv=".1"/></actuator><contact>'
    )
    text = text.replace('<joint axis="0 1 0"/>', '<joint name="bend" axis="0 1 0"/>')
    compiled, model = mujoco.MjModel.from_xml_string(text), physics.load(text)
    compiled.opt.tolerance, rng = 1e-12, np.random.default_rng(0)
    data, n = mujoco.MjData(compiled), 8
    gain = np.float32(rng.uniform(1, 5, (n, 1, 1)))
    friction = np.float32(rng.uniform(0, 1, (n, 3, 1)) * np.ones(5))
    qvel = np.float32(rng.normal(size=(n, 7)))
    qpos = np.tile(np.float32(compiled.qpos0), (n, 1))
    qpos[:, 2] = 0.195

    def one(qpos: Any, qvel: Any, gain: Any, friction: Any) -> Any:
        changed = model.replace(
            pair_friction=friction,
            actuator_gainprm=gain * np.float32([[1, 0, 0]]),
            actuator_biasprm=gain * np.float32([[0, -1, -0.1]]),
        )
        return physics.step(changed, physics.init(changed, qpos, qvel), jnp.ones(1)).qvel

    found = jax.jit(simd.vectorize(one))(qpos, qvel, gain, friction)
    for i in range(n):
        mujoco.mj_resetData(compiled, data)
        data.qpos, data.qvel, data.ctrl = qpos[i], qvel[i], 1
        compiled.actuator_gainprm[0, 0] = gain[i, 0, 0]
        compiled.actuator_biasprm[0, 1:3] = -gain[i, 0, 0] * np.array([1, 0.1])
        compiled.pair_friction[:] = friction[i]
        mujoco.mj_step(compiled, data)
        np.testing.assert_allclose(found[i], data.qvel, rtol=1e-3, atol=1e-4)
    assert data.ncon


@pytest.mark.slow
@pytest.mark.parametrize("turn", ["0 0 0", "45 0 0", "0 0 45", "30 20 0"])
def test_boxes_of_one_turn_meet_by_their_faces(turn):
    """Faces and edges are equally far apart there, and rounding must not choose an edge."""
    model = pair(BOX)
    data = mujoco.MjData(model)
    spec = mujoco.MjSpec()
    body = spec.worldbody.add_body()
    body.alt.euler, spec.compiler.degree = [float(x) for x in turn.split()], True
    quat = np.float32(spec.compile().body_quat[1])
    data.qpos[3:7] = data.qpos[10:14] = quat
    mujoco.mj_kinematics(model, data)
    up = data.geom_xmat[0].reshape(3, 3)[:, 2]
    data.qpos[7:10] = np.float32(0.1998 * up + 0.03 * data.geom_xmat[0].reshape(3, 3)[:, 0])
    mujoco.mj_forward(model, data)
    touches = jax.jit(box_box)(geom(model, data, 0), geom(model, data, 1), REACH)
    assert sum(bool(t.exists) for t in touches) == data.ncon == 4
    assert all(abs(float(t.dist) + 0.0002) < 1e-6 for t in touches if bool(t.exists))


COUNTED = """
<contact geom1="foot" geom2="floor" reduce="mindist" num="1" data="found"/>
<contact geom1="floor" geom2="foot" num="3" data="found"/><contact body1="trunk" num="2" data="found"/>
<contact subtree1="trunk" geom2="floor" reduce="netforce" data="found"/><contact data="found" num="8"/>
<contact geom1="hull" body2="leg" data="found"/>
"""


@pytest.mark.slow
def test_contact_sensors_count_as_mujocos():
    text = PAIRS.format(flag="", sensors=COUNTED).replace(' gap=".004"', "")
    compiled, model = mujoco.MjModel.from_xml_string(text), physics.load(text)
    data, rng, n = mujoco.MjData(compiled), np.random.default_rng(0), 40
    qpos = np.tile(np.float32(compiled.qpos0), (n, 1))
    qpos[:, 2] = rng.uniform(0.02, 0.2, n)
    qpos[:, 4:7], qpos[:, 7] = 0.1 * rng.normal(size=(n, 3)), rng.uniform(-3, 3, n)

    def read(qpos: Any) -> Any:
        start = physics.init(model, qpos, jnp.zeros(model.nv))
        return physics.step_data(model, start, jnp.zeros(0)).sensordata

    found = np.asarray(jax.jit(simd.vectorize(read))(qpos))
    expected = []
    for row in qpos:
        data.qpos = row
        mujoco.mj_forward(compiled, data)
        expected.append(data.sensordata.copy())
    np.testing.assert_array_equal(found, expected)
    assert (np.max(expected, axis=0)[[0, 1, 2, 4, 6, 7]] > 0).all()


def test_a_gap_keeps_a_contact_sensor_from_counting():
    model = physics.load(PAIRS.format(flag="", sensors=COUNTED))
    assert not any(sensor.simulated for sensor in model.sensors)
