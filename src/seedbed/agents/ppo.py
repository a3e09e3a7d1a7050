"""PPO: actor-critic learning that goes over each batch several times, in steps of bounded size.

Source: Schulman et al. (2017), "Proximal Policy Optimization Algorithms".
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from seedbed.agents.actor_critic import ActorCriticAgent
from seedbed.agents.network import Params, Seen
from seedbed.ops import losses, returns
from seedbed.ops.collectives import mean_over_devices
from seedbed.ops.distributions import (
    Distribution,
    Normal,
    check_bounds,
    distribution,
    squash,
)
from seedbed.types import (
    ActorState,
    Box,
    LearnerState,
    OnPolicy,
    Output,
    Timestep,
    Trajectory,
    trajectory_masks,
)

Tree = Any
_ADAPTIVE_RATES = (1e-6, 1e-2)


class Behaviour(NamedTuple):
    """What the policy that acted says of its action; `[T, B, ...]` in a trajectory."""

    log_prob: Array  # of the draw
    draw: Tree  # the action, or where it is a bounded vector what became it by squashing


class Batch(NamedTuple):
    """Rows to learn from; all leaves have the environments on axis 1."""

    timesteps: Timestep  # [T, B, ...]
    behaviour: Behaviour  # [T, B, ...]
    advantage: Array  # [T, B]
    target: Array  # [T, B] of the value
    value: Array  # [T, B] as it was
    valid: Array  # [T, B]
    core: Tree  # [1, B, ...] before row 0


class Optimizer(NamedTuple):
    """What the optimizer carries."""

    moments: Tree
    learning_rate: Array  # float32 scalar


@dataclasses.dataclass(frozen=True)
class Ppo(ActorCriticAgent):
    """Hyperparameters of PPO, and its pure functions."""

    trace_decay: float = 0.95
    """Lambda of the advantage estimates."""
    epochs: int = 4
    """Passes over a batch."""
    minibatches: int = 4
    """Parts into which a pass divides the environments of a batch."""
    clip: float = 0.2
    """How far a probability ratio may move from 1 before its gradient stops."""
    value_clip: float = 0.0
    """How far a value may move from what it was before its gradient stops; 0 is no bound."""
    normalise_advantages: bool = True
    """Whether advantages have mean 0 and deviation 1 in a batch."""
    entropy_cost: float = 0.0
    """Weight of the entropy bonus; of a bounded vector, the entropy before it is squashed."""
    value_cost: float = 0.5
    """Weight of half the squared value error."""
    reward_scale: float = 1.0
    """What rewards are multiplied by before anything is learned from them."""
    squash: Literal["tanh", "clip"] = "tanh"
    """How a normal draw becomes an action between bounds."""
    initial_scale: float = 0.7
    """Deviation of draws at the start, where the bounds are -1 and 1."""
    least_scale: float = 0.001
    """Deviation below which draws do not fall: a policy that must not settle too early."""

    learning_rate: float = 3e-4
    """Step size of Adam at the start."""
    schedule: Literal["constant", "linear", "adaptive"] = "linear"
    """Step size over the training; linear falls to 0 with the steps that are left, and adaptive keeps the
    divergence of an update near `target_kl`."""
    target_kl: float = 0.01
    """Divergence from the acting policy that an adaptive step size aims at."""
    max_kl: float = 0.0
    """Minibatches whose policy is further than this from the acting one are left out; 0 is no bound."""
    max_gradient_norm: float = 0.5
    """Bound of the gradient's norm."""

    def __post_init__(self) -> None:
        """Refuses values that cannot work; raises SeedbedError."""
        super().__post_init__()
        self._require("at least 1", lambda x: x >= 1, "epochs", "minibatches")
        not_negative = ("value_clip", "entropy_cost", "value_cost", "max_kl")
        self._require("0 or more", lambda x: x >= 0, *not_negative)
        self._require("from 0 to 1", lambda x: 0 <= x <= 1, "trace_decay")
        positive = (
            "least_scale",
            "clip",
            "reward_scale",
            "learning_rate",
            "target_kl",
            "max_gradient_norm",
        )
        self._require("more than least_scale", lambda x: x > self.least_scale, "initial_scale")
        self._require("more than 0", lambda x: x > 0, *positive)
        self._require(
            f"a number that divides batch, {self.batch}",
            lambda x: self.batch % x == 0,
            "minibatches",
        )

    @property
    def experience(self) -> OnPolicy:
        """Unrolls of the policy that a batch starts from: advantages are not corrected for any other."""
        return OnPolicy(self.unroll, self.batch, synchronous=True)

    def act(
        self, params: Tree, actor_state: ActorState, timestep: Timestep, keys: Array, evaluate: bool
    ) -> tuple[Tree, Behaviour, ActorState]:
        """Chooses actions `[B]`; extras are a `Behaviour`. Consumes `keys` `[B]`.

        To evaluate, it still samples choices (a mode can be stuck for ever) but takes the mode of
        continuous actions.
        """
        row = jax.tree.map(lambda x: x[None], timestep)
        parameters, _, core = self._evaluate(params, row, actor_state.core)
        policy = self._policy(parameters[0])
        if isinstance(policy, Normal):
            draw = policy.mean
            if not evaluate:
                noise = jax.vmap(lambda key: jax.random.normal(key, draw.shape[1:]))(keys)
                draw = draw + policy.scale * noise
        else:
            draw = jax.vmap(lambda p, key: self._policy(p).sample(key))(parameters[0], keys)
        behaviour = Behaviour(_log_prob(policy, draw), draw)
        return self._action(draw), behaviour, actor_state._replace(core=core)

    def prepare(self, state: LearnerState, trajectory: Trajectory, key: Array) -> Batch:
        """Estimates advantages and value targets; the key is unused."""
        del key
        steps = trajectory.timesteps
        core = trajectory.actor_state.core
        _, value, _ = self._evaluate(state.params, steps, core)
        masks = trajectory_masks(steps, self.gamma, self.trace_decay)
        advantage = jax.vmap(returns.generalised_advantages, in_axes=1, out_axes=1)(
            value[:-1], value[1:], self.reward_scale * steps.reward[1:], masks.discount, masks.trace
        )
        target = value[:-1] + advantage
        if self.normalise_advantages:
            advantage = _normalised(advantage, masks.valid)
        return Batch(
            timesteps=jax.tree.map(lambda x: x[:-1], steps),
            behaviour=trajectory.extras,
            advantage=advantage,
            target=target,
            value=value[:-1],
            valid=masks.valid,
            core=jax.tree.map(lambda x: x[None], core),
        )

    def gradients(self, state: LearnerState, minibatch: Batch, key: Array) -> tuple[Tree, Output]:
        """Computes the gradient of the mean loss over the valid rows; the key is unused."""
        del key
        weights, output = jax.grad(self._loss, has_aux=True)(
            state.params.weights, state.params.seen, minibatch
        )
        opening = jax.tree.map(lambda x: x[0], minibatch.timesteps.observation)
        grads = Params(weights, self._deviations(state.params.seen, opening, output.weight))
        return grads, output

    def apply(self, state: LearnerState, grads: Tree, output: Output) -> LearnerState:
        """Applies a gradient; one that is not finite shows in the metrics of its output."""
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
        rows = self.batch / self.minibatches
        seen = self._absorb(state.params.seen, grads.seen, output.weight, rows)
        return state._replace(
            params=Params(weights, seen),
            optimizer_state=Optimizer(moments, rate),
            updates=state.updates + 1,
        )

    def init(self, key: Array) -> LearnerState:
        """Makes the initial learner state; consumes the key."""
        state = super().init(key)
        rate = jnp.float32(self.learning_rate)
        return state._replace(optimizer_state=Optimizer(state.optimizer_state, rate))

    def _loss(self, weights: Tree, seen: Seen, batch: Batch) -> tuple[Array, Output]:
        """Loss of a minibatch: clipped surrogate, value error and entropy, as in equation 9."""
        core = jax.tree.map(lambda x: x[0], batch.core)
        parameters, value, _ = self._evaluate(Params(weights, seen), batch.timesteps, core)
        policy = self._policy(parameters)
        log_ratio = _log_prob(policy, batch.behaviour.draw) - batch.behaviour.log_prob
        log_ratio = jnp.where(batch.valid, log_ratio, 0.0)
        ratio = jnp.exp(log_ratio)
        clipped = jnp.clip(ratio, 1.0 - self.clip, 1.0 + self.clip)
        surrogate = jnp.minimum(ratio * batch.advantage, clipped * batch.advantage)
        value_error = losses.value_losses(value, batch.target)
        if self.value_clip:
            near = batch.value + jnp.clip(value - batch.value, -self.value_clip, self.value_clip)
            value_error = jnp.maximum(value_error, losses.value_losses(near, batch.target))

        def mean(rows: Array) -> Array:
            return losses.masked_mean(rows, batch.valid)

        entropy = mean(policy.entropy())
        policy_loss, value_loss = -mean(surrogate), mean(value_error)
        loss = policy_loss + self.value_cost * value_loss - self.entropy_cost * entropy
        metrics = {
            "loss/total": loss,
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "entropy": entropy,
            # Schulman's low-variance estimate of KL(acting || new)
            "kl": mean(ratio - 1.0 - log_ratio),
            "clipped": mean((ratio != clipped).astype(jnp.float32)),
            "explained_variance": losses.explained_variance(value, batch.target, batch.valid),
        }
        return loss, Output(metrics, batch.valid.sum(dtype=jnp.float32))

    def _policy(self, parameters: Array) -> Distribution:
        """The distribution of draws: of a Box a normal, whatever its bounds."""
        action = self._env().action
        if not isinstance(action, Box):
            return distribution(action, parameters)
        check_bounds(action)
        mean, raw_scale = jnp.split(parameters, 2, axis=-1)
        # A network's numbers are near 0 at first: there the softplus is initial_scale - least_scale.
        offset = math.log(math.expm1(self.initial_scale - self.least_scale))
        scale = jax.nn.softplus(raw_scale + offset) + self.least_scale
        return Normal(mean, scale, action.shape)

    def _action(self, draw: Array) -> Array:
        action = self._env().action
        return squash(action, draw, self.squash) if isinstance(action, Box) else draw

    def _learning_rate(self, state: LearnerState, kl: Array) -> Array:
        if self.schedule == "adaptive":
            rate = state.optimizer_state.learning_rate
            factor = jnp.where(kl > 2.0 * self.target_kl, 1 / 1.5, 1.0)
            factor = jnp.where(kl < 0.5 * self.target_kl, 1.5, factor)
            return jnp.clip(rate * factor, *_ADAPTIVE_RATES)
        left = 1.0 - state.progress if self.schedule == "linear" else 1.0
        return jnp.float32(self.learning_rate) * left

    def _optimizer(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(self.max_gradient_norm), optax.scale_by_adam(eps=1e-5)
        )


def _log_prob(policy: Distribution, draw: Array) -> Array:
    """Log-probability of draws; squashing, the same for all policies, leaves their ratios alone."""
    if isinstance(policy, Normal):
        return policy.log_prob_flat(draw).sum(-1)
    return policy.log_prob(draw)


def _normalised(advantage: Array, valid: Array) -> Array:
    """Mean 0 and deviation 1 over the valid rows of all devices."""
    count = mean_over_devices(valid.mean(dtype=jnp.float32))
    weight = valid / jnp.maximum(count, 1e-6)
    mean = mean_over_devices((weight * advantage).mean())
    variance = mean_over_devices((weight * jnp.square(advantage - mean)).mean())
    return (advantage - mean) * jax.lax.rsqrt(variance + 1e-8)
