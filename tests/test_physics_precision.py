"""What float32 makes hard: little friction, long levers, upright cylinders, tight limits, trees far apart."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import mujoco_states as oracle
from numpy_jaxpr import evaluate
from seedbed import physics, simd
from seedbed.physics import cone

SLED = """<mujoco><worldbody><geom type="plane" size="5 5 .1" friction="0"/>
  <body pos="0 0 .06"><freejoint/><geom type="capsule" size=".05 .2" euler="0 90 0" friction="0"/>
    <geom type="capsule" size=".05 .2" pos="0 .2 0" euler="0 90 0" friction="0"/></body>
</worldbody></mujoco>"""
LEVER = """<mujoco><option integrator="RK4"/><worldbody><geom type="plane" size="5 5 .1" friction=".05"/>
  <body pos="0 0 .3"><freejoint/><inertial pos="0 0 0" mass="13.8" diaginertia="1e-3 1e-3 1e-3"/>
    <geom type="sphere" size=".05" pos=".35 0 -.26" friction=".05"/></body></worldbody></mujoco>"""
SLIDE = """<mujoco><option timestep="1e-4" gravity="0 0 0" integrator="{integrator}"/><worldbody>
  <body><joint type="slide" damping="{damping}"/><geom size=".1" mass="1"/></body></worldbody></mujoco>"""
LIMITS = """<mujoco><worldbody><body><joint axis="0 1 0" range="-0.53461 -0.52943" limited="true"
  margin="0.153317" damping="0.0036" solimplimit="0.87 1.1 0.0016 0.55 1"/>
  <geom size=".05" pos="0 0 -.2"/></body></worldbody></mujoco>"""
PRIORITY = """<mujoco><worldbody><geom type="plane" size="5 5 .1" priority="1" friction=".8"/>
  <body pos="0 0 .1"><freejoint/><geom size=".1" solmix="3" margin=".02" gap=".005"/>
    <body pos=".25 0 0"><joint axis="0 1 0"/><geom size=".08" solimp=".9 .99 .002"/></body></body>
  <body pos=".1 .3 .1"><freejoint/><geom type="capsule" size=".06 .15" euler="0 80 0" priority="2"
    margin=".01" solref=".01 .8"/></body></worldbody></mujoco>"""
WALKER = """<body pos="{x} 0 .4"><freejoint/><geom type="capsule" size=".08 .15" euler="0 90 0"/>
  <body pos=".1 0 -.1"><joint axis="0 1 0" range="-40 40" damping=".1"/>
    <geom type="capsule" size=".04 .12" pos="0 0 -.12"/></body>
  <body pos="-.1 0 -.1"><joint axis="0 1 0" range="-40 40" damping=".1"/>
    <geom type="capsule" size=".04 .12" pos="0 0 -.12"/></body></body>"""
MEETING = f"""<mujoco><worldbody><geom type="plane" size="5 5 .1"/>
  <geom type="cylinder" size=".1 .2" pos="1000.3 .1 .05" euler="0 90 0"/>
  {WALKER.format(x=0)}{WALKER.format(x=1000)}{WALKER.format(x=1000.25)}</worldbody></mujoco>"""


def precise(xml: str) -> Any:
    """MuJoCo's model with its solver run as far as it goes."""
    model = oracle.oracle(xml)
    model.opt.tolerance, model.opt.iterations = 1e-15, 300
    return model


def along(model: Any, qvel: np.ndarray, count: int, seed: int = 0) -> oracle.Cases:
    """States along rollouts from qpos0 with a random push beside `qvel`, as float32 holds them."""
    rng, data, found = np.random.default_rng(seed), mujoco.MjData(model), []
    while len(found) < count:
        mujoco.mj_resetData(model, data)
        data.qvel = qvel + 0.1 * rng.normal(size=model.nv)
        for t in range(300):
            if t % 10 == 9:
                fields = data.qpos, data.qvel, data.ctrl, data.qacc_warmstart
                found.append([np.float64(np.float32(x)) for x in fields])
            mujoco.mj_step(model, data)
    return oracle.Cases(*(np.array(column) for column in zip(*found[:count], strict=True)))


def stepped(model: physics.Model, cases: oracle.Cases, *, warm: bool = True) -> physics.Data:
    """Our data [n, ...] after a step of the kernel."""

    def one(qpos: Any, qvel: Any, ctrl: Any, start: Any) -> Any:
        state = physics.init(model, qpos, qvel)
        state = state._replace(qacc_warmstart=start) if warm else state
        return physics.step_data(model, state, ctrl)

    step = jax.jit(simd.vectorize(one))
    return step(*(jnp.asarray(x, jnp.float32) for x in cases))


