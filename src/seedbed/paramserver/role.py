"""A process of a run besides the coordinator: its sockets, what it tells the coordinator, and its end."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import enum
import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from seedbed.central.listening import advertised
from seedbed.exit_status import ExitStatus, TrainingDiverged, is_no_room
from seedbed.machine import raise_descriptor_limit
from seedbed.paramserver.caller import Stopped
from seedbed.paramserver.directory import Address, Directory, this_machine
from seedbed.paramserver.ledger import BookError
from seedbed.paramserver.messages import Kind
from seedbed.run import memory
from seedbed.run.trust import declare as declare_trust
from seedbed.streams.addresses import Listening, split_address
from seedbed.streams.credentials import FOLDER as CREDENTIALS
from seedbed.streams.handshake import Place
from seedbed.streams.messages import Message, ProtocolError, unpack
from seedbed.streams.server import Client, Server
from seedbed.types import SeedbedError

COORDINATOR = "coordinator"
"""What the coordinator calls itself."""
STOP_S = 20.0
"""Seconds after SIGTERM until a role ends that its coordinator does not end."""
ORPHAN_S = 60.0
"""Seconds without a coordinator after which a role saves what it has, and ends."""
_TICK_S, _LOOK_S = 0.1, 1.0
_MOST_HOSTS = 32  # addresses of a role: a host tells them in a HELLO, which has few bytes
_PR_SET_PDEATHSIG = 1  # Linux: prctl(2)


class Broken(Exception):
    """Raised by a role whose state is lost: the process ends, and another one takes its place."""


FATAL = (Broken, SeedbedError, OSError)
"""Failures of a role's own, such as a full disk, which end its process."""


class Work(Protocol):
    """The work of a role; the role's thread calls it."""

    def greet(self, client: Client, said: dict[str, Any]) -> dict[str, Any]:
        """Takes a client's HELLO; see `server.Handler`."""
        ...

    def take(self, client: Client, message: Message) -> None:
        """Takes a message; raises ProtocolError and ConnectionError, which end the stream."""
        ...

    def leave(self, client: Client) -> None:
        """Forgets a client whose stream has ended."""
        ...

    def tick(self, now_s: float) -> bool:
        """Does what is due, several times a second; returns whether there is more to do."""
        ...

    def report(self) -> dict[str, Any]:
        """Returns figures for the coordinator, as JSON types; those that count are since the start."""
        ...

    def close(self) -> None:
        """Saves what there is to save, at the end."""
        ...


class Role:
    """A role's process: a `server.Handler`. For one thread."""

    def __init__(self, run: Path, name: str, number: int) -> None:
        """`number` is that of this start, which no other one of the role has; later ones' are greater."""
        self.name, self.number = name, number
        self._run, self.directory = run, Directory(run)
        self._work: Work | None = None
        self._finish = False
        self._asked_s: float | None = None  # when SIGTERM came
        self.address: Address | None = None  # where it listens, once it does
        self.alone = False  # whether it has ended because nobody coordinated it

    def serve(self, work: Work, at: Listening | None, first_s: float = ORPHAN_S) -> None:
        """Listens, tells where, and serves until the work is done.

        It ends, too, when the coordinator says so, when there has been none for `ORPHAN_S` (`first_s` at the
        start), and when another start has taken this one's place. After SIGTERM it ends at once if no
        coordinator is there, and else within `STOP_S`. `at` is where it listens for other machines, None
        for nowhere. Raises SeedbedError if it cannot listen.
        """
        self._work = work
        place = Place(self.name, self.number)
        server = Server(self, place, Kind, self._run / CREDENTIALS, fatal=FATAL)
        try:
            socket = server.listen_here()
            names = [] if at is None else advertised(at.host, listen_at(server, at), ())
        except OSError as error:
            where = (
                "this machine" if at is None else f"{at.host or 'this machine'}{_ports_text(at)}"
            )
            raise SeedbedError(
                f"{self.name} cannot listen at {where} ({error.strerror}): name an address that this machine "
                "has, or more ports, with --listen"
            ) from error
        hosts = tuple((name, port or 0) for name, port in map(split_address, names[:_MOST_HOSTS]))
        self.address = Address(self.number, os.getpid(), this_machine(), socket, hosts)
        self.directory.announce(self.name, self.address)
        heard_s, look_s, more, limit_s = time.monotonic(), 0.0, True, first_s
        try:
            while more and not self._finish:
                server.serve(_TICK_S)
                now_s = time.monotonic()
                more = work.tick(now_s)
                if now_s < look_s:
                    continue
                look_s = now_s + _LOOK_S
                coordinated = any(client.role == COORDINATOR for client in server.clients.values())
                if coordinated:
                    heard_s, limit_s = now_s, ORPHAN_S
                if self._asked_s is not None and (
                    not coordinated or now_s > self._asked_s + STOP_S
                ):
                    break
                self.alone = now_s > heard_s + limit_s
                if self.alone or not self.current():
                    break
        finally:
            server.close()
            work.close()

    def current(self) -> bool:
        """Returns whether no later start has taken this one's place."""
        address = self.directory.find(self.name)
        return address is None or address.number <= self.number

    @property
    def finishing(self) -> bool:
        """Whether the role is to end."""
        return self._finish

    def finish(self, *_: Any) -> None:
        """Lets the role end soon; may be a handler of signals."""
        self._finish = True

    def await_finish(self, *_: Any) -> None:
        """Lets the role end when the coordinator says so, or in `STOP_S`; may be a handler of signals."""
        self._asked_s = self._asked_s or time.monotonic()

    def greet(self, client: Client, said: dict[str, Any]) -> dict[str, Any]:
        """Passes a HELLO on."""
        assert self._work is not None
        return self._work.greet(client, said)

    def leave(self, client: Client, refusal: ProtocolError | None) -> None:
        """Passes on that a stream has ended that was greeted."""
        del refusal
        assert self._work is not None
        if client.known:
            self._work.leave(client)

    def take(self, client: Client, kind: enum.IntEnum, body: memoryview) -> None:
        """Answers the coordinator, and passes everything else on."""
        assert self._work is not None
        message = unpack(kind, body)
        if message.kind is Kind.REPORT and client.role == COORDINATOR:
            client.send(
                Kind.REPORT, start=self.number, cpu_s=time.process_time(), **self._work.report()
            )
        elif message.kind is Kind.FINISH and client.role == COORDINATOR:
            self._finish = True
        else:
            self._work.take(client, message)


