"""Microbenchmark of a stream: what a group's timestep and its answer cost each end, over TLS on loopback."""

from __future__ import annotations

import os
import select
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from seedbed.actors.slots import Slot, SlotLayout
from seedbed.actors.wire import Kind, StepCodec
from seedbed.plan.costs import StreamCosts
from seedbed.plan.engine import Cost
from seedbed.plan.stepping import REST_S
from seedbed.streams.connection import Connection
from seedbed.streams.credentials import ensure_credentials, learner_context
from seedbed.types import SeedbedError

_WARM = 10
_SILENT_S = 10.0


class End:
    """One end of a stream, which waits for its messages. For one thread."""

    def __init__(self, connection: Connection, layout: SlotLayout) -> None:
        self.connection, self.codec = connection, StepCodec(layout)
        connection.limit = self.codec.limit
        self._epoll = select.epoll()
        self._epoll.register(connection.fileno(), select.EPOLLIN)
        self.bell = os.eventfd(0)

    def take(self, other: End, use: Callable[[memoryview], None]) -> None:
        """Waits for a message of the other end, and gives its body to `use`."""
        taken = False
        while not taken:
            # The kernel may have taken a part of a large message only.
            other.connection.flush()
            if not self._epoll.poll(_SILENT_S):
                raise SeedbedError(f"no message came over loopback within {_SILENT_S:g} s")
            for _, body in self.connection.receive():
                use(body)
                taken = True

    def close(self) -> None:
        """Closes the connection and the descriptors of this end."""
        self.connection.close()
        self._epoll.close()
        os.close(self.bell)


def _ends(folder: Path, layout: SlotLayout) -> tuple[End, End]:
    """Returns an actor's and a learner's end, after the handshake of TLS."""
    key = ensure_credentials(folder)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    actor = Connection(client, key.context(), Kind, server=False)
    learner = Connection(server, learner_context(folder), Kind, server=True)
    while not (actor.encrypted and learner.encrypted):
        for end in (actor, learner):
            list(end.receive())
    return End(actor, layout), End(learner, layout)


def measure(layout: SlotLayout, steps: Sequence[list[np.ndarray]], seconds: float) -> StreamCosts:
    """Sends timesteps and answers for a while; returns their costs."""
    with tempfile.TemporaryDirectory() as folder:
        actor, learner = _ends(Path(folder) / "listen", layout)
        try:
            return _measure(actor, learner, Slot(layout, bytearray(layout.size)), steps, seconds)
        finally:
            actor.close()
            learner.close()


def _measure(
    actor: End, learner: End, slot: Slot, steps: Sequence[list[np.ndarray]], seconds: float
) -> StreamCosts:
    spent: list[list[float]] = []
    sizes: list[tuple[int, int]] = []

    def publish(body: memoryview) -> None:
        _, _, arrays = learner.codec.read_step(body)
        slot.publish(learner.codec.leaves(arrays))
        os.eventfd_write(learner.bell, 1)

    def obey(body: memoryview) -> None:
        _, _, action = actor.codec.read_answer(body)
        slot.action[...] = action
        os.eventfd_write(actor.bell, 1)

    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(spent) < 2 * _WARM:
        number = len(spent)
        sent: list[bytes] = []

        def send_step(number: int = number, sent: list[bytes] = sent) -> None:
            sent.append(actor.codec.step(1, number + 1, steps[number % len(steps)]))
            actor.connection.send(sent[-1])

        def send_answer(number: int = number, sent: list[bytes] = sent) -> None:
            sent.append(learner.codec.answer(1, number + 1, slot.action))
            learner.connection.send(sent[-1])

        ends = (
            send_step,
            lambda: learner.take(actor, publish),
            send_answer,
            lambda: actor.take(learner, obey),
        )
        spent.append([_after_rest(end) for end in ends])
        up, down = sent
        sizes.append((len(up), len(down)))
    parts = zip(*spent[_WARM:], strict=True)
    send, take, answer, read = (Cost(statistics.median(part)) for part in parts)
    up_bytes, down_bytes = (statistics.fmean(part) for part in zip(*sizes, strict=True))
    return StreamCosts(send, take, answer, read, up_bytes, down_bytes)


def _after_rest(part: Callable[[], None]) -> float:
    """Returns the CPU seconds of a part after a rest, as it has one in a run."""
    time.sleep(REST_S)
    begun = time.thread_time()
    part()
    return time.thread_time() - begun
