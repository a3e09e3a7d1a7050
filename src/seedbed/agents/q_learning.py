"""A base for agents that learn action values from replay: acting, target networks and updates."""

from __future__ import annotations

import abc
import dataclasses
from typing import Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from seedbed.agents.base import (
    Gradient,
    NetworkAgent,
    OffPolicyAgent,
    Params,
    Sums,
    clipped,
)
from seedbed.agents.learning_statistics import absorb, observation_sums
from seedbed.ops import losses
from seedbed.ops.masks import masked, random_allowed
from seedbed.ops.value_learning import chosen_values
from seedbed.types import (
    Discrete,
    LearnerState,
    Output,
    Replay,
    SeedbedError,
    Tree,
)

LEAST_PRIORITY = 1e-6
"""Number that is added to priorities, so that an item without error can be drawn again."""
# What AdaGrad's sum of squares begins with. Gradients of Q-learning are so small that optax's own value, 0.1,
# would outweigh the squares of a whole run.
_FIRST_SQUARES = 1e-6


class ActingValues(NamedTuple):
    """The action values that acting records, float32 `[B]`, or `[T, B]` in a trajectory."""

    chosen: Array  # value of the action taken
    best: Array  # value of the best action


@dataclasses.dataclass(frozen=True)
class QLearningAgent(OffPolicyAgent, NetworkAgent):
    """A base class with the options of acting and priorities, and the update with a target network.

    Environment i of N takes a random action with probability
    `epsilon ** (1 + epsilon_power * (i + 0.5) / N)` during the whole of the training. With `epsilon_updates`,
    all have one rate instead, which falls with the number of updates, as in Mnih et al. (2015). It is part of
    the parameters, so it reaches acting with them, wherever they are updated.
    """

    priority_exponent: float = 0.0
    """Strength of prioritised replay; 0 draws all items with equal probabilities."""
    importance_exponent: float = 0.0
    """How far importance weights undo the bias of prioritised replay; 1 undoes all of it."""
    n_step: int = 1
    """Number of rewards in a return, before it bootstraps from a value."""
    target_period: int = 2_000
    """Updates between two copies of the weights into the target network."""

    epsilon: float = 0.4
    """Largest probability of a random action, which the first of many environments is close to."""
    epsilon_power: float = 7.0
    """Exploration falls over the environments from epsilon to epsilon ** (1 + this)."""
    epsilon_updates: int = 0
    """Updates in which one exploration rate falls from epsilon to epsilon_final; 0: each has its own rate."""
    epsilon_final: float = 0.1
    """Probability of a random action after epsilon_updates."""
    evaluation_epsilon: float = 1e-3
    """Probability of a random action in evaluations."""

    optimizer: Literal["adam", "adagrad"] = "adam"
    """Rule by which gradients change the weights; Gorila has AdaGrad (Duchi et al., 2011)."""
    learning_rate: float = 1e-4
    """Step size of the optimizer."""
    adam_epsilon: float = 1.5e-4
    """Number that Adam adds to the gradient's root mean square, by which it divides."""
    max_gradient_norm: float = 10.0
    """Largest norm of the gradient; a longer gradient is scaled down to it."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        super().__post_init__()
        self._require("at least 1", lambda x: x >= 1, "n_step", "target_period")
        shares = ("epsilon", "epsilon_final", "evaluation_epsilon")
        exponents = ("priority_exponent", "importance_exponent")
        self._require("from 0 to 1", lambda x: 0 <= x <= 1, *shares, *exponents)
        self._require("0 or more", lambda x: x >= 0, "epsilon_power", "epsilon_updates")
        positive = ("learning_rate", "adam_epsilon", "max_gradient_norm")
        self._require("more than 0", lambda x: x > 0, *positive)
        self._require_use(
            self.epsilon_updates > 0,
            "give epsilon_updates, in which it is reached",
            "epsilon_final",
        )
        prioritised = self.priority_exponent > 0
        self._require_use(prioritised, "give priority_exponent", "importance_exponent")
        if self.spec is not None:
            self._num_actions()

    def init(self, key: Array) -> LearnerState:
        """Makes the initial learner state; `auxiliary` is the target network's weights. Consumes the key."""
        weights = self._initial_weights(key)
        params = Params(weights, self._initial_seen(), self._annealed(jnp.int32(0)))
        state = self._initial_state(params, weights)
        return state._replace(auxiliary=jax.tree.map(jnp.copy, weights))

    def with_params(self, state: LearnerState, params: Params) -> LearnerState:
        """Returns a learner state with other parameters, of which the target network is a copy."""
        return state._replace(params=params, auxiliary=jax.tree.map(jnp.copy, params.weights))

    def gradients(
        self, state: LearnerState, minibatch: Tree, key: Array
    ) -> tuple[Gradient, Output]:
        """Computes the gradient of the mean loss over the valid rows; the key is unused."""
        del key
        weights, output = jax.grad(self._loss, has_aux=True)(state.params.weights, state, minibatch)
        observation, counts = self._sampled(minibatch, state.updates)
        sums = observation_sums(state.params.seen, self._shown(observation), counts, output.weight)
        norm = losses.global_norm(weights) * self._gradient_scale
        metrics = output.metrics | {"gradient_norm": norm}
        return Gradient(weights, Sums(sums)), output._replace(metrics=metrics)

    def clip_gradient(self, grads: Gradient) -> Gradient:
        """Scales a gradient to the loss of the paper, and bounds its norm."""
        weights = jax.tree.map(lambda x: x * self._gradient_scale, grads.weights)
        return clipped(grads._replace(weights=weights), self.max_gradient_norm)

    def apply(self, state: LearnerState, grads: Gradient, output: Output) -> LearnerState:
        """Applies a gradient. It is not checked here: metric `gradient_norm` shows one that is not finite.

        The target network becomes a copy of the new weights after every `target_period` updates.
        """
        weights, optimizer_state = self._step(state, state.params.weights, grads.weights)
        seen = absorb(state.params.seen, grads.sums.observations, output.weight)
        updates = state.updates + 1
        due = updates % self.target_period == 0
        target = jax.tree.map(lambda new, old: jnp.where(due, new, old), weights, state.auxiliary)
        return state._replace(
            params=Params(weights, seen, self._annealed(updates)),
            optimizer_state=optimizer_state,
            updates=updates,
            auxiliary=target,
        )

    def greedy(self) -> Self:
        """Returns the agent whose evaluations always take the action with the highest value."""
        return dataclasses.replace(self, evaluation_epsilon=0.0)

    @abc.abstractmethod
    def _initial_weights(self, key: Array) -> Tree:
        """Makes the initial weights of the network; consumes the key."""

    @abc.abstractmethod
    def _loss(self, weights: Tree, state: LearnerState, batch: Tree) -> tuple[Array, Output]:
        """Returns the loss of a batch with `weights`; the target network's weights are `state.auxiliary`."""

    @abc.abstractmethod
    def _sampled(self, batch: Tree, updates: Array) -> tuple[Tree, Array]:
        """Returns an observation of each item for the statistics, `[B, ...]`, and which of them count."""

    def _prioritised_replay(self, sequence: int, period: int, burn_in: int = 0) -> Replay:
        """Returns options of replay with this agent's exponents of priorities."""
        return dataclasses.replace(
            self._replay(sequence, period, burn_in),
            priority_exponent=self.priority_exponent,
            importance_exponent=self.importance_exponent,
        )

    @property
    def _gradient_scale(self) -> float:
        """Returns the factor that multiplies the gradient of the mean over rows before it is clipped."""
        return 1.0

    def _optimizer(self) -> optax.GradientTransformation:
        if self.optimizer == "adagrad":
            return optax.adagrad(self.learning_rate, _FIRST_SQUARES)
        return optax.adam(self.learning_rate, eps=self.adam_epsilon)

    def _annealed(self, updates: Array) -> Array | tuple[()]:
        """Returns the one exploration rate after so many updates; () if environments have their own."""
        if not self.epsilon_updates:
            return ()
        done = jnp.minimum(1.0, updates.astype(jnp.float32) / self.epsilon_updates)
        return self.epsilon + done * (self.epsilon_final - self.epsilon)

    def _ladder(self, env_ids: Array, num_envs: int | Array) -> Array:
        """Returns the exploration rates `[B]` of environments `env_ids` `[B]`.

        Source: Horgan et al. (2018), section 4.1, where the first and last of many environments have the
        ladder's ends. Here each environment has the middle of an equal part of the ladder: of two
        environments one would otherwise act almost at random, and the other would hardly explore.
        """
        place = (env_ids.astype(jnp.float32) + 0.5) / num_envs
        return self.epsilon ** (1.0 + self.epsilon_power * place)

    def _choose(
        self,
        q: Array,
        params: Params,
        ladder: Array,
        observation: Tree,
        keys: Array,
        evaluate: bool,
    ) -> tuple[Array, ActingValues]:
        """Chooses actions `[B]` epsilon-greedily from values `[B, A]`; consumes `keys` `[B]`.

        The rates are those of the `ladder` `[B]`, or the one of `params`. If `evaluate` is set,
        `evaluation_epsilon` replaces them. What the observation's mask forbids is never taken.
        """
        q = checkpoint_name(q, "q_values")
        allowed = self._masked(q, observation)
        epsilon = ladder
        if not isinstance(params.exploration, tuple):
            epsilon = jnp.broadcast_to(params.exploration, ladder.shape)
        if evaluate:
            epsilon = jnp.full_like(ladder, self.evaluation_epsilon)
        draws = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
        anything = random_allowed(allowed, draws[:, 1])
        greedy = jnp.argmax(allowed, axis=-1).astype(jnp.int32)
        action = jnp.where(draws[:, 0] < epsilon, anything, greedy)
        chosen, best = (chosen_values(q, choice) for choice in (action, greedy))
        return action, ActingValues(chosen, best)

    def _masked(self, q: Array, observation: Tree) -> Array:
        """Returns values `[..., A]` to choose by: those of forbidden actions are the lowest."""
        return masked(self._env().action, q, observation)

    def _num_actions(self) -> int:
        action = self._env().action
        if not isinstance(action, Discrete):
            raise SeedbedError(
                f"{self._name} learns values of one choice among n but the environment takes {action}; "
                "choose ppo, or sac for a Box"
            )
        return action.n
