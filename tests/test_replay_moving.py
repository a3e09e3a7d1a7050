"""Streams that move from replays into others: rows, weights and order stay."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from replay_streams import Recorder, experience, layout, read_all, require_whole
from seedbed.replay.host.layout import Layout
from seedbed.replay.host.replay import HostReplay

LONGEST = 17
KEEPS = experience(
    sequence=6, period=4, burn_in=5, capacity=150, priority_exponent=0.7, importance_exponent=0.5
)


def filled(rows: int, seed: int, **changes) -> HostReplay:
    replay = HostReplay(layout(KEEPS, **changes), None, seed)
    recorder = Recorder(replay, LONGEST)
    groups = replay.layout.num_groups
    for i in range(rows):
        recorder.append(i % groups)
    replay.seal_pending()
    sample = replay.sample(30)
    rng = np.random.default_rng(seed)
    replay.update_priorities(sample.slots, sample.generations, rng.uniform(0.1, 4, 30))
    return replay


def items_of(replay: HostReplay) -> list[tuple[tuple[int, ...], float]]:
    """Returns what names each item, with its weight, the oldest first."""
    sample, weights = read_all(replay)
    where = sample.timesteps.observation["where"][replay.layout.context]
    names = [tuple(map(int, row)) for row in where]
    return list(zip(names, np.round(weights, 9).tolist(), strict=True))


def larger(shape: Layout, capacity: int) -> Layout:
    keeps = dataclasses.replace(shape.experience, capacity=capacity)
    return dataclasses.replace(shape, experience=keeps)


@pytest.mark.parametrize("stack", [1, 3])
def test_two_replays_become_one(tmp_path, stack):
    sources = [filled(150, 1, frame_stack=stack), filled(90, 2, frame_stack=stack)]
    before = sorted(item for source in sources for item in items_of(source))
    target = HostReplay(larger(layout(KEEPS, groups=4, frame_stack=stack), 300), tmp_path)
    moved = target.take_over([(sources[0], {0: 0, 1: 1}), (sources[1], {0: 2, 1: 3})])
    target.check_valid()
    assert moved == target.items == len(before)
    assert sorted(items_of(target)) == before
    sample, _ = read_all(target)
    require_whole(target, sample, LONGEST)
    # Each replay's items are in its order.
    owners = target._storage.items.read(sample.slots).env // target.layout.group_size
    for source, groups in zip(sources, ((0, 1), (2, 3)), strict=True):
        moved_here = zip(items_of(target), owners, strict=True)
        assert [item for item, owner in moved_here if owner in groups] == items_of(source)
    target.save("1")
    again = HostReplay(target.layout, tmp_path)
    assert again.restore(["1"]) == "1"
    assert items_of(again) == items_of(target)
    again.check_valid()


def test_one_replay_becomes_two():
    source = filled(200, 3, groups=3)
    parts = [HostReplay(layout(KEEPS, groups=2)) for _ in range(2)]
    moved = [parts[0].take_over([(source, {0: 0, 2: 1})]), parts[1].take_over([(source, {1: 0})])]
    assert sum(moved) == source.items
    assert sorted(items_of(parts[0]) + items_of(parts[1])) == sorted(items_of(source))
    for part in parts:
        part.check_valid()
        # The order is that of before.
        names = [name for name, _ in items_of(part)]
        assert names == [name for name, _ in items_of(source) if name in set(names)]
        sample, _ = read_all(part)
        require_whole(part, sample, LONGEST)


def test_the_newest_items_stay_where_there_is_too_little_room():
    source = filled(200, 3)
    target = HostReplay(larger(layout(KEEPS), 20))
    target.take_over([(source, {0: 0, 1: 1})])
    target.check_valid()
    assert items_of(target) == items_of(source)[-20:]


def test_a_replay_goes_on_after_it_has_taken_over():
    source = filled(200, 3)
    target = HostReplay(layout(KEEPS))
    target.take_over([(source, {0: 0, 1: 1})])
    recorder = Recorder(target, LONGEST)
    for i in range(300):
        recorder.append(i % 2)
        if i % 50 == 0:
            target.seal_pending()
            target.check_valid()
    target.seal_pending()
    target.check_valid()
    sample, _ = read_all(target)
    require_whole(target, sample, LONGEST)
    assert target.items == 150
