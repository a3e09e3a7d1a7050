"""Places where a derivative of a step easily is NaN, or wrong: each has a test of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import directional
import mujoco_states as oracle
from numpy_jaxpr import evaluate
from seedbed import physics, simd
from seedbed.envs.device import wrappers
from seedbed.envs.device.locomotion.inverted_pendulum import InvertedPendulum
from seedbed.physics import colliders
from seedbed.physics import math as pmath
from seedbed.physics.narrow import CAPSULE, CYLINDER, SPHERE, Geom

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # no kernel falls back

ALONE = """
<mujoco>
  <option gravity="0 0 0" integrator="{integrator}"/>
  <worldbody><body><freejoint/><geom size=".1"/></body></worldbody>
</mujoco>
"""
PUSHED = """
<mujoco>
  <option timestep=".01"/>
  <worldbody>
    <geom type="plane" size="1 1 1" friction=".7"/>
    <body pos="0 0 .09">
      <joint name="x" type="slide" axis="1 0 0"/>
      <joint name="z" type="slide" axis="0 0 1"/>
      <geom size=".1" friction=".7"/>
    </body>
  </worldbody>
  <actuator><motor joint="x" gear="3" ctrlrange="-1 1" ctrllimited="true"/></actuator>
</mujoco>
"""


# The second of each goes over the same ground.
INTEGRATORS = [oracle.EULER, pytest.param(oracle.RK4, marks=pytest.mark.slow)]
DTYPES = [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)]


def scene(*kinds: str) -> physics.Model:
    """Free bodies of one geom each, above a plane that they do not reach."""
    sizes = {"sphere": ".06", "capsule": ".05 .12", "cylinder": ".07 .1"}
    bodies = "".join(
        f"<body><freejoint/><geom type='{kind}' size='{sizes[kind]}'/></body>" for kind in kinds
    )
    plane = "<geom type='plane' size='1 1 1' pos='0 0 -3'/>"
    return physics.load(f"<mujoco><worldbody>{plane}{bodies}</worldbody></mujoco>")


def some(name: str) -> oracle.Cases:
    """Twelve states of a rollout, in the air and on the ground."""
    return oracle.Cases(*(column[::5] for column in oracle.cases(oracle.path(name), 60)))


def gradients(
    model: physics.Model, state: physics.State, ctrl: Any, seed: int = 0
) -> tuple[physics.State, Any]:
    """Cotangents of a batch of states and controls, in double precision, for random ones of the data."""

    def pull(state: physics.State, ctrl: Any) -> Any:
        after, back = jax.vjp(lambda s, c: physics.step_data(model, s, c), state, ctrl)
        return back(jax.tree.map(drawn, after))

    def drawn(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return np.zeros(leaf.shape, jax.dtypes.float0)
        return jnp.asarray(np.random.default_rng(seed).normal(size=leaf.shape), leaf.dtype)

    def floats(tree: Any) -> Any:
        return jax.tree.map(lambda x: x if x.dtype != jax.dtypes.float0 else np.zeros(()), tree)

    return evaluate(jax.vmap(lambda s, c: floats(pull(s, c))), state, ctrl)


def states(model: physics.Model, qpos: np.ndarray, qvel: np.ndarray | None = None) -> physics.State:
    """A batch of states of the positions' precision."""
    qvel = np.zeros((len(qpos), model.nv), qpos.dtype) if qvel is None else qvel
    blank = physics.State(*(np.asarray(x) for x in physics.init(model, qpos[0], qvel[0])))
    batch = jax.tree.map(lambda x: np.broadcast_to(x, (len(qpos), *x.shape)), blank)
    names = "time", "qpos_low", "qvel_low", "act", "qacc_warmstart"
    cast = {name: getattr(batch, name).astype(qpos.dtype) for name in names}
    return batch._replace(qpos=qpos, qvel=qvel, **cast)


def is_finite(tree: Any) -> bool:
    return all(bool(np.isfinite(np.asarray(x)).all()) for x in jax.tree.leaves(tree))


