"""The counting agent, which also records what it learns from."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
from jax.experimental import io_callback
from recording import UNROLLS, Unroll, write_unrolls

from counting_agent import CountingAgent

_RECORDS = Path(os.environ.get("SEEDBED_DRILL_RECORDS", "/srv"))
_FILE = f"{os.urandom(4).hex()}"


def _record(*leaves: np.ndarray) -> None:
    folder = _RECORDS / UNROLLS
    folder.mkdir(exist_ok=True)
    write_unrolls(folder / _FILE, Unroll(*leaves))


@dataclasses.dataclass(frozen=True)
class RecordingAgent(CountingAgent):
    """Records every batch before it learns from it."""

    def prepare(self, state, trajectory, key):
        """Records a batch."""
        steps = trajectory.timesteps
        io_callback(
            _record,
            None,
            steps.observation,
            steps.reward,
            steps.first,
            steps.terminated | steps.truncated,
            trajectory.action,
            trajectory.extras["count"],
            ordered=True,
        )
        return super().prepare(state, trajectory, key)
