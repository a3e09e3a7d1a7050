"""Configurations as a run's folder would give them back."""

from __future__ import annotations

from pathlib import Path

from seedbed import strict_json
from seedbed.config.configuration import TrainConfig
from seedbed.config.saved import from_json, saved_config, to_json
from seedbed.run.folder import RunFolder
from seedbed.run.trust import Trust

TRUSTED = Trust(Path("run"), Path("run/config.json"), given=True)
"""What tests write themselves."""


def read_back(config: TrainConfig) -> TrainConfig:
    """Returns a configuration as it is after a run has saved it."""
    text = strict_json.dumps(to_json(config))
    return from_json(strict_json.loads(text), TRUSTED)


def config_of(run: Path) -> TrainConfig:
    """Returns the configuration that a run's folder holds."""
    return saved_config(RunFolder.read(run))


def curve(folder, tag="env_steps"):
    """Steps of a curve as TensorBoard shows it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder)).Reload()
    tags = accumulator.Tags()["scalars"]
    return [event.step for event in accumulator.Scalars(tag)] if tag in tags else []
