"""The episodes of a run with many learners, which come and go."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seedbed.files import load_json
from seedbed.run.checkpoint_helper import MANIFEST, list_steps, name_of
from seedbed.run.stopping import WINDOW

_MEANS = ("episode_return_mean", "episode_length_mean")


class Episodes:
    """The count of episodes of all learners that a run has had, and means of about the last 100.

    For one thread.
    """

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        """Goes on from a `state`; None is that of a new run."""
        state = state or {"counts": {}, "means": {}}
        self._counts: dict[str, int] = dict(state["counts"])  # by the start of a learner
        self._former: dict[str, float] = dict(
            state["means"]
        )  # of the last 100 before these learners
        self._now = self._former

    @classmethod
    def of_newest(cls, checkpoints: Path) -> Episodes:
        """Returns those of the newest checkpoint in a folder, and none if there is none."""
        state = None
        with contextlib.suppress(OSError, ValueError):
            for step in list_steps(checkpoints)[-1:]:
                state = load_json(checkpoints / name_of(step) / MANIFEST)["metadata"].get(
                    "episodes"
                )
        return cls(state)

    def take(self, reports: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Returns the statistics after the reports of the learners that are there; a mean of none is NaN.

        Each learner tells means of its last 100 episodes. Until these learners have ended so many together,
        the rest are those of before.
        """
        told = [report["episodes"] for report in reports]
        self._counts |= {
            str(report["start"]): int(report["episodes"]["episodes"]) for report in reports
        }
        counts = [each["episodes"] for each in told]
        weights = [min(WINDOW, count) for count in counts]
        total = sum(self._counts.values())
        rest = max(0, min(WINDOW - sum(weights), total - sum(counts)))
        means: dict[str, float] = {}
        for name in _MEANS:
            parts = [
                (each[name], weight) for each, weight in zip(told, weights, strict=True) if weight
            ]
            if rest and name in self._former:
                parts.append((self._former[name], rest))
            if parts:
                means[name] = sum(mean * weight for mean, weight in parts) / sum(
                    w for _, w in parts
                )
        if sum(weights) >= WINDOW:
            self._former = means
        self._now = means
        return {"episodes": total} | {name: means.get(name, math.nan) for name in _MEANS}

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, as JSON values."""
        return {"counts": dict(self._counts), "means": dict(self._now)}
