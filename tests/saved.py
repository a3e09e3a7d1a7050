"""Configurations as a run's folder would give them back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import mujoco
import numpy as np

from seedbed import strict_json
from seedbed.config.configuration import TrainConfig
from seedbed.config.saved import from_json, saved_config, to_json
from seedbed.run.folder import RunFolder
from seedbed.run.trust import Trust
from seedbed.viewer.recording import Episode, Recording

TRUSTED = Trust(Path("run"), Path("run/config.json"), given=True)
"""What tests write themselves."""


def read_back(config: TrainConfig) -> TrainConfig:
    """Returns a configuration as it is after a run has saved it, in what any reader takes for JSON."""
    return from_json(strictly(strict_json.dumps(to_json(config))), TRUSTED)


def config_of(run: Path) -> TrainConfig:
    """Returns the configuration that a run's folder holds."""
    return saved_config(RunFolder.read(run))


def curve(folder, tag="env_steps"):
    """Steps of a curve as TensorBoard shows it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder)).Reload()
    tags = accumulator.Tags()["scalars"]
    return [event.step for event in accumulator.Scalars(tag)] if tag in tags else []


ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"


def roll(name: str, steps: int, episodes: int = 1, title: str = "") -> Recording:
    """Rolls a model of Gymnasium's with random controls."""
    model = mujoco.MjModel.from_xml_path(str(ASSETS / f"{name}.xml"))
    rng, recorded = np.random.default_rng(0), []
    for _ in range(episodes):
        data = mujoco.MjData(model)
        qpos = [data.qpos.copy()]
        for _ in range(steps):
            data.ctrl[:] = rng.uniform(-0.4, 0.4, model.nu)
            mujoco.mj_step(model, data, 3)
            qpos.append(data.qpos.copy())
        reward = rng.normal(1.0, 0.5, steps)
        recorded.append(Episode(np.array(qpos), reward, 3 * model.opt.timestep))
    return Recording(model, tuple(recorded), title or name)


def strictly(text: str | bytes) -> Any:
    """Reads JSON without the numbers that JSON lacks."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def lines(folder: Path) -> list[dict[str, Any]]:
    """Reads the metrics of a run, but for a line that is being written."""
    path = folder / "metrics.jsonl"
    found = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in found if line.endswith("\n")]