# The solver


@pytest.mark.slow
@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_the_residuals_root_does_no_harm_where_it_is_zero(integrator):
    """Its two norms are zero without constraints, and their difference is at the minimum."""
    model = directional.load("hopper", integrator)
    given = directional.inputs_of(model, some("hopper"))
    state = states(model, given.qpos, given.qvel)
    free = directional.stepped(model, given)[1].free
    assert free.any() and not free.all()
    assert is_finite(gradients(model, state, given.ctrl))
    at_residual = jax.vmap(
        jax.grad(lambda s, c: physics.step_data(model, s, c).solver_error, allow_int=True)
    )
    assert not evaluate(lambda s, c: at_residual(s, c).qpos, state, given.ctrl).any()


@pytest.mark.slow
def test_a_warm_start_has_no_derivative():
    model = directional.load("hopper", oracle.EULER)
    cases = some("hopper")
    state = states(model, np.float32(cases.qpos), np.float32(cases.qvel))
    state = state._replace(qacc_warmstart=np.float32(cases.qacc_warmstart))
    step = simd.vectorize(lambda state, ctrl: physics.step(model, state, ctrl))

    def loss(start: Any, ctrl: Any) -> Any:
        after = step(state._replace(qacc_warmstart=start), ctrl)
        return after.qpos.sum() + after.qvel.sum() + after.qacc_warmstart.sum()

    back = jax.jit(jax.grad(loss, argnums=(0, 1)))(state.qacc_warmstart, np.float32(cases.ctrl))
    assert not np.asarray(back[0]).any()
    assert np.asarray(back[1]).any()


# Positions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "root"), [pytest.param("ant", 3, marks=pytest.mark.slow), ("hopper", 2)]
)
def test_the_low_part_of_a_position_moves_the_body_as_the_high_part_does(name, root):
    """It has the first `root` numbers of qpos."""
    model = directional.load(name, oracle.EULER)
    given = directional.inputs_of(model, some(name))
    assert directional.stepped(model, given)[1].touching.any()
    back, _ = gradients(model, states(model, given.qpos, given.qvel), given.ctrl)
    scale = np.abs(back.qpos).max()
    np.testing.assert_allclose(back.qpos_low, back.qpos[:, :root], atol=1e-9 * scale)


@pytest.mark.slow
def test_a_quaternion_of_zeros_has_a_finite_gradient():
    model = physics.load(ALONE.format(integrator="Euler"))
    back = gradients(model, states(model, np.zeros((1, 7))), np.zeros((1, 0)))
    assert is_finite(back)


@pytest.mark.quick("jacfwd-Euler")
@pytest.mark.parametrize("integrator", ["Euler", "RK4"])
@pytest.mark.parametrize("mode", [jax.jacfwd, jax.jacrev])
def test_at_rest_a_quaternion_turns_by_half_the_velocity(integrator, mode):
    model = physics.load(ALONE.format(integrator=integrator))
    quat = np.array([0.5, 0.1, -0.7, 0.5])
    quat /= np.linalg.norm(quat)
    qpos = np.array([0.1, 0.2, 0.3, *quat])

    def turned(qvel: Any) -> Any:
        state = physics.init(model, qpos, qvel)
        return physics.step(model, state, np.zeros(0)).qpos

    found = evaluate(mode(turned), np.zeros(6))
    h, spins = model.opt.timestep, np.concatenate([np.zeros((3, 1)), np.eye(3)], axis=1)
    wanted = 0.5 * h * directional.multiplied(np.tile(quat, (3, 1)), spins).T
    np.testing.assert_allclose(found[3:, 3:], wanted, rtol=0, atol=1e-15)
    np.testing.assert_allclose(found[:3, :3], h * np.eye(3), rtol=0, atol=1e-15)


# Contacts


