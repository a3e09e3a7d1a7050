"""Processes that train as one learner: they equal one process, and go on without those that are lost."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from fused_runs import same, saved
from seedbed import cli
from seedbed.exit_status import ExitStatus, PeerLost, TemporaryError, status_of
from seedbed.launch import as_one, together
from seedbed.launch.ranks import Rank
from seedbed.run.checkpoint_helper import list_steps
from seedbed.run.member import VARIABLE, Member
from seedbed.streams.credentials import FOLDER
from seedbed.types import SeedbedError
from waiting import wait_for

WORDS = shlex.split(
    "seedbed.envs.device.classic.cartpole:CartPole --evaluate-episodes 2 --agent.unroll 8 "
    "--agent.batch 48 --agent.epochs 2 --agent.minibatches 1 --agent.hidden-sizes 8 "
    "--agent.normalise-observations --log-every-s 0.1"
)
LONG, ENDLESS = 400 * 384, 10**9


class Job:
    """The ranks of a job, on this machine."""

    def __init__(self, run: Path, ranks: int, *words: str, only: int | None = None) -> None:
        self.run, self._of = run, ranks
        options = ["--cluster", "ranks", "--run", str(run)]
        self._command = [sys.executable, "-m", "seedbed", "train", *words, *options]
        self.said, self.ranks = [], []
        for rank in range(ranks) if only is None else [only]:
            self.said.append(run.with_name(f"said-{rank}" + "-again" * (only is not None)))
            self.ranks.append(self._started(rank))

    def start(self, rank: int) -> None:
        """Starts a rank again that has ended."""
        self.ranks[rank] = self._started(rank)

    def _started(self, rank: int) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "WORLD_SIZE": str(self._of),
            "LOCAL_WORLD_SIZE": str(self._of),
            "RANK": str(rank),
        }
        with self.said[-1 if rank >= len(self.said) else rank].open("w") as said:
            # Whoever kills the tests leaves no run behind.
            return subprocess.Popen(
                self._command,
                env=environment,
                stdout=said,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),
            )

    def member(self, rank: int) -> psutil.Process:
        """Returns the process that trains for a rank, once there is one."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            children = psutil.Process(self.ranks[rank].pid).children()
            with contextlib.suppress(psutil.Error):
                found[:] = [each for each in children if VARIABLE in each.environ()]
            return bool(found)

        wait_for(is_there, self.ranks[rank])
        return found[0]

    def text(self, rank: int = 0) -> str:
        return self.said[rank].read_text()

    def await_learning(self) -> None:
        """Waits until the run has learned more than it had when this was called."""
        before = (
            len(list_steps(self.run / "checkpoints")) and list_steps(self.run / "checkpoints")[-1]
        )

        def is_further() -> bool:
            steps = list_steps(self.run / "checkpoints")
            return bool(steps) and steps[-1] > before

        wait_for(is_further, self.ranks[0], seconds=200)

    def end(self) -> list[int]:
        """Waits until all have ended; returns their exit statuses."""
        with self:
            return [rank.wait(250) for rank in self.ranks]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of one process."""
    run = tmp_path_factory.mktemp("alone") / "run"
    assert cli.main(["train", *WORDS, "--steps", str(LONG), "--run", str(run)]) == 0
    return run


def agree(run: Path, other: Path) -> None:
    """Two runs have the same experience, and learned the same to rounding."""
    (step, carry, metadata), (other_step, expected, other_metadata) = saved(run), saved(other)
    assert step == other_step
    assert metadata["transitions"] == other_metadata["transitions"]
    assert metadata["episodes"] == other_metadata["episodes"]
    same(carry, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_two_processes_equal_one_also_when_one_is_killed(alone, tmp_path):
    with Job(
        tmp_path / "run", 2, *WORDS, "--steps", str(LONG), "--checkpoint-every-s", "0.5"
    ) as job:
        job.await_learning()
        job.member(1).kill()
        assert job.end() == [0, 0], job.text()
    assert "the process of rank 1 was killed by signal 9: 2 of 2 processes go on" in job.text()
    assert "training as one learner, divided among 2 processes" in job.text()
    assert "rank 1 ended: the run has ended" in job.text(1)
    agree(tmp_path / "run", alone)


@pytest.mark.slow
def test_a_population_is_divided_among_processes(tmp_path):
    words = [*WORDS, "--steps", str(20 * 384), "--seeds", "4"]
    assert cli.main(["train", *words, "--run", str(tmp_path / "alone")]) == 0
    with Job(tmp_path / "run", 2, *words, "--checkpoint-every-s", "0.5") as job:
        assert job.end() == [0, 0], job.text()
    assert "training 4 runs, divided among 2 processes" in job.text()
    agree(tmp_path / "run", tmp_path / "alone")
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert len(last["evaluation/seeds"]) == 4


@pytest.mark.slow
def test_a_run_of_two_goes_on_with_three_and_with_one(alone, tmp_path):
    run, often = tmp_path / "run", ("--checkpoint-every-s", "0.5")
    for ranks in (2, 3):
        words = [*WORDS, "--steps", str(LONG), *often] if ranks == 2 else ["--resume"]
        with Job(run, ranks, *words) as job:
            job.await_learning()
            job.ranks[0].send_signal(signal.SIGTERM)
            assert job.end() == [ExitStatus.STOPPED] * ranks, job.text()
        assert f"training as one learner, divided among {ranks} processes" in job.text()
        assert "stopped and saved; go on with" in job.text()
    assert cli.main(["train", "--resume", "--run", str(run)]) == 0
    agree(run, alone)


@pytest.mark.slow
def test_a_machine_that_is_lost_or_told_to_leave_is_done_without(tmp_path):
    often = ("--checkpoint-every-s", "5")
    with Job(tmp_path / "run", 3, *WORDS, "--steps", str(ENDLESS), *often) as job:
        job.await_learning()
        trained = job.member(1)
        job.ranks[1].kill()
        wait_for(lambda: "rank 1 is gone: 2 of 3 processes go on" in job.text(), job.ranks[0])
        assert not trained.is_running() or trained.status() == psutil.STATUS_ZOMBIE
        job.await_learning()
        job.ranks[2].send_signal(signal.SIGTERM)
        assert job.ranks[2].wait(100) == ExitStatus.STOPPED
        wait_for(lambda: "rank 2 is gone: 1 of 3 processes" in job.text(), job.ranks[0])
        # It was waited for: what was learned was saved.
        told = re.search(r"1 of 3 processes go on as one learner from step ([\d,]+)", job.text())
        lines = (job.run / "metrics.jsonl").read_text().splitlines()
        assert told and int(told[1].replace(",", "")) >= json.loads(lines[-1])["env_steps"] > 0
        job.await_learning()
        job.ranks[0].send_signal(signal.SIGTERM)
        assert job.end() == [ExitStatus.STOPPED, -signal.SIGKILL, ExitStatus.STOPPED]


@pytest.mark.slow
def test_the_others_outlive_rank_0_for_a_minute(tmp_path):
    words = (*WORDS, "--steps", str(ENDLESS), "--checkpoint-every-s", "0.5")
    with Job(tmp_path / "run", 2, *words) as job:
        job.await_learning()
        job.member(1).kill()
        job.await_learning()
        job.ranks[0].kill()
        job.ranks[0].wait()
        # Its second start counts rounds anew.
        job.start(0)
        wait_for(
            lambda: "training as one learner, divided among 2 processes" in job.text(), job.ranks[0]
        )
        job.await_learning()
        member = job.member(1)
        with Job(tmp_path / "run", 2, *words, only=1) as other:
            assert other.ranks[0].wait(60) == ExitStatus.TRY_AGAIN
            assert "another process is rank 1 of" in other.text()
        job.ranks[0].kill()
        # Its machine may be slow: a minute without a sign is the end.
        assert job.ranks[1].wait(150) == ExitStatus.TRY_AGAIN
        assert "rank 0 has given no sign for 60 s" in job.text(1)
        assert not member.is_running() or member.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_what_is_refused_ends_all(tmp_path):
    rate = ("--agent.learning-rate", "inf")
    with Job(tmp_path / "run", 2, *WORDS, "--steps", str(ENDLESS), *rate) as job:
        assert job.end() == [ExitStatus.FAILED] * 2
    assert "learning_rate" in job.text()


RANK = Rank(1, 3, 3, 0.0, "", "")


def test_gradients_stay_on_this_machine_unless_an_interface_is_trusted(capsys):
    name, address = as_one.interface_of(RANK, None)
    assert address == "127.0.0.1"
    assert as_one.interface_of(RANK._replace(beside=1), name) == (name, address)
    with pytest.raises(
        SeedbedError, match="unencrypted: name the interface of a network that you trust"
    ):
        as_one.interface_of(RANK._replace(beside=1), None)
    with pytest.raises(
        SeedbedError, match="--trusted-interface eth9: this machine has no such interface"
    ):
        as_one.interface_of(RANK, "eth9")
    assert cli.main(["train", "ant", "--trusted-interface", "lo"]) == ExitStatus.USAGE
    assert "is for the processes of a job: name --cluster with it" in capsys.readouterr().err


def test_what_makes_a_process_a_member():
    member = Member(1, 3, 2, "127.0.0.1:4711", "lo", 17)
    assert Member.of_environment(member.environment()) == member
    assert Member.of_environment({}) is None
    with pytest.raises(SeedbedError, match=f"{VARIABLE} is 'x/y': --cluster sets it"):
        Member.of_environment({VARIABLE: "x/y"})
    assert status_of(PeerLost("")) == ExitStatus.ALONE


def test_a_batch_is_divided_among_as_many_as_divide_it():
    config = {"agent": {"batch": 96, "minibatches": 2}, "fused": {"devices": [0, 1]}}
    parts = as_one.parts_of(config)
    assert [parts.most(there) for there in (8, 7, 5, 3, 1)] == [8, 6, 4, 3, 1]
    population = {"agent": {"batch": 32}, "fused": {"seeds": 2, "sweep": "gamma=0.9,0.95,0.99"}}
    assert [as_one.parts_of(population).most(there) for there in (6, 5, 4)] == [6, 3, 3]
    # Some agents have no minibatches, and those of users no batch.
    assert as_one.parts_of({"agent": {"batch": 32}, "fused": {}}).most(3) == 2
    assert as_one.parts_of({"agent": {}, "fused": {}}).most(3) == 3


def test_a_rank_is_there_while_its_signs_move(tmp_path, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    (tmp_path / FOLDER).mkdir()
    watched = together.Watched(tmp_path, "now")
    never = -np.inf
    assert watched.moved_s(1) == never
    together.Sign("before", 5).write(tmp_path, 1)
    together.Sign("before", 6).write(tmp_path, 1)
    assert watched.moved_s(1) == never
    together.Sign("now", 1).write(tmp_path, 1)
    assert watched.moved_s(1) == watched.moved_s(1) == never, "it may be an old one"
    together.Sign("now", 2).write(tmp_path, 1)
    assert watched.moved_s(1) == 100
    now_s[0] += 20
    (tmp_path / FOLDER / "rank-1.json").write_text("[1")
    assert watched.moved_s(1) == 100
    together.Sign("now", 3).write(tmp_path, 1)
    assert watched.moved_s(1) == 120
    together.Sign("now", 4, leaves=True).write(tmp_path, 1)
    assert watched.moved_s(1) == never


def test_a_follower_whose_member_lives_does_not_ask_whether_the_leader_can_write(
    tmp_path, monkeypatch
):
    """Its disk may be full. Without a member, a leader that gives no sign is gone, unless all stood still."""

    class Signals:
        turns = 200

        def call(self, handler) -> None: ...

        def __call__(self) -> bool:
            self.turns -= 1
            return self.turns < 0

    for name, value in {"StopSignals": Signals, "_LEADER_GONE_S": 0.2, "_TICK_S": 0.01}.items():
        monkeypatch.setattr(together, name, value)
    monkeypatch.setattr(together, "_END_S", 0.0)
    rank = Rank(1, 2, 1, 1.0, "", "")
    (tmp_path / FOLDER).mkdir()
    for number in (1, 2):
        together.Sign("now", number).write(tmp_path, 0)
    for number, (member, stands_still) in enumerate(((1, 0), (0, 1), (0, 0)), 3):
        with contextlib.closing(
            together.Supervisor(rank, tmp_path, ("lo", "127.0.0.1"), print)
        ) as supervisor:
            supervisor._begin("now")
            supervisor._watched.moved_s(0)
            together.Sign("now", number).write(tmp_path, 0)
            monkeypatch.setattr(together, "_AWAY_S", 0.0 if stands_still else 5.0)
            if member:
                code = "import time; time.sleep(60)"
                supervisor._child = subprocess.Popen([sys.executable, "-c", code])
            gone = not (member or stands_still)
            with pytest.raises(TemporaryError) if gone else contextlib.nullcontext():
                supervisor.follow(lambda: "now", lambda: False)
