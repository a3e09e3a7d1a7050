"""Probe environments on the host: each is solved in seconds and catches one class of mistakes.

They step in lock-step with next-step auto-reset, as `seedbed.types.HostEnv` asks. Observations are
float32 `[n, 2]`. `seedbed.envs.device.probes` has others, on the device.
"""

from __future__ import annotations

import numpy as np

from seedbed import trees
from seedbed.spaces import ACTION_MASK, entry
from seedbed.types import Array, ArraySpec, Box, Discrete, EnvSpec, Timestep, Tree, action_array

_OBSERVATION = ArraySpec((2,), "float32")


class Probe:
    """One-step episodes, always the same, with reward 1: tests the value and its loss.

    Other probes override `spec`, `length`, `observe`, `reward` and `end`. `step` consumes numbers of `rng`.
    """

    spec: EnvSpec = EnvSpec(_OBSERVATION, Discrete(2))
    length: int | Array = 1  # steps of an episode, or of each environment's `[n]`

    def __init__(self, num_envs: int, seed: int = 0) -> None:
        """Makes `num_envs` environments; the seed draws all their secrets."""
        self.num_envs = num_envs
        self.rng = np.random.default_rng(seed)
        self.step_of_episode = np.zeros(num_envs, np.int64)
        self.ended = np.zeros(num_envs, bool)
        self.secret = np.zeros(num_envs, np.int64)  # drawn anew in each episode: 0 or 1

    def observe(self) -> Tree:
        """Returns observations `[n, ...]`."""
        return np.ones((self.num_envs, 2), np.float32)

    def reward(self, action: Array) -> Array:
        """Returns the rewards `[n]` of taking actions in the current state."""
        del action
        return np.ones(self.num_envs, np.float32)

    def end(self, ended: Array) -> tuple[Array, Array]:
        """Returns which of the ended episodes `[n]` terminated and which were truncated."""
        return ended.copy(), np.zeros_like(ended)

    def reset(self) -> Timestep:
        """Opens an episode in each environment."""
        self.ended[:] = True
        action = action_array(self.spec.action)
        return self.step(np.zeros((self.num_envs, *action.shape), action.dtype))

    def step(self, action: Array) -> Timestep:
        """Takes actions `[n, ...]`; returns a timestep with leaves `[n, ...]`."""
        first = self.ended.copy()
        reward = np.where(first, 0.0, self.reward(action)).astype(np.float32)
        self.step_of_episode = np.where(first, 0, self.step_of_episode + 1)
        self.secret = np.where(first, self.rng.integers(0, 2, self.num_envs), self.secret)
        self.ended = ~first & (self.step_of_episode >= self.length)
        terminated, truncated = self.end(self.ended)
        return Timestep(self.observe(), reward, terminated, truncated, first)

    def close(self) -> None:
        """Does nothing: there is nothing to free."""


class SecretReward(Probe):
    """One-step episodes whose observation shows the reward, -1 or 1: tests the torso's gradient."""

    def observe(self) -> Tree:
        """Returns (the reward, 1)."""
        return np.stack([2 * self.secret - 1, np.ones(self.num_envs)], -1).astype(np.float32)

    def reward(self, action: Array) -> Array:
        """Returns the secret as -1 or 1."""
        del action
        return 2.0 * self.secret - 1


class Delay(Probe):
    """Two steps with reward 1 at the end; the observation shows the step: tests discounting."""

    length = 2

    def observe(self) -> Tree:
        """Returns (the step of the episode, 1)."""
        return np.stack([self.step_of_episode, np.ones(self.num_envs)], -1).astype(np.float32)

    def reward(self, action: Array) -> Array:
        """Returns 1 for the second step."""
        del action
        return (self.step_of_episode == 1).astype(np.float32)


class Endless(Probe):
    """Reward 1 at every step, truncated after four: worth 1 / (1 - gamma); tests truncation."""

    length = 4

    def end(self, ended: Array) -> tuple[Array, Array]:
        """Returns the ended episodes as truncated, and none as terminated."""
        return np.zeros_like(ended), ended.copy()


class Choice(Probe):
    """One-step episodes: action 1 earns 1, action 0 earns -1; tests the policy gradient's sign."""

    def reward(self, action: Array) -> Array:
        """Returns the action as -1 or 1."""
        return 2.0 * action - 1


class Match(SecretReward):
    """One-step episodes: the action that the observation names earns 1, the other -1."""

    def reward(self, action: Array) -> Array:
        """Returns 1 where the action is the secret, else -1."""
        return 1.0 - 2.0 * (action != self.secret)


class Aim(SecretReward):
    """One-step episodes with an action from -2 to 2: the reward falls with the distance from +-1."""

    spec = EnvSpec(_OBSERVATION, Box((1,), (-2.0,), (2.0,)))

    def reward(self, action: Array) -> Array:
        """Returns 1 minus the distance."""
        return 1.0 - np.abs(action[:, 0] - (2 * self.secret - 1))


class Memory(Probe):
    """Four steps; only the opening observation names the action that earns 1 at the last."""

    length = 4

    def observe(self) -> Tree:
        """Returns (the secret as -1 or 1 in the opening observation, else 0; the share of the episode)."""
        opening = self.step_of_episode == 0
        shown = np.where(opening, 2 * self.secret - 1, 0)
        return np.stack([shown, self.step_of_episode / 4], -1).astype(np.float32)

    def reward(self, action: Array) -> Array:
        """Returns 1 or -1 at the last step, else 0."""
        right = 1.0 - 2.0 * (action != self.secret)
        return np.where(self.step_of_episode == self.length - 1, right, 0.0)


class Noise(Probe):
    """Random observations and rewards, in episodes of 1 to 7 steps with either kind of end, for any spec."""

    def __init__(self, spec: EnvSpec, num_envs: int, seed: int = 0) -> None:
        """Makes environments of a spec."""
        super().__init__(num_envs, seed)
        self.spec = spec
        self.length = self.rng.integers(1, 8, num_envs)

    def observe(self) -> Tree:
        """Returns normal numbers for floats, 0 or 1 for all else but bytes, which may be anything.

        Masks of actions have 0 and 1.
        """
        found = trees.map(self._draw, self.spec.observation)
        if (mask := entry(found, ACTION_MASK)) is not None:
            found[ACTION_MASK] = trees.map(lambda leaf: (leaf > 0).astype(leaf.dtype), mask)
        return found

    def reward(self, action: Array) -> Array:
        """Returns normal numbers."""
        del action
        return self.rng.normal(size=self.num_envs)

    def step(self, action: Array) -> Timestep:
        """Takes any actions."""
        found = super().step(action)
        self.length = np.where(found.first, self.rng.integers(1, 8, self.num_envs), self.length)
        return found

    def end(self, ended: Array) -> tuple[Array, Array]:
        """Terminates some and truncates the others."""
        terminated = self.rng.random(len(ended)) < 0.5
        return ended & terminated, ended & ~terminated

    def _draw(self, leaf: ArraySpec) -> Array:
        shape, dtype = (self.num_envs, *leaf.shape), np.dtype(leaf.dtype)
        if dtype.kind == "f":
            return self.rng.normal(size=shape).astype(dtype)
        return self.rng.integers(0, 256 if dtype == np.uint8 else 2, shape).astype(dtype)