def touches(kinds: tuple[int, int], sizes: Any, pose: Any) -> Any:
    """Distance, point and normal of the first touch [7], for poses [14] of two geoms."""
    geoms = []
    for at, (radius, half) in zip((0, 7), sizes, strict=True):
        mat = pmath.quat_to_mat(pmath.normalize_quat(pose[at + 3 : at + 7]))
        size = jnp.asarray(radius, pose.dtype), jnp.asarray(half, pose.dtype)
        geoms.append(Geom(pose[at : at + 3], mat[:, 2], mat[:, 0], *size))
    touch = colliders.COLLIDERS[kinds][0](*geoms, jnp.asarray(0.02, pose.dtype))[0]
    return jnp.concatenate([touch.dist[None], touch.pos, touch.normal])


@pytest.mark.quick("outside-2")
@pytest.mark.parametrize("first", [SPHERE, CAPSULE])
@pytest.mark.parametrize("spread", [0.12, 0.04], ids=["outside", "inside"])
def test_contacts_with_cylinders_that_are_searched_for(first, spread):
    """Distance, point and normal against differences, where those agree among themselves."""
    sizes = ((0.05, 0.12 if first == CAPSULE else 0.0), (0.07, 0.1))
    rng, n = np.random.default_rng(0), 300
    pose = rng.normal(size=(n, 14))
    pose[:, :3], pose[:, 7:10] = spread * pose[:, :3], 0
    way = rng.normal(size=(n, 14))
    run = jax.vmap(lambda pose: touches((first, CYLINDER), sizes, pose))
    size = 1e-5
    points = [evaluate(run, pose + size * t * way) for t in (0, 1, -1, 0.5, -0.5)]
    coarse, fine = (points[1] - points[2]) / (2 * size), (points[3] - points[4]) / size
    sides = (points[1] - points[0]) / size, (points[0] - points[2]) / size
    norm = np.linalg.norm(fine, axis=1)
    smooth = np.linalg.norm(sides[0] - sides[1], axis=1) < 1e-2 * norm
    # Where two ways out are equally short, the point jumps.
    smooth &= np.linalg.norm(coarse - fine, axis=1) < 1e-3 * norm
    deep = points[0][:, 0] < -sizes[0][0]
    kept = smooth & (deep if spread < 0.1 else ~deep)
    print(f"{kept.sum()} of {n}")
    assert kept.sum() > 0.3 * n
    found = evaluate(lambda p, w: jax.jvp(run, (p,), (w,))[1], pose, way)
    error = np.linalg.norm(found - (4 * fine - coarse) / 3, axis=1)
    assert (error[kept] <= 1e-6 * norm[kept]).all()


SAME = {
    "spheres": (("sphere", "sphere"), np.zeros(3)),
    "capsules": (("capsule", "capsule"), np.zeros(3)),
    "capsules in line": (("capsule", "capsule"), np.array([0, 0, 0.1])),
    "a sphere on a capsule's axis": (("sphere", "capsule"), np.array([0, 0, 0.05])),
    "a sphere in a cylinder's middle": (("sphere", "cylinder"), np.zeros(3)),
    "a sphere on a cylinder's axis": (("sphere", "cylinder"), np.array([0, 0, 0.12])),
    "a capsule in a cylinder's middle": (("capsule", "cylinder"), np.zeros(3)),
}
QUICK = {"a sphere in a cylinder's middle"}
"""What the default suite runs: a contact that is searched for."""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in SAME],
)
def test_geoms_in_one_place_have_finite_gradients(case, dtype):
    kinds, apart = SAME[case]
    model = scene(*kinds)
    qpos = np.tile(model.qpos0, (2, 1))
    qpos[:, 7:10] += apart
    qpos[1, 10:14] = np.sqrt(0.5) * np.array([1, 1, 0, 0])  # crossed at a right angle
    given = directional.inputs_of(
        model, oracle.Cases(qpos, *(np.zeros((2, k)) for k in (12, 0, 12)))
    )
    assert directional.stepped(model, given)[1].touching.all()
    state = states(model, qpos.astype(dtype))
    assert is_finite(gradients(model, state, np.zeros((2, 0), dtype)))


