"""Leases of steps, of items to add and of items to draw."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from seedbed.paramserver.leases import Leases, Tally
from seedbed.replay.limiter import SLACK_BATCHES
from seedbed.types import Replay

EXPERIENCE = Replay(batch=8, sequence=1, period=1, capacity=1000, min_size=50, ratio=2.0)
STEPS = 5_000
LEARNERS = st.integers(0, 2)


def test_items_that_a_replay_shard_has_lost_may_be_added_again():
    leases = Leases(EXPERIENCE, STEPS, 0, 400, owed=1000.0)
    assert leases.lease(0).added == 0  # draws come first
    leases.lower_held(20)
    lease = leases.lease(0)
    assert lease.added > 0 and lease.drawn <= 1000
    added = 0
    while (more := leases.lease(0).added) > added:
        added = more
        leases.report(0, Tally(added, added, 0))
    assert added >= EXPERIENCE.min_size - 20
    drawn = leases.lease(0).drawn
    leases.report(0, Tally(added, added, drawn))
    assert leases.lease(0).drawn > drawn > 0
    leases.lower_held(10_000)  # more than was counted changes nothing
    assert leases.save()["held"] == 20 + added


class Sharing(RuleBasedStateMachine):
    """Three learners that go as far as their leases allow, and shard 0, which is killed now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases(EXPERIENCE, STEPS, learners=3)
        self.saved = json.dumps(self.leases.save())
        self.done = {number: Tally() for number in range(3)}
        self.until = {number: Tally() for number in range(3)}
        self.gone: list[Tally] = []
        self.next = 3
        self.asked = 0.0

    def number(self, which: int) -> int:
        return sorted(self.done)[which]

    @rule(which=LEARNERS)
    def ask(self, which: int) -> None:
        learner = self.number(which)
        self.leases.report(learner, self.done[learner])
        lease = self.leases.lease(learner)
        self.until[learner] = Tally(*lease[:3])
        assert all(
            until >= now for until, now in zip(self.until[learner], self.done[learner], strict=True)
        )

    @rule(which=LEARNERS, share=st.floats(0, 1))
    def work(self, which: int, share: float) -> None:
        learner = self.number(which)
        parts = zip(self.done[learner], self.until[learner], strict=True)
        self.done[learner] = Tally(*(now + int(share * (until - now)) for now, until in parts))

    @rule()
    def save(self) -> None:
        self.saved = json.dumps(self.leases.save())

    @rule()
    def shard_dies(self) -> None:
        """What was reported since the save is reported again, before anybody gets a lease."""
        self.leases = Leases(EXPERIENCE, STEPS, learners=3)
        self.leases.restore(json.loads(self.saved))
        for learner, tally in self.done.items():
            self.leases.report(learner, tally)
            self.until[learner] = tally

    @rule(which=LEARNERS)
    def learner_dies(self, which: int) -> None:
        learner = self.number(which)
        self.leases.report(learner, self.done[learner])
        self.leases.expire(learner)
        self.gone.append(self.done.pop(learner))
        self.until.pop(learner)
        self.done[self.next] = self.until[self.next] = Tally()
        self.next += 1
        self.saved = json.dumps(self.leases.save())

    @invariant()
    def nobody_draws_or_steps_too_much(self) -> None:
        every = [*self.done.values(), *self.gone]
        added, drawn = sum(each.added for each in every), sum(each.drawn for each in every)
        asked = EXPERIENCE.ratio * max(0, added - EXPERIENCE.min_size)
        assert drawn <= asked
        slack = 3 * SLACK_BATCHES * EXPERIENCE.batch + EXPERIENCE.ratio * len(every)
        assert asked - drawn <= slack
        assert sum(each.steps for each in every) <= STEPS


Sharing.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
test_learners_share_steps_and_the_ratio = Sharing.TestCase


def test_without_replay_only_steps_are_leased():
    leases = Leases(None, 3000, 1000, 0)
    assert leases.lease(1)[:3] == (1024, 0, 0) and leases.lease(2)[:3] == (976, 0, 0)
    assert leases.lease(3).steps == 0
    leases.report(2, Tally(steps=100))
    leases.expire(2)
    assert leases.lease(3).steps == 876
    assert leases.lease(3).total_steps == 1100


