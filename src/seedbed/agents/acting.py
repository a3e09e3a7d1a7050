"""A base for agents with a policy and a value: the networks, and acting with them."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
from jax import Array

from seedbed import trees
from seedbed.agents.base import (
    Memory,
    NetworkAgent,
    ObservationStats,
    Params,
    zeros_of,
)
from seedbed.nets.equivariant import Symmetry
from seedbed.nets.policy import ActorCritic
from seedbed.ops.distributions import (
    Distribution,
    Normal,
    Scales,
    action_errors,
    action_vector,
    distribution,
    named,
    parameter_size,
    squash,
    squashed_entropy,
)
from seedbed.ops.masks import masked
from seedbed.ops.noise import NoiseName, initial_noise, next_noise
from seedbed.ops.statistics import RunningStatistics, symmetrised
from seedbed.spaces import ACTION_MASK, PRIVILEGED, entry, joined, without
from seedbed.types import (
    ActorState,
    Box,
    SeedbedError,
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
class ActingAgent(NetworkAgent):
    """A base class with the options of network and policy, and the parts of acting."""

    value_sizes: tuple[int, ...] = ()
    """Units of the mlp's layers in a separate network for the value; if empty, it shares the policy's.

    Where environments show critics more than policies, the value always has its own network, and empty is
    `hidden_sizes`.
    """
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
    noise: NoiseName = "white"
    """Draws of real actions from step to step: white is independent, pink is alike for a while."""
    equivariant: bool = False
    """Whether the policy of a reflected observation is the reflected policy, at half the work in the layers
    between; for environments that tell their mirror symmetry, such as the robots."""
    greedy_evaluation: bool = False
    """Whether evaluations take the most probable choice instead of drawing one; it can get stuck for ever."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        super().__post_init__()
        self._require("at least 1", lambda x: x >= 1, "lstm_size")
        self._require("sizes of at least 1", lambda x: min(x, default=1) >= 1, "value_sizes")
        self._require("more than 0", lambda x: x > 0, "least_scale")
        self._require("more than least_scale", lambda x: x > self.least_scale, "initial_scale")
        if self.noise == "pink" and self.spec is not None and not isinstance(self.spec.action, Box):
            raise SeedbedError(
                f"{self._name}.noise is pink but the environment takes {self.spec.action}, which has no "
                "noise; give white"
            )
        if self.equivariant:
            self._require_symmetry()

    def _require_symmetry(self) -> None:
        """Raises SeedbedError unless equivariant networks can be made."""
        said = f"{self._name}.equivariant is True"
        if self.recurrent or self.torso not in ("auto", "mlp"):
            raise SeedbedError(f"{said}: set recurrent to False, and torso to mlp")
        sizes = (*self.hidden_sizes, *self.value_sizes)
        if any(size % 2 for size in sizes):
            raise SeedbedError(f"{said}: give layers an even number of units, not {sizes}")
        if self.spec is not None and self.spec.mirror is None:
            raise SeedbedError(
                f"{said}, but the environment tells no mirror symmetry (`mirror` of its EnvSpec); give "
                "False, or see in `seedbed check FILE.xml` what of a robot has no image"
            )

    def actor_state(self, env_ids: Array, num_envs: int | Array) -> ActorState:
        """Makes empty memories for environments `env_ids` `[B]`, if there are any, and pink noise."""
        del num_envs
        per_env = initial_noise(self.noise, env_ids)
        if not self.recurrent:
            return ActorState(core=(), per_env=per_env)
        size, action = env_ids.shape[0], action_array(self._env().action)
        taken = jnp.zeros((size, *action.shape), action.dtype)
        return ActorState(core=Memory(self._network().initial_core(size), taken), per_env=per_env)

    def greedy(self) -> Self:
        """Returns the agent whose evaluations take the most probable choice."""
        return dataclasses.replace(self, greedy_evaluation=True)

    def act(
        self, params: Tree, actor_state: ActorState, timestep: Timestep, keys: Array, evaluate: bool
    ) -> tuple[Tree, Behaviour, ActorState]:
        """Chooses actions `[B]`; extras are a `Behaviour`. Consumes `keys` `[B]`.

        If `evaluate` is set, an action in a Box is the policy's mode, and the keys are unused. Choices are
        sampled even then, unless `greedy_evaluation` is set, because a policy that always takes the mode can
        get stuck for ever. The observation of an evaluation may lack the privileged part.
        """
        parameters, core = self._parameters(params, actor_state, timestep, evaluate)
        policy, spec = named(self._policy(parameters)), self._env().action
        per_env = actor_state.per_env
        if evaluate and (isinstance(spec, Box) or self.greedy_evaluation):
            draw = policy.mode()
        elif isinstance(policy, Normal):
            size = policy.mean.shape[-1]
            drawn, per_env = next_noise(per_env, timestep.first, keys, size)
            draw = policy.mean + policy.scale * drawn
        else:
            draw = jax.vmap(lambda p, key: self._policy(p).sample(key))(parameters, keys)
        behaviour = Behaviour(policy.log_prob(draw), draw, self._told(parameters))
        action = squash(spec, draw, self.squash) if isinstance(spec, Box) else draw
        core = Memory(core, action) if self.recurrent else ()
        return action, behaviour, ActorState(core, per_env)

    def imitation_losses(
        self, params: Tree, actor_state: ActorState, timestep: Timestep, action: Array
    ) -> tuple[Array, ActorState]:
        """Returns how far the policy is from actions `[B, ...]` of another, `[B]`, and the state after them.

        For choices that is minus their log-probability, for a Box the squared distance of the mode.
        """
        parameters, core = self._parameters(params, actor_state, timestep, True)
        spec = self._env().action
        scores = self._policy(parameters).mode() if isinstance(spec, Box) else parameters
        losses = action_errors(spec, scores, action, self.squash)
        core = Memory(core, action) if self.recurrent else ()
        return losses, actor_state._replace(core=core)

    def _told(self, parameters: Array) -> Tree:
        """Returns what a trajectory keeps of the distribution's parameters `[B, P]`: nothing."""
        del parameters
        return ()

    def _parameters(
        self, params: Params, actor_state: ActorState, timestep: Timestep, evaluate: bool
    ) -> tuple[Array, Tree]:
        """Returns distribution parameters `[B, P]` for a timestep `[B, ...]`, and the network's new core."""
        unseen = entry(self._env().observation, PRIVILEGED)
        if evaluate and unseen is not None:
            blank = zeros_of(unseen, *timestep.first.shape)
            timestep = timestep._replace(observation={**timestep.observation, PRIVILEGED: blank})
        row = jax.tree.map(lambda x: x[None], timestep)
        previous, core = self._memory(actor_state.core)
        parameters, _, core = self._evaluate(params, row, previous, core)
        return parameters[0], core

    def _evaluate(
        self, params: Params, steps: Timestep, previous: Tree, core: Tree
    ) -> tuple[Array, Array, Tree]:
        """Returns distribution parameters `[T, B, P]`, the value's outputs `[T, B]` and the last core.

        `previous` and the core before row 0 come from `_memory`. A `ReturnScale` turns outputs into values.
        """
        outputs = self._network().apply(
            params.weights,
            self._shown(steps.observation),
            previous,
            steps.reward,
            steps.first,
            core,
            self._scaling(params.seen),
        )
        parameters, value, core = cast(tuple[Array, Array, Tree], outputs)
        return masked(self._env().action, parameters, steps.observation), value, core

    def _shown(self, observation: Tree) -> Tree:
        """Returns what the networks see of an observation; only the value sees the privileged part."""
        return without(observation, ACTION_MASK)

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
        """Returns the entropy `[T, B]` of actions, in nats; `draw` `[T, B, D]` are those acted on."""
        return squashed_entropy(self._env().action, policy, draw, self.squash)

    def _scaling(self, seen: ObservationStats) -> Tree:
        """Returns the scaling of observations; for equivariant networks, the same for reflected ones."""
        mirror = self._env().mirror
        if self.equivariant and mirror is not None and isinstance(seen, RunningStatistics):
            seen = symmetrised(seen, mirror.observation)
        return super()._scaling(seen)

    @property
    def _symmetry(self) -> Symmetry | None:
        mirror = self._env().mirror
        if not self.equivariant or mirror is None:
            return None
        shown, means = mirror.observation, mirror.action
        scales = dataclasses.replace(means, signs=(1,) * len(means.signs))
        return Symmetry(
            policy=joined(trees.leaves(without(shown, PRIVILEGED))),
            value=joined(trees.leaves(shown)),
            parameters=joined([means, scales]),
        )

    @property
    def _value_sizes(self) -> tuple[int, ...]:
        """Returns the layers of the value's own network; () if it shares the policy's."""
        apart = entry(self._env().observation, PRIVILEGED) is not None
        return self.value_sizes or (self.hidden_sizes if apart else ())

    def _network(self) -> ActorCritic:
        return ActorCritic(
            parameter_size=parameter_size(self._env().action),
            image=self.torso,
            sizes=self.hidden_sizes,
            value_sizes=self._value_sizes,
            activation=self.activation,
            lstm_size=self.lstm_size if self.recurrent else 0,
            dtype=self._dtype,
            symmetry=self._symmetry,
        )
