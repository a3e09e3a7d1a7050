"""What passes through the fused program: sizes, the state of a run, experience and reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from seedbed.replay.device import ReplayState
from seedbed.types import ActorState, Array, EnvState, LearnerState, Timestep, Tree

Move: TypeAlias = Callable[[EnvState, Tree], EnvState]
"""Steps a batch of environments: (states `[B, ...]`, actions `[B, ...]`) -> states."""


class Plan(NamedTuple):
    """The sizes of an iteration."""

    envs: int  # number of environments, on all devices together
    unroll: int  # steps of each environment
    # Gradients; with replay, those that `ratio` asks for after envs x unroll transitions.
    updates: int


class Carry(NamedTuple):
    """The state of a run on the device: a run that resumes from it continues bit for bit.

    A checkpoint holds it, together with the host's counts of transitions and episodes.
    """

    learner: LearnerState
    env: EnvState  # [B, ...]
    actor: ActorState  # [B, ...]
    steps: Array  # uint32 [2], a count: rows of each environment so far, including auto-resets
    # The run's key never changes: an iteration splits keys from it and folds counts into them.
    key: Array
    replay: ReplayState | None = None  # None for an on-policy agent
    # Int32 scalar: transitions for which updates are still owed, below 0 at first; None without replay.
    owed: Array | None = None


class StageTimes(NamedTuple):
    """The time of each part of an iteration: uint32 scalars, microseconds; 0 on other devices than CPU."""

    environment: Array
    inference: Array
    learning: Array


class Iteration(NamedTuple):
    """The report of an iteration. All fields are scalars, over all devices."""

    transitions: Array  # int32: steps of the iteration, not counting auto-resets
    updates: Array  # int32: gradients applied so far in the run
    metrics: dict[str, Array]  # the agent's, means over the updates; 0 if there were none
    env_metrics: dict[str, Array]  # means over the environments after the last step
    episodes: Array  # int32: number of episodes that ended
    returns: Array  # float32: sum of their returns
    lengths: Array  # float32: sum of their lengths
    finite: Array  # bool: whether all observations and rewards were finite
    valid: Array  # bool: whether all priorities of items were finite and above 0
    busy: StageTimes  # the longest time of any device, for each part


class EpisodeSums(NamedTuple):
    """Sums over the episodes that ended; scalars, as in `Iteration`."""

    episodes: Array
    returns: Array
    lengths: Array


class Rows(NamedTuple):
    """T steps of B environments: the timestep acted on, and the results of acting; `[T, B, ...]`."""

    timesteps: Timestep
    action: Tree
    extras: Tree
    core: Tree  # recurrent state before acting, for replay; else ()
