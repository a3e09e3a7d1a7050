"""A pool whose peers a test writes itself."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from seedbed import trees
from seedbed.actors.pool import ActorPool
from seedbed.actors.slots import Slot, SlotLayout
from seedbed.types import ArraySpec, Discrete, EnvSpec, SeedbedError, Timestep

SPEC = EnvSpec(ArraySpec((), "int32"), Discrete(5))


TIMEOUT_S = 80.0


class Judge:
    """A policy that notes what it is told, and ends the run only if it is strict."""

    def __init__(self, peer: Fake, strict: bool) -> None:
        self.ends: list[str] = []
        self.silences: list[float] = []
        self._peer, self._strict = peer, strict

    def silent(self, silent_s: float) -> None:
        self.silences.append(silent_s)

    def ended(self, how: str) -> None:
        self.ends.append(how)
        self._peer.close()
        if self._strict:
            raise SeedbedError(f"the peer {how}")


class Fake:
    """A peer whose slots the test writes."""

    def __init__(self, pool: ActorPool, groups: range, strict: bool = False) -> None:
        self.groups, self.spec, self.pid = groups, SPEC, os.getpid()
        self.present, self.beats = groups, 0
        self.slots: list[Slot] = []
        self.bells: list[tuple[int, int]] = []
        self.wire = os.eventfd(0, os.EFD_NONBLOCK)
        self.descriptors: dict[int, Callable[[], None]] = {self.wire: self._read}
        self.lives, self.judge = pool.assign_lives(groups), Judge(self, strict)
        self._end: str | None = None
        self._cpu_seconds, self._hangs_up = 0.0, False
        pool.attach(self, self.judge)

    def share(self, layout: SlotLayout) -> None:
        self.bells = [(os.eventfd(0), os.eventfd(0)) for _ in self.groups]
        self.slots = [Slot(layout, bytearray(layout.size)) for _ in self.groups]
        for slot, life in zip(self.slots, self.lives, strict=True):
            slot.open(life)

    def _read(self) -> None:
        os.eventfd_read(self.wire)
        if self._hangs_up:
            self.descriptors = {}

    def publish(self, at: int, value: int) -> None:
        """Publishes a timestep of the group at a position among its groups, and rings."""
        flag = np.zeros(2, bool)
        observation = np.full(2, value, np.int32)
        timestep = Timestep(observation, np.zeros(2, np.float32), flag, flag, flag)
        self.slots[at].publish(trees.leaves(timestep))
        self.ring(at)

    def ring(self, at: int) -> None:
        os.eventfd_write(self.bells[at][0], 1)

    def hang_up(self) -> None:
        self._hangs_up = True
        os.eventfd_write(self.wire, 1)

    def end(self, how: str) -> None:
        self._cpu_seconds, self._end = 2.0, how
        os.eventfd_write(self.wire, 1)

    def ended(self) -> str | None:
        return self._end

    def cpu_seconds(self) -> float:
        return self._cpu_seconds

    def leave(self, patience_s: float = 1.0) -> None:
        """Ends at once anyway."""

    def gone(self) -> bool:
        return True

    def close(self) -> None:
        if self.wire >= 0:
            for fd in (self.wire, *(fd for pair in self.bells for fd in pair)):
                os.close(fd)
            self.wire = -1
