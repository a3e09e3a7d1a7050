"""A curriculum: Ant learns to run, and goes on with a torso of one and a half times the weight.

Run it with `python examples/curriculum.py`; it takes two minutes on two cores.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import seedbed
from seedbed.config.configuration import TrainConfig
from seedbed.config.resolve import train_config
from seedbed.envs.device.randomisation import Scale, randomise


def stage(factor: float, **options: float) -> TrainConfig:
    """Returns the configuration of Ant's preset with a torso `factor` times as heavy, and runtime options."""
    usual = train_config("ant/ppo")
    heavier = randomise(usual.env, Scale("body_mass", factor, factor, of="torso"))  # type: ignore[arg-type]
    return dataclasses.replace(
        usual, env=heavier, runtime=dataclasses.replace(usual.runtime, **options)
    )


def main(folder: Path, **options: float) -> None:
    """Trains the stages into folders below `folder`, each from the weights of the one before."""
    trained: Path | None = None
    for factor in (1.0, 1.5):
        run = folder / f"torso-{factor}"
        seedbed.train(stage(factor, **options), run=run, start=trained)
        trained = run


if __name__ == "__main__":
    main(Path("runs/curriculum"), until_return=4000.0)
