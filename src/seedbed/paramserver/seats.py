"""The places that learners of other machines have in a run, in its folder. It imports no JAX."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from seedbed.exit_status import TemporaryError
from seedbed.paramserver.directory import Directory, this_machine
from seedbed.run.folder import ROLES
from seedbed.types import SeedbedError

BEAT_S = 5.0
"""Seconds between two signs of life of the learner that has a place."""
GONE_S = 30.0
"""Seconds without a sign after which a place of another machine is free: it was shut down, or cut off."""
_LOCK, _CLOCK = "seat.lock", "clock"
_LOOK_S = 1.0


class Seat:
    """A learner's place in a run, which no other command of this machine takes while this process lives.

    Locks of a shared folder need not reach other machines: they see the time of the last `beat`.
    """

    def __init__(self, run: Path, number: int) -> None:
        """Locks the place if no other command has; raises SeedbedError if the disk refuses."""
        self.number = number
        self._path = run / ROLES / f"learner-{number}" / _LOCK
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._new = not self._path.exists()
            self._file = self._path.open("a+")
        except OSError as error:
            raise SeedbedError(
                f"{self._path} cannot be written ({error.strerror}): give this user the right to write there"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.locked = True
        except BlockingIOError:
            self.locked = False

    def is_free(self, directory: Directory) -> bool:
        """Returns whether neither a command nor a learner, which may outlive its command, has the place."""
        if not self.locked:
            return False
        address = directory.find(f"learner-{self.number}")
        self._file.seek(0)
        holder = self._file.read() or ("" if address is None else address.machine)
        if holder in ("", this_machine()):
            return address is None or not Path(f"/proc/{address.pid}").exists()
        beats_s = [] if self._new else [os.fstat(self._file.fileno()).st_mtime]
        with (
            contextlib.suppress(OSError),
            directory.address_path(f"learner-{self.number}").open() as file,
        ):
            beats_s.append(os.fstat(file.fileno()).st_mtime)
        return _now_s(directory.path) > max(beats_s, default=0.0) + GONE_S

    def take(self) -> None:
        """Writes whose the place is now."""
        with contextlib.suppress(OSError):
            self._file.truncate(0)
            self._file.write(this_machine())
            self._file.flush()

    def beat(self) -> None:
        """Gives a sign of life, as far as the disk takes it."""
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def release(self) -> None:
        """Lets others take the place."""
        self._file.close()


def beat(run: Path, number: int) -> None:
    """Gives a sign of life for a learner's place, if it is one of other machines."""
    with contextlib.suppress(OSError):
        os.utime(run / ROLES / f"learner-{number}" / _LOCK)


def _now_s(roles: Path) -> float:
    """Returns the time of the disk that has the run, whose clock need not be this machine's."""
    clock = roles / _CLOCK
    clock.touch()
    return clock.stat().st_mtime


def take_seat(
    run: Path,
    places: range,
    number: int | None,
    tell: Callable[[str], None],
    stop: Callable[[], bool],
) -> Seat | None:
    """Takes the place of this number, or if it is None, the first of `places` that is free.

    If all seem to be taken, it waits until each could have given a sign of life. Returns None if `stop`
    returns True first. Raises SeedbedError if there is no such place, TemporaryError if none is free.
    """
    if number is not None and number not in places:
        raise SeedbedError(
            f"seat is {number}: this run has places from {places[0]} to {places[-1]} for learners of other "
            "machines; name one of them, or leave --seat out"
        )
    if number is not None:
        seat = Seat(run, number)
        seat.take()
        return seat
    directory, until_s, told = Directory(run), time.monotonic() + GONE_S + BEAT_S, False
    while not stop():
        for each in places:
            seat = Seat(run, each)
            if seat.is_free(directory):
                seat.take()
                return seat
            seat.release()
        if time.monotonic() > until_s:
            raise TemporaryError(
                f"all {len(places)} places for learners of other machines are taken: start the run with more "
                "--remote-learners, or name the one to take over with --seat"
            )
        if not told:
            told = True
            tell(
                f"all places seem to be taken: waiting {GONE_S:.0f} s for a sign of life from each"
            )
        time.sleep(_LOOK_S)
    return None
