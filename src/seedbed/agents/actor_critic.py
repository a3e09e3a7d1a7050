"""What agents with a policy and a value have in common: acting, memory, and what they normalise by."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import Array

from seedbed.agents import return_scale
from seedbed.agents.network import (
    Gradient,
    Memory,
    NetworkAgent,
    Params,
    Sums,
    absorb,
    observation_sums,
)
from seedbed.agents.return_scale import ReturnScale
from seedbed.nets.policy import ActorCritic, rescale_values
from seedbed.ops import statistics
from seedbed.ops.distributions import (
    Distribution,
    Scales,
    action_vector,
    distribution,
    parameter_size,
    squash,
)
from seedbed.ops.statistics import Deviations, RunningStatistics
from seedbed.types import (
    ActorState,
    Agent,
    Box,
    LearnerState,
    OnPolicy,
    Output,
    Timestep,
    action_array,
)

Tree = Any


class Behaviour(NamedTuple):
    """What the policy that acted says of its action; `[T, B, ...]` in a trajectory."""

    log_prob: Array  # of the draw
    draw: Tree  # the action, or of a Box the vector that became it by squashing


class LearningStatistics(NamedTuple):
    """What learning carries besides the network; () in place of what is not normalised."""

    returns: RunningStatistics | tuple[()]  # of value targets
    sums: Sums  # what the batch has added so far
    parts: Array  # int32 scalar: minibatches of the batch that were applied


@dataclasses.dataclass(frozen=True)
class ActorCriticAgent(NetworkAgent, abc.ABC):
    """The options of the network and the policy, and what acting and learning do with them."""

    unroll: int = 20
    """Steps of an unroll."""
    batch: int = 32
    """Unrolls of an update."""
    normalise_returns: bool = False
    """Whether values are learned in running deviations of the return, for rewards of unknown size."""
    value_sizes: tuple[int, ...] = ()
    """Layers of an mlp of the value's own; empty: it shares the policy's network."""
    recurrent: bool = False
    """Whether the network has a memory, which is also fed the previous action and reward."""
    lstm_size: int = 256
    """Units of the memory."""
    squash: Literal["tanh", "clip"] = "tanh"
    """How a normal draw becomes an action between bounds."""
    initial_scale: float = 0.7
    """Deviation of draws at the start, where the bounds are -1 and 1."""
    least_scale: float = 0.001
    """Deviation below which draws do not fall: a policy that must not settle too early."""

    def __post_init__(self) -> None:
        """Refuses values that cannot work; raises SeedbedError."""
        super().__post_init__()
        self._require("at least 1", lambda x: x >= 1, "unroll", "batch", "lstm_size")
        self._require("sizes of at least 1", lambda x: min(x, default=1) >= 1, "value_sizes")
        self._require("more than 0", lambda x: x > 0, "least_scale")
        self._require("more than least_scale", lambda x: x > self.least_scale, "initial_scale")

    @property
    def experience(self) -> OnPolicy:
        """Unrolls as they come."""
        return OnPolicy(self.unroll, self.batch)

    def init(self, key: Array) -> LearnerState:
        """Makes the initial learner state; consumes the key."""
        observation = jax.tree.map(
            lambda leaf: jnp.zeros((1, 1, *leaf.shape), leaf.dtype), self._env().observation
        )
        state = self.actor_state(jnp.arange(1), 1)
        previous, core = self._memory(state.core)
        row = jnp.zeros((1, 1))
        weights = self._network().init(key, observation, previous, row, row > 0, core)
        seen = self._initial_seen()
        returns = return_scale.initial() if self.normalise_returns else ()
        return LearnerState(
            params=Params(weights, seen),
            optimizer_state=self._optimizer().init(weights),
            updates=jnp.int32(0),
            progress=jnp.float32(0),
            auxiliary=LearningStatistics(
                returns=returns, sums=_zero_sums(seen, returns), parts=jnp.zeros((), jnp.int32)
            ),
        )

    def actor_state(self, env_ids: Array, num_envs: int) -> ActorState:
        """Makes empty memories for environments `[B]`; they do not differ from one another."""
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

        To evaluate, it still samples choices (a mode can be stuck for ever) but takes the mode of
        continuous actions.
        """
        row = jax.tree.map(lambda x: x[None], timestep)
        previous, core = self._memory(actor_state.core)
        parameters, _, core = self._evaluate(params, row, previous, core)
        policy, spec = self._policy(parameters[0]), self._env().action
        if evaluate and isinstance(spec, Box):
            draw = policy.mode()
        else:
            draw = jax.vmap(lambda p, key: self._policy(p).sample(key))(parameters[0], keys)
        behaviour = Behaviour(policy.log_prob(draw), draw)
        action = squash(spec, draw, self.squash) if isinstance(spec, Box) else draw
        core = Memory(core, action) if self.recurrent else ()
        return action, behaviour, actor_state._replace(core=core)

    @abc.abstractmethod
    def _optimizer(self) -> optax.GradientTransformation:
        """What turns gradients into changes of the weights."""

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
        """Returns what a memory is fed of previous actions, `[T + 1, B, A]`, and the network's core.

        `core` is the actor state's before row 0, `action` `[T, B, ...]` holds the actions from row 0 on. Both
        results are () without a memory.
        """
        if not self.recurrent:
            return (), ()
        taken = core.action[None]
        if action is not None:
            taken = jnp.concatenate([taken, action])
        return action_vector(self._env().action, taken), core.lstm

    def _policy(self, parameters: Array) -> Distribution:
        """Returns the distribution of draws, for `[..., P]` from the network.

        Squashing is the same for all policies, so it cancels from ratios of probabilities and from their
        gradients, and no draw has to be recovered from its action.
        """
        scales = Scales(self.initial_scale, self.least_scale)
        return distribution(self._env().action, parameters, scales)

    def _return_scale(self, state: LearnerState) -> ReturnScale:
        return return_scale.scale_of(state.auxiliary.returns)

    def _gradient(
        self, state: LearnerState, weights: Tree, observation: Tree, targets: Array, valid: Array
    ) -> Gradient:
        """Joins a gradient of the weights with what its minibatch adds to the statistics.

        Observations are `[T, B, ...]`, of which the opening rows count; targets and valid are `[T, B]`.
        """
        opening = jax.tree.map(lambda x: x[0], observation)
        weight = valid.sum(dtype=jnp.float32)
        sums = Sums(
            observations=observation_sums(state.params.seen, opening, weight),
            returns=return_scale.return_sums(state.auxiliary.returns, targets, valid),
        )
        return Gradient(weights, sums)

    def _finish_minibatch(
        self, state: LearnerState, weights: Tree, grads: Gradient, output: Output
    ) -> LearnerState:
        """Returns the state after a minibatch whose step led to `weights`.

        Statistics absorb a batch after its last minibatch: until then its minibatches, advantages and targets
        use those of the policy that acted. Only the first epoch is summed, as it shows every row once. When
        the scale of returns moves, the value's last layer is rescaled so that values stay what they are.
        """
        held: LearningStatistics = state.auxiliary
        passes = cast(Agent, self)  # a subclass is one: it has epochs and minibatches
        factor = jnp.where(held.parts < passes.minibatches, output.weight, 0.0)
        sums = Sums(
            observations=_add_sums(held.sums.observations, grads.sums.observations, factor),
            returns=_add_sums(held.sums.returns, grads.sums.returns, factor),
        )
        over = held.parts + 1 == passes.epochs * passes.minibatches

        def select(new: Tree, old: Tree) -> Tree:
            return jax.tree.map(lambda a, b: jnp.where(over, a, b), new, old)

        one = jnp.float32(1.0)
        seen = select(absorb(state.params.seen, sums.observations, one), state.params.seen)
        returns = select(return_scale.absorb(held.returns, sums.returns), held.returns)
        if self.normalise_returns:
            change = self._return_scale(state).change(return_scale.scale_of(returns))
            weights = rescale_values(weights, *change)
        return state._replace(
            params=Params(weights, seen),
            updates=state.updates + 1,
            auxiliary=LearningStatistics(
                returns=returns,
                sums=select(_zero_sums(seen, returns), sums),
                parts=jnp.where(over, 0, held.parts + 1),
            ),
        )

    def _network(self) -> ActorCritic:
        return ActorCritic(
            parameter_size=parameter_size(self._env().action),
            image=self.torso,
            sizes=self.hidden_sizes,
            value_sizes=self.value_sizes,
            activation=self.activation,
            lstm_size=self.lstm_size if self.recurrent else 0,
            dtype=jnp.dtype(self.compute_dtype),
        )


def _zero_sums(seen: RunningStatistics | tuple[()], returns: RunningStatistics | tuple[()]) -> Sums:
    """Makes sums of no rows, for statistics of observations and of returns."""

    def none(of: RunningStatistics | tuple[()]) -> Deviations | tuple[()]:
        return statistics.no_deviations(of) if isinstance(of, RunningStatistics) else ()

    return Sums(observations=none(seen), returns=none(returns))


def _add_sums(
    held: Deviations | tuple[()], new: Deviations | tuple[()], factor: Array
) -> Deviations | tuple[()]:
    """Adds `factor` times new sums, where there are any."""
    if isinstance(held, Deviations) and isinstance(new, Deviations):
        return statistics.add(held, new.times(factor))
    return ()
