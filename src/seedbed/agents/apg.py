"""APG: an analytic policy gradient, the return of short windows differentiated through the physics.

Source: Xu et al. (2022), "Accelerated Policy Learning with Parallel Differentiable Simulation" (SHAC). A
window ends with the value of its last observation, so that gradients need not pass through long episodes.
There is no slow copy of the value: it learns from each window only after the policy did.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from seedbed.agents.acting import Behaviour
from seedbed.agents.actor_critic import ActorCriticAgent
from seedbed.agents.base import Gradient, Params, Sums, clipped, stepped
from seedbed.nets.policy import ActivationName, join_networks, separate_networks
from seedbed.ops import losses, returns
from seedbed.ops.collectives import mean_over_devices
from seedbed.types import (
    ActorState,
    Box,
    LearnerState,
    OnPolicy,
    Output,
    Play,
    SeedbedError,
    Timestep,
    Trajectory,
    Tree,
    trajectory_masks,
)


class Optimizer(NamedTuple):
    """The states of Adam for the policy's network and for the value's."""

    policy: Tree
    value: Tree


class Batch(NamedTuple):
    """A batch of rows for the value to learn from; all leaves have the environments on axis 1."""

    timesteps: Timestep  # [T, B, ...]
    target: Array  # [T, B] of the value
    valid: Array  # [T, B] bool
    previous: Tree  # [T, B, A] previous actions if the network has a memory, else ()
    core: Tree  # [1, B, ...] the network's, before row 0


@dataclasses.dataclass(frozen=True)
class Apg(ActorCriticAgent):
    """An agent that differentiates its return; its fields are the hyperparameters, its methods are pure.

    For each batch the policy makes one step along the gradient, and the value several.
    """

    unroll: int = 12
    """Steps of a window, through which gradients pass."""
    batch: int = 16
    """Windows in a batch."""
    trace_decay: float = 0.95
    """Lambda of the value's targets. The policy's return has no shorter ones in it: its lambda is 1."""
    entropy_cost: float = 0.003
    normalise_observations: bool = True
    normalise_returns: bool = True
    value_sizes: tuple[int, ...] = (64, 64)
    """Units of the mlp's layers in the network for the value, which is always its own."""
    activation: ActivationName = "tanh"
    epochs: int = 8
    """Passes of the value over a batch."""
    minibatches: int = 1
    """Parts into which each pass divides a batch, by environments; it must divide `batch`."""

    learning_rate: float = 3e-3
    """Step size of Adam for the policy at the start."""
    value_learning_rate: float = 3e-3
    """Step size of Adam for the value at the start."""
    learning_rate_decay: bool = True
    """Whether the step sizes fall linearly to 0 at the end of the training."""
    max_gradient_norm: float = 1.0
    """Largest norm of each of the two gradients; a longer one is scaled down to it."""
    max_action_slope: float = 1.0
    """Largest norm of an action's derivative, in deviations if returns are normalised; it is scaled down."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        super().__post_init__()
        self._require("at least 1", lambda x: x >= 1, "epochs", "minibatches")
        rates = ("learning_rate", "value_learning_rate")
        positive = (*rates, "max_gradient_norm", "max_action_slope")
        self._require("more than 0", lambda x: x > 0, *positive)
        self._require("sizes: the value has its own network", lambda x: len(x) > 0, "value_sizes")
        self._require(
            f"a number that divides batch, {self.batch}",
            lambda x: self.batch % x == 0,
            "minibatches",
        )
        if self.spec is not None and not isinstance(self.spec.action, Box):
            raise SeedbedError(
                f"Apg needs actions that are real vectors but the environment takes {self.spec.action}; "
                "choose agent ppo"
            )

    @property
    def experience(self) -> OnPolicy:
        """Returns options of experience: unrolls that are differentiated as they are played."""
        return OnPolicy(self.unroll, self.batch, synchronous=True, differentiated=True)

    def init(self, key: Array) -> LearnerState:
        """Makes the initial learner state; consumes the key."""
        state = super().init(key)
        parts = separate_networks(state.params.weights)
        return state._replace(optimizer_state=Optimizer(*map(self._optimizer().init, parts)))

    def act(
        self, params: Tree, actor_state: ActorState, timestep: Timestep, keys: Array, evaluate: bool
    ) -> tuple[Tree, Behaviour, ActorState]:
        """Chooses actions `[B]` as all actor-critic agents do; a derivative that comes back is bounded.

        Contacts are stiff: without a bound, a few environments of a batch would decide for all.
        """
        action, behaviour, after = super().act(params, actor_state, timestep, keys, evaluate)
        action = _bounded(action, jnp.float32(self.max_action_slope / action.shape[0]))
        if self.recurrent:
            # The memory of the action is a way back, too.
            after = after._replace(core=after.core._replace(action=action))
        return action, behaviour, after

    def slope(self, state: LearnerState, play: Play) -> tuple[Tree, Tree]:
        """Differentiates minus the return of the windows that `play` acts, by the policy's weights."""
        policy, value = separate_networks(state.params.weights)

        def loss(policy: Tree) -> tuple[Array, Tree]:
            params = Params(join_networks(policy, value), state.params.seen)
            trajectory, kept = play(params)
            return -self._outlook(state, params, trajectory), kept

        return jax.grad(loss, has_aux=True)(policy)

    def ascend(self, state: LearnerState, slope: Tree) -> tuple[LearnerState, dict[str, Array]]:
        """Makes a step of the policy without checking it; the metric is the gradient's norm before."""
        held: Optimizer = state.optimizer_state
        policy, value = separate_networks(state.params.weights)
        bounded = clipped(Gradient(slope, Sums(())), self.max_gradient_norm).weights
        policy, moments = self._moved(state, self.learning_rate, policy, bounded, held.policy)
        state = state._replace(
            params=state.params._replace(weights=join_networks(policy, value)),
            optimizer_state=held._replace(policy=moments),
        )
        return state, {"slope": losses.global_norm(slope)}

    def prepare(self, state: LearnerState, trajectory: Trajectory, key: Array) -> Batch:
        """Estimates the value's targets; the key is unused."""
        del key
        steps = trajectory.timesteps
        previous, core = self._memory(trajectory.actor_state.core, trajectory.action)
        _, outputs, _ = self._evaluate(state.params, steps, previous, core)
        target, valid = self._returns(state, steps, outputs, self.trace_decay)
        return Batch(
            timesteps=jax.tree.map(lambda x: x[:-1], steps),
            target=target,
            valid=valid,
            previous=jax.tree.map(lambda x: x[:-1], previous),
            core=jax.tree.map(lambda x: x[None], core),
        )

    def gradients(
        self, state: LearnerState, minibatch: Batch, key: Array
    ) -> tuple[Gradient, Output]:
        """Computes the gradient of the value's mean loss over the valid rows; the key is unused."""
        del key
        policy, value = separate_networks(state.params.weights)
        grads, output = jax.grad(self._value_loss, has_aux=True)(value, policy, state, minibatch)
        observation, valid = minibatch.timesteps.observation, minibatch.valid
        return self._gradient(state, grads, observation, minibatch.target, valid), output

    def clip_gradient(self, grads: Gradient) -> Gradient:
        """Bounds the norm of the value's gradient."""
        return clipped(grads, self.max_gradient_norm)

    def apply(self, state: LearnerState, grads: Gradient, output: Output) -> LearnerState:
        """Applies a gradient of the value without checking it."""
        held: Optimizer = state.optimizer_state
        policy, value = separate_networks(state.params.weights)
        rate = self.value_learning_rate
        value, moments = self._moved(state, rate, value, grads.weights, held.value)
        state = state._replace(optimizer_state=held._replace(value=moments))
        return self._finish_minibatch(state, join_networks(policy, value), grads, output)

    def _outlook(self, state: LearnerState, params: Params, trajectory: Trajectory) -> Array:
        """Returns the mean over the environments of what the windows' episodes bring, and entropy.

        An episode that began in a window counts from there, the one before it from the window's start. The
        unit is a deviation of returns if they are normalised: without one yet, nothing is to be gained.
        """
        steps, behaviour = trajectory.timesteps, trajectory.extras
        previous, core = self._memory(trajectory.actor_state.core, trajectory.action)
        parameters, outputs, _ = self._evaluate(params, steps, previous, core)
        total, valid = self._returns(state, steps, outputs, 1.0)
        begins = valid & steps.first[:-1].at[0].set(True)
        gained = jnp.where(begins, total, 0.0).sum() / total.shape[1]
        entropy = self._entropy(self._policy(parameters[:-1]), behaviour.draw)
        # Devices differ in their numbers of valid rows, and their gradients are averaged with equal weights.
        rows = jnp.maximum(mean_over_devices(valid.sum(dtype=jnp.float32)), 1.0)
        bonus = self.entropy_cost * jnp.where(valid, entropy, 0.0).sum() / rows
        return self._return_scale(state).scaled(gained) + bonus

    def _returns(
        self, state: LearnerState, steps: Timestep, outputs: Array, trace_decay: float
    ) -> tuple[Array, Array]:
        """Returns lambda-returns `[T, B]` for the value's outputs `[T + 1, B]`, and which rows are valid."""
        value = self._return_scale(state).values(outputs)
        masks = trajectory_masks(steps, self.gamma, trace_decay)
        total = jax.vmap(returns.lambda_returns, in_axes=1, out_axes=1)(
            value[1:], self._rewards(steps), masks.discount, masks.trace
        )
        return total, masks.valid

    def _value_loss(
        self, value: Tree, policy: Tree, state: LearnerState, batch: Batch
    ) -> tuple[Array, Output]:
        core = jax.tree.map(lambda x: x[0], batch.core)
        params = Params(join_networks(policy, value), state.params.seen)
        parameters, outputs, _ = self._evaluate(params, batch.timesteps, batch.previous, core)
        scale = self._return_scale(state)
        target = scale.outputs(batch.target)
        known = jnp.float32(scale.known)
        error = known * losses.masked_mean(losses.value_losses(outputs, target), batch.valid)
        metrics = {
            "loss/value": error,
            "entropy": losses.masked_mean(self._policy(parameters).entropy(), batch.valid),
            "explained_variance": losses.explained_variance(outputs, target, batch.valid),
        }
        return self.value_cost * error, Output(metrics, batch.valid.sum(dtype=jnp.float32))

    def _moved(
        self, state: LearnerState, rate: float, weights: Tree, grads: Tree, moments: Tree
    ) -> tuple[Tree, Tree]:
        """Returns weights after a step of Adam, and its moments."""
        changes, moments = self._optimizer().update(grads, moments)
        return stepped(state, weights, changes, rate, self.learning_rate_decay), moments

    def _optimizer(self) -> optax.GradientTransformation:
        return optax.scale_by_adam()


@jax.custom_vjp
def _bounded(action: Array, most: Array) -> Array:
    """Returns actions `[B, ...]`; a derivative passes back with a norm of at most `most` in each row."""
    del most
    return action


def _forward(action: Array, most: Array) -> tuple[Array, Array]:
    return action, most


def _backward(most: Array, slope: Array) -> tuple[Array, Array]:
    norm = jnp.sqrt(jnp.square(slope).sum(tuple(range(1, slope.ndim)), keepdims=True))
    return slope * jnp.minimum(1.0, most / jnp.maximum(norm, 1e-20)), jnp.zeros_like(most)


_bounded.defvjp(_forward, _backward)
