"""EnvPool's environments: groups that are stepped in C++, by the threads of an actor.

EnvPool has Football, MiniGrid, MetaWorld, MyoSuite, Jumanji, dm_control's and MuJoCo Playground's tasks and
more. `seedbed[envpool]` installs it; the module imports it only when an environment is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from seedbed import trees
from seedbed.envs.factories import Options
from seedbed.envs.host.contract import HostEnv
from seedbed.envs.host.doom import launcher
from seedbed.envs.host.gym import Configured
from seedbed.envs.host.returned import told
from seedbed.envs.host.spaces import actions_of, encoded, observation_leaves
from seedbed.nearest import did_you_mean
from seedbed.types import (
    Array,
    ArraySpec,
    Discrete,
    EnvSpec,
    MultiDiscrete,
    SeedbedError,
    Timestep,
    Tree,
)

PREFIX = "envpool:"
"""How names of EnvPool's environments begin."""
FOOTBALL = "football/"
"""How names of Google Research Football's scenarios begin."""
SCENARIOS = (
    "11_vs_11_competition",
    "11_vs_11_easy_stochastic",
    "11_vs_11_hard_stochastic",
    "11_vs_11_kaggle",
    "11_vs_11_stochastic",
    "1_vs_1_easy",
    "5_vs_5",
    "academy_3_vs_1_with_keeper",
    "academy_corner",
    "academy_counterattack_easy",
    "academy_counterattack_hard",
    "academy_empty_goal",
    "academy_empty_goal_close",
    "academy_pass_and_shoot_with_keeper",
    "academy_run_pass_and_shoot_with_keeper",
    "academy_run_to_score",
    "academy_run_to_score_with_keeper",
    "academy_single_goal_versus_lazy",
)
"""Football's scenarios, one player of which the agent moves: whoever has the ball, or is nearest to it."""
PART = "observation"
"""The name of an observation that has no parts, among `parts`."""
INSTALL = "pip install 'seedbed[envpool]'"
"""What installs EnvPool."""
_OURS = {
    "num_envs",
    "batch_size",
    "num_threads",
    "max_num_players",
    "seed",
    "env_seed",
    "env_type",
    "thread_affinity_offset",
    "gym_reset_return_info",
}
"""EnvPool's options that the runtime sets."""
_INFO = "info:"
"""How EnvPool's names of what is in `info` begin."""


