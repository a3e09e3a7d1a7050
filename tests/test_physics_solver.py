"""The sparse factorisation, and the constrained acceleration against MuJoCo's own."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from mujoco_states import cases, oracle, path
from numpy_jaxpr import evaluate
from seedbed import physics
from seedbed.physics import collision, constraint, implicit, linear, mjcf, readout
from seedbed.physics.dynamics import mass_matrix, multiply, velocity
from seedbed.physics.equality import Moving
from seedbed.physics.kinematics import kinematics


def tree_pairs(rng: np.random.Generator, nv: int) -> set[linear.Entry]:
    """Entries of the mass matrix of a random tree."""
    parents = [int(rng.integers(-1, i)) for i in range(nv)]
    pairs = set()
    for i in range(nv):
        j = i
        while j >= 0:
            pairs.add((i, j))
            j = parents[j]
    return pairs


@pytest.mark.parametrize("seed", range(8))
def test_factorisation_solves_with_no_fill_on_a_tree(seed):
    rng = np.random.default_rng(seed)
    nv = int(rng.integers(1, 13))
    pairs = tree_pairs(rng, nv)
    alone = linear.pattern(nv, pairs)
    assert {(k, i) for k, row in enumerate(alone.rows) for i in row} == {
        (i, j) for i, j in pairs if i != j
    }
    extra = {(int(max(p)), int(min(p))) for p in rng.integers(0, nv, (3, 2))}
    full = np.zeros((nv, nv))
    for i, j in pairs | extra:
        full[i, j] = full[j, i] = rng.normal()
    full += 10 * np.eye(nv)
    vector = rng.normal(size=nv)

    def solved(entries: dict[linear.Entry, Any], b: jax.Array) -> jax.Array:
        return linear.solve(linear.factor(linear.pattern(nv, pairs | extra), entries), b)

    entries = {(i, j): full[i, j] for i, j in pairs | extra}
    np.testing.assert_allclose(evaluate(solved, entries, vector), np.linalg.solve(full, vector))


def solutions(
    model: Any, states: tuple[np.ndarray, ...], dtype: Any, iterations: int | None = None
) -> Any:
    """Our Solution and the bodies' reference points at states (qpos, qvel, warmstart, qacc_smooth)."""
    ours = mjcf.from_mujoco(model).astype(dtype)
    if iterations is not None:
        ours = dataclasses.replace(ours, opt=ours.opt._replace(iterations=iterations))

    def one(q: jax.Array, v: jax.Array, warm: jax.Array, smooth: jax.Array) -> Any:
        kin = kinematics(ours, q, physics.init(ours, q).qpos_low)
        moving = Moving(v, *velocity(ours, kin.cdof, v))
        contacts = collision.detect(ours, kin)
        mass = mass_matrix(ours, kin)
        rows = constraint.make_rows(ours, kin, contacts, q, moving, mass)
        free = implicit.Smooth(multiply(mass, smooth), smooth)
        found = implicit.solve(ours, kin, mass, free, warm, contacts, rows)
        return found, readout.absolute(ours, kin, jnp.zeros_like(kin.xpos), np.arange(ours.nbody))

    return evaluate(jax.vmap(one), *(x.astype(dtype) for x in states))


