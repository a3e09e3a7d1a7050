"""Environments of other packages that are pure functions of JAX, in the form of gymnax, on the device.

Their form: `reset(key, params)` returns an observation and a state, `step(key, state, action, params)` an
observation, a state, a reward, whether the episode is over, and a dict. What resets itself in `step` has
`reset_env` and `step_env` besides, which do not. gymnax, Craftax and those made for them are so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.arguments import require_fields
from seedbed.envs.factories import Options, load_factory, options_of
from seedbed.nearest import require_options
from seedbed.types import (
    ActionSpec,
    Array,
    ArraySpec,
    Box,
    Discrete,
    EnvSpec,
    EnvState,
    SeedbedError,
    Tree,
)

LIMITS = ("max_steps_in_episode", "max_timesteps")
"""Names that parameters have for a time limit: gymnax's and Craftax's."""
_NEVER = 2**31 - 2
"""The steps of an episode without a limit, which an int32 can still count."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Functional:
    """An environment of gymnax's form, made by a class or a function.

    A time limit among its parameters becomes the runtime's, so that an end by it counts as truncated and not
    as terminated. Observations are float32, int32 or bool; bytes become float32 from 0 to 1.
    """

    factory: str
    """What makes it, `module:callable`: it returns the environment, or a pair of it and its parameters."""
    kwargs: Options = ()
    """Keyword arguments of the callable."""
    params: Options = ()
    """Parameters that differ from those that the callable returned, or from `default_params`."""
    limit: int = -1
    """Steps after which an episode is truncated; -1 is the limit among the parameters, 0 is never.

    Another number takes the place of that parameter."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work. Imports nothing: a stranger may have named it."""
        for name in ("kwargs", "params"):
            object.__setattr__(self, name, options_of(getattr(self, name)))
        require_fields(self)

    @property
    def frame_skip(self) -> int:
        """Returns 1: frames that the environment itself repeats within a step are not counted."""
        return 1

    @property
    def episode_steps(self) -> int:
        """Returns the steps after which an episode is truncated; 0 is never."""
        return self._made.limit if self.limit < 0 else self.limit

    @property
    def limits_itself(self) -> bool:
        """Returns whether the environment knows its time limit, and may end episodes by it."""
        return self._made.has_limit

    @property
    def spec(self) -> EnvSpec:
        """Returns the observation, whose shapes `reset` says, and the actions of the environment's space."""
        made = self._made
        observation, _ = jax.eval_shape(made.reset, jax.random.key(0))
        shapes = jax.tree.map(
            lambda x: ArraySpec(tuple(x.shape), str(x.dtype)), jax.eval_shape(_seen, observation)
        )
        # A space may make arrays, of which the numbers are needed.
        with jax.ensure_compile_time_eval():
            action = _actions(self.factory, made.env.action_space(made.params))
        return EnvSpec(shapes, action)

    def reset(self, key: Array) -> EnvState:
        """Opens an episode; consumes the key."""
        key, opening = jax.random.split(key)
        observation, state = self._made.reset(opening)
        return EnvState.opening((state, key, jnp.int32(0)), _seen(observation))

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Takes an action, with a key of its own."""
        now, key, count = state.inner
        key, own = jax.random.split(key)
        made = self._made
        observation, after, reward, done, _ = made.step(own, now, action, made.params)
        # A step may return Python's numbers, or wider ones, in place of what reset returned.
        after = jax.tree.map(lambda new, old: jnp.asarray(new, jnp.result_type(old)), after, now)
        reward, count = jnp.asarray(reward, jnp.float32), count + 1
        terminated = jnp.asarray(done, bool)
        if self.limits_itself and self.episode_steps:
            # The runtime truncates here; some packages tell the two ends apart, and some do not.
            terminated &= count < self.episode_steps
        return EnvState.after((after, key, count), _seen(observation), reward, terminated)

    @property
    def _made(self) -> _Made:
        # Equal texts are equal options, of equal types; options may be lists, which have no hash.
        key = repr((self.factory, self.kwargs, self.params, self.limit))
        if key not in _MADE:
            _MADE[key] = _make(self)
        return _MADE[key]


class _Made(NamedTuple):
    """An environment with its parameters, and the time limit among these (0 is none)."""

    env: Any
    params: Any
    limit: int
    has_limit: bool  # whether its parameters have one, by which it may end episodes itself

    def reset(self, key: Array) -> Any:
        return getattr(self.env, "reset_env", self.env.reset)(key, self.params)

    @property
    def step(self) -> Callable[..., Any]:
        return getattr(self.env, "step_env", self.env.step)


_MADE: dict[str, _Made] = {}
"""What was made in this process, by factory and options."""


def _make(config: Functional) -> _Made:
    """Calls the factory; raises SeedbedError if it fails, or if what it returns cannot be used."""
    factory = config.factory
    try:
        made = load_factory(factory)(**dict(config.kwargs))
    except SeedbedError:
        raise
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise SeedbedError(f"environment {factory!r}: raised {what}") from error
    env, own = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    for part in ("reset", "step", "action_space"):
        if not callable(getattr(env, part, None)):
            raise SeedbedError(
                f"environment {factory!r}: a {type(env).__name__} has no {part}: it must be of gymnax's "
                "form, reset(key, params), step(key, state, action, params) and action_space(params)"
            )
    own = getattr(env, "default_params", None) if own is None else own
    known = dataclasses.is_dataclass(own) and not isinstance(own, type)
    names = [each.name for each in dataclasses.fields(own)] if known else []  # type: ignore[arg-type]
    require_options(f"the parameters of {factory}", dict(config.params), names)
    limit = next((name for name in LIMITS if name in names), None)
    changed = dict(config.params)
    if limit is not None and config.limit >= 0:
        changed[limit] = config.limit or _NEVER
    own = dataclasses.replace(own, **changed) if changed else own  # type: ignore[type-var]
    return _Made(env, own, 0 if limit is None else int(getattr(own, limit)), limit is not None)


def _seen(observation: Tree) -> Tree:
    """Returns an observation in the dtypes that the device has."""

    def one(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if x.dtype == bool:
            return x
        if x.dtype == jnp.uint8:
            return x.astype(jnp.float32) / 255
        return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)

    return jax.tree.map(one, observation)


def _actions(factory: str, space: Any) -> ActionSpec:
    """Translates a space of actions, of gymnax or like it; raises SeedbedError for one of another kind."""
    if hasattr(space, "n"):
        return Discrete(int(space.n))
    if hasattr(space, "low") and hasattr(space, "high"):
        shape = tuple(space.shape)
        low, high = (
            tuple(np.broadcast_to(np.asarray(bound, np.float64), shape).ravel().tolist())
            for bound in (space.low, space.high)
        )
        return Box(shape, low, high)
    raise SeedbedError(
        f"environment {factory!r}: its actions are {space}, a {type(space).__name__}: give a Discrete "
        "or a Box"
    )
