"""Ball joints: kinematics, bias, springs, friction loss, integration and sensors, against MuJoCo."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import mujoco_states as oracle
from numpy_jaxpr import evaluate
from seedbed import physics, simd
from seedbed.physics import math

PUPPET = """
<mujoco>
  <option timestep=".004" integrator="{integrator}"/>
  <worldbody>
    <geom type="plane" size="3 3 .1"/>
    <body pos="0 0 .6" euler="10 20 30">
      <joint type="ball" pos="0 .02 .05" stiffness="3" damping=".1" armature=".01"/>
      <geom type="capsule" size=".04" fromto="0 0 0 .1 0 -.25"/>
      <body pos=".1 0 -.25" euler="0 30 0">
        <joint type="slide" axis="0 0 1" range="-.1 .1" limited="true" stiffness="40" damping="1"/>
        <joint name="ankle" type="ball" pos="0 0 .01" damping=".05" frictionloss=".02"/>
        <geom type="box" size=".06 .04 .02" pos=".02 0 -.05"/>
        <body pos="0 .05 -.03"><joint axis="0 1 0" damping=".01" armature=".002"/><geom size=".03"/></body>
      </body>
    </body>
    <body pos=".4 0 .3"><freejoint/><geom size=".05"/>
      <body pos=".1 0 0"><joint type="ball" damping=".02" armature=".001"/>
        <geom type="capsule" size=".02" fromto="0 0 0 .1 .05 0"/></body></body>
  </worldbody>
  <sensor><ballquat joint="ankle"/><ballangvel joint="ankle"/></sensor>
</mujoco>
"""
FIELDS = ("qpos", "qvel", "xpos", "xquat", "cvel", "sensordata")


@pytest.mark.slow
@pytest.mark.parametrize("integrator", ["Euler", "RK4", "implicitfast"])
def test_a_step_is_mujocos(integrator):
    text = PUPPET.format(integrator=integrator)
    compiled, model = oracle.oracle(text), physics.load(text)
    given = oracle.cases(text, 60)
    wanted = oracle.after_step(compiled, given, FIELDS)

    def step(*state: Any) -> Any:
        qpos, qvel, ctrl, warmstart = state
        now = physics.init(model, qpos, qvel)._replace(qacc_warmstart=warmstart)
        data = physics.step_data(model, now, ctrl)
        return {name: getattr(data, name) for name in FIELDS}

    found = evaluate(jax.vmap(step), *given)
    for name in FIELDS:
        scale = np.abs(wanted[name]).max()
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-7 * scale, err_msg=name)
    single = jax.jit(simd.vectorize(step))(*(jnp.asarray(x, jnp.float32) for x in given))
    error = oracle.step_error(compiled, given, np.asarray(single["qvel"], np.float64))
    assert np.quantile(error, 0.95) < 1e-4 and error.max() < 1e-3, np.sort(error)[-5:]


@pytest.mark.slow
def test_energy_and_derived_constants():
    text = PUPPET.format(integrator="Euler")
    compiled, model = oracle.oracle(text), physics.load(text)
    compiled.opt.enableflags |= mujoco.mjtEnableBit.mjENBL_ENERGY
    given, data = oracle.cases(text, 12), mujoco.MjData(compiled)
    for qpos, qvel, *_ in zip(*given, strict=True):
        data.qpos[:], data.qvel[:] = qpos, qvel
        mujoco.mj_forward(compiled, data)
        found = physics.energy(model, physics.init(model, jnp.float32(qpos), jnp.float32(qvel)))
        np.testing.assert_allclose(found, data.energy, rtol=1e-4)
    same = physics.set_const(model)
    for name in ("body_invweight0", "dof_invweight0"):
        np.testing.assert_allclose(getattr(same, name), getattr(model, name), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1, -1])
def test_a_spring_at_rest_has_a_derivative(sign):
    """Its angle is zero there, of which the square root has none."""
    rest = jnp.float32([0.5, 0.5, -0.5, 0.5])
    move = jax.jacfwd(lambda quat: math.quat_difference(quat, rest))(sign * rest)
    small = 1e-3 * jnp.float32([0.3, -0.2, 0.5])
    turned = math.quat_mul(rest, jnp.concatenate([jnp.ones(1), 0.5 * small])) - rest
    np.testing.assert_allclose(move @ (sign * turned), small, rtol=1e-3)