def mujocos(
    model: Any, qpos: np.ndarray, qvel: np.ndarray, ctrl: np.ndarray, warm: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Fields after mj_forward, and the contacts' wrench [n, nbody, 6] about the world's origin."""
    data, rows, wrenches = mujoco.MjData(model), [], []
    names = "qacc", "qacc_smooth", "qfrc_constraint"
    for q, v, u, w in zip(qpos, qvel, ctrl, warm, strict=True):
        mujoco.mj_resetData(model, data)
        data.qpos, data.qvel, data.ctrl, data.qacc_warmstart = q, v, u, w
        mujoco.mj_forward(model, data)
        rows.append({name: getattr(data, name).copy() for name in names} | {"nefc": data.nefc})
        wrench = np.zeros((model.nbody, 6))
        for k, c in enumerate(data.contact):
            force = np.zeros(6)
            mujoco.mj_contactForce(model, data, k, force)
            world = c.frame.reshape(3, 3).T @ force[:3]
            row = np.concatenate([np.cross(c.pos, world), world])
            for sign, geom in ((-1, c.geom1), (1, c.geom2)):
                if model.geom_bodyid[geom]:
                    wrench[model.geom_bodyid[geom]] += sign * row
        wrenches.append(wrench)
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}, np.stack(wrenches)


def relative(x: np.ndarray, y: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Error [n] of x against y [n, k] over the larger of the norms of y and scale [n, k]."""
    size = np.maximum(np.linalg.norm(y, axis=1), np.linalg.norm(scale, axis=1))
    return np.linalg.norm(x - y, axis=1) / np.maximum(size, 1e-9)


def check(
    model: Any, states: tuple[np.ndarray, ...], count: int, float32: tuple[float, float]
) -> Any:
    """Compares with MuJoCo in float64, and in float32 the 99 % quantile and the maximum."""
    qpos, qvel, ctrl, warm = states
    theirs, wrench = mujocos(model, qpos, qvel, ctrl, warm)
    assert (theirs["nefc"] > 0).sum() >= count
    smooth, qacc = theirs["qacc_smooth"], theirs["qacc"]
    ours, origins = solutions(model, (qpos, qvel, warm, smooth), np.float64)
    assert relative(ours.qacc, qacc, smooth).max() < 1e-9
    push = theirs["qfrc_constraint"]
    assert relative(ours.qfrc_constraint, push, 1e-3 * smooth).max() < 1e-7
    np.testing.assert_array_equal(ours.qacc[theirs["nefc"] == 0], smooth[theirs["nefc"] == 0])
    force = ours.wrench[:, :, 3:]
    torque = ours.wrench[:, :, :3] + np.cross(origins, force)
    mine = np.concatenate([torque, force], axis=2)[:, 1:].reshape(len(qpos), -1)
    assert relative(mine, wrench[:, 1:].reshape(mine.shape), 1e-3 * smooth).max() < 1e-7
    assert (ours.error / np.maximum(np.linalg.norm(qacc, axis=1), 1)).max() < 1e-10
    rounded, _ = solutions(model, (qpos, qvel, warm, smooth), np.float32)
    errors = relative(rounded.qacc, qacc, smooth)
    assert rounded.qacc.dtype == np.float32
    assert (np.quantile(errors, 0.99), errors.max()) < float32, errors.max()
    assert rounded.niter.max() < 15
    return ours


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "float32"),
    [
        ("ant", 120, 2e-5),
        ("half_cheetah", 120, 1e-4),
        ("hopper", 120, 1e-4),
        ("walker2d_v5", 120, 1e-4),
        ("pusher_v5", 80, 1e-4),
        ("humanoid", 50, 2e-5),
    ],
)
def test_accelerations_are_mujocos(name, count, float32):
    model = oracle(path(name))
    ours = check(model, tuple(cases(path(name), count)), count // 8, (float32, 10 * float32))
    assert ours.niter.max() < 12


FRICTION = """<mujoco><worldbody><geom type='plane' size='1 1 1'/>
  <geom type='capsule' size='.1 .3' pos='0 0 .1' euler='90 0 0'/>
  <body name='a' pos='0 0 .3'><freejoint/><geom type='capsule' size='.1 .2' condim='3'/>
    <body pos='.1 0 .2'><joint axis='0 1 0' range='-20 30'/><geom type='capsule' size='.08 .2' pos='0 0 .2'/>
      <body pos='0 0 .3'><geom size='.09' condim='1'/></body></body></body>
  <body name='b' pos='.15 0 .3'><freejoint/><geom type='sphere' size='.12' friction='.7 .1 .1'/></body>
  <body name='c' pos='0 .2 .4'><joint type='slide' axis='0 0 1'/><joint axis='1 0 0'/>
    <geom type='capsule' size='.05 .2' euler='10 80 0' condim='1'/></body>
  </worldbody></mujoco>"""


def heaps(model: Any, count: int) -> tuple[np.ndarray, ...]:
    """Random states (qpos, qvel, ctrl, warmstart) around qpos0."""
    rng = np.random.default_rng(0)
    qpos = []
    for _ in range(count):
        q = model.qpos0.copy()
        mujoco.mj_integratePos(model, q, rng.normal(size=model.nv), 0.1)
        qpos.append(q)
    zeros = np.zeros((count, model.nu))
    speeds = rng.normal(size=(count, model.nv))
    return np.stack(qpos), speeds, zeros, 10 * rng.normal(size=(count, model.nv))


@pytest.mark.slow
def test_frictional_contacts_between_moving_bodies():
    """Trees that push each other, the static world and themselves, with and without friction."""
    model = oracle(FRICTION)
    ours = check(model, heaps(model, 100), 90, (1e-4, 1e-3))
    assert ours.niter.max() > 3  # some are not easy


@pytest.mark.slow
def test_the_files_iterations_do_not_stop_the_solver():
    """Files tuned for other solvers say 1 to 5; what is simulated is the minimum."""
    text = path("ant").read_text()
    tuned = [
        mujoco.MjModel.from_xml_string(text.replace("<option ", f'<option iterations="{n}" '))
        for n in (1, 5)
    ]
    assert [model.opt.iterations for model in tuned] == [1, 5]
    caps = {mjcf.from_mujoco(model).opt.iterations for model in (*tuned, oracle(path("ant")))}
    assert caps == {mjcf.ITERATIONS}
    qpos, qvel, ctrl, warm = cases(path("ant"), 40)
    theirs, _ = mujocos(oracle(path("ant")), qpos, qvel, ctrl, warm)
    cold = np.zeros_like(warm)  # from a warm start one iteration is often enough
    ours, _ = solutions(tuned[0], (qpos, qvel, cold, theirs["qacc_smooth"]), np.float64)
    assert relative(ours.qacc, theirs["qacc"], theirs["qacc_smooth"]).max() < 1e-9


@pytest.mark.slow
def test_the_cap_of_iterations_is_kept_and_shows():
    model = oracle(FRICTION)
    qpos, qvel, ctrl, warm = heaps(model, 60)
    theirs, _ = mujocos(model, qpos, qvel, ctrl, warm)
    ours, _ = solutions(model, (qpos, qvel, warm, theirs["qacc_smooth"]), np.float64, 2)
    assert ours.niter.max() == 2
    unfinished = relative(ours.qacc, theirs["qacc"], theirs["qacc_smooth"]) > 1e-6
    assert unfinished.any()
    assert (
        ours.error[unfinished] > 1e-9 * np.linalg.norm(theirs["qacc"], axis=1)[unfinished]
    ).all()


@pytest.mark.slow
def test_a_good_warm_start_is_used():
    model = oracle(FRICTION)
    qpos, qvel, ctrl, warm = heaps(model, 60)
    theirs, _ = mujocos(model, qpos, qvel, ctrl, warm)
    states = qpos, qvel, theirs["qacc"], theirs["qacc_smooth"]
    ours, _ = solutions(model, states, np.float64)
    assert ours.niter.max() <= 1
    assert relative(ours.qacc, theirs["qacc"], theirs["qacc_smooth"]).max() < 1e-9


def test_without_constraints_the_acceleration_is_smooth():
    xml = "<mujoco><worldbody><body><joint/><geom size='.1'/></body></worldbody></mujoco>"
    model = oracle(xml)
    states = np.zeros((3, 1)), np.ones((3, 1)), np.ones((3, 1)), np.full((3, 1), 7.0)
    ours, _ = solutions(model, states, np.float64)
    np.testing.assert_array_equal(ours.qacc, states[3])
    np.testing.assert_array_equal(ours.niter, [0, 0, 0])
