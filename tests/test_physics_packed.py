"""Packed contacts: only those that are there are kept, and nothing else changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mujoco_states as oracle
from seedbed import physics, simd
from seedbed.physics import collision, problem

HEAP = """
<mujoco>
  <worldbody>
    <geom name="floor" type="plane" size="5 5 .1"/>
    <body name="a" pos="0 0 .1"><freejoint/><geom type="box" size=".2 .15 .1"/>
      <body pos=".25 0 0"><joint axis="0 1 0" damping=".1"/>
        <geom type="capsule" size=".03" fromto="0 0 0 .15 0 -.05"/></body></body>
    <body name="b" pos="0 .05 .26"><freejoint/><geom type="capsule" size=".06 .1" euler="0 90 0"/></body>
  </worldbody>
  <sensor><contact geom1="floor" data="found" num="1"/><contact body1="a" body2="b" data="found" num="1"/>
    <touch site="top"/></sensor>
</mujoco>
""".replace('<geom type="box" size=".2', '<site name="top" size=".3"/><geom type="box" size=".2')
FIELDS = ("qvel", "ncon", "solver_error", "cfrc_ext", "sensordata")


@pytest.fixture(scope="module")
def given() -> oracle.Cases:
    return oracle.cases(HEAP, 40)


def kernel(model: physics.Model) -> Any:
    def step(qpos: Any, qvel: Any, warmstart: Any) -> Any:
        state = physics.init(model, qpos, qvel)._replace(qacc_warmstart=warmstart)
        data = physics.step_data(model, state, jnp.zeros(0))
        return {name: getattr(data, name) for name in FIELDS}

    return jax.jit(simd.vectorize(step))


def arrays(given: oracle.Cases) -> tuple[jax.Array, ...]:
    return tuple(jnp.float32(x) for x in (given.qpos, given.qvel, given.qacc_warmstart))


def pack(patch: pytest.MonkeyPatch, most: int) -> None:
    patch.setattr(collision, "MOST_SLOTS", 0)
    patch.setattr(collision, "MOST_CONTACTS", most)


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [0, problem.MOST_PAIRS], ids=["own entries", "shared entries"])
def test_packing_changes_no_bit(given, pairs, monkeypatch):
    monkeypatch.setattr(problem, "MOST_PAIRS", pairs)
    model = physics.load(HEAP)
    plain = kernel(model)(*arrays(given))
    assert plain["ncon"].max() >= 6
    pack(monkeypatch, 16)
    packed = kernel(model)(*arrays(given))
    for name in FIELDS:
        np.testing.assert_array_equal(packed[name], plain[name], err_msg=name)


@pytest.mark.slow
def test_contacts_that_find_no_room_are_told(given, monkeypatch):
    model = physics.load(HEAP)
    pack(monkeypatch, 2)
    packed = kernel(model)(*arrays(given))
    assert np.isfinite(packed["qvel"]).all()
    # Each of the two groups, with the floor and between bodies, has room for two.
    full = packed["ncon"] > 4
    assert full.any() and (packed["solver_error"][full] == 1).all()
    assert (packed["solver_error"][packed["ncon"] <= 2] < 1e-3).all()


@pytest.mark.slow
def test_derivatives_of_packed_contacts_are_the_same(given, monkeypatch):
    model = physics.load(HEAP)

    def loss(qvel: Any, qpos: Any, warmstart: Any) -> Any:
        state = physics.init(model, qpos, qvel)._replace(qacc_warmstart=warmstart)
        return jnp.square(physics.step(model, state, jnp.zeros(0)).qvel).sum()

    qpos, qvel, warmstart = (x[:16] for x in arrays(given))
    plain = jax.jit(simd.vectorize(jax.grad(loss)))(qvel, qpos, warmstart)
    pack(monkeypatch, 16)
    packed = jax.jit(simd.vectorize(jax.grad(loss)))(qvel, qpos, warmstart)
    np.testing.assert_allclose(packed, plain, rtol=1e-4, atol=1e-4)
