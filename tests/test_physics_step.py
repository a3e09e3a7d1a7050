"""One step against MuJoCo's: parity of the state and of all that it leaves behind, and what goes wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import mujoco_states as oracle
from numpy_jaxpr import evaluate
from seedbed import physics, simd
from seedbed.physics.model import EULER, IMPLICITFAST, RK4
from seedbed.types import SeedbedError

FIELDS = (
    "qpos",
    "qvel",
    "qacc",
    "qacc_warmstart",
    "qfrc_actuator",
    "qfrc_constraint",
    "time",
    "ncon",
    "xpos",
    "xquat",
    "xipos",
    "site_xpos",
    "subtree_com",
    "cvel",
    "cinert",
    "cfrc_ext",
)
CARTPOLE = """
<mujoco>
  <option timestep=".01" integrator="{integrator}"/>
  <worldbody>
    <body>
      <joint type="slide" axis="1 0 0" range="-1 1" limited="true"/>
      <geom size=".1" contype="0" conaffinity="0"/>
      <body><joint axis="0 1 0" damping=".1"/>
      <geom type="capsule" size=".05 .3" pos="0 0 .3" contype="0" conaffinity="0"/></body>
    </body>
  </worldbody>
  <actuator><motor joint="0" gear="10"/></actuator>
</mujoco>
""".replace('<joint type="slide"', '<joint name="cart" type="slide"').replace(
    '"0" gear', '"cart" gear'
)


def load(source: Any, integrator: int | None = None) -> physics.Model:
    """The model, under another integrator if one is given."""
    model = physics.load(source)
    if integrator is None:
        return model
    return dataclasses.replace(model, opt=model.opt._replace(integrator=integrator))


def stepped(model: physics.Model, cases: oracle.Cases, dtype: Any) -> physics.Data:
    """The data [n, ...] one step after the cases."""

    def one(qpos: Any, qvel: Any, ctrl: Any, warmstart: Any) -> physics.Data:
        begun = physics.init(model, qpos, qvel)._replace(qacc_warmstart=warmstart)
        return physics.step_data(model, begun, ctrl)

    return evaluate(jax.vmap(one), *(x.astype(dtype) for x in cases))


# Euler everywhere and, where it is the model's own, Runge-Kutta.
RUNS = [
    (name, kind)
    for name in oracle.MODELS
    for kind in (EULER, RK4)
    if kind == EULER or name not in ("half_cheetah", "pusher_v5")
]


def count(name: str) -> int:
    return 100 if name.startswith("humanoid") else 200


# In single precision the kernels' tests and the tasks' go over the same ground.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "integrator"), RUNS)
def test_a_step_in_single(name, integrator):
    source = oracle.path(name)
    given = oracle.cases(source, count(name))
    compiled = oracle.oracle(source, integrator)
    found = stepped(load(source, integrator), given, np.float32)
    assert found.qvel.dtype == np.float32
    error = oracle.step_error(compiled, given, found.qvel)
    assert np.quantile(error, 0.99) <= (2e-5 if name in ("ant", "humanoid") else 1e-4)
    assert error.max() <= 1e-3
    assert not found.diverged.any()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "integrator"), RUNS)
def test_a_step_in_double_with_all_it_leaves(name, integrator):
    source = oracle.path(name)
    given = oracle.cases(source, count(name))
    compiled = oracle.oracle(source, integrator)
    found = stepped(load(source, integrator), given, np.float64)
    wanted = oracle.after_step(compiled, given, FIELDS)
    assert oracle.step_error(compiled, given, found.qvel).max() <= 1e-7
    if name not in ("reacher", "swimmer", "inverted_pendulum", "inverted_double_pendulum"):
        assert wanted["ncon"].max() >= 1
    for field in FIELDS:
        ours, theirs = getattr(found, field), wanted[field]
        if field == "xquat":
            ours = ours * np.where((ours * theirs).sum(-1, keepdims=True) < 0, -1, 1)
        scale = 1 + np.abs(theirs).max(initial=0)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-7 * scale, err_msg=field)


@pytest.mark.slow
def test_forward_fills_in_what_a_reset_left_open():
    source = oracle.path("ant")
    model, compiled = load(source, EULER), oracle.oracle(source, EULER)
    given = oracle.cases(source, 10)
    given = given._replace(ctrl=0 * given.ctrl)
    run = jax.vmap(lambda qpos, qvel: physics.forward(model, physics.init(model, qpos, qvel)))
    found = evaluate(run, *given[:2])
    for name, theirs in oracle.after_forward(
        compiled, given, ["qpos", "qacc", "cvel", "xpos"]
    ).items():
        np.testing.assert_allclose(getattr(found, name), theirs, atol=1e-7, err_msg=name)
    assert (found.time == 0).all()


def test_energy():
    source = oracle.path("humanoid")
    model, compiled = load(source), oracle.oracle(source)
    compiled.opt.enableflags = mujoco.mjtEnableBit.mjENBL_ENERGY
    given = oracle.cases(source, 10)
    run = jax.vmap(lambda qpos, qvel: physics.energy(model, physics.init(model, qpos, qvel)))
    wanted = oracle.after_forward(compiled, given, ["energy"])["energy"]
    np.testing.assert_allclose(evaluate(run, *given[:2]), wanted, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ant", "half_cheetah"])
def test_far_away_a_step_is_as_good(name):
    """At x = 500 m, where a float32's digits are 3e-5 m apart."""
    source = oracle.path(name)
    compiled, model = oracle.oracle(source, EULER), load(source, EULER)
    given = oracle.cases(source, 60)
    qpos = given.qpos.copy()
    qpos[:, 0] += 500
    high = qpos.astype(np.float32)
    low = (qpos - high).astype(np.float32)

    def one(high: Any, low: Any, qvel: Any, ctrl: Any) -> physics.State:
        begun = physics.init(model, high, qvel)._replace(qpos_low=low[: len(model.root_dofs)])
        return physics.step(model, begun, ctrl)

    rest = [x.astype(np.float32) for x in given[1:3]]
    found = evaluate(jax.vmap(one), high, low, *rest)
    far = given._replace(qpos=qpos)
    assert np.quantile(oracle.step_error(compiled, far, found.qvel), 0.99) <= 1e-4
    moved = found.qpos[:, 0].astype(np.float64) + found.qpos_low[:, 0] - qpos[:, 0]
    wanted = oracle.after_step(compiled, far, ["qpos"])["qpos"][:, 0] - qpos[:, 0]
    np.testing.assert_allclose(moved, wanted, atol=2e-7)


