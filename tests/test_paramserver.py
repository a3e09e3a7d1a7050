"""The parameter server: the books of pushes, and how leaves are divided."""

from __future__ import annotations

import collections
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from seedbed.agents.base import Gradient, Sums
from seedbed.agents.dqn import Dqn
from seedbed.agents.impala import Impala
from seedbed.agents.learning_statistics import observation_sums
from seedbed.agents.r2d2 import R2d2
from seedbed.agents.sac import Sac, Weights
from seedbed.paramserver.division import Division
from seedbed.paramserver.ledger import (
    BookError,
    LearnerLedger,
    PushCounts,
    PushOutcome,
    ShardLedger,
    Verdict,
    Version,
)
from seedbed.types import ArraySpec, Box, Discrete, EnvSpec, LearnerState, Output, bind

MOST_LAG, SHARDS = 2, 3


class Shard:
    """A shard whose parameters are the list of pushes that it has applied, and its saves."""

    def __init__(self) -> None:
        self.ledger, self.epoch = ShardLedger(1, MOST_LAG), 1
        self.parameters: list[tuple[int, int]] = []  # (learner, push)
        self.saved = (json.dumps(self.ledger.save()), list[tuple[int, int]]())

    def save(self) -> None:
        self.saved = (json.dumps(self.ledger.save()), list(self.parameters))

    def die(self) -> None:
        """Is killed, and restored from its last save."""
        text, parameters = self.saved
        self.epoch += 1
        self.ledger = ShardLedger.restore(json.loads(text), self.epoch, MOST_LAG)
        self.parameters = list(parameters)


class Stream:
    """A learner's end at one shard, and a link that may repeat, delay and lose."""

    def __init__(self, number: int, shard: Shard) -> None:
        self.number, self.shard, self.ledger = number, shard, LearnerLedger()
        self.connected = False
        self.up: list[tuple[int, Version]] = []
        self.down: list[Verdict] = []
        self.base = Version(0, 0)

    def connect(self) -> None:
        """Begins a stream; what was on the way of the one before is lost."""
        self.connected = True
        self.up.clear()
        self.down.clear()
        theirs, last = self.shard.ledger.greet(self.number, self.ledger.books.ended)
        if self.ledger.greeted(theirs, last, self.shard.ledger.version):
            self.up.append((self.ledger.sent, self.base))

    def push(self) -> None:
        """Sends a push, now or when there is a stream."""
        number = self.ledger.push()
        if self.connected:
            self.up.append((number, self.base))

    def arrive(self, at: int) -> None:
        """A push arrives at the shard."""
        push, base = self.up.pop(at)
        verdict, fresh = self.shard.ledger.judge(self.number, push, base)
        if fresh and verdict.fate is PushOutcome.APPLIED:
            self.shard.parameters.append((self.number, push))
        self.down.append(verdict)

    def settle(self) -> None:
        """Without faults, every push gets its answer, and both sides agree."""
        self.connect()
        while self.up:
            self.arrive(0)
        while self.down:
            self.ledger.answer(self.down.pop(0))
        assert not self.ledger.waits
        assert self.ledger.books == self.shard.ledger.books.get(self.number, PushCounts())


def ended_of(ledger: ShardLedger) -> dict[int, int]:
    return {number: books.ended for number, books in ledger.books.items()}


class Learner:
    """A learner's ends at all shards."""

    def __init__(self, number: int, shards: list[Shard]) -> None:
        self.number = number
        self.streams = [Stream(number, shard) for shard in shards]


LEARNERS, PLACES = st.integers(0, 1), st.integers(0, SHARDS - 1)


