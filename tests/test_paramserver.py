"""The parameter server: the books of pushes, and how leaves are divided."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from seedbed.agents.base import Gradient, Sums, observation_sums
from seedbed.agents.dqn import Dqn
from seedbed.agents.impala import Impala
from seedbed.agents.r2d2 import R2d2
from seedbed.agents.sac import Sac, Weights
from seedbed.paramserver.division import Division
from seedbed.paramserver.ledger import (
    BookError,
    Books,
    Fate,
    LearnerLedger,
    ShardLedger,
    Verdict,
    Version,
)
from seedbed.types import ArraySpec, Box, Discrete, EnvSpec, LearnerState, Output, bind

MOST_LAG = 2


class Shard:
    """A shard whose parameters are the list of pushes that it has applied, and its saves."""

    def __init__(self) -> None:
        self.ledger, self.epoch = ShardLedger(1, MOST_LAG), 1
        self.parameters: list[tuple[int, int]] = []  # (learner, push)
        self.saved = (json.dumps(self.ledger.save()), list[tuple[int, int]]())

    def die(self) -> None:
        """Is killed, and restored from its last save."""
        text, parameters = self.saved
        self.epoch += 1
        self.ledger = ShardLedger.restore(json.loads(text), self.epoch, MOST_LAG)
        self.parameters = list(parameters)


class Learner:
    """A learner's end at one shard, and a link that may repeat, delay and lose."""

    def __init__(self, number: int, shard: Shard) -> None:
        self.number, self.shard, self.ledger = number, shard, LearnerLedger()
        self.connected = False
        self.up: list[tuple[int, Version]] = []
        self.down: list[Verdict] = []
        self.base = Version(0, 0)


LEARNERS = st.integers(0, 1)


