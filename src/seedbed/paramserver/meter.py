"""The metrics of a run of many processes, from what they report."""

from __future__ import annotations

import collections
import time
from typing import Any

from seedbed.machine import usable_cores
from seedbed.paramserver.cluster import Cluster
from seedbed.paramserver.episodes import Episodes
from seedbed.run.metrics import Counters, MachineShares

_FATES = ("applied", "discarded", "rolled_back")


class ClusterMeter:
    """Measurements over intervals. For one thread."""

    def __init__(self, cluster: Cluster, episodes: Episodes) -> None:
        """Starts the first interval."""
        self._cluster, self._episodes = cluster, episodes
        # By role and start: a process that has ended stays in the sums, and the next one counts from 0.
        self._counts: dict[tuple[str, int], collections.Counter[str]] = {}
        actors = cluster.job.config.learners * cluster.job.config.actors
        self._shares = MachineShares(usable_cores(), actors)
        self._last = self._totals()
        self._shares.start(self._counters(self._last))

    def read(self, passed_s: float) -> dict[str, Any]:
        """Returns metrics of the run; shares, rates and staleness are of the last `passed_s` seconds.

        The staleness of a gradient is the number of others that a shard has applied since its parameters were
        pulled; the metrics `cluster/staleness/...` count gradients by it.
        """
        last, now = self._last, self._totals()
        self._last = now
        cluster, reports = self._cluster, reports_of(self._cluster)
        gone = now - last  # a Counter leaves out what has not grown
        pushes = sum(gone[fate] for fate in _FATES)
        return {
            **self._episodes.take(reports),
            **_means([report["metrics"] for report in reports]),
            **self._shares.update(self._counters(now)),
            "replay/items": sum(keeper.report.get("items", 0) for keeper in cluster.replay),
            "replay/bytes": sum(keeper.report.get("bytes", 0) for keeper in cluster.replay),
            "inference_blocked_share": gone["inference_blocked"] / passed_s / len(cluster.learners),
            "learner_waiting_share": gone["learner_waiting"] / passed_s / len(cluster.learners),
            "actor_restarts": sum(report["actor_restarts"] for report in reports),
            "cluster/learners": sum(keeper.connected for keeper in cluster.learners),
            "cluster/restarts": sum(keeper.restarts for keeper in cluster.all),
            "cluster/updates_per_s": gone["updates"] / passed_s,
            "cluster/bytes_per_s": gone["bytes"] / passed_s,
            "cluster/discarded_share": gone["discarded"] / max(1, pushes),
            **{f"cluster/pushes_{fate}": now[fate] for fate in _FATES},
            "cluster/pushes_not_finite": now["not_finite"],
            "cluster/outliers": now["outliers"],
            **_staleness({name: count for name, count in gone.items() if name.startswith("lag ")}),
            **{
                f"cluster/steps/{keeper.role.name}": keeper.report["tally"][0]
                for keeper in cluster.learners
                if keeper.report
            },
            **{
                f"cluster/load/{keeper.role.name}": (now[keeper.role.name] - last[keeper.role.name])
                / passed_s
                for keeper in [*cluster.parameters, *cluster.replay]
            },
        }

    def _totals(self) -> collections.Counter[str]:
        """Returns sums over all processes of the learners, and of the shards, that have reported."""
        cluster = self._cluster
        for keeper in cluster.all:
            if report := keeper.report:
                name = keeper.role.name
                self._counts[name, report["start"]] = _counted(name, report)
        totals: collections.Counter[str] = collections.Counter()
        for counts in self._counts.values():
            totals.update(counts)
        # These go on with the shard's save.
        for keeper in cluster.parameters:
            for fates in keeper.report.get("books", {}).values():
                totals.update(dict(zip(_FATES, fates, strict=True)))
        totals["updates"] = cluster.parameters[0].report.get("version", [0, 0])[1]
        return totals

    def _counters(self, totals: collections.Counter[str]) -> Counters:
        """Returns the seconds of all roles; those of shards are a part of learning."""
        return Counters(
            wall=time.monotonic(),
            actors_cpu=totals["actors_cpu"],
            learner_cpu=totals["learners_cpu"] + totals["shards_cpu"],
            inference_busy=totals["inference"],
            learning_busy=totals["learning"] + totals["shards_cpu"],
        )


def _counted(name: str, report: dict[str, Any]) -> collections.Counter[str]:
    """Returns what a process has counted since its start."""
    if "seconds" in report:
        cpu = {"actors_cpu": report["actors_cpu_s"], "learners_cpu": report["cpu_s"]}
        lags = {f"lag {lag}": count for lag, count in report["lags"].items()}
        return collections.Counter(
            report["seconds"] | cpu | lags | {"outliers": report["outliers"]}
        )
    counts = {name: report["cpu_s"], "shards_cpu": report["cpu_s"]}
    if "books" in report:  # the bytes of replay are those that it holds
        counts |= {each: report.get(each, 0) for each in ("bytes", "not_finite")}
    return collections.Counter(counts)


def _staleness(counts: dict[str, float]) -> dict[str, float]:
    """Returns the mean and the largest of counted lags, and the counts in ranges that double."""
    lags = {int(name.removeprefix("lag ")): count for name, count in counts.items()}
    ranges: collections.Counter[str] = collections.Counter()
    for lag, count in lags.items():
        low = 1 << (lag.bit_length() - 1) if lag else 0
        name = str(lag) if lag < 2 else f"{low}-{2 * low - 1}"
        ranges[f"cluster/staleness/{name}"] += int(count)
    total = sum(lags.values())
    return {
        "cluster/staleness_mean": sum(lag * count for lag, count in lags.items()) / max(1, total),
        "cluster/staleness_max": max(lags, default=0),
        **ranges,
    }


def reports_of(cluster: Cluster) -> list[dict[str, Any]]:
    """Returns the last reports of the learners that are there: others say nothing about the run now."""
    return [keeper.report for keeper in cluster.learners if keeper.connected and keeper.report]


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
