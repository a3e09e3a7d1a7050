"""IMPALA: actor-critic learning from somewhat stale experience, corrected by V-trace.

Source: Espeholt et al. (2018), "IMPALA: Scalable Distributed Deep-RL with Importance Weighted
Actor-Learner Architectures"; defaults are its Atari settings.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from seedbed.agents.actor_critic import ActorCriticAgent
from seedbed.agents.network import Params, Seen
from seedbed.ops import losses, returns
from seedbed.ops.distributions import distribution
from seedbed.types import (
    ActorState,
    Box,
    LearnerState,
    Output,
    Timestep,
    Trajectory,
    trajectory_masks,
)

Tree = Any


class Batch(NamedTuple):
    """A trajectory whose leaves all have the environments on axis 1."""

    timesteps: Timestep  # [T + 1, B, ...]
    action: Tree  # [T, B, ...]
    behaviour_log_prob: Array  # [T, B]
    core: Tree  # [1, B, ...] before row 0


@dataclasses.dataclass(frozen=True)
class Impala(ActorCriticAgent):
    """Hyperparameters of IMPALA, and its pure functions."""

    trace_decay: float = 1.0
    """Lambda: how far errors travel back along an unroll."""
    rho_clip: float = 1.0
    """Bound of the importance weights of temporal differences."""
    c_clip: float = 1.0
    """Bound of the importance weights of traces."""
    pg_rho_clip: float = 1.0
    """Bound of the importance weights of policy gradients."""
    entropy_cost: float = 0.01
    """Weight of the entropy bonus."""
    value_cost: float = 0.5
    """Weight of half the squared value error."""
    reward_clip: float = 1.0
    """Bound of a reward's size in the loss; 0 is no bound."""

    learning_rate: float = 6e-4
    """Step size of the optimizer at the start."""
    learning_rate_decay: bool = True
    """Whether the step size falls linearly to 0 with the steps that are left of the training."""
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    """Which optimizer."""
    max_gradient_norm: float = 40.0
    """Bound of the norm of the gradient, summed over the rows of a batch as in the paper."""

    def __post_init__(self) -> None:
        """Refuses values that cannot work; raises SeedbedError."""
        super().__post_init__()
        self._require("0 or more", lambda x: x >= 0, "entropy_cost", "value_cost", "reward_clip")
        self._require("from 0 to 1", lambda x: 0 <= x <= 1, "trace_decay")
        positive = ("rho_clip", "c_clip", "pg_rho_clip", "learning_rate", "max_gradient_norm")
        self._require("more than 0", lambda x: x > 0, *positive)

    @property
    def epochs(self) -> int:
        """One: V-trace corrects for the lag of the actors, not for reuse."""
        return 1

    @property
    def minibatches(self) -> int:
        """One."""
        return 1

    def act(
        self, params: Tree, actor_state: ActorState, timestep: Timestep, keys: Array, evaluate: bool
    ) -> tuple[Tree, Array, ActorState]:
        """Chooses actions `[B]`; extras are their log-probabilities `[B]`. Consumes `keys` `[B]`.

        To evaluate, it still samples choices (a mode can be stuck for ever) but takes the mode of
        continuous actions.
        """
        row = jax.tree.map(lambda x: x[None], timestep)
        parameters, _, core = self._evaluate(params, row, actor_state.core)
        action_spec, parameters = self._env().action, parameters[0]
        policy = distribution(action_spec, parameters)
        if evaluate and isinstance(action_spec, Box):
            action = policy.mode()
        else:
            action = jax.vmap(lambda p, key: distribution(action_spec, p).sample(key))(
                parameters, keys
            )
        return action, policy.log_prob(action), actor_state._replace(core=core)

    def prepare(self, state: LearnerState, trajectory: Trajectory, key: Array) -> Batch:
        """Takes what the loss needs, with the environments on axis 1; the key is unused."""
        del state, key
        core = jax.tree.map(lambda x: x[None], trajectory.actor_state.core)
        return Batch(trajectory.timesteps, trajectory.action, trajectory.extras, core)

    def gradients(self, state: LearnerState, minibatch: Batch, key: Array) -> tuple[Tree, Output]:
        """Computes the gradient of the mean loss over the valid rows; the key is unused."""
        del key
        weights, output = jax.grad(self._loss, has_aux=True)(
            state.params.weights, state.params.seen, minibatch
        )
        norm = losses.global_norm(weights) * self._rows()
        opening = jax.tree.map(lambda x: x[0], minibatch.timesteps.observation)
        grads = Params(weights, self._deviations(state.params.seen, opening, output.weight))
        return grads, output._replace(metrics=output.metrics | {"gradient_norm": norm})

    def apply(self, state: LearnerState, grads: Tree, output: Output) -> LearnerState:
        """Applies a gradient; one that is not finite shows in the metrics of its output."""
        changes, optimizer_state = self._optimizer().update(grads.weights, state.optimizer_state)
        left = 1.0 - state.progress if self.learning_rate_decay else 1.0
        rate = jnp.float32(self.learning_rate) * left
        weights = jax.tree.map(lambda x, change: x - rate * change, state.params.weights, changes)
        seen = self._absorb(state.params.seen, grads.seen, output.weight, self.batch)
        return state._replace(
            params=Params(weights, seen),
            optimizer_state=optimizer_state,
            updates=state.updates + 1,
        )

    def _loss(self, weights: Tree, seen: Seen, batch: Batch) -> tuple[Array, Output]:
        """Loss of a batch: policy gradient, value error and entropy, as in section 4.2."""
        steps = batch.timesteps
        core = jax.tree.map(lambda x: x[0], batch.core)
        parameters, value, _ = self._evaluate(Params(weights, seen), steps, core)
        policy = distribution(self._env().action, parameters[:-1])
        log_prob, entropy = policy.log_prob(batch.action), policy.entropy()
        masks = trajectory_masks(steps, self.gamma, self.trace_decay)
        rho = jnp.where(masks.valid, jnp.exp(log_prob - batch.behaviour_log_prob), 0.0)
        reward = steps.reward[1:]
        if self.reward_clip:
            reward = jnp.clip(reward, -self.reward_clip, self.reward_clip)
        clips = returns.VtraceClips(self.rho_clip, self.c_clip, self.pg_rho_clip)
        vtrace = jax.vmap(lambda *x: returns.vtrace(*x, clips=clips), in_axes=1, out_axes=1)(
            value[:-1], value[1:], reward, masks.discount, masks.trace, jax.lax.stop_gradient(rho)
        )

        def mean(rows: Array) -> Array:
            return losses.masked_mean(rows, masks.valid)

        policy_loss = mean(losses.policy_gradient_losses(log_prob, vtrace.pg_advantage))
        value_loss = mean(losses.value_losses(value[:-1], vtrace.targets))
        entropy = mean(entropy)
        loss = policy_loss + self.value_cost * value_loss - self.entropy_cost * entropy
        metrics = {
            "loss/total": loss,
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "entropy": entropy,
            "rho_mean": mean(rho),
            "explained_variance": losses.explained_variance(
                value[:-1], vtrace.targets, masks.valid
            ),
        }
        return loss, Output(metrics, masks.valid.sum(dtype=jnp.float32))

    def _optimizer(self) -> optax.GradientTransformation:
        """What turns gradients into changes of the weights, for a step size of 1."""
        if self.optimizer == "adam":
            step = optax.scale_by_adam()
        else:
            step = optax.scale_by_rms(decay=0.99, eps=0.01)
        # The paper sums the loss over the rows: with a mean, its bound of the norm would never be
        # reached and its epsilon of .01 would swamp the squared gradient.
        return optax.chain(
            optax.scale(self._rows()), optax.clip_by_global_norm(self.max_gradient_norm), step
        )

    def _rows(self) -> float:
        return float(self.unroll * self.batch)
