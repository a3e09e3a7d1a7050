"""On-device environments as Gymnasium's: its checker, its conventions, its failures named."""

from __future__ import annotations

import dataclasses
import warnings

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from seedbed.envs.device import changes, wrappers
from seedbed.envs.device.classic.acrobot import Acrobot
from seedbed.envs.device.classic.cartpole import CartPole
from seedbed.envs.device.classic.mountain_car import MountainCar
from seedbed.envs.device.classic.pendulum import Pendulum
from seedbed.envs.device.gymnasium_api import Batch, make_gymnasium
from seedbed.envs.device.locomotion.hopper import Hopper
from seedbed.envs.device.probes import DelayProbe
from seedbed.types import SeedbedError

HOPPER = Hopper(integrator="euler")
LIMITED = CartPole(episode_steps=12)


@dataclasses.dataclass(frozen=True)
class Counts(wrappers.Wrapper):
    """Tells how many episodes have been opened."""

    def _opened(self, child, own):
        return self._told(child, jnp.float32(1) if own is None else own + 1)

    def _stepped(self, child, own, metrics):
        return self._told(child, own)

    def _told(self, child, own):
        return wrappers.wrapped(child._replace(metrics={"opened": own}), own)


@pytest.mark.quick("CartPole", "Acrobot", "MountainCar", "DelayProbe")
@pytest.mark.parametrize(
    "task",
    [CartPole(), Acrobot(), MountainCar(), DelayProbe(), HOPPER],
    ids=lambda task: type(task),
)
def test_gymnasiums_checker_has_nothing_to_say(task):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(make_gymnasium(task))


def test_spaces_are_the_specs():
    env = make_gymnasium(HOPPER)
    assert isinstance(env, gymnasium.Env) and env.render_mode is None
    assert env.observation_space.shape == (11,) and env.observation_space.dtype == np.float32
    assert env.action_space == gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    assert env.spec.id == "seedbed/Hopper-v0" and env.spec.max_episode_steps == 1000
    vector = make_gymnasium(CartPole(), 3)
    assert isinstance(vector, VectorEnv) and vector.num_envs == 3
    assert vector.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert vector.single_action_space == gymnasium.spaces.Discrete(2)
    assert vector.observation_space.shape == (3, 4) and vector.action_space.shape == (3,)


@pytest.mark.quick("None")
@pytest.mark.parametrize("num_envs", [None, 3])
def test_seeds_repeat(num_envs):
    def play(env, **given):
        rows = [env.reset(**given)[0]]
        env.action_space.seed(0)
        rows += [env.step(env.action_space.sample())[0] for _ in range(3)]
        return np.array([*rows, env.reset()[0]])

    one, other = make_gymnasium(LIMITED, num_envs), make_gymnasium(LIMITED, num_envs, seed=5)
    first = play(one, seed=5)
    np.testing.assert_array_equal(first, play(one, seed=5))
    np.testing.assert_array_equal(first, play(other))  # the seed given when it was made
    assert (first != play(one)).any() and (first[0] != first[-1]).any()
    assert (
        play(make_gymnasium(LIMITED, num_envs)) != play(make_gymnasium(LIMITED, num_envs))
    ).any()


def test_one_environment_ends_and_waits_for_reset():
    env = make_gymnasium(CartPole(episode_steps=6), seed=0)
    observation, info = env.reset()
    assert observation.dtype == np.float32 and info == {}
    for t in range(6):
        observation, reward, terminated, truncated, _ = env.step(t % 2)
        assert observation in env.observation_space and reward == 1.0
        assert (terminated, truncated) == (False, t == 5)
    with pytest.raises(SeedbedError, match="call reset"):
        env.step(0)
    env.reset()
    env.step(np.int64(1))
    env.close()
    env.close()


def test_the_vector_environment_resets_in_the_step_after_an_end():
    env = RecordEpisodeStatistics(make_gymnasium(LIMITED, 8, seed=1))
    env.reset()
    ended = np.zeros(8, bool)
    totals, kept, opened = [], [], 0
    for t in range(100):
        observation, reward, terminated, truncated, info = env.step(np.full(8, t % 2))
        assert (reward == ~ended).all() and not (terminated | truncated)[ended].any()
        assert (np.abs(observation[ended]) <= 0.05).all()
        opened += ended.sum()
        ended = terminated | truncated
        kept.append((observation, observation.copy()))
        if ended.any():
            totals += list(info["episode"]["r"][ended])
    assert opened >= 40 and max(totals) == 12
    assert all((now == then).all() for now, then in kept)  # arrays are the caller's own
    env.close()
    assert env.unwrapped.closed


