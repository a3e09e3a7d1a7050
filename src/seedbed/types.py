"""The contract between environments, agents and runtimes.

Arrays are time-major, `[T, B, ...]`: T is time, B counts environments. Row t of a trajectory is
observation_t, action_t and the result of the action: reward_{t+1}, terminated_{t+1} and truncated_{t+1},
which are stored with observation_{t+1}. The module imports no JAX: an actor starts in a tenth of a second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import (
    TYPE_CHECKING,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    runtime_checkable,
)

import numpy as np

from seedbed.errors import SeedbedError as SeedbedError
from seedbed.errors import StorageError as StorageError
from seedbed.errors import UsageError as UsageError
from seedbed.spaces import ActionSpec as ActionSpec
from seedbed.spaces import Array as Array
from seedbed.spaces import ArraySpec as ArraySpec
from seedbed.spaces import Box as Box
from seedbed.spaces import Discrete as Discrete
from seedbed.spaces import EnvSpec as EnvSpec
from seedbed.spaces import Mirror as Mirror
from seedbed.spaces import MultiDiscrete as MultiDiscrete
from seedbed.spaces import Reflection as Reflection
from seedbed.spaces import Tree as Tree
from seedbed.spaces import action_array as action_array

if TYPE_CHECKING:
    from typing_extensions import TypeIs


class Timestep(NamedTuple):
    """The data that an environment returns; leaves are `[B, ...]`, or `[T + 1, B, ...]` in a trajectory.

    `reward`, `terminated` and `truncated` describe the step that led to `observation`. `first` marks the
    opening observation of an episode. Auto-reset is next-step: after the end of an episode, the next call
    ignores its action and returns the opening observation with reward 0 and `first` set. The true last
    observation of an episode is therefore always in the trajectory.
    """

    observation: Tree  # in the dtypes of the spec
    reward: Array  # float32, raw
    terminated: Array  # bool: the episode ended
    truncated: Array  # bool: a time limit ended it
    first: Array  # bool: the observation opens an episode


class ActorState(NamedTuple):
    """The state that acting carries from step to step; leaves are `[B, ...]`."""

    core: Tree  # recurrent state; the agent resets it if `first` is set
    per_env: Tree  # what each environment is given, such as an exploration rate; may change as peers come


class Trajectory(NamedTuple):
    """An unroll of T transitions in B environments."""

    timesteps: Timestep  # [T + 1, B, ...]
    action: Tree  # [T, B, ...]
    extras: Tree  # [T, B, ...] the behaviour policy's output
    actor_state: ActorState  # [B, ...] before acting on row 0
    params_version: Tree  # [T, B] int32: `updates` of the parameters that chose; () from replay
    importance: Tree = ()  # [B] float32, the weight of an item's loss; () outside replay


class Masks(NamedTuple):
    """Per-row masks of a trajectory, each `[T, B]`."""

    valid: Array  # bool: row t is a transition, not an auto-reset
    discount: Array  # float32: gamma, or 0 if the episode terminated in row t
    trace: Array  # float32: lambda, or 0 if the episode ended in row t in any way


def trajectory_masks(timesteps: Timestep, gamma: float, trace_decay: float) -> Masks:
    """Computes the masks that every loss uses, from timesteps `[T + 1, B]`.

    A truncated step keeps its discount, so that it bootstraps from the true last observation. Recursions
    over time stop at both kinds of end. A loss must set importance weights to 0 where `valid` is false.
    """
    terminated, truncated = timesteps.terminated[1:], timesteps.truncated[1:]
    return Masks(
        valid=~timesteps.first[1:],
        discount=gamma * (~terminated).astype("float32"),
        trace=trace_decay * (~terminated & ~truncated).astype("float32"),
    )


@dataclasses.dataclass(frozen=True)
class OnPolicy:
    """Experience that is used as it comes: a batch is `batch` unrolls of `unroll` steps, then discarded.

    An unroll is of one environment here. The central runtime cuts and queues them by groups of environments.
    A synchronous agent acts, stops and learns: all actions of a batch are chosen with the parameters from
    which the update of that batch starts. With any other agent, the central runtime acts while it learns.

    With `episodes`, an item is a whole episode in one row, T = 1: all environments begin one together. Row 0
    has the opening observation and action and the last extras, row 1 the return and the flags of the end.

    With `differentiated`, the agent is a `DifferentiatingAgent`, which also gets the derivative of an unroll.
    """

    unroll: int  # steps of an unroll, T
    batch: int  # unrolls of a batch, B
    synchronous: bool = False  # whether acting waits for learning
    episodes: bool = False  # whether an item is a whole episode
    differentiated: bool = False  # whether the agent differentiates through the environments


@dataclasses.dataclass(frozen=True)
class Replay:
    """Experience that is kept and drawn many times: an update uses `batch` items.

    An item has `burn_in + sequence` transitions of one environment. A new item begins every `period` steps
    of an episode. An item is cut short at the end of its episode. Rows that are missing after the end, or in
    a burn-in before the start, have `first` set and are not transitions.

    In the fused runtime a new item begins every `period` steps of an environment's stream, and a burn-in may
    contain steps of an earlier episode. The steps of the next episode before the next item begins are then
    in no item, unless `cross_episodes` lets items go on through auto-resets: set it where `period` is above
    1, in an agent that expects rows with `first` anywhere in an item.
    """

    batch: int  # items of an update
    sequence: int  # transitions of an item that are learned from
    period: int  # steps from the start of an item to the start of the next
    capacity: int  # most items that are kept; the oldest is dropped first
    min_size: int  # items that must be there before the first update
    ratio: float  # how often an item is drawn on average; this ties learning to acting
    burn_in: int = 0  # transitions before `sequence`, which only warm up the recurrent state
    priority_exponent: float = 0.0  # of the probability of drawing; 0 draws uniformly
    importance_exponent: float = 0.0  # of the weights that correct for it; 1 corrects fully
    cross_episodes: bool = False  # whether items go on through auto-resets, in the fused runtime

    @property
    def steps(self) -> int:
        """The number of timesteps in an item: one more than its transitions."""
        return self.burn_in + self.sequence + 1


class LearnerState(NamedTuple):
    """The state that learning carries from update to update.

    Schedules follow `progress`, from 0 to 1: the share of the run's transitions (`--steps`) that were done
    before the current batch. The runtime sets it before the first minibatch of a batch; `apply` returns it
    unchanged. No two leaves may share a buffer: the central runtime donates all but `params`, and the fused
    runtime donates all.
    """

    params: Tree  # everything that acting needs
    optimizer_state: Tree  # as the agent's optimizer has it
    updates: Array  # int32 scalar: gradients applied so far
    progress: Array  # float32 scalar, set by the runtime: share of the run done before this batch
    auxiliary: Tree = ()  # state that only learning needs, such as target networks


class Output(NamedTuple):
    """The results of a gradient computation besides the gradient."""

    metrics: dict[str, Array]  # scalars, means over the valid rows
    # Float32 scalar: the number of valid rows, the weight in averages over devices.
    weight: Array
    priorities: Tree = ()  # [B] float32 above 0: new priorities of the items; () outside replay


@runtime_checkable
class Agent(Protocol):
    """An algorithm: a frozen dataclass of hyperparameters whose methods are pure functions.

    `spec` is None in a preset; `bind` fills it before any method is called. Only `clip_gradient` may sum over
    all gradients. `optimizer_state` is () except in `init` and `apply`, where `Output.priorities` is ().
    """

    @property
    def spec(self) -> EnvSpec | None:
        """The observations, with stacked frames, and actions of the environments; None before `bind`."""
        ...

    @property
    def epochs(self) -> int:
        """The number of passes over a batch."""
        ...

    @property
    def minibatches(self) -> int:
        """The number of parts, along axis 1, into which each pass divides a batch."""
        ...

    @property
    def experience(self) -> OnPolicy | Replay:
        """How experience reaches the learner."""
        ...

    def init(self, key: Array) -> LearnerState:
        """Makes the initial learner state. Consumes the key."""
        ...

    def actor_state(self, env_ids: Array, num_envs: int | Array) -> ActorState:
        """Makes the initial actor state of environments `env_ids` `[B]`, of `num_envs` (it may be traced)."""
        ...

    def act(
        self, params: Tree, actor_state: ActorState, timestep: Timestep, keys: Array, evaluate: bool
    ) -> tuple[Tree, Tree, ActorState]:
        """Chooses actions `[B, ...]`; returns (action, extras, actor_state). Consumes `keys` `[B]`.

        `extras` become `Trajectory.extras`. `evaluate` asks for the policy that evaluations judge.
        """
        ...

    def prepare(self, state: LearnerState, trajectory: Trajectory, key: Array) -> Tree:
        """Turns a trajectory into a batch whose leaves can be split along axis 1. Consumes the key."""
        ...

    def gradients(self, state: LearnerState, minibatch: Tree, key: Array) -> tuple[Tree, Output]:
        """Computes the gradient of the mean loss over the valid rows. Consumes the key."""
        ...

    def clip_gradient(self, grads: Tree) -> Tree:
        """Returns the gradient, the mean over all devices, with a bounded norm, or as it is."""
        ...

    def apply(self, state: LearnerState, grads: Tree, output: Output) -> LearnerState:
        """Applies a clipped gradient; returns the new state, with `updates` one larger."""
        ...


class ReplayAgent(Agent, Protocol):
    """An agent that learns from replay, with one epoch and one minibatch of items per update."""

    @property
    def experience(self) -> Replay:
        """How experience is kept and drawn."""
        ...

    def initial_priorities(self, timesteps: Timestep, extras: Tree) -> Array:
        """Returns priorities `[B]`, above 0, of new items, from the extras of acting. Consumes no key.

        All leaves are `[T + 1, B, ...]` with T = `burn_in + sequence`. `timesteps.observation` is ().
        """
        ...


Play: TypeAlias = Callable[[Tree], tuple[Trajectory, Tree]]
"""Acts for an unroll with the `params` it is given; returns the trajectory, and what the runtime keeps."""


class DifferentiatingAgent(Agent, Protocol):
    """An agent that differentiates what an unroll brings, through acting and the environments' steps.

    For every batch the runtime calls `slope` and `ascend`, and then learns from the unroll as always.
    """

    def slope(self, state: LearnerState, play: Play) -> tuple[Tree, Tree]:
        """Calls `play` once, with `params` that depend on what is differentiated.

        Returns a gradient, the mean over the environments, and what `play` kept. `optimizer_state` is ().
        """
        ...

    def ascend(self, state: LearnerState, slope: Tree) -> tuple[LearnerState, dict[str, Array]]:
        """Applies a gradient, the mean over all devices; returns the new state, and metrics, scalars.

        `updates` stays as it is.
        """
        ...


def differentiates(agent: Agent) -> DifferentiatingAgent | None:
    """Returns an agent that differentiates through the environments, else None.

    Raises SeedbedError if its experience says so but it has not both methods.
    """
    if not getattr(on_policy(agent), "differentiated", False):
        return None
    for method in ("slope", "ascend"):
        if not hasattr(agent, method):
            raise SeedbedError(
                f"{type(agent).__name__}.experience is differentiated but it has no method {method}: see "
                "seedbed.types.DifferentiatingAgent"
            )
    return cast(DifferentiatingAgent, agent)


def learns_from_replay(agent: Agent) -> TypeIs[ReplayAgent]:
    """Returns whether an agent learns from replay (True) or from unrolls as they come (False).

    Raises SeedbedError if the agent's experience is `Replay` but it has no `initial_priorities`.
    """
    if not isinstance(agent.experience, Replay):
        return False
    if not hasattr(agent, "initial_priorities"):
        raise SeedbedError(
            f"{type(agent).__name__}.experience is Replay but it has no method initial_priorities: see "
            "seedbed.types.ReplayAgent"
        )
    return True


def on_policy(agent: Agent) -> OnPolicy | None:
    """Returns the experience of an agent that learns from unrolls as they come; None if it has replay."""
    return agent.experience if isinstance(agent.experience, OnPolicy) else None


def plays_episodes(agent: Agent) -> bool:
    """Returns whether an agent learns from whole episodes, which only the fused runtime plays."""
    return getattr(on_policy(agent), "episodes", False)


AgentT = TypeVar("AgentT", bound=Agent)


def bind(agent: AgentT, spec: EnvSpec) -> AgentT:
    """Returns a copy of the agent for environments of this spec, which has stacked frames."""
    return dataclasses.replace(agent, spec=spec)  # type: ignore[type-var]


class EnvState(NamedTuple):
    """The state of one on-device environment between two steps; leaves have no batch axis."""

    inner: Tree  # the state of the simulation and of the wrappers
    timestep: Timestep  # the last timestep: one observation, scalars for the rest
    metrics: dict[str, Array]  # float32 scalars about the last step, for reports

    @classmethod
    def opening(
        cls, inner: Tree, observation: Tree, metrics: dict[str, Array] | None = None
    ) -> EnvState:
        """Returns the state that opens an episode: reward 0, and `first` set."""
        no = np.bool_(False)
        timestep = Timestep(observation, np.float32(0), no, no, np.bool_(True))
        return cls(inner, timestep, metrics or {})

    @classmethod
    def after(
        cls,
        inner: Tree,
        observation: Tree,
        reward: Array | float,
        terminated: Array | bool,
        metrics: dict[str, Array] | None = None,
    ) -> EnvState:
        """Returns the state after a step, which is not truncated: a wrapper adds the time limit."""
        # Imported only here, so that an actor starts without JAX.
        import jax.numpy as jnp

        no = np.bool_(False)
        reward, terminated = jnp.float32(reward), jnp.bool_(terminated)
        return cls(inner, Timestep(observation, reward, terminated, no, no), metrics or {})


class Environment(Protocol):
    """An environment on the device: a frozen dataclass of options, whose methods are pure functions.

    Its methods handle one environment without a batch axis; runtimes batch them. It does not reset itself
    and does not end at a time limit: `envs.device.wrappers` adds both.
    """

    @property
    def spec(self) -> EnvSpec:
        """The observations and actions."""
        ...

    @property
    def episode_steps(self) -> int:
        """The number of steps after which an episode is truncated; 0 means no limit."""
        ...

    @property
    def frame_skip(self) -> int:
        """The number of simulator frames in one step; reports of frames count with it."""
        ...

    def reset(self, key: Array) -> EnvState:
        """Opens an episode: reward is 0 and `first` is set. Consumes the key."""
        ...

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Takes an action; `first` is false afterwards."""
        ...
