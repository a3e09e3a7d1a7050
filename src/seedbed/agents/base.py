"""Bases of agents: common options and their checks, statistics of observations, and use of replay."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import Array

from seedbed import trees
from seedbed.nets.convolution import Scaling
from seedbed.nets.own import check_torso, is_own, name_of, require_form
from seedbed.nets.policy import ActivationName
from seedbed.nets.torsos import TORSOS, auto_torso, is_image
from seedbed.ops import statistics
from seedbed.ops.statistics import Deviations, RunningStatistics
from seedbed.spaces import ACTION_MASK, PRIVILEGED, without
from seedbed.types import ArraySpec, EnvSpec, LearnerState, Replay, SeedbedError, Timestep, Tree

ObservationStats: TypeAlias = RunningStatistics | tuple[()]
"""Statistics of observations, or () if the agent does not normalise them."""


class Params(NamedTuple):
    """The parameters that acting uses."""

    weights: Tree
    seen: ObservationStats  # checkpoints name it so
    # Float32 scalar, the exploration rate of all environments; () if each has its own.
    exploration: Array | tuple[()] = ()


class Sums(NamedTuple):
    """The amounts that rows of experience add to statistics; () for statistics that are not kept."""

    observations: Deviations | tuple[()]
    returns: Deviations | tuple[()] = ()


class Gradient(NamedTuple):
    """The gradients of what is learned, and sums for the statistics, which are averaged in the same way."""

    weights: Tree
    sums: Sums
    duals: Tree = ()  # of an agent's multipliers


class Memory(NamedTuple):
    """The state that acting with a recurrent network carries from step to step."""

    lstm: Tree  # leaves [B, H]
    action: Array  # [B, ...] the previous action, in the form of the environment's spec


class SinglePass:
    """A base of agents that make one update with a batch."""

    @property
    def epochs(self) -> int:
        """Returns 1: a batch is learned from once.

        Replay draws an item anew, as often as its ratio says. V-trace corrects for old actions, but not for
        learning twice from the same.
        """
        return 1

    @property
    def minibatches(self) -> int:
        """Returns 1: a batch is not divided."""
        return 1


@dataclasses.dataclass(frozen=True)
class BaseAgent(abc.ABC):
    """A base class with the options that all agents have."""

    spec: EnvSpec | None = None
    """Spec of the environment; None in a preset. `bind` sets it."""

    gamma: float = 0.99
    """Discount factor for each step."""
    compute_dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Dtype of the networks' large products; auto is bfloat16 where that is faster (docs/hardware.md)."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        self._require("from 0 to 1", lambda x: 0 <= x <= 1, "gamma")

    def clip_gradient(self, grads: Tree) -> Tree:
        """Returns the gradient as it is: its norm has no bound."""
        return grads

    def greedy(self) -> Self:
        """Returns the agent whose evaluations take the best action and never draw one."""
        return self

    @abc.abstractmethod
    def _optimizer(self) -> optax.GradientTransformation:
        """Makes the optimizer, which turns gradients into changes of the weights, leaf by leaf."""

    def _initial_state(self, params: Tree, weights: Tree) -> LearnerState:
        """Makes the learner state before the first update; the caller must add `auxiliary`.

        `params` are for acting, and `weights` are those that the optimizer changes.
        """
        return LearnerState(
            params=params,
            optimizer_state=self._optimizer().init(weights),
            updates=jnp.int32(0),
            progress=jnp.float32(0),
        )

    def _zero_observation(self, *rows: int) -> Tree:
        """Makes zeros in the form of `_shown`, leaves `[*rows, ...]`, for the shapes of weights."""
        return zeros_of(self._shown(self._env().observation), *rows)

    def _shown(self, observation: Tree) -> Tree:
        """Returns what the agent's networks see of an observation, of which statistics are kept."""
        return without(observation, ACTION_MASK, PRIVILEGED)

    @property
    def _dtype(self) -> Any:
        """Returns the dtype of the networks' large products.

        Weights, statistics, losses, returns and the last layers are float32. Acting and learning must use
        one dtype, so that the ratio of their probabilities is 1 where nothing was learned.
        """
        if self.compute_dtype == "auto":
            raise SeedbedError(
                f"{self._name}.compute_dtype is auto, which only `seedbed train` and `seedbed.train` "
                "replace; give float32 or bfloat16"
            )
        return jnp.dtype(self.compute_dtype)

    def _env(self) -> EnvSpec:
        if self.spec is None:
            raise SeedbedError(
                f"{self._name}.spec is None; bind the agent to an environment's spec first"
            )
        return self.spec

    def _require(self, rule: str, allowed: Any, *names: str) -> None:
        """Raises SeedbedError unless `allowed` holds for the named options; `rule` says it in words."""
        for name in names:
            value = getattr(self, name)
            try:
                fine = allowed(value)
            except TypeError:  # no number, or none of several
                fine = False
            if not fine:
                raise SeedbedError(f"{self._name}.{name} is {value}; give {rule}")

    def _require_use(self, used: bool, remedy: str, *names: str) -> None:
        """Raises SeedbedError if a named option is not its default, but the others leave it unused."""
        for name in () if used else names:
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default:
                raise SeedbedError(f"{self._name}.{name} is {value}, which does nothing: {remedy}")

    @property
    def _name(self) -> str:
        return type(self).__name__


