"""The groups of an ingest process: whose they are, and the slots that their timesteps go into."""

from __future__ import annotations

import collections
import os
import time
from typing import NamedTuple

import numpy as np

from seedbed.actors.lives import Arrival, Begin, LearnerEnd
from seedbed.actors.slots import Slot
from seedbed.actors.wire import Beat, StepCodec, begin_frame
from seedbed.streams.messages import ProtocolError
from seedbed.streams.server import Client

# Latencies of the learner that are kept for a report.
_LATENCIES = 4096


class Owner(NamedTuple):
    """The host's group that has a seat."""

    instance: str
    number: int  # of the group, in its host


class Seat:
    """The place of a group: its end of the protocol, its slot, and the stream that it has. For one thread."""

    def __init__(self, number: int, life: int) -> None:
        self.number = number
        self.end = LearnerEnd(life)
        self.owner: Owner | None = None
        self.client: Client | None = None  # its stream
        self.beat: Beat | None = None  # the last one of the owner; None before its first
        self.published = 0  # timesteps
        self._waited_s = 0.0  # for answers, until `_asked_s` or the last look
        # When the timestep without an answer was published, or the last look after that.
        self._asked_s: float | None = None
        self._published_s = 0.0
        self._slot: Slot | None = None
        self._bell = -1  # of observations
        self._held: list[np.ndarray] = []

    def attach(self, slot: Slot, bell: int) -> None:
        """Gives the seat its slot, and the doorbell that tells the learner of timesteps."""
        self._slot, self._bell = slot, bell

    def begin(self, begin: Begin) -> bytes:
        """Returns the frame that tells the stream of its life."""
        if not begin.step:
            self._held = []
        return begin_frame(begin.life, begin.step)

    def arrive(self, codec: StepCodec, body: memoryview) -> None:
        """Takes a `STEP`; raises ProtocolError if it cannot be, ConnectionError if the stream has ended."""
        life, step, arrays = codec.read_step(body)
        # Looked at before the step counts: a timestep that cannot be must not be one of the life's.
        leaves = codec.leaves(arrays)
        arrival = self.end.arrive(life, step)
        if arrival is Arrival.PUBLISH:
            self._publish(leaves)
        elif arrival is Arrival.HOLD:
            # The body's memory is used again.
            self._held = [leaf.copy() for leaf in leaves]
        elif arrival is Arrival.ANSWER:
            if self.client is not None and not self.client.connection.idle:
                raise ProtocolError("answers are asked for again and not read")
            self._answer(codec)

    def _publish(self, leaves: list[np.ndarray]) -> None:
        assert self._slot is not None, "streams begin when there are slots"
        if self._slot.life != self.end.life:
            self._slot.open(self.end.life)
        self._slot.publish(leaves)
        self.published += 1
        self._asked_s = self._published_s = time.monotonic()
        os.eventfd_write(self._bell, 1)

    def answered(self, codec: StepCodec, latencies: collections.deque[float]) -> None:
        """Follows the learner's doorbell: sends the answer, or publishes the timestep that waited for it.

        Raises ConnectionError if the stream has ended.
        """
        slot = self._slot
        assert slot is not None
        if not slot.answered:
            return
        now_s = time.monotonic()
        if self._asked_s is not None:
            latencies.append(now_s - self._published_s)
            self._waited_s += now_s - self._asked_s
            self._asked_s = None
        what = self.end.answered(slot.life, slot.step)
        if what is Arrival.PUBLISH:
            held, self._held = self._held, []
            self._publish(held)
        elif what is Arrival.ANSWER:
            self._answer(codec)

    def waited_since(self, now_s: float) -> float:
        """Returns the seconds since the last call for which timesteps have waited for the learner."""
        waited_s, self._waited_s = self._waited_s, 0.0
        if self._asked_s is not None:
            waited_s, self._asked_s = waited_s + now_s - self._asked_s, now_s
        return waited_s

    def _answer(self, codec: StepCodec) -> None:
        if self.client is not None and self._slot is not None:
            slot = self._slot
            self.client.connection.send(codec.answer(slot.life, slot.step, slot.action))

    def leave(self, now_s: float) -> None:
        """Notes that the stream has ended."""
        self.client = None
        self.end.leave(now_s)


class Seats:
    """All seats of an ingest process, by owner and in order. For one thread."""

    def __init__(self, lives: list[int]) -> None:
        """Makes a seat for each group; its streams begin lives after the one in `lives`."""
        self.all = [Seat(number, life) for number, life in enumerate(lives)]
        self.latencies: collections.deque[float] = collections.deque(maxlen=_LATENCIES)
        # The numbers of the seats that are somebody's; replaced when they change.
        self.present: list[int] = []
        self._of: dict[Owner, Seat] = {}
        self._looked_s, self._stream_s, self._waited_s = time.monotonic(), 0.0, 0.0

    def take(self, owner: Owner, life: int, step: int, now_s: float) -> tuple[Seat, Begin] | None:
        """Seats a stream whose last timestep was `step` of `life`, and returns how it begins.

        It gets the owner's seat, or a free one in a new life; None if all seats are taken.
        """
        if (seat := self._of.get(owner)) is not None:
            return seat, seat.end.enter(life, step, now_s)
        self.expire(now_s)
        seat = next((seat for seat in self.all if seat.owner is None), None)
        if seat is None:
            return None
        self._of[owner], seat.owner = seat, owner
        self._count()
        return seat, seat.end.begin_anew()

    def expire(self, now_s: float) -> None:
        """Frees the seats whose streams have been away for too long."""
        for seat in self.all:
            if seat.owner is not None and seat.client is None and seat.end.expired(now_s):
                del self._of[seat.owner]
                seat.owner, seat.beat = None, None
                self._count()

    def free(self, instance: str) -> list[Client]:
        """Frees the seats of a host that leaves; returns its streams."""
        streams = []
        for owner in [owner for owner in self._of if owner.instance == instance]:
            seat = self._of.pop(owner)
            seat.owner, seat.beat = None, None
            if seat.client is not None:
                streams.append(seat.client)
        self._count()
        return streams

    def times(self, now_s: float) -> tuple[float, float]:
        """Returns the seconds of all streams so far, and those in which they waited for the learner.

        In the others their environments stepped, or messages travelled.
        """
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        for seat in self.all:
            waited_s = seat.waited_since(now_s)
            if seat.client is not None:
                self._stream_s += passed_s
                self._waited_s += min(passed_s, waited_s)
        return self._stream_s, self._waited_s

    def by_host(self) -> collections.Counter[str]:
        """Returns how many seats each host has, by instance."""
        return collections.Counter(owner.instance for owner in self._of)

    def _count(self) -> None:
        self.present = [seat.number for seat in self.all if seat.owner is not None]
