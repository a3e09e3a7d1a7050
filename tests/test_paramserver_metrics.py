"""The figures of a run with learners on other machines."""

from __future__ import annotations

import json
import math
import types
from typing import Any

from seedbed.paramserver.cluster import Cluster
from seedbed.paramserver.episodes import Episodes
from seedbed.paramserver.meter import ClusterMeter
from seedbed.run.checkpoint_helper import MANIFEST, name_of
from seedbed.run.options import ParamServerConfig
from seedbed.run.stopping import StoppingRules


def keeper_of(name: str, pid: int | None, **report: Any) -> Any:
    """Returns what the figures need of a keeper."""
    return types.SimpleNamespace(
        role=types.SimpleNamespace(name=name),
        pid=pid,
        remote=pid is None,
        connected=True,
        restarts=0,
        report={"start": 1} | report,
    )


def episodes_of(count: int, mean: float | None) -> dict[str, Any]:
    return {"episodes": count, "episode_return_mean": mean, "episode_length_mean": mean}


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
        start=int(name[-1]) + 1,  # all learners count their starts together
        outliers=0,
        actors_cpu_s=1.0,
        cpu_s=1.0,
        lags={"0": 3},
        metrics={"loss/total": loss},
        episodes=episodes_of(4, 10 * loss),
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
    meter = ClusterMeter(cluster, Episodes())
    both = meter.read(1.0)
    assert both["loss/total"] == 2.0 and both["episode_return_mean"] == 20.0
    assert both["episodes"] == 8
    cluster.learners[1].connected = False
    rest = meter.read(1.0)
    assert rest["loss/total"] == 1.0 and rest["episode_return_mean"] == 10.0
    assert rest["episodes"] == 8, "those of the other one were played"
    assert rest["cluster/learners"] == 1 and rest["cluster/steps/learner-1"] == 100


def test_what_a_process_has_counted_stays_when_the_next_one_begins():
    """The next one counts from 0, under another start; what the others do goes on counting."""
    cluster = cluster_of()
    meter = ClusterMeter(cluster, Episodes())
    for keeper, report in (
        (cluster.parameters[0], {"start": 2, "version": [2, 5], "cpu_s": 0.25}),
        (cluster.learners[0], {"start": 3, "seconds": {"learning": 0.25}, "lags": {"0": 1}}),
        (cluster.learners[1], {"seconds": {"learning": 1.5}, "lags": {"0": 5, "2": 1}}),
    ):
        keeper.report = keeper.report | report
    read = meter.read(1.0)
    assert read["cluster/load/parameters-0"] == 0.25 and read["cluster/load/replay-0"] == 0
    assert read["cluster/staleness/0"] == 3 and read["cluster/staleness/2-3"] == 1
    assert meter._last["learning"] == 1.0 + 0.25 + 1.5
    again = meter.read(1.0)
    assert again["cluster/load/parameters-0"] == 0 and "cluster/staleness/0" not in again


def told(start: int, count: int, mean: float | None) -> dict[str, Any]:
    return {"start": start, "episodes": episodes_of(count, mean)}


def test_episodes_of_learners_that_have_ended_count():
    episodes = Episodes()
    nothing = episodes.take([told(1, 0, None)])
    assert nothing["episodes"] == 0 and math.isnan(nothing["episode_return_mean"])
    full = episodes.take([told(1, 150, 20.0), told(2, 300, 40.0)])
    assert full["episodes"] == 450 and full["episode_return_mean"] == 30.0
    # The first is started again: its last 100 are others'.
    assert episodes.take([told(3, 0, None), told(2, 300, 40.0)])["episode_return_mean"] == 40.0
    both = episodes.take([told(3, 25, 80.0), told(2, 300, 40.0)])
    assert both["episodes"] == 475 and both["episode_return_mean"] == 48.0


def test_episodes_go_on_from_a_checkpoint(tmp_path):
    assert Episodes.of_newest(tmp_path).take([])["episodes"] == 0
    before = Episodes()
    before.take([told(1, 150, 20.0)])
    path = tmp_path / name_of(7) / MANIFEST
    path.parent.mkdir()
    path.write_text(json.dumps({"metadata": {"episodes": before.state()}}))
    after = Episodes.of_newest(tmp_path)
    resumed = after.take([told(4, 25, 60.0)])
    assert resumed["episodes"] == 175 and resumed["episode_return_mean"] == 30.0
    # A learner that has gone on without a coordinator tells again what it has told.
    adopted = Episodes.of_newest(tmp_path).take([told(1, 160, 21.0)])
    assert adopted["episodes"] == 160 and adopted["episode_return_mean"] == 21.0


def test_a_learner_that_is_started_again_does_not_put_off_the_end_of_a_run():
    episodes, reports = Episodes(), [told(1, 150, 20.0)]
    runtime: Any = types.SimpleNamespace(
        options=types.SimpleNamespace(until_return=10.0),
        progress=lambda: types.SimpleNamespace(env_steps=0),
        recent_episodes=lambda: episodes.take(reports),
    )
    rules = StoppingRules(runtime)
    assert rules.asks_for_evaluation()
    reports[:] = [told(2, 60, 20.0)]
    assert not rules.asks_for_evaluation()
    reports[:] = [told(2, 100, 20.0)]
    assert rules.asks_for_evaluation()
