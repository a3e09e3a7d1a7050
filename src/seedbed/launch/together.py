"""The processes of a job that train as one learner: who takes part, and what happens when one is lost.

Each rank is a supervisor without JAX, whose child is a member of the group (`run/group.py`): the same command
with a variable more. Rank 0's supervisor says who takes part in a round, in a file of the run's folder. When
a member is gone, all members end; a round of those whose supervisors are left begins, and goes on from the
last checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TextIO

from seedbed import strict_json
from seedbed.actors.waiting import StopSignals
from seedbed.exit_status import ExitStatus, StoppedEarly, TemporaryError
from seedbed.files import load_json, write_json
from seedbed.launch.as_one import Parts
from seedbed.launch.ranks import Rank, cores_of
from seedbed.machine import CORES, usable_cores
from seedbed.printable import printable
from seedbed.run.checkpoint_helper import list_steps
from seedbed.run.folder import CHECKPOINTS
from seedbed.run.member import Member
from seedbed.streams.addresses import bind_listener, joined_address
from seedbed.streams.credentials import FOLDER
from seedbed.streams.supervisor import start_module
from seedbed.types import SeedbedError

_ROUND = "round.json"
_TICK_S = 0.25
SETTLE_S = 120.0
"""Seconds within which the ranks of a job are all there, where one launcher starts all."""
_PATIENCE_S = 30.0  # for the ranks of a job, before it is told which are not there
_SIGN_S = 1.0
# Seconds without a sign after which another rank is gone, and after which rank 0 is: its machine may be slow.
_GONE_S, _LEADER_GONE_S = 15.0, 60.0
_AWAY_S = 5.0  # between two looks, after which this process was not running
# Seconds for which the others wait for rank 0 to begin.
_BEGIN_S = 300.0
# Seconds for a member to end after a signal. Schedulers kill after 30.
_END_S = 25.0
_MOST_EARLY = 5
# Statuses of a leading member after which another round may do better.
_LOST = (ExitStatus.ALONE, -signal.SIGKILL, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)


class Round(NamedTuple):
    """The round that is now: which ranks take part, and where they meet. Rank 0 writes it."""

    token: str  # of rank 0's start
    number: int  # from 1 on
    ranks: tuple[int, ...]  # that take part, in the order of their members
    address: str  # where they meet

    @classmethod
    def read(cls, run: Path) -> Round | None:
        """Returns it, None if there is none."""
        try:
            found = cls(**load_json(run / FOLDER / _ROUND))
            return found._replace(ranks=tuple(found.ranks))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, run: Path) -> None:
        """Writes it into a folder that exists."""
        write_json(run / FOLDER / _ROUND, self._asdict())


class Sign(NamedTuple):
    """A sign of life of a rank's supervisor, which it renews every second."""

    token: str  # of the start of rank 0 that it follows
    number: int  # how often it has said so
    leaves: bool = False  # whether it was told to end
    died: int = 0  # the signal that has killed its last member, 0 if none has

    @classmethod
    def read(cls, run: Path, rank: int) -> Sign | None:
        """Returns that of a rank, None if there is none."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return cls(**load_json(run / FOLDER / f"rank-{rank}.json"))
        return None

    def write(self, run: Path, rank: int) -> None:
        """Writes it, and does not wait for the disk; a folder that cannot be written now may be later."""
        path = run / FOLDER / f"rank-{rank}.json"
        with contextlib.suppress(OSError):
            temporary = path.with_suffix(".new")
            temporary.write_text(strict_json.dumps(self._asdict()))
            temporary.replace(path)


class Watched:
    """The other ranks, as their signs tell: one is there while its sign moves, which may be an old one."""

    def __init__(self, run: Path, token: str) -> None:
        self._run, self._token = run, token
        self._signs: dict[int, Sign] = {}
        self._moved_s: dict[int, float] = {}

    def moved_s(self, rank: int) -> float:
        """Returns when a rank's sign was last seen to move; minus infinity if never, or if it leaves."""
        sign, before = Sign.read(self._run, rank), self._signs.get(rank)
        if sign is not None and sign.token == self._token and sign != before:
            self._signs[rank] = sign
            if before is not None:
                self._moved_s[rank] = time.monotonic()
        leaves = rank in self._signs and self._signs[rank].leaves
        return -math.inf if leaves else self._moved_s.get(rank, -math.inf)


