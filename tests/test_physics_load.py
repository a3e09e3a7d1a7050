"""Loading: the eleven models, what is refused and how it is named, merged bodies, replaced leaves."""

from __future__ import annotations

import re

import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import mujoco_states
from seedbed import cli, physics
from seedbed.physics import math
from seedbed.types import SeedbedError

BODY = """
<mujoco>
  <option {option}>{flag}</option>
  <worldbody>
    <geom name="floor" type="plane" size="1 1 1" contype="{floor}"/>
    {world}
    <body name="box" pos="0 0 1" {body}>
      <joint name="hinge" {joint}/>
      <geom name="ball" {geom}/>
      <site name="tip"/>
      {inner}
    </body>
  </worldbody>
  {rest}
</mujoco>
"""


DEFAULTS = {"floor": "1", "geom": 'size=".1"'}


def xml(**parts: str) -> str:
    names = ("option", "flag", "floor", "world", "body", "joint", "geom", "inner", "rest")
    return BODY.format(**dict.fromkeys(names, "") | DEFAULTS | parts)


CORD = '<tendon><fixed name="cord" {}><joint joint="hinge" coef="1"/></fixed></tendon>'
REFUSED = {
    "integrator='implicit'": {"option": 'integrator="implicit"'},
    "implicitfast in a medium": {"option": 'integrator="implicitfast" density="1"'},
    "cone='elliptic'": {"option": 'cone="elliptic"'},
    "noslip_iterations=3": {"option": 'noslip_iterations="3"'},
    "flag override='enable'": {"flag": '<flag override="enable"/>'},
    "ball joint before another (hinge)": {"joint": 'type="ball"/><joint type="slide"'},
    "polynomial of joint (hinge)": {"joint": 'damping="1 2 3"'},
    "stiffness of free joint (hinge)": {"joint": 'type="free" stiffness="1"'},
    "fluidshape='ellipsoid' of geom (ball)": {"geom": 'size=".1" fluidshape="ellipsoid"'},
    "plane-ellipsoid contact (floor with ball)": {"geom": 'type="ellipsoid" size=".1 .1 .1"'},
    "condim=6 of geom (ball)": {"geom": 'size=".1" condim="6"'},
    "actuator with the activation muscle (arm)": {
        "rest": '<actuator><general name="arm" joint="hinge" dyntype="muscle"/></actuator>'
    },
    "actuator that is not affine (arm)": {
        "rest": '<actuator><general name="arm" joint="hinge" gaintype="muscle" lengthrange="0 1" '
        'gainprm=".75 1.05 -1 200 .5 1.6 1.5 1.3 1.2"/>'
        "</actuator>"
    },
    "actuator on no hinge or slide (arm)": {
        "world": '<site name="there"/>',
        "rest": '<actuator><motor name="arm" cranksite="tip" slidersite="there" cranklength="1"/>'
        "</actuator>",
    },
    "actuator with refsite (arm)": {
        "world": '<site name="there"/>',
        "rest": '<actuator><motor name="arm" site="tip" refsite="there"/></actuator>',
    },
    "equality constraint": {
        "rest": CORD.format("") + '<equality><tendon tendon1="cord"/></equality>',
    },
    "condim=4 of contact pair": {
        "rest": '<contact><pair geom1="floor" geom2="ball" condim="4"/></contact>'
    },
    "adhesion of contact pair (floor with ball)": {
        "rest": '<contact><pair geom1="floor" geom2="ball" adhesion="1"/></contact>'
    },
    "actuatorfrcrange of tendon (cord): remove it": {
        "rest": CORD.format('actuatorfrclimited="true" actuatorfrcrange="-1 1"')
    },
    "springyield of tendon (cord): remove it": {
        "rest": CORD.format('stiffness="1" springyield="1"')
    },
    "limits of spatial of tendon (string): use a fixed one": {
        "world": '<site name="a"/><site name="b" pos="1 0 0"/>',
        "rest": '<tendon><spatial name="string" limited="true" range="0 1"><site site="a"/>'
        '<site site="b"/></spatial></tendon>',
    },
}


@pytest.mark.parametrize("name", mujoco_states.MODELS)
def test_gymnasium_models_load(name):
    model = physics.load(mujoco_states.path(name))
    compiled = mujoco.MjModel.from_xml_path(str(mujoco_states.path(name)))
    assert (model.nq, model.nv, model.nu) == (compiled.nq, compiled.nv, compiled.nu)
    np.testing.assert_array_equal(model.geom_friction, compiled.geom_friction)
    assert model.opt.timestep == compiled.opt.timestep
    # Masses that move are all there, whichever body they were merged into.
    moving = compiled.body_weldid > 0
    np.testing.assert_allclose(model.parts.mass.sum(), compiled.body_mass[moving].sum())


