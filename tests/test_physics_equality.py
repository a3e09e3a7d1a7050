"""Equalities of bodies and sites, to each other, to the world and to mocap bodies, against MuJoCo."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mujoco_states as oracle
from numpy_jaxpr import evaluate
from seedbed import physics, simd

LINKAGE = """
<mujoco>
  <option timestep=".004" integrator="{integrator}" impratio="3"/>
  <worldbody>
    <geom type="plane" size="3 3 .1"/>
    <body name="hand" mocap="true" pos="0 0 .6"/>
    <body name="gripped" pos="0 0 .55"><freejoint/><geom type="box" size=".05 .04 .03"/></body>
    <body name="crank" pos=".5 0 .4"><joint name="drive" axis="0 1 0" damping=".05"/>
      <geom type="capsule" size=".02" fromto="0 0 0 .1 0 0" contype="0"/>
      <body name="rod" pos=".1 0 0"><joint axis="0 1 0" damping=".02"/>
        <geom type="capsule" size=".02" fromto="0 0 0 .2 0 -.1" contype="0"/></body></body>
    <body name="slider" pos=".8 0 .3"><joint type="slide" axis="1 0 0" damping=".5"/>
      <geom type="box" size=".03 .03 .03" contype="0"/></body>
    <body name="a" pos="-.5 0 .5"><joint type="ball" damping=".02"/>
      <geom type="capsule" size=".03" fromto="0 0 0 0 0 -.2"/>
      <site name="end" pos="0 .02 -.25" euler="20 10 0"/></body>
    <body name="b" pos="-.5 .3 .4"><freejoint/><geom type="capsule" size=".03" fromto="0 0 0 0 .2 0"/>
      <site name="start" pos="0 -.02 .01" euler="0 30 10"/></body>
    <body name="tied" pos="-1 0 .3"><freejoint/><geom size=".1"/></body>
  </worldbody>
  <actuator><motor joint="drive" ctrlrange="-1 1"/></actuator>
  <equality>
    <weld body1="hand" body2="gripped" torquescale=".3" solref=".03 1" solimp=".9 .95 .01"/>
    <connect body1="rod" body2="slider" anchor=".2 0 -.1"/>
    <weld site1="end" site2="start" solref=".02 1.2"/>
    <connect body1="tied" body2="world" anchor="0 .1 0" solref="-200 -30"/>
    <connect site1="end" site2="start" active="false"/>
  </equality>
</mujoco>
"""
FIELDS = ("qvel", "qfrc_constraint", "cfrc_ext")


def drawn(count: int) -> tuple[Any, physics.Model, oracle.Cases, dict[str, np.ndarray]]:
    text = LINKAGE.format(integrator="Euler")
    rng = np.random.default_rng(2)
    poses = {
        "mocap_pos": np.array([0, 0, 0.6]) + rng.normal(size=(count, 1, 3)) * 0.03,
        "mocap_quat": np.array([2.0, 0, 0, 0]) + rng.normal(size=(count, 1, 4)) * 0.2,
    }
    poses = {name: np.float64(np.float32(x)) for name, x in poses.items()}
    return oracle.oracle(text), physics.load(text), oracle.cases(text, count), poses


def step_of(model: physics.Model, poses: Any, *state: Any) -> Any:
    qpos, qvel, ctrl, warmstart = state
    now = physics.init(model, qpos, qvel)._replace(qacc_warmstart=warmstart)
    data = physics.step_data(model, now, ctrl, **poses)
    return {name: getattr(data, name) for name in (*FIELDS, "solver_error")}


@pytest.mark.slow
def test_a_step_is_mujocos():
    compiled, model, given, poses = drawn(90)
    assert len(model.eq_type) == 4
    wanted = oracle.after_step(compiled, given, FIELDS, poses)
    found = evaluate(jax.vmap(lambda poses, *state: step_of(model, poses, *state)), poses, *given)
    for name in FIELDS:
        scale = np.abs(wanted[name]).max()
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-7 * scale, err_msg=name)


@pytest.mark.slow
def test_a_kernels_step_is_mujocos():
    compiled, model, given, poses = drawn(90)
    wanted = oracle.after_step(compiled, given, FIELDS, poses)["qvel"]
    cast: Any = jax.tree.map(np.float32, (poses, *given))
    found = jax.jit(simd.vectorize(lambda *x: step_of(model, *x)))(*cast)
    change = np.maximum(np.linalg.norm(wanted - given.qvel, axis=1), 0.02)
    error = np.linalg.norm(np.float64(found["qvel"]) - wanted, axis=1) / change
    assert np.quantile(error, 0.95) < 1e-4 and error.max() < 1e-3, np.sort(error)[-5:]
    assert found["solver_error"].max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("row", range(4))
def test_each_is_felt(row):
    """Without an equality, some state along the rollouts would go on elsewhere."""
    compiled, _, given, poses = drawn(60)
    wanted = oracle.after_step(compiled, given, FIELDS, poses)["qvel"]
    compiled.eq_active0[row] = 0
    assert np.abs(oracle.after_step(compiled, given, FIELDS, poses)["qvel"] - wanted).max() > 1e-2


STILL = """
<mujoco>
  <option timestep=".004"/>
  <worldbody>
    <body name="hand" mocap="true" pos="0 0 .6"/>
    <body name="cart" pos="0 0 .55"><joint type="slide" axis="1 0 0"/><joint type="slide" axis="0 0 1"/>
      <geom type="box" size=".05 .04 .03"/></body>
    <body name="wheel" pos="1 0 .55"><joint axis="1 2 3"/><geom type="box" size=".05 .04 .03"/></body>
    <body name="pin" mocap="true" pos="1 0 .56"/>
  </worldbody>
  <equality>
    <weld body1="hand" body2="cart"/>
    <connect body1="wheel" body2="pin" anchor=".05 0 .01"/>
  </equality>
