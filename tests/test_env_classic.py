"""Classic control on the device against Gymnasium's own, and the probes against their docstrings."""

from __future__ import annotations

import functools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seedbed import simd
from seedbed.envs.device.classic.acrobot import Acrobot
from seedbed.envs.device.classic.cartpole import CartPole
from seedbed.envs.device.classic.mountain_car import MountainCar
from seedbed.envs.device.classic.pendulum import Pendulum
from seedbed.envs.device.probes import DelayProbe, TruncationProbe
from seedbed.envs.device.wrappers import training
from seedbed.envs.host.contract import is_on_device
from seedbed.types import Box, Discrete, Timestep, trajectory_masks

TASKS = (
    CartPole(),
    CartPole(sutton_barto_reward=True),
    Pendulum(),
    Pendulum(g=9.81),
    Acrobot(),
    MountainCar(),
    MountainCar(goal_velocity=0.02),
)
OPTIONS = ("sutton_barto_reward", "g", "goal_velocity")


def twin(task) -> gymnasium.Env:
    options = {name: getattr(task, name) for name in OPTIONS if hasattr(task, name)}
    return gymnasium.make(task.gymnasium_id, disable_env_checker=True, **options)


def skilled(task, state: np.ndarray) -> int:
    """An action that swings up; balancing is left to chance."""
    if isinstance(task, MountainCar):
        return 2 if state[1] > 0 else 0
    return 2 if state[3] > 0 else 0


def rollout(task, steps: int) -> dict[str, np.ndarray]:
    """What Gymnasium does: states before, actions and results `[steps, ...]`."""
    env, rng, rows = twin(task), np.random.default_rng(0), []
    env.reset(seed=0)
    env.action_space.seed(0)
    for t in range(steps):
        state = np.array(env.unwrapped.state, np.float64)
        action = env.action_space.sample()
        if isinstance(task, MountainCar | Acrobot) and t > steps // 4 and rng.random() < 0.9:
            action = skilled(task, state)
        shown, reward, terminated, truncated, _ = env.step(action)
        rows.append((state, action, shown, reward, terminated))
        if terminated or truncated:
            env.reset()
    names = ("state", "action", "observation", "reward", "terminated")
    return {n: np.array(column) for n, column in zip(names, zip(*rows, strict=True), strict=True)}


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_a_step_is_gymnasiums(task):
    """Compares 3,000 steps, each from Gymnasium's own state, to 1e-5 of the largest values."""
    theirs = rollout(task, 3000)
    before = theirs["state"].copy()
    if isinstance(task, Pendulum):
        before[:, 0] = (before[:, 0] + np.pi) % (2 * np.pi) - np.pi
    blank = jax.vmap(task.reset)(jax.random.split(jax.random.key(0), len(before)))
    state = blank._replace(inner=jnp.asarray(before, jnp.float32))
    kind = np.float32 if isinstance(task.spec.action, Box) else np.int32
    ours = jax.jit(simd.vectorize(task.step))(state, theirs["action"].astype(kind)).timestep
    scale = np.maximum(1, np.abs(theirs["observation"]).max(0, keepdims=True))
    np.testing.assert_allclose(
        ours.observation / scale, theirs["observation"] / scale, atol=1e-5, rtol=0
    )
    np.testing.assert_allclose(ours.reward, theirs["reward"], atol=1e-4, rtol=0)
    np.testing.assert_array_equal(ours.terminated, theirs["terminated"])
    assert theirs["terminated"].any() or isinstance(task, Pendulum)
    assert not ours.truncated.any() and not ours.first.any()


@pytest.mark.parametrize("task", TASKS[::2], ids=repr)
def test_episodes_open_as_gymnasiums(task):
    """Compares 1,000 opening observations: extremes, means and deviations."""
    env = twin(task)
    theirs = np.array([env.reset(seed=i)[0] for i in range(1000)])
    state = jax.jit(jax.vmap(task.reset))(jax.random.split(jax.random.key(1), 1000))
    ours = np.asarray(state.timestep.observation)
    width = np.ptp(theirs, axis=0)
    for statistic, tolerance in ((np.min, 0.02), (np.max, 0.02), (np.mean, 0.04), (np.std, 0.03)):
        error = np.abs(statistic(ours, axis=0) - statistic(theirs, axis=0))
        assert (error <= tolerance * width + 1e-7).all(), (statistic.__name__, error / width)
    assert np.asarray(state.timestep.first).all() and not np.asarray(state.timestep.reward).any()


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_its_outside_is_gymnasiums(task):
    assert is_on_device(task)
    registered = gymnasium.spec(task.gymnasium_id)
    env = gymnasium.make(task.gymnasium_id, **task.gymnasium_options())
    assert task.episode_steps == registered.max_episode_steps
    assert task.spec.observation.shape == env.observation_space.shape
    if isinstance(task.spec.action, Discrete):
        assert task.spec.action.n == env.action_space.n
    else:
        assert task.spec.action.low == tuple(env.action_space.low)
        assert task.spec.action.high == tuple(env.action_space.high)