@pytest.mark.slow
def test_a_capsule_upright_on_a_plane_has_a_finite_gradient():
    """The tangent along the capsule is then the plane's normal."""
    model = physics.load(
        "<mujoco><worldbody><geom type='plane' size='1 1 1'/><body pos='0 0 .16'><freejoint/>"
        "<geom type='capsule' size='.05 .12'/></body></worldbody></mujoco>"
    )
    state = states(model, model.qpos0[None])
    assert is_finite(gradients(model, state, np.zeros((1, 0))))


# Environments that are no longer simulated


def kernel_gradients(
    model: physics.Model, state: physics.State, ctrl: np.ndarray
) -> tuple[physics.State, jax.Array, jax.Array]:
    """Gradients, by a kernel, of the sum of qpos and qvel after a step.

    They are by the states, by the controls and by the dampings, which all environments share.
    """

    def total(state: physics.State, ctrl: Any, damping: Any) -> Any:
        def one(state: physics.State, ctrl: Any) -> Any:
            after = physics.step(model.replace(dof_damping=damping), state, ctrl)
            return after.qpos, after.qvel

        return sum(x.sum() for x in simd.vectorize(one)(state, ctrl))

    damping = jnp.asarray(model.dof_damping, jnp.float32)
    run = jax.jit(jax.grad(total, argnums=(0, 1, 2), allow_int=True))
    return run(state, ctrl, damping)


@pytest.mark.slow
@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_a_frozen_environment_is_harmless(integrator):
    """It keeps its state, so the state's cotangents pass, and nothing else has any."""
    model = directional.load("inverted_double_pendulum", integrator)
    qpos = np.float32(np.tile([0.1, 0.2, -0.3], (8, 1)))
    qvel = np.float32(np.tile([0.5, -1, 2], (8, 1)))
    ctrl = np.full((8, 1), 0.3, np.float32)
    qpos[1, 1], qpos[2, 0] = np.nan, np.inf
    qvel[3, 2], qvel[4, 1] = np.nan, 5e9
    diverged = np.arange(8) == 5
    state = states(model, qpos, qvel)._replace(diverged=diverged)
    after = jax.jit(simd.vectorize(lambda s, c: physics.step(model, s, c)))(state, ctrl)
    frozen = np.asarray(after.diverged)
    np.testing.assert_array_equal(frozen, [False, True, True, True, True, True, False, False])
    by_state, by_ctrl, by_damping = kernel_gradients(model, state, ctrl)
    assert is_finite((by_state.qpos, by_state.qvel, by_ctrl, by_damping))
    assert not np.asarray(by_ctrl)[frozen].any()
    np.testing.assert_array_equal(by_state.qpos[frozen], 1)
    np.testing.assert_array_equal(by_state.qvel[frozen], 1)
    fine = jax.tree.map(lambda x: np.tile(x[:1], (8,) + (1,) * (x.ndim - 1)), state)
    alone = kernel_gradients(model, fine, ctrl)
    for ours, theirs in (
        (by_state.qpos, alone[0].qpos),
        (by_state.qvel, alone[0].qvel),
        (by_ctrl, alone[1]),
    ):
        np.testing.assert_array_equal(ours[~frozen], theirs[~frozen])
    np.testing.assert_allclose(by_damping, 3 / 8 * alone[2], rtol=1e-5)


SPINNING = """
<mujoco>
  <option timestep="0.01" integrator="RK4"/>
  <worldbody>
    <body>
      <joint name="a" axis="0 1 0" damping=".1"/>
      <geom type="capsule" fromto="0 0 0 0 0 .3" size=".04"/>
      <body pos="0 0 .3">
        <joint axis="1 0 0" damping=".1"/><geom type="capsule" fromto="0 0 0 .1 0 .3" size=".04"/>
      </body>
    </body>
  </worldbody>
  <actuator><motor joint="a" gear="3"/></actuator>
</mujoco>
"""


