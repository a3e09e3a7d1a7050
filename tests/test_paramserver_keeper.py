"""How the coordinator keeps roles going: what it adopts, what it ends, and what it starts again."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import reporting_role
from gorila_runs import gone
from seedbed.agents.dqn import Dqn
from seedbed.envs.host.gym import GymEnv
from seedbed.exit_status import TrainingDiverged
from seedbed.paramserver import keeper as keeping
from seedbed.paramserver import launching, role, train
from seedbed.paramserver.directory import Address, Directory, this_machine
from seedbed.paramserver.hosts import Hosts
from seedbed.paramserver.job import Job
from seedbed.paramserver.keeper import Keeper
from seedbed.paramserver.launching import RoleSpec, end_all, end_starting
from seedbed.run.options import ParamServerConfig
from seedbed.streams.credentials import FOLDER as CREDENTIALS
from seedbed.streams.credentials import ensure_credentials
from seedbed.types import ArraySpec, Discrete, EnvSpec, bind
from waiting import wait_for

SPEC = EnvSpec(ArraySpec((2,), "float32"), Discrete(2))
HUNG = "replay-0 was killed, as it gave no sign for 1 s; started again"


def job_of(**options) -> Job:
    agent = bind(Dqn(hidden_sizes=(4,)), SPEC)
    return Job(GymEnv("CartPole-v1"), agent, SPEC, ParamServerConfig(**options), ())


@pytest.fixture
def sleeper():
    """Returns a function that starts a process which looks like a role that has told no address."""
    made: list[psutil.Popen] = []

    def start(run: Path, module: str = "seedbed.paramserver.shard") -> psutil.Popen:
        command = [sys.executable, "-c", "import time; time.sleep(60)", module, "--run", str(run)]
        made.append(psutil.Popen(command, stdout=subprocess.DEVNULL))
        return made[-1]

    yield start
    for process in made:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        process.wait()


def test_a_job_with_other_options_is_another(tmp_path):
    job = job_of(learners=2)
    assert not job.is_written(tmp_path)
    job.write(tmp_path)
    assert job.is_written(tmp_path) and job_of(learners=2).is_written(tmp_path)
    for other in (job_of(learners=3), job_of(steps=5), job_of(parameter_shards=1)):
        assert not other.is_written(tmp_path)
    agent = dataclasses.replace(job.agent, batch=7)
    assert not dataclasses.replace(job, agent=agent).is_written(tmp_path)


def test_all_roles_of_a_run_are_ended_and_no_others(tmp_path, sleeper: Callable[..., psutil.Popen]):
    run, other = tmp_path / "run", tmp_path / "other"
    mine = [sleeper(run) for _ in range(3)]
    others = [sleeper(other), sleeper(run, "seedbed.central.train")]
    assert end_all(run) == 3
    assert not any(process.is_running() for process in mine)
    assert all(process.is_running() for process in others)
    assert end_all(run) == 0


def test_roles_that_are_starting_are_ended_apart(tmp_path, sleeper: Callable[..., psutil.Popen]):
    told, starting, directory = sleeper(tmp_path), sleeper(tmp_path), Directory(tmp_path)
    assert directory.names() == []
    number = directory.take_number("replay-0")
    directory.announce("replay-0", Address(number, told.pid, "here", "name", ()))
    assert directory.names() == ["replay-0"]
    assert end_starting(tmp_path) == 1
    assert told.is_running() and not starting.is_running()


def test_nothing_is_taken_over_while_items_move(tmp_path, monkeypatch):
    nobody = Hosts(tmp_path, 0)
    monkeypatch.setattr(train, "is_running", lambda job, run, hosts: True)
    job = job_of()
    assert not train._may_adopt(job, tmp_path, nobody)
    job.write(tmp_path)
    assert train._may_adopt(job, tmp_path, nobody) and not train._may_adopt(
        job_of(steps=5), tmp_path, nobody
    )
    (tmp_path / "roles" / "former").mkdir()
    assert not train._may_adopt(job, tmp_path, nobody)


@pytest.fixture
def keep(tmp_path):
    """Returns a function that makes the keeper of a role, which somebody else starts without a module."""
    made: list[Keeper] = []
    ensure_credentials(tmp_path / CREDENTIALS)

    def make(module: str = "") -> Keeper:
        made.append(Keeper(tmp_path, RoleSpec("replay-0", module), 0))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Reporting(reporting_role.Reporting):
    """The work of a role that tells something with each report."""

    def __init__(self) -> None:
        self.reports = 0

    def report(self) -> dict[str, Any]:
        self.reports += 1
        return {"notices": [f"notice {self.reports}"]}


@pytest.fixture
def serve(tmp_path):
    """Returns a function that serves a role's work in a thread."""
    made: list[tuple[role.Role, threading.Thread]] = []
    ensure_credentials(tmp_path / CREDENTIALS)

    def start(work: role.Work) -> None:
        serving = role.Role(tmp_path, "replay-0", 1)
        thread = threading.Thread(target=serving.serve, args=(work, None))
        thread.start()
        made.append((serving, thread))

    yield start
    for serving, thread in made:
        serving.finish()
        thread.join()


