"""Everything that is offered: each preset, and each agent of each row of the defaults, through a run's life.

A run makes two updates with the settings that it is offered with, is stopped by a signal, is resumed for two
more, evaluated, reported, exported and loaded. Only replay begins with fewer transitions.
"""

from __future__ import annotations

import dataclasses
import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import seedbed
from kinds_of_task import KINDS, OBSERVATIONS, example
from saved import read_back, strictly
from seedbed import api, cli, trees
from seedbed.config.configuration import TrainConfig
from seedbed.config.defaults import ROWS, Task, configure
from seedbed.config.presets import PRESETS
from seedbed.config.resolve import train_config

CASES = {name: (name, None) for name in PRESETS} | {
    "-".join((*task, agent)): (task, agent)
    for task in KINDS
    for agent in next(row.agents for row in ROWS if row.takes(task))
}


def offered(what: str | Task, agent: str | None) -> TrainConfig:
    """The configuration that is offered, but for when replay begins and how often metrics are told."""
    if isinstance(what, str):
        config = train_config(what)
    else:
        config = configure(example(what), agent, "kind")
    if hasattr(config.agent, "min_size"):
        least: int = 2 * config.agent.experience.batch
        learner = dataclasses.replace(config.agent, min_size=min(least, config.agent.min_size))  # type: ignore[type-var]
        config = dataclasses.replace(config, agent=learner)
    runtime = dataclasses.replace(config.runtime, log_every_s=0.1)
    return dataclasses.replace(config, runtime=runtime)


def train_until(updates: int, config: TrainConfig, run: Path, **options: Any) -> dict[str, Any]:
    """Trains until a metric tells of so many updates, and stops then as Ctrl-C does."""
    sent = []

    def stop(metrics: dict[str, Any]) -> None:
        if metrics["learner_steps"] >= updates and not sent:
            sent.append(signal.raise_signal(signal.SIGINT))

    return seedbed.train(config, run=run, callback=stop, **options)


def observation_of(what: str | Task, forms: api.SpaceCodec) -> Any:
    """An observation in the environment's own form."""
    if isinstance(what, Task) and what.environment == "host":
        space = OBSERVATIONS[what.observation]
        space.seed(0)
        return space.sample()
    return trees.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), forms.spec.observation)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_a_run_of_everything_that_is_offered(tmp_path, capsys, case):
    config, run = offered(*CASES[case]), tmp_path / "run"
    assert read_back(config) == config

    first = train_until(2, config, run)
    assert first["interrupted"] and first["learner_steps"] >= 2
    second = train_until(first["learner_steps"] + 2, config, run, resume=True)
    assert second["interrupted"] and second["learner_steps"] >= first["learner_steps"] + 2
    # Replay has enough for two more.
    assert second["env_steps"] > first["env_steps"] or hasattr(config.agent, "min_size")
    for line in (run / "metrics.jsonl").read_text().splitlines():
        strictly(line)

    capsys.readouterr()
    assert cli.main(["evaluate", str(run), "--episodes", "1", "--json", "--trust-run"]) == 0
    played = strictly(capsys.readouterr().out)
    assert played["episodes"] == 1 and math.isfinite(played["episode_return_mean"])
    assert played["env_steps"] == second["env_steps"]

    assert cli.main(["report", str(run), "-o", str(tmp_path / "report.html")]) == 0
    assert config.name in (tmp_path / "report.html").read_text()

    policy = tmp_path / "policy"
    assert cli.main(["export", str(run), "-o", str(policy), "--trust-run"]) == 0
    contract = strictly((policy / "contract.json").read_text())
    assert contract["training"]["name"] == config.name

    forms = api.restore(run, trust=True).forms
    seen = observation_of(CASES[case][0], forms)
    action = seedbed.load(run, trust=True).act(seen)
    same = forms.decode(seedbed.load(policy).act(forms.encode(seen)))
    np.testing.assert_allclose(action, same, rtol=1e-5, atol=1e-5)
