"""On-device environments under Stable-Baselines3: a stand-in for its base class, and the package itself."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

import seedbed
from seedbed.types import SeedbedError


class VecEnv:
    """What Stable-Baselines3's own base class does in this place."""

    def __init__(self, num_envs, observation_space, action_space):
        self.num_envs = num_envs
        self.observation_space, self.action_space = observation_space, action_space
        self.get_attr("render_mode")

    def step(self, actions):
        self.step_async(actions)
        return self.step_wait()

    def _get_indices(self, indices):
        return range(self.num_envs) if indices is None else indices


@pytest.fixture
def stand_in(monkeypatch):
    package = types.ModuleType("stable_baselines3")
    package.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    module = types.ModuleType("stable_baselines3.common.vec_env")
    module.VecEnv = VecEnv  # type: ignore[attr-defined]
    for name, each in (
        ("stable_baselines3", package),
        ("stable_baselines3.common", types.ModuleType("stable_baselines3.common")),
        ("stable_baselines3.common.vec_env", module),
    ):
        monkeypatch.setitem(sys.modules, name, each)


def test_an_environment_resets_in_the_step_that_ends_its_episode(stand_in):
    env = seedbed.make_sb3("cartpole", 16, seed=3)
    ours = seedbed.make_gymnasium("cartpole", 16, seed=3)
    assert isinstance(env, VecEnv) and env.observation_space == ours.single_observation_space
    rng, observation = np.random.default_rng(0), env.reset()
    assert (np.abs(observation) <= 0.05).all()
    total, length, episodes = np.zeros(16), np.zeros(16, int), 0
    for _ in range(120):
        before = observation
        observation, reward, done, infos = env.step(rng.integers(0, 2, 16))
        total, length = total + reward, length + 1
        assert len(infos) == 16 and reward.dtype == np.float32
        for i in range(16):
            assert ("terminal_observation" in infos[i]) == done[i]
            if not done[i]:
                # The environment has gone on from where it was.
                assert abs(observation[i][0] - before[i][0]) < 0.2
                continue
            episodes += 1
            assert (np.abs(observation[i]) <= 0.05).all()
            last = infos[i]["terminal_observation"]
            assert abs(last[2]) > 0.2 and not infos[i]["TimeLimit.truncated"]
            assert infos[i]["episode"]["r"] == total[i] and infos[i]["episode"]["l"] == length[i]
            total[i] = length[i] = 0
    assert episodes > 30


@pytest.mark.slow
def test_single_numbers_are_arrays_of_one(stand_in):
    env = seedbed.make_sb3("dm/walker-walk", 4, seed=0)
    assert env.observation_space["height"].shape == (1,)
    assert env.reset()["height"].shape == (4, 1)
    seen, *_ = env.step(np.zeros((4, 6), np.float32))
    assert seen["height"].shape == (4, 1) and seen["velocity"].shape == (4, 9)


def test_a_time_limit_is_told_apart(stand_in):
    env = seedbed.make_sb3("pendulum", 2)
    env.reset()
    for _ in range(200):
        observation, _, done, infos = env.step(np.zeros((2, 1), np.float32))
    assert done.all() and all(info["TimeLimit.truncated"] for info in infos)
    assert (infos[0]["terminal_observation"] != observation[0]).any()
    assert env.get_attr("episode_steps", [1]) == [200] and env.env_is_wrapped(object) == [False] * 2


def test_what_cannot_be_is_one_line(stand_in, monkeypatch):
    for words, options, text in (
        (("pong", 2), {}, "'pong' is an environment of the host: make it with Stable"),
        (("ant", 0), {}, "num_envs is 0"),
        (("ant", 2), {"legs": 3}, "legs"),
    ):
        with pytest.raises(SeedbedError, match=text):
            seedbed.make_sb3(*words, **options)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SeedbedError, match="pip install stable-baselines3"):
        seedbed.make_sb3("ant", 2)


@pytest.mark.slow
def test_stable_baselines_trains_and_its_checker_is_content(tmp_path):
    sb3 = pytest.importorskip("stable_baselines3")
    evaluation = pytest.importorskip("stable_baselines3.common.evaluation")
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    checker.check_env(seedbed.make_gymnasium("ant"), warn=True)
    env = seedbed.make_sb3("cartpole", 16)
    model = sb3.PPO("MlpPolicy", env, n_steps=64, batch_size=256, device="cpu", seed=0)
    model.learn(40_000)
    mean, _ = evaluation.evaluate_policy(model, seedbed.make_sb3("cartpole", 4), 8)
    assert mean > 100
    summary = seedbed.train("cartpole/ppo", steps=60_000, run=tmp_path / "run")
    policy = seedbed.load(summary["run"])
    ours, _ = evaluation.evaluate_policy(policy, seedbed.make_sb3("cartpole", 4), 8)  # type: ignore[arg-type]
    assert ours > 100
