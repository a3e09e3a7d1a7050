"""The base of agents that learn by trying changed parameters: ES and ARS.

Environment 2i of a batch plays a whole episode with the parameters plus noise i, and environment 2i + 1 with
the parameters minus noise i. Learning uses the returns only. Noise is drawn from the run's seed, the number
of the generation and i, so that learning draws it again instead of keeping it.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.flatten_util import ravel_pytree

from seedbed.agents.base import (
    BaseAgent,
    Gradient,
    ObservationStats,
    SinglePass,
    Sums,
    require_vectors,
    scaling_of,
)
from seedbed.agents.learning_statistics import absorb
from seedbed.nets.critics import VectorPolicy, vectors
from seedbed.nets.policy import ActivationName
from seedbed.nets.rescaling import rescale
from seedbed.ops import statistics
from seedbed.ops.collectives import from_all_devices
from seedbed.ops.distributions import action_errors, check_bounds, squash
from seedbed.ops.masks import masked
from seedbed.ops.statistics import Deviations, RunningStatistics
from seedbed.types import (
    ActorState,
    Box,
    Discrete,
    LearnerState,
    OnPolicy,
    Output,
    Timestep,
    Trajectory,
    Tree,
)


class Params(NamedTuple):
    """The parameters that acting uses."""

    weights: Tree
    seen: ObservationStats
    seed: Array  # uint32 [2], of all noise of the run
    generation: Array  # int32 scalar


class Visited(NamedTuple):
    """Sums over the observations of an episode so far, about the statistics' mean; leaves `[B, ...]`."""

    steps: Array
    first: Tree
    second: Tree  # of squares


class Given(NamedTuple):
    """The parameters of an environment in an episode, and sums of what it saw; leaves are `[B, ...]`."""

    env_id: Array  # uint32
    weights: Tree  # changed ones
    visited: Visited | tuple[()]  # () if observations are not normalised


class Batch(NamedTuple):
    """A generation; all leaves have the environments on axis 1."""

    returns: Array  # [1, B]
    fitness: Array  # [1, B] weights of the noise
    env_id: Array  # [1, B]
    visited: Visited | tuple[()]  # leaves [1, B, ...]


