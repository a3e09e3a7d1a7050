"""What agents with a policy and a value have in common: network, memory, normalised observations."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array

from seedbed import trees
from seedbed.nets.convolution import Scaling
from seedbed.nets.policy import ActivationName, ActorCritic
from seedbed.nets.torsos import TorsoName, is_image
from seedbed.ops import statistics
from seedbed.ops.distributions import parameter_size
from seedbed.ops.statistics import Deviations, RunningStatistics
from seedbed.types import (
    ActorState,
    ArraySpec,
    EnvSpec,
    LearnerState,
    OnPolicy,
    SeedbedError,
    Timestep,
)

Tree = Any

Seen = RunningStatistics | tuple[()]
"""Statistics of observations, where the agent normalises them."""


class Params(NamedTuple):
    """What acting needs; also the shape of a gradient."""

    weights: Tree
    seen: Seen | Deviations  # of observations; in a gradient, what its batch adds


@dataclasses.dataclass(frozen=True)
class ActorCriticAgent(abc.ABC):
    """The options of the network, and what acting and learning do with it."""

    spec: EnvSpec | None = None
    total_updates: int = 0

    unroll: int = 20
    """Steps of an unroll."""
    batch: int = 32
    """Unrolls of an update."""
    gamma: float = 0.99
    """Discount of a step."""
    normalise_observations: bool = False
    """Whether the network sees each number (each pixel) less its running mean, in running deviations."""

    torso: Literal["auto"] | TorsoName = "auto"
    """Network of images; auto is nature for images and mlp for everything else."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Layers of the mlp."""
    value_sizes: tuple[int, ...] = ()
    """Layers of an mlp of the value's own; empty: it shares the policy's network."""
    activation: ActivationName = "relu"
    """What follows a layer of an mlp."""
    recurrent: bool = False
    """Whether the network has a memory."""
    lstm_size: int = 256
    """Units of the memory."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the torso."""

    def __post_init__(self) -> None:
        """Refuses values that cannot work; raises SeedbedError."""
        self._require("at least 1", lambda x: x >= 1, "unroll", "batch", "lstm_size")
        self._require("0 or more", lambda x: x >= 0, "total_updates")
        self._require("from 0 to 1", lambda x: 0 <= x <= 1, "gamma")
        self._require("sizes of at least 1", lambda x: len(x) > 0 and min(x) >= 1, "hidden_sizes")
        self._require("sizes of at least 1", lambda x: min(x, default=1) >= 1, "value_sizes")
        if self.spec is not None and self.torso in ("nature", "resnet") and not self._sees_images():
            raise SeedbedError(
                f"{self._name}.torso is {self.torso} but the environment shows no images [H, W, C]; "
                "choose auto or mlp"
            )

    @property
    def experience(self) -> OnPolicy:
        """Unrolls as they come."""
        return OnPolicy(self.unroll, self.batch)

    def init(self, key: Array) -> LearnerState:
        """Makes the initial learner state; consumes the key."""
        observation = jax.tree.map(
            lambda leaf: jnp.zeros((1, 1, *leaf.shape), leaf.dtype), self._env().observation
        )
        network = self._network()
        flags = jnp.zeros((1, 1), bool)
        core = network.initial_core(1)
        weights = network.init(key, observation, jnp.zeros((1, 1)), flags, core)
        seen = statistics.initial(self._env().observation) if self.normalise_observations else ()
        updates = jnp.zeros((), jnp.int32)
        return LearnerState(Params(weights, seen), self._optimizer().init(weights), updates)

    def actor_state(self, env_ids: Array, num_envs: int) -> ActorState:
        """Makes empty memories for environments `[B]`; they do not differ from one another."""
        del num_envs
        return ActorState(core=self._network().initial_core(env_ids.shape[0]), per_env=())

    @abc.abstractmethod
    def _optimizer(self) -> optax.GradientTransformation:
        """What turns gradients into changes of the weights."""

    def _evaluate(self, params: Params, steps: Timestep, core: Tree) -> tuple[Array, Array, Tree]:
        """Distribution parameters `[T, B, P]`, values `[T, B]` and the core after the last row."""
        scaling = None
        if isinstance(params.seen, RunningStatistics):
            scaling = jax.tree.map(
                _scaling, self._env().observation, params.seen.mean, params.seen.variance
            )
        outputs = self._network().apply(
            params.weights, steps.observation, steps.reward, steps.first, core, scaling
        )
        return cast(tuple[Array, Array, Tree], outputs)

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

    def _network(self) -> ActorCritic:
        torso = self.torso
        if torso == "auto":
            torso = "nature" if self._sees_images() else "mlp"
        return ActorCritic(
            parameter_size=parameter_size(self._env().action),
            image=torso,
            sizes=self.hidden_sizes,
            value_sizes=self.value_sizes,
            activation=self.activation,
            lstm_size=self.lstm_size if self.recurrent else 0,
            dtype=jnp.dtype(self.compute_dtype),
        )

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
