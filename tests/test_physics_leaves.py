"""Leaves that are replaced, all of them at once, against a model of MuJoCo's with the same numbers."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import mujoco_states as oracle
from numpy_jaxpr import evaluate
from seedbed import physics, simd
from seedbed.envs.device.locomotion.ant import Ant
from seedbed.envs.device.randomisation import Offset, Scale, randomise
from seedbed.envs.device.robots.legged import Legged
from seedbed.physics.constants import DERIVED
from seedbed.physics.leaves import LEAVES
from seedbed.types import SeedbedError

DOCS = Path(__file__).parents[1] / "docs"
ROBOT = """
<mujoco>
  <option timestep=".004"/>
  <default><joint damping=".5" armature=".01" frictionloss=".1" stiffness="2" limited="true"
    range="-40 40"/></default>
  <worldbody>
    <geom name="floor" type="plane" size="5 5 .1"/>
    <geom name="step" type="box" size=".2 .3 .05" pos=".3 0 .05"/>
    <body name="trunk" pos="0 0 .3">
      <freejoint/>
      <geom name="trunk" type="box" size=".2 .1 .05" mass="4"/>
      <body pos="0 0 .06"><geom name="head" type="cylinder" size=".05 .03"
        mass=".5" contype="0" conaffinity="0"/></body>
      <body name="left" pos=".15 .12 0">
        <joint name="hip" axis="0 1 0"/><geom type="capsule" size=".03" fromto="0 0 0 0 0 -.15"/>
        <body pos="0 0 -.15"><joint name="knee" axis="0 1 0" ref="10"/>
          <geom name="foot" size=".04" pos="0 0 -.1"/></body>
      </body>
      <body pos="-.15 -.12 0">
        <joint name="other" axis="0 1 0"/><geom type="capsule" size=".03" fromto="0 0 0 0 0 -.2"/>
      </body>
    </body>
    <body name="sled" pos="-.6 0 .1" simple="false">
      <joint type="slide" axis="1 0 0" limited="false"/><joint type="slide" axis="0 0 1" limited="false"/>
      <geom type="box" size=".1 .1 .1"/>
    </body>
  </worldbody>
  <contact><pair geom1="foot" geom2="floor" friction=".8 .8 .01 .0001 .0001"/></contact>
  <actuator><position joint="hip" kp="20" kv=".3"/><position joint="knee" kp="15"/><motor joint="other"/>
  </actuator>
</mujoco>
"""
BALL = """<mujoco><worldbody><geom type="plane" size="5 5 .1"/>
<body pos="0 0 .099">{joint}<geom size=".1"/></body></worldbody></mujoco>"""
FREE, WHEEL = "<freejoint/>", '<joint axis="0 1 0"/>'
PULLED = """<mujoco><option integrator="implicitfast"/><worldbody><body><joint name="a"/><geom size=".1"/>
<body pos="1 0 0"><joint name="b"/><geom size=".1"/></body></body></worldbody>
<tendon><fixed name="cord"><joint joint="a" coef="1"/><joint joint="b" coef="1"/></fixed></tendon>
<actuator><general tendon="cord" biastype="affine"/></actuator></mujoco>"""


def changed(rng: np.random.Generator, name: str, old: np.ndarray) -> np.ndarray:
    """Numbers like the old ones, rounded to float32: factors, or offsets where a sign may change."""
    if name in ("gravity", "qpos0", "qpos_spring", "body_ipos", "geom_pos"):
        new = old + rng.uniform(-0.02, 0.02, old.shape)
    elif name in ("actuator_gear", "pair_friction"):
        new = old * rng.uniform(0.8, 1.2, (len(old), 1))
    else:
        new = old * rng.uniform(0.8, 1.2, old.shape)
    return np.float64(np.float32(new))


def put(compiled: Any, name: str, value: np.ndarray) -> None:
    if name == "gravity":
        compiled.opt.gravity[:] = value
    elif name in ("actuator_gainprm", "actuator_biasprm"):
        getattr(compiled, name)[:, :3] = value
    else:
        getattr(compiled, name)[:] = value


def varied(names: Any, seed: int) -> tuple[Any, physics.Model, dict[str, np.ndarray]]:
    """MuJoCo's model with other numbers, ours as loaded, and the numbers."""
    compiled, model = oracle.oracle(ROBOT), physics.load(ROBOT)
    leaves = {}
    for name in names:
        rng = np.random.default_rng([seed, list(LEAVES).index(name)])
        old = model.opt.gravity if name == "gravity" else getattr(model, name)
        leaves[name] = changed(rng, name, old)
        put(compiled, name, leaves[name])
    # What MuJoCo's compiler would have made of it: no frames that coincide, bounds of collisions, no tree
    # of boxes about centres of mass that have moved.
    compiled.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_MIDPHASE
    compiled.body_sameframe[:] = compiled.geom_sameframe[:] = 0
    compiled.geom_rbound[compiled.geom_rbound > 0] *= 2
    compiled.geom_aabb[:, 3:] *= 2
    return compiled, model, leaves


