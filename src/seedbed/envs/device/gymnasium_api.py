"""On-device environments behind Gymnasium's interface, for tools that expect this interface."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec as Registration
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from jax import Array

from seedbed import simd, trees
from seedbed.envs.device import wrappers
from seedbed.envs.device.mujoco import MujocoTask
from seedbed.types import (
    ActionSpec,
    ArraySpec,
    Box,
    Discrete,
    Environment,
    EnvState,
    SeedbedError,
    Tree,
    action_array,
)

_LARGEST = float(np.finfo(np.float32).max)


def make_gymnasium(
    env: Environment,
    num_envs: int | None = None,
    seed: int | None = None,
    autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP,
) -> gymnasium.Env | VectorEnv:
    """Makes one Gymnasium environment, or a vector environment of `num_envs`, on the default device.

    Both truncate episodes at the environment's time limit. The vector environment resets each environment
    in the step after an end, or with `AutoresetMode.DISABLED` where `reset` is given a mask. The first reset
    uses `seed`, unless the caller gives that reset another seed. Rewards of the vector environment are
    float32. The dict `info` has the environment's metrics. Nothing is rendered. Raises SeedbedError if `env`
    has `auto_reset` in it, if `num_envs` is below 1, or for another mode.
    """
    if autoreset_mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED):
        raise SeedbedError(
            f"make_gymnasium: autoreset_mode is {autoreset_mode}; give AutoresetMode.NEXT_STEP or DISABLED"
        )
    if wrappers.resets_itself(env):
        raise SeedbedError(
            "make_gymnasium: the environment has auto_reset in it, which is added here where Gymnasium "
            "wants it; leave it out"
        )
    if num_envs is None:
        return _SingleEnv(env, seed)
    if num_envs < 1:
        raise SeedbedError(f"make_gymnasium: num_envs is {num_envs}; give at least 1, or None")
    return _BatchedEnv(env, num_envs, seed, autoreset_mode)


@jax.jit
def chosen(which: Any, new: EnvState, now: EnvState) -> EnvState:
    """Returns the states `[B, ...]`: `new` where `which` `[B]` is true, else `now`."""

    def choose(new: Any, old: Any) -> Any:
        if jnp.issubdtype(new.dtype, jax.dtypes.prng_key):
            kept = choose(jax.random.key_data(new), jax.random.key_data(old))
            return jax.random.wrap_key_data(kept, impl=jax.random.key_impl(new))
        return jnp.where(which.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, new, now)


class _Programs(NamedTuple):
    """An environment with its wrappers, and the functions that reset and step a batch of it."""

    env: Environment
    reset: Callable[..., EnvState]
    reopen: Callable[..., EnvState]
    step: Callable[..., EnvState]


def _programs(
    task: Environment, added: Callable[[Environment], Environment], *told: Hashable
) -> _Programs:
    """Compiles a task; `told` tells tasks apart that are equal, and yet are not the same."""
    del told
    env = added(task)

    def reopen(key: Array, last: EnvState) -> EnvState:
        return wrappers.reopen_child(env, key, last)

    compiled = (jax.jit(simd.vectorize(f)) for f in (env.reset, reopen, env.step))
    return _Programs(env, *compiled)


# Robots of ours that are equal share what is compiled: eight in a process of actors are compiled once. Of a
# user's tasks, equality may leave out what a step reads.
_shared = functools.lru_cache(maxsize=16)(_programs)


class Batch:
    """A batch of environments: their state, and the compiled functions that reset and step them."""

    def __init__(
        self, task: Environment, size: int, added: Callable[[Environment], Environment]
    ) -> None:
        """Puts the wrappers `added`, which carry nothing from episode to episode, around a task."""
        if isinstance(task, MujocoTask) and type(task).__module__.startswith("seedbed."):
            # 1 and 1.0 are equal options; the model is of the file as it was read.
            self._programs = _shared(task, added, repr(task), task.physics_model())
        else:
            self._programs = _programs(task, added)
        self.env, self.size = self._programs.env, size
        self._carries = isinstance(task, wrappers.Wrapper)
        self._state: EnvState | None = None

    def reset(
        self, rng: np.random.Generator, which: np.ndarray | None = None, seeded: bool = False
    ) -> EnvState:
        """Opens an episode in every environment, or where `which` is true; returns arrays `[size, ...]`.

        What wrappers carry from episode to episode stays, unless the reset is `seeded`: it must repeat. The
        arrays are copies, which the caller may change. `rng` is advanced.
        """
        data = jnp.asarray(rng.integers(1 << 32, size=2, dtype=np.uint32))
        key = jax.random.wrap_key_data(data, impl="threefry2x32")
        keys = jax.random.split(key, self.size)
        if self._state is None:
            return self._arrived(self._programs.reset(keys))
        fresh = seeded or not self._carries
        opened = self._programs.reset(keys) if fresh else self._programs.reopen(keys, self._state)
        return self._arrived(opened if which is None else chosen(which, opened, self._state))

    def step(self, action: np.ndarray) -> EnvState:
        """Takes actions `[size, ...]`; returns copies as `reset` does. Raises SeedbedError before a reset."""
        if self._state is None:
            raise SeedbedError("step was called before reset; call reset first")
        return self._arrived(self._programs.step(self._state, action))

    def amended(self, change: Callable[[EnvState, Callable[..., EnvState]], EnvState]) -> EnvState:
        """Puts `change(state, step)` in the place of the state; returns copies as `reset` does."""
        return self._arrived(change(self._state, self._programs.step))  # type: ignore[arg-type]

    def _arrived(self, state: EnvState) -> EnvState:
        self._state = state
        shown = jax.tree.map(np.array, (state.timestep, state.metrics))
        return EnvState((), *shown)


class _SingleEnv(gymnasium.Env):
    """A single Gymnasium environment, compiled as a batch of one."""

    metadata = {"render_modes": []}  # noqa: RUF012 Gymnasium's own declaration

    def __init__(self, env: Environment, seed: int | None) -> None:
        self._batch = Batch(env, 1, wrappers.limited)
        self._seed, self._ended = seed, True
        self.observation_space = space_of(env.spec.observation)
        self.action_space = action_space_of(env.spec.action)
        self.spec = Registration(
            f"seedbed/{type(env).__name__.strip('_')}-v0",
            lambda **_: _SingleEnv(env, seed),
            max_episode_steps=env.episode_steps or None,
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Opens an episode; raises SeedbedError if `options` is not empty."""
        _no_options(options)
        seed, self._seed = self._seed if seed is None else seed, None
        super().reset(seed=seed)
        arrived = self._batch.reset(self.np_random, seeded=seed is not None)
        self._ended = False
        return self._row(arrived)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes an action; raises SeedbedError if the action does not fit or no episode is open."""
        if self._ended:
            raise SeedbedError("step was called before reset; call reset to open an episode")
        given = checked_action(action, self._batch.env.spec.action, ())
        arrived = self._batch.step(given[None])
        now = arrived.timestep
        terminated, truncated = bool(now.terminated[0]), bool(now.truncated[0])
        self._ended = terminated or truncated
        observation, info = self._row(arrived)
        return observation, float(now.reward[0]), terminated, truncated, info

    def _row(self, arrived: EnvState) -> tuple[Any, dict[str, Any]]:
        observation = trees.map(lambda leaf: leaf[0, ...], arrived.timestep.observation)
        return observation, {name: float(value[0]) for name, value in arrived.metrics.items()}


class _BatchedEnv(VectorEnv):
    """A Gymnasium vector environment: environments in lock-step."""

    def __init__(
        self, env: Environment, num_envs: int, seed: int | None, autoreset_mode: AutoresetMode
    ) -> None:
        # Gymnasium's wrappers read the one, TorchRL the other.
        self.metadata = {"render_modes": [], "autoreset_mode": autoreset_mode}
        self.autoreset_mode = autoreset_mode
        self._ended = np.zeros(num_envs, bool)
        self._batch = Batch(env, num_envs, wrappers.training)
        self._seed, self.num_envs = seed, num_envs
        self.single_observation_space = space_of(env.spec.observation)
        self.single_action_space = action_space_of(env.spec.action)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Opens an episode in every environment; raises SeedbedError for unknown options.

        Without auto-reset, `options={"reset_mask": mask}` opens one where the mask, bools `[num_envs]`, says.
        """
        which = None
        if self.autoreset_mode == AutoresetMode.DISABLED and options and "reset_mask" in options:
            options = dict(options)
            which = _mask(options.pop("reset_mask"), self.num_envs)
        _no_options(options)
        seed, self._seed = self._seed if seed is None else seed, None
        super().reset(seed=seed)
        arrived = self._batch.reset(self.np_random, which, seed is not None)
        self._ended = self._ended & ~which if which is not None else np.zeros_like(self._ended)
        return arrived.timestep.observation, self._info(arrived)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Takes actions `[num_envs, ...]`; an environment whose episode has ended opens its next one.

        Raises SeedbedError before a reset, without auto-reset also before that of an episode that has ended,
        or if the actions do not fit.
        """
        if self.autoreset_mode == AutoresetMode.DISABLED and self._ended.any():
            raise SeedbedError(
                f"step was called before a reset of {np.flatnonzero(self._ended).tolist()}, whose episodes "
                'have ended; call reset(options={"reset_mask": mask})'
            )
        given = checked_action(actions, self._batch.env.spec.action, (self.num_envs,))
        arrived = self._batch.step(given)
        now = arrived.timestep
        self._ended = np.logical_or(now.terminated, now.truncated)
        return now.observation, now.reward, now.terminated, now.truncated, self._info(arrived)

    def _info(self, arrived: EnvState) -> dict[str, Any]:
        """Returns metrics and, as Gymnasium requires, for each a mask: all environments have it."""
        masks = {f"_{name}": np.ones(self.num_envs, bool) for name in arrived.metrics}
        return {**arrived.metrics, **masks}


def _mask(given: Any, size: int) -> np.ndarray:
    """Returns a mask of environments; raises SeedbedError if it is none."""
    mask = np.asarray(given)
    if mask.shape != (size,) or mask.dtype != bool:
        raise SeedbedError(
            f"reset: reset_mask has shape {mask.shape} and dtype {mask.dtype}; give bools [{size}]"
        )
    return mask


def _no_options(options: dict[str, Any] | None) -> None:
    if options:
        raise SeedbedError(
            f"reset: unknown options {sorted(options)}; on-device environments have none, their "
            "fields are given when they are made"
        )


def space_of(spec: Tree) -> spaces.Space:
    """Returns the space for a tree of `ArraySpec`.

    Bounds of floats are the largest float32 and its negative, because observations are always finite.
    """
    if isinstance(spec, ArraySpec):
        dtype = np.dtype(spec.dtype)
        if dtype.kind == "f":
            return spaces.Box(-_LARGEST, _LARGEST, spec.shape, np.float32)
        if dtype.kind == "b":
            return spaces.MultiBinary(spec.shape)
        limits = np.iinfo(dtype)
        return spaces.Box(limits.min, limits.max, spec.shape, dtype.type)
    if isinstance(spec, dict):
        return spaces.Dict({name: space_of(child) for name, child in spec.items()})
    return spaces.Tuple([space_of(child) for child in spec])


def action_space_of(action: ActionSpec) -> spaces.Space:
    """Returns the space of the actions of a spec."""
    if isinstance(action, Discrete):
        return spaces.Discrete(action.n)
    if isinstance(action, Box):
        low, high = (np.reshape(bound, action.shape) for bound in (action.low, action.high))
        return spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)
    return spaces.MultiDiscrete(np.array(action.nvec))


def checked_action(given: Any, action: ActionSpec, batch: tuple[int, ...]) -> np.ndarray:
    """Returns actions in the spec's form, with leading axes `batch`; raises SeedbedError if they do not fit.

    Choices must be in range and real numbers finite; the bounds of a Box are not checked.
    """
    spec = action_array(action)
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise SeedbedError(f"the action {given!r} is not an array: {error}") from error
    shape = (*batch, *spec.shape)
    kinds = "fiu" if spec.dtype == "float32" else "iu"
    if array.shape != shape or array.dtype.kind not in kinds:
        raise SeedbedError(
            f"the action has shape {array.shape} and dtype {array.dtype}; expected {shape} and "
            f"{'a float' if spec.dtype == 'float32' else 'an integer'} dtype"
        )
    if isinstance(action, Box):
        if not np.isfinite(array).all():
            place = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
            raise SeedbedError(f"the action is not finite: {array[place]} at {list(place)}")
    else:
        choices = np.array(action.n if isinstance(action, Discrete) else action.nvec)
        if (array < 0).any() or (array >= choices).any():
            raise SeedbedError(f"the action {given!r} is outside 0 to {(choices - 1).tolist()}")
    return array.astype(spec.dtype)
