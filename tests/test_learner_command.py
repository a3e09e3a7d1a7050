"""The command `seedbed learner`: the places that learners of other machines take."""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from seedbed.actors.waiting import await_run
from seedbed.exit_status import ExitStatus, TemporaryError
from seedbed.paramserver import command, seats
from seedbed.paramserver.directory import Address, Directory, this_machine
from seedbed.types import SeedbedError

OPTIONS = {"learners": 3, "remote_learners": 2}
PLACES = range(1, 3)


@pytest.fixture
def run(tmp_path):
    """A run with one learner of its own and two of other machines."""
    (tmp_path / "config.json").write_text(json.dumps({"name": "x", "paramserver": OPTIONS}))
    (tmp_path / "roles").mkdir()
    (tmp_path / "roles" / "job.json").write_text(json.dumps({"config": OPTIONS}))
    return tmp_path


def take(run: Path, number: int | None = None, places: range = PLACES) -> seats.Seat:
    seat = seats.take_seat(run, places, number, lambda text: None, lambda: False)
    assert seat is not None
    return seat


@pytest.fixture
def impatient(monkeypatch):
    """Who takes a place does not wait for signs of life."""
    monkeypatch.setattr(seats, "GONE_S", 0.0)
    monkeypatch.setattr(seats, "BEAT_S", -1.0)


def test_learners_that_start_together_take_different_places(run, impatient):
    taken = [take(run) for _ in range(2)]
    assert [seat.number for seat in taken] == [1, 2]
    with pytest.raises(
        TemporaryError, match="all 2 places for learners of other machines are taken"
    ):
        take(run)
    taken[0].release()
    assert take(run).number == 1


def test_a_place_is_taken_while_its_learner_lives(run):
    directory = Directory(run)
    # The command was killed, and its learner goes on for a while; the other is of another machine.
    for each in (1, 2):
        directory.take_number(f"learner-{each}")
    directory.announce("learner-1", Address(1, os.getpid(), this_machine(), "name", ()))
    directory.announce("learner-2", Address(1, 1 << 22, "another", "name", ()))
    waiting: list[str] = []
    # It is told once that it waits, and waits until it is stopped.
    stop = lambda: len(waiting) > 0  # noqa: E731
    assert seats.take_seat(run, PLACES, None, waiting.append, stop) is None
    assert waiting == ["all places seem to be taken: waiting 30 s for a sign of life from each"]
    assert take(run, 2).number == 2
    with pytest.raises(SeedbedError, match="this run has places from 1 to 2"):
        take(run, 0)


def age(path: Path, seconds: float) -> None:
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


@pytest.mark.parametrize("told", [True, False])
def test_the_place_of_a_machine_that_was_shut_down_is_free(run, told):
    """As after a reboot, or on another node: `this_machine` is another then."""
    directory, folder = Directory(run), run / "roles" / "learner-1"
    directory.take_number("learner-1")
    if told:
        directory.announce("learner-1", Address(1, os.getpid(), "another", "name", ()))
    (folder / "seat.lock").write_text("another")
    seat, places = seats.Seat(run, 1), range(1, 2)
    assert not seat.is_free(directory)
    seat.release()
    for path in [folder / "seat.lock", *([folder / "address.json"] if told else [])]:
        age(path, seats.GONE_S + 1)
    if told:
        # Its learner has outlived its command.
        seats.beat(run, 1)
        seat = seats.Seat(run, 1)
        assert not seat.is_free(directory)
        seat.release()
        age(folder / "seat.lock", seats.GONE_S + 1)
    seat = take(run, places=places)
    assert seat.number == 1 and (folder / "seat.lock").read_text() == this_machine()
    # Whose place it is now gives a sign.
    age(folder / "seat.lock", seats.GONE_S + 1)
    seat.beat()
    assert (folder / "seat.lock").stat().st_mtime > (run / "roles" / "clock").stat().st_mtime - 5