def test_a_plain_model_loads_from_text():
    model = physics.load(xml())
    assert model.nv == 1
    assert physics.load("\n" + xml()).nv == 1


@pytest.mark.parametrize("complaint", REFUSED)
def test_unsupported_elements_are_named(complaint):
    with pytest.raises(SeedbedError) as error:
        physics.load(xml(**REFUSED[complaint]))
    first, *lines = str(error.value).splitlines()
    if not lines:
        lines = [first.removeprefix("the XML text uses something that cannot be simulated: ")]
    assert complaint in lines[-1]
    assert all(": " in line for line in lines)  # and what to do


def test_the_condim_that_counts_is_refused_and_no_other():
    source = (
        '<mujoco><worldbody><geom type="plane" size="1 1 1" condim="{}" priority="{}"/>'
        '<body><freejoint/><geom size=".1" condim="{}"/></body></worldbody></mujoco>'
    )
    assert physics.load(source.format(3, 1, 6)).ngeom == 2
    for given in ((6, 1, 3), (3, 0, 6), (3, -1, 6)):
        with pytest.raises(SeedbedError, match="condim=6 of geom"):
            physics.load(source.format(*given))


def test_a_model_that_cannot_move_is_refused():
    with pytest.raises(SeedbedError, match="without joints: add one"):
        physics.load("<mujoco/>")


QUADRUPED = """
<mujoco model="a small robot">
  <option cone="elliptic" impratio="10"/>
  <default><joint frictionloss=".2" damping=".1"/><position kp="30"/></default>
  <worldbody>
    <geom name="floor" type="plane" size="5 5 .1"/>
    <body name="torso" pos="0 0 .4"><freejoint/><geom name="trunk" type="box" size=".2 .1 .05"/>
      <site name="imu"/>{legs}</body>
  </worldbody>
  <actuator>{servos}</actuator>
  <sensor><gyro name="gyro" site="imu"/><accelerometer site="imu"/>{sensors}</sensor>
</mujoco>
"""
LEG = """<body name="{leg}_hip" pos="{x} {y} 0"><joint name="{leg}_abduction" axis="1 0 0"/>
  <geom name="{leg}_hip" size=".04"/><body name="{leg}_thigh">
    <joint name="{leg}_hip_pitch_joint_with_a_long_name" axis="0 1 0"/>
    <geom name="{leg}_thigh" type="cylinder" fromto="0 0 0 0 0 -.2" size=".02"/>
    <body name="{leg}_calf" pos="0 0 -.2"><joint name="{leg}_knee" axis="0 1 0"/>
      <geom name="{leg}_foot" pos="0 0 -.2" size=".02" condim="6"/></body></body></body>"""


def quadruped() -> str:
    """Returns a robot as makers publish them."""
    places = {"FL": (0.2, 0.1), "FR": (0.2, -0.1), "RL": (-0.2, 0.1), "RR": (-0.2, -0.1)}
    joints = ("abduction", "hip_pitch_joint_with_a_long_name", "knee")
    names = [f"{leg}_{joint}" for leg in places for joint in joints]
    return QUADRUPED.format(
        legs="".join(LEG.format(leg=leg, x=x, y=y) for leg, (x, y) in places.items()),
        servos="".join(f'<position name="{name}" joint="{name}"/>' for name in names),
        sensors="".join(f'<jointpos name="{name}" joint="{name}"/>' for name in names),
    )


def test_a_robot_is_refused_in_one_line_for_each_kind(capsys):
    with pytest.raises(SeedbedError) as error:
        physics.load(quadruped())
    first, *lines = str(error.value).splitlines()
    assert first == f"the XML text uses {len(lines)} kinds of things that cannot be simulated:"
    assert all(len(line) <= 80 and line.startswith("  ") for line in lines), lines
    kinds = [re.match(r"  ([^:(]*?) ?(?:\((\d*)|:)", line) for line in lines]
    counts = {kind[1]: kind[2] for kind in kinds if kind}
    assert counts.pop("option cone='elliptic'") is None
    contacts = {kind for kind in counts if kind.endswith(" contact")}
    assert "cylinder-box contact" in contacts
    others = {kind: count for kind, count in counts.items() if kind not in contacts}
    assert others == {"condim=6 of geom": "4"}
    assert "FL_foot" in str(error.value) and "use 1 or 3" in str(error.value)
    # The command line shows all of them, and no traceback.
    assert cli._fail(error.value, [], 1) == 1
    assert capsys.readouterr().err == f"seedbed: {error.value}\n"


