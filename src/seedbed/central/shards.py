"""The groups of one inference device, from the arrival of their timesteps to the call that acts on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from seedbed.actors.slots import Slot
from seedbed.central.inference import Acted, Inference, Unroll
from seedbed.types import Timestep


@dataclasses.dataclass
class Call:
    """An inference call that was started, for the inference thread."""

    shard: Shard
    timestep: Timestep  # [k, n, ...] the staging buffer; rows beyond `groups` are padding
    acted: Acted
    groups: list[int]  # numbers in the pool
    incarnations: list[int]  # of the groups' actors when their timesteps were staged


class Shard:
    """One inference device, with its groups `[first, first + G)` of the pool and its staging buffers.

    After construction, only the inference thread uses it. Group numbers are those of the pool.
    """

    def __init__(self, inference: Inference, first: int, timestep: Timestep) -> None:
        """Allocates staging buffers. `timestep` is a template: a timestep of one group, `[n, ...]`."""
        self.inference, self.first = inference, first
        # Groups that have a timestep to act on.
        self.ready: list[int] = []
        # Calls that were started and are not finished; at most `depth`.
        self.in_flight = 0
        # The device may still read a buffer while the next call is staged, so two buffers alternate.
        self.depth = 1 if inference.device.platform == "cpu" else 2
        # Groups that have a timestep and wait for newer parameters.
        self._resting: list[int] = []
        self._incarnation = [-1] * inference.num_groups

        def staging(size: int) -> list[Timestep]:
            return [
                jax.tree.map(lambda leaf: np.zeros((size, *leaf.shape), leaf.dtype), timestep)
                for _ in range(self.depth)
            ]

        self._staging = {size: staging(size) for size in inference.sizes}
        self._turn = 0

    def renew(self) -> None:
        """Makes resting groups ready if newer parameters were published. For the inference thread only."""
        if self.inference.renew():
            self.ready, self._resting = self.ready + self._resting, []

    def begins_life(self, group: int, slot: Slot) -> bool:
        """Returns whether a group's actor is new; if so, drops the open unroll of the one before.

        Call for every timestep, before `arrive`, from the inference thread only.
        """
        local = group - self.first
        if slot.incarnation == self._incarnation[local]:
            return False
        self._incarnation[local] = slot.incarnation
        self.inference.restart(local)
        return True

    def arrive(self, group: int, slot: Slot) -> Unroll | None:
        """Takes a group's next timestep; returns the unroll that it completes, or None.

        With replay, this is always None. The group becomes ready, or rests until newer parameters are
        published. Call from the inference thread only.
        """
        local = group - self.first
        unroll = self.inference.arrive(local, slot.timestep)
        if group not in self.ready and group not in self._resting:
            (self.ready if self.inference.may_act(local) else self._resting).append(group)
        return unroll

    def start(self, slots: Sequence[Slot]) -> Call:
        """Stages as many ready groups as one call takes, and starts acting for them.

        At least one group must be ready, and `in_flight` must be below `depth`. The caller lowers `in_flight`
        when the call is finished. Call from the inference thread only.
        """
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
        """Returns the compiled size for the ready groups. On a CPU, where padding costs, it never pads."""
        sizes, count = self.inference.sizes, len(self.ready)
        if self.inference.device.platform == "cpu":
            return max(size for size in sizes if size <= count)
        return min((size for size in sizes if size >= count), default=sizes[-1])