@pytest.mark.slow
def test_a_bad_control_counts_as_none():
    source = oracle.path("hopper")
    model, given = load(source), oracle.cases(source, 2)
    ctrl = np.array([[0.5, np.nan, 0.5], [0, 0, 0]])
    same = [np.repeat(x[:1], 2, axis=0) for x in given]
    found = stepped(model, oracle.Cases(*same)._replace(ctrl=ctrl), np.float64)
    np.testing.assert_array_equal(found.qvel[0], found.qvel[1])
    assert not found.diverged.any()


@pytest.mark.slow
@pytest.mark.parametrize("integrator", ["Euler", "RK4"])
def test_a_diverged_environment_freezes_where_mujoco_resets(integrator, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log here
    source = CARTPOLE.format(integrator=integrator)
    model, compiled = load(source), oracle.oracle(source)
    qpos = np.array([[0, 0.3], [np.nan, 0], [0, 0.3], [0, 0.3], [0, 2e10]])
    qvel = np.array([[0, 1], [0, 1], [np.inf, 1], [0, 1e9], [0, 0.0]])
    ctrl = np.full((5, 1), 0.3)
    warned = []
    for row in zip(qpos, qvel, ctrl, strict=True):
        data = mujoco.MjData(compiled)
        data.qpos, data.qvel, data.ctrl = row
        mujoco.mj_step(compiled, data)
        warned.append(bool(data.warning.number.any()))
    found = stepped(model, oracle.Cases(qpos, qvel, ctrl, np.zeros((5, 2))), np.float64)
    np.testing.assert_array_equal(found.diverged, warned)
    assert warned == [False, True, True, True, True]
    np.testing.assert_array_equal(found.qpos[1:], qpos[1:])
    np.testing.assert_array_equal(found.qvel[1:], qvel[1:])
    for name in physics.Data._fields[len(physics.State._fields) :]:
        assert not getattr(found, name)[1:].any(), name
    alone = stepped(
        model, oracle.Cases(*(x[:1] for x in (qpos, qvel, ctrl, np.zeros_like(qvel)))), np.float64
    )
    np.testing.assert_array_equal(alone.qvel[0], found.qvel[0])
    frozen = jax.tree.map(lambda x: x[3], found.state)
    again = evaluate(lambda state: physics.step(model, state, jnp.ones(1)), frozen)
    assert again.diverged and again.time == 0


def test_what_is_read_anew_of_a_diverged_environment_is_zero():
    model = physics.load(CARTPOLE.format(integrator="Euler"))

    def run(qpos: Any) -> physics.Data:
        state = physics.init(model, qpos)
        return physics.refresh(model, physics.step_data(model, state, jnp.zeros(1)))

    data = jax.jit(simd.vectorize(run))(np.float32([[0.1, 0.2], [np.nan, 0.2]]))
    assert np.asarray(data.diverged).tolist() == [False, True]
    for name in ("xpos", "xquat", "cvel", "cinert", "subtree_com", "ncon", "sensordata"):
        assert not np.asarray(getattr(data, name))[1].any(), name
    assert np.asarray(data.xpos)[0].any()


def test_an_integrator_that_a_file_may_not_have_is_refused():
    tendon = '<tendon><fixed damping="1"><joint joint="cart" coef="1"/></fixed></tendon></mujoco>'
    plain = CARTPOLE.format(integrator="Euler")
    damped = plain.replace("</mujoco>", tendon)
    fluid = plain.replace('integrator="Euler"', 'integrator="Euler" density="1"')
    for source, integrator, text in (
        (plain, 2, "opt.integrator is 2: give 0 "),
        (damped, IMPLICITFAST, "implicitfast, and the model has damping of a tendon: use Euler"),
        (fluid, IMPLICITFAST, "implicitfast, and the model has density or viscosity"),
    ):
        model = load(source, integrator)
        with pytest.raises(SeedbedError, match=text):
            physics.step(model, physics.init(model), jnp.zeros(1))


READ = """
<mujoco>
  <option timestep=".01"/>
  <worldbody>
    <site name="origin"/>
    <geom name="floor" type="plane" size="5 5 .1"/>
    <body pos="0 0 .099"><freejoint/><geom size=".1"/></body>
    <body name="box" pos="1 0 .099"><freejoint/><geom type="box" size=".1 .1 .1"/></body>
    <body pos="3 0 0"><geom type="box" size=".1 .1 .1"/></body>
    <body mocap="true" pos="1 0 .25"><geom size=".06"/></body>
    <body pos="0 2 0">
      <joint axis="0 1 0"/><geom type="capsule" size=".05 .2" pos="0 0 1"/>
      <body><inertial pos="0 0 0" mass="0" diaginertia="1 1 1"/></body>
    </body>
  </worldbody>
  <sensor>
    <force site="origin"/>
    <contact body1="box" cutoff="1"/><contact geom1="floor" num="6" data="found" cutoff="2"/>
  </sensor>
</mujoco>
"""


def test_the_world_is_not_pushed_and_what_has_inertia_only_turns():
    """Reactions of static and mocap bodies, numbers of contacts beside a cutoff, a rotor without mass."""
    compiled = mujoco.MjModel.from_xml_string(READ)
    compiled.opt.tolerance = 1e-12
    data, model = mujoco.MjData(compiled), physics.load(READ)
    data.qvel[-1] = 1.0
    qpos, qvel = np.float32([data.qpos]), np.float32([data.qvel])
    mujoco.mj_step(compiled, data)

    def run(qpos: Any, qvel: Any) -> physics.Data:
        return physics.step_data(model, physics.init(model, qpos, qvel), jnp.zeros(0))

    ours = jax.jit(simd.vectorize(run))(qpos, qvel)
    for name, tolerance in (("qvel", 1e-5), ("cfrc_ext", 1e-3), ("sensordata", 1e-3)):
        wanted, got = getattr(data, name), np.asarray(getattr(ours, name))[0]
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=tolerance * 40, err_msg=name)


