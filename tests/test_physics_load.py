"""Loading: the eleven models, what is refused and how it is named, merged bodies, replaced leaves."""

from __future__ import annotations

import re

import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import mujoco_states
from seedbed import physics
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


REFUSED = {
    "integrator='implicitfast'": {"option": 'integrator="implicitfast"'},
    "cone='elliptic'": {"option": 'cone="elliptic"'},
    "impratio=2": {"option": 'impratio="2"'},
    "noslip_iterations=3": {"option": 'noslip_iterations="3"'},
    "flag contact='disable'": {"flag": '<flag contact="disable"/>'},
    "flag override='enable'": {"flag": '<flag override="enable"/>'},
    "gravcomp of body 'box'": {"body": 'gravcomp="1"'},
    "joint 'hinge' of type ball": {"joint": 'type="ball"'},
    "frictionloss at joint 'hinge'": {"joint": 'frictionloss="1"'},
    "actuatorfrcrange at joint 'hinge'": {"joint": 'actuatorfrcrange="-1 1"'},
    "polynomial at joint 'hinge'": {"joint": 'damping="1 2 3"'},
    "stiffness of a free joint": {"joint": 'type="free" stiffness="1"'},
    "fluidshape='ellipsoid' at geom 'ball'": {"geom": 'size=".1" fluidshape="ellipsoid"'},
    "collision of geom 'floor' (plane) with geom 'ball' (box)": {
        "geom": 'type="box" size=".1 .1 .1"'
    },
    "condim=6 of geom 'ball', which may touch geom 'floor'": {"geom": 'size=".1" condim="6"'},
    "actuator 'arm' that is not a motor": {
        "rest": '<actuator><position name="arm" joint="hinge"/></actuator>'
    },
    "actuator 'arm' on what is not": {
        "rest": '<actuator><motor name="arm" site="tip"/></actuator>'
    },
    "equality constraint": {
        "rest": '<equality><joint joint1="hinge"/></equality>',
    },
    "sensor": {"rest": '<sensor><jointpos joint="hinge"/></sensor>'},
    "contact pair": {"rest": '<contact><pair geom1="floor" geom2="ball"/></contact>'},
    "mocap body": {
        "world": '<body mocap="true"><geom size=".1" contype="0" conaffinity="0"/></body>'
    },
    "limits of tendon 'string'": {
        "rest": '<tendon><fixed name="string" limited="true" range="0 1">'
        '<joint joint="hinge" coef="1"/></fixed></tendon>'
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
    (line,) = str(error.value).splitlines()  # people see one
    parts = re.fullmatch("the XML text uses .* that cannot be simulated: (.*)", line)[1].split("; ")
    assert complaint in parts[-1]
    assert all(": " in part for part in parts)  # and what to do


def test_a_model_that_cannot_move_is_refused():
    with pytest.raises(SeedbedError, match="without joints: add one"):
        physics.load("<mujoco/>")


def test_all_refusals_are_listed_at_once():
    with pytest.raises(
        SeedbedError,
        match="uses 2 things that[^\n]*elliptic[^\n]*; frictionloss",
    ):
        physics.load(xml(option='cone="elliptic"', joint='frictionloss="1"'))


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


def test_inert_elements_are_accepted():
    tendon = '<tendon><fixed><joint joint="hinge" coef="1"/></fixed></tendon>'
    flag = '<flag energy="enable" warmstart="disable" eulerdamp="disable"/>'
    model = physics.load(xml(rest=tendon, flag=flag))
    assert not model.opt.eulerdamp


def test_leaves_are_replaced_by_name_and_shape():
    model = physics.load(xml())
    heavier = model.replace(body_mass=model.body_mass * 2)
    np.testing.assert_allclose(heavier.parts.mass, 2 * model.parts.mass)
    with pytest.raises(SeedbedError, match="geom_size is not replaceable; these are: body_mass"):
        model.replace(geom_size=model.geom_size)
    with pytest.raises(SeedbedError, match=r"body_mass has shape \(5,\) instead of \(2,\)"):
        model.replace(body_mass=np.ones(5))
    with pytest.raises(SeedbedError, match="body_mass is of type int32: give"):
        model.replace(body_mass=jnp.ones(2, jnp.int32))
    with pytest.raises(SeedbedError, match="body_mass is of type list: give an array"):
        model.replace(body_mass=[1.0, 2.0])


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
