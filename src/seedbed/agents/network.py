"""What agents whose network begins with torsos have in common: its options and normalised observations."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from seedbed import trees
from seedbed.nets.convolution import Scaling
from seedbed.nets.policy import ActivationName
from seedbed.nets.torsos import TorsoName, auto_torso, is_image
from seedbed.ops import statistics
from seedbed.ops.statistics import Deviations, RunningStatistics
from seedbed.types import ArraySpec, EnvSpec, SeedbedError, Timestep

Tree = Any

Seen = RunningStatistics | tuple[()]
"""Statistics of observations, where the agent normalises them."""


class Params(NamedTuple):
    """What acting needs."""

    weights: Tree
    seen: Seen  # of observations


class Sums(NamedTuple):
    """What rows of experience add to statistics; () where there are none."""

    observations: Deviations | tuple[()]
    returns: Deviations | tuple[()] = ()


class Gradient(NamedTuple):
    """Gradients of the weights, and sums for the statistics that travel and are averaged with them."""

    weights: Tree
    sums: Sums


class Memory(NamedTuple):
    """What acting with a recurrent network carries from step to step."""

    lstm: Tree  # leaves [B, H]
    action: Array  # [B, ...] the action taken last, in the form of the environment's spec


@dataclasses.dataclass(frozen=True)
class NetworkAgent:
    """The options of the torsos, and what every agent does with what they see."""

    spec: EnvSpec | None = None

    gamma: float = 0.99
    """Discount of a step."""
    reward_clip: float = 0.0
    """Bound of a reward's size in the loss, as on Atari; 0 is no bound."""
    normalise_observations: bool = False
    """Whether the network sees each number (each pixel) less its running mean, in running deviations, of
    which it sees 5 at most."""

    torso: TorsoName = "auto"
    """Network of images `[H, W, C]`. Auto is nature from 36 x 36 pixels and small from 20 x 20; smaller
    images, and observations that are no images, are flattened into the mlp."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Layers of the mlp."""
    activation: ActivationName = "relu"
    """What follows a layer of an mlp."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the torso."""

    def __post_init__(self) -> None:
        """Refuses values that cannot work; raises SeedbedError."""
        self._require("0 or more", lambda x: x >= 0, "reward_clip")
        self._require("from 0 to 1", lambda x: 0 <= x <= 1, "gamma")
        self._require("sizes of at least 1", lambda x: len(x) > 0 and min(x) >= 1, "hidden_sizes")
        needs_images = self.torso not in ("auto", "mlp")
        if self.spec is not None and needs_images and not self._sees_images():
            raise SeedbedError(
                f"{self._name}.torso is {self.torso} but the environment shows no images [H, W, C]; "
                "choose auto or mlp"
            )
        if self.spec is not None and self.torso == "auto":
            for leaf in trees.leaves(self.spec.observation):
                auto_torso(leaf.shape)

    def _initial_seen(self) -> Seen:
        return statistics.initial(self._env().observation) if self.normalise_observations else ()

    def _scaling(self, seen: Seen) -> Tree:
        """What torsos do to observations: a tree of `Scaling`, or None."""
        if not isinstance(seen, RunningStatistics):
            return None
        return jax.tree.map(_scaling, self._env().observation, seen.mean, seen.variance)

    def _rewards(self, steps: Timestep) -> Array:
        """Rewards `[T, B]` of timesteps `[T + 1, B]`, as the loss sees them."""
        reward = steps.reward[1:]
        if self.reward_clip:
            reward = jnp.clip(reward, -self.reward_clip, self.reward_clip)
        return reward

    def _sees_images(self) -> bool:
        return any(is_image(leaf.shape) for leaf in trees.leaves(self._env().observation))

    def _env(self) -> EnvSpec:
        if self.spec is None:
            raise SeedbedError(
                f"{self._name}.spec is None; bind the agent to an environment's spec first"
            )
        return self.spec

    def _require(self, rule: str, allowed: Any, *names: str) -> None:
        for name in names:
            if not allowed(getattr(self, name)):
                raise SeedbedError(f"{self._name}.{name} is {getattr(self, name)}; give {rule}")

    @property
    def _name(self) -> str:
        return type(self).__name__


def observation_sums(seen: Seen, opening: Tree, weight: Array) -> Deviations | tuple[()]:
    """Sums what a batch's opening rows, leaves `[B, ...]`, add to the statistics, divided by `weight`.

    Gradients are averaged by `weight`, their number of valid rows. Divided by it here, and multiplied by the
    whole batch's in `absorb`, the sums over any division of a batch are those of the whole. One row of an
    unroll is sample enough.
    """
    if not isinstance(seen, RunningStatistics):
        return ()
    return statistics.deviations(seen, opening).times(1.0 / jnp.maximum(weight, 1.0))


def absorb(seen: Seen, sums: Deviations | tuple[()], weight: Array) -> Seen:
    """Adds sums that were divided by `weight` to the statistics, where there are any."""
    if isinstance(seen, RunningStatistics) and isinstance(sums, Deviations):
        return statistics.absorb(seen, sums.times(weight))
    return ()


def _scaling(leaf: ArraySpec, mean: Array, variance: Array) -> Scaling:
    # A pixel that hardly ever changes is not blown up beyond one grey level.
    least = 1.0 if leaf.dtype == "uint8" else 1e-4
    return Scaling(mean, jax.lax.rsqrt(jnp.maximum(variance, least)))
