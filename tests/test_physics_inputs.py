"""What acts from outside besides ctrl: forces on dofs and bodies, and poses of mocap bodies."""

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
from seedbed.types import SeedbedError

HAND = """
<mujoco>
  <option timestep=".004" integrator="{integrator}"/>
  <worldbody>
    <geom type="plane" size="3 3 .1"/>
    <body name="palm" mocap="true" pos="0 0 .5" euler="10 20 30">
      <geom type="box" size=".1 .1 .02"/>
      <body pos=".05 0 -.02"><geom size=".02"/><site name="mark" pos="0 .01 0"/></body>
      <body pos=".08 0 0">
        <joint name="finger" axis="0 1 0" damping=".002" armature=".001" pos="0 0 .01"/>
        <geom type="capsule" size=".02" fromto="0 0 -.03 0 0 -.15"/>
        <body pos="0 0 -.17"><geom size=".02"/>
          <joint name="tip" axis="0 1 0" damping=".001" armature=".001"/></body>
      </body>
      <body pos="-.08 0 0" euler="0 0 90">
        <joint name="thumb" type="slide" axis="1 0 1" damping=".05" stiffness="5" ref=".01"/>
        <geom type="capsule" size=".02" fromto="0 0 -.03 0 0 -.15"/>
      </body>
    </body>
    <body name="tray" mocap="true" pos="0 0 .2"><geom type="plane" size="1 1 .1"/></body>
    <body name="object" pos="0 0 .35"><freejoint/><geom type="box" size=".04 .03 .05"/>
      <body pos=".05 0 .03"><geom size=".02"/></body></body>
  </worldbody>
  <actuator><motor joint="finger" ctrlrange="-1 1"/></actuator>
  <sensor><framepos objtype="site" objname="mark"/><framelinacc objtype="body" objname="object"/>
    <framepos objtype="body" objname="object" reftype="body" refname="palm"/></sensor>
</mujoco>
"""
FIELDS = (
    "qpos",
    "qvel",
    "xpos",
    "xquat",
    "xipos",
    "site_xpos",
    "cvel",
    "subtree_com",
    "cfrc_ext",
    "sensordata",
)


def inputs(model: physics.Model, count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    palm, tray = [0, 0, 0.5], [0, 0, 0.2]
    drawn = {
        "qfrc_applied": rng.normal(size=(count, model.nv)) * 0.3,
        "xfrc_applied": rng.normal(size=(count, model.nbody, 6)) * 0.5,
        "mocap_pos": np.array([palm, tray]) + rng.normal(size=(count, 2, 3)) * 0.05,
        "mocap_quat": rng.normal(size=(count, 2, 4)) * 0.1 + np.array([2.0, 0, 0, 0]),
    }
    return {name: np.float64(np.float32(x)) for name, x in drawn.items()}


@pytest.mark.slow
@pytest.mark.parametrize("integrator", ["Euler", "RK4"])
def test_a_step_is_mujocos(integrator):
    source = HAND.format(integrator=integrator)
    compiled, model = oracle.oracle(source), physics.load(source)
    assert model.nmocap == 2 and [model.names.body[b] for b in model.mocaps] == ["palm", "tray"]
    given = oracle.cases(source, 40)
    acting = inputs(model, 40)
    wanted = oracle.after_step(compiled, given, FIELDS, acting)

    def step(acting: Any, *state: Any) -> Any:
        qpos, qvel, ctrl, warmstart = state
        now = physics.init(model, qpos, qvel)._replace(qacc_warmstart=warmstart)
        data = physics.step_data(model, now, ctrl, **acting)
        return {name: getattr(data, name) for name in wanted}

    found = evaluate(jax.vmap(step), acting, *given)
    for name in wanted:
        scale = np.abs(wanted[name]).max()
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-7 * scale, err_msg=name)
    touching = oracle.after_step(compiled, given, ["ncon"])["ncon"]
    assert touching.max() >= 3


@pytest.mark.slow
def test_a_kernel_takes_them_by_environment():
    source = HAND.format(integrator="Euler")
    compiled, model = oracle.oracle(source), physics.load(source)
    given, acting = oracle.cases(source, 100), inputs(model, 100)
    wanted = oracle.after_step(compiled, given, FIELDS, acting)["qvel"]

    def step(state: Any, ctrl: Any, acting: Any) -> Any:
        return physics.step(model, state, ctrl, **acting).qvel

    state = oracle.states(model, given.qpos, given.qvel)
    single = {name: np.float32(x) for name, x in acting.items()}
    found = jax.jit(simd.vectorize(step))(state, jnp.float32(given.ctrl), single)
    scale = np.maximum(np.linalg.norm(wanted - given.qvel, axis=1), 0.02)
    error = np.linalg.norm(found - wanted, axis=1) / scale
    assert np.quantile(error, 0.95) < 1e-4 and error.max() < 1e-3, np.sort(error)[-5:]


def test_energy_is_that_of_mocap_bodies_where_they_are():
    source = HAND.format(integrator="Euler")
    compiled, model = oracle.oracle(source), physics.load(source)
    compiled.opt.enableflags |= mujoco.mjtEnableBit.mjENBL_ENERGY
    data = mujoco.MjData(compiled)
    acting = {name: x[0] for name, x in inputs(model, 1).items() if name.startswith("mocap")}
    data.mocap_pos[:], data.mocap_quat[:] = acting["mocap_pos"], acting["mocap_quat"]
    mujoco.mj_forward(compiled, data)
    state = physics.init(model, jnp.float32(data.qpos))
    found = jax.jit(lambda acting: physics.energy(model, state, **acting))(acting)
    np.testing.assert_allclose(found, data.energy, rtol=1e-5)


def test_keyframes_have_poses_of_mocap_bodies():
    key = '<keyframe><key mpos="0 0 .45 .1 0 .2" mquat="2 .2 0 .4 1 0 0 0"/><key/></keyframe>'
    source = HAND.format(integrator="Euler").replace("</mujoco>", f"{key}</mujoco>")
    compiled, model = oracle.oracle(source), physics.load(source)
    data = mujoco.MjData(compiled)
    for number, frame in enumerate(model.keyframes):
        mujoco.mj_resetDataKeyframe(compiled, data, number)
        np.testing.assert_array_equal(frame.mocap_pos, data.mocap_pos)
        np.testing.assert_array_equal(frame.mocap_quat, data.mocap_quat)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"mocap_pos": np.zeros((1, 3))}, r"mocap_pos has shape \(1, 3\) instead of \(2, 3\)"),
        ({"xfrc_applied": np.zeros((7, 6), int)}, "xfrc_applied holds int"),
        ({"xfrc": np.zeros((7, 6))}, "xfrc is no input of a step.*xfrc_applied"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(given, text):
    model = physics.load(HAND.format(integrator="Euler"))
    with pytest.raises(SeedbedError, match=text):
        physics.step(model, physics.init(model), jnp.zeros(1), **given)