@pytest.mark.slow
def test_runge_kutta_holds_the_forward_pass_once():
    def equations(jaxpr: Any) -> int:
        inner = [x for eqn in jaxpr.eqns for x in jaxprs_in_params(eqn.params)]
        return len(jaxpr.eqns) + sum(map(equations, inner))

    source = oracle.path("half_cheetah")
    sizes = []
    for integrator in (EULER, RK4):
        model = load(source, integrator)
        state = physics.init(model)
        ctrl = jnp.zeros(model.nu)
        closed = jax.make_jaxpr(lambda s, c, model=model: physics.step(model, s, c))(state, ctrl)
        sizes.append(equations(closed.jaxpr))
    assert sizes[1] < 1.1 * sizes[0]


@pytest.mark.slow
def test_xla_computes_the_same():
    source = CARTPOLE.format(integrator="RK4")
    model, given = load(source), oracle.cases(CARTPOLE.format(integrator="RK4"), 8)

    def one(qpos: Any, qvel: Any, ctrl: Any) -> physics.State:
        return physics.step(model, physics.init(model, qpos, qvel), ctrl)

    args = [x.astype(np.float32) for x in given[:3]]
    compiled = jax.jit(jax.vmap(one))(*args)
    for ours, theirs in zip(compiled, evaluate(jax.vmap(one), *args), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_replaced_leaves_act_as_in_a_changed_mujoco_model():
    source = oracle.path("half_cheetah")
    model, compiled = load(source), oracle.oracle(source)
    given = oracle.cases(source, 40)
    rng = np.random.default_rng(0)
    leaves = {
        "geom_friction": compiled.geom_friction * rng.uniform(0.5, 2, (compiled.ngeom, 1)),
        "dof_damping": compiled.dof_damping * 2,
        "dof_armature": compiled.dof_armature * 1.5,
        "actuator_gear": compiled.actuator_gear * rng.uniform(0.5, 2, (compiled.nu, 1)),
    }
    for name, value in leaves.items():
        getattr(compiled, name)[:] = value

    def one(leaves: Any, *state: Any) -> jax.Array:
        changed = model.replace(**leaves)
        return physics.step(changed, physics.init(changed, *state[:2]), state[2]).qvel

    found = evaluate(jax.vmap(one, in_axes=(None, 0, 0, 0)), leaves, *given[:3])
    assert oracle.step_error(compiled, given, found).max() <= 1e-7


def test_a_bare_pendulum():
    """Without geoms, actuators or contacts."""
    source = """
    <mujoco><worldbody><body>
      <joint axis="0 1 0"/>
      <inertial pos="0 0 -1" mass="1" diaginertia=".1 .1 .1"/>
    </body></worldbody></mujoco>"""
    given = oracle.cases(source, 20)
    found = stepped(load(source), given, np.float64)
    np.testing.assert_allclose(
        found.qvel, oracle.after_step(oracle.oracle(source), given, ["qvel"])["qvel"], rtol=1e-12
    )


def test_wrong_inputs_are_named():
    model = physics.load(oracle.path("hopper"))
    state = physics.init(model)
    with pytest.raises(SeedbedError, match=r"ctrl has shape \(4,\) instead of \(3,\)"):
        physics.step(model, state, jnp.zeros(4))
    with pytest.raises(SeedbedError, match="ctrl holds int32"):
        physics.step(model, state, jnp.zeros(3, jnp.int32))
    with pytest.raises(SeedbedError, match=r"qpos has shape \(5, 6\).*batch it"):
        physics.init(model, jnp.zeros((5, 6)))
    with pytest.raises(SeedbedError, match="qpos holds int"):
        physics.init(model, np.zeros(6, int))
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    with pytest.raises(SeedbedError, match="step is for one environment"):
        physics.step(model, batch, jnp.zeros(3))
    other = physics.init(physics.load(oracle.path("ant")))
    with pytest.raises(SeedbedError, match=r"qpos has shape \(15,\) instead of \(6,\)"):
        physics.forward(model, other)