def listen_at(server: Server, at: Listening, former_port: int = 0) -> int:
    """Opens a door at the former port, or the first of a range that is free; returns it. Raises OSError."""
    first = [former_port] if former_port in at.ports else []
    *others, last = *first, *at.ports
    for port in others:
        try:
            return server.listen(at.host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return server.listen(at.host, last, former_port)


def _ports_text(at: Listening) -> str:
    return "" if at.ports == range(1) else f":{at.ports[0]}-{at.ports[-1]}"


class Given(NamedTuple):
    """The command line of a role's process."""

    run: Path
    number: int  # of the role among those of its kind, from 0 on
    start: int  # the number of this start
    hosted: bool  # whether a host has started it
    trusted: bool
    save: str | None


def parse(description: str) -> Given:
    """Parses the command line of a role, and lets its process end with the host that has started it.

    Call from the main thread, before anything else.
    """
    parser = argparse.ArgumentParser(
        description=f"{description}; started by the coordinator.", allow_abbrev=False
    )
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    parser.add_argument("--number", type=int, required=True, help="its number, from 0 on")
    parser.add_argument("--start", type=int, required=True, help="the number of this start")
    parser.add_argument("--parent", type=int, help="the process of the host, with which it ends")
    parser.add_argument("--save", help="the save to go on from; by default the newest")
    declare_trust(parser)
    given = parser.parse_args()
    if given.parent is not None:
        end_with(given.parent)
    hosted = given.parent is not None
    return Given(given.run, given.number, given.start, hosted, given.trust_run, given.save)


def end_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(ExitStatus.ALONE)  # it had ended before


def end_on_signals(role: Role) -> None:
    """Lets SIGTERM end a role; what the terminal sends is for the coordinator. For the main thread.

    Whoever stops a machine sends SIGTERM to every process. The coordinator then saves a cut, for which it
    needs the roles, and ends them.
    """
    signal.signal(signal.SIGTERM, role.await_finish)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def run_role(make: Callable[[], tuple[Role, Work, Listening | None]]) -> None:
    """Makes a role with its work and where it listens, and serves; ends the process if that fails.

    The exit status is FINISHED if the role ends as it should, ALONE if it has had no coordinator for
    `ORPHAN_S`, NO_ROOM if the disk is full, and FAILED after a BookError, so that the role is started again.
    It is DIVERGED after TrainingDiverged and REFUSED after another SeedbedError, with a line for the user.
    Call from the main thread.
    """
    # The settings for malloc are this process's: actors are small, and must not inherit them.
    os.environ.pop(memory.NAME, None)
    raise_descriptor_limit()
    try:
        role, work, at = make()
        role.serve(work, at)
    except Stopped:
        return
    except BookError as error:
        sys.exit(str(error))
    except (SeedbedError, OSError) as error:
        full = is_no_room(error) or is_no_room(error.__cause__)
        if not full and isinstance(error, OSError):
            raise
        # The log may be on the full disk.
        with contextlib.suppress(OSError):
            traceback.print_exc()
            sys.stderr.write(f"{str(error).splitlines()[0]}\n")
        if full:
            # The interpreter's own end would fail to write the rest, and have another status.
            os._exit(ExitStatus.NO_ROOM)
        diverged = isinstance(error, TrainingDiverged)
        sys.exit(ExitStatus.DIVERGED if diverged else ExitStatus.REFUSED)
    if role.alone:
        sys.exit(ExitStatus.ALONE)
