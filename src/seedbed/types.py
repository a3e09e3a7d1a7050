"""The contract between environments, agents and runtimes.

Arrays are time-major, `[T, B, ...]`. Row t of a trajectory is (observation_t, action_t) and what the
action led to, (reward_{t+1}, terminated_{t+1}, truncated_{t+1}), which is stored with observation_{t+1}.
This module imports no JAX, so that an actor process starts in a tenth of a second.
"""

from __future__ import annotations

import dataclasses
from typing import (
    TYPE_CHECKING,
    Any,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
    runtime_checkable,
)

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Array: TypeAlias = Any
"""A numpy or JAX array; the contract holds for both."""
Tree: TypeAlias = Any
"""A pytree: nested tuples, NamedTuples, lists and dicts of arrays."""


class Timestep(NamedTuple):
    """What arrives from an environment; leaves are `[B, ...]`, or `[T + 1, B, ...]` in a trajectory.

    `reward`, `terminated` and `truncated` describe the step that arrived here; `first` marks the opening
    observation of an episode. Auto-reset is next-step: after an end the next call ignores its action and
    returns the opening observation with reward 0 and `first` set, so the true last observation is always
    in the trajectory.
    """

    observation: Tree
    reward: Array  # float32
    terminated: Array  # bool
    truncated: Array  # bool
    first: Array  # bool


class ActorState(NamedTuple):
    """What acting carries from step to step; leaves are `[B, ...]`."""

    core: Tree  # recurrent state; the agent resets it where `first` is set
    per_env: Tree  # constants of an environment, such as an exploration rate


class Trajectory(NamedTuple):
    """An unroll of T transitions in B environments."""

    timesteps: Timestep  # [T + 1, B, ...]
    action: Tree  # [T, B, ...]
    extras: Tree  # [T, B, ...] the behaviour policy's output
    actor_state: ActorState  # [B, ...] before acting on row 0
    params_version: Tree  # [T, B] int32, the learner step whose parameters chose; () from replay
    importance: Tree = ()  # [B] float32, by which an item's loss counts; () outside replay


class Masks(NamedTuple):
    """Per-row masks of a trajectory, each `[T, B]`."""

    valid: Array  # bool: row t is a transition, not an auto-reset
    discount: Array  # float32: gamma, 0 where the episode terminated
    trace: Array  # float32: lambda, 0 where the episode ended in any way


def trajectory_masks(timesteps: Timestep, gamma: float, trace_decay: float) -> Masks:
    """Derives the masks that every loss uses from timesteps `[T + 1, B]`.

    A truncated step keeps its discount, so it bootstraps from the true last observation; recursions stop
    at either kind of end. Importance weights must be 0 where `valid` is false.
    """
    terminated, truncated = timesteps.terminated[1:], timesteps.truncated[1:]
    return Masks(
        valid=~timesteps.first[1:],
        discount=gamma * (~terminated).astype("float32"),
        trace=trace_decay * (~terminated & ~truncated).astype("float32"),
    )


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one environment's array."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Discrete:
    """One of `n` actions; an int32 scalar."""

    n: int


@dataclasses.dataclass(frozen=True)
class MultiDiscrete:
    """One choice in each of several sets; int32 `[len(nvec)]`."""

    nvec: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Box:
    """A bounded real vector; float32 of `shape`, bounds per element, flattened (may be infinite)."""

    shape: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


ActionSpec = Discrete | MultiDiscrete | Box


@dataclasses.dataclass(frozen=True)
class EnvSpec:
    """What an agent needs to know of an environment; `observation` is a tree of `ArraySpec`."""

    observation: Tree
    action: ActionSpec


def action_array(action: ActionSpec) -> ArraySpec:
    """Returns shape and dtype of one action."""
    if isinstance(action, Discrete):
        return ArraySpec((), "int32")
    if isinstance(action, MultiDiscrete):
        return ArraySpec((len(action.nvec),), "int32")
    return ArraySpec(action.shape, "float32")