@dataclasses.dataclass(frozen=True)
class NetworkAgent(BaseAgent):
    """A base class with the options of the torsos and of the observations and rewards to learn from."""

    reward_clip: float = 0.0
    """Largest size of a reward in the loss; larger ones are clipped (Atari: 1). 0 clips nothing."""
    normalise_observations: bool = False
    """Whether to shift and scale each number by its running mean and deviation and clip it to [-5, 5]."""

    torso: str = "auto"
    """Network for images: auto, nature, small, resnet, mlp; auto is nature from 36 x 36 pixels, small from
    20 x 20. All else uses the mlp. module:Name is a flax module of your own, for all of an observation."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Units of the mlp's layers, one number for each layer."""
    activation: ActivationName = "relu"
    """Activation function after each layer of an mlp."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        super().__post_init__()
        self._require("0 or more", lambda x: x >= 0, "reward_clip")
        self._require("sizes of at least 1", lambda x: len(x) > 0 and min(x) >= 1, "hidden_sizes")
        if isinstance(self.torso, nn.Module):
            object.__setattr__(self, "torso", name_of(self.torso))
        if not isinstance(self.torso, str):
            raise SeedbedError(
                f"{self._name}.torso is {self.torso!r}; give a name, or an instance of a flax module"
            )
        if is_own(self.torso):
            require_form(self.torso)
            if self.spec is not None:
                check_torso(self.torso, self._zero_observation(2), self.normalise_observations)
            return
        if self.torso not in TORSOS:
            raise SeedbedError(
                f"{self._name}.torso is {self.torso!r}; give {', '.join(TORSOS)}, or module:Name of your own"
            )
        needs_images = self.torso not in ("auto", "mlp")
        if self.spec is not None and needs_images and not self._sees_images():
            raise SeedbedError(
                f"{self._name}.torso is {self.torso} but the environment shows no images [H, W, C]; "
                "choose auto or mlp"
            )
        if self.spec is not None and self.torso == "auto":
            for leaf in trees.leaves(self._shown(self.spec.observation)):
                auto_torso(leaf.shape)

    def _initial_seen(self) -> ObservationStats:
        if not self.normalise_observations:
            return ()
        return statistics.initial(self._shown(self._env().observation))

    def _scaling(self, seen: ObservationStats) -> Tree:
        """Returns the scaling that torsos apply to observations: a tree of `Scaling`, or None."""
        if not isinstance(seen, RunningStatistics):
            return None
        shown = self._shown(self._env().observation)
        return jax.tree.map(scaling_of, shown, seen.mean, seen.variance)

    def _rewards(self, steps: Timestep) -> Array:
        """Returns the rewards `[T, B]` of timesteps `[T + 1, B]`, clipped for the loss."""
        reward = steps.reward[1:]
        if self.reward_clip:
            reward = jnp.clip(reward, -self.reward_clip, self.reward_clip)
        return reward

    def _sees_images(self) -> bool:
        shown = self._shown(self._env().observation)
        return any(is_image(leaf.shape) for leaf in trees.leaves(shown))


@dataclasses.dataclass(frozen=True)
class OffPolicyAgent(SinglePass, BaseAgent):
    """A base class with the options of replay, for agents that learn from it."""

    batch: int = 32
    """Items in an update."""
    capacity: int = 1_000_000
    """Items that replay keeps; when it is full, a new item replaces the oldest."""
    min_size: int = 20_000
    """Items in replay before the first update."""
    ratio: float = 8.0
    """Average number of times that an item is drawn from replay."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        super().__post_init__()
        self._require("at least 1", lambda x: x >= 1, "batch", "capacity", "min_size")
        at_most = f"at most capacity, {self.capacity}"
        self._require(at_most, lambda x: x <= self.capacity, "min_size")
        self._require("more than 0", lambda x: x > 0, "ratio")

    def _replay(self, sequence: int, period: int, burn_in: int = 0) -> Replay:
        """Returns options of replay that draws all items with equal probabilities.

        Where not every step begins an item, items go on through auto-resets.
        """
        return Replay(
            batch=self.batch,
            sequence=sequence,
            period=period,
            capacity=self.capacity,
            min_size=self.min_size,
            ratio=self.ratio,
            burn_in=burn_in,
            cross_episodes=period > 1,
        )

    def _step(self, state: LearnerState, weights: Tree, grads: Tree) -> tuple[Any, Tree]:
        """Returns the weights after a step of the optimizer, and the optimizer's new state."""
        changes, optimizer_state = self._optimizer().update(grads, state.optimizer_state)
        return optax.apply_updates(weights, changes), optimizer_state


