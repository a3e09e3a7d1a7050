"""Wrappers that change a task: its rewards, actions or observations. The runtime adds none of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from seedbed.envs.device.wrappers import (
    Wrapper,
    has_wrapper,
    reopen_child,
    step_child,
    unwrapped,
    wrapped,
)
from seedbed.spaces import ACTION_MASK, PRIVILEGED, entry, without
from seedbed.types import Array, Box, Environment, EnvState, SeedbedError, Tree, action_array

_MOST_DELAY = 32
# Parts of an observation that are never late.
_IN_TIME = (ACTION_MASK, PRIVILEGED)


def scale_reward(env: Environment, factor: float) -> Environment:
    """Multiplies rewards by `factor`; raises SeedbedError unless it is finite."""
    if not math.isfinite(factor):
        raise SeedbedError(f"scale_reward: the factor is {factor}; give a finite number")
    return _ScaleReward(env, factor)


def clip_action(env: Environment) -> Environment:
    """Clips actions to the bounds of the spec before the environment sees them.

    Raises SeedbedError if the actions are not a Box.
    """
    if not isinstance(env.spec.action, Box):
        raise SeedbedError(
            f"clip_action: the actions of {type(env).__name__} are {env.spec.action}, which has no "
            "bounds; leave the wrapper out"
        )
    return _ClipAction(env)


def normalise_observation(env: Environment) -> Environment:
    """Shifts and scales observations by their running mean and variance.

    As in Gymnasium's NormalizeObservation, each environment has its own statistics, opening observations
    count, and resets keep the statistics; a mask of actions stays as it is. It is for learners of others:
    `seedbed.train` refuses it, as its evaluations would begin without statistics. Raises SeedbedError if
    an observation is not float32.
    """
    for path, leaf in jax.tree.leaves_with_path(without(env.spec.observation, ACTION_MASK)):
        if leaf.dtype != "float32":
            raise SeedbedError(
                f"normalise_observation: observation{jax.tree_util.keystr(path)} of "
                f"{type(env).__name__} is {leaf.dtype}; only float32 can be normalised"
            )
    return _NormaliseObservation(env)


def normalises_observations(env: Environment) -> bool:
    """Returns whether `normalise_observation` is among an environment's wrappers."""
    return has_wrapper(env, _NormaliseObservation)


def delay(env: Environment, observation: int = 0, action: int = 0) -> Environment:
    """Shows observations late, and lets actions work late, by up to so many steps.

    Both delays of an episode are drawn when it opens, each number of steps from 0 on with the same chance,
    and stay. Until then the opening observation is shown, and the action is 0. What only critics see, and
    which actions may be taken, is never late. The policy sees neither delay.

    Raises SeedbedError unless both are whole numbers from 0 on, and if actions that are late are not a Box.
    """
    for name, steps in (("observation", observation), ("action", action)):
        if type(steps) is not int or not 0 <= steps <= _MOST_DELAY:
            raise SeedbedError(
                f"delay: {name} is {steps!r} steps; give a whole number from 0 to {_MOST_DELAY}"
            )
    box = env.spec.action
    if action and not (isinstance(box, Box) and max(box.low) <= 0 <= min(box.high)):
        raise SeedbedError(
            f"delay: the actions of {type(env).__name__} are {box}, of which no 0 means that nothing is "
            "done; give action=0"
        )
    return _Delay(env, observation, action)


@dataclasses.dataclass(frozen=True)
class _ScaleReward(Wrapper):
    """The wrapper of `scale_reward`."""

    factor: float
    shows_the_task: ClassVar[bool] = True

    def _stepped(self, child: EnvState, own: Tree, metrics: dict[str, Array]) -> EnvState:
        reward = child.timestep.reward * jnp.float32(self.factor)
        return wrapped(child._replace(timestep=child.timestep._replace(reward=reward)), ())


@dataclasses.dataclass(frozen=True)
class _ClipAction(Wrapper):
    """The wrapper of `clip_action`."""

    def step(self, state: EnvState, action: Array) -> EnvState:
        box: Any = self.env.spec.action
        low, high = (
            jnp.asarray(bound, jnp.float32).reshape(box.shape) for bound in (box.low, box.high)
        )
        return super().step(state, jnp.clip(action, low, high))