def test_without_auto_reset_the_caller_says_which_episodes_open():
    """Those that are not masked stay where they are; a step before the reset of an ended one is refused."""
    disabled = AutoresetMode.DISABLED
    env = make_gymnasium(LIMITED, 4, seed=1, autoreset_mode=disabled)
    assert env.metadata["autoreset_mode"] == env.autoreset_mode == disabled
    other = make_gymnasium(LIMITED, 4, seed=1)
    now, _ = env.reset()
    np.testing.assert_array_equal(other.reset()[0], now)
    opened = 0
    for t in range(60):
        now, _, terminated, truncated, _ = env.step(np.full(4, t % 2))
        if opened == 0:
            np.testing.assert_array_equal(other.step(np.full(4, t % 2))[0], now)
        ended = terminated | truncated
        if ended.any():
            with pytest.raises(SeedbedError, match=rf"reset of \[{np.flatnonzero(ended)[0]}"):
                env.step(np.zeros(4, int))
            after, _ = env.reset(options={"reset_mask": ended})
            np.testing.assert_array_equal(after[~ended], now[~ended])
            assert (np.abs(after[ended]) <= 0.05).all() and (after[ended] != now[ended]).all()
            opened += ended.sum()
    assert opened >= 12
    for mask in ([True], np.ones(4)):
        with pytest.raises(SeedbedError, match=r"reset_mask has shape .*; give bools \[4\]"):
            env.reset(options={"reset_mask": mask})
    with pytest.raises(SeedbedError, match=r"unknown options \['reset_mask'\]"):
        other.reset(options={"reset_mask": np.ones(4, bool)})
    with pytest.raises(SeedbedError, match=r"autoreset_mode is .*SAME_STEP; give"):
        make_gymnasium(LIMITED, 4, autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.mark.slow
def test_a_masked_reset_keeps_what_wrappers_carry():
    """Statistics of observations go on, as with auto-reset."""
    task = changes.normalise_observation(LIMITED)
    env = make_gymnasium(task, 4, seed=1, autoreset_mode=AutoresetMode.DISABLED)
    env.reset()
    for _ in range(40):
        now, _, terminated, truncated, _ = env.step(np.ones(4, int))
        if (terminated | truncated).any():
            now, _ = env.reset(options={"reset_mask": terminated | truncated})
    # An opening is within 0.05 of the middle; by statistics of its own alone it would be 0.
    assert (np.abs(now) < 4).all() and (np.abs(now).max(axis=1) > 0.05).all()
    mask = np.array([True, False, True, False])
    again = []
    for _ in range(2):
        again.append(env.reset(seed=3, options={"reset_mask": mask})[0])
        env.step(np.ones(4, int))
    np.testing.assert_array_equal(again[0][mask], again[1][mask])


@pytest.mark.parametrize("num_envs", [None, 2])
def test_a_reset_keeps_what_wrappers_carry_unless_it_has_a_seed(num_envs):
    env = make_gymnasium(Counts(LIMITED), num_envs)
    seen = [env.reset()[1], env.reset()[1], env.reset(seed=3)[1], env.reset()[1]]
    assert [np.max(info["opened"]) for info in seen] == [1, 2, 1, 2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MyHopper(Hopper):
    """A task of a user's, with data that its equality leaves out."""

    heights: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(2), compare=False)


def test_robots_that_are_the_same_are_compiled_once():
    """Tasks are equal whatever their model, which tells them apart here."""
    plain = HOPPER.physics_model()
    heavy = dataclasses.replace(HOPPER, model=plain.replace(body_mass=3 * plain.body_mass))
    assert heavy == HOPPER
    mine = [MyHopper(integrator="euler", heights=np.full(2, x)) for x in (0.0, 1.0)]
    tasks = (HOPPER, Hopper(integrator="euler"), heavy, Hopper(), *mine)
    first, same, *others = (Batch(task, 1, wrappers.limited)._programs for task in tasks)
    assert first is same
    assert len({id(each.env) for each in (first, *others)}) == 1 + len(others)
    # What is compiled is shared, and no state.
    assert Batch(HOPPER, 1, wrappers.limited)._state is None


@pytest.mark.slow
def test_infos_hold_the_metrics():
    _, info = make_gymnasium(HOPPER).reset(seed=0)
    assert info["reward_forward"] == 0.0 and type(info["reward_forward"]) is float
    env = make_gymnasium(wrappers.episode_statistics(CartPole()), 2)
    env.reset(seed=0)
    *_, info = env.step([0, 1])
    assert (info["episode_length"] == 1).all() and info["_episode_length"].tolist() == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "num_envs", "action", "text"),
    [
        (HOPPER, None, np.zeros(7), r"shape \(7,\) and dtype float64; expected \(3,\) and a float"),
        (HOPPER, None, np.zeros((1, 8)), r"shape \(1, 8\)"),
        (HOPPER, None, ["a"] * 3, "dtype <U1"),
        (HOPPER, None, np.full(3, np.nan), r"not finite: nan at \[0\]"),
        (Pendulum(), 2, np.array([[0.0], [np.inf]]), r"not finite: inf at \[1, 0\]"),
        (Pendulum(), 2, np.zeros(2), r"shape \(2,\) and dtype float64; expected \(2, 1\)"),
        (CartPole(), None, 2, "action 2 is outside 0 to 1"),
        (CartPole(), None, 0.0, r"dtype float64; expected \(\) and an integer"),
        (CartPole(), 2, [0, -1], r"action \[0, -1\] is outside 0 to 1"),
        (CartPole(), 2, [0, 1, 1], r"shape \(3,\) and dtype int64; expected \(2,\)"),
        (CartPole(), 2, [[0], [0, 1]], "not an array"),
    ],
)
def test_bad_actions_are_named(task, num_envs, action, text):
    env = make_gymnasium(task, num_envs)
    env.reset(seed=0)
    with pytest.raises(SeedbedError, match=text):
        env.step(action)


def test_other_misuse_is_named():
    for num_envs in (None, 2):
        with pytest.raises(SeedbedError, match="call reset"):
            make_gymnasium(CartPole(), num_envs).step(0 if num_envs is None else [0, 0])
    with pytest.raises(SeedbedError, match=r"unknown options \['low'\]"):
        make_gymnasium(CartPole()).reset(options={"low": -1})
    with pytest.raises(SeedbedError, match="num_envs is 0"):
        make_gymnasium(CartPole(), 0)
    with pytest.raises(SeedbedError, match="auto_reset in it"):
        make_gymnasium(changes.scale_reward(wrappers.training(CartPole()), 2.0))
