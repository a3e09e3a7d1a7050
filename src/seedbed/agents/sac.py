"""SAC: twin critics, and a random policy that maximises their values plus a bonus for entropy.

Source: Haarnoja et al. (2018), "Soft Actor-Critic Algorithms and Applications".
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from seedbed import trees
from seedbed.agents.base import OffPolicyAgent, require_vectors, zeros_of
from seedbed.nets.critics import TwinCritics, VectorPolicy, critic_inputs, vectors
from seedbed.nets.policy import ActivationName
from seedbed.ops import losses
from seedbed.ops.distributions import (
    action_errors,
    action_vector,
    log_slope,
    parameter_size,
    require_bounded,
    squash,
)
from seedbed.ops.keys import normal_rows
from seedbed.ops.noise import NoiseName, initial_noise, next_noise
from seedbed.types import (
    ActorState,
    Box,
    LearnerState,
    Output,
    Replay,
    Timestep,
    Trajectory,
    Tree,
    trajectory_masks,
)

_LOG_SCALES = (-20.0, 2.0)
"""Bounds of the logarithm of the policy's standard deviation."""


class Weights(NamedTuple):
    """The parameters that learning changes; a gradient has the same structure."""

    policy: Tree
    critics: Tree  # leaves [2, ...]
    log_temperature: Array  # float32 scalar


class Auxiliary(NamedTuple):
    """The parameters that only learning uses."""

    critics: Tree  # leaves [2, ...]
    targets: Tree  # leaves [2, ...], running average of the critics
    log_temperature: Array  # float32 scalar


class Batch(NamedTuple):
    """A batch of transitions; all leaves have the items on axis 1."""

    inputs_tm1: Array  # [T, B, D] observations as vectors, what only critics see last
    inputs_t: Array  # [T, B, D] next observations as vectors
    action_tm1: Array  # [T, B, A] scaled to bounds of -1 and 1
    reward_t: Array  # [T, B]
    discount_t: Array  # [T, B]
    valid: Array  # [T, B] bool
    importance: Array  # [T, B] weight of a row's loss


