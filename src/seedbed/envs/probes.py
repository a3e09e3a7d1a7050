"""Probe tasks on the device: learnt in seconds, and each shows one class of bug by its number."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from seedbed.types import Array, ArraySpec, Discrete, EnvSpec, EnvState, Timestep


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayProbe:
    """Pays one step late: each observation names the action that earns 1 (the other -1) a step later.

    It shows (a fair random sign, what the next step will pay, the share of the episode that has passed),
    and action 1 matches sign 1. An episode terminates after `length` steps: the first pays nothing, and
    what the last earned is lost.

    The best return is length - 1; guessing has 0. With discount g, the best policy's value after t steps
    is what the next step will pay + g + g^2 + ... + g^(length - 1 - t). An agent that credits a reward to
    the action just taken only, as one with discount 0 does, stays at return 0.
    """

    length: int = 8

    @property
    def episode_steps(self) -> int:
        """None: it ends by itself."""
        return 0

    @property
    def frame_skip(self) -> int:
        """One."""
        return 1

    @property
    def spec(self) -> EnvSpec:
        """What it shows, and its actions."""
        return EnvSpec(ArraySpec((3,), "float32"), Discrete(2))

    def reset(self, key: Array) -> EnvState:
        """Opens an episode; nothing is owed."""
        return self._state(jnp.int32(0), key, jnp.float32(0), jnp.float32(0))

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Pays what the step before earned."""
        passed, key, sign, owed = state.inner
        earned = jnp.where((action == 1) == (sign > 0), 1.0, -1.0)
        return self._state(passed + 1, key, owed, earned)

    def _state(self, passed: Array, key: Array, reward: Array, owed: Array) -> EnvState:
        key, drawing = jax.random.split(key)
        sign = jnp.where(jax.random.bernoulli(drawing), 1.0, -1.0)
        observation = jnp.stack([sign, owed, passed.astype(jnp.float32) / self.length])
        timestep = Timestep(
            observation, reward, passed >= self.length, jnp.bool_(False), passed == 0
        )
        return EnvState((passed, key, sign, owed), timestep, {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TruncationProbe:
    """Ends by the time limit alone, where going on is worth most: tests bootstrapping at a truncation.

    It shows -1 at first. Any action costs 1 and leads to where it shows 1 for ever. There, action 0 earns
    0.2 and stays; action 1 earns 0.4 and terminates. Episodes are truncated after two steps. Clipping of
    rewards to [-1, 1] changes nothing.

    With discount g > 0.5 the best policy stays. Its values are v = 0.2 / (1 - g) at 1 and g v - 1 at -1: 2
    and 0.8 with g = 0.9; its return is -0.8. An agent that takes truncation for termination, or
    bootstraps from the next episode's opening observation, finds that action 1 is better: with g = 0.9 the
    values are 0.4 and -0.64, the return -0.6.
    """

    episode_steps: int = 2

    @property
    def frame_skip(self) -> int:
        """One."""
        return 1

    @property
    def spec(self) -> EnvSpec:
        """What it shows, and its actions."""
        return EnvSpec(ArraySpec((1,), "float32"), Discrete(2))

    def reset(self, key: Array) -> EnvState:
        """Opens an episode, always the same."""
        no = jnp.bool_(False)
        timestep = Timestep(jnp.full(1, -1.0), jnp.float32(0), no, no, jnp.bool_(True))
        return EnvState(no, timestep, {})

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Arrives, stays, or leaves."""
        arrived, no = state.inner, jnp.bool_(False)
        reward = jnp.where(arrived, jnp.where(action == 1, 0.4, 0.2), -1.0)
        timestep = Timestep(jnp.ones(1), reward, arrived & (action == 1), no, no)
        return EnvState(jnp.bool_(True), timestep, {})