@dataclasses.dataclass(frozen=True)
class OnPolicy:
    """Experience taken as it comes: a batch is `batch` unrolls of `unroll` steps, learned from once.

    A synchronous agent acts, stops and learns: the parameters from which the update of a batch starts
    chose every action in it. For any other agent acting goes on while it learns.
    """

    unroll: int
    batch: int
    synchronous: bool = False


@dataclasses.dataclass(frozen=True)
class Replay:
    """Experience that is kept and drawn again: an update uses `batch` items.

    An item has `burn_in + sequence` transitions of one environment; one begins every `period` steps of
    an episode, and is cut short where the episode ends: what is missing after the end, and before the
    beginning where memory is warmed up, are rows with `first` set, which are no transitions. With
    `cross_episodes` items run on through auto-resets, and one begins every `period` steps of all.
    """

    batch: int
    sequence: int  # transitions of an item that are learned from
    period: int  # steps from the start of an item to the next
    capacity: int  # items kept; the oldest goes first
    min_size: int  # items before the first update
    ratio: float  # how often an item is drawn, on average: what ties learning to acting
    burn_in: int = 0  # transitions before these that only warm up the memory
    priority_exponent: float = 0.0  # of drawing; 0 draws all items alike
    importance_exponent: float = 0.0  # how far weights make up for that
    cross_episodes: bool = False

    @property
    def steps(self) -> int:
        """Timesteps of an item."""
        return self.burn_in + self.sequence + 1


class LearnerState(NamedTuple):
    """What learning carries from update to update.

    Schedules follow `progress`, from 0 to 1: the share of the run's transitions (`--steps`) that were done
    when the batch being learned from was not yet counted. The runtime sets it before the first minibatch of
    a batch, and `apply` hands it on as it is.
    """

    params: Tree  # all that acting needs; published, never donated
    optimizer_state: Tree
    updates: Array  # int32 scalar: applied gradients
    progress: Array  # float32 scalar, set by the runtime: share of the run done before this batch
    auxiliary: Tree = ()  # what only learning needs, such as target networks; shares no buffers


class Output(NamedTuple):
    """What a gradient computation reports besides the gradient."""

    metrics: dict[str, Array]  # scalars, means over the valid rows
    weight: (
        Array  # float32 scalar: valid rows, by which devices' gradients and metrics are averaged
    )
    priorities: Tree = ()  # [B] float32 above 0, of the items of a batch; () outside replay


@runtime_checkable
class Agent(Protocol):
    """An algorithm: a frozen dataclass of hyperparameters whose methods are pure functions.

    `spec` is empty in a preset; `bind` fills it before any method is called.
    """

    @property
    def spec(self) -> EnvSpec | None:
        """What the environments show and take."""
        ...

    @property
    def epochs(self) -> int:
        """Passes over a batch."""
        ...

    @property
    def minibatches(self) -> int:
        """Parts, along B, into which a pass divides a batch."""
        ...

    @property
    def experience(self) -> OnPolicy | Replay:
        """How experience reaches the learner."""
        ...

    def init(self, key: Array) -> LearnerState:
        """Makes the initial learner state; consumes the key."""
        ...

    def actor_state(self, env_ids: Array, num_envs: int) -> ActorState:
        """Makes the initial actor state of environments `env_ids` `[B]` out of `num_envs`."""
        ...

    def act(
        self, params: Tree, actor_state: ActorState, timestep: Timestep, keys: Array, evaluate: bool
    ) -> tuple[Tree, Tree, ActorState]:
        """Chooses actions `[B]`; returns (action, extras, actor_state). Consumes `keys` `[B]`."""
        ...

    def prepare(self, state: LearnerState, trajectory: Trajectory, key: Array) -> Tree:
        """Turns a trajectory into a batch whose leaves divide along axis 1; consumes the key."""
        ...

    def gradients(self, state: LearnerState, minibatch: Tree, key: Array) -> tuple[Tree, Output]:
        """Computes the gradient of the mean loss over the valid rows; consumes the key."""
        ...

    def apply(self, state: LearnerState, grads: Tree, output: Output) -> LearnerState:
        """Applies a gradient."""
        ...


