"""What agents that learn action values from replay have in common: acting, targets, updates."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from seedbed.agents.network import (
    Gradient,
    NetworkAgent,
    Params,
    Sums,
    absorb,
    observation_sums,
)
from seedbed.ops import losses
from seedbed.types import (
    Discrete,
    LearnerState,
    Output,
    SeedbedError,
)

Tree = Any
LEAST_PRIORITY = 1e-6
"""Added to priorities, so that an item without error can be drawn again."""


class ActingValues(NamedTuple):
    """What acting says of its action, float32 `[B]`, or `[T, B]` in a trajectory."""

    chosen: Array  # value of the action taken
    best: Array  # value of the best action


@dataclasses.dataclass(frozen=True)
class QLearningAgent(NetworkAgent, abc.ABC):
    """The options of acting and of replay, and one update with a target network."""

    batch: int = 32
    """Items of an update."""
    capacity: int = 1_000_000
    """Items kept; the oldest goes first."""
    min_size: int = 20_000
    """Items before the first update."""
    ratio: float = 8.0
    """How often an item is drawn, on average."""
    priority_exponent: float = 0.0
    """How strongly errors decide what is drawn; 0 draws all items alike."""
    importance_exponent: float = 0.0
    """How far the weights of items make up for that; 1 is fully."""
    n_step: int = 1
    """Rewards of a return, before it goes on with a value."""
    target_period: int = 2_000
    """Updates from one copy into the target network to the next."""

    epsilon: float = 0.4
    """Share of random actions in the environment that explores most."""
    epsilon_power: float = 7.0
    """How much less the last environment explores: environment i of N acts at random with probability
    epsilon ** (1 + epsilon_power * i / (N - 1)), for the whole of the training."""
    evaluation_epsilon: float = 1e-3
    """Share of random actions in evaluations."""

    learning_rate: float = 1e-4
    """Step size of Adam."""
    adam_epsilon: float = 1.5e-4
    """What Adam adds to the size of the gradients by which it divides."""
    max_gradient_norm: float = 10.0
    """Bound of the gradient's norm."""

    def __post_init__(self) -> None:
        """Refuses values that cannot work; raises SeedbedError."""
        super().__post_init__()
        counts = ("batch", "capacity", "min_size", "n_step", "target_period")
        self._require("at least 1", lambda x: x >= 1, *counts)
        at_most = f"at most capacity, {self.capacity}"
        self._require(at_most, lambda x: x <= self.capacity, "min_size")
        shares = ("epsilon", "evaluation_epsilon", "priority_exponent", "importance_exponent")
        self._require("from 0 to 1", lambda x: 0 <= x <= 1, *shares)
        self._require("0 or more", lambda x: x >= 0, "epsilon_power")
        positive = ("ratio", "learning_rate", "adam_epsilon", "max_gradient_norm")
        self._require("more than 0", lambda x: x > 0, *positive)
        if self.spec is not None:
            self._num_actions()

    @property
    def epochs(self) -> int:
        """One: replay decides how often an item is used."""
        return 1

    @property
    def minibatches(self) -> int:
        """One."""
        return 1

    def init(self, key: Array) -> LearnerState:
        """Makes the initial learner state, `auxiliary` the target's weights; consumes the key."""
        weights = self._initial_weights(key)
        return LearnerState(
            params=Params(weights, self._initial_seen()),
            optimizer_state=self._optimizer().init(weights),
            updates=jnp.int32(0),
            progress=jnp.float32(0),
            auxiliary=jax.tree.map(jnp.copy, weights),
        )

    def gradients(
        self, state: LearnerState, minibatch: Tree, key: Array
    ) -> tuple[Gradient, Output]:
        """Computes the gradient of the mean loss over the valid rows; the key is unused."""
        del key
        weights, output = jax.grad(self._loss, has_aux=True)(state.params.weights, state, minibatch)
        sums = observation_sums(state.params.seen, self._opening(minibatch), output.weight)
        norm = losses.global_norm(weights) * self._gradient_scale
        metrics = output.metrics | {"gradient_norm": norm}
        return Gradient(weights, Sums(sums)), output._replace(metrics=metrics)

    def apply(self, state: LearnerState, grads: Gradient, output: Output) -> LearnerState:
        """Applies a gradient; one that is not finite shows in the metrics of its output.

        The target network becomes a copy of the new weights after every `target_period` updates.
        """
        changes, optimizer_state = self._optimizer().update(grads.weights, state.optimizer_state)
        weights = optax.apply_updates(state.params.weights, changes)
        seen = absorb(state.params.seen, grads.sums.observations, output.weight)
        updates = state.updates + 1
        due = updates % self.target_period == 0
        target = jax.tree.map(lambda new, old: jnp.where(due, new, old), weights, state.auxiliary)
        return state._replace(
            params=Params(weights, seen),
            optimizer_state=optimizer_state,
            updates=updates,
            auxiliary=target,
        )

    @abc.abstractmethod
    def _initial_weights(self, key: Array) -> Tree:
        """Weights of the network; consumes the key."""

    @abc.abstractmethod
    def _loss(self, weights: Tree, state: LearnerState, batch: Tree) -> tuple[Array, Output]:
        """Loss of a batch with these weights; the target's are `state.auxiliary`."""

    @abc.abstractmethod
    def _opening(self, batch: Tree) -> Tree:
        """One observation of each item, leaves `[B, ...]`, for the statistics."""

    @property
    def _gradient_scale(self) -> float:
        """By what the gradient of the mean over rows is multiplied before it is clipped."""
        return 1.0

    def _optimizer(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.scale(self._gradient_scale),
            optax.clip_by_global_norm(self.max_gradient_norm),
            optax.adam(self.learning_rate, eps=self.adam_epsilon),
        )

    def _ladder(self, env_ids: Array, num_envs: int) -> Array:
        """Exploration rates `[B]` of environments `[B]`; Horgan et al. (2018), section 4.1."""
        place = env_ids.astype(jnp.float32) / max(num_envs - 1, 1)
        return self.epsilon ** (1.0 + self.epsilon_power * place)

    def _choose(
        self, q: Array, epsilon: Array, keys: Array, evaluate: bool
    ) -> tuple[Array, ActingValues]:
        """Chooses actions `[B]` by values `[B, A]`, epsilon-greedily; consumes `keys` `[B]`."""
        if evaluate:
            epsilon = jnp.full_like(epsilon, self.evaluation_epsilon)
        draws = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
        anything = (draws[:, 1] * self._num_actions()).astype(jnp.int32)
        greedy = jnp.argmax(q, axis=-1).astype(jnp.int32)
        action = jnp.where(draws[:, 0] < epsilon, anything, greedy)
        chosen = jnp.take_along_axis(q, action[:, None], axis=-1)[:, 0]
        return action, ActingValues(chosen, q.max(-1))

    def _num_actions(self) -> int:
        action = self._env().action
        if not isinstance(action, Discrete):
            raise SeedbedError(
                f"{self._name} learns values of one choice among n but the environment takes {action}; "
                "choose ppo, or sac for a Box"
            )
        return action.n
