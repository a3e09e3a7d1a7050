"""Wrappers that change a task: its rewards, actions or observations. The runtime adds none of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from seedbed.envs.device.wrappers import Wrapper, wrapped
from seedbed.types import Array, Box, Environment, EnvState, SeedbedError, Tree


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
    count, and resets keep the statistics. Raises SeedbedError if an observation is not float32.
    """
    for path, leaf in jax.tree.leaves_with_path(env.spec.observation):
        if leaf.dtype != "float32":
            raise SeedbedError(
                f"normalise_observation: observation{jax.tree_util.keystr(path)} of "
                f"{type(env).__name__} is {leaf.dtype}; only float32 can be normalised"
            )
    return _NormaliseObservation(env)


@dataclasses.dataclass(frozen=True)
class _ScaleReward(Wrapper):
    """The wrapper of `scale_reward`."""

    factor: float

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
            observation = child.timestep.observation
            zeros, ones = (jax.tree.map(f, observation) for f in (jnp.zeros_like, jnp.ones_like))
            own = (jnp.float32(1e-4), zeros, ones)
        return self._normalised(child, own)

    def _stepped(self, child: EnvState, own: Tree, metrics: dict[str, Array]) -> EnvState:
        return self._normalised(child, own)

    def _normalised(self, child: EnvState, own: Tree) -> EnvState:
        count, mean, variance = own
        observation, total = child.timestep.observation, count + 1
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
        timestep = child.timestep._replace(observation=scaled)
        return wrapped(child._replace(timestep=timestep), (total, mean_now, variance))