@dataclasses.dataclass(frozen=True)
class EvolutionAgent(SinglePass, BaseAgent, abc.ABC):
    """A base class with the options of the policy and of the noise, and the parts of acting and learning."""

    gamma: float = 1.0
    """Discount factor: only 1, as an episode is judged by the sum of its rewards."""
    batch: int = 64
    """Episodes of a generation, an even number: each noise is added in one and subtracted in another."""
    noise: float = 0.03
    """Standard deviation of the noise on each parameter."""
    normalise_observations: bool = True
    """Whether to shift and scale each number by its running mean and deviation and clip it to [-5, 5]."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Units of the layers of the policy; none is a linear policy."""
    activation: ActivationName = "tanh"
    """Activation function after each hidden layer."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        super().__post_init__()
        self._require("1: returns are not discounted", lambda x: x == 1, "gamma")
        self._require("an even number from 2", lambda x: x >= 2 and x % 2 == 0, "batch")
        self._require("more than 0", lambda x: x > 0, "noise")
        self._require("sizes of at least 1", lambda x: min(x, default=1) >= 1, "hidden_sizes")
        if self.spec is not None:
            require_vectors(self._name, self._shown(self.spec.observation))
            if isinstance(self.spec.action, Box):
                check_bounds(self.spec.action)

    @abc.abstractmethod
    def _fitness(self, returns: Array) -> Array:
        """Returns weights `[N]` of the noise of a generation's episodes, from their returns `[N]`."""

    @property
    def experience(self) -> OnPolicy:
        """Returns options of experience: whole episodes, all with one generation's parameters."""
        return OnPolicy(1, self.batch, synchronous=True, episodes=True)

    def init(self, key: Array) -> LearnerState:
        """Makes the initial learner state; consumes the key."""
        init_key, seed_key = jax.random.split(key)
        weights = self._initial_weights(init_key)
        shown = self._shown(self._env().observation)
        seen = statistics.initial(shown) if self.normalise_observations else ()
        params = Params(weights, seen, jax.random.key_data(seed_key), jnp.int32(0))
        return self._initial_state(params, weights)

    def actor_state(self, env_ids: Array, num_envs: int | Array) -> ActorState:
        """Makes empty states for environments `env_ids` `[B]`; what is given comes as an episode begins."""
        del num_envs
        size = env_ids.shape[0]
        weights = jax.eval_shape(self._initial_weights, jax.random.key(0))
        given = jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), weights)
        env_ids = env_ids.astype(jnp.uint32)
        return ActorState(core=(), per_env=Given(env_ids, given, self._none_visited(size)))

    def act(
        self, params: Tree, actor_state: ActorState, timestep: Timestep, keys: Array, evaluate: bool
    ) -> tuple[Array, Tree, ActorState]:
        """Chooses actions `[B, ...]`; extras are what was seen in the episode so far. `keys` are unused.

        All episodes of a generation begin together. If `evaluate` is set, the parameters are those in the
        middle of the generation.
        """
        del keys
        shown = self._shown(timestep.observation)
        inputs = self._inputs(params, shown)
        if evaluate:
            outputs: Any = self._policy().apply(params.weights, inputs)
            return self._action(outputs, timestep.observation), (), actor_state
        given: Given = actor_state.per_env
        weights, visited = jax.lax.cond(
            timestep.first.any(),
            lambda: (
                self._changed(params, given.env_id),
                jax.tree.map(jnp.zeros_like, given.visited),
            ),
            lambda: (given.weights, given.visited),
        )
        if isinstance(visited, Visited):
            apart = jax.tree.map(statistics.apart, shown, params.seen.mean)
            visited = Visited(
                visited.steps + 1,
                jax.tree.map(jnp.add, visited.first, apart),
                jax.tree.map(lambda sums, x: sums + jnp.square(x), visited.second, apart),
            )
        outputs = jax.vmap(lambda w, x: self._policy().apply(w, x[None])[0])(weights, inputs)  # type: ignore[index]
        given = Given(given.env_id, weights, visited)
        return (
            self._action(outputs, timestep.observation),
            visited,
            actor_state._replace(per_env=given),
        )

    def imitation_losses(
        self, params: Tree, actor_state: ActorState, timestep: Timestep, action: Array
    ) -> tuple[Array, ActorState]:
        """Returns how far the policy is from actions `[B, ...]` of another, `[B]`, as in `ActingAgent`."""
        inputs = self._inputs(params, self._shown(timestep.observation))
        outputs: Any = self._policy().apply(params.weights, inputs)
        scores = masked(self._env().action, outputs, timestep.observation)
        return action_errors(self._env().action, scores, action, "clip"), actor_state

    def prepare(self, state: LearnerState, trajectory: Trajectory, key: Array) -> Batch:
        """Turns the returns of a generation into weights of its noise; the key is unused."""
        del state, key
        returns = trajectory.timesteps.reward[1]
        given: Given = trajectory.actor_state.per_env
        fitness = self._fitness(from_all_devices(returns))[given.env_id]
        return Batch(returns[None], fitness[None], given.env_id[None], trajectory.extras)

    def gradients(
        self, state: LearnerState, minibatch: Batch, key: Array
    ) -> tuple[Gradient, Output]:
        """Computes the step against the mean of the weighted noise; the key is unused."""
        del key
        params: Params = state.params
        fitness, env_id = minibatch.fitness[0], minibatch.env_id[0]
        noise = self._noise(params, env_id)
        _, unravel = ravel_pytree(params.weights)
        weights = unravel(-(fitness @ noise) / fitness.size)
        sums: Deviations | tuple[()] = ()
        count = jnp.float32(fitness.size)
        if isinstance(minibatch.visited, Visited) and isinstance(params.seen, RunningStatistics):
            total = jax.tree.map(lambda x: x[0].sum(0), minibatch.visited)
            sums = Deviations(total.steps, params.seen.mean, total.first, total.second)
            # Multiplied by the weight of all devices' parts, in `absorb`.
            sums = sums.times(1.0 / count)
        metrics = {
            "return/mean": minibatch.returns.mean(),
            "return/deviation": minibatch.returns.std(),
            "step": jnp.sqrt(jnp.square(ravel_pytree(weights)[0]).sum()),
        }
        return Gradient(weights, Sums(sums)), Output(metrics, count)

    def apply(self, state: LearnerState, grads: Gradient, output: Output) -> LearnerState:
        """Applies a step without checking it, and begins the next generation."""
        params: Params = state.params
        changes, optimizer_state = self._optimizer().update(
            grads.weights, state.optimizer_state, params.weights
        )
        params = params._replace(
            weights=optax.apply_updates(params.weights, changes),
            seen=absorb(params.seen, grads.sums.observations, output.weight),
            generation=params.generation + 1,
        )
        return state._replace(
            params=params, optimizer_state=optimizer_state, updates=state.updates + 1
        )

    def _initial_weights(self, key: Array) -> Tree:
        return self._policy().init(key, vectors(self._zero_observation(1), 1))

    def _policy(self) -> VectorPolicy:
        action = self._env().action
        size = math.prod(action.shape) if isinstance(action, Box) else self._choices().sum()
        return VectorPolicy(int(size), self.hidden_sizes, self.activation, self._dtype)

    def _choices(self) -> np.ndarray:
        """Returns the number of choices of each set."""
        action: Any = self._env().action
        return np.array([action.n] if isinstance(action, Discrete) else action.nvec)

    def _action(self, outputs: Array, observation: Tree) -> Array:
        """Returns the actions for the policy's outputs `[B, P]`: the best choices, or real ones, clipped."""
        action = self._env().action
        if isinstance(action, Box):
            return squash(action, outputs, "clip")
        outputs = masked(action, outputs, observation)
        parts = jnp.split(outputs, np.cumsum(self._choices())[:-1], axis=-1)
        best = [part.argmax(-1).astype(jnp.int32) for part in parts]
        return best[0] if isinstance(action, Discrete) else jnp.stack(best, axis=-1)

    def _inputs(self, params: Params, shown: Tree) -> Array:
        """Returns what the policy gets for what is shown, leaves `[B, ...]`: vectors `[B, D]`."""
        if not isinstance(params.seen, RunningStatistics):
            return vectors(shown, 1)

        scaled = jax.tree.map(
            lambda leaf, x, *seen: rescale(x, scaling_of(leaf, *seen)),
            self._shown(self._env().observation), shown, params.seen.mean, params.seen.variance,
        )  # fmt: skip
        return vectors(scaled, 1)

    def _noise(self, params: Params, env_id: Array) -> Array:
        """Draws the noise `[B, P]` of environments, with standard deviation 1: pairs have opposite ones."""
        size = ravel_pytree(params.weights)[0].size
        run = jax.random.wrap_key_data(params.seed)
        key = jax.random.fold_in(run, params.generation)

        def one(env_id: Array) -> Array:
            drawn = jax.random.normal(jax.random.fold_in(key, env_id // 2), (size,))
            return jnp.where(env_id % 2 == 0, drawn, -drawn)

        return jax.vmap(one)(env_id)

    def _changed(self, params: Params, env_id: Array) -> Tree:
        flat, unravel = ravel_pytree(params.weights)
        return jax.vmap(unravel)(flat[None] + self.noise * self._noise(params, env_id))

    def _none_visited(self, size: int) -> Visited | tuple[()]:
        if not self.normalise_observations:
            return ()

        def none() -> Tree:
            shown = self._shown(self._env().observation)
            return jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape)), shown)

        return Visited(jnp.zeros(size), none(), none())