def error(model: Any, cases: oracle.Cases, qvel: Any) -> np.ndarray:
    return oracle.step_error(model, cases, np.asarray(qvel, np.float64))


@pytest.mark.parametrize("damping", [0, 1e-6])
@pytest.mark.parametrize("integrator", ["Euler", "implicitfast", "RK4"])
def test_a_push_that_is_lost_in_the_rounding_of_one_step_adds_up(integrator, damping):
    """At 50 m/s each of 2,000 steps adds 1e-6 m/s, and a float32's digits are 4e-6 m/s apart."""
    model = physics.load(SLIDE.format(integrator=integrator, damping=damping))
    push = jnp.full(1, 0.01, jnp.float32)

    def rolled(state: physics.State) -> physics.State:
        step = functools.partial(physics.step, model, qfrc_applied=push)
        return jax.lax.scan(lambda s, _: (step(s, push[:0]), None), state, length=2000)[0]

    begun = physics.init(model, np.zeros(1, np.float32), np.float32([50]))
    end = jax.jit(simd.vectorize(rolled))(jax.tree.map(lambda x: jnp.asarray(x)[None], begun))
    lost = damping * 50 * 0.2
    assert abs(float(end.qvel[0, 0]) - 50 - 0.002 + lost) < 4e-6


def test_a_sled_stays_on_ice():
    """For every friction, within 2 mm of MuJoCo's after a second."""
    model, compiled = physics.load(SLED), precise(SLED)
    friction = np.concatenate([[0], 10 ** np.linspace(-5, np.log10(2), 15)]).astype(np.float32)
    leaves = np.tile(np.float32(model.geom_friction), (len(friction), 1, 1))
    leaves[:, :, 0] = friction[:, None]
    speed = np.array([0.3, 0.1, 0, 0, 0, 0.5], np.float32)

    def slide(leaf: Any) -> Any:
        changed = model.replace(geom_friction=leaf)
        start = physics.init(changed, jnp.float32(model.qpos0), speed)

        def one(carry: Any, _: None) -> Any:
            data = physics.step_data(changed, carry[0], jnp.zeros(0, jnp.float32))
            return (data.state, jnp.maximum(carry[1], data.solver_error)), None

        (end, worst), _ = jax.lax.scan(one, (start, jnp.float32(0)), None, length=500)
        return end.qpos, worst

    qpos, worst = jax.jit(simd.vectorize(slide))(leaves)
    assert worst.max() < 1e-4
    for k, mu in enumerate(friction):
        compiled.geom_friction[:, 0] = mu
        data = mujoco.MjData(compiled)
        data.qvel = speed
        mujoco.mj_step(compiled, data, 500)
        assert np.abs(qpos[k] - data.qpos)[:3].max() < 2e-3, mu


@pytest.mark.slow
@pytest.mark.parametrize("xml", [LEVER, PRIORITY, LIMITS], ids=["lever", "priority", "limits"])
def test_a_step_is_mujocos(xml):
    """Warm and cold: a heavy body on a long lever, rows of many kinds, both bounds of a limit."""
    model, compiled = physics.load(xml), precise(xml)
    cases = along(compiled, np.zeros(compiled.nv), 120)
    for warm in (True, False):
        found = stepped(model, cases, warm=warm)
        assert error(compiled, cases, found.qvel).max() < 1e-3
        assert found.solver_error.max() < 1e-4


@pytest.mark.slow
def test_upright_cylinders_stand():
    """One step for tilts from 1e-7 to 0.1, and two seconds with a small mass beside the axis."""
    xml = """<mujoco><worldbody><geom type="plane" size="5 5 .1"/><body pos="0 0 .1995"><freejoint/>
      <geom type="cylinder" size=".1 .2"/>{more}</body></worldbody></mujoco>"""
    model, compiled = physics.load(xml.format(more="")), precise(xml.format(more=""))
    tilts = np.concatenate([[0], 10 ** np.linspace(-7, -1, 25)])
    qpos = np.tile(compiled.qpos0, (len(tilts), 1))
    qpos[:, 3], qpos[:, 4] = np.cos(tilts / 2), np.sin(tilts / 2)
    zero = np.zeros((len(tilts), 6))
    cases = oracle.Cases(np.float64(np.float32(qpos)), zero, np.zeros((len(tilts), 0)), zero)
    assert error(compiled, cases, stepped(model, cases).qvel).max() < 3e-4
    heavy = xml.format(more='<geom size=".02" pos=".05 0 0" density="3000"/>')
    model, compiled = physics.load(heavy), precise(heavy)
    hold = lambda s: jax.lax.scan(  # noqa: E731
        lambda s, _: (physics.step(model, s, jnp.zeros(0, jnp.float32)), None), s, None, length=1000
    )[0]
    start = physics.init(model, jnp.float32(model.qpos0))
    end = jax.jit(simd.vectorize(hold))(jax.tree.map(lambda x: jnp.asarray(x)[None], start))
    data = mujoco.MjData(compiled)
    mujoco.mj_step(compiled, data, 1000)
    assert np.abs(data.qvel).max() < 1e-6
    assert np.abs(end.qvel).max() < 1e-4
    assert np.abs(end.qpos[0] - data.qpos)[:3].max() < 1e-4