</mujoco>
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bodies_that_cannot_turn_or_whose_centre_cannot_move_are_held(dtype):
    """MuJoCo's approximation of what a row weighs is then 0, and its cfrc_ext 1e16 where they are not met."""
    compiled, model = oracle.oracle(STILL), physics.load(STILL)
    assert model.body_invweight0[2, 1] == model.body_invweight0[3, 0] == 0
    given = oracle.Cases(*(np.zeros((2, n)) for n in (3, 3, 0, 3)))
    poses = {
        "mocap_pos": np.array([[[0.02, 0.01, 0.62], [1, 0.01, 0.56]]] * 2),
        "mocap_quat": np.array([[[1, 0, 0, 0.0]] * 2, [[1, 0.01, 0.02, 0.03]] * 2]),
    }
    wanted = oracle.after_step(compiled, given, FIELDS, poses)

    def step(poses: Any, qpos: Any, qvel: Any, *_: Any) -> Any:
        data = physics.step_data(model, physics.init(model, qpos, qvel), jnp.zeros(0), **poses)
        return data.qvel, data.cfrc_ext, data.diverged

    cast: Any = jax.tree.map(dtype, (poses, *given))
    if dtype == np.float64:
        qvel, wrench, diverged = evaluate(jax.vmap(step), *cast)
    else:
        qvel, wrench, diverged = jax.jit(simd.vectorize(step))(*cast)
    assert not np.asarray(diverged).any()
    np.testing.assert_allclose(qvel, wanted["qvel"], rtol=3e-5, atol=1e-5)
    np.testing.assert_allclose(wrench[0, 2], wanted["cfrc_ext"][0, 2], rtol=1e-4, atol=1e-4)
    assert np.isfinite(wrench).all()


@pytest.mark.slow
def test_derivatives_are_those_of_differences():
    _, model, given, poses = drawn(20)
    way = np.random.default_rng(0).normal(size=model.nv)

    def after(qvel: Any, qpos: Any, poses: Any) -> Any:
        now = physics.init(model, qpos, qvel)
        return physics.step(model, now, jnp.zeros(1), **poses).qvel

    def moved(qvel: Any, *rest: Any) -> Any:
        tangent = (jnp.asarray(way, qvel.dtype),)
        return jax.jvp(lambda v: after(v, *rest), (qvel,), tangent)[1]

    found = evaluate(jax.vmap(moved), given.qvel, given.qpos, poses)
    h, batched = 1e-6, jax.vmap(after)
    ends = [evaluate(batched, given.qvel + s * h * way, given.qpos, poses) for s in (1, -1)]
    differences = (ends[0] - ends[1]) / (2 * h)
    close = np.isclose(found, differences, rtol=1e-4, atol=1e-4).all(1)
    assert close.mean() > 0.9  # a row may begin or end between the two
