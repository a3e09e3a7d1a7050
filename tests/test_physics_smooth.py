"""Kinematics, inertia and smooth forces, stage by stage against MuJoCo's own fields."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import mujoco_states as oracle
from numpy_jaxpr import evaluate
from seedbed import physics
from seedbed.physics import dynamics, linear, math
from seedbed.physics.actuators import Acting, actuation
from seedbed.physics.kinematics import kinematics
from seedbed.physics.readout import absolute, readout

# Everything else: joints off their bodies' origins, several of them on a body, reference angles, a second
# tree, a welded body that turns, springs with a rest angle, a slide between hinges, a tilted static base.
ZOO = """
<mujoco>
  <compiler angle="radian"/>
  <option gravity=".3 -.2 -9" wind="1 2 3" density="3" viscosity=".2"/>
  <default><geom contype="0" conaffinity="0"/></default>
  <worldbody>
    <body pos="1 2 3" euler=".3 .2 .1">
      <geom type="box" size=".1 .2 .3"/>
      <body pos=".1 .2 .3" euler=".1 .5 .9">
        <joint type="slide" axis="1 2 3" ref=".3" springref=".4" stiffness="5"/>
        <joint type="slide" axis="-1 0 .2" pos=".1 .1 0" damping=".4"/>
        <joint axis=".2 .3 .4" pos=".1 -.2 .3" ref=".5" stiffness="3" springref=".2" armature=".1"/>
        <joint axis="0 1 0" pos=".1 -.2 .3"/>
        <joint axis="1 0 0" pos="0 .1 0"/>
        <geom type="box" size=".1 .2 .3"/>
        <body pos="0 .5 0" quat="1 2 3 4">
          <geom type="capsule" size=".1 .2" pos=".1 0 0"/>
          <site pos=".1 .2 .3"/>
          <body pos=".3 .1 0">
            <joint axis="0 0 1" pos="0 0 .1"/>
            <joint type="slide" axis="0 1 1"/>
            <joint axis="0 1 0" pos="0 0 .1" damping=".2"/>
            <geom type="ellipsoid" size=".1 .2 .3"/>
            <body><joint type="slide" axis="1 0 0"/><geom size=".2"/></body>
          </body>
        </body>
      </body>
    </body>
    <body pos="0 0 1">
      <freejoint/>
      <geom type="capsule" size=".1 .3"/>
      <body pos=".1 0 0"><joint axis="1 0 0"/><geom size=".05"/></body>
    </body>
    <body pos="3 0 1"><joint axis="0 1 0" pos="0 0 1" gravcomp="0"/><geom size=".1"/></body>
  </worldbody>
  <actuator>
    <motor joint="lift" gear="2" ctrlrange="-1 1" ctrllimited="true"/>
    <motor joint="lift" gear="-3" forcerange="-.5 .4" forcelimited="true"/>
    <general joint="turn" gainprm="1.5" gear="4"/>
  </actuator>
</mujoco>
""".replace(' gravcomp="0"', ' name="turn"').replace(
    '<joint type="slide" axis="0 1 1"/>', '<joint type="slide" axis="0 1 1" name="lift"/>'
)

FIELDS = (
    "xpos",
    "xquat",
    "xipos",
    "ximat",
    "geom_xpos",
    "geom_xmat",
    "site_xpos",
    "subtree_com",
    "cvel",
    "cinert",
    "M",
    "qfrc_bias",
    "qfrc_passive",
    "qfrc_actuator",
    "qacc_smooth",
)


def smooth(model: physics.Model, qpos: Any, qvel: Any, ctrl: Any) -> dict[str, Any]:
    """All stages before contacts, by MuJoCo's names."""
    model = model.astype(qpos.dtype)
    kin = kinematics(model, qpos, physics.init(model, qpos).qpos_low)
    motion, before = dynamics.velocity(model, kin.cdof, qvel)
    matrix = dynamics.mass_matrix(model, kin)
    bias = dynamics.bias(model, kin, qvel, motion, before)
    passive = dynamics.passive(model, kin, qpos, qvel, motion)
    actuator = actuation(model, ctrl, Acting(kin, motion, qpos, qvel, jnp.zeros(0))).force
    factor = linear.factor(linear.pattern(model.nv, set(matrix)), matrix)
    zero = jnp.zeros((), qpos.dtype)
    size = range(model.nv)
    full = [[matrix.get((max(i, j), min(i, j)), zero) for j in size] for i in size]
    return readout(model, kin, motion, jnp.zeros((model.nbody, 6), qpos.dtype)) | {
        "ximat": kin.ximat,
        "geom_xpos": absolute(model, kin, kin.geom_xpos, model.geom_bodyid),
        "geom_xmat": kin.geom_xmat,
        "M": jnp.stack([jnp.stack(row) for row in full]),
        "qfrc_bias": bias,
        "qfrc_passive": passive,
        "qfrc_actuator": actuator,
        "qacc_smooth": linear.solve(factor, passive + actuator - bias),
    }


def compare(source: Any, dtype: Any, tolerance: float, count: int = 40) -> None:
    """Asserts that every field of every state is within `tolerance` of its largest magnitude."""
    given = oracle.cases(source, count)
    model, compiled = physics.load(source), oracle.oracle(source)
    wanted = oracle.after_forward(compiled, given, FIELDS)
    args = [x.astype(dtype) for x in given[:3]]
    found = evaluate(jax.vmap(lambda *state: smooth(model, *state)), *args)
    for name in FIELDS:
        ours = found[name].reshape(count, -1)
        theirs = wanted[name].reshape(count, -1)
        assert ours.dtype == dtype, name
        if name == "xquat":  # either sign is the same turn
            ours, theirs = (_outer(x.reshape(count, -1, 4)) for x in (ours, theirs))
        error = np.abs(ours - theirs).max(initial=0)
        assert error <= tolerance * max(1, np.abs(theirs).max(initial=0)), name


