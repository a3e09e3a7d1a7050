"""The ingest process: streams of other machines end here, and what arrives goes into the learner's slots.

The learner starts it with one end of a socket pair, and it dies when that hangs up. It imports no JAX. It
trusts nobody: a client gets memory and time only as far as it has proved what it is (docs/protocol.md).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import math
import mmap
import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import Any

from seedbed import strict_json
from seedbed.actors.actor import FDS, MESSAGE_BYTES
from seedbed.actors.admission import Complaints, Door
from seedbed.actors.connection import Connection
from seedbed.actors.credentials import ActorKey, learner_context
from seedbed.actors.reception import MOST_NOTES, Reception
from seedbed.actors.seats import Seats
from seedbed.actors.slots import Slot, slot_layout, spec_from_json
from seedbed.actors.wire import Kind, ProtocolError, StepCodec, json_frame
from seedbed.exit_status import TemporaryError
from seedbed.machine import raise_descriptor_limit
from seedbed.types import SeedbedError

_BEAT_S = 1.0
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
    job = strict_json.loads(learner.recv(MESSAGE_BYTES))
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
        folder = Path(job["credentials"])
        key = ActorKey.read(folder)
        self._context = None if job["insecure"] else learner_context(folder.parent)
        self._seats = Seats(job["lives"])
        self._codec: StepCodec | None = None
        self._spec: dict[str, Any] = {}  # of the learner, once it has told it
        self._answered: dict[int, int] = {}  # seats by the descriptor of the doorbell of answers
        self._epoll = select.epoll()
        self._epoll.register(learner, select.EPOLLIN)
        self._door = _listen(job["host"], job["port"], job["former_port"], self._epoll)
        self._reception = Reception(job, key, self._seats, self._door)
        self._complaints = Complaints()
        self._streams: dict[int, Connection[Kind]] = {}  # by descriptor
        self._events: dict[int, int] = {}  # that epoll waits for, by descriptor
        self._next_beat_s = 0.0
        self._finished, self._until_s = False, math.inf  # the run has ended; when this process ends
        self._present: list[int] = []
        # What the learner has not taken yet: the newest of each kind.
        self._untold: dict[str, bytes] = {}
        self._fds: list[int] = []  # of the slots and doorbells, as far as they have come
        self._tell(port=self._door.port)

    def run(self) -> None:
        """Serves until the learner hangs up, and hosts have heard of the end; may raise ConnectionError."""
        while (now_s := time.monotonic()) < self._until_s:
            if self._until_s < math.inf and not self._streams:
                return
            shut_s = self._door.tend(now_s)
            if now_s >= self._next_beat_s:
                self._beat(now_s)
            timeout_s = min(shut_s, self._next_beat_s - now_s, self._until_s - now_s)
            for fd, events in self._epoll.poll(max(0.0, timeout_s)):
                if fd in self._answered:
                    self._reply(self._answered[fd])
                elif fd in self._streams:
                    self._serve(self._streams[fd], events)
                elif fd == self._learner.fileno():
                    self._obey()
                elif fd == self._door.fileno():
                    self._accept()
            if self._seats.present is not self._present:
                self._present = self._seats.present
                self._tell(present=self._present)

    def _tell(self, **news: Any) -> None:
        """Tells the learner, as far as it takes messages now; the rest is told with the next news."""
        self._untold |= {kind: _packed(**{kind: value}) for kind, value in news.items()}
        with contextlib.suppress(BlockingIOError):
            for kind in list(self._untold):
                self._learner.send(self._untold[kind])
                del self._untold[kind]

    def _accept(self) -> None:
        if (taken := self._door.accept()) is None:
            return
        stream, victim = taken
        if victim is not None:
            self._end(self._streams[victim])
        fd = stream.fileno()
        try:
            address = stream.getpeername()[0]
            connection = Connection(stream, self._context, Kind, server=True)
        except OSError:  # it has gone
            self._door.forget(fd)
            stream.close()
            return
        try:
            self._streams[fd], self._events[fd] = connection, connection.events
            self._epoll.register(fd, connection.events)
            self._reception.meet(connection, address)
            self._watch(connection)
        except (ConnectionError, OSError):
            self._end(connection)

    def _serve(self, connection: Connection[Kind], events: int) -> None:
        """Reads and writes what a stream is ready for; a stream that breaks the protocol ends."""
        try:
            if events & select.EPOLLOUT:
                connection.flush()
            for kind, body in connection.receive():
                if kind is Kind.STEP and self._codec is not None:
                    self._reception.seat_of(connection).arrive(self._codec, body)
                else:
                    self._reception.take(connection, kind, body)
            self._after_spec()
            self._watch(connection)
        except ProtocolError as error:
            self._reception.refuse(connection, error)
            self._watch(connection)
        except ConnectionError:
            self._end(connection)
        except Exception as error:
            # Whatever a client has found must end no stream but its own.
            if self._complaints.tell():
                self._reception.note(f"a message of a stream could not be handled: {error!r}")
            self._reception.refuse(connection, ProtocolError("the learner could not handle this"))
            self._watch(connection)

    def _watch(self, connection: Connection[Kind]) -> None:
        fd, events = connection.fileno(), connection.events
        if fd in self._streams and self._events[fd] != events:
            self._events[fd] = events
            self._epoll.modify(fd, events)
        for other in self._reception.take_ended():
            self._end(other)

    def _end(self, connection: Connection[Kind]) -> None:
        fd = connection.fileno()
        if self._streams.pop(fd, None) is not None:
            # It may not be registered, where the kernel refused that.
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)
            self._door.forget(fd)
        self._reception.leave(connection)
        connection.close()

    def _reply(self, number: int) -> None:
        seat = self._seats.all[number]
        assert self._codec is not None
        connection = seat.connection
        try:
            seat.answered(self._codec, self._seats.latencies)
            if connection is not None:
                self._watch(connection)
        except ConnectionError:
            if connection is not None:
                self._end(connection)

    def _after_spec(self) -> None:
        """Tells the learner of the first spec."""
        spec = self._reception.take_first_spec()
        if spec is not None:
            self._tell(spec=spec)

    def _obey(self) -> None:
        """Takes a message of the learner: the spec, slots and doorbells, or the end of the run."""
        data, fds, _, _ = socket.recv_fds(self._learner, MESSAGE_BYTES, FDS)
        if not data and not self._finished:
            raise ConnectionResetError("the learner has hung up")
        if not data:
            self._epoll.unregister(self._learner)
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
            for connection in list(self._streams.values()):
                with contextlib.suppress(ConnectionError):
                    connection.send(json_frame(Kind.FINISH, **message["finish"]))
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
            self._answered[fd] = number
            # Edge-triggered, so that the counters need not be read.
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)
        for connection in self._reception.begin_all(self._codec, self._spec):
            self._watch(connection)

    def _beat(self, now_s: float) -> None:
        """Ends silent streams, frees seats, and tells both sides that this process lives."""
        self._next_beat_s = now_s + _BEAT_S
        for connection in self._reception.silent(now_s):
            self._end(connection)
        self._seats.expire(now_s)
        for connection in self._reception.beat():
            self._watch(connection)
        self._tell(beat=self._reception.report(self._streams.values()))
        if notes := self._reception.take_notes():
            self._tell(notes=[*self._untold.get("notes", []), *notes][-MOST_NOTES:])


def _listen(host: str, port: int, former_port: int, epoll: select.epoll) -> Door:
    """Listens at a port, or at any if it is 0: at the one of the learner before, if that is free."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, number)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address[0], port or former_port, *address[2:]))
        except OSError:
            if port:
                raise
            listener.bind(address)
        return Door(listener, epoll)
    except OSError as error:
        # Whoever has the port may leave it.
        kind = TemporaryError if error.errno == errno.EADDRINUSE else SeedbedError
        raise kind(
            f"cannot listen at {host or '*'}:{port} ({error.strerror or error}): give another address with "
            "--listen"
        ) from error


if __name__ == "__main__":
    main()
