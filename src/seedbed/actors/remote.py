"""Actors of other machines, as the learner sees them: the ingest process, and its faults that end a run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from seedbed import strict_json
from seedbed.actors.child import ChildProcess, start_again
from seedbed.actors.pool import ActorPool
from seedbed.actors.slots import SlotLayout, spec_from_json, spec_to_json
from seedbed.envs.host import registry
from seedbed.envs.host.contract import HostEnvConfig
from seedbed.streams.supervisor import Supervisor

_MODULE = "seedbed.actors.ingest"
# Figures that go on where a process takes the place of another.
_SUMMED = (
    "reconnects",
    "refused",
    "steps",
    "received_bytes",
    "sent_bytes",
    "cpu_seconds",
    "stream_seconds",
    "waited_seconds",
)
# Seconds of silence after which an ingest process is replaced; it says that it lives every second.
_HUNG_S = 10.0
# Seconds after which the port is announced again: this machine may have other addresses by then.
_ANNOUNCE_S = 2.0
# An end is early if the process has not listened, or began less than so many seconds ago.
_EARLY_S = 10.0


@dataclasses.dataclass(frozen=True)
class Listening:
    """How a learner listens for actors of other machines."""

    host: str
    port: int  # 0 is one that the kernel chooses, if that of the learner before is taken
    former_port: int  # 0 if there was none
    folder: Path  # of the run's credentials
    insecure: bool  # whether streams are plaintext
    term: int
    env: HostEnvConfig
    group_size: int
    groups: range  # of the pool
    seed: int
    timeout_s: float  # after which hosts replace an actor that owes a step

    def job(self, former_port: int, lives: Sequence[int]) -> dict[str, Any]:
        """Returns what an ingest process has to know, in JSON types."""
        return {
            "host": self.host,
            "port": self.port,
            "former_port": former_port,
            "credentials": str(self.folder),
            "insecure": self.insecure,
            "term": self.term,
            "env": registry.to_json(self.env),
            "num_envs": self.group_size,
            "lives": list(lives),
            "seed": self.seed,
            "timeout_s": self.timeout_s,
        }


class IngestProcess(ChildProcess):
    """A running ingest process. Only the pool's thread uses it, but for `pid`, `cpu_seconds` and `report`."""

    def __init__(
        self,
        listening: Listening,
        former_port: int,
        lives: Sequence[int],
        announce: Callable[[int], None],
    ) -> None:
        """`announce` is called with the port once the process listens, from the pool's thread."""
        super().__init__(_MODULE, listening.job(former_port, lives), listening.groups, lives)
        self.port, self._announce = 0, announce  # 0 until it listens
        self.report: dict[str, float] = {}  # its newest figures about streams
        self.notes: list[str] = []  # messages for the user, the pool's thread takes them
        self._present: Sequence[int] = ()

    @property
    def present(self) -> Sequence[int]:
        """The groups that a host has now, or had until a moment ago."""
        return self._present

    def _take(self, message: dict[str, Any]) -> None:
        self.beats += 1
        if "port" in message:
            self.port = message["port"]
            self._announce(self.port)
        self.report = message.get("beat", self.report)
        self.notes += message.get("notes", [])
        if "present" in message:
            self._present = [self.groups.start + number for number in message["present"]]
        if "spec" in message:
            self.spec = spec_from_json(message["spec"])

    def share(self, layout: SlotLayout) -> None:
        """Sends the run's spec, and the shared memory and doorbells of all groups.

        Call from the pool's thread only.
        """
        self.tell(spec=spec_to_json(layout.spec))
        super().share(layout)

    def tell(self, **message: Any) -> None:
        """Sends a message; a process that does not take it is killed. Call from the pool's thread only."""
        try:
            self.connection.send(strict_json.dumps(message).encode())
        except OSError:
            self.kill()


class RemoteActors:
    """The ingest process through all its starts: the `peers.Policy` of each of them.

    The constructor starts the first process. The pool calls the rest, from its thread only, but for `report`.
    """

    def __init__(
        self, pool: ActorPool, listening: Listening, announce: Callable[[int], None]
    ) -> None:
        """The pool's thread calls `announce` with the port when a process listens, and then every 2 s."""
        self._pool, self._listening, self._announce = pool, listening, announce
        self._port, self._supervisor = listening.former_port, Supervisor("the ingest process")
        self._announced_s = 0.0
        self._past: dict[str, float] = {}  # figures of processes that have ended
        self._start()

    def _start(self) -> None:
        lives = self._pool.assign_lives(self._listening.groups)
        self._process = IngestProcess(self._listening, self._port, lives, self._listens)
        self._started_s, self._looks = time.monotonic(), 0
        self._supervisor.begin()
        self._pool.attach(self._process, self)

    def _listens(self, port: int) -> None:
        # A process that takes its place listens at the same port.
        self._port, self._announced_s = port, time.monotonic()
        self._announce(port)

    def silent(self, silent_s: float) -> None:
        """Passes on what the process tells, and replaces a process that tells nothing any more."""
        process = self._process
        for note in process.notes:
            self._pool.note(note)
        process.notes = []
        if process.port and time.monotonic() > self._announced_s + _ANNOUNCE_S:
            self._listens(process.port)
        # Twice in a row: what it said while this process was stopped may not have been read yet.
        self._looks = self._looks + 1 if silent_s >= _HUNG_S else 0
        if self._looks > 1:
            self._supervisor.hung(_HUNG_S)
            process.kill()

    def ended(self, how: str) -> None:
        """Starts the process again, with new lives; raises SeedbedError if that would not help."""
        process = self._process
        if process.fault is not None:
            raise process.fault
        early = not process.port or time.monotonic() < self._started_s + _EARLY_S
        words = process.last_words()
        self._past = self.report()
        process.close()
        self._pool.note(f"{self._supervisor.end(how, words, early)}; actors will come back")
        start_again(self._start, self._supervisor, self._pool.note)

    def report(self) -> dict[str, float]:
        """Returns figures about hosts and streams; counts are since the start. Any thread may call this."""
        now = self._process.report
        return {
            name: value + (self._past.get(name, 0.0) if name in _SUMMED else 0.0)
            for name, value in now.items()
        }

    def finish(self, text: str, over: bool) -> None:
        """Tells all hosts that the run has ended, or if it is not `over`, that it may go on later.

        Call from the pool's thread only, before it is closed.
        """
        self._process.tell(finish={"text": text, "over": over})