def _outer(quat: np.ndarray) -> np.ndarray:
    return quat[..., :, None] * quat[..., None, :]


@pytest.mark.slow
@pytest.mark.parametrize("name", oracle.MODELS)
def test_stages_in_double(name):
    compare(oracle.path(name), np.float64, 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("name", oracle.MODELS)
def test_stages_in_single(name):
    compare(oracle.path(name), np.float32, 2e-5)


def test_every_kind_of_joint_and_force():
    compare(ZOO, np.float64, 1e-10)
    compare(ZOO, np.float32, 3e-4)


@pytest.mark.slow
def test_traced_masses_give_what_a_changed_model_gives():
    rng = np.random.default_rng(0)
    source = oracle.path("humanoid")
    model, compiled = physics.load(source), oracle.oracle(source)
    given = oracle.cases(source, 3)
    mass = compiled.body_mass * rng.uniform(0.5, 2, compiled.nbody)
    inertia = compiled.body_inertia * rng.uniform(0.9, 1.1, compiled.body_inertia.shape)
    stiffness = compiled.jnt_stiffness * 2
    compiled.body_mass, compiled.body_inertia, compiled.jnt_stiffness = mass, inertia, stiffness
    compiled.body_subtreemass = _subtree_mass(compiled)
    wanted = oracle.after_forward(compiled, given, FIELDS)

    def replaced(mass: Any, inertia: Any, stiffness: Any, *state: Any) -> dict[str, Any]:
        changed = model.replace(body_mass=mass, body_inertia=inertia, jnt_stiffness=stiffness)
        return smooth(changed, *state)

    shared = [np.broadcast_to(x, (3, *x.shape)) for x in (mass, inertia, stiffness)]
    found = evaluate(jax.vmap(replaced), *shared, *given[:3])
    for name in ("M", "qfrc_bias", "qfrc_passive", "qacc_smooth", "cinert", "subtree_com"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-9, atol=1e-9, err_msg=name)


def _subtree_mass(compiled: Any) -> np.ndarray:
    total = compiled.body_mass.copy()
    for b in range(compiled.nbody - 1, 0, -1):
        total[compiled.body_parentid[b]] += total[b]
    return total


def still(model: physics.Model) -> Acting:
    """The model at its zero position, at rest."""
    qpos, qvel = jnp.zeros(model.nq), jnp.zeros(model.nv)
    kin = kinematics(model, qpos, jnp.zeros(len(model.root_dofs)))
    return Acting(kin, jnp.zeros((model.nbody, 6)), qpos, qvel, jnp.zeros(0))


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf, 2e10])
def test_a_bad_control_zeroes_all(bad):
    model = physics.load(ZOO).astype(np.float32)
    ctrl = np.array([0.5, bad, 0.5], np.float32)
    assert not actuation(model, jnp.asarray(ctrl), still(model)).force.any()


@pytest.mark.slow
def test_an_infinite_control_is_clamped_where_it_is_limited():
    model = physics.load(ZOO).astype(np.float32)
    compiled = oracle.oracle(ZOO)
    data = mujoco.MjData(compiled)
    data.ctrl = [np.inf, 0.3, -0.4]
    mujoco.mj_forward(compiled, data)
    found = actuation(model, jnp.asarray(data.ctrl, jnp.float32), still(model)).force
    np.testing.assert_allclose(found, data.qfrc_actuator, rtol=1e-6)


def test_products_with_the_jacobian_agree():
    model = physics.load(oracle.path("humanoid"))
    rng = np.random.default_rng(0)
    moving = (model.body_jntnum > 0)[:, None]
    x, wrench = rng.normal(size=model.nv), rng.normal(size=(model.nbody, 6)) * moving
    matrix = rng.normal(size=(model.nbody, 6, 6))
    matrix = matrix + matrix.swapaxes(1, 2)

    def products(x: Any, wrench: Any, matrix: Any) -> Any:
        cdof = kinematics(model, *physics.init(model)[1:3]).cdof
        motion = dynamics.body_motion(model, cdof, x)
        entries = dynamics.composite(model, cdof, dict(enumerate(matrix)))
        quadratic = math.dot(x, dynamics.multiply(entries, x))
        return motion, dynamics.project(model, cdof, dict(enumerate(wrench))), quadratic

    motion, force, quadratic = evaluate(products, x, wrench, matrix)
    np.testing.assert_allclose((motion * wrench).sum(), force @ x, rtol=1e-12)
    bodywise = np.einsum("bi,bij,bj->b", motion, matrix, motion)
    np.testing.assert_allclose(quadratic, bodywise[moving[:, 0]].sum(), rtol=1e-10)


@pytest.mark.parametrize("name", ["ant", "half_cheetah"])
def test_far_from_the_origin_nothing_is_lost(name):
    """At x = 500 m single precision gives, relative to the root, what it gives at 0."""
    source = oracle.path(name)
    model, given = physics.load(source).astype(np.float32), oracle.cases(source, 20)
    near = [x.astype(np.float32) for x in given[:2]]
    far = near[0].copy()
    exact = near[0][:, 0].astype(np.float64) + 500
    far[:, 0] = exact
    low = np.zeros((len(far), len(model.root_dofs)), far.dtype)
    low[:, 0] = exact - far[:, 0]
    run = jax.vmap(lambda q, low: kinematics(model, q, low)[1:])
    for a, b in zip(
        evaluate(run, far, low), evaluate(run, near[0], np.zeros_like(low)), strict=True
    ):
        np.testing.assert_allclose(a[:, 1:], b[:, 1:], atol=1e-6)
