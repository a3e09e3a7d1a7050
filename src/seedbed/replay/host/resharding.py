"""Moves whole streams from saved replays into another, as a run goes on with another number of shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from seedbed.replay.host.items import Windows
from seedbed.replay.host.storage import ReplayStorage
from seedbed.replay.host.writing import ReplayWriter

# Items that are published together.
_BATCH = 256


@dataclasses.dataclass(eq=False)
class _Share:
    """The items of some groups of a replay, and the places of their rows in the new one."""

    storage: ReplayStorage
    slots: np.ndarray  # the oldest first
    ages: np.ndarray  # from 0, the oldest that was there, to 1
    windows: Windows
    groups: np.ndarray  # of the items in the new replay
    firsts: np.ndarray  # [I, M] first chunks of the sets that their rows are in
    sets: dict[int, int] = dataclasses.field(default_factory=dict)  # new first chunks by old ones

    @property
    def size(self) -> int:
        """The number of environments of a group."""
        return self.storage.layout.group_size


def move_streams(
    sources: Sequence[tuple[ReplayStorage, Mapping[int, int]]],
    target: ReplayStorage,
    writer: ReplayWriter,
) -> int:
    """Copies all items of some groups, with their rows and weights; returns how many there were.

    With each source come the groups that are copied, and their groups in the new replay. The oldest items
    come first, and stay the oldest. The layouts must be alike but for capacity and the number of groups.
    Call before other threads use the replays.
    """
    shares = [_share(storage, groups) for storage, groups in sources]
    order = sorted(
        (
            (age, number, at)
            for number, share in enumerate(shares)
            for at, age in enumerate(share.ages)
        ),
    )
    last = {
        (number, int(first)): position
        for position, (_, number, at) in enumerate(order)
        for first in shares[number].firsts[at]
    }
    with writer.sealing:
        for start in range(0, len(order), _BATCH):
            part = order[start : start + _BATCH]
            for number, share in enumerate(shares):
                mine = np.array([at for _, each, at in part if each == number], np.int64)
                if len(mine):
                    _publish(share, mine, target, writer)
            ended = [
                (number, first)
                for number, share in enumerate(shares)
                for first in share.sets
                if last[number, first] < start + _BATCH
            ]
            with target.lock:
                writer.release([shares[number].sets.pop(first) for number, first in ended])
    return len(order)


def _share(storage: ReplayStorage, groups: Mapping[int, int]) -> _Share:
    items, size = storage.items, storage.layout.group_size
    slots = np.flatnonzero(items.tree.weights > 0)
    generation = items.generation[slots]
    slots = slots[np.argsort(generation)]
    windows = items.read(slots)
    oldest = generation.min(initial=items.inserted)
    ages = (items.generation[slots] - oldest) / max(1, items.inserted - oldest)
    chosen = np.isin(windows.env // size, list(groups))
    windows = Windows(*(leaf[chosen] for leaf in windows))
    renamed = np.array([groups[group] for group in (windows.env // size).tolist()], np.int64)
    firsts = windows.chunks - (windows.env % size)[:, None]
    return _Share(storage, slots[chosen], ages[chosen], windows, renamed, firsts)


def _publish(share: _Share, mine: np.ndarray, target: ReplayStorage, writer: ReplayWriter) -> None:
    """Copies the sets of some items that were not copied yet, and publishes the items."""
    firsts = share.firsts[mine]
    for first in np.unique(firsts).tolist():
        if first not in share.sets:
            share.sets[first] = place = writer.allocate()
            with target.lock:
                views = target.records.open(place)
            for view, leaf in zip(views, share.storage.records.copy(first), strict=True):
                view[:] = leaf
            target.records.seal([place], [views])
    places = np.array([share.sets[first] for first in firsts.ravel().tolist()], np.int64)
    env = share.windows.env[mine] % share.size
    windows = share.windows._replace(
        chunks=places.reshape(firsts.shape) + env[:, None],
        offset=share.windows.offset[mine],
        front=share.windows.front[mine],
        length=share.windows.length[mine],
        core=np.zeros(len(mine), np.int64),
        env=share.groups[mine] * share.size + env,
    )
    cores = [leaf.zeros(len(mine)) for leaf in share.storage.layout.core_leaves]
    share.storage.read_cores(Windows(*(leaf[mine] for leaf in share.windows)), cores)
    exponent = target.layout.experience.priority_exponent
    weights = share.storage.items.tree.weights[share.slots[mine]]
    target.publish(windows, cores, weights ** (1 / exponent) if exponent else weights)