class ReplayAgent(Agent, Protocol):
    """An agent that learns from replay: one epoch and one minibatch of items an update."""

    @property
    def experience(self) -> Replay:
        """What it keeps and draws."""
        ...

    def initial_priorities(self, timesteps: Timestep, extras: Tree) -> Array:
        """Priorities `[B]`, above 0, of new items, from what acting knew; no key is consumed.

        Leaves are `[T + 1, B, ...]`, T of them transitions of `burn_in + sequence`; the observation is ().
        """
        ...


def learns_from_replay(agent: Agent) -> TypeIs[ReplayAgent]:
    """Says whether an agent learns from replay, rather than from unrolls as they come.

    Raises SeedbedError if its experience is `Replay` but it has no `initial_priorities`.
    """
    if not isinstance(agent.experience, Replay):
        return False
    if not hasattr(agent, "initial_priorities"):
        raise SeedbedError(
            f"{type(agent).__name__}.experience is Replay but it has no method initial_priorities: see "
            "seedbed.types.ReplayAgent"
        )
    return True


AgentT = TypeVar("AgentT", bound=Agent)


def bind(agent: AgentT, spec: EnvSpec) -> AgentT:
    """Returns the agent for environments of this spec."""
    return dataclasses.replace(agent, spec=spec)  # type: ignore[type-var]


class HostEnvConfig(Protocol):
    """A frozen dataclass that describes a host environment and can make it."""

    @property
    def frame_stack(self) -> int:
        """Observations that the runtime stacks along the last axis of each of their arrays."""
        ...

    @property
    def frame_skip(self) -> int:
        """Simulator frames of one step, by which reported frames are counted."""
        ...

    def for_evaluation(self) -> HostEnvConfig:
        """The same environments with whole episodes, by which policies are judged."""
        ...

    def make(self, num_envs: int, seed: int | None) -> HostEnv:
        """Makes `num_envs` environments in lock-step; without a seed they take the system's entropy."""
        ...


class HostEnv(Protocol):
    """Environments in lock-step on the host, with next-step auto-reset; arrays are numpy `[n, ...]`."""

    spec: EnvSpec

    def reset(self) -> Timestep:
        """Opens the first episodes (seeded at construction)."""
        ...

    def step(self, action: Array) -> Timestep:
        """Steps every environment."""
        ...

    def close(self) -> None:
        """Releases processes, threads and files; `encode` and `decode` go on working."""
        ...

    def encode(self, observation: Any) -> Tree:
        """Turns an observation as the environment gives it, or a batch of them, into the spec's form."""
        ...

    def decode(self, action: Array) -> Any:
        """Turns an action in the spec's form, or a batch of them, into one that the environment takes."""
        ...


class EnvState(NamedTuple):
    """One on-device environment between two steps; leaves have no batch axis."""

    inner: Tree  # what the environment simulates, and what its wrappers keep
    timestep: Timestep  # what arrived last: one observation, scalars for the rest
    metrics: dict[str, Array]  # float32 scalars about the last step, for reports


class Environment(Protocol):
    """An environment on the device: a frozen dataclass of options, whose methods are pure functions.

    It is written for one environment; runtimes batch it. It neither resets itself nor ends at a time
    limit: `envs.wrappers` adds both.
    """

    @property
    def spec(self) -> EnvSpec:
        """What it shows and takes."""
        ...

    @property
    def episode_steps(self) -> int:
        """Steps after which an episode is truncated; 0 is never."""
        ...

    @property
    def frame_skip(self) -> int:
        """Simulator frames of one step, by which reported frames are counted."""
        ...

    def reset(self, key: Array) -> EnvState:
        """Opens an episode: reward 0, `first` set; consumes the key."""
        ...

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Takes an action; `first` is false afterwards."""
        ...


def is_on_device(env: HostEnvConfig | Environment) -> TypeIs[Environment]:
    """Says whether an environment is one of the device, rather than the options of one of the host."""
    return hasattr(type(env), "step")  # the class: an instance's spec may take a second to make


class SeedbedError(Exception):
    """A failure that the user can mend; its text names the thing, its value and the remedy."""


class StorageError(SeedbedError):
    """The disk refused to store something. Nothing else is wrong, and training can go on."""
