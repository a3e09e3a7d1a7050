"""A learner without an agent, which steps the environments of a pool."""

from __future__ import annotations

import time
from collections.abc import Callable

from seedbed.actors.pool import ActorPool
from seedbed.envs.host.gym import FactoryEnv
from seedbed.testing.counting import NUM_ACTIONS, CountingChecker

PATIENCE_S = 60.0  # how long anything may take on a loaded machine


def counting(**options: object) -> FactoryEnv:
    """Configures a counting environment."""
    return FactoryEnv("counting_environment:make", kwargs=options)


class Learner:
    """Answers every group with numbered actions and checks all that arrives."""

    def __init__(self, pool: ActorPool) -> None:
        self.pool = pool
        self.lives: dict[int, int] = {}  # by group
        self.steps = [0] * pool.num_groups  # of the present lives
        self.totals = [0] * pool.num_groups  # of all lives
        self.checkers: list[list[CountingChecker]] = [[] for _ in range(pool.num_groups)]

    def turn(self, timeout_s: float = 0.2) -> list[int]:
        """Handles what one poll returns."""
        ready = self.pool.poll(timeout_s)
        assert len(set(ready)) == len(ready)
        for group in ready:
            self._handle(group)
        return ready

    def run(self, done: Callable[[], bool]) -> None:
        """Turns until done."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, (self.steps, self.pool.restarts)
            self.turn()

    def _handle(self, group: int) -> None:
        slot, size = self.pool.slots[group], self.pool.group_size
        if self.lives.get(group) != slot.life:
            assert slot.life > self.lives.get(group, -1)
            self.lives[group], self.steps[group] = slot.life, 0
            self.checkers[group] = [CountingChecker() for _ in range(size)]
        self.steps[group] += 1
        self.totals[group] += 1
        assert slot.step == self.steps[group]  # each once and in order
        t = slot.timestep
        for i, checker in enumerate(self.checkers[group]):
            checker.arrive(
                t.observation[i],
                float(t.reward[i]),
                bool(t.terminated[i]),
                bool(t.truncated[i]),
                bool(t.first[i]),
            )
            action = (31 * self.steps[group] + 7 * group + i) % NUM_ACTIONS
            checker.act(action)
            slot.action[i] = action
        assert self.pool.reply(group)
        assert not self.pool.reply(group)  # a second answer changes nothing