@dataclasses.dataclass(frozen=True)
class EnvPoolEnv(Configured):
    """An environment of EnvPool.

    Images with the channels first become images with the channels last, as networks take them. EnvPool
    itself stacks observations and repeats actions of some families: `kwargs` changes that.
    """

    id: str
    """EnvPool's id, such as `MiniGrid-MemoryS13-v0`."""
    frame_stack: int = 1
    """Number of successive observations that the agent sees, stacked along the last axis."""
    parts: tuple[str, ...] = ()
    """What the agent sees: keys of the observation (`observation` if it has none) and of `info`.

    If there are none, it sees the observation."""
    threads: int = 1
    """Threads of EnvPool in each group; actor processes already run in parallel."""
    kwargs: Options = ()
    """Options of EnvPool and of the environment; `envpool.make_spec(id)` lists them."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        object.__setattr__(self, "parts", tuple(self.parts))
        super().__post_init__()
        if self.threads < 1:
            raise SeedbedError(f"threads is {self.threads}: an environment needs 1 or more")
        if taken := sorted(_OURS & {key for key, _ in self.kwargs}):
            raise SeedbedError(f"{self.id}: seedbed itself sets EnvPool's {', '.join(taken)}")

    @property
    def frame_skip(self) -> int:
        """Returns the option `frame_skip`; 1 if it is not given, whatever EnvPool does by itself."""
        return int(dict(self.kwargs).get("frame_skip", 1))

    def make(self, num_envs: int, seed: int | None) -> HostEnv:
        """Makes `num_envs` environments, each with its own seed; without a seed the seeds are random.

        Raises SeedbedError if EnvPool is missing, refuses the id or the options, or has spaces that Seedbed
        does not support.
        """
        return _EnvPoolHost(self, num_envs, seed)


def football(scenario: str) -> EnvPoolEnv:
    """Returns a scenario of Football, with the last four mini-maps as SEED RL shows them.

    Raises SeedbedError if there is none of this name.
    """
    if scenario not in SCENARIOS:
        hint = did_you_mean(scenario, SCENARIOS, 3, 0.5, f"known are {', '.join(SCENARIOS)}")
        raise SeedbedError(f"Football has no scenario {scenario!r}{hint}")
    return EnvPoolEnv(f"gfootball/{scenario}-v1", frame_stack=4)


class _EnvPoolHost:
    """A group of EnvPool's environments in lock-step, with its next-step auto-reset, which is checked."""

    def __init__(self, config: EnvPoolEnv, num_envs: int, seed: int | None) -> None:
        self._name = f"{PREFIX}{config.id}"
        words = np.random.SeedSequence(seed).generate_state(num_envs)
        self._envs = _make(
            config,
            num_envs=num_envs,
            num_threads=config.threads,
            # EnvPool takes 31 bits. Without a seed it would take 42.
            env_seed=(words.astype(np.int64) & 0x7FFFFFFF).tolist(),
        )
        if (players := int(self._envs.config.get("max_num_players", 1))) > 1:
            raise SeedbedError(f"{self._name} has {players} players, and an agent is one")
        self._parts = config.parts
        self._leaves = observation_leaves(self._space(), self._name)
        action, self._decode = actions_of(_unbounded(self._envs.action_space), self._name)
        self.spec = EnvSpec(trees.map(lambda leaf: _last(leaf.spec), self._leaves), action)
        self._counts = _counts(action)
        self._order = np.arange(num_envs)
        self._ended = np.zeros(num_envs, bool)
        self._steps = 0

    def reset(self) -> Timestep:
        """Opens an episode in every environment; the seeds are those of the constructor."""
        self._steps = 0
        observation, info = self._call(self._envs.reset)
        none = np.zeros_like(self._ended)
        return self._timestep(observation, none.astype(np.float32), none, none, info, ~none)

    def step(self, action: Array) -> Timestep:
        """Steps every environment; one whose episode has ended opens its next episode instead.

        Raises SeedbedError if an action is none of the choices: EnvPool would not look.
        """
        self._steps += 1
        if self._counts is not None and not ((action >= 0) & (action < self._counts)).all():
            raise SeedbedError(
                f"{self._where()}: the actions {action.tolist()} are not all in {self.spec.action}"
            )
        seen, reward, terminated, truncated, info = self._call(
            self._envs.step, self._decode(action)
        )
        return self._timestep(seen, reward, terminated, truncated, info, self._ended)

    def close(self) -> None:
        """Ends EnvPool's threads."""
        self._call(self._envs.close)

    def encode(self, observation: Any) -> Tree:
        """Turns an observation, or a batch of them, into arrays in the spec's form.

        It is EnvPool's own, or the chosen `parts` of it and of `info`.
        """
        chosen = observation
        if self._parts and isinstance(observation, dict):
            chosen = self._chosen(observation, observation)
        arrays = encoded(self._leaves, chosen)
        return trees.map(
            lambda leaf, x: np.moveaxis(x, -3, -1) if _is_first(leaf.spec) else x,
            self._leaves,
            arrays,
        )

    def decode(self, action: Array) -> Any:
        """Turns an action, or a batch of actions, into EnvPool's form."""
        return self._decode(action)

    def _space(self) -> spaces.Space:
        """Returns the space of what the agent sees; raises SeedbedError for a part that is not there."""
        whole, spec = self._envs.observation_space, self._envs.spec
        if not self._parts:
            return whole
        own = dict(whole.spaces) if isinstance(whole, spaces.Dict) else {PART: whole}
        told_of = {
            name.removeprefix(_INFO): _of_info(each)
            for name, each in spec.state_array_spec.items()
            if name.startswith(_INFO) and not name.endswith("env_id")
        }
        known = {**told_of, **own}
        for part in self._parts:
            if part not in known:
                hint = did_you_mean(part, known, 3, 0.5, f"it has {', '.join(sorted(known))}")
                raise SeedbedError(f"{self._name} has no part {part!r}{hint}")
        if len(self._parts) == 1:
            return known[self._parts[0]]
        return spaces.Dict({part: known[part] for part in self._parts})

    def _chosen(self, observation: Any, info: dict[str, Any]) -> Any:
        if not self._parts:
            return observation
        own = observation if isinstance(observation, dict) else {PART: observation}
        chosen = {part: own[part] if part in own else info[part] for part in self._parts}
        return chosen if len(chosen) > 1 else chosen[self._parts[0]]

    def _where(self) -> str:
        return f"environment {self._name!r}, step {self._steps}"

    def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:
            raise SeedbedError(f"{self._where()}: {told(error)}") from error

    def _timestep(
        self,
        observation: Any,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        info: dict[str, Any],
        first: np.ndarray,
    ) -> Timestep:
        if not np.array_equal(info["env_id"], self._order):
            raise SeedbedError(f"{self._where()}: EnvPool returned {info['env_id']} out of order")
        opened = info["elapsed_step"] == 0
        if not np.array_equal(opened, first):
            raise SeedbedError(
                f"{self._where()}: EnvPool opened episodes in {np.flatnonzero(opened)} and not in "
                f"{np.flatnonzero(first)}, whose last ones ended: this version resets otherwise"
            )
        if not np.isfinite(reward).all():
            index = int(np.flatnonzero(~np.isfinite(reward))[0])
            raise SeedbedError(
                f"{self._where()}, index {index}: reward {reward[index]} is not finite"
            )
        self._ended = terminated | truncated
        try:
            seen = self.encode(self._chosen(observation, info))
        except SeedbedError as error:
            raise SeedbedError(f"{self._where()}: {error}") from error
        # What EnvPool returns with an opening observation belongs to no action.
        reward = np.where(first, np.float32(0), reward.astype(np.float32))
        return Timestep(seen, reward, terminated & ~first, truncated & ~first, first)