@dataclasses.dataclass(frozen=True)
class _NormaliseObservation(Wrapper):
    """The wrapper of `normalise_observation`; its state is (count, means, variances).

    They start at 1e-4, 0 and 1, as in Gymnasium.
    """

    def _opened(self, child: EnvState, own: Tree) -> EnvState:
        if own is None:
            observation = without(child.timestep.observation, ACTION_MASK)
            zeros, ones = (jax.tree.map(f, observation) for f in (jnp.zeros_like, jnp.ones_like))
            own = (jnp.float32(1e-4), zeros, ones)
        return self._normalised(child, own)

    def _stepped(self, child: EnvState, own: Tree, metrics: dict[str, Array]) -> EnvState:
        return self._normalised(child, own)

    def _normalised(self, child: EnvState, own: Tree) -> EnvState:
        count, mean, variance = own
        whole, total = child.timestep.observation, count + 1
        observation = without(whole, ACTION_MASK)
        mean_now = jax.tree.map(lambda m, x: m + (x - m) / total, mean, observation)
        variance = jax.tree.map(
            lambda v, m, x: (v + jnp.square(x - m) / total) * (count / total),
            variance,
            mean,
            observation,
        )
        scaled = jax.tree.map(
            lambda x, m, v: (x - m) * jax.lax.rsqrt(v + 1e-8), observation, mean_now, variance
        )
        if (mask := entry(whole, ACTION_MASK)) is not None:
            scaled = scaled | {ACTION_MASK: mask}
        timestep = child.timestep._replace(observation=scaled)
        return wrapped(child._replace(timestep=timestep), (total, mean_now, variance))


class _Late(NamedTuple):
    """The state of `_Delay`: the newest of each come first."""

    steps: Array  # int32 [2], by which observations and actions of this episode are late
    seen: Tree  # [observation + 1, ...]
    taken: Array  # [action + 1, ...]


@dataclasses.dataclass(frozen=True)
class _Delay(Wrapper):
    """The wrapper of `delay`."""

    observation: int
    action: int

    def reopen(self, key: Array, last: EnvState | None) -> EnvState:
        """Opens an episode and draws its delays; consumes the key."""
        child_key, key = jax.random.split(key)
        child = reopen_child(self.env, child_key, None if last is None else unwrapped(last)[0])
        most = jnp.array([self.observation, self.action], jnp.float32)
        steps = jnp.floor(jax.random.uniform(key, (2,), jnp.float32) * (most + 1)).astype(jnp.int32)
        taken = action_array(self.env.spec.action)
        shown = without(child.timestep.observation, *_IN_TIME)
        seen = jax.tree.map(lambda x: jnp.stack([x] * (self.observation + 1)), shown)
        nothing = jnp.zeros((self.action + 1, *taken.shape), taken.dtype)
        return wrapped(child, _Late(steps, seen, nothing))

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Takes the action that is due, and shows the observation that is."""
        child, own = unwrapped(state)
        taken = _pushed(own.taken, action)
        child = step_child(self.env, child, _at(taken, own.steps[1]))
        observation = child.timestep.observation
        shown = without(observation, *_IN_TIME)
        seen = jax.tree.map(_pushed, own.seen, shown)
        late = jax.tree.map(lambda leaf: _at(leaf, own.steps[0]), seen)
        late = {**observation, **late} if isinstance(observation, dict) else late
        timestep = child.timestep._replace(observation=late)
        return wrapped(child._replace(timestep=timestep), _Late(own.steps, seen, taken))


def _pushed(kept: Array, newest: Array) -> Array:
    """Returns rows with another one before them, and without the last."""
    return jnp.concatenate([jnp.asarray(newest, kept.dtype)[None], kept[:-1]])


def _at(rows: Array, index: Array) -> Array:
    """Returns a row. Every lane of a vector has an index of its own, so all rows are looked at."""
    found = rows[0]
    for number in range(1, rows.shape[0]):
        found = jnp.where(index == number, rows[number], found)
    return found
