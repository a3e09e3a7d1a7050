"""Figures of a run as its display shows them: time left, bars, and rows of what belongs together."""

from __future__ import annotations

import collections
from typing import Any

from rich.table import Table
from rich.text import Text

from seedbed.viewer.text import as_count, as_duration, as_number

SHOWN_TASK = 6
"""The most metrics of the task that are shown."""
_LEAST_SPAN_S = 60.0
"""Seconds of training that an estimate of the time left needs."""


class Progress:
    """An estimate of the time left, from the speed of the last minute, or tenth of the run if that is longer.

    There is none in the first minute: programs warm up, and replay is filled faster than it is learned from.
    """

    def __init__(self, total_steps: int) -> None:
        self._total = max(1, total_steps)
        self._begun: float | None = None
        self._recent: collections.deque[tuple[float, float]] = collections.deque()

    def update(self, metrics: dict[str, Any]) -> tuple[float, str]:
        """Returns the share of the steps that is done, and the time left as people read it."""
        steps, wall = metrics.get("env_steps"), metrics.get("wall_s")
        if steps is None or wall is None:
            return 0.0, "-"
        done, recent = min(1.0, steps / self._total), self._recent
        self._begun = wall if self._begun is None else self._begun
        span = max(_LEAST_SPAN_S, 0.1 * (wall - self._begun))
        if not recent or wall - recent[-1][0] >= span / 60:
            recent.append((wall, steps))
        while len(recent) > 1 and wall - recent[1][0] >= span:
            recent.popleft()
        (since, before), left = recent[0], max(0.0, self._total - steps)
        if not left:
            return done, as_duration(0.0)
        if wall - since < _LEAST_SPAN_S or steps <= before:
            return done, "-"
        return done, as_duration(left * (wall - since) / (steps - before))


def task_metrics(metrics: dict[str, Any]) -> list[str]:
    """Returns the names of the task's own metrics that are shown."""
    names = [name for name in metrics if name.startswith("env/") and name != "env/solver_error"]
    return [name for name in names if isinstance(metrics[name], int | float)][:SHOWN_TASK]


def grid(metrics: list[tuple[str, str]]) -> Table:
    """Lays names and values out in two pairs of columns."""
    table = Table.grid(expand=True, padding=(0, 1))
    for style in ("bright_black", "", "bright_black", ""):
        table.add_column(style=style, no_wrap=True, ratio=1)
    for start in range(0, len(metrics), 2):
        table.add_row(*(cell for pair in metrics[start : start + 2] for cell in pair))
    return table


def bar(fraction: float, width: int, colour: str) -> Text:
    """Returns a bar of `width` characters, of which a share is filled."""
    filled = round(min(1.0, max(0.0, fraction)) * width)
    return Text().append("━" * filled, colour).append("─" * (width - filled), "bright_black")


def experience(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns (label, text) for the size of replay, or for the age of experience in updates.

    Returns an empty list if the metrics have neither, as in a fused run.
    """
    if "replay/items" in metrics:
        items, size = as_count(metrics["replay/items"]), metrics["replay/bytes"] / 1e6
        return [("replay", f"{items}, {size:,.0f} MB")]
    if "lag_mean" in metrics:
        oldest = as_number(metrics.get("lag_max"))
        return [("lag", f"{as_number(metrics['lag_mean'])} (max {oldest})")]
    return []


def streams(metrics: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Returns rows of figures about actors of other machines; none for a run that does not listen."""
    if "streams/hosts" not in metrics:
        return []
    p50_ms, p99_ms = (1e3 * metrics[f"streams/action_{name}_s"] for name in ("p50", "p99"))
    return [
        (
            "hosts",
            f"{as_count(metrics['streams/hosts'])}, {as_count(metrics['streams/streams'])} streams",
            "action p50, p99",
            f"{p50_ms:.0f}, {p99_ms:.0f} ms",
        ),
        (
            "reconnects",
            as_count(metrics["streams/reconnects"]),
            "refused",
            as_count(metrics["streams/refused"]),
        ),
    ]


def learners(metrics: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Returns a row of figures about learners and their gradients; none where there is one learner only."""
    if "cluster/learners" not in metrics:
        return []
    mean, largest = (metrics[f"cluster/staleness_{name}"] for name in ("mean", "max"))
    return [
        (
            "learners",
            f"{as_count(metrics['cluster/learners'])}, staleness {mean:.1f} (max {as_count(largest)})",
            "discarded",
            f"{metrics['cluster/discarded_share']:.1%}, {as_count(metrics['cluster/restarts'])} restarts",
        )
    ]
