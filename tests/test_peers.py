"""The actor pool against peers that are no processes: lives, ends and absence."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from fake_pool import SPEC, TIMEOUT_S, Fake
from seedbed import trees
from seedbed.actors.pool import ActorPool
from seedbed.types import SeedbedError


@pytest.fixture
def pool() -> Iterator[ActorPool]:
    """A pool of three groups of two environments."""
    with ActorPool(num_groups=3, group_size=2, timeout_s=TIMEOUT_S) as pool:
        yield pool


def answer(pool: ActorPool, groups: list[int]) -> None:
    for group in groups:
        assert pool.reply(group)


def test_a_larger_life_at_step_1_restarts_its_group_only(pool: ActorPool) -> None:
    fake = Fake(pool, range(2))
    assert (fake.lives, pool.spec) == ([0, 0], SPEC)
    for step in (1, 2, 3):
        fake.publish(0, step)
        fake.publish(1, step)
        assert sorted(pool.poll(5.0)) == [0, 1]
        answer(pool, [0, 1])
        assert all(slot.answered for slot in fake.slots)
    fake.slots[0].open(4)
    assert not fake.slots[0].answered  # by the word for step 3 of life 0
    fake.publish(0, 7)
    assert pool.poll(5.0) == [0]
    slot = pool.slots[0]
    assert (slot.life, slot.step, slot.timestep.observation.tolist()) == (4, 1, [7, 7])
    answer(pool, [0])
    assert fake.slots[0].answered
    fake.publish(1, 4)
    assert pool.poll(5.0) == [1]
    assert (pool.slots[1].life, pool.slots[1].step) == (0, 4)
    assert pool.restarts == 0
    # A peer that comes later begins lives after all of these.
    fake.end("went away")
    assert pool.poll(0.05) == []
    assert Fake(pool, range(2)).lives == [5, 1]
    assert pool.restarts == 1


def test_anything_but_the_next_step_or_a_new_life_is_refused(pool: ActorPool) -> None:
    fake = Fake(pool, range(1))
    fake.publish(0, 1)
    assert pool.poll(5.0) == [0]
    fake.ring(0)  # the same step again
    assert pool.poll(0.05) == []
    answer(pool, [0])
    slot = fake.slots[0]

    def refused(life: int, step: int) -> None:
        slot.open(life)
        for _ in range(step):
            slot.publish(trees.leaves(slot.timestep))
        fake.ring(0)
        assert pool.poll(0.05) == []
        assert not pool.reply(0)

    refused(life=0, step=3)  # one is missing
    refused(life=-1, step=1)  # a stale life, in which even the step could be the next
    refused(life=-1, step=2)
    refused(life=1, step=2)  # a new life without its beginning
    refused(life=1, step=0)
    slot.open(1)
    fake.publish(0, 1)
    assert pool.poll(5.0) == [0]


def test_a_new_life_that_does_not_wait_for_the_answer_is_handed_out_once(pool: ActorPool) -> None:
    fake = Fake(pool, range(1))
    fake.publish(0, 1)
    assert pool.poll(5.0) == [0]
    fake.slots[0].open(1)
    fake.publish(0, 1)
    assert pool.poll(5.0) == [0]
    assert pool.reply(0)
    assert not pool.reply(0)
    fake.publish(0, 2)
    assert pool.poll(5.0) == [0]


def test_the_end_of_a_peer_does_not_end_the_pool(pool: ActorPool) -> None:
    gone, stays = Fake(pool, range(2)), Fake(pool, range(2, 3))
    assert pool.pids() == [os.getpid()] * 2
    gone.publish(0, 1)
    stays.publish(0, 1)
    assert sorted(pool.poll(5.0) + pool.poll(0.05)) == [0, 2]
    answer(pool, [2])
    gone.end("lost its connection")
    assert pool.poll(0.05) == []
    assert gone.judge.ends == ["lost its connection"]
    assert not pool.reply(0), "nobody waits for it any more"
    stays.publish(0, 2)
    assert pool.poll(5.0) == [2]
    answer(pool, [2])
    assert (pool.pids(), pool.cpu_seconds(), pool.restarts) == ([os.getpid()], 2.0, 0)
    back = Fake(pool, range(2))
    assert (back.lives, pool.restarts) == ([1, 1], 1)
    back.publish(1, 1)
    assert pool.poll(5.0) == [1]
    assert pool.slots[1].life == 1
    assert pool.take_notices() == []


def test_a_peer_that_has_hung_up_yields_nothing_and_ends_later(pool: ActorPool) -> None:
    fake = Fake(pool, range(1))
    fake.publish(0, 1)
    fake.hang_up()
    assert pool.poll(0.05) == [] and not fake.judge.ends
    fake.ring(0)
    assert pool.poll(0.05) == [] and not pool.reply(0)
    fake.end("is done")
    pool.poll(0.05)
    assert fake.judge.ends == ["is done"]


def test_a_policy_may_end_the_run(pool: ActorPool) -> None:
    fake = Fake(pool, range(1), strict=True)
    fake.end("broke")
    for _ in range(2):
        with pytest.raises(SeedbedError, match="the peer broke"):
            pool.poll(0.05)


def test_silence_is_that_of_peers_that_owe_a_step(
    pool: ActorPool, pool_clock: Callable[[float], None]
) -> None:
    busy, idle = Fake(pool, range(2)), Fake(pool, range(2, 3))
    for fake in (busy, idle):
        fake.publish(0, 1)
    busy.publish(1, 1)
    assert sorted(pool.poll(5.0) + pool.poll(0.05)) == [0, 1, 2]
    answer(pool, [0, 1])
    busy.publish(1, 2)  # group 0 still owes its step
    assert pool.poll(5.0) == [1]
    for fake in (busy, idle):
        fake.judge.silences.clear()
    for _ in range(3):
        pool_clock(4.0)
        pool.poll(0.0)
    assert idle.judge.silences == [0.0] * 3
    assert busy.judge.silences == pytest.approx([4.0, 8.0, 12.0], abs=1.0)
    answer(pool, [1])
    pool_clock(2.0)
    pool.poll(0.0)
    assert busy.judge.silences[-1] == pytest.approx(14.0, abs=1.0)
    answer(pool, [2])
    pool_clock(2.0)
    pool.poll(0.0)
    assert idle.judge.silences[-1] == pytest.approx(2.0, abs=1.0)


def test_a_pool_without_peers_says_so_once_per_absence(
    pool: ActorPool, pool_clock: Callable[[float], None]
) -> None:
    def wait(seconds: int) -> list[str]:
        for _ in range(seconds):
            pool_clock(1.0)
            pool.poll(0.0)
        return pool.take_notices()

    assert wait(4) == []
    (notice,) = wait(10)
    assert notice == "no actor has been here for 5 s; the run waits for one"
    assert wait(10) == []
    assert pool.wait_spec(lambda: True) is None
    fake = Fake(pool, range(3))
    assert wait(10) == []  # a peer that is there but silent is another matter
    fake.end("left")
    assert wait(4) == [] and fake.judge.ends == ["left"]
    assert len(wait(10)) == 1


def test_members_are_the_groups_that_are_there_and_beats_are_signs_of_life(pool_clock) -> None:
    with ActorPool(num_groups=4, group_size=1, timeout_s=80.0) as pool:
        peer = Fake(pool, range(1, 4))
        peer.present = range(0)
        pool.poll(0.0)
        os.eventfd_write(peer.wire, 1)
        pool.poll(0.0)
        assert pool.members == ()
        pool_clock(6.0)
        pool.poll(0.0)
        pool_clock(6.0)
        pool.poll(0.0)
        assert any("no actor has been here" in note for note in pool.take_notices())
        peer.present = range(2, 4)
        os.eventfd_write(peer.wire, 1)
        pool.poll(0.0)
        assert pool.members == (2, 3)
        before = peer.judge.silences[-1]
        pool_clock(5.0)
        pool.poll(0.0)
        assert peer.judge.silences[-1] > before
        peer.beats += 1
        pool_clock(2.0)
        pool.poll(0.0)
        assert peer.judge.silences[-1] < before