class Pushes(RuleBasedStateMachine):
    """Two learners and a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.shard = Shard()
        self.learners = [Learner(number, self.shard) for number in range(2)]
        self.numbers = 2
        self.gone: list[tuple[int, int]] = []  # learners that are no more, with their last push

    @rule(which=LEARNERS)
    def connect(self, which: int) -> None:
        """Begins a stream; what was on the way of the one before may still arrive at the shard, or never."""
        learner = self.learners[which]
        learner.connected = True
        learner.up.clear()
        learner.down.clear()
        theirs, last = self.shard.ledger.greet(learner.number, learner.ledger.books.ended)
        if learner.ledger.greeted(theirs, last, self.shard.ledger.version):
            learner.up.append((learner.ledger.sent, learner.base))

    @rule(which=LEARNERS)
    def pull(self, which: int) -> None:
        learner = self.learners[which]
        if learner.connected and not learner.ledger.waits:
            learner.base = self.shard.ledger.version

    @rule(which=LEARNERS)
    def push(self, which: int) -> None:
        learner = self.learners[which]
        if learner.connected and not learner.ledger.waits:
            learner.up.append((learner.ledger.push(), learner.base))

    @rule(which=LEARNERS)
    def repeat(self, which: int) -> None:
        """The network repeats what is on its way."""
        learner = self.learners[which]
        learner.up += learner.up[:1]
        learner.down += learner.down[:1]

    @rule(which=LEARNERS, at=st.integers(0, 2))
    def arrive(self, which: int, at: int) -> None:
        """A push arrives, in any order."""
        learner = self.learners[which]
        if learner.connected and at < len(learner.up):
            push, base = learner.up.pop(at)
            if push < self.shard.ledger.ended().get(learner.number, 0):
                with pytest.raises(BookError):
                    self.shard.ledger.judge(learner.number, push, base)
                return
            verdict, fresh = self.shard.ledger.judge(learner.number, push, base)
            if fresh and verdict.fate is Fate.APPLIED:
                self.shard.parameters.append((learner.number, push))
            learner.down.append(verdict)

    @rule(which=LEARNERS, at=st.integers(0, 2))
    def answer(self, which: int, at: int) -> None:
        learner = self.learners[which]
        if learner.connected and at < len(learner.down):
            learner.ledger.answer(learner.down.pop(at))

    @rule(which=LEARNERS)
    def cut(self, which: int) -> None:
        self.learners[which].connected = False

    @rule()
    def save(self) -> None:
        self.shard.saved = (json.dumps(self.shard.ledger.save()), list(self.shard.parameters))

    @rule()
    def shard_dies(self) -> None:
        self.shard.die()
        for learner in self.learners:
            learner.connected = False

    @rule(which=LEARNERS)
    def learner_dies(self, which: int) -> None:
        """Another one takes its place, with another number."""
        old = self.learners[which]
        self.shard.ledger.close(old.number, old.ledger.sent)
        self.gone.append((old.number, old.ledger.sent))
        self.learners[which] = Learner(self.numbers, self.shard)
        self.numbers += 1

    @invariant()
    def nothing_is_applied_twice(self) -> None:
        assert len(set(self.shard.parameters)) == len(self.shard.parameters)

    @invariant()
    def the_books_add_up(self) -> None:
        applied: dict[int, int] = {}
        for number, _ in self.shard.parameters:
            applied[number] = applied.get(number, 0) + 1
        for learner in self.learners:
            books = learner.ledger.books
            assert books.ended + learner.ledger.waits == learner.ledger.sent
            theirs = self.shard.ledger._books.get(learner.number, Books())
            assert theirs.applied == applied.get(learner.number, 0)
            if learner.connected:
                assert theirs.ended - books.ended in (0, 1)
        assert self.shard.ledger.version.number == len(self.shard.parameters)

    @precondition(lambda self: all(learner.connected for learner in self.learners))
    @rule()
    def settle(self) -> None:
        """Without faults, every push gets its answer, and both sides agree."""
        for which, learner in enumerate(self.learners):
            self.connect(which)
            while learner.up:
                self.arrive(which, 0)
            while learner.down:
                self.answer(which, 0)
            assert not learner.ledger.waits
            assert learner.ledger.books == self.shard.ledger._books.get(learner.number, Books())


Pushes.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
test_pushes_end_once_and_the_books_agree = Pushes.TestCase


def test_a_gradient_of_old_parameters_is_discarded() -> None:
    ledger = ShardLedger(3, most_lag=1)
    for push in (1, 2, 3):
        assert ledger.judge(0, push, ledger.version)[0].fate is Fate.APPLIED
    assert ledger.judge(1, 1, Version(3, 2))[0] == Verdict(1, Fate.APPLIED, Version(3, 4))
    assert ledger.judge(1, 2, Version(3, 2))[0] == Verdict(2, Fate.DISCARDED, Version(3, 4))
    assert ledger.judge(1, 3, Version(2, 4))[0].fate is Fate.DISCARDED
    with pytest.raises(BookError, match="push 9 of learner 1 came after push 3"):
        ledger.judge(1, 9, ledger.version)


def test_a_shard_that_was_restored_says_what_it_has_lost() -> None:
    ledger, learner = ShardLedger(1, 8), LearnerLedger()
    saved = ledger.save()
    for _ in range(3):
        learner.answer(ledger.judge(0, learner.push(), ledger.version)[0])
        saved = saved if ledger.version.number > 1 else ledger.save()
    restored = ShardLedger.restore(json.loads(json.dumps(saved)), 2, 8)
    theirs, last = restored.greet(0, learner.books.ended)
    assert theirs == Books(applied=1, rolled_back=2) and last is None
    assert not learner.greeted(theirs, last, restored.version)
    assert learner.books == theirs and restored.ended() == {0: 3}
    assert restored.judge(0, learner.push(), restored.version)[0].push == 4


DISCRETE = EnvSpec(ArraySpec((4,), "float32"), Discrete(3))
REAL = EnvSpec(ArraySpec((4,), "float32"), Box((2,), (-1.0,) * 2, (1.0,) * 2))
AGENTS = {
    "dqn": (Dqn(normalise_observations=True, target_period=2, hidden_sizes=(4, 64)), DISCRETE),
    "r2d2": (R2d2(target_period=2), DISCRETE),
    "impala": (Impala(normalise_observations=True), DISCRETE),
    "sac": (Sac(hidden_sizes=(4, 4)), REAL),
}


def gradient_of(agent, state, seed):
    """Makes a gradient of random numbers, of the structure that `gradients` returns."""
    rng = np.random.default_rng(seed)

    def noise(tree):
        return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), tree)

    if isinstance(agent, Sac):
        return Weights(noise(state.params), noise(state.auxiliary.critics), jnp.float32(0.5))
    observation = jnp.asarray(rng.normal(size=(8, 4)), jnp.float32)
    sums = Sums(observation_sums(state.params.seen, observation, jnp.float32(8)))
    return Gradient(noise(state.params.weights), sums)


@pytest.mark.parametrize("name", list(AGENTS))
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_shards_apply_what_one_learner_applies(name, shards):
    template, spec = AGENTS[name]
    agent = bind(template, spec)
    state = agent.init(jax.random.key(0))
    division = Division(gradient_of(agent, state, 0), state, shards)
    assert max(division.loads) < 1.5 * min(division.loads)
    parts = [division.part(state, shard) for shard in range(shards)]
    output = Output({}, jnp.float32(8))
    for seed in range(3):
        grads = gradient_of(agent, state, seed)
        parts = [
            agent.apply(part, division.part(grads, shard), output)
            for shard, part in enumerate(parts)
        ]
        state = agent.apply(state, grads, output)
    joined = division.join(parts, state)
    for ours, theirs in zip(jax.tree.leaves(joined), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_shares_are_equal_and_large_leaves_are_cut():
    weights = {"a": np.zeros((1000, 8), np.float32), "b": np.zeros(5), "d": np.zeros(())}
    statistics = {"mean": np.zeros((7, 3)), "count": np.zeros(())}
    state = LearnerState((weights, statistics), (), np.zeros(()), np.zeros(()))
    division = Division((weights, {"sum": np.zeros((7, 3))}), state, 4)
    assert max(division.loads) < 1.2 * min(division.loads)
    parts = [division.part((weights, statistics), shard) for shard in range(4)]
    assert [part["a"].shape for part, _ in parts] == [(250, 8)] * 4
    # What is no weight belongs to shard 0.
    assert [part["mean"].shape[0] for _, part in parts] == [7, 0, 0, 0]
    assert all(part["d"].shape == () for part, _ in parts)
    assert [division.part(np.zeros(9), shard).shape[0] for shard in range(4)] == [9, 0, 0, 0]
