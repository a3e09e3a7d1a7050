"""Gymnasium environments on the host, by id or from a function; a group is stepped one by one."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable
from typing import Any, Self

import gymnasium
import numpy as np

from seedbed import trees
from seedbed.arguments import require_fields
from seedbed.envs.factories import Options, import_for, load_factory, options_of
from seedbed.envs.host.contract import HostEnv
from seedbed.envs.host.returned import (
    flag_of,
    require_env,
    reward_of,
    told,
    values_of,
)
from seedbed.envs.host.spaces import actions_of, batched, encoded, mask_leaf, observation_leaves
from seedbed.nearest import did_you_mean
from seedbed.spaces import ACTION_MASK, PRIVILEGED, num_choices, without
from seedbed.types import Array, Discrete, EnvSpec, SeedbedError, Timestep, Tree

_Row = tuple[Any, float, bool, bool, bool]
"""Observation, reward, terminated, truncated and first of one environment."""
_ID = re.compile(r"-v\d+$")
"""How Gymnasium's ids end."""
MAIN = "__main__"
"""The module of a script or notebook."""
MASKS = "action_masks"
"""The method, as sb3-contrib has it, that returns the mask of the next action."""
_LARGEST = float(np.finfo(np.float32).max)
"""Largest finite reward."""


class Configured:
    """The part that configurations share whose environments take keyword arguments."""

    frame_stack: int
    kwargs: Options

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        require_frames(self.frame_stack)
        require_fields(self)
        code = str(getattr(self, "factory", None) or getattr(self, "id", ""))
        if code.startswith(f"{MAIN}:"):
            raise SeedbedError(f"environment {code!r}: {in_module(code.partition(':')[2])}")
        object.__setattr__(self, "kwargs", options_of(self.kwargs))

    @property
    def frame_skip(self) -> int:
        """Returns 1: frames that the environment itself repeats within a step are not counted."""
        return 1

    def for_evaluation(self) -> Self:
        """Returns the same configuration: training does not shorten its episodes."""
        return self


@dataclasses.dataclass(frozen=True)
class GymEnv(Configured):
    """An environment that is registered with Gymnasium; `module:EnvId` imports the module first."""

    id: str
    """Gymnasium's id, or `module:EnvId`."""
    frame_stack: int = 1
    """Number of successive observations that the agent sees, stacked along the last axis."""
    kwargs: Options = ()
    """Keyword arguments of `gymnasium.make`."""

    def make(self, num_envs: int, seed: int | None) -> HostEnv:
        """Makes `num_envs` environments, each with its own seed; without a seed the seeds are random.

        Raises SeedbedError if an environment cannot be made or has spaces that Seedbed does not support.
        """
        return GymHost(self.one, self.id, num_envs, seed)

    def one(self) -> gymnasium.Env:
        """Makes one environment; raises SeedbedError if Gymnasium does not know it, or it lacks a package."""
        require_id(self.id)
        return make_one(self.id, dict(self.kwargs))


@dataclasses.dataclass(frozen=True)
class FactoryEnv(Configured):
    """An environment from a callable that returns a `gymnasium.Env`."""

    factory: str
    """The callable, as `module:callable`."""
    frame_stack: int = 1
    """Number of successive observations that the agent sees, stacked along the last axis."""
    kwargs: Options = ()
    """Keyword arguments of the callable."""

    def make(self, num_envs: int, seed: int | None) -> HostEnv:
        """Makes `num_envs` environments, each with its own seed; without a seed the seeds are random.

        Raises SeedbedError if an environment cannot be made or has spaces that Seedbed does not support.
        """
        return GymHost(self.one, self.factory, num_envs, seed)

    def one(self) -> gymnasium.Env:
        """Makes one environment; raises SeedbedError if the callable is not there."""
        return load_factory(self.factory)(**dict(self.kwargs))


def in_module(name: str) -> str:
    """Returns what to do with an environment that the script or notebook itself defines."""
    return (
        "it is defined in the script or notebook itself, which actor processes cannot import: put it into a "
        f"module, such as my_env.py beside it, and give 'my_env:{name}'"
    )


def of_package(name: str) -> str:
    """Returns what to add to a message that an id is unknown; "" if it does not look like an id."""
    if ":" in name or not _ID.search(name):
        return ""
    return f" (if a package registers it, name that, too: package:{name})"


def require_frames(frame_stack: int) -> None:
    """Raises SeedbedError unless `frame_stack` is a whole number, 1 or more."""
    if isinstance(frame_stack, bool) or not isinstance(frame_stack, int) or frame_stack < 1:
        raise SeedbedError(f"frame_stack is {frame_stack!r}: it must be a whole number, 1 or more")