def test_an_environment_that_diverges_in_a_step_of_runge_kutta_is_harmless():
    """In whichever of the four stages that is."""
    model = physics.load(SPINNING)
    qpos, ctrl = np.float32([[0.1, 0.2]] * 8), np.zeros((8, 1), np.float32)
    speeds = [[0.1, 0.2], [10, 10], [1e5, 1e5], [1e6, 1e6], [1e8, -1e8], [5e9, 5e9], [0.3, 0.1]]
    state = states(model, qpos, np.float32([*speeds, [0.1, 0.2]]))
    after = jax.jit(simd.vectorize(lambda s, c: physics.step(model, s, c)))(state, ctrl)
    frozen = np.asarray(after.diverged)
    assert frozen.tolist() == [False, False, True, True, True, True, False, False]
    assert is_finite((after.qpos, after.qvel))
    np.testing.assert_array_equal(after.qvel[frozen], state.qvel[frozen])
    by_state, by_ctrl, by_damping = kernel_gradients(model, state, ctrl)
    assert is_finite((by_state.qpos, by_state.qvel, by_ctrl, by_damping))
    assert not np.asarray(by_ctrl)[frozen].any() and np.asarray(by_ctrl)[~frozen].all()
    np.testing.assert_array_equal(by_state.qvel[frozen], 1)


@pytest.mark.slow
def test_a_bad_control_has_no_derivative():
    model = directional.load("hopper", oracle.EULER)
    qpos, ctrl = np.float32(np.tile(model.qpos0, (3, 1))), np.zeros((3, model.nu), np.float32)
    ctrl[1, 1] = np.nan
    by_state, by_ctrl, _ = kernel_gradients(model, states(model, qpos), ctrl)
    assert is_finite((by_state.qpos, by_state.qvel, by_ctrl))
    assert not np.asarray(by_ctrl)[1].any() and np.asarray(by_ctrl)[[0, 2]].all()
    np.testing.assert_array_equal(by_state.qvel[1], by_state.qvel[0])


@pytest.mark.slow
def test_no_gradient_crosses_the_start_of_an_episode():
    env = wrappers.training(InvertedPendulum(integrator="euler"))
    batch, steps = 8, 40
    start = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), batch))
    actions = np.random.default_rng(0).uniform(-3, 3, (steps, batch, 1)).astype(np.float32)
    step = simd.vectorize(env.step)

    def loss(actions: Any) -> tuple[Any, Any]:
        def one(state: Any, action: Any) -> Any:
            state = step(state, action)
            return state, state.timestep.first

        last, first = jax.lax.scan(one, start, actions)
        return last.timestep.observation.sum(), first

    back, first = jax.jit(jax.grad(loss, has_aux=True))(actions)
    back, first = np.asarray(back), np.asarray(first)
    assert np.isfinite(back).all()
    later = steps - np.argmax(first[::-1], axis=0)  # the first step of the last episode
    began = first.any(axis=0)
    assert began.sum() >= 2 and (later[began] < steps).any()
    for lane in np.flatnonzero(began):
        assert not back[: later[lane], lane].any()
        assert back[later[lane] :, lane].all()
    for lane in np.flatnonzero(~began):
        assert back[:, lane].all()


@pytest.mark.slow
def test_bodies_without_mass_in_a_medium_have_a_finite_gradient():
    model = directional.load("swimmer", oracle.EULER)
    assert model.opt.viscosity > 0 and not model.body_mass[0]

    def speed(value: Any) -> Any:
        state = physics.init(model, jnp.float32(model.qpos0), jnp.ones(model.nv, jnp.float32))
        changed = model.replace(body_inertia=value)
        return physics.step(changed, state, jnp.zeros(model.nu)).qvel.sum()

    found = jax.jit(jax.grad(speed))(jnp.float32(model.body_inertia))
    assert is_finite(found) and np.asarray(found).any()


# Guards of a kernel


