"""Loaded policies in people's own loops: the environment's own observations and actions."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import seedbed
from documented import ROOT, python_blocks
from saved import lines
from seedbed.config import resolve
from seedbed.envs.host.gym import FactoryEnv
from seedbed.run.callback import Listener
from seedbed.types import SeedbedError
from untrained_run import write_run


class Mixed(gymnasium.Env):
    """Every kind of space at once; an ordered dict in an order of its own."""

    observation_space = spaces.Dict(
        {
            "wide": spaces.Box(-9, 9, (2,), np.float64),
            "bits": spaces.MultiBinary(3),
            "pair": spaces.Tuple([spaces.Discrete(4, start=2), spaces.MultiDiscrete([2, 3])]),
        }
    )
    action_space = spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 1], [1, 1]])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return self.observe(), 1.0, False, False, {}

    def observe(self):
        self.observation_space.seed(int(self.np_random.integers(1000)))
        return collections.OrderedDict(reversed(self.observation_space.sample().items()))


class Shifted(gymnasium.Env):
    """Actions 5 and 6."""

    observation_space = spaces.Discrete(3)
    action_space = spaces.Discrete(2, start=5)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        assert action in (5, 6)
        return 2, 0.0, False, False, {}


class Images(Mixed):
    """Images and vectors together, shown twice, and actions with a bound on one side."""

    observation_space = spaces.Tuple(
        [spaces.Box(0, 255, (20, 24, 1), np.uint8), spaces.Box(-1, 1, (2,), np.float64)]
    )
    action_space = spaces.Box(np.array([0, -np.inf]), np.array([np.inf, 3]), dtype=np.float64)

    def observe(self):
        return self.observation_space.sample()


def config_of(name):
    config = resolve.train_config("cartpole/impala")
    if name == "Images":
        return dataclasses.replace(config, env=FactoryEnv(f"{__name__}:Images", frame_stack=2))
    if name in ("Mixed", "Shifted"):
        return dataclasses.replace(config, env=FactoryEnv(f"{__name__}:{name}"))
    return dataclasses.replace(config, env=resolve.resolve_env(name))


def make(name):
    return globals()[name]() if name in globals() else gymnasium.make(resolve.resolve_env(name).id)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CartPole-v1", "taxi", "Mixed", "Shifted", "Images"])
def test_a_policy_speaks_the_environments_language(name, tmp_path):
    policy = seedbed.load(write_run(tmp_path / "run", config_of(name)))
    env = make(name)
    observation, _ = env.reset(seed=0)
    for _ in range(5):
        action = policy.act(observation)
        assert env.action_space.contains(action), action
        observation, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            policy.reset()
            observation, _ = env.reset()
    vector = gymnasium.vector.SyncVectorEnv([lambda: make(name)] * 3)
    observations, _ = vector.reset(seed=0)
    for _ in range(2):
        actions = policy.act(observations, first=np.zeros(3, bool))
        assert vector.action_space.contains(actions), actions
        observations = vector.step(actions)[0]
    vector.close()


@pytest.mark.slow
def test_a_foreign_observation_is_refused(tmp_path):
    policy = seedbed.load(write_run(tmp_path / "run", config_of("frozenlake")))
    assert policy.act(15) in range(4)
    for wrong, text in ((16, "outside its space"), (0.5, "expected integers")):
        with pytest.raises(SeedbedError, match=text):
            policy.act(wrong)


def test_a_function_gets_the_metrics_and_may_end_the_run():
    seen, told = [], []

    def enough(line):
        seen.append(line)
        return line["env_steps"] / 1 > 5  # of a text, it fails

    listener = Listener(enough, told.append)
    for steps, ends in (("x", False), ("y", False), (1, False), (6, True)):
        assert listener.tell("on_metrics", {"env_steps": steps}) is ends
    assert [line["env_steps"] for line in seen] == ["x", "y", 1, 6]
    assert len(told) == 1 and told[0].startswith("on_metrics failed: TypeError")
    assert not listener.tell("on_checkpoint", 1, None) and not listener.tell("on_end", {})


def test_the_folder_that_a_function_goes_to_is_left_when_it_returns(tmp_path):
    """A run's path may be relative to the working directory, and its checkpoints are still to come."""
    here = Path.cwd()
    listener = Listener(lambda metrics: os.chdir(tmp_path), print)
    assert not listener.tell("on_metrics", {}) and Path.cwd() == here


