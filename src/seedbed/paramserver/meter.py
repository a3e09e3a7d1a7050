"""The metrics of a run of many processes, from what they report."""

from __future__ import annotations

import collections
from typing import Any

from seedbed.paramserver.cluster import Cluster
from seedbed.paramserver.keeper import Keeper


class ClusterMeter:
    """Measurements over intervals. For one thread."""

    def __init__(self, cluster: Cluster) -> None:
        """Starts the first interval."""
        self._cluster = cluster
        self._last = self._totals()

    def read(self, passed_s: float) -> dict[str, Any]:
        """Returns metrics of the run; shares and rates are of the last `passed_s` seconds."""
        last, now = self._last, self._totals()
        self._last = now
        learners = self._cluster.learners
        reports = [keeper.report for keeper in learners if keeper.report]
        seconds = {
            f"{name}_share": max(0.0, now[name] - last[name]) / passed_s / max(1, len(learners))
            for name in ("learning", "learner_waiting", "inference", "inference_blocked")
        }
        pushed = max(1.0, now["pushed"] - last["pushed"])
        return {
            **_episodes(reports),
            **_means([report["metrics"] for report in reports]),
            **seconds,
            "learner_steps_per_s": max(0.0, now["updates"] - last["updates"]) / passed_s,
            "staleness_mean": (now["lag"] - last["lag"]) / max(1.0, now["lags"] - last["lags"]),
            "staleness_max": max((int(lag) for r in reports for lag in r["lags"]), default=0),
            "discarded_share": max(0.0, now["discarded"] - last["discarded"]) / pushed,
            "pushes/applied": int(now["applied"]),
            "pushes/discarded": int(now["discarded"]),
            "pushes/rolled_back": int(now["rolled_back"]),
            "pushes/outliers": int(now["outliers"]),
            "replay/items": sum(keeper.report.get("items", 0) for keeper in self._cluster.replay),
            "replay/bytes": sum(keeper.report.get("bytes", 0) for keeper in self._cluster.replay),
            "role_restarts": sum(keeper.restarts for keeper in self._cluster.all),
            "actor_restarts": sum(report["actor_restarts"] for report in reports),
        }

    def _totals(self) -> collections.Counter[str]:
        """Returns sums over the learners, and over the shards."""
        totals: collections.Counter[str] = collections.Counter()
        for keeper in self._cluster.learners:
            _add_learner(totals, keeper)
        for keeper in self._cluster.parameters:
            for counts in keeper.report.get("books", {}).values():
                for name, count in zip(
                    ("applied", "discarded", "rolled_back"), counts, strict=True
                ):
                    totals[name] += count
                totals["pushed"] += sum(counts)
        first = self._cluster.parameters[0].report
        totals["updates"] = first.get("version", [0, 0])[1]
        return totals


def _add_learner(totals: collections.Counter[str], keeper: Keeper) -> None:
    report = keeper.report
    if not report:
        return
    totals.update(report["seconds"])
    totals["outliers"] += report["outliers"]
    for lag, count in report["lags"].items():
        totals["lag"] += int(lag) * count
        totals["lags"] += count


def _episodes(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the statistics of episodes of all learners: means of theirs, but the sum of their counts."""
    found = _means([report["episodes"] for report in reports])
    if "episodes" in found:
        found["episodes"] = sum(report["episodes"]["episodes"] for report in reports)
    return found


def _means(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the means of each figure over those who have it."""
    values: dict[str, list[float]] = collections.defaultdict(list)
    for each in figures:
        for name, value in each.items():
            if value is not None:
                values[name].append(value)
    names = {name: None for each in figures for name in each}
    return {
        name: sum(values[name]) / len(values[name]) if name in values else None for name in names
    }