@pytest.mark.slow
def test_lanes_that_are_not_guarded_in_do_no_harm():
    """Two balls: a contact, none, one place, far away; each lane has the gradient that it has alone."""
    model = scene("sphere", "sphere")
    qpos = np.float32(np.tile(model.qpos0, (16, 1)))
    qpos[:, 7:10] = np.resize([[0.1, 0.02, 0], [0.5, 0, 0], [0, 0, 0], [1e6, 0, 0]], (16, 3))

    def total(qpos: Any) -> Any:
        after = simd.vectorize(lambda q: physics.step(model, physics.init(model, q), jnp.zeros(0)))
        return after(qpos).qvel.sum() + after(qpos).qpos.sum()

    run = jax.jit(jax.grad(total))
    together = np.asarray(run(qpos))
    assert np.isfinite(together).all()
    for lane in range(4):
        alone = np.asarray(run(np.repeat(qpos[lane : lane + 1], 16, axis=0)))
        np.testing.assert_array_equal(together[lane], alone[lane])


def test_a_nan_in_the_arm_that_is_not_taken_stays_there():
    def guarded(x: Any, y: Any) -> Any:
        ok = x > 0
        root = jnp.sqrt(jnp.where(ok, x, 1)) * jnp.log(jnp.where(ok, x, 1)) * jnp.sin(y)
        return jnp.where(ok, root * y, 0) + jnp.where(ok, 0, x * y)

    x = np.float32([1, -1, 0, np.nan, 2, -np.inf, 3, 0.5])
    y = np.linspace(-1, 1, 8, dtype=np.float32)
    both = [
        jax.grad(lambda x, y, run=run: run(guarded)(x, y).sum(), argnums=(0, 1))(x, y)
        for run in (simd.vectorize, jax.vmap)
    ]
    for ours, theirs in zip(*both, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    finite = np.isfinite(x)
    assert np.isfinite(both[0][1][finite]).all()


# Ties


def pushed_gradient(ctrl: float, friction: tuple[float, float], dtype: Any) -> tuple[Any, Any]:
    """Gradients of the pushed ball's speed along x by its control and by both frictions."""
    model = physics.load(PUSHED)

    def speed(ctrl: Any, sliding: Any) -> Any:
        full = jnp.asarray(model.geom_friction, dtype).at[:, 0].set(sliding)
        state = physics.init(model, np.zeros(2, dtype), np.array([0.5, 0], dtype))
        return physics.step(model.replace(geom_friction=full), state, ctrl).qvel[0]

    run = jax.grad(lambda c, f: batched(speed)(c, f).sum(), argnums=(0, 1))
    given = np.full((1, 1), ctrl, dtype), np.array([friction], dtype)
    batched = jax.vmap if dtype == np.float64 else simd.vectorize
    found = evaluate(run, *given) if dtype == np.float64 else run(*given)
    return float(found[0][0, 0]), np.asarray(found[1][0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_tie_each_side_has_half(dtype):
    """A control on its clamp has half of the derivative that it has inside; of equal frictions, each half."""
    near = 1e-6
    inside, _ = pushed_gradient(1 - near, (0.7, 0.6), dtype)
    outside, _ = pushed_gradient(1 + near, (0.7, 0.6), dtype)
    for bound in (1, -1):
        on, _ = pushed_gradient(bound, (0.7, 0.6), dtype)
        np.testing.assert_allclose(on, 0.5 * inside, rtol=1e-4)
    assert inside > 0 and outside == 0
    _, floor = pushed_gradient(0.5, (0.7, 0.7 - near), dtype)
    _, ball = pushed_gradient(0.5, (0.7 - near, 0.7), dtype)
    _, tie = pushed_gradient(0.5, (0.7, 0.7), dtype)
    assert floor[1] == ball[0] == 0
    np.testing.assert_allclose(floor[0], ball[1], rtol=1e-4)
    np.testing.assert_allclose(tie, 0.5 * floor[[0, 0]], rtol=1e-4)
    assert floor[0] < 0
