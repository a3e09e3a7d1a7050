"""IMPALA: actor-critic learning from slightly old experience, which V-trace corrects.

Source: Espeholt et al. (2018), "IMPALA: Scalable Distributed Deep-RL with Importance Weighted
Actor-Learner Architectures". The defaults are its Atari settings, but for `reward_clip`.
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
from seedbed.agents.base import Gradient, Params, SinglePass, stepped
from seedbed.ops import losses, returns
from seedbed.types import (
    LearnerState,
    OnPolicy,
    Output,
    Timestep,
    Trajectory,
    Tree,
    trajectory_masks,
)


class Batch(NamedTuple):
    """A trajectory whose leaves all have the environments on axis 1."""

    timesteps: Timestep  # [T + 1, B, ...]
    behaviour: Behaviour  # [T, B, ...]
    previous: Tree  # [T + 1, B, A] previous actions if the network has a memory, else ()
    core: Tree  # [1, B, ...] the network's, before row 0


@dataclasses.dataclass(frozen=True)
class Impala(SinglePass, ActorCriticAgent):
    """An agent that learns by IMPALA; its fields are the hyperparameters, its methods are pure functions."""

    rho_clip: float = 1.0
    """Largest importance weight of temporal differences."""
    c_clip: float = 1.0
    """Largest importance weight of traces."""
    pg_rho_clip: float = 1.0
    """Largest importance weight of policy gradients."""

    learning_rate: float = 6e-4
    """Step size of the optimizer at the start."""
    learning_rate_decay: bool = True
    """Whether the step size falls linearly to 0 at the end of the training."""
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    """Method that turns gradients into changes of the weights."""
    max_gradient_norm: float = 40.0
    """Largest norm of the gradient, of each network's if there are two; the paper's sum over rows."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        super().__post_init__()
        positive = ("rho_clip", "c_clip", "pg_rho_clip", "learning_rate", "max_gradient_norm")
        self._require("more than 0", lambda x: x > 0, *positive)

    @property
    def experience(self) -> OnPolicy:
        """Returns options of experience: unrolls in the order in which they arrive."""
        return OnPolicy(self.unroll, self.batch)

    def prepare(self, state: LearnerState, trajectory: Trajectory, key: Array) -> Batch:
        """Collects the inputs of the loss, with the environments on axis 1; the key is unused."""
        del state, key
        previous, core = self._memory(trajectory.actor_state.core, trajectory.action)
        core = jax.tree.map(lambda x: x[None], core)
        return Batch(
            timesteps=trajectory.timesteps,
            behaviour=trajectory.extras,
            previous=previous,
            core=core,
        )

    def gradients(
        self, state: LearnerState, minibatch: Batch, key: Array
    ) -> tuple[Gradient, Output]:
        """Computes the gradient of the mean loss over the valid rows; the key is unused."""
        del key
        weights, (output, targets) = jax.grad(self._loss, has_aux=True)(
            state.params.weights, state, minibatch
        )
        norm = losses.global_norm(weights) * self._rows()
        steps = minibatch.timesteps
        grads = self._gradient(state, weights, steps.observation, targets, ~steps.first[1:])
        return grads, output._replace(metrics=output.metrics | {"gradient_norm": norm})

    def clip_gradient(self, grads: Gradient) -> Gradient:
        """Scales a gradient to the sum over the rows, and bounds its norm, for two networks that of each.

        The paper sums the loss over the rows. With a mean, the gradient would never reach the paper's bound
        of the norm, and its square would be far below the paper's epsilon of 0.01.
        """
        weights = jax.tree.map(lambda x: x * self._rows(), grads.weights)
        return self._bounded(grads._replace(weights=weights), self.max_gradient_norm)

    def apply(self, state: LearnerState, grads: Gradient, output: Output) -> LearnerState:
        """Applies a gradient. It is not checked here: metric `gradient_norm` shows one that is not finite."""
        changes, optimizer_state = self._optimizer().update(grads.weights, state.optimizer_state)
        weights = stepped(
            state, state.params.weights, changes, self.learning_rate, self.learning_rate_decay
        )
        state = state._replace(optimizer_state=optimizer_state)
        return self._finish_minibatch(state, weights, grads, output)

    def _loss(
        self, weights: Tree, state: LearnerState, batch: Batch
    ) -> tuple[Array, tuple[Output, Array]]:
        """Returns the loss of a batch, with metrics and the value targets `[T, B]`.

        The loss adds up policy gradient, value error and entropy, as in the paper's section 4.2.
        """
        steps = batch.timesteps
        core = jax.tree.map(lambda x: x[0], batch.core)
        parameters, outputs, _ = self._evaluate(
            Params(weights, state.params.seen), steps, batch.previous, core
        )
        scale = self._return_scale(state)
        value = scale.values(outputs)
        policy = self._policy(parameters[:-1])
        log_prob = policy.log_prob(batch.behaviour.draw)
        masks = trajectory_masks(steps, self.gamma, self.trace_decay)
        rho = jnp.where(masks.valid, jnp.exp(log_prob - batch.behaviour.log_prob), 0.0)
        clips = returns.VtraceClips(self.rho_clip, self.c_clip, self.pg_rho_clip)
        vtrace = jax.vmap(lambda *x: returns.vtrace(*x, clips=clips), in_axes=1, out_axes=1)(
            value[:-1],
            value[1:],
            self._rewards(steps),
            masks.discount,
            masks.trace,
            jax.lax.stop_gradient(rho),
        )
        advantage = scale.scaled(vtrace.pg_advantage)

        def mean(rows: Array) -> Array:
            return losses.masked_mean(rows, masks.valid)

        policy_loss = mean(losses.policy_gradient_losses(log_prob, advantage))
        value_error = losses.value_losses(outputs[:-1], scale.outputs(vtrace.targets))
        value_loss = mean(scale.known * value_error)
        entropy = mean(self._entropy(policy, batch.behaviour.draw))
        loss, metrics = self._total_loss(policy_loss, value_loss, entropy)
        metrics |= {
            "rho_mean": mean(rho),
            "explained_variance": losses.explained_variance(
                value[:-1], vtrace.targets, masks.valid
            ),
        }
        output = Output(metrics, masks.valid.sum(dtype=jnp.float32))
        return loss, (output, vtrace.targets)

    def _optimizer(self) -> optax.GradientTransformation:
        """Makes the optimizer for a step size of 1; `apply` multiplies its changes by the step size."""
        if self.optimizer == "adam":
            return optax.scale_by_adam()
        # TensorFlow 1's RMSProp, as in the paper: the average of squares starts at 1, and epsilon is added
        # under the root.
        return optax.scale_by_rms(decay=0.99, eps=0.01, initial_scale=1.0, eps_in_sqrt=True)

    def _rows(self) -> float:
        return float(self.unroll * self.batch)
