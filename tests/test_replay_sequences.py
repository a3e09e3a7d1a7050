"""Which items a replay finds in streams, and that their rows are those that were written."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_streams import Recorder, experience, layout, read_all, require_whole, rows_of
from seedbed.replay.host.replay import HostReplay
from seedbed.types import trajectory_masks


def feed(recorder: Recorder, random: np.random.Generator, rows: int, restart: float) -> None:
    groups = len(recorder.streams)
    for _ in range(rows):
        group = int(random.integers(groups))
        if random.random() < restart:
            recorder.restart(group)
        recorder.append(group)
    for group in range(groups):
        recorder.restart(group)
    recorder.replay.seal_pending()


@pytest.mark.slow
@given(
    seed=st.integers(0, 10**6),
    sequence=st.integers(1, 21),
    period=st.integers(1, 19),
    burn_in=st.integers(0, 11),
    frame_stack=st.integers(1, 4),
    longest=st.sampled_from([2, 5, 12, 50]),
    rows=st.integers(1, 150),
    compress=st.booleans(),
    restart=st.sampled_from([0.0, 0.02, 0.2]),
)
@settings(max_examples=60, deadline=None)
def test_items_are_those_of_the_slow_account(
    seed, sequence, period, burn_in, frame_stack, longest, rows, compress, restart
):
    keeps = experience(sequence=sequence, period=period, burn_in=burn_in, capacity=2000)
    shape = layout(keeps, frame_stack=frame_stack, compress=compress)
    replay = HostReplay(shape)
    recorder = Recorder(replay, longest)
    feed(recorder, np.random.default_rng(seed), rows, restart)
    replay.check_valid()
    sample, _ = read_all(replay)
    found = [rows_of(sample, column) for column in range(len(sample.slots))]
    assert Counter((env, tuple(item)) for env, item in found) == Counter(
        (env, tuple(item)) for env, item in recorder.expected
    )
    require_whole(replay, sample, longest)


def test_rows_into_padding_are_no_transitions():
    replay = HostReplay(layout(experience(sequence=8, period=3, burn_in=4, capacity=500)))
    recorder = Recorder(replay, 7)
    feed(recorder, np.random.default_rng(1), 100, 0.05)
    sample, _ = read_all(replay)
    masks = trajectory_masks(sample.timesteps, 0.9, 0.9)
    where = sample.timesteps.observation["where"]
    same = (where[1:, :, :2] == where[:-1, :, :2]).all(-1)
    follows = where[1:, :, 2] == where[:-1, :, 2] + 1
    np.testing.assert_array_equal(masks.valid, same & follows)
    assert masks.valid.any() and not masks.valid.all()


@pytest.mark.parametrize("size", [1, 300])
def test_groups_of_any_size(size):
    replay = HostReplay(layout(experience(capacity=3000), groups=1, size=size))
    recorder = Recorder(replay, 20)
    feed(recorder, np.random.default_rng(2), 30, 0.0)
    replay.check_valid()
    sample, _ = read_all(replay)
    assert len(sample.slots) == min(3000, len(recorder.expected))
    require_whole(replay, sample, 20)


def test_initial_priorities_see_the_items_in_batches_of_one_size():
    sizes, keeps = set(), experience(sequence=5, period=2, burn_in=2, priority_exponent=1.0)

    def priorities(timesteps, extras):
        assert timesteps.observation == ()
        assert timesteps.reward.shape[0] == keeps.steps == extras["q"].shape[0]
        sizes.add(timesteps.reward.shape[1])
        valid = ~timesteps.first[1:]
        return 1 + (extras["q"][:-1, :, 0] * valid).sum(axis=0)

    replay = HostReplay(layout(keeps), priorities=priorities)
    recorder = Recorder(replay, 12)
    feed(recorder, np.random.default_rng(3), 90, 0.02)
    sample, weights = read_all(replay)
    valid = ~sample.timesteps.first[1:]
    expected = 1 + (sample.extras["q"][:-1, :, 0] * valid).sum(axis=0)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert len(sizes) == 1