@functools.cache
def play(task, act, steps: int, count: int = 64) -> Timestep:
    """Timesteps `[steps + 1, count]` of a policy of (observation, key)."""
    env = training(task)

    def advance(state, key):
        after = jax.vmap(env.step)(state, act(state.timestep.observation, key))
        return after, after.timestep

    @jax.jit
    def run(key):
        opened = jax.vmap(env.reset)(jax.random.split(key, count))
        return opened.timestep, jax.lax.scan(advance, opened, jax.random.split(key, steps))[1]

    return jax.tree.map(lambda a, b: np.concatenate([a[None], b]), *run(jax.random.key(0)))


def guess(observation, key):
    return jax.random.randint(key, (len(observation),), 0, 2)


def match(observation, key):
    return (observation[:, 0] > 0).astype(jnp.int32)


def stay(observation, key):
    return jnp.zeros(len(observation), jnp.int32)


def leave(observation, key):
    return jnp.ones(len(observation), jnp.int32)


@pytest.mark.slow
def test_the_delay_probe_pays_a_step_late():
    """Checks the best return, that of guessing, and the values that the docstring claims."""
    task, gamma = DelayProbe(), 0.9
    now = play(task, match, task.length)
    assert (now.reward.sum(0) == task.length - 1).all()
    assert now.terminated[-1].all() and not now.terminated[:-1].any() and not now.truncated.any()
    value = np.zeros(now.reward.shape[1])
    for t in reversed(range(task.length)):
        value = now.reward[t + 1] + gamma * value
        claim = now.observation[t, :, 1] + sum(gamma**k for k in range(1, task.length - t))
        np.testing.assert_allclose(value, claim, rtol=1e-5)
    signs = now.observation[:, :, 0]
    assert set(np.unique(signs)) == {-1, 1} and abs(signs.mean()) < 0.15
    guessed = play(task, guess, 50 * (task.length + 1) - 1)
    assert abs(guessed.reward.mean()) < 0.05


def values(policy, gamma: float, end: str) -> dict[str, float]:
    """Values of a policy in the truncation probe, where truncations are taken as `end` says."""
    now = play(TruncationProbe(), policy, 30)
    masks, known = trajectory_masks(now, gamma, 1.0), np.zeros(2)
    seen = (now.observation[..., 0] > 0).astype(int)
    for _ in range(300):
        bootstrap = known[seen[1:]]
        if end == "terminated":
            bootstrap = np.where(now.truncated[1:], 0, bootstrap)
        elif end == "opening":
            bootstrap = np.where(now.truncated[1:], known[0], bootstrap)
        target = now.reward[1:] + masks.discount * bootstrap
        known = np.array([target[masks.valid & (seen[:-1] == i)].mean() for i in range(2)])
    return {"opening": known[0], "within": known[1]}


def test_the_truncation_probe_shows_what_bootstraps_wrongly():
    """Staying is worth 2 if right, and less than leaving by either mistake."""
    right, left = values(stay, 0.9, "right"), values(leave, 0.9, "right")
    assert right == pytest.approx({"opening": 0.8, "within": 2}, abs=1e-4)
    assert left == pytest.approx({"opening": -0.64, "within": 0.4}, abs=1e-4)
    for mistake in ("terminated", "opening"):
        assert values(stay, 0.9, mistake)["within"] <= 0.2 + 1e-6
    for policy, total in ((stay, -0.8), (leave, -0.6)):
        now = play(TruncationProbe(), policy, 2)
        np.testing.assert_allclose(now.reward.sum(0), total, rtol=1e-6)
        assert now.truncated[2].all() and now.terminated[2].all() == (policy is leave)
