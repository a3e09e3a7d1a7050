"""The figures of a run with learners on other machines."""

from __future__ import annotations

import types
from typing import Any

from seedbed.paramserver.cluster import Cluster
from seedbed.paramserver.meter import ClusterMeter
from seedbed.run.options import ParamServerConfig


def keeper_of(name: str, pid: int | None, **report: Any) -> Any:
    """Returns what the figures need of a keeper."""
    return types.SimpleNamespace(
        role=types.SimpleNamespace(name=name),
        pid=pid,
        remote=pid is None,
        connected=True,
        restarts=0,
        report=report,
    )


def learner_of(name: str, pid: int | None, loss: float, actors: list[int]) -> Any:
    return keeper_of(
        name,
        pid,
        seconds={
            "learning": 1.0,
            "learner_waiting": 1.0,
            "inference": 1.0,
            "inference_blocked": 0.0,
        },
        outliers=0,
        actors_cpu_s=1.0,
        cpu_s=1.0,
        lags={"0": 3},
        metrics={"loss/total": loss},
        episodes={"episodes": 4, "return": 10 * loss},
        actor_restarts=1,
        actor_pids=actors,
        tally=[100, 0, 0],
    )


def cluster_of() -> Cluster:
    cluster = Cluster.__new__(Cluster)
    cluster.job = types.SimpleNamespace(config=ParamServerConfig(learners=2))
    cluster.parameters = [keeper_of("parameters-0", 10, version=[1, 5], cpu_s=1.0, books={})]
    cluster.replay = [keeper_of("replay-0", 11, cpu_s=1.0)]
    cluster.learners = [
        learner_of("learner-0", 12, 1.0, [20, 21]),
        learner_of("learner-1", None, 3.0, [12, 13]),
    ]
    return cluster


def test_processes_of_other_machines_are_not_measured_here():
    assert cluster_of().pids() == [10, 11, 12, 20, 21]


def test_a_learner_that_is_gone_leaves_the_means():
    cluster = cluster_of()
    meter = ClusterMeter(cluster)
    both = meter.read(1.0)
    assert both["loss/total"] == 2.0 and both["return"] == 20.0 and both["episodes"] == 8
    cluster.learners[1].connected = False
    rest = meter.read(1.0)
    assert rest["loss/total"] == 1.0 and rest["return"] == 10.0 and rest["episodes"] == 4
    assert rest["cluster/learners"] == 1 and rest["cluster/steps/learner-1"] == 100