@pytest.mark.slow
def test_a_step_of_replaced_leaves_is_that_of_a_changed_model():
    compiled, model, leaves = varied(LEAVES, 0)
    given = oracle.cases(ROBOT, 60)
    wanted = oracle.after_step(compiled, given, ["qvel"])["qvel"]

    def step(leaves: Any, *state: Any) -> Any:
        qpos, qvel, ctrl, warmstart = state
        now = physics.init(model, qpos, qvel)._replace(qacc_warmstart=warmstart)
        return physics.step(model.replace(**leaves), now, ctrl).qvel

    batched = {name: np.broadcast_to(x, (60, *x.shape)) for name, x in leaves.items()}
    found = evaluate(jax.vmap(step), batched, *given)
    np.testing.assert_allclose(found, wanted, rtol=1e-7, atol=1e-7)
    # Each of them is felt.
    for name in LEAVES:
        if not leaves[name].size:
            continue  # test_physics_wide.py has tendons
        without = varied([other for other in LEAVES if other != name], 0)[0]
        other = oracle.after_step(without, given, ["qvel"])["qvel"]
        assert np.abs(other - wanted).max() > 1e-5, name


@pytest.mark.slow
def test_a_kernel_takes_leaves_by_environment():
    """Those of the inertia with what MuJoCo derives from them, and all others, in float32."""
    compiled, model, leaves = varied([name for name in LEAVES if name not in DERIVED], 1)
    mujoco.mj_setConst(compiled, mujoco.MjData(compiled))
    given = oracle.cases(ROBOT, 120)

    def step(leaves: Any, state: physics.State, ctrl: Any) -> physics.State:
        return physics.step(physics.set_const(model.replace(**leaves)), state, ctrl)

    shared = {name: np.broadcast_to(np.float32(x), (120, *x.shape)) for name, x in leaves.items()}
    state = oracle.states(model, given.qpos, given.qvel)
    found = jax.jit(simd.vectorize(step))(shared, state, jnp.float32(given.ctrl))
    error = oracle.step_error(compiled, given, np.asarray(found.qvel))
    assert np.quantile(error, 0.95) < 1e-4 and error.max() < 1e-3, np.sort(error)[-5:]


@pytest.mark.slow
@pytest.mark.parametrize("source", [ROBOT, oracle.path("humanoid"), oracle.path("pusher_v5")])
def test_derived_constants_are_mujocos(source):
    model, compiled = physics.load(source), oracle.oracle(source)
    rng = np.random.default_rng(2)
    names = ["body_mass", "body_inertia", "dof_armature", "qpos0"]
    # A body that is alone and slides along its own axes must stay that, in MuJoCo.
    names += [] if (model.body_simple == 2).any() else ["body_ipos"]
    leaves = {name: changed(rng, name, getattr(model, name)) for name in names}
    for name, value in leaves.items():
        put(compiled, name, value)
    mujoco.mj_setConst(compiled, mujoco.MjData(compiled))
    exact = physics.set_const(model.replace(**leaves))
    assert all(isinstance(getattr(exact, name), np.ndarray) for name in DERIVED)
    one = {name: jnp.float32(x) for name, x in leaves.items()}
    traced = jax.jit(lambda leaves: physics.set_const(model.replace(**leaves)).body_invweight0)(one)
    np.testing.assert_allclose(traced, exact.body_invweight0, rtol=1e-4)
    for name in DERIVED:
        np.testing.assert_allclose(getattr(exact, name), getattr(compiled, name), rtol=2e-4)