@pytest.mark.slow
def test_trees_far_apart_are_as_exact_as_the_first():
    """Two robots and a third, which touch one another and a static cylinder, 1 km from the first robot."""
    model, compiled = physics.load(MEETING), precise(MEETING)
    fast = np.zeros(compiled.nv)
    fast[2 * 8] = -0.5  # the third towards the second
    cases = along(compiled, fast, 150)
    found = stepped(model, cases)
    wanted = oracle.after_step(compiled, cases, ["qpos", "qvel", "ncon"])
    assert wanted["ncon"].max() > 6
    change = np.linalg.norm(wanted["qvel"] - cases.qvel, axis=1)
    off = np.linalg.norm(found.qvel - wanted["qvel"], axis=1)
    assert (off <= 1e-3 * np.maximum(change, 9.81 * model.opt.timestep)).all()
    rounding = np.spacing(np.abs(np.float32(wanted["qpos"])))
    assert (np.abs(found.qpos - wanted["qpos"]) <= np.maximum(rounding, 1e-6)).all()
    assert found.qpos_low.shape[1] == 9  # of three roots


@pytest.mark.slow
def test_a_body_that_has_fallen_far_is_exact_wherever_it_is_in_the_file():
    body = '<body pos="{x} 0 {z}"><freejoint/><geom type="capsule" size=".05 .2" euler="0 80 10"/></body>'
    near, far = body.format(x=0, z=0.06), body.format(x=5, z=-300)
    for bodies in (near + far, far + near):
        floor = '<geom type="cylinder" size="1 1" pos="0 0 -1" contype="2" conaffinity="1"/>'
        xml = f"<mujoco><worldbody>{floor}{bodies}</worldbody></mujoco>"
        compiled, model = precise(xml), physics.load(xml)
        cases = along(compiled, np.zeros(compiled.nv), 40)
        assert error(compiled, cases, stepped(model, cases).qvel).max() < 1e-4


@pytest.mark.slow
def test_one_number_tells_whether_a_step_can_be_trusted():
    """Right steps have at most 1e-4; of those that end too early, more than 1 % off, 95 % have 1e-2."""
    right, wrong = [], []
    for name in ("half_cheetah", "ant"):
        source = oracle.path(name)
        compiled, cases = precise(source.read_text()), oracle.cases(source, 150)
        whole = physics.load(source)
        whole = dataclasses.replace(whole, opt=whole.opt._replace(integrator=0))
        compiled.opt.integrator = 0
        for iterations in (100, 1, 2):
            model = dataclasses.replace(whole, opt=whole.opt._replace(iterations=iterations))
            found = stepped(model, cases, warm=False)
            off = error(compiled, cases, found.qvel)
            right.append(found.solver_error[off < 1e-4])
            wrong.append(found.solver_error[off > 1e-2])
    right, wrong = np.concatenate(right), np.concatenate(wrong)
    assert len(wrong) > 50
    assert (right <= 1e-4).mean() >= 0.999
    assert (wrong >= 1e-2).mean() >= 0.95


