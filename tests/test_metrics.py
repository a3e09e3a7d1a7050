from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from saved import curve
from seedbed.actors.slots import FAILED, SUCCEEDED, UNTOLD
from seedbed.machine import usable_cores
from seedbed.run.measures import EpisodeStatistics
from seedbed.run.metrics import Counters, MachineShares, MetricsLog, processes_rss
from seedbed.types import SeedbedError, Timestep
from small_disk import on_small_disk


def read_lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_lines_and_events(tmp_path):
    log = MetricsLog(tmp_path)
    log.write(
        {
            "env_steps": np.int64(640),
            "loss": np.float32(0.5),
            "nan": math.nan,
            "inf": -math.inf,
            "zero_d": np.array(2.0),
            "none": None,
            "bottleneck": "learning",
        }
    )
    assert read_lines(tmp_path) == [  # flushed before close
        {
            "env_steps": 640,
            "loss": 0.5,
            "nan": None,
            "inf": None,
            "zero_d": 2.0,
            "none": None,
            "bottleneck": "learning",
        }
    ]
    log.close()
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    events = list(EventFileLoader(str(next(tmp_path.glob("events.*")))).Load())
    assert events[0].file_version == "brain.Event:2"
    assert events[1].step == 640
    tags = {value.tag for value in events[1].summary.value}
    assert tags == {"env_steps", "loss", "zero_d"}


def test_no_tensorflow(tmp_path):
    code = (
        "import sys, pathlib; from seedbed.run.metrics import MetricsLog;"
        "MetricsLog(pathlib.Path(sys.argv[1])).write({'a': 1});"
        "assert not {'tensorflow', 'jax'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, tmp_path], env=environment, check=True)


@pytest.mark.parametrize("torn", ['{"env_steps": 3, "x"', '{"env_steps": 3}', "\x00\x00"])
def test_a_torn_line_is_repaired(tmp_path, torn):
    (tmp_path / "metrics.jsonl").write_text('{"env_steps": 1}\n{"env_steps": 2}\n' + torn)
    log = MetricsLog(tmp_path)
    log.write({"env_steps": 4})
    log.close()
    assert [line["env_steps"] for line in read_lines(tmp_path)] == [1, 2, 4]


def test_resuming_drops_what_is_trained_again(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"env_steps": {n}}}\n' for n in range(5)))
    MetricsLog(tmp_path, resume_at=2).close()
    assert [line["env_steps"] for line in read_lines(tmp_path)] == [0, 1, 2]


def test_an_unwritable_log_is_reported(tmp_path):
    with pytest.raises(SeedbedError, match="metrics cannot be written"):
        MetricsLog(tmp_path / "missing")
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(SeedbedError, match="metrics cannot be written"):
        MetricsLog(tmp_path)


def test_resuming_drops_events_that_are_trained_again(tmp_path):
    first = MetricsLog(tmp_path)
    for step in (0, 10, 20, 30):
        first.write({"env_steps": step, "before": 1.0})
    first.close()
    (events,) = tmp_path.glob("events.*")
    with events.open("ab") as file:  # a record that a kill left half-written
        file.write(events.read_bytes()[:20])
    resumed = MetricsLog(tmp_path, resume_at=20)
    assert curve(tmp_path) == [0, 10, 20]
    assert curve(tmp_path, "before") == [0, 10, 20]
    for step in (24, 30):
        resumed.write({"env_steps": step})
    resumed.close()
    assert curve(tmp_path) == [line["env_steps"] for line in read_lines(tmp_path)]
    assert curve(tmp_path) == [0, 10, 20, 24, 30]


@on_small_disk
def test_a_full_disk_is_told_once_and_leaves_no_half_line(disk):
    disk.path.mkdir()
    told = []
    log = MetricsLog(disk.path, None, told.append)
    many = {f"{i}": float(i) for i in range(1000)}  # more than fits a page that is begun
    written = []
    for outage in range(3):
        written.append(10 * outage)
        log.write({"env_steps": written[-1], **many})
        disk.fill()
        for step in range(3):
            log.write({"env_steps": 10 * outage + step, **many})
            assert [line["env_steps"] for line in read_lines(disk.path)] == written
        assert len(told) == outage + 1
        assert f"metrics cannot be written to {disk.path}" in told[-1]
        disk.empty()
    log.close()
    assert curve(disk.path) == written


def timestep(rewards, terminated=(), truncated=(), first=()):
    n = len(rewards)

    def flags(indices):
        array = np.zeros((n,), bool)
        array[list(indices)] = True
        return array

    reward = np.array(rewards, np.float32)
    return Timestep(None, reward, flags(terminated), flags(truncated), flags(first))


