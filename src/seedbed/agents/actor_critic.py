"""What agents with a policy and a value have in common: network, memory, normalised observations."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array

from seedbed.agents.network import NetworkAgent, Params
from seedbed.nets.policy import ActorCritic
from seedbed.ops.distributions import parameter_size
from seedbed.types import (
    ActorState,
    LearnerState,
    OnPolicy,
    Timestep,
)

Tree = Any


@dataclasses.dataclass(frozen=True)
class ActorCriticAgent(NetworkAgent, abc.ABC):
    """The options of the network, and what acting and learning do with it."""

    unroll: int = 20
    """Steps of an unroll."""
    batch: int = 32
    """Unrolls of an update."""
    value_sizes: tuple[int, ...] = ()
    """Layers of an mlp of the value's own; empty: it shares the policy's network."""
    recurrent: bool = False
    """Whether the network has a memory."""
    lstm_size: int = 256
    """Units of the memory."""

    def __post_init__(self) -> None:
        """Refuses values that cannot work; raises SeedbedError."""
        super().__post_init__()
        self._require("at least 1", lambda x: x >= 1, "unroll", "batch", "lstm_size")
        self._require("sizes of at least 1", lambda x: min(x, default=1) >= 1, "value_sizes")

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
        params = Params(weights, self._initial_seen())
        return LearnerState(
            params=params,
            optimizer_state=self._optimizer().init(weights),
            updates=jnp.int32(0),
            progress=jnp.float32(0),
        )

    def actor_state(self, env_ids: Array, num_envs: int) -> ActorState:
        """Makes empty memories for environments `[B]`; they do not differ from one another."""
        del num_envs
        return ActorState(core=self._network().initial_core(env_ids.shape[0]), per_env=())

    @abc.abstractmethod
    def _optimizer(self) -> optax.GradientTransformation:
        """What turns gradients into changes of the weights."""

    def _evaluate(self, params: Params, steps: Timestep, core: Tree) -> tuple[Array, Array, Tree]:
        """Distribution parameters `[T, B, P]`, values `[T, B]` and the core after the last row."""
        outputs = self._network().apply(
            params.weights,
            steps.observation,
            steps.reward,
            steps.first,
            core,
            self._scaling(params.seen),
        )
        return cast(tuple[Array, Array, Tree], outputs)

    def _network(self) -> ActorCritic:
        return ActorCritic(
            parameter_size=parameter_size(self._env().action),
            image=self.torso,
            sizes=self.hidden_sizes,
            value_sizes=self.value_sizes,
            activation=self.activation,
            lstm_size=self.lstm_size if self.recurrent else 0,
            dtype=jnp.dtype(self.compute_dtype),
        )