@pytest.mark.slow
def test_a_pyramid_that_gives_way_is_one_with_its_normal_on_a_spring():
    """The closed form against the minimum over the spring's length, by MuJoCo's rows; derivatives, too."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        mu, stiffness, compliance = 10 ** rng.uniform([-3, -1, -3], [0.3, 2, 1])
        slack = rng.normal(size=3) * [mu, 1, 1]
        gain = np.array([stiffness, 1 / stiffness])
        gain = np.append(gain, 1 / (1 / stiffness + np.arange(1, 5) * compliance))
        force, rows = evaluate(cone.push, gain, mu, slack)

        def rows_at(total: float, mu: float = mu, slack: np.ndarray = slack, c=compliance) -> Any:
            shifted = slack + [c * total, 0, 0]
            return evaluate(cone.rows_of, shifted, mu)

        low, high = 0.0, 1e6
        for _ in range(60):
            middle = 0.5 * (low + high)
            pushed = -stiffness * np.minimum(rows_at(middle), 0).sum()
            low, high = (middle, high) if pushed > middle else (low, middle)
        exact = -stiffness * np.minimum(rows_at(low), 0)
        along = [exact.sum(), mu * (exact[0] - exact[1]), mu * (exact[2] - exact[3])]
        np.testing.assert_allclose(force, along, rtol=1e-4, atol=1e-6 * stiffness)
        bend = evaluate(cone.curvature, gain, mu, rows)
        step = 1e-7 * rng.normal(size=3)
        there = evaluate(cone.push, gain, mu, slack + step).force
        np.testing.assert_allclose(force - there, bend @ step, rtol=1e-3, atol=1e-9 * stiffness)


SQUEEZED = """<mujoco><option gravity="{side} 0 -9.81"/><default><geom friction="{mu}"/></default><worldbody>
  <geom type="plane" size="5 5 1" pos="-.099 0 0" zaxis="1 0 0"/>
  <geom type="plane" size="5 5 1" pos=".099 0 0" zaxis="-1 0 0"/>
  <body><freejoint/><geom type="sphere" size=".1"/></body></worldbody></mujoco>"""
BALL = """<mujoco><worldbody><geom type="plane" size="5 5 1" friction="{mu}"/>
  <body pos="0 0 {height}"><freejoint/><geom type="sphere" size=".1" friction="{mu}"/></body>
</worldbody></mujoco>"""


def forward(xml: str, iterations: int | None = None) -> tuple[physics.Data, Any]:
    """Our data in float32 and MuJoCo's at the initial configuration."""
    model, compiled = physics.load(xml), precise(xml)
    if iterations is not None:
        model = dataclasses.replace(model, opt=model.opt._replace(iterations=iterations))
    data = mujoco.MjData(compiled)
    mujoco.mj_forward(compiled, data)
    begun = physics.init(model, jnp.float32(model.qpos0), jnp.zeros(model.nv, jnp.float32))
    return jax.jit(lambda state: physics.forward(model, state))(begun), data


@pytest.mark.slow
@pytest.mark.parametrize("side", [0, 3])
@pytest.mark.parametrize("mu", [0.3, 0.01, 1e-3, 0])
def test_forces_that_move_nothing_do_not_keep_the_solver(mu, side):
    """A ball between two walls, which press with any force that both take back."""
    data, mujocos = forward(SQUEEZED.format(mu=mu, side=side))
    assert data.solver_niter <= 20
    assert data.solver_error < 1e-4
    np.testing.assert_allclose(data.qacc, mujocos.qacc, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("iterations", [1, 2, 3, 100])
def test_forces_are_those_of_qacc_also_where_the_solver_stops_early(iterations):
    data, mujocos = forward(BALL.format(mu=1e-3, height=0.0999), iterations)
    np.testing.assert_allclose(data.qfrc_constraint[2], mujocos.qfrc_constraint[2], rtol=1e-3)


@pytest.mark.slow
def test_a_soft_contact_that_only_touches_does_not_push():
    data, mujocos = forward(BALL.format(mu=1, height=0.1))
    np.testing.assert_allclose(data.qacc, mujocos.qacc, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("condim", "mu"),
    [
        pytest.param(condim, mu, marks=() if (condim, mu) == (3, 1e-3) else pytest.mark.slow)
        for condim in (1, 3)
        for mu in (1, 1e-3, 1e-5)
    ],
)
def test_the_friction_of_contacts_that_are_not_there_has_a_derivative(mu, condim):
    model = physics.load(
        f"""<mujoco><worldbody><geom type="sphere" size=".1" condim="{condim}"/>
        <geom type="sphere" size=".1" pos="2 0 0"/><body pos="0 0 .1999"><freejoint/>
        <geom type="sphere" size=".1" condim="{condim}"/></body></worldbody></mujoco>"""
    )

    def after(friction: Any) -> Any:
        changed = model.replace(geom_friction=jnp.zeros((3, 3), jnp.float32) + friction[:, None])
        begun = physics.init(changed, jnp.float32(model.qpos0), jnp.ones(6, jnp.float32))
        return physics.step(changed, begun, jnp.zeros(0, jnp.float32)).qvel.sum()

    assert np.isfinite(jax.grad(after)(jnp.full(3, mu, jnp.float32))).all()