@dataclasses.dataclass(frozen=True)
class Sac(OffPolicyAgent):
    """An agent that learns by SAC; its fields are the hyperparameters, its methods are pure functions.

    An item of its replay is a transition.
    """

    batch: int = 256
    min_size: int = 10_000
    ratio: float = 256.0
    """Average number of times that a transition is drawn; equal to `batch`, it is one update per step."""
    reward_scale: float = 1.0
    """Factor for rewards."""

    hidden_sizes: tuple[int, ...] = (256, 256)
    """Units of the layers of the policy and of each critic, one number for each layer."""
    activation: ActivationName = "relu"
    """Activation function after each layer."""

    learning_rate: float = 3e-4
    """Step size of Adam for policy, critics and temperature."""
    tau: float = 0.005
    """Share by which the target critics move towards the critics after each update."""
    initial_temperature: float = 1.0
    """Value of one nat of entropy at the start, in scaled rewards."""
    target_entropy: float = -1.0
    """Entropy that the temperature aims at, in nats per element of an action scaled to [-1, 1]."""
    noise: NoiseName = "white"
    """Draws of actions from step to step: white is independent, pink is alike for a while."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work.

        If `spec` is given, it must have a bounded Box as action and no images.
        """
        super().__post_init__()
        self._require("more than 0 and at most 1", lambda x: 0 < x <= 1, "tau")
        positive = ("reward_scale", "learning_rate", "initial_temperature")
        self._require("more than 0", lambda x: x > 0, *positive)
        self._require("sizes of at least 1", lambda x: len(x) > 0 and min(x) >= 1, "hidden_sizes")
        if self.spec is not None:
            self._box()
            require_vectors(self._name, self.spec.observation)

    @property
    def experience(self) -> Replay:
        """Returns options of replay: single transitions, drawn with equal probabilities."""
        return self._replay(sequence=1, period=1)

    def init(self, key: Array) -> LearnerState:
        """Makes the initial learner state; consumes the key."""
        policy_key, critics_key = jax.random.split(key)
        action = jnp.zeros((1, math.prod(self._box().shape)))
        inputs = critic_inputs(zeros_of(self._env().observation, 1), 1)
        weights = Weights(
            policy=self._policy().init(policy_key, self._policy_part(inputs)),
            critics=self._critics().init(critics_key, inputs, action),
            log_temperature=jnp.log(jnp.float32(self.initial_temperature)),
        )
        targets = jax.tree.map(jnp.copy, weights.critics)
        state = self._initial_state(weights.policy, weights)
        return state._replace(auxiliary=_auxiliary(weights, targets))

    def actor_state(self, env_ids: Array, num_envs: int | Array) -> ActorState:
        """Returns the states of pink noise of environments `env_ids` `[B]`, or none; there is no memory."""
        del num_envs
        return ActorState(core=(), per_env=initial_noise(self.noise, env_ids))

    def act(
        self, params: Tree, actor_state: ActorState, timestep: Timestep, keys: Array, evaluate: bool
    ) -> tuple[Array, tuple[()], ActorState]:
        """Chooses actions `[B, ...]`; extras are (). Consumes `keys` `[B]`.

        If `evaluate` is set, an action is the squashed mean of the policy, and the keys are unused.
        """
        mean, scale = self._normal(params, vectors(self._shown(timestep.observation), 1))
        draw, scale = checkpoint_name(mean, "mean"), checkpoint_name(scale, "scale")
        if not evaluate:
            noise, per_env = next_noise(actor_state.per_env, timestep.first, keys, draw.shape[-1])
            draw, actor_state = draw + scale * noise, ActorState((), per_env)
        return squash(self._box(), draw, "tanh"), (), actor_state

    def imitation_losses(
        self, params: Tree, actor_state: ActorState, timestep: Timestep, action: Array
    ) -> tuple[Array, ActorState]:
        """Returns the squared distances `[B]` of the policy's means from actions `[B, ...]` of another."""
        mean = self._normal(params, vectors(self._shown(timestep.observation), 1))[0]
        return action_errors(self._box(), mean, action, "tanh"), actor_state

    def initial_priorities(self, timesteps: Timestep, extras: Tree) -> Array:
        """Returns ones `[B]`: items are drawn with equal probabilities."""
        del extras
        return jnp.ones(timesteps.first.shape[1:])

    def prepare(self, state: LearnerState, trajectory: Trajectory, key: Array) -> Batch:
        """Collects the inputs of the losses, with the items on axis 1; the key is unused."""
        del state, key
        steps = trajectory.timesteps
        inputs = critic_inputs(steps.observation, 2)
        masks = trajectory_masks(steps, self.gamma, 0.0)
        importance = trajectory.importance
        return Batch(
            inputs_tm1=inputs[:-1],
            inputs_t=inputs[1:],
            action_tm1=action_vector(self._box(), trajectory.action),
            reward_t=self.reward_scale * steps.reward[1:],
            discount_t=masks.discount,
            valid=masks.valid,
            importance=jnp.broadcast_to(importance[None], masks.valid.shape),
        )

    def gradients(
        self, state: LearnerState, minibatch: Batch, key: Array
    ) -> tuple[Weights, Output]:
        """Computes the gradients of three mean losses over the valid rows; consumes the key."""
        weights, targets = _weights(state), state.auxiliary.targets
        return jax.grad(self._loss, has_aux=True)(weights, targets, minibatch, key)

    def apply(self, state: LearnerState, grads: Weights, output: Output) -> LearnerState:
        """Applies a gradient without checking it, then moves the target critics towards the critics."""
        del output
        weights, optimizer_state = self._step(state, _weights(state), grads)
        targets = optax.incremental_update(weights.critics, state.auxiliary.targets, self.tau)
        return state._replace(
            params=weights.policy,
            optimizer_state=optimizer_state,
            updates=state.updates + 1,
            auxiliary=_auxiliary(weights, targets),
        )

    def _loss(
        self, weights: Weights, targets: Tree, batch: Batch, key: Array
    ) -> tuple[Array, Output]:
        """Returns the sum of three losses: critics, policy and temperature. Consumes the key.

        They are the paper's equations 5, 7 and 18, but the last has the logarithm of the temperature in place
        of the temperature.
        No parameter gets a gradient from two losses, so one gradient serves all three. All losses use the
        parameters from before the update, while the paper updates the policy after the critics.
        """
        fixed = lax.stop_gradient(weights)
        temperature = jnp.exp(fixed.log_temperature)
        policy_key, target_key = jax.random.split(key)

        def mean(rows: Array) -> Array:
            return losses.masked_mean(batch.importance * rows, batch.valid)

        action_t, log_prob_t = self._sample(fixed.policy, batch.inputs_t, target_key)
        q_t = self._values(targets, batch.inputs_t, action_t).min(0)
        target = batch.reward_t + batch.discount_t * (q_t - temperature * log_prob_t)
        q_tm1 = self._values(weights.critics, batch.inputs_tm1, batch.action_tm1)
        critic_loss = mean(losses.value_losses(q_tm1, target[None]).sum(0))

        action, log_prob = self._sample(weights.policy, batch.inputs_tm1, policy_key)
        q = self._values(fixed.critics, batch.inputs_tm1, action).min(0)
        policy_loss = mean(temperature * log_prob - q)

        aim = self.target_entropy * action.shape[-1]
        temperature_loss = weights.log_temperature * mean(-lax.stop_gradient(log_prob) - aim)
        loss = critic_loss + policy_loss + temperature_loss
        metrics = {
            "loss/total": loss,
            "loss/critic": critic_loss,
            "loss/policy": policy_loss,
            "entropy": losses.masked_mean(-log_prob, batch.valid),
            "temperature": temperature,
            "q": losses.masked_mean(q_tm1.mean(0), batch.valid),
        }
        ones = jnp.ones(batch.valid.shape[1:])
        return loss, Output(metrics, batch.valid.sum(dtype=jnp.float32), ones)

    def _normal(self, policy: Tree, inputs: Array) -> tuple[Array, Array]:
        """Returns mean and standard deviation, each `[N, A]`, of draws before they are squashed."""
        parameters: Any = self._policy().apply(policy, inputs)
        mean, log_scale = jnp.split(parameters, 2, axis=-1)
        return mean, jnp.exp(jnp.clip(log_scale, *_LOG_SCALES))

    def _sample(self, policy: Tree, inputs: Array, key: Array) -> tuple[Array, Array]:
        """Draws actions `[T, B, A]` scaled to bounds of -1 and 1; returns them and log-densities `[T, B]`.

        Both are computed from the noise, so they have gradients. Consumes the key.
        """
        shown = self._policy_part(inputs).reshape(inputs.shape[0] * inputs.shape[1], -1)
        mean, scale = self._normal(policy, shown)
        noise = normal_rows(key, (*inputs.shape[:2], mean.shape[-1])).reshape(mean.shape)
        draw = mean + scale * noise
        normal = -0.5 * jnp.square(noise) - jnp.log(scale) - 0.5 * math.log(2.0 * math.pi)
        rows, slope = inputs.shape[:-1], log_slope(self._box(), draw)
        return jnp.tanh(draw).reshape(*rows, -1), (normal.sum(-1) - slope).reshape(rows)

    def _values(self, critics: Tree, inputs: Array, action: Array) -> Array:
        """Returns both critics' values `[2, T, B]` of actions `[T, B, A]` between -1 and 1."""
        rows = inputs.shape[:-1]
        folded = (x.reshape(-1, x.shape[-1]) for x in (inputs, action))
        values: Any = self._critics().apply(critics, *folded)
        return values.reshape(2, *rows)

    def _policy_part(self, inputs: Array) -> Array:
        """Returns what the policy sees of the vectors that critics see."""
        shown = trees.leaves(self._shown(self._env().observation))
        return inputs[..., : sum(math.prod(leaf.shape) for leaf in shown)]

    def _policy(self) -> VectorPolicy:
        size = parameter_size(self._box())
        return VectorPolicy(size, self.hidden_sizes, self.activation, self._dtype)

    def _critics(self) -> TwinCritics:
        return TwinCritics(self.hidden_sizes, self.activation, self._dtype)

    def _optimizer(self) -> optax.GradientTransformation:
        return optax.adam(self.learning_rate)

    def _box(self) -> Box:
        """Returns the action spec; raises SeedbedError unless it is a Box with finite bounds."""
        return require_bounded(self._name, self._env().action)


def _weights(state: LearnerState) -> Weights:
    held: Auxiliary = state.auxiliary
    return Weights(policy=state.params, critics=held.critics, log_temperature=held.log_temperature)


def _auxiliary(weights: Weights, targets: Tree) -> Auxiliary:
    return Auxiliary(weights.critics, targets, weights.log_temperature)
