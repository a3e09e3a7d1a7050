"""Derivatives of a step through what robots have, against differences in double precision.

Boxes, servos, friction loss and its bounds, fixed tendons, equalities, and actuators that push sites.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import mujoco_states as oracle
from numpy_jaxpr import prepare
from seedbed import physics

ROBOT = """
<mujoco>
  <option timestep=".004"/>
  <default><joint damping=".2" armature=".01" frictionloss=".05"/></default>
  <worldbody>
    <geom type="plane" size="5 5 .1"/>
    <geom type="box" size=".2 .3 .05" pos=".3 0 .05" euler="0 0 20"/>
    <site name="anchor" pos="0 0 .2"/>
    <body pos="0 0 .16">
      <freejoint/>
      <geom type="box" size=".2 .1 .05"/>
      <site name="top" pos="0 0 .05"/>
      <body pos=".15 .12 0">
        <joint name="hip" axis="0 1 0" limited="true" range="-40 40"/>
        <geom type="capsule" size=".03" fromto="0 0 0 0 0 -.15"/>
        <body pos="0 0 -.15"><joint name="knee" axis="0 1 0"/><geom size=".04" pos="0 0 -.02"/></body>
      </body>
      <body pos="-.15 -.12 0">
        <joint name="other" axis="0 1 0"/><geom type="capsule" size=".03" fromto="0 0 0 0 0 -.2"/>
      </body>
    </body>
  </worldbody>
  <tendon><fixed name="both" stiffness="5" damping=".3" springlength="-.1 .1">
    <joint joint="hip" coef="1"/><joint joint="other" coef="-.5"/></fixed></tendon>
  <equality>
    <joint joint1="knee" joint2="hip" polycoef="0 -1 .5 0 0"/><connect site1="top" site2="anchor"/>
  </equality>
  <actuator>
    <position joint="hip" kp="20" kv=".3"/><position tendon="both" kp="5"/>
    <motor site="top" gear="1 0 2 0 .1 0"/>
  </actuator>
</mujoco>
"""
STEP = 1e-6
"""Of the differences."""
AGREE = 1e-3
"""Differences of two sizes that are further apart have met a kink between them; share of the larger."""


def flat(xml: str) -> Any:
    """A step as a function of (qpos, qvel, ctrl) to what it gives, as one vector."""
    model = physics.load(xml)

    def step(qpos: Any, qvel: Any, ctrl: Any) -> Any:
        data = physics.step_data(model, physics.init(model, qpos, qvel), ctrl)
        return jax.numpy.concatenate([data.qpos, data.qvel])

    return step


@pytest.mark.slow
def test_derivatives_along_directions_are_differences():
    cases, step = oracle.cases(ROBOT, 8), flat(ROBOT)
    assert (oracle.after_forward(oracle.oracle(ROBOT), cases, ["ncon"])["ncon"] > 0).sum() >= 6
    given = [cases.qpos, cases.qvel, cases.ctrl]
    rng = np.random.default_rng(0)
    ways = [rng.normal(size=x.shape) for x in given]
    one = [x[0] for x in given]
    value = prepare(step, *one)
    tangent = prepare(lambda *x: jax.jvp(step, x[:3], x[3:])[1], *one, *(w[0] for w in ways))
    checked = 0
    for i in range(len(cases.qpos)):
        at, way = [x[i] for x in given], [w[i] for w in ways]

        def difference(size: float, at: Any = at, way: Any = way) -> np.ndarray:
            ends = [
                value(*(x + sign * size * w for x, w in zip(at, way, strict=True)))
                for sign in (1, -1)
            ]
            return (ends[0] - ends[1]) / (2 * size)

        wanted, other = difference(STEP), difference(3 * STEP)
        scale = np.abs(wanted).max()
        if np.abs(wanted - other).max() > AGREE * scale:
            continue
        checked += 1
        np.testing.assert_allclose(tangent(*at, *way), wanted, atol=1e-5 * scale, rtol=0)
    assert checked >= 6