@pytest.mark.parametrize("steps", [30_000, 10**6])
@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_learners_that_are_equally_fast_do_equally_much(count, steps):
    leases, done = Leases(None, steps, learners=count), [0] * count
    while leases.total_steps < steps:
        for learner in range(count):
            leases.report(learner, Tally(steps=done[learner]))
            done[learner] = min(done[learner] + 100, leases.lease(learner).steps)
    assert sum(done) == steps and max(done) - min(done) <= 2 * 1024


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_all_learners_draw(count):
    """Each plays 16 steps, and draws a batch if it may, of 32 that are asked for."""
    leases = Leases(EXPERIENCE, 10**6, learners=count)
    done = [Tally()] * count
    for _ in range(500):
        for learner in range(count):
            leases.report(learner, done[learner])
            lease, now = leases.lease(learner), done[learner]
            added = min(now.added + 16, lease.added, lease.steps)
            drawn = now.drawn + 8 * (now.drawn + 8 <= lease.drawn)
            done[learner] = Tally(added, added, drawn)
    drawn = [each.drawn for each in done]
    assert min(drawn) > 0.95 * 8 * 500


@pytest.mark.parametrize("added", [0, 60])
def test_learners_that_cannot_work_do_not_stop_the_others(added):
    """Those go on asking, and can neither add nor draw, before or after replay has its first items."""
    now_s, count = 0.0, 4
    leases = Leases(EXPERIENCE, 10**6, learners=count, now_s=lambda: now_s)
    done = [Tally(added, added, 0)] * count
    for turn in range(2000):
        now_s = turn * 0.1
        for learner in range(count):
            leases.report(learner, done[learner])
            lease, now = leases.lease(learner), done[learner]
            if learner == 0:
                more = min(now.added + 4, lease.added, lease.steps)
                drawn = now.drawn + 8 * (now.drawn + 8 <= lease.drawn)
                done[0] = Tally(more, more, drawn)
    assert done[0].drawn > 8 * 1500


def test_a_learner_that_does_not_ask_may_be_busy():
    now_s = 0.0
    leases = Leases(None, 3000, learners=2, now_s=lambda: now_s)
    assert leases.lease(0).steps == leases.lease(1).steps == 1024
    now_s = 40.0
    leases.report(0, Tally(steps=10))
    assert leases.lease(0).steps == 1034 and leases.lease(2).steps == 2990 - 2 * 1024
    assert leases.lease(3).steps == 0
    now_s = 44.0
    assert leases.lease(1).steps == 1024  # it asks again, and has done nothing
    assert leases.lease(3).steps == 1024


def test_an_item_that_asks_for_more_draws_than_there_may_be_owed_can_be_added():
    experience = dataclasses.replace(EXPERIENCE, ratio=1000.0, min_size=0)
    leases = Leases(experience, STEPS)
    assert leases.lease(0).added == 1


def test_a_report_counts_once():
    leases = Leases(EXPERIENCE, STEPS, 0, 100)
    for _ in range(3):
        leases.report(5, Tally(10, 10, 8))
    assert leases.total_steps == 10 and leases.owed == pytest.approx(12)
    leases.report(5, Tally(9, 9, 7))
    assert leases.total_steps == 10 and leases.owed == pytest.approx(12)


def test_learners_that_go_on_asking_come_to_the_last_step_and_draw_what_is_asked_for():
    sharing = Sharing()
    for _ in range(3000):
        for which in range(3):
            sharing.ask(which)
            sharing.work(which, 1.0)
            sharing.nobody_draws_or_steps_too_much()
        if sharing.leases.total_steps >= STEPS:
            break
    assert sharing.leases.total_steps == STEPS
    before = sum(each.drawn for each in sharing.done.values())
    for _ in range(5):
        for which in range(3):
            sharing.ask(which)
            sharing.work(which, 1.0)
    # Adding and drawing never end by themselves.
    assert sum(each.drawn for each in sharing.done.values()) > before
