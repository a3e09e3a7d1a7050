"""Probes of memory: what the best policy with memory has, and what no policy without one exceeds."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from seedbed import simd
from seedbed.envs.device import wrappers
from seedbed.envs.device.gymnasium_api import make_gymnasium
from seedbed.envs.device.probes import RepeatProbe, TMazeProbe
from seedbed.types import Environment, EnvState, Timestep

ENVS = 600


def roll(env: Environment, policy, steps: int, batched=simd.vectorize, num_envs=ENVS) -> EnvState:
    """States [steps + 1, num_envs]; `policy(observations [t + 1, n, ...])` gives actions [n]."""
    reset, step = jax.jit(batched(env.reset)), jax.jit(batched(env.step))
    states = [reset(jax.random.split(jax.random.key(0), num_envs))]
    seen = [np.asarray(states[0].timestep.observation)]
    for _ in range(steps):
        states.append(step(states[-1], np.asarray(policy(np.stack(seen)), np.int32)))
        seen.append(np.asarray(states[-1].timestep.observation))
    states = [state._replace(inner=()) for state in states]
    return jax.tree.map(lambda *rows: np.stack(rows), *states)


def returns(now: Timestep) -> np.ndarray:
    """Returns [n] of the first episodes; all must have terminated."""
    ended = now.terminated | now.truncated
    before = np.cumsum(ended, 0) - ended == 0
    assert now.terminated[before & ended].all() and ended.any(0).all()
    return np.where(before, now.reward, 0).sum(0)


def remembers(delay: int):
    """Names the symbol that was shown `delay` steps ago; 0 until there is one."""

    def policy(seen):
        return seen[-1 - delay].argmax(-1) if len(seen) > delay else np.zeros(seen.shape[1])

    return policy


@pytest.mark.quick("task1")
@pytest.mark.parametrize("task", [RepeatProbe(), RepeatProbe(delay=1, choices=2, length=5)])
def test_the_repeat_probe_pays_for_memory_alone(task):
    now = roll(task, remembers(task.delay), task.length).timestep
    assert (returns(now) == task.length - task.delay).all()
    assert not now.reward[: task.delay + 1].any()
    assert now.terminated[-1].all() and not now.terminated[:-1].any() and not now.truncated.any()
    np.testing.assert_array_equal(now.observation.sum(-1), 1)
    shown = now.observation.mean((0, 1))
    np.testing.assert_allclose(shown, 1 / task.choices, atol=0.03)
    # Any table from symbol to action earns as little; one step off is as bad.
    tables = itertools.product(range(task.choices), repeat=task.choices)
    table = [np.array(table) for table in tables][1 :: task.choices**task.choices // 3]
    without = [lambda seen, t=t: t[seen[-1].argmax(-1)] for t in table]
    for policy in (*without, remembers(task.delay - 1), remembers(task.delay + 1)):
        mean = returns(roll(task, policy, task.length).timestep).mean()
        limit = (task.length - task.delay) / task.choices
        assert mean == pytest.approx(limit, abs=5 * np.sqrt(limit / ENVS))


def test_without_a_delay_no_memory_is_needed():
    task = RepeatProbe(delay=0, length=6)
    assert (returns(roll(task, remembers(0), task.length).timestep) == 6).all()


def turn(seen: np.ndarray, cue: np.ndarray) -> np.ndarray:
    """Walks to the junction, and turns there as a cue says."""
    return np.where(seen[-1, :, 1] > 0, np.where(cue > 0, 1, 2), 0)


@pytest.mark.parametrize("length", [1, 10])
def test_the_t_maze_pays_for_memory_alone(length):
    task, rng = TMazeProbe(length=length), np.random.default_rng(0)
    now = roll(task, lambda seen: turn(seen, seen[0, :, 0]), length + 1).timestep
    assert (returns(now) == 4).all() and now.terminated[-1].all()
    assert set(np.unique(now.observation[0, :, 0])) == {-1, 1}
    assert abs(now.observation[0, :, 0].mean()) < 0.15
    assert not now.observation[1:, :, 0].any()  # the cue is gone
    assert (now.observation[..., 1].argmax(0) == length).all()
    guesses = (
        lambda seen: turn(seen, seen[-1, :, 0]),
        lambda seen: turn(seen, np.ones(ENVS)),
        lambda seen: turn(seen, rng.random(ENVS) - 0.5),
    )
    for policy in guesses:
        got = returns(roll(task, policy, length + 1).timestep)
        assert set(np.unique(got.round(5))) == {np.float32(-0.1), np.float32(4)}
        assert got.mean() == pytest.approx(1.95, abs=0.3)


def test_the_t_maze_charges_for_what_leads_nowhere():
    task = TMazeProbe(length=2)
    plan = [1, 0, 2, 0, 0, 1]  # turns at the start and in the corridor, walks on at the junction
    now = roll(task, lambda seen: np.full(ENVS, plan[len(seen) - 1]), len(plan)).timestep
    np.testing.assert_allclose(now.reward[:6, 0], [0, -0.1, 0, -0.1, 0, -0.1], rtol=1e-6)
    np.testing.assert_array_equal(now.observation[1, :, 0], now.observation[0, :, 0])  # still there
    np.testing.assert_array_equal(now.reward[6] == 4, now.observation[0, :, 0] > 0)
    assert now.terminated[6].all() and not now.terminated[:6].any()


def test_a_t_maze_without_a_decision_is_truncated():
    env = wrappers.training(TMazeProbe(length=3))
    now = roll(env, lambda seen: np.zeros(ENVS), 21).timestep
    assert now.truncated[20].all() and now.first[21].all() and not now.terminated.any()


@pytest.mark.quick("TMaze*")
@pytest.mark.parametrize("task", [RepeatProbe(), TMazeProbe(length=3)], ids=lambda task: type(task))
def test_a_kernel_does_what_vmap_does(task):
    def policy(seen):
        return np.random.default_rng(len(seen)).integers(0, task.spec.action.n, 40)

    env = wrappers.training(task)
    ours, theirs = (roll(env, policy, 50, batched, 40) for batched in (simd.vectorize, jax.vmap))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert ours.timestep.first[1:].any()


@pytest.mark.quick("TMazeProbe")
@pytest.mark.parametrize("task", [RepeatProbe(), TMazeProbe()], ids=lambda task: type(task))
def test_they_are_gymnasiums_too(task):
    env = make_gymnasium(task, 3)
    observation, _ = env.reset(seed=0)
    assert observation.shape == (3, *task.spec.observation.shape)
    for _ in range(30):
        _, reward, *_ = env.step(env.action_space.sample())
        assert reward.shape == (3,)
