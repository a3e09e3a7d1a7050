"""Reads files of metrics, which anybody may have written, in bounded memory and without waiting."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from seedbed import strict_json
from seedbed.files import open_regular
from seedbed.run.folder import METRICS

LARGEST = 1e100
"""The largest number that is read: sums and quotients of such numbers are finite, too."""
MEMBERS = "evaluation/seeds"
"""The metric that is a list: the mean return of each member of a population."""
MOST_LINES, MOST_BYTES = 20_000, 16_000_000
"""From more lines or bytes than these, `read_lines` leaves out every other line, again and again."""
_LINE_BYTES = 1 << 20  # longer ones are not read
_EVALUATED = "evaluation/env_steps"


def whole_lines(file: BinaryIO) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields the lines of a file that are whole, each with its metrics as `numbers_of` returns them."""
    while line := file.readline(_LINE_BYTES):
        if not line.endswith(b"\n"):
            if len(line) < _LINE_BYTES:
                return
            while (rest := file.readline(_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            continue
        try:
            metrics = strict_json.loads(line)
        except ValueError:
            continue
        if isinstance(metrics, dict):
            yield line, numbers_of(metrics)


def numbers_of(metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns the metrics that are finite numbers, and the list of `MEMBERS`; its unknown ones are None."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if is_number(value):
            found[sys.intern(name)] = value
    members = metrics.get(MEMBERS)
    if isinstance(members, list):
        found[MEMBERS] = [value if is_number(value) else None for value in members]
    return found


def is_number(value: Any) -> bool:
    """Returns whether a value is a number, finite and not beyond `LARGEST`."""
    return type(value) in (int, float) and -LARGEST < value < LARGEST


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the whole lines of a file of metrics, which may be missing or be written at this moment.

    Where steps go back, a run went on from an earlier checkpoint: the lines past its steps are left out, as
    the run has done these steps again. Of a long file, only some lines are returned: the first, the last,
    those with a new evaluation, and others evenly.
    """
    kept = _Thinned()
    try:
        with open_regular(path) as file:
            for line, metrics in whole_lines(file):
                kept.add(metrics, len(line))
    except OSError:
        return []
    return kept.lines


class _Thinned:
    """Lines of metrics, of which every other is left out, again and again, if they are many.

    The last one stays, and so do those with a new evaluation, unless nearly all lines have one. For one
    thread.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[int, int, dict[str, Any]]] = []  # number, bytes, metrics
        self._count, self._every, self._bytes = 0, 1, 0
        self._with_evaluations = True

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The metrics of the lines that are kept."""
        return [line for _, _, line in self._kept]

    def add(self, line: dict[str, Any], size: int) -> None:
        """Adds a line of so many bytes, and removes those that the run has done again."""
        env_steps = line.get("env_steps", 0)
        while self._kept and self._kept[-1][2].get("env_steps", 0) > env_steps:
            self._pop()
        # The last line was kept as the last one only.
        if self._kept and not self._stays(len(self._kept) - 1):
            self._pop()
        self._kept.append((self._count, size, line))
        self._count += 1
        self._bytes += size
        while len(self._kept) > 2 * MOST_LINES or (self._bytes > 2 * MOST_BYTES and self._kept[1:]):
            self._thin()

    def _pop(self) -> None:
        self._bytes -= self._kept.pop()[1]

    def _stays(self, at: int) -> bool:
        number, _, line = self._kept[at]
        before = self._kept[at - 1][2].get(_EVALUATED) if at else None
        return number % self._every == 0 or (
            self._with_evaluations and line.get(_EVALUATED) != before
        )

    def _thin(self) -> None:
        self._every *= 2
        chosen = [at for at in range(len(self._kept) - 1) if self._stays(at)]
        if len(chosen) > 0.75 * len(self._kept):
            self._with_evaluations = False
            chosen = [at for at in chosen if self._stays(at)]
        self._kept = [*(self._kept[at] for at in chosen), self._kept[-1]]
        self._bytes = sum(size for _, size, _ in self._kept)


def read_last_line(path: Path) -> dict[str, Any]:
    """Returns the last whole line of a file of metrics, without reading all of it; empty if there is none."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, io.SEEK_END) - _LINE_BYTES))
            tail = io.BytesIO(file.read(_LINE_BYTES))
    except OSError:
        return {}
    for line in reversed(tail.readlines()):
        for _, metrics in whole_lines(io.BytesIO(line)):
            return metrics
    return {}


def last_wall_s(folder: Path) -> float:
    """Returns the seconds of training at the last whole line of a run's metrics; 0 if there is none."""
    return float(read_last_line(folder / METRICS).get("wall_s", 0.0))