class Supervisor:
    """A rank's supervisor: it starts this command again as a member, and gives signs. For the main thread."""

    def __init__(
        self, rank: Rank, run: Path, interface: tuple[str, str], tell: Callable[[str], None]
    ) -> None:
        """Handles signals from now on: passes the first one on.

        `interface` is a result of `as_one.interface_of`.
        """
        self._rank, self._run, self._tell = rank, run, tell
        self._interface, self._address = interface
        self._signed_s = -math.inf
        self._lock = only(run, rank.number) if rank.number else None  # rank 0 has its own already
        self._begin("")
        self._child: subprocess.Popen[bytes] | None = None
        self._looked_s = math.inf
        self.stop = StopSignals()
        self.stop.call(self._pass_on)

    def _begin(self, token: str) -> None:
        """Begins to give signs, and to watch those of others, for a start of rank 0."""
        self._sign, self._watched = Sign(token, 0), Watched(self._run, token)
        self._since_s = time.monotonic()

    def lead(self, token: str, parts: Parts, settle_s: float) -> int:
        """Leads the ranks until the run has ended; returns the exit status of the member that leads.

        `token` is of this start of rank 0, which waits `settle_s` for the others. Raises StoppedEarly after a
        signal that the member has not obeyed itself, and SeedbedError if rounds bring no checkpoint.
        """
        self._begin(token)
        self._gather(time.monotonic() + settle_s)
        number, early, step = 0, 0, step_of(self._run)
        while not self.stop():
            number += 1
            ranks = [0, *self._present()]
            taken = ranks if len(ranks) == self._rank.of else ranks[: parts.most(len(ranks))]
            self._tell_who(taken, ranks, number)
            with bind_listener(self._address, 0, 0) as free:
                address = joined_address(self._address, free.getsockname()[1])
            Round(token, number, tuple(taken), address).write(self._run)
            self._start(0, len(taken), address)
            self._wait(self._ended, math.inf)
            status = self._status()
            if status not in _LOST:
                # A signal came before the member could obey it.
                if self.stop() and status < 0:
                    break
                return status if status >= 0 else ExitStatus.GIVEN_UP
            before, step = step, step_of(self._run)
            early = 0 if step > before else early + 1
            if early == _MOST_EARLY:
                raise SeedbedError(
                    f"{early} starts in a row have brought no checkpoint: what they said last is above"
                )
            self._await_signs(taken[1:])
        raise StoppedEarly

    def _gather(self, until_s: float) -> None:
        """Waits until all ranks are there, and says now and then which are not."""

        def all_there() -> bool:
            return self.stop() or len(self._present()) == self._rank.of - 1

        while not all_there() and time.monotonic() < until_s:
            self._wait(all_there, min(_PATIENCE_S, until_s - time.monotonic()))
            missing = {*range(1, self._rank.of)} - {*self._present()}
            if missing and not self.stop():
                names = ", ".join(map(str, sorted(missing)))
                self._tell(f"waiting for rank{'s' * (len(missing) > 1)} {names} of {self._rank.of}")

    def follow(self, token: Callable[[], str], ended: Callable[[], bool]) -> None:
        """Takes part in rank 0's rounds until a signal comes, or `ended` says that the job has.

        `token` tells that of rank 0's start, "" if it has not begun or has ended. Raises TemporaryError if
        rank 0 is gone.
        """
        mine = 0
        while not (self.stop() or ended()):
            if (current := token()) not in ("", self._sign.token):
                self._end(signal.SIGKILL)
                self._begin(current)
                mine = 0
            leader_s = self._watched.moved_s(0)
            now = Round.read(self._run) if leader_s > -math.inf else None
            if now is not None and now.token == self._sign.token and now.number > mine:
                self._end(signal.SIGKILL)
                mine = now.number
                if self._rank.number in now.ranks:
                    self._sign = self._sign._replace(died=0)
                    self._start(now.ranks.index(self._rank.number), len(now.ranks), now.address)
            if self._child is not None and self._ended():
                self._sign = self._sign._replace(died=max(0, -self._status()))
                self._child, self._since_s = None, time.monotonic()
            # A member ends by itself if the leader's is gone; else the leader cannot write, perhaps.
            if self._child is None:
                self._require_leader(leader_s)
            self._looked_s = time.monotonic()
            self._wait(self.stop, _TICK_S)
        self._sign, self._signed_s = self._sign._replace(leaves=True), -math.inf
        # The leader saves before this one leaves.
        self._wait(self._ended, _END_S)
        self._end(signal.SIGKILL)

    def _require_leader(self, moved_s: float) -> None:
        """Raises TemporaryError if rank 0 has not come, or is gone. Call while there is no member."""
        now_s = time.monotonic()
        if now_s - self._looked_s > _AWAY_S:
            self._since_s = now_s  # this machine stood still, and so may all others have
        limit_s = _BEGIN_S if moved_s == -math.inf else _LEADER_GONE_S
        if now_s - max(moved_s, self._since_s) > limit_s:
            raise TemporaryError(
                f"rank 0 has given no sign for {limit_s:.0f} s: it is gone; start the job again"
            )

    def close(self) -> None:
        """Ends the member, if there is one."""
        self._end(signal.SIGKILL)
        if self._lock is not None:
            self._lock.close()

    def _present(self) -> list[int]:
        others, now_s = range(1, self._rank.of), time.monotonic()
        return [rank for rank in others if now_s - self._watched.moved_s(rank) < _GONE_S]

    def _await_signs(self, ranks: Sequence[int]) -> None:
        """Waits until all of these ranks have given a sign, or those that have not are gone."""

        def moved_s() -> float:
            return min([self._watched.moved_s(rank) for rank in ranks], default=math.inf)

        moved_s()  # signs of before the loss are read now
        since_s = time.monotonic()

        def are_there() -> bool:
            return self.stop() or moved_s() > since_s

        self._wait(are_there, _GONE_S)

    def _tell_who(self, taken: Sequence[int], there: Sequence[int], number: int) -> None:
        if number == 1 and len(taken) == self._rank.of:
            return
        gone = [rank for rank in range(self._rank.of) if rank not in there]
        said = [f"rank {rank} is gone" for rank in gone]
        for rank in there[1:]:
            sign = Sign.read(self._run, rank)
            if sign is not None and sign.died not in (0, signal.SIGABRT):
                said.append(f"the process of rank {rank} was killed by signal {sign.died}")
        idle = f" ({len(there) - len(taken)} idle: the batch must divide)" * (taken != there)
        self._tell(
            f"{'; '.join(said) or 'a process was lost'}: {len(taken)} of {self._rank.of} processes{idle} "
            f"go on as one learner from step {max(0, step_of(self._run)):,}"
        )

    def _wait(self, until: Callable[[], bool], timeout_s: float) -> None:
        """Waits, and gives signs meanwhile."""
        until_s = time.monotonic() + timeout_s
        while True:
            if time.monotonic() > self._signed_s + _SIGN_S:
                self._signed_s = time.monotonic()
                self._sign = self._sign._replace(number=self._sign.number + 1)
                self._sign.write(self._run, self._rank.number)
            if until() or time.monotonic() >= until_s:
                return
            time.sleep(_TICK_S)

    def _start(self, number: int, of: int, address: str) -> None:
        rank = self._rank
        member = Member(number, of, rank.number, address, self._interface, os.getpid())
        cores = cores_of(rank, usable_cores())
        settings = member.environment() | {CORES: str(cores)}
        # What the terminal sends comes to the supervisor only, which passes it on once.
        self._child = start_module("seedbed", sys.argv[1:], settings, start_new_session=True)
        if self.stop():
            self._pass_on()

    def _pass_on(self) -> None:
        if self._child is not None:
            self._child.send_signal(signal.SIGTERM)

    def _ended(self) -> bool:
        return self._child is None or self._child.poll() is not None

    def _status(self) -> int:
        assert self._child is not None, "a member was started"
        return self._child.wait()

    def _end(self, number: int) -> None:
        if self._child is not None:
            self._child.send_signal(number)
            self._child.wait()
            self._child = None


def step_of(run: Path) -> int:
    """Returns the step of the run's newest checkpoint, -1 if there is none."""
    return (list_steps(run / CHECKPOINTS) or [-1])[-1]


def lock_of(run: Path, rank: int | Literal["ray"]) -> Path:
    """Returns the file that `only` locks."""
    return run / FOLDER / (f"rank-{rank}.lock" if isinstance(rank, int) else f"{rank}.lock")


def only(run: Path, rank: int | Literal["ray"]) -> TextIO | None:
    """Returns what this process holds as the only supervisor of a rank, or as the only one with Ray.

    It is None where there are no locks. Raises TemporaryError if there is another one: that of an earlier
    start lives for a minute without rank 0.
    """
    try:
        run.mkdir(0o755, parents=True, exist_ok=True)
        (run / FOLDER).mkdir(0o700, exist_ok=True)
        file = lock_of(run, rank).open("w")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except BlockingIOError:
        what = f"is rank {rank} of" if isinstance(rank, int) else "has Ray start ranks of"
        raise TemporaryError(
            f"another process {what} {printable(run)}, of an earlier start of the job: wait until it has "
            "ended, or stop it"
        ) from None
    except OSError:
        return None
