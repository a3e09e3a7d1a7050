"""A base for agents with a policy and a value: acting, memory and normalisation."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

from seedbed.agents.base import (
    Gradient,
    Memory,
    NetworkAgent,
    Params,
    Sums,
    clipped,
)
from seedbed.agents.learning_statistics import (
    LearningStatistics,
    add_minibatch,
    unroll_sums,
    zero_sums,
)
from seedbed.nets.policy import ActorCritic, join_networks, rescale_values, separate_networks
from seedbed.ops import return_scale
from seedbed.ops.distributions import (
    Distribution,
    Normal,
    Scales,
    action_vector,
    distribution,
    log_slope,
    named,
    parameter_size,
    squash,
)
from seedbed.ops.return_scale import ReturnScale
from seedbed.types import (
    ActorState,
    Agent,
    Box,
    LearnerState,
    Output,
    Timestep,
    Tree,
    action_array,
)


class Behaviour(NamedTuple):
    """The behaviour policy's draw and its probability; leaves are `[T, B, ...]` in a trajectory."""

    log_prob: Array  # of the draw
    draw: Tree  # the action; for a Box, the vector before it is squashed into an action
    # `[..., P]` of the distribution, for agents that compare with it.
    parameters: Any = ()


@dataclasses.dataclass(frozen=True)
class ActorCriticAgent(NetworkAgent):
    """A base class with the options of network and policy, and the parts of acting and learning."""

    unroll: int = 20
    """Steps in an unroll."""
    batch: int = 32
    """Unrolls in a batch."""
    trace_decay: float = 1.0
    """Lambda of V-trace or of the advantage estimates: how far errors travel back along an unroll."""
    entropy_cost: float = 0.01
    """Weight of the entropy bonus; for real actions, with tanh the entropy after squashing."""
    value_cost: float = 0.5
    """Weight of the value loss, half the squared error."""
    normalise_returns: bool = False
    """Whether values are normalised by running statistics of returns; for rewards of unknown size."""
    value_sizes: tuple[int, ...] = ()
    """Units of the mlp's layers in a separate network for the value; if empty, it shares the policy's."""
    recurrent: bool = False
    """Whether the network has a memory, which also gets the previous action and reward."""
    lstm_size: int = 256
    """Units of the memory."""
    squash: Literal["tanh", "clip"] = "tanh"
    """Function that brings a normal draw between the bounds of an action."""
    initial_scale: float = 0.7
    """Standard deviation of normal draws at the start, if the bounds of an action are -1 and 1."""
    least_scale: float = 0.001
    """Lower limit of that deviation; raise it if the policy stops exploring too early."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        super().__post_init__()
        self._require("at least 1", lambda x: x >= 1, "unroll", "batch", "lstm_size")
        self._require("sizes of at least 1", lambda x: min(x, default=1) >= 1, "value_sizes")
        self._require("from 0 to 1", lambda x: 0 <= x <= 1, "trace_decay")
        self._require("0 or more", lambda x: x >= 0, "entropy_cost", "value_cost")
        self._require("more than 0", lambda x: x > 0, "least_scale")
        self._require("more than least_scale", lambda x: x > self.least_scale, "initial_scale")

    def init(self, key: Array) -> LearnerState:
        """Makes the initial learner state; consumes the key."""
        observation = self._zero_observation(1, 1)
        state = self.actor_state(jnp.arange(1), 1)
        previous, core = self._memory(state.core)
        row = jnp.zeros((1, 1))
        weights = self._network().init(key, observation, previous, row, row > 0, core)
        seen = self._initial_seen()
        returns = return_scale.initial() if self.normalise_returns else ()
        return self._initial_state(Params(weights, seen), weights)._replace(
            auxiliary=LearningStatistics(
                returns=returns, sums=zero_sums(seen, returns), parts=jnp.zeros((), jnp.int32)
            )
        )

    def actor_state(self, env_ids: Array, num_envs: int | Array) -> ActorState:
        """Makes empty memories for environments `env_ids` `[B]`, the same for each; () without memory."""
        del num_envs
        if not self.recurrent:
            return ActorState(core=(), per_env=())
        size, action = env_ids.shape[0], action_array(self._env().action)
        taken = jnp.zeros((size, *action.shape), action.dtype)
        return ActorState(core=Memory(self._network().initial_core(size), taken), per_env=())

    def act(
        self, params: Tree, actor_state: ActorState, timestep: Timestep, keys: Array, evaluate: bool
    ) -> tuple[Tree, Behaviour, ActorState]:
        """Chooses actions `[B]`; extras are a `Behaviour`. Consumes `keys` `[B]`.

        If `evaluate` is set, an action in a Box is the policy's mode, and the keys are unused. Choices are
        sampled even then, because a policy that always takes the mode can get stuck for ever.
        """
        parameters, core = self._parameters(params, actor_state, timestep)
        return self._choose(actor_state, parameters, core, keys, evaluate)

    def _parameters(
        self, params: Params, actor_state: ActorState, timestep: Timestep
    ) -> tuple[Array, Tree]:
        """Returns distribution parameters `[B, P]` for a timestep `[B, ...]`, and the network's new core."""
        row = jax.tree.map(lambda x: x[None], timestep)
        previous, core = self._memory(actor_state.core)
        parameters, _, core = self._evaluate(params, row, previous, core)
        return parameters[0], core

    def _choose(
        self, actor_state: ActorState, parameters: Array, core: Tree, keys: Array, evaluate: bool
    ) -> tuple[Tree, Behaviour, ActorState]:
        """Chooses actions `[B]` from distribution parameters `[B, P]`, as `act` does."""
        policy, spec = named(self._policy(parameters)), self._env().action
        if evaluate and isinstance(spec, Box):
            draw = policy.mode()
        else:
            draw = jax.vmap(lambda p, key: self._policy(p).sample(key))(parameters, keys)
        behaviour = Behaviour(policy.log_prob(draw), draw)
        action = squash(spec, draw, self.squash) if isinstance(spec, Box) else draw
        core = Memory(core, action) if self.recurrent else ()
        return action, behaviour, actor_state._replace(core=core)

    def _evaluate(
        self, params: Params, steps: Timestep, previous: Tree, core: Tree
    ) -> tuple[Array, Array, Tree]:
        """Returns distribution parameters `[T, B, P]`, the value's outputs `[T, B]` and the last core.

        `previous` and the core before row 0 come from `_memory`. A `ReturnScale` turns outputs into values.
        """
        outputs = self._network().apply(
            params.weights,
            steps.observation,
            previous,
            steps.reward,
            steps.first,
            core,
            self._scaling(params.seen),
        )
        return cast(tuple[Array, Array, Tree], outputs)

    def _memory(self, core: Tree, action: Array | None = None) -> tuple[Tree, Tree]:
        """Returns previous actions as vectors `[T + 1, B, A]` for the memory, and the network's core.

        `core` is that of the actor state before row 0. `action` `[T, B, ...]` has the actions from row 0 on;
        if it is None, T is 0. Both results are () without a memory.
        """
        if not self.recurrent:
            return (), ()
        taken = core.action[None]
        if action is not None:
            taken = jnp.concatenate([taken, action])
        return action_vector(self._env().action, taken), core.lstm

    def _policy(self, parameters: Array) -> Distribution:
        """Returns the distribution of draws for the network's parameters `[..., P]`.

        Probabilities are those of draws, before squashing. Squashing is the same for all policies, so it
        cancels in ratios of probabilities and in their gradients, and it never has to be inverted.
        """
        scales = Scales(self.initial_scale, self.least_scale)
        return distribution(self._env().action, parameters, scales)

    def _entropy(self, policy: Distribution, draw: Tree) -> Array:
        """Returns the entropy `[T, B]` of actions, in nats; a Box is scaled to bounds of -1 and 1.

        What squashing by tanh adds to the entropy of a normal is taken at the draws `[T, B, D]` that were
        acted on, moved with the policy. Without it, the bonus would reward draws so wide that all actions
        are at a bound. The entropy of clipped draws is that before clipping.
        """
        entropy, spec = policy.entropy(), self._env().action
        if not (isinstance(policy, Normal) and isinstance(spec, Box) and self.squash == "tanh"):
            return entropy
        noise = jax.lax.stop_gradient((draw - policy.mean) / policy.scale)
        return entropy + log_slope(spec, policy.mean + policy.scale * noise)

    def _return_scale(self, state: LearnerState) -> ReturnScale:
        return return_scale.scale_of(state.auxiliary.returns)

    def _gradient(
        self, state: LearnerState, weights: Tree, observation: Tree, targets: Array, valid: Array
    ) -> Gradient:
        """Joins a gradient of the weights with the sums of its minibatch for the statistics.

        Observations are `[T, B, ...]` or have a row more; targets and valid are `[T, B]`.
        """
        sums = Sums(
            observations=unroll_sums(state.params.seen, observation, valid),
            returns=return_scale.return_sums(state.auxiliary.returns, targets, valid),
        )
        return Gradient(weights, sums)

    def _bounded(self, grads: Gradient, largest: float) -> Gradient:
        """Bounds the norm of a gradient; if policy and value have a network each, of each part by itself.

        With one bound for both, a value's error of 50 would leave the policy a hundredth of its step.
        """
        if not self.value_sizes:
            return clipped(grads, largest)
        parts = (grads._replace(weights=part) for part in separate_networks(grads.weights))
        policy, value = (clipped(part, largest).weights for part in parts)
        return grads._replace(weights=join_networks(policy, value))

    def _finish_minibatch(
        self, state: LearnerState, weights: Tree, grads: Gradient, output: Output
    ) -> LearnerState:
        """Returns the state after a minibatch whose step led to `weights`.

        When the scale of returns changes, the value's last layer is rescaled so that values do not change.
        """
        # A subclass is an Agent: it has epochs and minibatches.
        passes = cast(Agent, self)
        seen, auxiliary = add_minibatch(
            state.auxiliary,
            state.params.seen,
            grads.sums,
            output.weight,
            (passes.epochs, passes.minibatches),
        )
        if self.normalise_returns:
            change = self._return_scale(state).change(return_scale.scale_of(auxiliary.returns))
            weights = rescale_values(weights, *change)
        return state._replace(
            params=Params(weights, seen), updates=state.updates + 1, auxiliary=auxiliary
        )

    def _network(self) -> ActorCritic:
        return ActorCritic(
            parameter_size=parameter_size(self._env().action),
            image=self.torso,
            sizes=self.hidden_sizes,
            value_sizes=self.value_sizes,
            activation=self.activation,
            lstm_size=self.lstm_size if self.recurrent else 0,
            dtype=self._dtype,
        )

    def _total_loss(
        self, policy_loss: Array, value_loss: Array, entropy: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Returns the weighted sum of the terms, scalars, and the metrics that name them."""
        loss = policy_loss + self.value_cost * value_loss - self.entropy_cost * entropy
        return loss, {
            "loss/total": loss,
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "entropy": entropy,
        }