def require_id(env_id: str) -> None:
    """Raises SeedbedError unless Gymnasium knows the id; imports the module of `module:EnvId` first."""
    module, _, name = env_id.rpartition(":")
    # Ids of Atari are there once their package is imported.
    if module := module or ("ale_py" if name.startswith("ALE/") else ""):
        import_for(module, env_id)
    try:
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        hint = did_you_mean(name, gymnasium.registry, 3, 0.5, "see `seedbed list`")
        hint += "" if ":" in env_id else of_package(name)
        raise SeedbedError(f"Gymnasium has no environment {name!r}{hint}") from error


def with_mask(observation: Any, mask: Any) -> dict[str, Any]:
    """Returns an observation, or a tree of its form, as a dict with a mask of actions."""
    shown = observation if isinstance(observation, dict) else {"observation": observation}
    return {**shown, ACTION_MASK: mask}


def make_one(env_id: str, options: dict[str, Any]) -> gymnasium.Env:
    """Makes an environment by its id; raises SeedbedError if it lacks a package."""
    try:
        # Gymnasium's checker wraps every step but tests only the first. `GymHost` tests all of them.
        return gymnasium.make(env_id, disable_env_checker=True, **options)
    except gymnasium.error.DependencyNotInstalled as error:
        raise SeedbedError(f"environment {env_id!r} lacks a package: {error}") from error


