"""The host's replay as a whole: what is drawn, how often, and that nothing is lost on the way."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
import unittest.mock
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replay_streams import (
    CORE,
    EXTRAS,
    Recorder,
    Stream,
    experience,
    layout,
    read_all,
    require_whole,
)
from seedbed.replay.host.layout import Layout
from seedbed.replay.host.replay import HostReplay
from seedbed.types import ArraySpec, Discrete, EnvSpec, SeedbedError, StorageError, Timestep

VECTOR = EnvSpec(ArraySpec((2,), "float32"), Discrete(2))


def vector_replay(**changes) -> HostReplay:
    """Makes a replay of one environment with items of one transition."""
    keeps = experience(**{"sequence": 1, "period": 1, **changes})
    return HostReplay(Layout(keeps, VECTOR, (), (), 1, 1), seed=1)


def step(replay: HostReplay, count: int, opens: bool = False) -> None:
    """Appends rows, and publishes the items of all."""
    zero, no = np.zeros(1, np.float32), np.zeros(1, bool)
    for i in range(count):
        first = np.array([opens and i == 0])
        timestep = Timestep(np.zeros((1, 2), np.float32), zero, no, no, first)
        replay.append(0, timestep, np.zeros(1, np.int32), (), ())
    replay.seal_pending()


def two_items(**changes) -> HostReplay:
    replay = vector_replay(**changes)
    step(replay, 3, opens=True)
    replay.restart(0)
    replay.seal_pending()
    return replay


@pytest.mark.parametrize(
    ("alpha", "beta", "weights"),
    [
        (1.0, 1.0, [1.0, 1 / 3]),
        (0.7, 0.3, [1.0, ((0.3**0.7) / (0.9**0.7)) ** 0.3]),
        (0.0, 1.0, [1.0, 1.0]),
        (1.0, 0.0, [1.0, 1.0]),
    ],
)
def test_importance_weights(alpha, beta, weights):  # facts E6
    replay = two_items(priority_exponent=alpha, importance_exponent=beta)
    sample = replay.sample(64)
    replay.update_priorities(np.array([0, 1]), np.array([0, 1]), np.array([0.3, 0.9]))
    sample = replay.sample(64, sample)
    assert set(sample.slots.tolist()) == {0, 1}
    np.testing.assert_allclose(sample.importance, np.array(weights)[sample.slots], rtol=1e-6)


def test_draws_follow_priorities_while_items_come_and_go():
    """1e6 draws, chi-square: statistics of rounds with other items and priorities add up."""
    replay = vector_replay(capacity=64, priority_exponent=0.6)
    random = np.random.default_rng(0)
    step(replay, 200, opens=True)
    sample, total, freedom = replay.make_sample(10_000), 0.0, 0
    for _ in range(100):
        step(replay, 8 * int(random.integers(0, 3)))
        slots = random.integers(0, 64, 20)
        generations = replay._storage.items.generation[slots]
        replay.update_priorities(slots, generations, random.uniform(0.05, 5, 20))
        weights = replay._storage.items.tree.weights
        expected = 10_000 * weights / weights.sum()
        counts = np.bincount(replay.sample(10_000, sample).slots, minlength=64)
        total += float(((counts - expected) ** 2 / expected).sum())
        freedom += 63
    assert 1e-3 < scipy.stats.chi2.sf(total, freedom) < 1 - 1e-3
    replay.check_valid()


def test_draws_are_uniform_without_an_exponent():
    replay = vector_replay(capacity=50)
    step(replay, 200, opens=True)
    replay.update_priorities(np.arange(10), np.arange(10), np.full(10, 100.0))
    counts = np.bincount(replay.sample(50_000).slots, minlength=50)
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


def test_a_priority_for_an_item_that_made_room_is_dropped():
    replay = vector_replay(capacity=12, priority_exponent=1.0)
    step(replay, 8, opens=True)
    sample = replay.sample(32)
    step(replay, 8)
    fresh = sample.generations >= replay.inserted - 12
    assert fresh.any() and not fresh.all()
    before = replay._storage.items.tree.weights.copy()
    replay.update_priorities(
        sample.slots[~fresh], sample.generations[~fresh], np.full((~fresh).sum(), 9)
    )
    np.testing.assert_array_equal(replay._storage.items.tree.weights, before)
    replay.update_priorities(
        sample.slots[fresh], sample.generations[fresh], np.full(fresh.sum(), 9.0)
    )
    assert (replay._storage.items.tree.weights[sample.slots[fresh]] == 9).all()


def test_new_items_get_the_largest_priority_so_far():
    replay = vector_replay(priority_exponent=1.0)
    step(replay, 8, opens=True)
    assert set(replay._storage.items.tree.weights[:7]) == {1.0}
    replay.update_priorities(np.array([2]), np.array([2]), np.array([5.0]))
    replay.update_priorities(np.array([2]), np.array([2]), np.array([0.5]))
    step(replay, 8)
    assert set(replay._storage.items.tree.weights[7:15]) == {5.0}


@pytest.mark.parametrize("priority", [0.0, -1.0, np.nan, np.inf])
def test_a_priority_that_cannot_be_is_refused(priority):
    replay = two_items(priority_exponent=1.0)
    with pytest.raises(SeedbedError, match=f"priority {priority}"):
        replay.update_priorities(np.array([0]), np.array([0]), np.array([priority]))


def test_priorities_are_not_used_where_all_items_are_drawn_alike():
    shape = layout(experience(priority_exponent=0.0))
    replay = HostReplay(shape, priorities=lambda timesteps, extras: np.zeros(8))
    recorder = Recorder(replay, 40)
    for _ in range(60):
        recorder.append(0)
    replay.seal_pending()
    replay.update_priorities(np.array([0]), np.array([0]), np.array([0.0]))
    assert set(read_all(replay)[1]) == {1.0}


def test_drawing_keeps_to_the_ratio():
    replay = vector_replay(ratio=2.0, min_size=16, batch=4)
    assert replay.can_insert() and not replay.can_sample(4)
    step(replay, 16, opens=True)
    assert replay.items == 15 and replay.can_insert() and not replay.can_sample(4)
    random, inserted, sampled = np.random.default_rng(0), 15, 0
    for _ in range(2000):
        assert replay.can_insert() or replay.can_sample(4), "neither may go on"
        if random.random() < 0.5 and replay.can_insert():
            step(replay, 8)
            inserted += 8
        elif replay.can_sample(4):
            replay.sample(4)
            sampled += 4
        if inserted >= 24:
            assert 0 <= (replay.inserted - 16) * 2 - replay.sampled <= 8 * 4 + 2 * 8
    assert (replay.inserted, replay.sampled) == (inserted, sampled) and sampled > 1000


def test_waiting_ends_with_stop_or_with_what_was_waited_for():
    replay = vector_replay()
    assert not replay.wait_until(lambda: replay.can_sample(4), lambda: True)
    thread = threading.Thread(target=step, args=(replay, 16, True))
    thread.start()
    assert replay.wait_until(lambda: replay.can_sample(4), lambda: False)
    thread.join()


def test_an_empty_replay_draws_nothing():
    with pytest.raises(SeedbedError, match="0 items"):
        vector_replay().sample(4)


@pytest.mark.parametrize(
    "wrong", [{"period": 0}, {"sequence": 0}, {"capacity": 0}, {"min_size": 200}]
)
def test_a_replay_that_could_not_be_learned_from_is_refused(wrong):
    with pytest.raises(SeedbedError, match=next(iter(wrong))):
        vector_replay(**wrong)


@pytest.mark.slow
@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_segments_are_used_again_and_no_row_is_misplaced(compress, kept, tmp_path):
    keeps = experience(sequence=7, period=5, burn_in=3, capacity=600)
    shape = layout(keeps, groups=2, size=8, compress=compress, frame_stack=2)
    replay = HostReplay(shape, tmp_path if kept else None)
    recorder = Recorder(replay, 40)
    sample = replay.make_sample(16)
    rows, opened = replay._storage.rows, set()
    for i in range(4000):
        recorder.append(i % 2)
        replay.seal_pending()
        opened.add((rows.current, int(rows.opened[rows.current])))
        if i % 40 == 39:
            require_whole(replay, replay.sample(16, sample), 40)
    replay.check_valid()
    assert len(opened) > shape.num_segments + 2
    assert replay.items == 600
    if kept:
        live = {file for s in replay._storage.segments.values() for file in s.arena.files}
        assert {path.name for path in tmp_path.iterdir()} == live - {None}


@pytest.mark.slow
def test_a_group_that_stalls_gives_way_and_comes_back():
    keeps = experience(sequence=7, period=5, burn_in=3, capacity=1200)
    shape = layout(keeps, groups=2, size=8, frame_stack=2)
    shape.__dict__["num_segments"] = 3  # too few for the capacity
    replay = HostReplay(shape)
    recorder = Recorder(replay, 10)
    for _ in range(21):
        recorder.append(0)
    for _ in range(1700):
        recorder.append(1)
    replay.check_valid()
    kept = replay._storage.items.windows.env[replay._storage.items.tree.weights > 0]
    assert kept.size > 500 and (kept >= 8).all()
    for _ in range(40):
        recorder.append(0)
    replay.seal_pending()
    replay.check_valid()
    sample, _ = read_all(replay)
    require_whole(replay, sample, 10)
    where = sample.timesteps.observation["where"][replay.layout.context]
    assert (where[:, 0] < 8).any() and where[where[:, 0] < 8, 1].min() > 2


@pytest.mark.slow
def test_one_thread_appends_while_another_draws():
    keeps = experience(sequence=7, period=5, burn_in=3, capacity=600, ratio=1.0, min_size=50)
    replay = HostReplay(layout(keeps, groups=2, size=8))
    done = threading.Event()
    recorder = Recorder(replay, 40)

    def insert() -> None:
        try:
            for i in range(3000):
                recorder.append(i % 2)
                if i % 700 == 650:
                    recorder.restart(i % 2)
        finally:
            done.set()

    thread = threading.Thread(target=insert)
    thread.start()
    sample = replay.make_sample(16)
    while not done.is_set() or replay.pending:
        replay.seal_pending()
        if replay.items:
            require_whole(replay, replay.sample(16, sample), 40)
            replay.update_priorities(sample.slots, sample.generations, np.ones(16))
    thread.join()
    replay.check_valid()
    assert replay.items == 600


@pytest.mark.parametrize("saves", [False, True])
def test_a_priority_that_fails_loses_nothing_and_leaves_no_hole(saves, tmp_path):
    keeps = experience(sequence=6, period=4, burn_in=5, capacity=900, priority_exponent=0.7)
    broken = threading.Event()

    def priorities(timesteps: Timestep, extras: dict) -> np.ndarray:
        return np.full(extras["q"].shape[1], 0.0 if broken.is_set() else 1.0)

    replay = HostReplay(layout(keeps), tmp_path, 3, priorities)
    undisturbed = HostReplay(layout(keeps), None, 3, priorities)
    recorders = [Recorder(each, 40) for each in (replay, undisturbed)]

    def append(rows: int) -> None:
        for i in range(rows):
            for recorder in recorders:
                recorder.append(i % 2)

    append(100)
    replay.seal_pending()
    append(48)  # three chunks of each group wait
    broken.set()
    before = replay.pending
    for name in ("1", "2"):  # the failure is told again, not swallowed
        with pytest.raises(SeedbedError, match="priority 0.0"):
            replay.save(name) if saves else replay.seal_pending()
        replay.check_valid()
    assert replay.pending == before
    if saves:
        restored = HostReplay(layout(keeps), tmp_path)
        assert restored.restore(["1", "2"]) == "2"
        np.testing.assert_equal(read_all(restored), read_all(replay))
        restored.check_valid()
    broken.clear()
    append(100)
    for each in (replay, undisturbed):
        each.seal_pending()
        each.check_valid()
    np.testing.assert_equal(read_all(replay), read_all(undisturbed))
    require_whole(replay, read_all(replay)[0], 40)


def test_statistics():
    replay = HostReplay(layout(experience(), groups=1, size=2))
    assert replay.stats()["compression"] == 1.0
    stream = Stream(0, 2, 30)
    stream.envs = np.array([1, 3])  # whose images compress
    for _ in range(64):
        replay.append(0, *stream.advance())
    replay.seal_pending()
    stats = replay.stats()
    assert stats["items"] == replay.items == stats["inserted"] > 0
    assert stats["compression"] > 10
    assert 0 < stats["bytes_per_frame"] * 128 == stats["bytes"]


class Machine(RuleBasedStateMachine):
    """Random use against what is expected to be there; the folder outlives the replay.

    The disk may be full, and the agent may give priorities that cannot be.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.saved: list[tuple[str, dict]] = []
        self.longest = 17
        self.starts = self.saves = 0
        self.full = self.broken = False
        allocate = os.posix_fallocate

        def fallocate(descriptor: int, offset: int, size: int) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            allocate(descriptor, offset, size)

        self.patch = unittest.mock.patch.object(os, "posix_fallocate", fallocate)
        self.patch.start()
        self.start()

    def first_priorities(self, timesteps: Timestep, extras: dict) -> np.ndarray:
        largest = self.replay._storage.items.largest
        return np.full(extras["q"].shape[1], np.nan if self.broken else largest)

    def start(self) -> None:
        keeps = experience(
            sequence=6,
            period=4,
            burn_in=5,
            capacity=150,
            priority_exponent=0.7,
            importance_exponent=0.5,
        )
        shape = layout(keeps, frame_stack=3)
        self.replay = HostReplay(shape, self.folder, 3, self.first_priorities)
        self.recorder = Recorder(self.replay, self.longest)
        self.priorities: dict[int, float] = {}
        self.largest = 1.0
        self.starts += 1

    def account(self) -> None:
        """Gives the items that appeared the priority that they should have."""
        self.replay.seal_pending()
        inserted = self.replay.inserted
        for generation in range(max(self.priorities, default=-1) + 1, inserted):
            self.priorities[generation] = self.largest

    def counts(self) -> tuple[float, ...]:
        return self.replay.inserted, self.replay.sampled, self.replay._storage.items.limiter.owed

    @rule(rows=st.integers(1, 60), group=st.integers(0, 1))
    def append(self, rows, group):
        for _ in range(rows):
            self.recorder.append(group)
        self.account()

    @rule(rows=st.integers(100, 700))
    def append_many(self, rows):
        for i in range(rows):
            self.recorder.append(i % 2)
        self.account()

    @rule(group=st.integers(0, 1))
    def restart(self, group):
        self.recorder.restart(group)
        self.account()

    @precondition(lambda self: self.replay.items)
    @rule(batch=st.integers(1, 20), seed=st.integers(0, 99))
    def sample(self, batch, seed):
        sample = self.replay.sample(batch)
        require_whole(self.replay, sample, self.longest)
        new = np.random.default_rng(seed).uniform(0.1, 3, batch)
        stale = sample.generations - 150
        self.replay.update_priorities(sample.slots, stale, new * 100)
        self.replay.update_priorities(sample.slots, sample.generations, new)
        for generation, priority in zip(sample.generations.tolist(), new, strict=True):
            self.priorities[generation] = float(priority)
        self.largest = max(self.largest, float(new.max()))

    @rule(full=st.booleans())
    def fill_the_disk(self, full):
        self.full = full

    @rule(rows=st.integers(1, 32), group=st.integers(0, 1), saves=st.booleans())
    def fail(self, rows, group, saves):
        """The agent's priorities cannot be: what it is asked for again is all there."""
        for _ in range(rows):
            self.recorder.append(group)
        self.broken, before = True, self.replay.inserted
        if saves:
            self.save()
        with contextlib.suppress(SeedbedError):  # unless no item was complete
            self.replay.seal_pending()
        self.broken = False
        assert self.replay.inserted == before
        self.valid()
        self.account()

    @rule()
    def save(self):
        name = str(self.saves)
        self.saves += 1
        try:
            self.replay.save(name)
        except SeedbedError as error:
            stored = not isinstance(error, StorageError)
            assert self.broken if stored else self.full
            if not stored or isinstance(error.__context__, StorageError):
                return
        if not self.broken:
            self.account()
        random = np.random.default_rng()
        random.bit_generator.state = self.replay._random.bit_generator.state
        tree = self.replay._storage.items.tree
        state = {
            "priorities": dict(self.priorities),
            "largest": self.largest,
            "slots": tree.sample(random.random(8)) if self.replay.items else None,
            "contents": read_all(self.replay),
            "counts": self.counts(),
        }
        self.saved.append((name, state))

    @precondition(lambda self: self.saved)
    @rule(back=st.integers(0, 1))
    def restore(self, back):
        del self.saved[:-2]
        name, state = self.saved[-1 - min(back, len(self.saved) - 1)]
        self.start()
        assert self.replay.restore([name]) == name
        self.saved = [(name, state)]
        self.priorities, self.largest = dict(state["priorities"]), state["largest"]
        assert self.counts() == state["counts"]
        (sample, weights), (expected, expected_weights) = read_all(self.replay), state["contents"]
        np.testing.assert_array_equal(weights, expected_weights)
        np.testing.assert_array_equal(sample.generations, expected.generations)
        np.testing.assert_array_equal(
            sample.timesteps.observation["image"], expected.timesteps.observation["image"]
        )
        np.testing.assert_array_equal(sample.core[0], expected.core[0])
        for group in range(2):  # the actors begin anew; episodes of before do not come again
            self.recorder.streams[group].episode[:] = 20 * self.starts
        if state["slots"] is not None:
            np.testing.assert_array_equal(self.replay.sample(8).slots, state["slots"])

    @invariant()
    def valid(self):
        self.replay.check_valid()
        items = self.replay._storage.items
        live = np.flatnonzero(items.tree.weights > 0)
        generations = items.generation[live]
        expected = [self.priorities[g] ** 0.7 for g in generations.tolist()]
        np.testing.assert_allclose(items.tree.weights[live], expected, rtol=1e-12)

    def teardown(self):
        self.patch.stop()
        shutil.rmtree(self.folder)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)


def test_templates_are_what_acting_gives():
    """The helper's own rows have the leaves that its templates promise."""
    _, _, extras, core = Stream(0, 3, 5).advance()
    assert extras["q"].shape[1:] == EXTRAS["q"].shape
    assert [leaf.dtype for leaf in core] == [leaf.dtype for leaf in CORE]