class Told(seedbed.Callback):
    """Notes what it is told; asks to end the run, or raises, in one of the methods."""

    def __init__(self, ends: str = "", fails: str = "") -> None:
        self.calls: list[tuple[str, Any]] = []
        self._ends, self._fails = ends, fails

    def _note(self, method: str, what: Any) -> bool:
        self.calls.append((method, what))
        if method == self._fails:
            raise ValueError("no")
        return method == self._ends

    def on_start(self, run):
        assert run.is_dir()
        return self._note("on_start", run)

    def on_metrics(self, metrics):
        return self._note("on_metrics", metrics)

    def on_checkpoint(self, step, folder):
        assert any(folder.iterdir())
        return self._note("on_checkpoint", step)

    def on_evaluation(self, step, metrics):
        assert metrics["episodes"] == 2
        return self._note("on_evaluation", step)

    def on_end(self, summary):
        return self._note("on_end", summary)


def follow(run: Path, callback: Told) -> dict[str, Any]:
    return seedbed.train(
        "cartpole/ppo",
        run=run,
        callback=callback,
        steps=60_000,
        log_every_s=0.1,
        checkpoint_every_s=0.2,
        evaluate_every=10_000,
        evaluate_episodes=2,
    )


def test_a_callback_is_told_of_everything(tmp_path, capsys):
    told = Told(fails="on_evaluation")
    summary = follow(tmp_path / "run", told)
    methods = [method for method, _ in told.calls]
    assert methods[0] == "on_start" and methods[-1] == "on_end"
    assert {"on_metrics", "on_checkpoint", "on_evaluation"} <= set(methods[1:-1])
    assert told.calls[-1][1] == summary
    assert lines(tmp_path / "run") == [
        what for method, what in told.calls if method == "on_metrics"
    ]
    steps = [step for method, step in told.calls if method == "on_checkpoint"]
    assert steps == sorted(set(steps)) and steps[-1] == summary["env_steps"]
    said = capsys.readouterr().out
    assert said.count("on_evaluation failed: ValueError: no (test_api.py, line") == 1
    assert "training goes on" in said
    judged = [step for method, step in told.calls if method == "on_evaluation"]
    assert len(judged) == len(set(judged))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["on_start", "on_metrics", "on_checkpoint", "on_evaluation"])
def test_each_method_of_a_callback_may_end_the_run(method, tmp_path):
    told = Told(ends=method)
    summary = follow(tmp_path / "run", told)
    assert summary["env_steps"] < 60_000 and not summary["interrupted"]
    assert told.calls[-1][0] == "on_end"
    assert saved_reason(tmp_path / "run") == f"{method} asked to end the run"


def test_a_callback_that_nothing_would_call_is_refused(tmp_path):
    class Typo(seedbed.Callback):
        def on_evaluations(self, step, metrics):
            return True

    for wrong, text in (
        (Told, r"callback is the class Told: give an object, Told\(\)"),
        (Typo(), "a method on_evaluations, which is not called; did you mean on_evaluation?"),
    ):
        with pytest.raises(SeedbedError, match=text):
            seedbed.train("cartpole/ppo", run=tmp_path / "run", callback=wrong)
    assert not (tmp_path / "run").exists()


def saved_reason(run: Path) -> str:
    return json.loads((run / "history.json").read_text())[-1]["reason"]


def test_what_the_page_on_metrics_elsewhere_shows(monkeypatch):
    """Its blocks, with stand-ins for training and for the three clients."""
    first = {"env_steps": 10, "episode_return_mean": None, "bottleneck": "learning"}
    last = {"env_steps": 20, "episode_return_mean": 1.5, "bottleneck": "learning"}
    clients = {name: mock.MagicMock() for name in ("wandb", "trackio", "mlflow")}

    def train(name, callback):
        assert name == "ant"
        for line in (first, last):
            callback(line)

    for name, client in clients.items():
        monkeypatch.setitem(sys.modules, name, client)
    monkeypatch.setattr(seedbed, "train", train)
    for block in python_blocks(ROOT / "docs" / "tracking.md"):
        exec(block.code, {"seedbed": seedbed})
    whole = [mock.call(first, step=10), mock.call(last, step=20)]
    assert clients["wandb"].init.return_value.__enter__.return_value.log.mock_calls == whole
    assert clients["trackio"].log.mock_calls == whole
    assert clients["trackio"].finish.called
    assert clients["mlflow"].log_metrics.mock_calls == [
        mock.call({"env_steps": 10}, step=10),
        mock.call({"env_steps": 20, "episode_return_mean": 1.5}, step=20),
    ]
