"""The ingest process: streams of other machines end here, and what arrives goes into the learner's slots.

The learner starts it with one end of a socket pair, and it dies when that hangs up. It imports no JAX. It
trusts nobody: a client gets memory and time only as far as it has proved what it is (docs/protocol.md).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import math
import mmap
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from seedbed import strict_json
from seedbed.actors.actor import FDS, MESSAGE_BYTES
from seedbed.actors.admission import MOST_NOTES, Admission
from seedbed.actors.seats import Seats
from seedbed.actors.slots import Slot, slot_layout, spec_from_json
from seedbed.actors.wire import BEAT_S, Kind, StepCodec
from seedbed.exit_status import TemporaryError
from seedbed.machine import raise_descriptor_limit
from seedbed.streams.messages import pack
from seedbed.streams.server import Server
from seedbed.types import SeedbedError

# Seconds for which streams may end by themselves when the run has ended, so that FINISH arrives.
_GRACE_S = 0.5


def main() -> None:
    """Serves the learner at the other end of the socket `--fd`, until it hangs up.

    Call from the main thread only: it sets signal handlers.
    """
    parser = argparse.ArgumentParser(description="An ingest process; started by the learner.")
    parser.add_argument("--fd", type=int, required=True, help="an inherited Unix socket")
    learner = socket.socket(fileno=parser.parse_args().fd)
    os.set_inheritable(learner.fileno(), False)
    raise_descriptor_limit()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    job = strict_json.loads(sys.stdin.buffer.read())
    # A learner that is stopped, or evaluates for long, must not keep the streams waiting.
    learner.setblocking(False)
    try:
        ingest = Ingest(learner, job)
    except SeedbedError as error:
        learner.send(_packed(error=str(error), temporary=isinstance(error, TemporaryError)))
        return
    with contextlib.suppress(ConnectionError):
        ingest.run()


def _packed(**message: Any) -> bytes:
    data = strict_json.dumps(message).encode()
    assert len(data) <= MESSAGE_BYTES, "messages to the learner are short"
    return data


class Ingest:
    """The loop over the learner's socket, its doorbells and the streams. Only the main thread uses it."""

    def __init__(self, learner: socket.socket, job: dict[str, Any]) -> None:
        """Listens at the address of the job; raises SeedbedError if it cannot."""
        self._learner, self._job = learner, job
        self._seats = Seats(job["lives"])
        self._admission = Admission(job, self._seats)
        self._server = self._admission.server
        self._server.loop.watch(learner.fileno(), self._obey)
        self._codec: StepCodec | None = None
        self._spec: dict[str, Any] = {}  # of the learner, once it has told it
        self._next_beat_s = 0.0
        self._finished, self._until_s = False, math.inf  # the run has ended; when this process ends
        self._present: list[int] = []
        # What the learner has not taken yet: the newest of each kind.
        self._untold: dict[str, Any] = {}
        self._fds: list[int] = []  # of the slots and doorbells, as far as they have come
        self._tell(port=_listen(self._server, job))

    def run(self) -> None:
        """Serves until the learner hangs up, and hosts have heard of the end; may raise ConnectionError."""
        while (now_s := time.monotonic()) < self._until_s:
            if self._until_s < math.inf and not self._server.clients:
                return
            if now_s >= self._next_beat_s:
                self._beat(now_s)
            self._server.serve(min(self._next_beat_s, self._until_s) - now_s)
            if (spec := self._admission.take_first_spec()) is not None:
                self._tell(spec=spec)
            if self._seats.present is not self._present:
                self._present = self._seats.present
                self._tell(present=self._present)

    def _tell(self, **news: Any) -> None:
        """Tells the learner, as far as it takes messages now; the rest is told with the next news."""
        self._untold |= news
        with contextlib.suppress(BlockingIOError):
            for kind, value in list(self._untold.items()):
                self._learner.send(_packed(**{kind: value}))
                del self._untold[kind]

    def _reply(self, number: int, events: int) -> None:
        del events
        seat = self._seats.all[number]
        assert self._codec is not None
        client = seat.client
        try:
            seat.answered(self._codec, self._seats.latencies)
            if client is not None:
                self._server.watch(client)
        except ConnectionError:
            if client is not None:
                self._server.end(client)

    def _obey(self, events: int) -> None:
        """Takes a message of the learner: the spec, slots and doorbells, or the end of the run."""
        del events
        data, fds, _, _ = socket.recv_fds(self._learner, MESSAGE_BYTES, FDS)
        if not data and not self._finished:
            raise ConnectionResetError("the learner has hung up")
        if not data:
            self._server.loop.forget(self._learner.fileno())
            self._until_s = time.monotonic() + _GRACE_S
            return
        if fds:
            self._fds += fds
            if len(self._fds) == 1 + 2 * len(self._seats.all):
                self._attach()
            return
        message = strict_json.loads(data)
        if "finish" in message:
            self._finished = True
            for client in list(self._server.clients.values()):
                self._server.send(client, pack(Kind.FINISH, message["finish"]))
        self._spec = message.get("spec", self._spec)

    def _attach(self) -> None:
        """Maps the slots and doorbells, and begins the streams that wait for them."""
        memory_fd, arrived, answered = self._fds[0], self._fds[1::2], self._fds[2::2]
        layout = slot_layout(spec_from_json(self._spec), self._job["num_envs"])
        memory = mmap.mmap(memory_fd, layout.size * len(self._seats.all))
        os.close(memory_fd)
        self._codec = StepCodec(layout)
        for seat, bell in zip(self._seats.all, arrived, strict=True):
            seat.attach(Slot(layout, memory, seat.number * layout.size), bell)
        for number, fd in enumerate(answered):
            # Edge-triggered, so that the counters need not be read.
            events = select.EPOLLIN | select.EPOLLET
            self._server.loop.watch(fd, functools.partial(self._reply, number), events)
        self._admission.begin_all(self._codec, self._spec)

    def _beat(self, now_s: float) -> None:
        """Tells both sides that this process lives, and what has happened."""
        self._next_beat_s = now_s + BEAT_S
        self._admission.beat(now_s)
        self._tell(beat=self._admission.report())
        if notes := self._admission.take_notes():
            self._tell(notes=[*self._untold.get("notes", []), *notes][-MOST_NOTES:])


def _listen(server: Server, job: dict[str, Any]) -> int:
    """Opens the server's door at the address of the job; returns the port, or raises SeedbedError."""
    host, port = job["host"], job["port"]
    try:
        return server.listen(host, port, job["former_port"], tls=not job["insecure"])
    except OSError as error:
        # Whoever has the port may leave it.
        kind = TemporaryError if error.errno == errno.EADDRINUSE else SeedbedError
        raise kind(
            f"cannot listen at {host or '*'}:{port} ({error.strerror or error}): give another address with "
            "--listen"
        ) from error


if __name__ == "__main__":
    main()
