"""Actuators with an activation: its rates, its bounds and the forces that come of it, against MuJoCo."""

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
from seedbed.envs.device.mujoco import MujocoTask, Verdict, noisy_rest

ARM = """
<mujoco>
  <option timestep=".01" integrator="{integrator}"/>
  <worldbody>
    <body><joint name="a" axis="0 1 0" damping=".2"/><geom type="capsule" size=".03" fromto="0 0 0 0 0 -.3"/>
      <body pos="0 0 -.3"><joint name="b" axis="0 1 0" damping=".1"/>
        <geom type="capsule" size=".03" fromto="0 0 0 0 0 -.3"/></body></body>
  </worldbody>
  <actuator>
    <intvelocity joint="a" kp="3" kv=".2" actrange="-1 1"/>
    <motor joint="b"/>
    <general joint="a" dyntype="filter" dynprm=".05" gainprm="2" actlimited="true" actrange="-.5 .6"/>
    <general joint="b" dyntype="filterexact" dynprm=".02" actearly="true"
      ctrllimited="true" ctrlrange="-1 1"/>
    <general joint="b" dyntype="integrator" actearly="true" actlimited="true" actrange="-.3 .3"
      gaintype="affine" gainprm="1 .2 -.1" biastype="affine" biasprm=".1 -.2 -.3"/>
  </actuator>
  <keyframe><key name="wound" act=".1 .2 .3 .1"/></keyframe>
</mujoco>
"""
STATE = ("qpos", "qvel", "ctrl", "act")


@pytest.mark.slow
@pytest.mark.parametrize("integrator", ["Euler", "RK4", "implicitfast"])
def test_a_step_is_mujocos(integrator):
    text = ARM.format(integrator=integrator)
    compiled, model = oracle.oracle(text), physics.load(text)
    data, rng = mujoco.MjData(compiled), np.random.default_rng(0)
    sizes = (compiled.nq, compiled.nv, compiled.nu, compiled.na)
    given = [np.float64(np.float32(rng.normal(size=(50, n)))) for n in sizes]
    given[3] *= 0.5
    wanted = []
    for state in zip(*given, strict=True):
        mujoco.mj_resetData(compiled, data)
        data.qpos, data.qvel, data.ctrl, data.act = state
        mujoco.mj_step(compiled, data)
        wanted.append([data.qvel.copy(), data.act.copy(), data.actuator_force.copy()])
    wanted = [np.stack(column) for column in zip(*wanted, strict=True)]

    def step(qpos: Any, qvel: Any, ctrl: Any, act: Any) -> Any:
        state = physics.init(model, qpos, qvel)._replace(act=act)
        now = physics.step_data(model, state, ctrl)
        return now.qvel, now.act, now.actuator_force

    for ours, theirs in zip(evaluate(jax.vmap(step), *given), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)
    single = jax.jit(simd.vectorize(step))(*(jnp.asarray(x, jnp.float32) for x in given))
    for ours, theirs in zip(single, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("integrator", ["Euler", "RK4", "implicitfast"])
def test_actuators_that_a_flag_disables_do_nothing(integrator):
    """Neither do their bounds: forces and activations that are outside of them stay there."""
    text = ARM.format(integrator=integrator)
    text = text.replace("</option>", "").replace(
        f'integrator="{integrator}"/>',
        f'integrator="{integrator}"><flag actuation="disable"/></option>',
    )
    text = text.replace(
        '<motor joint="b"', '<motor joint="b" forcelimited="true" forcerange=".5 2"'
    )
    compiled, model = oracle.oracle(text), physics.load(text)
    data = mujoco.MjData(compiled)
    data.qvel[:], data.ctrl[:], data.act[:] = [1, 2], 0.7, [0.3, 5, 0.2, -4]
    state = physics.init(model, qvel=np.array([1.0, 2.0], np.float32))
    state = state._replace(act=jnp.asarray(data.act, jnp.float32))
    after = jax.jit(lambda s: physics.step_data(model, s, jnp.full(5, 0.7)))(state)
    mujoco.mj_step(compiled, data)
    for name in ("qvel", "act", "act_dot", "actuator_force", "qfrc_actuator"):
        ours, theirs = getattr(after, name), getattr(data, name)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_array_equal(after.act, state.act)


class Hold(MujocoTask):
    """A task that asks for nothing."""

    def initial(self, key):
        return noisy_rest(self.physics_model(), key, 0.1)

    def observe(self, now):
        return jnp.concatenate([now.qpos, now.act])

    def judge(self, before, now, action):
        return Verdict(jnp.float32(0), jnp.bool_(False), {})


@pytest.mark.slow
def test_tasks_keep_activations():
    """Two steps of one simulation step each, against MuJoCo's two."""
    text = ARM.format(integrator="Euler")
    env, compiled = Hold(xml_file="", frame_skip=1, model=physics.load(text)), oracle.oracle(text)
    state, data = env.reset(jax.random.key(0)), mujoco.MjData(compiled)
    data.qpos[:], data.qvel[:] = state.inner.qpos, state.inner.qvel
    for _ in range(3):
        data.ctrl[:] = 0.7
        state = env.step(state, jnp.full(5, 0.7))
        mujoco.mj_step(compiled, data)
    np.testing.assert_allclose(state.inner.act, data.act, rtol=1e-4)
    np.testing.assert_allclose(state.timestep.observation[:2], data.qpos, rtol=1e-4, atol=1e-5)


def test_keyframes_have_activations():
    model = physics.load(ARM.format(integrator="Euler"))
    np.testing.assert_allclose(physics.init(model, keyframe="wound").act, [0.1, 0.2, 0.3, 0.1])
