"""The groups of one inference device between their timesteps' arrival and a call that acts on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from seedbed.runtime.inference import Acted, Inference, Unroll
from seedbed.transport.slots import Slot
from seedbed.types import Timestep


@dataclasses.dataclass
class Call:
    """An inference call that was started."""

    shard: Shard
    timestep: Timestep  # staged, [k, n, ...]
    acted: Acted
    groups: list[int]
    incarnations: list[int]


class Shard:
    """One inference device: its groups `[first, first + G)` of the pool and its staging buffers.

    For the inference thread.
    """

    def __init__(self, inference: Inference, first: int, timestep: Timestep) -> None:
        """Allocates staging buffers for timesteps like `timestep`, of one group."""
        self.inference, self.first = inference, first
        self.ready: list[int] = []
        self.in_flight = 0
        # The device may still read a buffer while the next call is staged, so they alternate.
        self.depth = 1 if inference.device.platform == "cpu" else 2
        self._resting: list[int] = []  # groups that have a timestep and wait for newer parameters
        self._incarnation = [-1] * inference.num_groups

        def staging(size: int) -> list[Timestep]:
            return [
                jax.tree.map(lambda leaf: np.zeros((size, *leaf.shape), leaf.dtype), timestep)
                for _ in range(self.depth)
            ]

        self._staging = {size: staging(size) for size in inference.sizes}
        self._turn = 0

    def renew(self) -> None:
        """Makes groups ready that waited for newer parameters, if these have been published."""
        if self.inference.renew():
            self.ready, self._resting = self.ready + self._resting, []

    def begins_life(self, group: int, slot: Slot) -> bool:
        """Notes the life of a group's actor; where it is a new one, drops the half unroll of the old."""
        local = group - self.first
        if slot.incarnation == self._incarnation[local]:
            return False
        self._incarnation[local] = slot.incarnation
        self.inference.restart(local)
        return True

    def arrive(self, group: int, slot: Slot) -> Unroll | None:
        """Takes a group's next timestep; returns the unroll that it completes, if any.

        The group is ready to be acted for, or rests until newer parameters are published.
        """
        local = group - self.first
        unroll = self.inference.arrive(local, slot.timestep)
        if group not in self.ready and group not in self._resting:
            (self.ready if self.inference.may_act(local) else self._resting).append(group)
        return unroll

    def start(self, slots: Sequence[Slot]) -> Call:
        """Stages groups that are ready, as many as one call takes, and starts acting for them."""
        size = self._batch_size()
        groups, self.ready = self.ready[:size], self.ready[size:]
        self._turn = (self._turn + 1) % self.depth
        staging, incarnations = self._staging[size][self._turn], []
        for position, group in enumerate(groups):
            slot = slots[group]
            incarnations.append(slot.incarnation)
            timestep = slot.timestep
            jax.tree.map(lambda to, leaf, at=position: np.copyto(to[at], leaf), staging, timestep)
        acted = self.inference.act(staging, [group - self.first for group in groups])
        self.in_flight += 1
        return Call(self, staging, acted, groups, incarnations)

    def _batch_size(self) -> int:
        """Picks the compiled size for what is ready: never padded on a CPU, where padding costs."""
        sizes, count = self.inference.sizes, len(self.ready)
        if self.inference.device.platform == "cpu":
            return max(size for size in sizes if size <= count)
        return min((size for size in sizes if size >= count), default=sizes[-1])
