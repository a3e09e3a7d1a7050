"""Rows over several dofs: equalities of joints, limits of tendons and of balls, against MuJoCo."""

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

GRIPPER = """
<mujoco>
  <option timestep=".004" integrator="{integrator}"/>
  <worldbody>
    <geom type="plane" size="3 3 .1"/>
    <body pos="0 0 .5"><joint name="wrist" axis="0 1 0" damping=".2"/>
      <geom type="capsule" size=".03" fromto="0 0 0 0 0 -.2"/>
      <body pos=".04 0 -.2"><joint name="left" type="slide" axis="1 0 0" damping="1" ref=".01"/>
        <geom type="box" size=".01 .02 .04"/></body>
      <body pos="-.04 0 -.2"><joint name="right" type="slide" axis="-1 0 0" damping="1"/>
        <geom type="box" size=".01 .02 .04"/></body>
    </body>
    <body pos=".5 0 .3"><joint name="lid" axis="0 1 0" damping=".05"/><geom size=".05" pos=".1 0 0"/></body>
    <body pos="-.5 0 .6"><joint name="a" axis="0 1 0" damping=".05" frictionloss=".02"/>
      <geom type="capsule" size=".02" fromto="0 0 0 0 0 -.15"/>
      <body pos="0 0 -.15"><joint name="b" axis="0 1 0" damping=".05" range="-40 40" limited="true"/>
        <geom type="capsule" size=".02" fromto="0 0 0 0 0 -.15"/>
        <body pos="0 0 -.15"><joint name="ball" type="ball" range="0 6" limited="true" margin=".02"
          damping=".01"/><geom type="capsule" size=".02" fromto="0 0 0 .02 0 -.1"/></body></body></body>
  </worldbody>
  <tendon>
    <fixed name="cord" limited="true" range="-.02 .03" margin=".02" solreflimit=".03 .8">
      <joint joint="a" coef="1"/><joint joint="b" coef="-.5"/></fixed>
  </tendon>
  <equality>
    <joint joint1="left" joint2="right" polycoef=".002 1 .5 0 0" solref=".01 1"/>
    <joint joint1="lid" joint2="wrist" polycoef="0 .5 .2 -.1 .05"/>
    <joint joint1="a" active="false"/>
    <joint joint1="wrist" polycoef=".1 0 0 0 0" solref=".2 1"/>
  </equality>
</mujoco>
"""


@pytest.mark.slow
@pytest.mark.parametrize("integrator", ["Euler", "RK4"])
def test_a_step_is_mujocos(integrator):
    text = GRIPPER.format(integrator=integrator)
    compiled, model = oracle.oracle(text), physics.load(text)
    assert len(model.eq_obj1id) == 3
    given = oracle.cases(text, 80)
    wanted = oracle.after_step(compiled, given, ["qvel", "qfrc_constraint"])

    def step(*state: Any) -> Any:
        qpos, qvel, ctrl, warmstart = state
        now = physics.init(model, qpos, qvel)._replace(qacc_warmstart=warmstart)
        data = physics.step_data(model, now, ctrl)
        return data.qvel, data.qfrc_constraint, data.solver_error

    qvel, force, _ = evaluate(jax.vmap(step), *given)
    np.testing.assert_allclose(qvel, wanted["qvel"], rtol=1e-7, atol=1e-7)
    if integrator == "Euler":
        scale = np.abs(wanted["qfrc_constraint"]).max()
        np.testing.assert_allclose(force, wanted["qfrc_constraint"], atol=1e-6 * scale)
    single, _, doubt = jax.jit(simd.vectorize(step))(*(jnp.asarray(x, jnp.float32) for x in given))
    error = oracle.step_error(compiled, given, np.asarray(single, np.float64))
    assert np.quantile(error, 0.95) < 1e-4 and error.max() < 1e-3, np.sort(error)[-5:]
    assert doubt.max() < 1e-4


@pytest.mark.slow
def test_each_row_is_felt():
    """Of each limit and equality alone, some state along the rollouts would go on elsewhere without it."""
    text = GRIPPER.format(integrator="Euler")
    given, exact = oracle.cases(text, 80), oracle.oracle(text)
    wanted = oracle.after_step(exact, given, ["qvel"])["qvel"]
    for field, row in (("eq_active0", 0), ("eq_active0", 1), ("eq_active0", 3), ("tendon_limited", 0),
                       ("jnt_limited", exact.joint("ball").id)):  # fmt: skip
        without = oracle.oracle(text)
        getattr(without, field)[row] = 0
        other = oracle.after_step(without, given, ["qvel"])["qvel"]
        assert np.abs(other - wanted).max() > 1e-2, (field, row)


@pytest.mark.slow
def test_derivatives_are_those_of_differences():
    model = physics.load(GRIPPER.format(integrator="Euler"))
    given = oracle.cases(GRIPPER.format(integrator="Euler"), 30)
    rng = np.random.default_rng(0)
    way = rng.normal(size=model.nv)

    def after(qvel: Any, qpos: Any) -> Any:
        return physics.step(model, physics.init(model, qpos, qvel), jnp.zeros(0)).qvel

    def moved(qvel: Any, qpos: Any) -> Any:
        return jax.jvp(lambda v: after(v, qpos), (qvel,), (jnp.asarray(way, qvel.dtype),))[1]

    found = evaluate(jax.vmap(moved), given.qvel, given.qpos)
    h = 1e-6
    ends = [evaluate(jax.vmap(after), given.qvel + s * h * way, given.qpos) for s in (1, -1)]
    differences = (ends[0] - ends[1]) / (2 * h)
    close = np.isclose(found, differences, rtol=1e-4, atol=1e-4).all(1)
    assert close.mean() > 0.9  # a row may begin or end between the two


@pytest.mark.slow
def test_derived_constants_of_tendons():
    compiled = oracle.oracle(GRIPPER.format(integrator="Euler"))
    model = physics.load(GRIPPER.format(integrator="Euler"))
    mass = np.float64(np.float32(model.body_mass * 1.7))
    compiled.body_mass[:] = mass
    mujoco.mj_setConst(compiled, mujoco.MjData(compiled))
    found = physics.set_const(model.replace(body_mass=mass))
    np.testing.assert_allclose(found.tendon_invweight0, compiled.tendon_invweight0, rtol=1e-4)
