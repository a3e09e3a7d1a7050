"""Actuators that push a site: a drone's propellers, and servos on the sites of arms, against MuJoCo."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mujoco_states as oracle
from numpy_jaxpr import prepare
from seedbed import physics, simd
from seedbed.types import SeedbedError

DRONE = """
<mujoco>
  <option integrator="{integrator}" timestep=".005"/>
  <default><motor ctrlrange="0 3"/></default>
  <worldbody>
    <geom type="plane" size="5 5 .1"/>
    <body pos="0 0 .2">
      <freejoint/><geom type="box" size=".1 .1 .02" mass=".5"/>
      <site name="a" pos=".1 .1 .01" euler="5 0 0"/><site name="b" pos="-.1 .1 .01" euler="0 5 20"/>
      <body pos="-.1 -.1 .02"><geom size=".02" mass=".1"/><site name="c" euler="10 0 0"/></body>
    </body>
    <body pos="1 0 .5">
      <joint name="shoulder" axis="0 1 0" actuatorfrclimited="true" actuatorfrcrange="-.4 .4"/>
      <geom type="capsule" size=".03" fromto="0 0 0 0 0 -.3"/>
      <body pos="0 0 -.3"><joint type="slide" axis="1 0 .3" damping="1"/>
        <geom size=".05"/><site name="tip" pos="0 .1 -.05" euler="30 20 10"/></body>
    </body>
    <site name="world"/>
  </worldbody>
  <actuator>
    <motor site="a" gear="0 0 1 0 0 -.02"/><motor site="b" gear="0 0 1 0 0 .02"/>
    <motor site="c" gear=".1 -.2 1 .01 0 .02"/>
    <motor joint="shoulder"/>
    {servo}
    <motor site="tip" gear="0 1 0 0 .5 0" ctrlrange="-1 1"/><motor site="world" gear="1 0 0 0 0 0"/>
  </actuator>
  <sensor><actuatorvel actuator="push"/><actuatorpos actuator="push"/><actuatorfrc actuator="push"/></sensor>
</mujoco>
"""
SERVO = """<general name="push" site="tip" gear="2 0 .5 0 0 .1" gaintype="affine" gainprm="1 .3 -.2"
      biastype="affine" biasprm=".1 .2 -.4" ctrlrange="-1 1"/>"""
FIELDS = ("qvel", "qfrc_actuator", "actuator_force", "sensordata", "cfrc_ext")


def drone(integrator: str, servo: str = SERVO) -> str:
    return DRONE.format(integrator=integrator, servo=servo)


def stepped(xml: str) -> Any:
    """A function of one state and control to the fields after a step."""
    model = physics.load(xml)

    def one(qpos: Any, qvel: Any, ctrl: Any, warmstart: Any) -> dict[str, Any]:
        begun = physics.init(model, qpos, qvel)._replace(qacc_warmstart=warmstart)
        data = physics.step_data(model, begun, ctrl)
        return {name: getattr(data, name) for name in FIELDS}

    return one


@pytest.mark.slow
@pytest.mark.parametrize("integrator", ["Euler", "RK4"])
def test_a_step_is_mujocos(integrator):
    xml = drone(integrator)
    cases = oracle.cases(xml, 6)
    wanted = oracle.after_step(oracle.oracle(xml), cases, FIELDS)
    step = prepare(stepped(xml), *(x[0] for x in cases))
    for i, case in enumerate(zip(*cases, strict=True)):
        found = step(*case)
        for name in FIELDS:
            scale = np.abs(wanted[name]).max()
            np.testing.assert_allclose(found[name], wanted[name][i], atol=1e-7 * scale, rtol=0)


@pytest.mark.slow
def test_a_kernels_step_is_mujocos():
    xml = drone("Euler")
    cases = oracle.cases(xml, 64)
    wanted = oracle.after_step(oracle.oracle(xml), cases, FIELDS)
    kernel = jax.jit(simd.vectorize(stepped(xml)))
    found = kernel(*(jnp.asarray(x, jnp.float32) for x in cases))
    for name in FIELDS:
        scale = np.abs(wanted[name]).max()
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-5 * scale, rtol=0)


def test_what_pulls_at_another_site_or_damps_implicitly_is_refused():
    servo = SERVO.replace('site="tip"', 'site="tip" refsite="a"')
    with pytest.raises(SeedbedError, match="actuator with refsite"):
        physics.load(drone("Euler", servo))
    with pytest.raises(SeedbedError, match="servo that damps a tendon or site"):
        physics.load(drone("implicitfast"))