def zeros_of(spec: Tree, *rows: int) -> Tree:
    """Makes zeros in the form of a tree of `ArraySpec`; leaves are `[*rows, ...]`."""
    return jax.tree.map(lambda leaf: jnp.zeros((*rows, *leaf.shape), leaf.dtype), spec)


def require_vectors(agent: str, observation: Tree) -> None:
    """Raises SeedbedError if one of the specs is an image, for agents whose networks take vectors only."""
    for leaf in trees.leaves(observation):
        if auto_torso(leaf.shape) != "mlp":
            raise SeedbedError(
                f"{agent} sees vectors but the environment shows an image of shape {leaf.shape}; choose "
                "agent ppo or impala"
            )


def clipped(grads: Gradient, largest: float) -> Gradient:
    """Returns a gradient in which the global norm of the weights' part is at most `largest`."""
    clipping = optax.clip_by_global_norm(largest)
    weights, _ = clipping.update(grads.weights, clipping.init(grads.weights))
    return grads._replace(weights=weights)


def stepped(state: LearnerState, weights: Tree, changes: Tree, rate: float, decay: bool) -> Tree:
    """Returns weights less `rate` times `changes`; with `decay` the rate falls to 0 at the run's end."""
    now = jnp.float32(rate) * (1.0 - state.progress if decay else 1.0)
    return jax.tree.map(lambda x, change: x - now * change, weights, changes)


def scaling_of(leaf: ArraySpec, mean: Array, variance: Array) -> Scaling:
    """Returns the scaling of an array of the observation by its mean and variance."""
    # The deviation is at least one grey level for bytes and 0.01 for floats: small changes are not blown up.
    least = 1.0 if leaf.dtype == "uint8" else 1e-4
    return Scaling(mean, jax.lax.rsqrt(jnp.maximum(variance, least)))