@contextlib.contextmanager
def _without_jax() -> Iterator[None]:
    """Hides JAX from imports inside it, unless it is there already.

    EnvPool imports it for a function that is not used here, which costs every actor a second and 100 MB.
    """
    if "jax" in sys.modules:
        yield
        return
    sys.modules["jax"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["jax"]


def _make(config: EnvPoolEnv, **ours: Any) -> Any:
    """Makes EnvPool's environments; raises SeedbedError if it is missing or refuses the id or an option."""
    try:
        with _without_jax():
            envpool: Any = importlib.import_module("envpool")
    except ImportError as error:
        raise SeedbedError(f"{PREFIX}{config.id} lacks a package ({error}): {INSTALL}") from error
    known = envpool.list_all_envs()
    if config.id not in known:
        raise SeedbedError(
            f"EnvPool has no environment {config.id!r}{did_you_mean(config.id, known, 4, 0.5)}"
        )
    try:
        # It warns of bounds that float32 rounds.
        with _without_jax(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = getattr(envpool.make_spec(config.id).config, "vzd_path", None)
            options = {"vzd_path": str(launcher(Path(engine))[0])} if engine else {}
            options |= dict(config.kwargs)
            return envpool.make(config.id, env_type="gymnasium", **ours, **options)
    except Exception as error:
        raise SeedbedError(f"EnvPool cannot make {config.id!r}: {told(error)}") from error


def _is_first(spec: ArraySpec) -> bool:
    """Returns whether an array is an image with the channels first."""
    if spec.dtype != "uint8" or len(spec.shape) != 3:
        return False
    channels, height, width = spec.shape
    return channels < min(height, width)


def _last(spec: ArraySpec) -> ArraySpec:
    """Returns the spec with the channels last."""
    if not _is_first(spec):
        return spec
    channels, *size = spec.shape
    return ArraySpec((*size, channels), spec.dtype)


def _of_info(spec: Any) -> spaces.Space:
    """Returns the space of a field of `info`; its array may have an axis of players."""
    shape = tuple(n for n in spec.shape if n != -1)
    if np.dtype(spec.dtype).kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, np.float32)
    kind = np.iinfo(np.int32 if np.dtype(spec.dtype).itemsize > 4 else spec.dtype)
    return spaces.Box(kind.min, kind.max, shape, kind.dtype)


def _unbounded(space: spaces.Space) -> spaces.Space:
    """Returns an action space without the bounds that EnvPool takes for none: C++'s least and largest."""
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
        return space
    kind = np.finfo(space.dtype)
    low = np.where(space.low == kind.tiny, -np.inf, space.low)
    return spaces.Box(low, space.high, dtype=space.dtype.type)


def _counts(action: Any) -> np.ndarray | None:
    """Returns how many choices each element of an action has; None if actions are real."""
    if isinstance(action, Discrete):
        return np.array(action.n)
    return np.array(action.nvec) if isinstance(action, MultiDiscrete) else None