def test_episode_statistics():
    statistics = EpisodeStatistics(groups=2, n=2, window=3)
    assert math.isnan(statistics.summary()["episode_return_mean"])
    statistics.record(0, timestep([0, 0], first=(0, 1)))
    statistics.record(1, timestep([0, 0], first=(0, 1)))
    statistics.record(0, timestep([1, 2]))
    statistics.record(1, timestep([10, 10]))
    statistics.record(0, timestep([1, 2], terminated=(0,), truncated=(1,)))  # returns 2 and 4
    assert statistics.summary() == {
        "episodes": 2,
        "episode_return_mean": 3.0,
        "episode_length_mean": 2.0,
    }
    statistics.record(0, timestep([0, 0], first=(0, 1)))
    statistics.record(0, timestep([-1, 0], terminated=(0,)))  # return -1 of length 1
    statistics.reset(1)  # its actor died: what it had earned belongs to no episode
    statistics.record(1, timestep([0, 0], first=(0, 1)))
    statistics.record(1, timestep([7, 0], terminated=(0,)))
    summary = statistics.summary()
    assert summary["episodes"] == 4
    assert summary["episode_return_mean"] == pytest.approx((4 - 1 + 7) / 3)  # the last three
    again = EpisodeStatistics(groups=1, n=1, window=3)
    again.load(json.loads(json.dumps(statistics.state())))
    assert again.summary() == summary


def test_successes_are_counted_where_episodes_tell_of_them():
    statistics = EpisodeStatistics(groups=1, n=3, window=3)
    ends = timestep([1, 1, 1], terminated=(0, 1, 2))
    statistics.record(0, ends)
    assert "episode_success_mean" not in statistics.summary()
    statistics.record(0, ends, np.array([UNTOLD, FAILED, SUCCEEDED], np.uint8))
    statistics.record(0, timestep([1, 1, 1]), np.full(3, SUCCEEDED, np.uint8))
    assert statistics.summary()["episode_success_mean"] == 0.5
    again = EpisodeStatistics(groups=1, n=1, window=3)
    again.load(json.loads(json.dumps(statistics.state())))
    assert again.summary() == statistics.summary()


def shares(cores=2.0, actors=2, start=None, away_share=0.0, **counters):
    machine = MachineShares(cores, actors)
    if start is not None:
        machine.start(start)
    return machine.update(Counters(**counters), away_share)


@pytest.mark.parametrize(
    ("actors_cpu", "inference_busy", "learning_busy", "bottleneck"),
    [
        (19.8, 5, 5, "environment"),  # both actors never rest
        (4, 9.9, 5, "inference"),
        (4, 5, 9.9, "learning"),  # an accelerator: little CPU, but always busy
    ],
)
def test_bottleneck_of_a_machine_with_idle_cores(
    actors_cpu, inference_busy, learning_busy, bottleneck
):
    found = shares(
        cores=16,
        wall=10,
        actors_cpu=actors_cpu,
        learner_cpu=12,
        inference_busy=inference_busy,
        learning_busy=learning_busy,
    )
    assert found["bottleneck"] == bottleneck
    assert sum(value for name, value in found.items() if name != "bottleneck") == pytest.approx(1)


@pytest.mark.parametrize(
    ("away_share", "bottleneck"), [(0.95, "environment"), (0.6, "inference"), (0.0, "inference")]
)
def test_bottleneck_where_environments_are_elsewhere(away_share, bottleneck):
    found = shares(
        cores=16,
        actors=1,
        away_share=away_share,
        wall=10,
        actors_cpu=1,  # of the ingest process
        learner_cpu=9,
        inference_busy=7,
        learning_busy=5,
    )
    assert found["bottleneck"] == bottleneck
    assert found["time/environment"] == pytest.approx(1 / 160)


def test_shares_are_of_the_interval_and_never_exceed_one():
    machine = MachineShares(2.0, 2)
    machine.update(Counters(10, 5, 5, 1, 1))
    found = machine.update(Counters(11, 6.5, 5.7, 1, 2))
    assert found["time/environment"] == pytest.approx(1.5 / 2.2)
    assert found["time/inference"] == 0.0
    assert found["time/waiting"] == pytest.approx(0.0, abs=1e-6)
    assert found["bottleneck"] == "environment"
    still = machine.update(Counters(12, 6.0, 5.7, 1, 2))  # an actor was replaced
    assert still["time/waiting"] == 1.0


def test_processes():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert processes_rss([os.getpid(), gone.pid]) == pytest.approx(
        processes_rss([os.getpid()]), 0.2
    )
    assert processes_rss([os.getpid()]) > 10
    assert processes_rss([gone.pid]) == 0.0
    assert usable_cores() > 0
