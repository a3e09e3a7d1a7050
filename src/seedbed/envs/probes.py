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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepeatProbe:
    """Pays 1 for naming the symbol that was shown `delay` steps before: tests memory.

    It shows one of `choices` symbols, all as likely, one-hot, and draws a new one every step; an action
    names a symbol. The first `delay` steps pay nothing. An episode terminates after `length` steps.

    The best return is length - delay. With a delay of 1 or more, what is shown tells nothing of what is
    asked for, so every policy without memory has (length - delay) / choices on average; with delay 0
    none is needed. A policy that also sees its previous action may use that as a memory, and gain.
    """

    delay: int = 4
    choices: int = 4
    length: int = 20

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
        return EnvSpec(ArraySpec((self.choices,), "float32"), Discrete(self.choices))

    def reset(self, key: Array) -> EnvState:
        """Opens an episode; nothing was shown yet."""
        nothing = jnp.full(self.delay + 1, -1, jnp.int32)
        return self._state(jnp.int32(0), key, jnp.float32(0), nothing)

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Pays for the symbol that the action names."""
        passed, key, shown = state.inner
        return self._state(passed + 1, key, jnp.where(action == shown[-1], 1.0, 0.0), shown)

    def _state(self, passed: Array, key: Array, reward: Array, shown: Array) -> EnvState:
        key, drawing = jax.random.split(key)
        symbol = (self.choices * jax.random.uniform(drawing)).astype(jnp.int32)
        shown = jnp.concatenate([symbol[None], shown[:-1]])
        observation = (jnp.arange(self.choices) == symbol).astype(jnp.float32)
        timestep = Timestep(
            observation, reward, passed >= self.length, jnp.bool_(False), passed == 0
        )
        return EnvState((passed, key, shown), timestep, {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TMazeProbe:
    """A corridor that ends at a junction, where a cue seen only at its start says which way pays.

    It shows (the cue, 1 or -1 by a fair draw, at the start and 0 elsewhere; 1 at the junction, otherwise
    0). Action 0 walks on, `length` times to the junction; 1 and 2 turn, which at the junction ends the
    episode: action 1 earns 4 if the cue was 1, action 2 if it was -1, and the other costs 0.1. Whatever
    leads nowhere, turning in the corridor or walking on at the junction, costs 0.1 too. Source: Bakker
    (2001), "Reinforcement learning with long short-term memory", without the way back.

    The best return is 4. Both cues look alike at the junction, and what moves on is always action 0; so
    the best policy without memory turns at random there, and has 1.95 on average, also if it sees its
    previous action and reward.
    """

    length: int = 10

    @property
    def episode_steps(self) -> int:
        """Some more than random walking takes."""
        return 5 * (self.length + 1)

    @property
    def frame_skip(self) -> int:
        """One."""
        return 1

    @property
    def spec(self) -> EnvSpec:
        """What it shows, and its actions."""
        return EnvSpec(ArraySpec((2,), "float32"), Discrete(3))

    def reset(self, key: Array) -> EnvState:
        """Stands at the start, with a new cue."""
        cue = jnp.where(jax.random.bernoulli(key), 1.0, -1.0)
        return self._state(jnp.int32(0), cue, jnp.float32(0), jnp.bool_(False), jnp.bool_(True))

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Walks on, or turns."""
        place, cue = state.inner
        junction, turns = place == self.length, action > 0
        pays = junction & turns & ((action == 1) == (cue > 0))
        walks = ~junction & ~turns
        reward = jnp.where(pays, 4.0, jnp.where(walks, 0.0, -0.1))
        return self._state(place + walks, cue, reward, junction & turns, jnp.bool_(False))

    def _state(
        self, place: Array, cue: Array, reward: Array, terminated: Array, first: Array
    ) -> EnvState:
        shown = jnp.where(place == 0, cue, 0.0)
        observation = jnp.stack([shown, (place == self.length).astype(jnp.float32)])
        timestep = Timestep(observation, reward, terminated, jnp.bool_(False), first)
        return EnvState((place, cue), timestep, {})