class Pushes(RuleBasedStateMachine):
    """Two learners, three shards, and a coordinator that cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.shards = [Shard() for _ in range(SHARDS)]
        self.learners = [Learner(number, self.shards) for number in (1, 2)]
        self.numbers = 3
        for which in range(2):
            self.connect_all(which)

    def stream(self, which: int, shard: int) -> Stream:
        return self.learners[which].streams[shard]

    @rule(which=LEARNERS, shard=PLACES)
    def connect(self, which: int, shard: int) -> None:
        self.stream(which, shard).connect()

    @rule(which=LEARNERS)
    def connect_all(self, which: int) -> None:
        for stream in self.learners[which].streams:
            stream.connect()

    @rule(which=LEARNERS, pulls=st.booleans(), come=st.sets(PLACES), heard=st.sets(PLACES))
    def push(self, which: int, pulls: bool, come: set[int], heard: set[int]) -> None:
        """A push goes to all shards, when all have answered the one before; some answer at once."""
        streams = self.learners[which].streams
        if any(stream.ledger.waits for stream in streams):
            return
        for place, stream in enumerate(streams):
            if stream.connected and pulls:
                stream.base = stream.shard.ledger.version
            stream.push()
            if stream.connected and place in come:
                stream.arrive(0)
                if place in heard:
                    stream.ledger.answer(stream.down.pop(0))

    @rule(which=LEARNERS, shard=PLACES)
    def repeat(self, which: int, shard: int) -> None:
        """The network repeats what is on its way."""
        stream = self.stream(which, shard)
        stream.up += stream.up[:1]
        stream.down += stream.down[:1]

    @rule(which=LEARNERS, shard=PLACES, at=st.integers(0, 2))
    def arrive(self, which: int, shard: int, at: int) -> None:
        """A push arrives, in any order."""
        stream = self.stream(which, shard)
        if stream.connected and at < len(stream.up):
            if stream.up[at][0] < ended_of(stream.shard.ledger).get(stream.number, 0):
                with pytest.raises(BookError):
                    stream.shard.ledger.judge(stream.number, *stream.up.pop(at))
                return
            stream.arrive(at)

    @rule(which=LEARNERS, shard=PLACES, at=st.integers(0, 2))
    def answer(self, which: int, shard: int, at: int) -> None:
        stream = self.stream(which, shard)
        if stream.connected and at < len(stream.down):
            stream.ledger.answer(stream.down.pop(at))

    @rule(which=LEARNERS, shard=PLACES)
    def lose(self, which: int, shard: int) -> None:
        """The link to a shard breaks."""
        self.stream(which, shard).connected = False

    @rule(shard=PLACES)
    def save(self, shard: int) -> None:
        self.shards[shard].save()

    @rule(shard=PLACES)
    def shard_dies(self, shard: int) -> None:
        self.shards[shard].die()
        for learner in self.learners:
            learner.streams[shard].connected = False

    @rule(which=LEARNERS)
    def learner_dies(self, which: int) -> None:
        """Another one takes its place, with another number."""
        self.learners[which] = Learner(self.numbers, self.shards)
        self.numbers += 1

    @rule(away=st.sets(LEARNERS))
    def cut(self, away: set[int]) -> None:
        """Learners that the coordinator sees settle; it closes the others, whose streams stay as they are.

        All shards have had the same pushes then.
        """
        there = [learner for which, learner in enumerate(self.learners) if which not in away]
        for learner in there:
            for stream in learner.streams:
                stream.settle()
        living = {learner.number for learner in there}
        last: dict[int, int] = {}
        for shard in self.shards:
            for number, ended in ended_of(shard.ledger).items():
                last[number] = max(last.get(number, 0), ended)
        for shard in self.shards:
            for number in last.keys() - living:
                shard.ledger.close(number, last[number])
        assert all(
            ended_of(shard.ledger) == ended_of(self.shards[0].ledger) for shard in self.shards
        )

    @rule()
    def all_settle(self) -> None:
        for learner in self.learners:
            for stream in learner.streams:
                stream.settle()

    @invariant()
    def nothing_is_applied_twice(self) -> None:
        for shard in self.shards:
            assert len(set(shard.parameters)) == len(shard.parameters)

    @invariant()
    def the_books_add_up(self) -> None:
        for shard in self.shards:
            applied = collections.Counter(number for number, _ in shard.parameters)
            for number, books in shard.ledger.books.items():
                assert books.applied == applied[number]
            assert shard.ledger.version.number == len(shard.parameters)
        for learner in self.learners:
            for stream in learner.streams:
                mine = stream.ledger.books
                assert mine.ended + stream.ledger.waits == stream.ledger.sent
                theirs = stream.shard.ledger.books.get(learner.number, PushCounts())
                if stream.connected:
                    assert theirs.ended - mine.ended in (0, 1)


Pushes.TestCase.settings = settings(max_examples=25, stateful_step_count=50, deadline=None)
test_pushes_end_once_and_the_books_agree = Pushes.TestCase


def test_a_learner_that_was_closed_comes_back_and_takes_the_shards_word() -> None:
    # A push was applied at the first shard and has not come to the second; the answer is lost.
    shards, learner = [ShardLedger(1, 8), ShardLedger(1, 8)], [LearnerLedger(), LearnerLedger()]
    for ledger in learner:
        ledger.push()
    shards[0].judge(7, 1, shards[0].version)
    for shard in shards:
        shard.close(7, 1)
    for shard, ledger in zip(shards, learner, strict=True):
        theirs, last = shard.greet(7, 0)
        assert not ledger.greeted(theirs, last, shard.version), "it must not be sent again"
    assert learner[0].books == PushCounts(applied=1) and learner[1].books == PushCounts(discarded=1)
    # One whose stream to the shard was never broken hears that its push was discarded.
    shards[1].close(7, 2)
    verdict, fresh = shards[1].judge(7, 2, shards[1].version)
    assert verdict.fate is PushOutcome.DISCARDED and not fresh
    assert shards[1].judge(7, 3, shards[1].version)[0].fate is PushOutcome.APPLIED


def test_a_gradient_of_old_parameters_is_discarded() -> None:
    ledger = ShardLedger(3, most_lag=1)
    for push in (1, 2, 3):
        assert ledger.judge(0, push, ledger.version)[0].fate is PushOutcome.APPLIED
    assert ledger.judge(1, 1, Version(3, 2))[0] == Verdict(1, PushOutcome.APPLIED, Version(3, 4))
    assert ledger.judge(1, 2, Version(3, 2))[0] == Verdict(2, PushOutcome.DISCARDED, Version(3, 4))
    assert ledger.judge(1, 3, Version(2, 4))[0].fate is PushOutcome.DISCARDED
    with pytest.raises(BookError, match="push 9 of learner 1 came after push 3"):
        ledger.judge(1, 9, ledger.version)


def test_a_shard_that_was_restored_says_what_it_has_lost() -> None:
    ledger, learner = ShardLedger(1, 8), LearnerLedger()
    saved = ledger.save()
    for _ in range(3):
        learner.answer(ledger.judge(1, learner.push(), ledger.version)[0])
        saved = saved if ledger.version.number > 1 else ledger.save()
    restored = ShardLedger.restore(json.loads(json.dumps(saved)), 2, 8)
    theirs, last = restored.greet(1, learner.books.ended)
    assert theirs == PushCounts(applied=1, rolled_back=2) and last is None
    assert not learner.greeted(theirs, last, restored.version)
    assert learner.books == theirs and ended_of(restored) == {1: 3}
    assert restored.judge(1, learner.push(), restored.version)[0].push == 4


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
    sums = Sums(observation_sums(state.params.seen, observation, jnp.ones(8, bool), jnp.float32(8)))
    return Gradient(noise(state.params.weights), sums)


def bytes_of(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.quick("2-dqn")
@pytest.mark.parametrize("name", list(AGENTS))
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_shards_apply_what_one_learner_applies(name, shards):
    template, spec = AGENTS[name]
    agent = bind(template, spec)
    state, apply = jax.jit(agent.init)(jax.random.key(0)), jax.jit(agent.apply)
    division = Division(gradient_of(agent, state, 0), state, shards)
    parts = [division.part(state, shard) for shard in range(shards)]
    loads = [bytes_of(division.part(gradient_of(agent, state, 0), i)) for i in range(shards)]
    assert max(loads) < 1.5 * min(loads)
    output = Output({}, jnp.float32(8))
    for seed in range(3):
        grads = gradient_of(agent, state, seed)
        parts = [
            apply(part, division.part(grads, shard), output) for shard, part in enumerate(parts)
        ]
        state = apply(state, grads, output)
    joined = division.join(parts, state)
    for ours, theirs in zip(jax.tree.leaves(joined), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_shares_are_equal_and_large_leaves_are_cut():
    weights = {"a": np.zeros((1000, 8), np.float32), "b": np.zeros(5), "d": np.zeros(())}
    statistics = {"mean": np.zeros((7, 3)), "count": np.zeros(())}
    state = LearnerState((weights, statistics), (), np.zeros(()), np.zeros(()))
    division = Division((weights, {"sum": np.zeros((7, 3))}), state, 4)
    parts = [division.part((weights, statistics), shard) for shard in range(4)]
    loads = [bytes_of(part) for part, _ in parts]
    assert max(loads) < 1.2 * min(loads)
    assert [part["a"].shape for part, _ in parts] == [(250, 8)] * 4
    # What is no weight belongs to shard 0.
    assert [part["mean"].shape[0] for _, part in parts] == [7, 0, 0, 0]
    assert all(part["d"].shape == () for part, _ in parts)
    assert [division.part(np.zeros(9), shard).shape[0] for shard in range(4)] == [9, 0, 0, 0]
