"""PPO: actor-critic learning that uses each batch several times, with limited changes of the policy.

Source: Schulman et al. (2017), "Proximal Policy Optimization Algorithms".
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from seedbed.agents.acting import Behaviour
from seedbed.agents.actor_critic import ActorCriticAgent
from seedbed.agents.base import Gradient, Params
from seedbed.ops import losses, returns
from seedbed.types import (
    LearnerState,
    OnPolicy,
    Output,
    SeedbedError,
    Timestep,
    Trajectory,
    Tree,
    trajectory_masks,
)

_ADAPTIVE_RATES = (1e-6, 1e-2)
"""Smallest and largest step size of the adaptive schedule."""


class Batch(NamedTuple):
    """A batch of rows to learn from; all leaves have the environments on axis 1."""

    timesteps: Timestep  # [T, B, ...]
    behaviour: Behaviour  # [T, B, ...]
    advantage: Array  # [T, B]
    target: Array  # [T, B] of the value
    value: Array  # [T, B] before the update
    valid: Array  # [T, B] bool
    previous: Tree  # [T, B, A] previous actions if the network has a memory, else ()
    core: Tree  # [1, B, ...] the network's, before row 0


class Optimizer(NamedTuple):
    """The state of the optimizer."""

    moments: Tree
    learning_rate: Array  # float32 scalar, step size of the last update
    asked: Array  # float32 scalar, the option `learning_rate` at that update


@dataclasses.dataclass(frozen=True)
class Ppo(ActorCriticAgent):
    """An agent that learns by PPO; its fields are the hyperparameters, its methods are pure functions."""

    trace_decay: float = 0.95
    entropy_cost: float = 0.0
    epochs: int = 4
    """Passes over a batch."""
    minibatches: int = 4
    """Parts into which each pass divides a batch, by environments; it must divide `batch`."""
    clip: float = 0.2
    """How far a probability ratio may move from 1 before its gradient stops."""
    value_clip: float = 0.0
    """How far a value may move before its gradient stops, in deviations if normalised; 0 is no limit."""
    normalise_advantages: bool = True
    """Whether to scale the advantages of each batch to mean 0 and deviation 1."""
    reward_scale: float = 1.0
    """Factor for rewards, after clipping."""

    learning_rate: float = 3e-4
    """Step size of Adam at the start."""
    schedule: Literal["constant", "linear", "adaptive"] = "linear"
    """Step size over time: linear falls to 0 at the end; adaptive keeps the KL divergence near target_kl,
    with step sizes from 1e-6 to 1e-2, or to learning_rate where that is beyond."""
    target_kl: float = 0.01
    """KL divergence from the acting policy, in nats, that the adaptive schedule aims at."""
    max_kl: float = 0.0
    """Minibatches whose KL divergence from the acting policy is above this are skipped; 0 is no limit.

    With an adaptive schedule each skipped one lowers the step size, too.
    """
    max_gradient_norm: float = 0.5
    """Largest norm of the gradient, of each network's if there are two; a longer one is scaled down to it."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        super().__post_init__()
        self._require("at least 1", lambda x: x >= 1, "epochs", "minibatches")
        self._require("0 or more", lambda x: x >= 0, "value_clip", "max_kl")
        positive = ("clip", "reward_scale", "learning_rate", "target_kl", "max_gradient_norm")
        self._require("more than 0", lambda x: x > 0, *positive)
        self._require_use(
            self.schedule == "adaptive",
            "give schedule adaptive, or to skip minibatches that are further away, max_kl",
            "target_kl",
        )
        self._require(
            f"a number that divides batch, {self.batch}",
            lambda x: self.batch % x == 0,
            "minibatches",
        )
        used = ["schedule"] * (self.schedule == "adaptive") + ["max_kl"] * (self.max_kl > 0)
        for name in used if self.epochs * self.minibatches == 1 else ():
            raise SeedbedError(
                f"{self._name}.{name} is {getattr(self, name)}, but with 1 epoch of 1 minibatch the policy "
                "that learns is the one that acted: its divergence is always 0; give 2 epochs or minibatches"
            )

    @property
    def experience(self) -> OnPolicy:
        """Returns options of experience: all unrolls come from the policy that the update begins with.

        PPO does not correct advantages for another policy.
        """
        return OnPolicy(self.unroll, self.batch, synchronous=True)

    def prepare(self, state: LearnerState, trajectory: Trajectory, key: Array) -> Batch:
        """Estimates advantages and value targets; the key is unused."""
        del key
        steps = trajectory.timesteps
        previous, core = self._memory(trajectory.actor_state.core, trajectory.action)
        _, outputs, _ = self._evaluate(state.params, steps, previous, core)
        scale = self._return_scale(state)
        value = scale.values(outputs)
        masks = trajectory_masks(steps, self.gamma, self.trace_decay)
        advantage = jax.vmap(returns.generalised_advantages, in_axes=1, out_axes=1)(
            value[:-1],
            value[1:],
            self.reward_scale * self._rewards(steps),
            masks.discount,
            masks.trace,
        )
        target = value[:-1] + advantage
        if self.normalise_advantages:
            advantage = losses.normalised_advantages(advantage, target, masks.valid)
        else:
            advantage = scale.scaled(advantage)
        return Batch(
            timesteps=jax.tree.map(lambda x: x[:-1], steps),
            behaviour=trajectory.extras,
            advantage=advantage,
            target=target,
            value=value[:-1],
            valid=masks.valid,
            previous=jax.tree.map(lambda x: x[:-1], previous),
            core=jax.tree.map(lambda x: x[None], core),
        )

    def gradients(
        self, state: LearnerState, minibatch: Batch, key: Array
    ) -> tuple[Gradient, Output]:
        """Computes the gradient of the mean loss over the valid rows; the key is unused."""
        del key
        weights, output = jax.grad(self._loss, has_aux=True)(state.params.weights, state, minibatch)
        observation, valid = minibatch.timesteps.observation, minibatch.valid
        return self._gradient(state, weights, observation, minibatch.target, valid), output

    def clip_gradient(self, grads: Gradient) -> Gradient:
        """Bounds the norm of a gradient, for two networks that of each."""
        return self._bounded(grads, self.max_gradient_norm)

    def apply(self, state: LearnerState, grads: Gradient, output: Output) -> LearnerState:
        """Applies a gradient, or skips it if the divergence is above `max_kl`.

        Statistics and `updates` advance in both cases. The gradient is not checked here: the metrics show a
        loss that is not finite.
        """
        kl, optimizer = output.metrics["kl"], state.optimizer_state
        rate = self._learning_rate(state, kl)
        changes, moments = self._optimizer().update(grads.weights, optimizer.moments)
        if self.max_kl:
            near = kl <= self.max_kl
            changes = jax.tree.map(lambda x: jnp.where(near, x, 0.0), changes)
            moments = jax.tree.map(
                lambda new, old: jnp.where(near, new, old), moments, optimizer.moments
            )
        weights = jax.tree.map(lambda x, change: x - rate * change, state.params.weights, changes)
        asked = jnp.float32(self.learning_rate)
        optimizer = Optimizer(moments=moments, learning_rate=rate, asked=asked)
        state = state._replace(optimizer_state=optimizer)
        return self._finish_minibatch(state, weights, grads, output)

    def init(self, key: Array) -> LearnerState:
        """Makes the initial learner state; consumes the key."""
        state = super().init(key)
        # Two arrays: no two leaves may share a buffer.
        rate, asked = (jnp.float32(self.learning_rate) for _ in range(2))
        optimizer = Optimizer(moments=state.optimizer_state, learning_rate=rate, asked=asked)
        return state._replace(optimizer_state=optimizer)

    def _loss(self, weights: Tree, state: LearnerState, batch: Batch) -> tuple[Array, Output]:
        """Returns the loss of a minibatch: clipped surrogate, value error and entropy.

        Source: Schulman et al. (2017), equation 9.
        """
        core = jax.tree.map(lambda x: x[0], batch.core)
        params = Params(weights, state.params.seen)
        parameters, value, _ = self._evaluate(params, batch.timesteps, batch.previous, core)
        scale = self._return_scale(state)
        target, old_value = scale.outputs(batch.target), scale.outputs(batch.value)
        policy = self._policy(parameters)
        log_ratio = policy.log_prob(batch.behaviour.draw) - batch.behaviour.log_prob
        log_ratio = jnp.where(batch.valid, log_ratio, 0.0)
        ratio = jnp.exp(log_ratio)
        clipped = jnp.clip(ratio, 1.0 - self.clip, 1.0 + self.clip)
        surrogate = jnp.minimum(ratio * batch.advantage, clipped * batch.advantage)
        value_error = losses.value_losses(value, target)
        if self.value_clip:
            near = old_value + jnp.clip(value - old_value, -self.value_clip, self.value_clip)
            value_error = jnp.maximum(value_error, losses.value_losses(near, target))

        def mean(rows: Array) -> Array:
            return losses.masked_mean(rows, batch.valid)

        entropy = mean(self._entropy(policy, batch.behaviour.draw))
        policy_loss, value_loss = -mean(surrogate), mean(scale.known * value_error)
        loss, metrics = self._total_loss(policy_loss, value_loss, entropy)
        metrics |= {
            # Schulman's estimate of KL(acting || new), which has a low variance.
            "kl": mean(ratio - 1.0 - log_ratio),
            "clipped": mean((ratio != clipped).astype(jnp.float32)),
            "explained_variance": losses.explained_variance(value, target, batch.valid),
        }
        return loss, Output(metrics, batch.valid.sum(dtype=jnp.float32))

    def _learning_rate(self, state: LearnerState, kl: Array) -> Array:
        if self.schedule == "adaptive":
            before = state.optimizer_state
            # The ratio is 1 unless the run was resumed with another learning rate.
            rate = before.learning_rate * (self.learning_rate / before.asked)
            factor = jnp.where(kl > 2.0 * self.target_kl, 1 / 1.5, 1.0)
            factor = jnp.where(kl < 0.5 * self.target_kl, 1.5, factor)
            # A batch's first minibatch is seen with the policy that acted, so nothing can be measured.
            measured = state.auxiliary.parts > 0
            low, high = _ADAPTIVE_RATES
            low, high = jnp.minimum(low, self.learning_rate), jnp.maximum(high, self.learning_rate)
            return jnp.where(measured, jnp.clip(rate * factor, low, high), rate)
        left = 1.0 - state.progress if self.schedule == "linear" else 1.0
        return jnp.float32(self.learning_rate) * left

    def _optimizer(self) -> optax.GradientTransformation:
        return optax.scale_by_adam(eps=1e-5)
