"""A base for agents with a policy and a value: unrolls, normalisation and the parts of losses."""

from __future__ import annotations

import dataclasses
from typing import cast

import jax.numpy as jnp
from jax import Array

from seedbed.agents.acting import ActingAgent
from seedbed.agents.base import (
    Gradient,
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
from seedbed.nets.policy import join_networks, rescale_values, separate_networks
from seedbed.ops import return_scale
from seedbed.ops.return_scale import ReturnScale
from seedbed.types import (
    Agent,
    LearnerState,
    Output,
    Tree,
)


@dataclasses.dataclass(frozen=True)
class ActorCriticAgent(ActingAgent):
    """A base class with the options and the parts of learning."""

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

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        super().__post_init__()
        self._require("at least 1", lambda x: x >= 1, "unroll", "batch")
        self._require("from 0 to 1", lambda x: 0 <= x <= 1, "trace_decay")
        self._require("0 or more", lambda x: x >= 0, "entropy_cost", "value_cost")

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

    def _return_scale(self, state: LearnerState) -> ReturnScale:
        return return_scale.scale_of(state.auxiliary.returns)

    def _gradient(
        self, state: LearnerState, weights: Tree, observation: Tree, targets: Array, valid: Array
    ) -> Gradient:
        """Joins a gradient of the weights with the sums of its minibatch for the statistics.

        Observations are `[T, B, ...]` or have a row more; targets and valid are `[T, B]`.
        """
        sums = Sums(
            observations=unroll_sums(
                state.params.seen, self._shown(observation), valid, state.updates
            ),
            returns=return_scale.return_sums(state.auxiliary.returns, targets, valid),
        )
        return Gradient(weights, sums)

    def _bounded(self, grads: Gradient, largest: float) -> Gradient:
        """Bounds the norm of a gradient; if policy and value have a network each, of each part by itself.

        With one bound for both, a value's error of 50 would leave the policy a hundredth of its step.
        """
        if not self._value_sizes:
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