@pytest.mark.slow
def test_nothing_is_derived_where_nothing_changed():
    model = physics.load(ROBOT)
    same = physics.set_const(model)
    for name in DERIVED:
        np.testing.assert_allclose(getattr(same, name), getattr(model, name), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("joint", "mu", "told"), [(FREE, 0.5, False), (FREE, 1e-4, True), (WHEEL, 0.5, True)]
)
def test_contacts_that_are_to_stay_soft_are_as_they_were_or_the_step_says_so(joint, mu, told):
    """Those of the wheel, whose centre of mass cannot move, are as hard as can be in MuJoCo."""
    model = physics.load(BALL.format(joint=joint))
    friction = np.array(model.geom_friction)
    friction[:, 0] = mu

    def one(friction: jax.Array, hardens: bool) -> physics.Data:
        opt = model.opt._replace(hardens=hardens)
        changed = dataclasses.replace(model, opt=opt).replace(geom_friction=friction)
        start = physics.init(model, qvel=np.full(model.nv, 0.3, np.float32))
        return physics.step_data(changed, start, jnp.zeros(model.nu))

    given = jnp.asarray(friction, jnp.float32)[None]
    soft, any_ = (jax.jit(simd.vectorize(lambda f, h=h: one(f, h)))(given) for h in (False, True))
    assert any_.ncon[0] > 0 and any_.solver_error[0] < 1e-3
    assert soft.solver_error[0] == 1 if told else soft.solver_error[0] < 1e-3
    np.testing.assert_allclose(soft.qvel, any_.qvel, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [np.asarray, jnp.float32])
@pytest.mark.parametrize("name", ["actuator_gainprm", "actuator_biasprm"])
def test_numbers_that_an_actuators_kind_does_not_use_stay_zero(name, kind):
    """MuJoCo reads one number of a fixed gain, and none of a motor's bias."""
    compiled, model = oracle.oracle(ROBOT), physics.load(ROBOT)
    getattr(compiled, name)[:, :3] += 1
    changed = model.replace(**{name: kind(model.leaf(name) + 1)})
    np.testing.assert_array_equal(changed.leaf(name) != 0, physics.load(compiled).leaf(name) != 0)
    assert np.any(changed.leaf(name) == 0) and np.any(changed.leaf(name) != model.leaf(name))


def test_the_page_has_all_fields_and_leaves():
    page = (DOCS / "physics.md").read_text()
    table = page.partition("## State and Data")[2].partition("\n##")[0]
    names = set(re.findall(r"`(\w+)`", table))
    assert names >= {*physics.State._fields, *physics.Data._fields}
    assert set(re.findall(r"`(\w+)`", page.partition("## Domain randomisation")[2])) >= {*LEAVES}


def test_both_frictions_of_a_pair_are_drawn_as_one():
    base = physics.load(ROBOT).pair_friction
    drawn = Offset("pair_friction", -0.3, 0.3).drawn(jax.random.key(0), base)
    assert drawn[0, 0] == drawn[0, 1] != base[0, 0]
    assert len(np.unique(drawn[0] - base[0])) == 4


@pytest.mark.parametrize("bounds", [(0, 1), (-1, 0)])
def test_draws_of_what_a_file_may_not_have_are_refused(bounds):
    with pytest.raises(SeedbedError, match="a free joint has 0"):
        randomise(Ant(), Offset("jnt_stiffness", 0, 1))
    bias = physics.load(PULLED)
    with pytest.raises(SeedbedError, match="a servo of a tendon or site"):
        randomise(Ant(model=bias), Offset("actuator_biasprm", *bounds))


@pytest.mark.parametrize(("least", "soft"), [(0.4, True), (1e-3, False)])
def test_a_task_whose_frictions_are_drawn_knows_whether_contacts_stay_soft(least, soft):
    draws = (Scale("geom_friction", least, 1), Scale("body_mass", 0.8, 1.2))
    assert randomise(Ant(), *draws).soft == soft


@pytest.mark.parametrize("page", ["train-your-robot.md", "environments.md"])
def test_the_friction_that_a_page_draws_is_that_of_contacts(page):
    text = (DOCS / page).read_text()
    (drawn,) = re.findall(r'Scale\("geom_friction", .*?\)(?=,)', text)
    of = re.findall('of="(.*)"', drawn)
    task = Legged(xml_file=str(DOCS.parent / "examples" / "dog.xml")) if of else Ant()
    randomise(task, Scale("geom_friction", 0.4, 1.0, *of))


def test_draws_of_a_friction_that_no_contact_has_are_refused():
    """Ant's geoms all have the friction 1, and a contact the larger one."""
    slippery = Scale("geom_friction", 0.4, 1.0, of="floor")
    with pytest.raises(
        SeedbedError, match="no contact has the friction of 'floor' from 0.4 to 1.0"
    ):
        randomise(Ant(), slippery)
    randomise(Ant(), slippery, Scale("geom_friction", 0.4, 1.0, of="*ankle_geom"))
    randomise(Ant(), Scale("geom_friction", 0.4, 1.5, of="floor"))
