"""The command `seedbed learner`: the places that learners of other machines take."""

from __future__ import annotations

import argparse
import json
import os
import signal

import pytest

from seedbed.paramserver import command
from seedbed.paramserver.directory import Address, Directory, this_machine
from seedbed.paramserver.starting import FULL
from seedbed.types import SeedbedError


@pytest.fixture
def run(tmp_path):
    """A run with one learner of its own and two of other machines."""
    (tmp_path / "roles").mkdir()
    job = {"config": {"learners": 3, "remote_learners": 2}}
    (tmp_path / "roles" / "job.json").write_text(json.dumps(job))
    return tmp_path


def test_learners_that_start_together_take_different_places(run):
    seats = [command.take_seat(run, None) for _ in range(2)]
    assert [seat.number for seat in seats] == [1, 2]
    with pytest.raises(SeedbedError, match="all 2 places for learners of other machines are taken"):
        command.take_seat(run, None)
    seats[0].release()
    assert command.take_seat(run, None).number == 1


def test_a_place_is_taken_while_its_learner_lives(run):
    directory = Directory(run)
    # The command was killed, and its learner goes on for a while; the other is of another machine.
    for each in (1, 2):
        directory.take_number(f"learner-{each}")
    directory.announce("learner-1", Address(1, os.getpid(), this_machine(), "name", ()))
    directory.announce("learner-2", Address(1, 1 << 22, "another", "name", ()))
    with pytest.raises(SeedbedError, match="taken: name the one of a machine that is gone"):
        command.take_seat(run, None)
    assert command.take_seat(run, 2).number == 2
    with pytest.raises(SeedbedError, match="this run has places from 1 to 2"):
        command.take_seat(run, 0)


def test_an_older_start_does_not_replace_the_address_of_a_newer_one(tmp_path):
    directory = Directory(tmp_path)
    (tmp_path / "roles" / "x").mkdir(parents=True)
    newer = Address(3, 4, "here", "name", ())
    directory.announce("x", newer)
    directory.announce("x", newer._replace(number=2, pid=5))
    assert directory.find("x") == newer
    directory.announce("x", newer._replace(number=4))
    assert directory.find("x") == newer._replace(number=4)


def test_a_learner_for_which_the_disk_has_no_room_is_tried_again(run, monkeypatch):
    statuses = [FULL] * 7 + [0]

    class Child:
        def wait(self) -> int:
            return statuses.pop(0)

    monkeypatch.setattr(command, "start_role", lambda *_: Child())
    monkeypatch.setattr(command, "_ROOM_S", 0.0)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    said: list[str] = []
    try:
        end = command.serve(argparse.Namespace(run=run, seat=None), said.append)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert end.startswith("the run has ended") and not statuses
    assert sum("is full: make room" in line for line in said) == 7
