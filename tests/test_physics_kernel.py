"""Physics as users run it: batched by simd.vectorize inside jax.jit, against MuJoCo."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import mujoco_states as oracle
from mujoco_states import states
from seedbed import physics, simd
from seedbed.types import SeedbedError

TIGHT = {"ant", "humanoid", "humanoidstandup"}
SUBSTEPS = 5


def load(name: str, integrator: int) -> physics.Model:
    model = physics.load(oracle.path(name))
    return dataclasses.replace(model, opt=model.opt._replace(integrator=integrator))


def own_integrators(names: tuple[str, ...]) -> list[tuple[str, int]]:
    pairs = []
    for name in names:
        own = int(oracle.oracle(oracle.path(name)).opt.integrator)
        pairs += [(name, integrator) for integrator in sorted({oracle.EULER, own})]
    return pairs


def check_parity(name: str, integrator: int, count: int) -> None:
    model = load(name, integrator)
    cases = oracle.cases(oracle.path(name), count)

    def step(state: physics.State, ctrl: jax.Array) -> tuple[jax.Array, jax.Array]:
        after = physics.step(model, state, ctrl)
        return after.qvel, after.qpos

    begun = states(model, cases.qpos, cases.qvel)
    begun = begun._replace(qacc_warmstart=jnp.asarray(cases.qacc_warmstart, jnp.float32))
    qvel, qpos = jax.jit(simd.vectorize(step))(begun, jnp.asarray(cases.ctrl, jnp.float32))
    exact = oracle.oracle(oracle.path(name), integrator)
    error = oracle.step_error(exact, cases, np.asarray(qvel, np.float64))
    quantiles = np.quantile(error, [0.99, 0.999, 1.0])
    assert (quantiles <= [2e-5 if name in TIGHT else 1e-4, 3e-4, 1e-3]).all(), quantiles
    wanted, change = oracle.after_step(exact, cases, ["qpos"])["qpos"], np.zeros(exact.nv)
    for ours, theirs in zip(np.asarray(qpos, np.float64), wanted, strict=True):
        mujoco.mj_differentiatePos(exact, change, 1.0, theirs, ours)
        assert np.abs(change).max() <= 1e-5 * max(1.0, np.abs(theirs).max())


@pytest.mark.quick("hopper")
@pytest.mark.parametrize("name", ["ant", "hopper", "pusher_v5"])
def test_a_step_is_mujocos(name):
    check_parity(name, oracle.EULER, 320)


@functools.cache
def roller(name: str, integrator: int) -> tuple[physics.Model, object]:
    """The batched function of (state, controls [B, nu]) that takes five steps."""
    model = load(name, integrator)

    def hold(state: physics.State, ctrl: jax.Array) -> physics.State:
        def substep(state: physics.State, _: None) -> tuple[physics.State, None]:
            return physics.step(model, state, ctrl), None

        return jax.lax.scan(substep, state, None, length=SUBSTEPS)[0]

    return model, jax.jit(simd.vectorize(hold))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "integrator"), own_integrators(oracle.MODELS))
def test_a_million_steps_go_well(name, integrator):
    model, run = roller(name, integrator)
    compiled, rng, batch = oracle.oracle(oracle.path(name)), np.random.default_rng(0), 1000
    span = np.where(compiled.actuator_ctrllimited, compiled.actuator_ctrlrange[:, 1], 1)
    state = states(
        model, np.tile(model.qpos0, (batch, 1)), 0.1 * rng.normal(size=(batch, model.nv))
    )
    for _ in range(200):
        ctrl = span * rng.uniform(-1, 1, (batch, model.nu))
        state = run(state, jnp.asarray(ctrl, jnp.float32))
        # as MuJoCo would, the inverted pendulums leave the numbers that can be simulated: start these anew
        fresh = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape)), physics.init(model))
        gone = np.asarray(state.diverged)
        assert gone.mean() < (0.05 if "pendulum" in name else 1e-3)
        state = jax.tree.map(
            lambda new, old, gone=gone: jnp.where(
                gone.reshape(-1, *[1] * (new.ndim - 1)), new, old
            ),
            fresh,
            state,
        )
        for leaf in jax.tree.leaves(state):
            assert bool(jnp.isfinite(leaf).all())
    assert np.asarray(state.time).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 15, 17, 4096])
def test_every_batch_size_gives_the_same(batch):
    model, run = roller("hopper", oracle.EULER)
    rng = np.random.default_rng(1)
    qvel, ctrl = rng.normal(size=(4096, model.nv)), rng.uniform(-1, 1, (4096, model.nu))
    qpos = np.tile(model.qpos0, (4096, 1))
    whole = run(states(model, qpos, qvel), jnp.asarray(ctrl, jnp.float32))
    part = run(states(model, qpos[:batch], qvel[:batch]), jnp.asarray(ctrl[:batch], jnp.float32))
    for ours, theirs in zip(jax.tree.leaves(part), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs[:batch])


@pytest.mark.slow
def test_no_environments_and_wrong_shapes():
    model, run = roller("hopper", oracle.EULER)
    empty = states(model, np.zeros((0, model.nq)), np.zeros((0, model.nv)))
    assert run(empty, jnp.zeros((0, model.nu))).qpos.shape == (0, model.nq)
    some = states(model, np.tile(model.qpos0, (3, 1)), np.zeros((3, model.nv)))
    with pytest.raises(SeedbedError, match="batch"):
        run(some, jnp.zeros((4, model.nu)))
    with pytest.raises(SeedbedError, match="ctrl"):
        run(some, jnp.zeros((3, model.nu + 1)))


@pytest.mark.slow
def test_randomised_domains_share_a_kernel():
    model = load("ant", oracle.EULER)
    rng = np.random.default_rng(2)
    cases = oracle.cases(oracle.path("ant"), 32)
    mass = model.body_mass * rng.uniform(0.8, 1.2, (32, model.nbody))
    friction = model.geom_friction * 0.7

    def step(state: physics.State, ctrl: jax.Array, mass: jax.Array) -> jax.Array:
        changed = model.replace(body_mass=mass, geom_friction=shared)
        return physics.step(changed, state, ctrl).qvel

    shared = jnp.asarray(friction, jnp.float32)
    args = jnp.asarray(cases.ctrl, jnp.float32), jnp.asarray(mass, jnp.float32)
    qvel = np.asarray(jax.jit(simd.vectorize(step))(states(model, cases.qpos, cases.qvel), *args))
    compiled = oracle.oracle(oracle.path("ant"), oracle.EULER)
    compiled.geom_friction[:] = np.float32(friction)
    for i in range(32):
        compiled.body_mass[:] = np.float32(mass[i])  # without mj_setConst, as documented
        one = oracle.Cases(*(column[i : i + 1] for column in cases))
        assert oracle.step_error(compiled, one, qvel[i : i + 1]) < 1e-4
