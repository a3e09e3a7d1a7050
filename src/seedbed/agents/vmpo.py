"""V-MPO: actor-critic learning that imitates the better half of what was done, within a trust region.

Source: Song et al. (2020), "V-MPO: On-Policy Maximum a Posteriori Policy Optimization for Discrete and
Continuous Control". As in SEED RL, advantages are V-trace's, which corrects for experience that is slightly
old, and the policy that acted takes the place of the paper's target network: the divergence is from it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from seedbed.agents.acting import Behaviour
from seedbed.agents.actor_critic import ActorCriticAgent
from seedbed.agents.base import Gradient, Params, stepped
from seedbed.ops import losses, returns
from seedbed.ops.collectives import from_all_devices, mean_over_devices
from seedbed.ops.distributions import Normal
from seedbed.types import (
    Box,
    LearnerState,
    OnPolicy,
    Output,
    Timestep,
    Trajectory,
    Tree,
    trajectory_masks,
)


class Duals(NamedTuple):
    """The logarithms of the Lagrange multipliers."""

    log_temperature: Array  # float32 scalar
    log_penalty: Array  # [1], or [2] for a Box: of the means, of the deviations


class Optimizer(NamedTuple):
    """The states of Adam for the weights and for the multipliers."""

    weights: Tree
    duals: Tree


class Estimates(NamedTuple):
    """Estimates of a batch that all its minibatches and passes share; leaves are `[T, B]`."""

    advantage: Array
    better: Array  # bool: whether the advantage is among the larger half of the batch
    target: Array  # of the value
    valid: Array  # bool


class Batch(NamedTuple):
    """A batch of rows to learn from; all leaves have the environments on axis 1.

    If a batch is learned from once, its loss makes the estimates, from an evaluation that it needs anyway.
    """

    timesteps: Timestep  # [T, B, ...], or [T+1, B, ...] without estimates
    behaviour: Behaviour  # [T, B, ...] with its parameters
    previous: (
        Tree  # previous actions, rows as those of timesteps, if the network has a memory, else ()
    )
    core: Tree  # [1, B, ...] the network's, before row 0
    estimates: Estimates | tuple[()]


@dataclasses.dataclass(frozen=True)
class Vmpo(ActorCriticAgent):
    """An agent that learns by V-MPO; its fields are the hyperparameters, its methods are pure functions."""

    bounds_divergence: ClassVar[bool] = True

    entropy_cost: float = 0.0
    epochs: int = 2
    """Passes over a batch; with one and one minibatch, acting does not wait for learning."""
    minibatches: int = 1
    """Parts into which each pass divides a batch, by environments; it must divide `batch`."""
    temperature_bound: float = 0.1
    """How far the weights of the better half may be from equal ones, in nats."""
    kl_bound: float = 0.01
    """Divergence from the acting policy that the penalty aims at, in nats; for a Box, of the means."""
    scale_kl_bound: float = 0.0001
    """Divergence of a Box's deviations that the penalty aims at, in nats."""
    initial_temperature: float = 1.0
    """Temperature of the weights at the start, in normalised advantages if returns are normalised."""
    initial_penalty: float = 5.0
    """Weight of the divergences at the start."""
    dual_learning_rate: float = 0.01
    """Step size of Adam for the logarithms of temperature and penalties."""

    learning_rate: float = 3e-4
    """Step size of Adam at the start."""
    learning_rate_decay: bool = True
    """Whether the step size falls linearly to 0 at the end of the training."""
    max_gradient_norm: float = 1.0
    """Largest norm of the gradient, of each network's if there are two; a longer one is scaled down to it."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        super().__post_init__()
        self._require("at least 1", lambda x: x >= 1, "epochs", "minibatches")
        bounds = ("temperature_bound", "kl_bound", "scale_kl_bound")
        starts = ("initial_temperature", "initial_penalty")
        rates = ("learning_rate", "dual_learning_rate", "max_gradient_norm")
        self._require("more than 0", lambda x: x > 0, *bounds, *starts, *rates)
        self._require(
            f"a number that divides batch, {self.batch}",
            lambda x: self.batch % x == 0,
            "minibatches",
        )

    @property
    def experience(self) -> OnPolicy:
        """Returns options of experience: if there is one update a batch, unrolls in the order of arrival.

        With several updates a batch, its unrolls come from the policy that the first one begins with. The
        penalty, which then counts, would draw the policy back to an older one.
        """
        several = self.epochs * self.minibatches > 1
        return OnPolicy(self.unroll, self.batch, synchronous=several)

    def init(self, key: Array) -> LearnerState:
        """Makes the initial learner state; consumes the key."""
        state = super().init(key)
        penalties = 2 if isinstance(self._env().action, Box) else 1
        duals = Duals(
            log_temperature=jnp.log(jnp.float32(self.initial_temperature)),
            log_penalty=jnp.log(jnp.full(penalties, self.initial_penalty, jnp.float32)),
        )
        return state._replace(
            optimizer_state=Optimizer(state.optimizer_state, self._optimizer().init(duals)),
            auxiliary=state.auxiliary._replace(duals=duals),
        )

    def _told(self, parameters: Array) -> Array:
        """Returns all parameters `[B, P]`: learning compares its distribution with the behaviour's."""
        return parameters

    def prepare(self, state: LearnerState, trajectory: Trajectory, key: Array) -> Batch:
        """Collects the inputs of the loss, with estimates if it is taken more than once.

        The key is unused.
        """
        del key
        steps = trajectory.timesteps
        previous, core = self._memory(trajectory.actor_state.core, trajectory.action)
        core = jax.tree.map(lambda x: x[None], core)
        batch = Batch(steps, trajectory.extras, previous, core, ())
        if self.epochs * self.minibatches == 1:
            return batch
        estimates = self._estimates(state, batch, *self._outputs(state.params, batch))
        steps, previous = jax.tree.map(lambda x: x[:-1], (steps, previous))
        return batch._replace(timesteps=steps, previous=previous, estimates=estimates)

    def _outputs(self, params: Params, batch: Batch) -> tuple[Array, Array]:
        """Returns the distributions' parameters `[T, B, P]` and the values `[T, B]` of all rows."""
        core = jax.tree.map(lambda x: x[0], batch.core)
        return self._evaluate(params, batch.timesteps, batch.previous, core)[:2]

    def _estimates(
        self, state: LearnerState, batch: Batch, parameters: Array, outputs: Array
    ) -> Estimates:
        """Estimates value targets and advantages and finds the better half, from outputs of T+1 rows."""
        steps, behaviour, scale = batch.timesteps, batch.behaviour, self._return_scale(state)
        value = scale.values(outputs)
        masks = trajectory_masks(steps, self.gamma, self.trace_decay)
        log_prob = self._policy(parameters[:-1]).log_prob(behaviour.draw)
        rho = jnp.where(masks.valid, jnp.exp(log_prob - behaviour.log_prob), 0.0)
        vtrace = jax.vmap(returns.vtrace, in_axes=1, out_axes=1)(
            value[:-1], value[1:], self._rewards(steps), masks.discount, masks.trace, rho
        )
        advantage = scale.scaled(vtrace.pg_advantage)
        everywhere = from_all_devices(jnp.where(masks.valid, advantage, jnp.nan))
        better = masks.valid & (advantage >= jnp.nanmedian(everywhere))
        return Estimates(advantage, better, vtrace.targets, masks.valid)

    def gradients(
        self, state: LearnerState, minibatch: Batch, key: Array
    ) -> tuple[Gradient, Output]:
        """Computes the gradient of the mean loss over the valid rows; the key is unused."""
        del key
        learnt = state.params.weights, state.auxiliary.duals
        (weights, duals), (output, found) = jax.grad(self._loss, has_aux=True)(
            learnt, state, minibatch
        )
        observation = minibatch.timesteps.observation
        grads = self._gradient(state, weights, observation, found.target, found.valid)
        return grads._replace(duals=duals), output

    def clip_gradient(self, grads: Gradient) -> Gradient:
        """Bounds the norm of the weights' gradient, for two networks that of each."""
        return self._bounded(grads, self.max_gradient_norm)

    def apply(self, state: LearnerState, grads: Gradient, output: Output) -> LearnerState:
        """Applies a gradient without checking it."""
        held: Optimizer = state.optimizer_state
        duals: Duals = state.auxiliary.duals
        changes, moments = self._optimizer().update(grads.weights, held.weights)
        weights = stepped(
            state, state.params.weights, changes, self.learning_rate, self.learning_rate_decay
        )
        changes, dual_moments = self._optimizer().update(grads.duals, held.duals)
        duals = jax.tree.map(lambda x, change: x - self.dual_learning_rate * change, duals, changes)
        state = state._replace(
            optimizer_state=Optimizer(moments, dual_moments),
            auxiliary=state.auxiliary._replace(duals=duals),
        )
        return self._finish_minibatch(state, weights, grads, output)

    def _loss(
        self, learnt: tuple[Tree, Duals], state: LearnerState, batch: Batch
    ) -> tuple[Array, tuple[Output, Estimates]]:
        """Returns the loss of a minibatch: the paper's equations 3 to 5, value error and entropy."""
        weights, duals = learnt
        fixed = jax.lax.stop_gradient
        parameters, value = self._outputs(Params(weights, state.params.seen), batch)
        found = batch.estimates or self._estimates(state, batch, fixed(parameters), fixed(value))
        valid, better = found.valid, found.better
        scale, policy = self._return_scale(state), self._policy(parameters[: len(valid)])
        value, target = value[: len(valid)], scale.outputs(found.target)

        def mean(rows: Array) -> Array:
            return losses.masked_mean(rows, valid)

        temperature, penalty = jnp.exp(duals.log_temperature), jnp.exp(duals.log_penalty)
        # With the largest advantage subtracted, exponents are at most 0.
        top = from_all_devices(jnp.where(better, found.advantage, -jnp.inf)).max()
        advantage = jnp.where(better, found.advantage - top, 0.0)
        lifted = jnp.where(better, jnp.exp(advantage / fixed(temperature)), 0.0)
        rows, lift, half = mean_over_devices(
            tuple(x.sum(dtype=jnp.float32) for x in (valid, lifted, better))
        )
        # Before the scale of returns is known, all advantages are 0: chance would be imitated.
        known = jnp.float32(scale.known)
        imitated = known * lifted * rows / (lift + 1e-20)
        policy_loss = -mean(imitated * policy.log_prob(batch.behaviour.draw))
        # The slope of the dual function, written out: its means are over all devices.
        equal = jnp.log(lift + 1e-20) - jnp.log(half + 1e-20)
        slope = known * temperature * (self.temperature_bound + equal)
        slope = slope - mean(imitated * advantage)
        temperature_loss = duals.log_temperature * fixed(slope)

        apart = _divergences(self._policy(batch.behaviour.parameters), policy)
        divergence = jnp.stack([mean(x) for x in apart])
        bounds = jnp.array([self.kl_bound, self.scale_kl_bound][: len(apart)], jnp.float32)
        penalty_loss = (penalty * (bounds - fixed(divergence)) + fixed(penalty) * divergence).sum()

        value_loss = mean(known * losses.value_losses(value, target))
        entropy = mean(self._entropy(policy, batch.behaviour.draw))
        loss, metrics = self._total_loss(policy_loss, value_loss, entropy)
        metrics |= {
            "loss/total": loss + penalty_loss,
            "kl": divergence.sum(),
            "temperature": temperature,
            "penalty": penalty[0],
            "explained_variance": losses.explained_variance(value, target, valid),
        }
        output = Output(metrics, valid.sum(dtype=jnp.float32))
        return loss + temperature_loss + penalty_loss, (output, found)

    def _optimizer(self) -> optax.GradientTransformation:
        return optax.scale_by_adam()


def _divergences(old: Any, new: Any) -> list[Array]:
    """Returns KL(old || new) `[T, B]`; of normals that of the means and that of the deviations."""
    if isinstance(old, Normal):
        return [old.kl(Normal(new.mean, old.scale)), old.kl(Normal(old.mean, new.scale))]
    return [old.kl(new)]
