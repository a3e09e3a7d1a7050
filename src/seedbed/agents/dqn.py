"""DQN: action values learnt from replay, with options for the improvements up to Ape-X.

Sources: Mnih et al. (2015), "Human-level control through deep reinforcement learning"; van Hasselt,
Guez and Silver (2016), double Q-learning; Wang et al. (2016), dueling networks; Schaul et al. (2016),
prioritised replay; Horgan et al. (2018), "Distributed Prioritized Experience Replay" (Ape-X). As in
Ape-X, each environment has its own constant exploration rate; Mnih et al. have one rate that falls.
The options of Ape-X are n_step 3, dueling, priority_exponent 0.6 and importance_exponent 0.4.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from seedbed.agents.base import ObservationStats
from seedbed.agents.q_learning import LEAST_PRIORITY, ActingValues, QLearningAgent
from seedbed.nets.q_network import QNetwork
from seedbed.ops import losses, value_learning
from seedbed.ops.value_learning import OpeningReturn
from seedbed.types import (
    ActorState,
    LearnerState,
    Output,
    Replay,
    Timestep,
    Trajectory,
    Tree,
    trajectory_masks,
)


class Batch(NamedTuple):
    """The opening steps of items, and the observations from which their returns bootstrap.

    Leaves are `[1, B, ...]`.
    """

    observation: Tree
    action: Array  # int32
    rewards: Array  # discounted sum of up to n_step rewards
    discount: Array  # of the value of `final`
    final: Tree  # observation after the last of these rewards
    valid: Array  # bool: the opening step is a transition
    importance: Array  # weight of the item's loss


@dataclasses.dataclass(frozen=True)
class Dqn(QLearningAgent):
    """An agent that learns by DQN; its fields are the hyperparameters, its methods are pure functions.

    The defaults are those of double DQN on Atari, with Adam, but for `reward_clip`, which Atari needs at 1.
    """

    double: bool = True
    """Whether the learning network chooses the action and the target network gives its value."""
    dueling: bool = False
    """Whether the network has a dueling head: the sum of a value and of advantages."""
    head_size: int = 512
    """Hidden units of the value and of the advantages in the dueling head."""
    error_clip: float = 1.0
    """Error from which the loss is linear (Huber) instead of squared; 0 is squared everywhere."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        super().__post_init__()
        self._require("at least 1", lambda x: x >= 1, "head_size")
        self._require("0 or more", lambda x: x >= 0, "error_clip")

    @property
    def experience(self) -> Replay:
        """Returns options of replay: an item begins at each step and has the `n_step` steps of its return."""
        return self._prioritised_replay(sequence=self.n_step, period=1)

    def actor_state(self, env_ids: Array, num_envs: int | Array) -> ActorState:
        """Makes the actor state of environments `env_ids` `[B]`: exploration rates, and no memory."""
        return ActorState(core=(), per_env=self._ladder(env_ids, num_envs))

    def act(
        self, params: Tree, actor_state: ActorState, timestep: Timestep, keys: Array, evaluate: bool
    ) -> tuple[Array, ActingValues, ActorState]:
        """Chooses actions `[B]`; extras are `ActingValues`. Consumes `keys` `[B]`."""
        q = self._values(params.weights, params.seen, timestep.observation)
        action, extras = self._choose(
            q, params, actor_state.per_env, timestep.observation, keys, evaluate
        )
        return action, extras, actor_state

    def initial_priorities(self, timesteps: Timestep, extras: ActingValues) -> Array:
        """Returns priorities `[B]`: the sizes of the opening steps' errors, by the values of acting."""
        opening = self._opening_returns(timesteps)
        items = jnp.arange(extras.best.shape[1])
        best = extras.best[opening.last + 1, items]
        error = opening.rewards + opening.discount * best - extras.chosen[0]
        return jnp.where(timesteps.first[1], 0.0, jnp.abs(error)) + LEAST_PRIORITY

    def prepare(self, state: LearnerState, trajectory: Trajectory, key: Array) -> Batch:
        """Computes the rewards of each return and picks its two observations; the key is unused."""
        del state, key
        steps = trajectory.timesteps
        opening = self._opening_returns(steps)
        items = jnp.arange(opening.last.shape[0])
        batch = Batch(
            observation=jax.tree.map(lambda x: x[0], steps.observation),
            action=trajectory.action[0],
            rewards=opening.rewards,
            discount=opening.discount,
            final=jax.tree.map(lambda x: x[opening.last + 1, items], steps.observation),
            valid=~steps.first[1],
            importance=trajectory.importance,
        )
        return jax.tree.map(lambda x: x[None], batch)

    def _loss(self, weights: Tree, state: LearnerState, batch: Batch) -> tuple[Array, Output]:
        """Returns the mean over valid items of importance times Huber loss; targets get no gradient."""
        items: Batch = jax.tree.map(lambda x: x[0], batch)
        seen, valid = state.params.seen, items.valid
        q = self._values(weights, seen, items.observation)
        chosen = value_learning.chosen_values(q, items.action)
        final_q = self._values(state.auxiliary, seen, items.final)
        selector = self._values(state.params.weights, seen, items.final) if self.double else final_q
        best = value_learning.double_q_values(final_q, self._masked(selector, items.final))
        error = jnp.where(valid, items.rewards + items.discount * best - chosen, 0.0)
        rows = items.importance * value_learning.huber_losses(error, self.error_clip or jnp.inf)
        loss = losses.masked_mean(rows, valid)
        metrics = {
            "loss/total": loss,
            "q_mean": losses.masked_mean(chosen, valid),
            "error_mean": losses.masked_mean(jnp.abs(error), valid),
        }
        priorities = jax.lax.stop_gradient(jnp.abs(error)) + LEAST_PRIORITY
        return loss, Output(metrics, valid.sum(dtype=jnp.float32), priorities)

    def _opening_returns(self, steps: Timestep) -> OpeningReturn:
        """Computes the returns of items' opening steps, leaves `[B]`, from timesteps `[n_step + 1, B]`."""
        masks = trajectory_masks(steps, self.gamma, 1.0)
        return jax.vmap(value_learning.opening_return, in_axes=1)(
            self._rewards(steps), masks.discount, masks.trace
        )

    def _sampled(self, batch: Batch, updates: Array) -> tuple[Tree, Array]:
        del updates
        return jax.tree.map(lambda x: x[0], batch.observation), batch.valid

    def _initial_weights(self, key: Array) -> Tree:
        return self._network().init(key, self._zero_observation(1))

    def _values(self, weights: Tree, seen: ObservationStats, observation: Tree) -> Array:
        """Returns action values `[B, A]` for observations `[B, ...]`."""
        return self._network().apply(weights, self._shown(observation), self._scaling(seen))  # type: ignore[return-value]

    def _network(self) -> QNetwork:
        return QNetwork(
            num_actions=self._num_actions(),
            image=self.torso,
            sizes=self.hidden_sizes,
            activation=self.activation,
            head_size=self.head_size if self.dueling else 0,
            dtype=self._dtype,
        )
