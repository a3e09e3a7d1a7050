"""R2D2: action values of a network with a memory, learnt from replayed sequences.

Source: Kapturowski et al. (2019), "Recurrent Experience Replay in Distributed Reinforcement Learning".
The defaults are its Atari settings as far as the paper gives them, but sequences do not overlap.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from seedbed.agents.base import Memory, ObservationStats
from seedbed.agents.learning_statistics import sampled_row
from seedbed.agents.q_learning import LEAST_PRIORITY, ActingValues, QLearningAgent
from seedbed.nets.q_network import RecurrentQNetwork
from seedbed.nets.recurrent import LSTMState, initial_lstm_state
from seedbed.ops import losses, value_learning
from seedbed.ops.distributions import action_vector
from seedbed.types import (
    ActorState,
    LearnerState,
    Masks,
    Output,
    Replay,
    Timestep,
    Trajectory,
    Tree,
    trajectory_masks,
)


class Batch(NamedTuple):
    """A batch of items, which are on axis 1 of all leaves; T is burn_in + sequence."""

    timesteps: Timestep  # [T + 1, B, ...]
    action: Array  # [T, B]
    memory: Memory  # [1, B, ...] before row 0
    importance: Array  # [1, B] weight of the item's loss


@dataclasses.dataclass(frozen=True)
class R2d2(QLearningAgent):
    """An agent that learns by R2D2; its fields are the hyperparameters, its methods are pure functions."""

    gamma: float = 0.997
    batch: int = 64
    capacity: int = 100_000
    min_size: int = 5_000
    ratio: float = 1.5
    priority_exponent: float = 0.9
    importance_exponent: float = 0.6
    n_step: int = 5
    target_period: int = 2_500
    adam_epsilon: float = 1e-3
    max_gradient_norm: float = 40.0
    """Largest norm of the gradient, which is summed over a sequence's rows as in the paper."""

    sequence: int = 80
    """Steps of an item that are learned from; the next item begins after them."""
    burn_in: int = 40
    """Steps of an item before these, which only warm up the memory."""
    lstm_size: int = 512
    """Units of the memory."""
    head_size: int = 512
    """Hidden units of the value and of the advantages in the dueling head."""
    largest_share: float = 0.9
    """Weight of the largest error in an item's priority; the mean error has the rest."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        super().__post_init__()
        self._require("at least 1", lambda x: x >= 1, "sequence", "lstm_size", "head_size")
        self._require("0 or more", lambda x: x >= 0, "burn_in")
        self._require("from 0 to 1", lambda x: 0 <= x <= 1, "largest_share")

    @property
    def experience(self) -> Replay:
        """Returns options of replay: successive sequences, each with the `burn_in` steps before it."""
        return self._prioritised_replay(
            sequence=self.sequence, period=self.sequence, burn_in=self.burn_in
        )

    def actor_state(self, env_ids: Array, num_envs: int | Array) -> ActorState:
        """Makes the actor state of environments `env_ids` `[B]`: empty memories, exploration rates."""
        return ActorState(
            core=self._initial_memory(env_ids.shape[0]), per_env=self._ladder(env_ids, num_envs)
        )

    def act(
        self, params: Tree, actor_state: ActorState, timestep: Timestep, keys: Array, evaluate: bool
    ) -> tuple[Array, ActingValues, ActorState]:
        """Chooses actions `[B]`; extras are `ActingValues`. Consumes `keys` `[B]`."""
        row = jax.tree.map(lambda x: x[None], timestep)
        memory: Memory = actor_state.core
        q, lstm = self._values(params.weights, params.seen, row, memory.action[None], memory.lstm)
        action, extras = self._choose(
            q[0], params, actor_state.per_env, timestep.observation, keys, evaluate
        )
        return action, extras, actor_state._replace(core=Memory(lstm, action))

    def initial_priorities(self, timesteps: Timestep, extras: ActingValues) -> Array:
        """Returns priorities `[B]` by the values of acting, which stand for both networks' values."""
        learned = jax.tree.map(lambda x: x[self.burn_in :], timesteps)
        masks = self._masks(learned)
        best, chosen = extras.best[self.burn_in + 1 :], extras.chosen[self.burn_in : -1]
        error = self._targets(best, learned, masks) - chosen
        return self._priorities(error, masks.valid)

    def prepare(self, state: LearnerState, trajectory: Trajectory, key: Array) -> Batch:
        """Collects the inputs of the loss, with the items on axis 1; the key is unused."""
        del state, key
        memory, importance = jax.tree.map(
            lambda x: x[None], (trajectory.actor_state.core, trajectory.importance)
        )
        return Batch(
            timesteps=trajectory.timesteps,
            action=trajectory.action,
            memory=memory,
            importance=importance,
        )

    def _loss(self, weights: Tree, state: LearnerState, batch: Batch) -> tuple[Array, Output]:
        """Returns the mean over valid learned rows of importance times half the squared error."""
        learned = jax.tree.map(lambda x: x[self.burn_in :], batch.timesteps)
        masks = self._masks(learned)
        q = self._sequence_values(weights, state.params.seen, batch)
        target_q = self._sequence_values(state.auxiliary, state.params.seen, batch)
        selector = self._masked(q, learned.observation)
        best = value_learning.double_q_values(target_q[1:], selector[1:])
        chosen = value_learning.chosen_values(q[:-1], batch.action[self.burn_in :])
        error = self._targets(best, learned, masks) - chosen
        loss = losses.masked_mean(batch.importance * 0.5 * jnp.square(error), masks.valid)
        metrics = {
            "loss/total": loss,
            "q_mean": losses.masked_mean(chosen, masks.valid),
            "error_mean": losses.masked_mean(jnp.abs(error), masks.valid),
        }
        weight = masks.valid.sum(dtype=jnp.float32)
        return loss, Output(metrics, weight, self._priorities(error, masks.valid))

    def _sequence_values(self, weights: Tree, seen: ObservationStats, batch: Batch) -> Array:
        """Returns action values `[sequence + 1, B, A]` of the learned rows.

        The `burn_in` rows before them only warm up the memory and get no gradient.
        """
        memory = jax.tree.map(lambda x: x[0], batch.memory)
        previous = jnp.concatenate([memory.action[None], batch.action])

        def rows(part: slice) -> tuple[Timestep, Array]:
            return jax.tree.map(lambda x: x[part], (batch.timesteps, previous))

        lstm = memory.lstm
        if self.burn_in:
            steps, action = rows(slice(0, self.burn_in))
            _, lstm = self._values(lax.stop_gradient(weights), seen, steps, action, lstm)
        steps, action = rows(slice(self.burn_in, None))
        return self._values(weights, seen, steps, action, lstm)[0]

    def _targets(self, best: Array, learned: Timestep, masks: Masks) -> Array:
        """Returns rescaled n-step returns `[sequence, B]`, for bootstrap values `best` of that shape."""
        returns = partial(value_learning.rescaled_n_step_returns, n=self.n_step)
        return jax.vmap(returns, in_axes=1, out_axes=1)(
            best, self._rewards(learned), masks.discount, masks.trace
        )

    def _priorities(self, error: Array, valid: Array) -> Array:
        mixed = partial(value_learning.mixed_priority, largest_share=self.largest_share)
        return jax.vmap(mixed, in_axes=1)(error, valid) + LEAST_PRIORITY

    def _masks(self, steps: Timestep) -> Masks:
        return trajectory_masks(steps, self.gamma, 1.0)

    @property
    def _gradient_scale(self) -> float:
        # The paper sums the loss over the rows. Its epsilon of Adam and bound of the norm are for the sum.
        return float(self.sequence)

    def _sampled(self, batch: Batch, updates: Array) -> tuple[Tree, Array]:
        row = sampled_row(updates, self.sequence)
        learned = jax.tree.map(lambda x: x[self.burn_in :], batch.timesteps)
        counts = self._masks(learned).valid[row]
        return jax.tree.map(lambda x: x[row], learned.observation), counts

    def _initial_memory(self, batch: int) -> Memory:
        return Memory(initial_lstm_state(batch, self.lstm_size), jnp.zeros(batch, jnp.int32))

    def _initial_weights(self, key: Array) -> Tree:
        observation = self._zero_observation(1, 1)
        memory, row = self._initial_memory(1), jnp.zeros((1, 1))
        previous = action_vector(self._env().action, memory.action[None])
        return self._network().init(key, observation, previous, row, row > 0, memory.lstm)

    def _values(
        self,
        weights: Tree,
        seen: ObservationStats,
        steps: Timestep,
        previous_action: Array,
        lstm: LSTMState,
    ) -> tuple[Array, LSTMState]:
        """Returns action values `[T, B, A]` for timesteps `[T, B]`, and the state after the last row."""
        return self._network().apply(  # type: ignore[return-value]
            weights,
            self._shown(steps.observation),
            action_vector(self._env().action, previous_action),
            steps.reward,
            steps.first,
            lstm,
            self._scaling(seen),
        )

    def _network(self) -> RecurrentQNetwork:
        return RecurrentQNetwork(
            num_actions=self._num_actions(),
            image=self.torso,
            sizes=self.hidden_sizes,
            activation=self.activation,
            head_size=self.head_size,
            lstm_size=self.lstm_size,
            dtype=self._dtype,
        )