def test_no_notice_of_a_role_is_lost_while_nobody_asks_for_them(keep, serve):
    work = Reporting()
    serve(work)
    keeper = keep()
    wait_for(lambda: work.reports >= 3)
    keeper.request(lambda keeper: keeper.fetch_report()).result(30)
    found = keeper.take_notices()
    assert len(found) >= 4
    assert found == [f"replay-0: notice {number + 1}" for number in range(len(found))]


def test_a_role_that_hangs_before_it_tells_where_it_is_is_killed(tmp_path, keep, monkeypatch):
    monkeypatch.setattr(keeping, "_START_S", 1.0)
    # The address of the process before it is still there.
    directory = Directory(tmp_path)
    number = directory.take_number("replay-0")
    directory.announce("replay-0", Address(number, 1, this_machine(), "seedbed-gone", ()))
    keeper = keep("seedbed.paramserver.replay_shard")
    wait_for(lambda: keeper.pid)
    pid = keeper.pid
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: gone(pid))
    # The notice may come after the process is gone.
    found: list[str] = []
    wait_for(lambda: found.extend(keeper.take_notices()) or found or keeper.failure)
    assert found == [HUNG]


def test_a_role_that_hangs_at_each_start_ends_the_run(tmp_path, keep, monkeypatch):
    monkeypatch.setattr(keeping, "_START_S", 1.0)
    (tmp_path / "idle.py").write_text("import time; time.sleep(60)")
    monkeypatch.syspath_prepend(str(tmp_path))
    keeper = keep("idle")
    wait_for(lambda: keeper.failure)
    last = "soon after its start; the last time it was killed, as it gave no sign for 1 s; see "
    assert str(keeper.failure).startswith(f"replay-0 died 5 times in a row {last}")
    assert keeper.take_notices() == [HUNG] * 4


FULL_DISK = """
import errno, os, pathlib, sys, time
from seedbed.paramserver.role import run_role
from seedbed.types import SeedbedError

tries = pathlib.Path(sys.argv[2]) / "tries"
number = len(tries.read_text()) if tries.exists() else 0
tries.write_text((number + 1) * "x")

def make():
    if number == 7:
        time.sleep(60)
    error = OSError(errno.ENOSPC, "No space left on device")
    if number % 2:
        raise error
    raise SeedbedError("cannot be written: mend it") from error

run_role(make)
"""


@pytest.mark.slow
def test_a_role_for_which_the_disk_has_no_room_is_tried_again(tmp_path, keep, monkeypatch):
    (tmp_path / "full_disk.py").write_text(FULL_DISK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(keeping, "_ROOM_S", 0.05)
    opened, failures = Path.open, [OSError(errno.ENOSPC, "No space left on device")] * 2

    def without_room(path: Path, *arguments, **options):
        if path.name == launching.LOG and failures:
            raise failures.pop()
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", without_room)
    keeper, tries = keep("full_disk"), tmp_path / "tries"
    wait_for(lambda: keeper.failure or (tries.exists() and len(tries.read_text()) == 8))
    assert keeper.failure is None and not failures and keeper.restarts == 0
    (notice,) = keeper.take_notices()
    assert notice.startswith("replay-0 cannot be started, as its disk is full ([Errno 28] No space")


def test_who_does_not_wait_any_more_is_given_no_answer(keep):
    """Nor does the role's thread do what was asked, or fail at it."""
    keeper, done = keep(), []
    asked = [keeper.request(lambda _: done.append(1)) for _ in range(2)]
    assert asked[0].cancel()
    keeper.kill()
    with pytest.raises(ConnectionError, match="replay-0 has ended"):
        asked[1].result(timeout=20)
    late = keeper.request(lambda _: done.append(1))
    with pytest.raises(ConnectionError, match="replay-0 has ended"):
        late.result(timeout=20)
    assert not done and keeper.failure is None


def test_a_role_that_is_killed_while_it_starts_is_not_started_again(tmp_path, keep, monkeypatch):
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    monkeypatch.syspath_prepend(str(tmp_path))
    begun, go_on, start = threading.Event(), threading.Event(), launching.start_role
    started: list[subprocess.Popen[bytes]] = []

    def start_slowly(*arguments):
        begun.set()
        go_on.wait(30)
        started.append(start(*arguments))
        return started[-1]

    monkeypatch.setattr(launching, "start_role", start_slowly)
    keeper = keep("slow")
    assert begun.wait(30)
    # There is no process yet, which must not live on when there is one.
    keeper.kill()
    go_on.set()
    keeper.close()
    assert [process.poll() for process in started] == [-signal.SIGKILL]


DIVERGED = """
from seedbed.paramserver.role import run_role
from seedbed.exit_status import TrainingDiverged

def make():
    raise TrainingDiverged("the loss is nan")

run_role(make)
"""


@pytest.mark.slow
def test_a_role_that_has_met_what_is_not_finite_is_not_started_again(tmp_path, keep, monkeypatch):
    (tmp_path / "diverged.py").write_text(DIVERGED)
    monkeypatch.syspath_prepend(str(tmp_path))
    keeper = keep("diverged")
    wait_for(lambda: keeper.failure)
    assert isinstance(keeper.failure, TrainingDiverged) and str(keeper.failure) == "the loss is nan"
    assert keeper.restarts == 0
