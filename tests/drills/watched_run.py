"""A Gorila run of two learners, as its folder tells how it goes."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machines import Process, wait_until


def start_of(role: Path) -> int:
    """Returns the number of the start of a role that has told its address in a folder."""
    return json.loads((role / "address.json").read_text())["number"]


class Watched:
    """A run in a folder, which the process `train` coordinates. For one thread."""

    train: Process

    def __init__(self, run: Path) -> None:
        self.run = run

    def lines(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines(True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def moves(self, seconds: float) -> None:
        """Waits until both learners step and updates are made, from one line of metrics to the next."""
        names = ("learner_steps", "cluster/steps/learner-0", "cluster/steps/learner-1")
        seen = len(self.lines())

        def grown() -> bool:
            assert self.train.code() is None, self.train.said()
            pairs = list(itertools.pairwise(self.lines()[seen:]))
            return all(
                any((now.get(name) or 0) > (was.get(name) or 0) for was, now in pairs)
                for name in names
            )

        wait_until(grown, "both learners", seconds)

    def start_of(self, role: str) -> int:
        return start_of(self.run / "roles" / role)

    def back(self, roles: list[str], lose: Callable[[], object], seconds: float) -> float:
        """Loses some roles, waits until each has begun anew and all go on; returns how long that took."""
        former, begun = {role: self.start_of(role) for role in roles}, time.monotonic()
        lose()
        anew = lambda: all(self.start_of(role) > number for role, number in former.items())  # noqa: E731
        wait_until(anew, f"{roles}", seconds)
        self.moves(seconds)
        return time.monotonic() - begun
