"""Groups of environments whose timesteps were played before: they answer at once, and take no time."""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from seedbed import trees
from seedbed.actors.pool import ActorPool
from seedbed.actors.slots import Slot, SlotLayout
from seedbed.envs.host.contract import HostEnvConfig
from seedbed.plan.stepping import random_actions
from seedbed.types import EnvSpec, Timestep

PLAYED = 200
"""Timesteps of a group, which are played over and over."""
APART = 23
"""Timesteps by which groups are apart in them."""


def clocks() -> np.ndarray:
    """Reads the CPU time of this process, and the time; `[2]` seconds."""
    return np.array([time.process_time(), time.perf_counter()])


class PlayedPeer:
    """A peer whose timesteps were played before; an `actors.peers.Peer`. For one thread."""

    def __init__(self, pool: ActorPool, env: HostEnvConfig) -> None:
        """Plays random actions in a group of environments, and attaches itself to the pool."""
        host, rng = env.make(pool.group_size, 0), np.random.default_rng(0)
        timestep, self.steps = host.reset(), list[list[np.ndarray]]()
        for _ in range(PLAYED):
            self.steps.append([np.array(leaf) for leaf in trees.leaves(timestep)])
            timestep = host.step(
                random_actions(host.spec, timestep.observation, pool.group_size, rng)
            )
        self.spec: EnvSpec = host.spec
        host.close()
        self.groups = range(pool.num_groups)
        self.present: Sequence[int] = self.groups
        self.beats, self.pid = 0, os.getpid()
        self.slots: list[Slot] = []
        self.bells: list[tuple[int, int]] = []
        # A peer without one has hung up.
        self._wire = os.eventfd(0)
        self.descriptors: Mapping[int, Callable[[], None]] = {self._wire: self.leave}
        self._lives = pool.assign_lives(self.groups)
        pool.attach(self, self)

    def share(self, layout: SlotLayout) -> None:
        """Makes slots and doorbells."""
        self.bells = [(os.eventfd(0), os.eventfd(0)) for _ in self.groups]
        self.slots = [Slot(layout, bytearray(layout.size)) for _ in self.groups]
        for slot, life in zip(self.slots, self._lives, strict=True):
            slot.open(life)

    def publish(self, group: int) -> None:
        """Publishes a group's next timestep, and rings."""
        slot = self.slots[group]
        slot.publish(self.steps[(slot.step + APART * group) % PLAYED])
        os.eventfd_write(self.bells[group][0], 1)

    def silent(self, silent_s: float) -> None:
        """Ignores silence: timesteps that were played come at once."""

    def ended(self, how: str = "") -> None:
        """Returns None: it lives."""

    def cpu_seconds(self) -> float:
        """Returns 0: stepping was done before."""
        return 0.0

    def leave(self, patience_s: float = 1.0) -> None:
        """Ignores a hang-up: no process is at the other end."""

    def gone(self) -> bool:
        """Returns True: there is no process."""
        return True

    def close(self) -> None:
        """Closes the doorbells."""
        bells, self.bells = self.bells, []
        for fd in (fd for pair in bells for fd in pair):
            os.close(fd)
        if self._wire >= 0:
            os.close(self._wire)
            self._wire = -1


class PlayedPool(ActorPool):
    """A pool in which as many groups as wished have a timestep at each turn of the inference thread."""

    def __init__(self, env: HostEnvConfig, groups: int, size: int) -> None:
        super().__init__(num_groups=groups, group_size=size, timeout_s=3600.0)
        self.peer = PlayedPeer(self, env)
        self.wished = 1
        self.between: Callable[[], None] = lambda: None  # is called between turns
        self.rest_s = 0.0  # before each turn
        self.spent: list[np.ndarray] = []  # of each turn
        self._idle = collections.deque(range(groups))
        self._began: np.ndarray | None = None

    def played(self) -> list[Timestep]:
        """Returns the timesteps of a group, leaves `[n, ...]`."""
        form = trees.map(lambda leaf: 0, self.slots[0].timestep)
        return [trees.unflatten(form, leaves) for leaves in self.peer.steps]

    def poll(self, timeout_s: float) -> list[int]:
        """Begins another turn if all groups have their actions."""
        if len(self._idle) == self.num_groups:
            if self._began is not None:
                self.spent.append(clocks() - self._began)
            self.between()
            if self.rest_s:
                time.sleep(self.rest_s)
            assert self.layout is not None
            for _ in range(self.wished):
                self.peer.publish(self._idle.popleft())
            self._began = clocks()
        return super().poll(timeout_s)

    def reply(self, group: int) -> bool:
        """Notes that the group has its action."""
        self._idle.append(group)
        return super().reply(group)