class GymHost:
    """A group of Gymnasium environments, stepped in turn, with next-step auto-reset.

    Raises SeedbedError, with the environment's index and the step, if an environment raises, or if it
    returns an observation or a reward that does not fit its spaces or is not finite.
    """

    def __init__(
        self, make: Callable[[], gymnasium.Env], name: str, num_envs: int, seed: int | None
    ) -> None:
        self._name = name
        self._envs: list[gymnasium.Env] = []
        self._steps = 0
        try:
            self._make(make, num_envs, seed)
        except BaseException:
            with contextlib.suppress(Exception):
                self.close()
            raise

    def _make(self, make: Callable[[], gymnasium.Env], num_envs: int, seed: int | None) -> None:
        """Makes the environments, and looks at what they show and take."""
        name = self._name
        for index in range(num_envs):
            env = self._guard(index, make)
            require_env(env, name)
            if any(env is other for other in self._envs):
                raise SeedbedError(
                    f"environment {name!r}: the factory returned one environment twice; make a new one "
                    "in each call"
                )
            self._envs.append(env)
        self._leaves = observation_leaves(self._envs[0].observation_space, name)
        action, self._decode = actions_of(self._envs[0].action_space, name)
        self._seeds: list[int | None] = (
            np.random.SeedSequence(seed).generate_state(num_envs).tolist()
        )
        self._opening: tuple[Any, Any] | None = None
        self._chooses, self._shows_mask, self._asks_mask = num_choices(action) > 0, False, False
        self._masked = self._chooses and self._tells_mask()
        if self._masked:
            path = f"{MASKS}()" if self._asks_mask else f"info[{ACTION_MASK!r}]"
            self._leaves = with_mask(self._leaves, mask_leaf(num_choices(action), path))
        self.spec = EnvSpec(trees.map(lambda leaf: leaf.spec, self._leaves), action)
        # By environment: 0, or 1 and 2 for a failure and a success that `info` told with an episode's end.
        self.success = np.zeros(num_envs, np.uint8)
        # If set, the next step opens an episode.
        self._ended = [False] * num_envs

    def reset(self) -> Timestep:
        """Opens an episode in every environment; only the first call uses the seeds."""
        self._steps = 0
        self.success[:] = 0
        rows = [self._guard(i, self._open, i, seed) for i, seed in enumerate(self._seeds)]
        self._seeds = [None] * len(self._envs)
        return self._timestep(rows)

    def step(self, action: Array) -> Timestep:
        """Steps every environment; one whose episode has ended opens its next episode instead."""
        self._steps += 1
        self.success[:] = 0
        given = self._decode(action)
        # Actions of a Discrete space are scalars. All other actions are arrays, even with no axis.
        scalars = isinstance(self.spec.action, Discrete)
        rows = []
        for i in range(len(self._envs)):
            if self._ended[i]:
                rows.append(self._guard(i, self._open, i))
            else:
                one = given[i] if scalars else given[i, ...]
                rows.append(self._guard(i, self._advance, i, one))
        return self._timestep(rows)

    def close(self) -> None:
        """Closes every environment, the last first; then raises the failure of the first one that failed."""
        with contextlib.ExitStack() as stack:
            for index, env in enumerate(self._envs):
                stack.callback(self._close, index, env)

    def _close(self, index: int, env: gymnasium.Env) -> None:
        try:
            env.close()
        except Exception as error:
            raise SeedbedError(f"{self._where(index)}: close {told(error)}") from error

    def encode(self, observation: Any) -> Tree:
        """Turns an observation of the space into arrays in the spec's form, without the privileged part.

        If the environment tells its masks beside observations, an observation may be a dict that has the mask
        under `action_mask`, and the observation itself under `observation` unless it is a dict. Without it,
        nothing is forbidden. A batch, as vector environments return it, becomes arrays `[n, ...]`.
        """
        if self._masked and not (isinstance(observation, dict) and ACTION_MASK in observation):
            return self._unmasked(observation)
        return encoded(without(self._leaves, PRIVILEGED), observation)

    def _unmasked(self, observation: Any) -> Tree:
        """Encodes an observation, or a batch, without its mask, as one that forbids nothing."""
        seen = without(self._leaves, PRIVILEGED)
        rest = {key: leaf for key, leaf in seen.items() if key != ACTION_MASK}
        shown = observation if isinstance(observation, dict) else {"observation": observation}
        found = encoded(rest, shown)
        one, leaf = trees.leaves(rest)[0].spec.shape, trees.leaves(found)[0]
        mask = np.ones(
            (*leaf.shape[: leaf.ndim - len(one)], num_choices(self.spec.action)), np.uint8
        )
        return {**found, ACTION_MASK: mask}

    def decode(self, action: Array) -> Any:
        """Turns an action, or a batch of actions, into the form of the action space."""
        return self._decode(action)

    def _tells_mask(self) -> bool:
        """Returns whether masks come beside observations: in `info`, or else from a method.

        Opens the first episode, which `reset` then shows.
        """
        shown, info = self._opening = self._guard(0, self._reset, 0, self._seeds[0])
        self._shows_mask = isinstance(shown, dict) and ACTION_MASK in shown
        told = isinstance(info, dict) and info.get(ACTION_MASK) is not None
        self._asks_mask = not (told or self._shows_mask) and self._envs[0].has_wrapper_attr(MASKS)
        return self._asks_mask or (told and not self._shows_mask)

    def _reset(self, index: int, seed: int | None) -> tuple[Any, Any]:
        returned = self._envs[index].reset(seed=seed)
        if type(returned) is not tuple or len(returned) != 2:
            returned = values_of(returned, "reset")
        return returned

    def _open(self, index: int, seed: int | None = None) -> _Row:
        if self._opening is not None and index == 0:
            (observation, info), self._opening = self._opening, None
        else:
            observation, info = self._reset(index, seed)
        self._ended[index] = False
        return self._seen(index, observation, info), 0.0, False, False, True

    def _seen(self, index: int, observation: Any, info: Any, terminated: bool = False) -> Any:
        """Returns an observation with its mask, if the environment tells masks beside observations."""
        mask = info.get(ACTION_MASK) if isinstance(info, dict) else None
        if self._asks_mask and not terminated:
            mask = self._envs[index].get_wrapper_attr(MASKS)()
        if not self._masked:
            if mask is not None and self._chooses and not self._shows_mask:
                raise SeedbedError(
                    f"{self._where(index)}: info has an {ACTION_MASK}, which that of the first reset "
                    "had not; tell it from reset, too"
                )
            return observation
        if mask is None and terminated:
            # Nothing is chosen here. A truncated episode's value is that of the best choice allowed.
            mask = np.ones(num_choices(self.spec.action), np.uint8)
        if mask is None:
            raise SeedbedError(
                f"{self._where(index)}: info has no {ACTION_MASK}, which that of the first reset had; tell "
                "it in each step"
            )
        return with_mask(observation, mask)

    def _advance(self, index: int, action: Any) -> _Row:
        returned = self._envs[index].step(action)
        if type(returned) is not tuple or len(returned) != 5:
            returned = values_of(returned, "step")
        observation, reward, terminated, truncated, info = returned
        if type(reward) is not float:
            reward = reward_of(reward)
        if type(terminated) is not bool or type(truncated) is not bool:
            terminated = flag_of("terminated", terminated)
            truncated = flag_of("truncated", truncated)
        self._ended[index] = terminated or truncated
        if self._ended[index] and isinstance(info, dict) and info.get("is_success") is not None:
            self.success[index] = 1 + bool(info["is_success"])
        seen = self._seen(index, observation, info, terminated)
        return seen, reward, terminated, truncated, False

    def _where(self, index: int) -> str:
        return f"environment {self._name!r}, index {index}, step {self._steps}"

    def _guard(self, index: int, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except SeedbedError:
            raise
        except Exception as error:
            raise SeedbedError(f"{self._where(index)}: {told(error)}") from error

    def _timestep(self, rows: list[_Row]) -> Timestep:
        observations, rewards, terminated, truncated, first = zip(*rows, strict=True)
        for i, reward in enumerate(rewards):
            if not abs(reward) <= _LARGEST:
                raise SeedbedError(
                    f"{self._where(i)}: reward is not finite: {reward} in float32; step must return a "
                    "finite number"
                )

        def where(index: int) -> str:
            call = "reset" if first[index] else "step"
            return f"{self._where(index)}: {call} returned a wrong observation: "

        return Timestep(
            batched(self._leaves, observations, where),
            np.array(rewards, np.float32),
            np.array(terminated, bool),
            np.array(truncated, bool),
            np.array(first, bool),
        )
