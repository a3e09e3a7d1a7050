"""A learner on another machine (`machines.py`), whose link is cut meanwhile."""

from __future__ import annotations

import json

import pytest
from machines import RUNS, Link, Machine, Process, World, missing, wait_until

from seedbed.exit_status import ExitStatus

TRAIN = (
    "train counting_environment:make_slow --agent counting_agent:CountingReplayAgent --runtime paramserver "
    "--learners 2 --hosts 1 --listen 0.0.0.0 --envs-per-actor 4 --evaluate-every 0 --log-every-s 1 "
    "--agent.capacity 100000 --agent.min-size 20 --steps 1_000_000"
)

THERE, HERE = 0, 1  # learners of the host, and of the coordinator's machine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"drills need {missing()}"),
]


def test_a_learner_on_another_machine(tmp_path):
    with World(tmp_path) as world:
        there, here = Machine(world, "shards"), Machine(world, "learner")
        link = Link(world, there, here, 1)
        link.set(delay_s=0.002)
        running: list[Process] = []
        metrics = world.runs / "run" / "metrics.jsonl"

        def last() -> dict[str, float]:
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            return json.loads(lines[-1]) if lines else {}

        def come(done) -> None:
            def seen() -> bool:
                assert all(each.code() is None for each in running), [r.said() for r in running]
                return done()

            wait_until(seen, "the metrics", 120)

        def steps_of(seat: int) -> int:
            return int(last().get(f"cluster/steps/learner-{seat}", 0))

        running.append(there.seedbed("train", *TRAIN.split(), "--run", f"{RUNS}/run"))
        running.append(here.seedbed("host", "host", f"{RUNS}/run", "--only", "learners"))
        come(lambda: last().get("cluster/learners") == 2)
        come(lambda: min(steps_of(HERE), steps_of(THERE)) > 100)
        # Without it, the other goes on; with it again, both do.
        link.set(cut=True)
        come(lambda: last()["cluster/learners"] == 1)
        before = steps_of(HERE)
        come(lambda: steps_of(HERE) > before + 200)
        link.set(delay_s=0.002)
        come(lambda: last()["cluster/learners"] == 2)
        away = steps_of(THERE)
        come(lambda: steps_of(THERE) > away + 100)
        assert last()["cluster/pushes_rolled_back"] == 0 and last()["cluster/restarts"] == 0
        train = running.pop(0)
        assert train.terminate() == ExitStatus.STOPPED, train.said()
        (host,) = running
        wait_until(lambda: host.code() is not None, "the host's end", 30)
        assert host.code() == ExitStatus.FINISHED, host.said()
