"""Rules that end a run before its steps: each saves, evaluates and says why."""

from __future__ import annotations

import math
import types
from pathlib import Path
from typing import Any

import pytest

import seedbed
from seedbed.cli import main
from seedbed.run.history import read_history
from seedbed.run.options import CentralConfig, FusedConfig
from seedbed.run.runtime import Progress, Score
from seedbed.run.stopping import StoppingRules
from seedbed.types import SeedbedError


class Counts:
    """A runtime that has the counts that a test gives it."""

    def __init__(self, **options: Any) -> None:
        usual = {"until_return": math.inf, "until_stale": 0, "max_minutes": math.inf}
        self.options = types.SimpleNamespace(**usual | options)
        self.env_steps, self.episodes, self.mean = 0, 0, math.nan

    def progress(self) -> Progress:
        return Progress(self.env_steps, 0, self.env_steps)

    def recent_episodes(self) -> dict[str, float]:
        return {"episodes": self.episodes, "episode_return_mean": self.mean}


def score(mean: float) -> Score:
    return Score(mean, "", {"episode_return_mean": mean}, {})


def test_a_return_must_be_reached_by_100_episodes_and_by_an_evaluation() -> None:
    runtime: Any = Counts(until_return=10.0)
    rules = StoppingRules(runtime)
    runtime.episodes, runtime.mean = 99, 11.0
    assert not rules.asks_for_evaluation()
    runtime.episodes, runtime.mean = 120, 9.0
    assert not rules.asks_for_evaluation()
    # A good evaluation that nobody has asked for says nothing about the mean.
    rules.take_score(1, score(12.0))
    assert not rules.reason(0.0)
    runtime.mean = 10.0
    assert rules.asks_for_evaluation()
    rules.take_score(2, score(9.9))
    assert not rules.reason(0.0) and not rules.asks_for_evaluation(), "the same episodes ask once"
    runtime.episodes = 220
    assert rules.asks_for_evaluation() and not rules.confirmed
    rules.take_score(3, None)
    rules.take_score(3, score(11.0))
    assert not rules.confirmed, "the evaluation that was asked for has failed"
    runtime.episodes = 320
    assert rules.asks_for_evaluation()
    rules.take_score(3, score(10.0))
    assert rules.confirmed
    assert rules.reason(0.0) == "the return of 10 is reached: 10.00 in an evaluation"


def test_what_does_not_get_better_is_stale() -> None:
    rules = StoppingRules(Counts(until_stale=100))  # type: ignore[arg-type]
    for at, value in ((500, 1.0), (550, 0.5), (590, 2.0), (680, 2.0), (689, None)):
        rules.take_score(at, None if value is None else score(value))
        assert not rules.reason(0.0)
    rules.take_score(690, score(1.9))
    assert rules.reason(0.0) == "no evaluation in 100 steps was better than 2.00 at 590 steps"


def test_minutes_and_wishes() -> None:
    rules = StoppingRules(Counts(max_minutes=1.5))  # type: ignore[arg-type]
    assert not rules.reason(89.9)
    assert rules.reason(90.0) == "1.5 minutes of training are over"
    rules.ask("on_metrics")
    assert rules.reason(0.0) == "on_metrics asked to end the run"


def ended(run: Path) -> tuple[str, str]:
    """Returns how a run's last stint ended, and why."""
    stint = read_history(run)[-1]
    return stint["outcome"], stint.get("reason", "")


@pytest.mark.slow
def test_a_run_ends_when_an_evaluation_confirms_its_return(tmp_path: Path) -> None:
    summary = seedbed.train("cartpole/ppo", run=tmp_path / "run", until_return=60.0)
    assert summary["env_steps"] < 500_000 and not summary["interrupted"]
    assert summary["evaluation/episode_return_mean"] >= 60
    outcome, reason = ended(tmp_path / "run")
    assert outcome == "finished" and reason.startswith("the return of 60 is reached")
    assert seedbed.load(tmp_path / "run") is not None
    # It can go on, with another rule or without one.
    more = summary["env_steps"] + 20_000
    options: Any = {"run": tmp_path / "run", "resume": True, "steps": more}
    again = seedbed.train("cartpole/ppo", until_return=math.inf, **options)
    assert again["env_steps"] >= more and ended(tmp_path / "run") == ("finished", "")


@pytest.mark.slow
def test_time_that_is_over_ends_a_run_at_once(tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    assert main(["train", "cartpole/ppo", "--max-minutes", "0", "--run", str(run)]) == 0
    assert "ending: 0 minutes of training are over" in capsys.readouterr().out
    assert ended(run) == ("finished", "0 minutes of training are over")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nan": ({"until_return": math.nan}, "until_return is nan: give a number, or leave it out"),
    "text": ({"until_return": "many"}, "until_return is 'many', a str: give"),
    "evaluations that are too far apart": (
        {"until_stale": 500_000, "evaluate_every": 1_000_000},
        "until_stale is 500000 and evaluate_every 1000000: evaluations tell what is stale",
    ),
    "negative minutes": ({"max_minutes": -1.0}, "max_minutes is -1"),
    "negative staleness": ({"until_stale": -1}, "until_stale is -1"),
    "nothing to be stale": (
        {"until_stale": 5, "evaluate_every": 0},
        "until_stale is 5 and evaluate_every 0: evaluations tell what is stale",
    ),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("kind", [CentralConfig, FusedConfig])
def test_rules_that_cannot_be_are_refused(case: str, kind: Any) -> None:
    options, message = WRONG[case]
    with pytest.raises(SeedbedError, match=message):
        kind(**options)
