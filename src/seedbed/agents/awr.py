"""AWR: actor-critic learning from replay, by imitating actions as much as their advantage says.

Source: Peng et al. (2019), "Advantage-Weighted Regression: Simple and Scalable Off-Policy Reinforcement
Learning". Advantages come from lambda-returns of the replayed sequences with the newest values, and are
normalised over a batch, as in the authors' code. A network with a memory begins a sequence with the state
that acting had there.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from seedbed.agents.actor_critic import ActorCriticAgent
from seedbed.agents.base import Gradient, OffPolicyAgent, Params, stepped
from seedbed.ops import losses, returns
from seedbed.ops.distributions import Normal
from seedbed.ops.keys import normal_rows
from seedbed.types import (
    LearnerState,
    Output,
    Replay,
    Timestep,
    Trajectory,
    Tree,
    trajectory_masks,
)


class Batch(NamedTuple):
    """A batch of rows to learn from; all leaves have the items on axis 1."""

    timesteps: Timestep  # [T, B, ...]
    draw: Tree  # [T, B, ...] as acting drew it
    likeness: Array  # [T, B] weight of imitating a row's action
    target: Array  # [T, B] of the value
    valid: Array  # [T, B] bool
    previous: Tree  # [T, B, A] previous actions if the network has a memory, else ()
    core: Tree  # [1, B, ...] the network's, before row 0


@dataclasses.dataclass(frozen=True)
class Awr(ActorCriticAgent, OffPolicyAgent):
    """An agent that learns by AWR; its fields are the hyperparameters, its methods are pure functions.

    An item of its replay is an unroll.
    """

    unroll: int = 16
    """Steps of an item; the next one begins after them."""
    batch: int = 32
    capacity: int = 10_000
    min_size: int = 200
    ratio: float = 8.0
    trace_decay: float = 0.95
    """Lambda of the returns."""
    entropy_cost: float = 0.0
    normalise_observations: bool = True
    normalise_returns: bool = True
    temperature: float = 1.0
    """Advantage, in deviations of a batch's, that makes an action e times as much worth imitating."""
    largest_weight: float = 20.0
    """Largest weight of imitating an action."""

    learning_rate: float = 3e-4
    """Step size of Adam at the start."""
    learning_rate_decay: bool = True
    """Whether the step size falls linearly to 0 at the end of the training."""
    max_gradient_norm: float = 1.0
    """Largest norm of the gradient, of each network's if there are two; a longer one is scaled down to it."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        super().__post_init__()
        rates = ("learning_rate", "max_gradient_norm")
        self._require("more than 0", lambda x: x > 0, "temperature", "largest_weight", *rates)

    @property
    def experience(self) -> Replay:
        """Returns options of replay: successive unrolls, drawn with equal probabilities."""
        return self._replay(sequence=self.unroll, period=self.unroll)

    def initial_priorities(self, timesteps: Timestep, extras: Tree) -> Array:
        """Returns ones `[B]`: items are drawn with equal probabilities."""
        del extras
        return jnp.ones(timesteps.first.shape[1:])

    def prepare(self, state: LearnerState, trajectory: Trajectory, key: Array) -> Batch:
        """Estimates value targets, and what each action is worth imitating; the key is unused."""
        del key
        steps = trajectory.timesteps
        previous, core = self._memory(trajectory.actor_state.core, trajectory.action)
        _, outputs, _ = self._evaluate(state.params, steps, previous, core)
        value = self._return_scale(state).values(outputs)
        masks = trajectory_masks(steps, self.gamma, self.trace_decay)
        target = jax.vmap(returns.lambda_returns, in_axes=1, out_axes=1)(
            value[1:], self._rewards(steps), masks.discount, masks.trace
        )
        advantage = losses.normalised_advantages(target - value[:-1], target, masks.valid)
        exponent = jnp.minimum(advantage / self.temperature, jnp.log(self.largest_weight))
        return Batch(
            timesteps=jax.tree.map(lambda x: x[:-1], steps),
            draw=trajectory.extras.draw,
            likeness=jnp.exp(jnp.where(masks.valid, exponent, 0.0)),
            target=target,
            valid=masks.valid,
            previous=jax.tree.map(lambda x: x[:-1], previous),
            core=jax.tree.map(lambda x: x[None], core),
        )

    def gradients(
        self, state: LearnerState, minibatch: Batch, key: Array
    ) -> tuple[Gradient, Output]:
        """Computes the gradient of the mean loss over the valid rows; consumes the key."""
        weights, output = jax.grad(self._loss, has_aux=True)(
            state.params.weights, state, minibatch, key
        )
        observation, valid = minibatch.timesteps.observation, minibatch.valid
        return self._gradient(state, weights, observation, minibatch.target, valid), output

    def clip_gradient(self, grads: Gradient) -> Gradient:
        """Bounds the norm of a gradient, for two networks that of each."""
        return self._bounded(grads, self.max_gradient_norm)

    def apply(self, state: LearnerState, grads: Gradient, output: Output) -> LearnerState:
        """Applies a gradient without checking it."""
        changes, optimizer_state = self._optimizer().update(grads.weights, state.optimizer_state)
        weights = stepped(
            state, state.params.weights, changes, self.learning_rate, self.learning_rate_decay
        )
        state = state._replace(optimizer_state=optimizer_state)
        return self._finish_minibatch(state, weights, grads, output)

    def _loss(
        self, weights: Tree, state: LearnerState, batch: Batch, key: Array
    ) -> tuple[Array, Output]:
        """Returns the loss of a batch: the paper's equations 9 and 10 as losses, and entropy."""
        core = jax.tree.map(lambda x: x[0], batch.core)
        params = Params(weights, state.params.seen)
        parameters, value, _ = self._evaluate(params, batch.timesteps, batch.previous, core)
        scale, policy = self._return_scale(state), self._policy(parameters)
        target = scale.outputs(batch.target)

        def mean(rows: Array) -> Array:
            return losses.masked_mean(rows, batch.valid)

        # Before the scale of returns is known, all advantages are 0: chance would be imitated.
        known = jnp.float32(scale.known)
        policy_loss = -mean(known * batch.likeness * policy.log_prob(batch.draw))
        value_loss = mean(known * losses.value_losses(value, target))
        draw = batch.draw
        if isinstance(policy, Normal):
            # Replayed draws are of older policies, and may be many deviations away from this one's.
            draw = policy.mean + policy.scale * normal_rows(key, policy.mean.shape)
        entropy = mean(self._entropy(policy, draw))
        loss, metrics = self._total_loss(policy_loss, value_loss, entropy)
        metrics |= {
            "likeness": mean(batch.likeness),
            "explained_variance": losses.explained_variance(value, target, batch.valid),
        }
        priorities = jnp.ones(batch.valid.shape[1:])
        return loss, Output(metrics, batch.valid.sum(dtype=jnp.float32), priorities)

    def _optimizer(self) -> optax.GradientTransformation:
        return optax.scale_by_adam()
