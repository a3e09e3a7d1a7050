"""An environment that fails after a while in the second of the processes that learn as one."""

from __future__ import annotations

import os

import gymnasium

from seedbed.run.member import VARIABLE


class Failing(gymnasium.Wrapper):
    """Counts its steps, and fails where there is no licence."""

    taken = 0

    def step(self, action):
        self.taken += 1
        if os.environ.get(VARIABLE, "").startswith("1/") and self.taken > 600:
            raise RuntimeError("the licence of this machine is used up")
        return super().step(action)


def make():
    return Failing(gymnasium.make("CartPole-v1"))