def test_learners_wait_for_a_run_that_has_not_begun(tmp_path):
    said: list[str] = []
    run = tmp_path / "runs" / "new"
    job = {"config": OPTIONS}
    steps = [
        lambda: run.mkdir(parents=True),
        lambda: (run / "config.json").write_text(json.dumps({"paramserver": OPTIONS})),
        lambda: (run / "roles").mkdir() or (run / "roles" / "job.json").write_text(json.dumps(job)),
    ]

    def tell(text: str) -> None:
        said.append(text.rpartition(": ")[2])
        steps.pop(0)()

    assert await_run(run, command._missing, 30.0, tell, lambda: False)
    assert said == [
        "there is no such folder",
        "it has no config.json",
        "its coordinator has not divided it yet",
    ]
    assert command._places(run) == PLACES


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"central": {"listen": ""}}, "has --runtime central, which has one learner"),
        ({"paramserver": {"remote_learners": 0}}, "takes no learners of other machines"),
        ({"paramserver": OPTIONS}, "did not begin within 0 s .its coordinator has not divided it"),
        ({"unknown": {}}, "did not begin within 0 s .config.json cannot be read"),
    ],
)
def test_a_learner_that_cannot_join_is_told_why(tmp_path, config, text):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SeedbedError, match=text):
        await_run(tmp_path, command._missing, 0.0, lambda text: None, lambda: False)


def test_an_older_start_does_not_replace_the_address_of_a_newer_one(tmp_path):
    directory = Directory(tmp_path)
    (tmp_path / "roles" / "x").mkdir(parents=True)
    newer = Address(3, 4, "here", "name", ())
    directory.announce("x", newer)
    directory.announce("x", newer._replace(number=2, pid=5))
    assert directory.find("x") == newer
    directory.announce("x", newer._replace(number=4))
    assert directory.find("x") == newer._replace(number=4)


@pytest.fixture
def serve(run, monkeypatch):
    """The command with learners that end with these statuses, and are told of signals."""
    monkeypatch.setattr(command, "_ROOM_S", 0.0)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def call(child: Any, said: list[str]) -> str | None:
        monkeypatch.setattr(command, "start_role", lambda *_: child)
        given = argparse.Namespace(run=run, seat=None, give_up_after=5.0, trust_run=False)
        return command.serve(given, said.append)

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Child:
    """A learner that ends with some statuses, one after another."""

    def __init__(self, *statuses: int) -> None:
        self.statuses, self.told = list(statuses), list[int]()

    def wait(self, timeout: float) -> int:
        return self.statuses.pop(0)

    def send_signal(self, number: int) -> None:
        self.told.append(number)


def test_a_learner_for_which_the_disk_has_no_room_is_tried_again(serve):
    child, said = Child(*[ExitStatus.NO_ROOM] * 7, ExitStatus.FINISHED), list[str]()
    assert serve(child, said).startswith("the run has ended") and not child.statuses
    assert sum("is full: make room" in line for line in said) == 7


def test_a_learner_whose_run_nobody_coordinates_may_be_started_again_later(serve):
    with pytest.raises(TemporaryError, match="nobody has coordinated the run .* for a minute"):
        serve(Child(ExitStatus.ALONE), [])


@pytest.mark.parametrize("status", [ExitStatus.REFUSED, ExitStatus.DIVERGED])
def test_a_learner_that_cannot_work_is_not_started_again(serve, status):
    child = Child(status, ExitStatus.FINISHED)
    with pytest.raises(SeedbedError, match=f"ended with status {status}") as refused:
        serve(child, [])
    assert len(child.statuses) == 1 and not isinstance(refused.value, TemporaryError)


def test_a_second_signal_gives_a_learner_up(serve):
    class Stubborn(Child):
        def wait(self, timeout: float) -> int:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
            return -signal.SIGKILL

    child = Stubborn()
    with pytest.raises(KeyboardInterrupt, match="interrupted twice"):
        serve(child, [])
    assert child.told == [signal.SIGTERM, signal.SIGKILL]
