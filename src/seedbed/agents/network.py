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
from seedbed.types import ArraySpec, EnvSpec, SeedbedError

Tree = Any

Seen = RunningStatistics | tuple[()]
"""Statistics of observations, where the agent normalises them."""


class Params(NamedTuple):
    """What acting needs; also the shape of a gradient."""

    weights: Tree
    seen: Seen | Deviations  # of observations; in a gradient, what its batch adds


@dataclasses.dataclass(frozen=True)
class NetworkAgent:
    """The options of the torsos, and what every agent does with what they see."""

    spec: EnvSpec | None = None

    gamma: float = 0.99
    """Discount of a step."""
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

    def _scaling(self, seen: Seen | Deviations) -> Tree:
        """What torsos do to observations: a tree of `Scaling`, or None."""
        if not isinstance(seen, RunningStatistics):
            return None
        return jax.tree.map(_scaling, self._env().observation, seen.mean, seen.variance)

    def _deviations(self, seen: Seen, observation: Tree, weight: Array) -> Deviations | tuple[()]:
        """Sums what a batch's opening rows, leaves `[B, ...]`, add to the statistics, per valid row.

        Gradients are averaged by valid rows; divided by them, and multiplied again in `_absorb`, the sums
        over any division of a batch are those of the whole. One row of an unroll is sample enough.
        """
        if not isinstance(seen, RunningStatistics):
            return ()
        return jax.tree.map(
            lambda leaf: leaf / jnp.maximum(weight, 1.0), statistics.deviations(seen, observation)
        )

    def _absorb(self, seen: Seen, added: Tree, weight: Array, rows: float) -> Seen:
        """Adds the deviations of `rows` observations, of a gradient averaged over `weight` rows."""
        if not isinstance(seen, RunningStatistics):
            return ()
        sums = jax.tree.map(lambda leaf: leaf * weight, added)
        return statistics.absorb(seen, sums, jnp.float32(rows))

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


def _scaling(leaf: ArraySpec, mean: Array, variance: Array) -> Scaling:
    # A pixel that hardly ever changes is not blown up beyond one grey level.
    least = 1.0 if leaf.dtype == "uint8" else 1e-4
    return Scaling(mean, jax.lax.rsqrt(jnp.maximum(variance, least)))