def test_names_that_cannot_be_seen_are_written_out(tmp_path):
    name = "&#27;[31m&#8238;evil"
    with pytest.raises(SeedbedError, match=r"joint \(\\x1b\[31m\\u202eevil\): remove it"):
        physics.load(xml(joint='damping="1 2 3"').replace('"hinge"', f'"{name}"'))
    with pytest.raises(SeedbedError, match=r"compile .*a\\x0ab\\x1b\.xml"):
        physics.load(tmp_path / "a\nb\x1b.xml")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (
            "<mujoco><worldbody><body></worldbody></mujoco>",
            "cannot compile the XML text: .*; correct",
        ),
        ("<mujoco><worldbody><spring/></worldbody></mujoco>", "'spring', line 1; correct it"),
        ("/nowhere/at/all.xml", "cannot compile /nowhere/at/all.xml: .*or the path"),
    ],
)
def test_malformed_files_are_reported(source, complaint):
    with pytest.raises(SeedbedError, match=complaint) as error:
        physics.load(source)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_inert_elements_are_accepted():
    mark = '<body mocap="true"><geom size=".1" contype="0" conaffinity="0"/></body>'
    marked = physics.load(xml(world=mark))
    assert marked.body_weldid.tolist() == [0, 0, 2]
    data = physics.forward(marked, physics.init(marked))
    np.testing.assert_array_equal(data.xpos[1], 0)
    tendon = '<tendon><fixed><joint joint="hinge" coef="1"/></fixed></tendon>'
    flag = '<flag energy="enable" warmstart="disable" eulerdamp="disable"/>'
    model = physics.load(xml(rest=tendon, flag=flag))
    assert not model.opt.eulerdamp


def test_leaves_are_replaced_by_name_and_shape():
    model = physics.load(xml())
    heavier = model.replace(body_mass=model.body_mass * 2)
    np.testing.assert_allclose(heavier.parts.mass, 2 * model.parts.mass)
    with pytest.raises(SeedbedError, match="geom_quat is not replaceable; these are: gravity, "):
        model.replace(geom_quat=model.geom_quat)
    with pytest.raises(SeedbedError, match=r"body_mass has shape \(5,\) instead of \(2,\)"):
        model.replace(body_mass=np.ones(5))
    with pytest.raises(SeedbedError, match="body_mass is of type int32: give"):
        model.replace(body_mass=jnp.ones(2, jnp.int32))
    with pytest.raises(SeedbedError, match="body_mass is of type list: give an array"):
        model.replace(body_mass=[1.0, 2.0])


DRIVEN = """<mujoco><option integrator="implicitfast"/><worldbody>
<geom name="floor" type="plane" size="1 1 1"/>
<body pos="0 0 1"><freejoint/><geom name="ball" size=".1"/><site name="tip"/></body></worldbody>
<contact><pair geom1="floor" geom2="ball"/></contact>
<actuator><general site="tip" gaintype="affine" biastype="affine"/></actuator></mujoco>"""


@pytest.mark.parametrize(
    ("leaf", "where", "text"),
    [
        ("jnt_stiffness", np.s_[:], r"row 0 of jnt_stiffness is 7\.0: a free joint has 0"),
        ("pair_friction", np.s_[:, 1], "row 0 of pair_friction is .*give both directions"),
        ("actuator_biasprm", np.s_[:, 2], "with implicitfast, a servo of a tendon or"),
        ("actuator_gainprm", np.s_[:, 2], "with implicitfast, a servo of a tendon or"),
    ],
)
def test_leaves_that_a_file_may_not_have_are_refused(leaf, where, text):
    model = physics.load(DRIVEN)
    value = np.array(model.leaf(leaf))
    value[where] = 7
    with pytest.raises(SeedbedError, match=text):
        model.replace(**{leaf: value})
    with pytest.raises(SeedbedError, match=text):
        model.replace(**{leaf: jnp.asarray(value)})


def test_welded_bodies_are_one_part_unless_traced():
    inner = '<body pos=".1 .2 .3" euler="10 20 30"><geom size=".05 .1 .2" type="ellipsoid"/></body>'
    text = xml(inner=inner, floor="0").replace("<geom", '<geom conaffinity="0"')
    model, compiled = physics.load(text), mujoco.MjModel.from_xml_string(text)
    assert model.parts.body == (1,)
    data = mujoco.MjData(compiled)
    mujoco.mj_forward(compiled, data)
    com = data.subtree_com[1] - data.xpos[1]
    np.testing.assert_allclose(model.parts.pos[0], com, atol=1e-12)
    assert model.replace(body_mass=jnp.asarray(model.body_mass)).parts.body == (1, 1)


def test_no_constant_is_a_negative_zero():
    """Its sign would be that of a CPU's own rounding: kernels of one make would not be found on another."""
    tidied = math.tidy(np.array([-0.0, -1e-18, 1e-18, -0.5, 0.9999999999999999, -1.0]))
    assert not np.signbit(tidied[:3]).any() and tidied.tolist() == [0, 0, 0, -0.5, 1, -1]
