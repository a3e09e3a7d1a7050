"""Environments in gymnax's form, as other packages have them; nothing here knows of Seedbed."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WalkParams:
    """Parameters: of them the time limit is one."""

    goal: int = 5
    max_steps_in_episode: int = 12


class WalkState(NamedTuple):
    """Where the walker is, and since when."""

    place: jax.Array
    time: jax.Array


class _Space(NamedTuple):
    n: int


class _Box(NamedTuple):
    low: Any
    high: Any
    shape: tuple[int, ...]


class Walk:
    """A walker on a line: the reward is 1 at the goal, where the episode ends; a step may slip."""

    def __init__(self, slip: float = 0.25) -> None:
        self.slip = slip

    @property
    def default_params(self) -> WalkParams:
        return WalkParams()

    def action_space(self, params: WalkParams) -> _Space:
        return _Space(2)

    def reset(self, key: jax.Array, params: WalkParams) -> Any:
        return self.reset_env(key, params)

    def step(self, key: jax.Array, state: WalkState, action: jax.Array, params: WalkParams) -> Any:
        """Resets itself, as gymnax does."""
        seen, after, reward, done, info = self.step_env(key, state, action, params)
        fresh, opened = self.reset_env(key, params)
        after = jax.tree.map(lambda a, b: jnp.where(done, a, b), opened, after)
        return jnp.where(done, fresh, seen), after, reward, done, info

    def reset_env(self, key: jax.Array, params: WalkParams) -> Any:
        state = WalkState(jax.random.randint(key, (), -1, 2), jnp.int32(0))
        return self._seen(state), state

    def step_env(
        self, key: jax.Array, state: WalkState, action: jax.Array, params: WalkParams
    ) -> Any:
        move = jnp.where(jax.random.uniform(key) < self.slip, 0, 2 * action - 1)
        after = WalkState(state.place + move, state.time + 1)
        arrived = after.place >= params.goal
        done = arrived | (after.time >= params.max_steps_in_episode)
        return self._seen(after), after, arrived * 1.0, done, {"discount": 1.0 - done}

    def _seen(self, state: WalkState) -> jax.Array:
        return jnp.stack([state.place, state.time]).astype(jnp.float32)


class Bare:
    """Has neither parameters nor a reset inside `step`; its state is a number, its actions a box."""

    def reset(self, key: jax.Array, params: None) -> Any:
        return {"x": jnp.zeros(3), "on": jnp.bool_(True), "dot": jnp.uint8(51)}, 0

    def step(self, key: jax.Array, state: Any, action: jax.Array, params: None) -> Any:
        return (
            {"x": action + state, "on": jnp.bool_(False), "dot": jnp.uint8(255)},
            state + 1,
            1,
            False,
            {},
        )

    def action_space(self, params: None) -> _Box:
        return _Box(-1.0, jnp.array([1.0, 2.0, 3.0]), (3,))


def bare() -> Any:
    return Bare(), None


def hurried() -> Any:
    class Hurried(Bare):
        """Is over in the third step, by no limit of time."""

        def step(self, key: jax.Array, state: Any, action: jax.Array, params: None) -> Any:
            seen, after, reward, _, info = super().step(key, state, action, params)
            return seen, after, reward, after == 3, info

    return Hurried(), None


def unfinished() -> Any:
    return object()


def wordy() -> Any:
    class Wordy(Bare):
        def action_space(self, params: None) -> Any:  # type: ignore[override]
            return "left or right"

    return Wordy()
