"""Learning to imitate: minibatches of recorded steps, Adam, and the agent's own imitation losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from seedbed.cloning.recorded import Recorded
from seedbed.ops import statistics
from seedbed.ops.statistics import RunningStatistics
from seedbed.run.stacking import stack_timesteps
from seedbed.spaces import PRIVILEGED, without
from seedbed.types import Agent, Array, LearnerState, SeedbedError, Timestep, Tree

_MEMORY_STEPS = 64
"""Steps of a sequence for an agent with a memory, which begins empty at its start."""
_HELD_OUT = 0.1
"""Share of the recorded steps, at the end, that are not learned from."""
_FEW = 100.0
"""Rows for which moments count of which some are not recorded."""


@dataclasses.dataclass(frozen=True)
class CloningOptions:
    """The options of `seedbed clone`."""

    updates: int = 5_000
    """Minibatches to learn from."""
    batch: int = 256
    """Steps in a minibatch."""
    learning_rate: float = 1e-3
    """Step size of Adam at the start; it falls linearly to 0."""
    seed: int = 0
    """Seed of the initial weights and of the order of steps."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot work."""
        for name in ("updates", "batch"):
            if getattr(self, name) < 1:
                raise SeedbedError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if not self.learning_rate > 0:
            raise SeedbedError(f"learning_rate is {self.learning_rate}: it must be more than 0")


class Look(NamedTuple):
    """How well a policy imitates, after so many updates."""

    updates: int
    loss: float  # over the last minibatches
    held_out: float  # over steps that are not learned from


def require_policy(agent: Agent) -> None:
    """Raises SeedbedError if an agent has no policy that could imitate."""
    if not hasattr(agent, "imitation_losses"):
        raise SeedbedError(
            f"{type(agent).__name__} has no policy to clone into (no method imitation_losses): choose ppo, "
            "impala or, for real actions, sac"
        )


def imitate(
    agent: Any,
    recorded: Recorded,
    frame_stack: int,
    options: CloningOptions,
    tell: Callable[[Look], None],
) -> LearnerState:
    """Returns the state of a bound agent whose policy imitates recorded steps.

    Statistics of observations are those of all recorded steps. Critics are as `init` makes them. Calls `tell`
    ten times.
    """
    require_policy(agent)
    key, rng = jax.random.key(options.seed), np.random.default_rng(options.seed)
    state: LearnerState = agent.init(key)
    sequences = _Sequences(agent, recorded, frame_stack)
    params = _seen(agent, state.params, sequences)
    leaves, structure = jax.tree.flatten(params)
    learned = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]
    optimizer = optax.adam(optax.linear_schedule(options.learning_rate, 0.0, options.updates))

    def whole(floats: list[Array]) -> Tree:
        given = iter(floats)
        merged = [next(given) if one else leaf for leaf, one in zip(leaves, learned, strict=True)]
        return _without_slope(structure.unflatten(merged))

    def loss(floats: list[Array], steps: Timestep, action: Array) -> Array:
        params, size = whole(floats), steps.first.shape[1]

        def one(actor_state: Any, row: tuple[Timestep, Array]) -> tuple[Any, Array]:
            losses, actor_state = agent.imitation_losses(params, actor_state, *row)
            return actor_state, losses

        before = agent.actor_state(jnp.arange(size), size)
        return jax.lax.scan(one, before, (steps, action))[1].mean()

    @jax.jit
    def update(floats: list[Array], moments: Any, steps: Timestep, action: Array) -> Any:
        value, grads = jax.value_and_grad(loss)(floats, steps, action)
        changes, moments = optimizer.update(grads, moments)
        return optax.apply_updates(floats, changes), moments, value

    floats = [jnp.array(x) for x, one in zip(leaves, learned, strict=True) if one]
    moments, judge, losses = optimizer.init(floats), jax.jit(loss), []
    every = max(1, options.updates // 10)
    for done, rows in enumerate(sequences.minibatches(rng, options), 1):
        floats, moments, value = update(floats, moments, *rows)
        losses.append(value)
        if done % every == 0 or done == options.updates:
            recent = float(np.mean(jax.device_get(losses)))
            if not np.isfinite(recent):
                raise SeedbedError("the loss is not finite: give a smaller --learning-rate")
            tell(Look(done, recent, float(judge(floats, *sequences.held_out(options.batch)))))
            losses = []
    params = structure.unflatten(jax.tree.leaves(whole(floats)))
    completed = getattr(agent, "with_params", None)
    return completed(state, params) if completed else state._replace(params=params)


class _Sequences:
    """Recorded steps as sequences `[T, B, ...]`, with stacked frames."""

    def __init__(self, agent: Agent, recorded: Recorded, frame_stack: int) -> None:
        memory = jax.eval_shape(lambda: agent.actor_state(jnp.arange(1), 1)).core
        length = _MEMORY_STEPS if jax.tree.leaves(memory) else 1
        if length > 1 and recorded.reward is None:
            raise SeedbedError(
                f"the data has no rewards, which the memory of {type(agent).__name__} sees: add `rewards`, "
                "or choose an agent without a memory"
            )
        self._recorded, self._stack = recorded, frame_stack
        steps = len(recorded.first)
        learned = max(1, steps - max(1, int(steps * _HELD_OUT)))
        self._starts, self._length = _sequences(0, learned, length)
        self._held, self._held_length = _sequences(min(learned, steps - 1), steps, length)

    @property
    def sample(self) -> Tree:
        """Observations `[N, ...]` for statistics, of at most 10,000 steps, with stacked frames."""
        count = min(len(self._recorded.first), 10_000)
        chosen = np.linspace(0, len(self._recorded.first) - 1, count).astype(int)
        steps, _ = self._rows(chosen, 1)
        return jax.tree.map(lambda x: x[0], steps.observation)

    def minibatches(
        self, rng: np.random.Generator, options: CloningOptions
    ) -> Iterator[tuple[Timestep, Array]]:
        """Yields as many minibatches as there are updates; each pass has every sequence once."""
        size = max(1, min(options.batch // self._length, len(self._starts)))
        order: list[int] = []
        for _ in range(options.updates):
            if len(order) < size:
                order = rng.permutation(self._starts).tolist()
            chosen, order = order[:size], order[size:]
            yield self._rows(np.array(chosen), self._length)

    def held_out(self, batch: int) -> tuple[Timestep, Array]:
        """Returns steps that are not learned from, always the same."""
        count = max(1, min(4 * batch // self._held_length, len(self._held)))
        chosen = self._held[np.linspace(0, len(self._held) - 1, count).astype(int)]
        return self._rows(chosen, self._held_length)

    def _rows(self, starts: np.ndarray, length: int) -> tuple[Timestep, Array]:
        recorded, past = self._recorded, self._stack - 1
        wanted = starts[None] + np.arange(-past, length)[:, None]
        # Frames from before the recording are blank, since its first step opens an episode.
        rows = np.maximum(wanted, 0)
        first = recorded.first[rows] | (wanted <= 0)
        reward, no = np.zeros(rows.shape, np.float32), np.zeros(rows.shape, bool)
        if recorded.reward is not None:
            # A timestep has the reward of the action before it.
            reward = recorded.reward[np.maximum(wanted - 1, 0)]
        frames = Timestep(
            jax.tree.map(lambda leaf: leaf[rows], recorded.observation), reward, no, no, first
        )
        # With a stack of 1, images without channels get one.
        steps = stack_timesteps(jax.tree.map(jnp.asarray, frames), self._stack)
        # A memory begins empty.
        first = steps.first.at[0].set(True) if length > 1 else steps.first
        steps = steps._replace(first=first, reward=jnp.where(first, 0.0, steps.reward))
        return steps, jnp.asarray(recorded.action[starts[None] + np.arange(length)[:, None]])


def _sequences(begin: int, end: int, length: int) -> tuple[np.ndarray, int]:
    """Returns the starts of all sequences between two steps, and their length: `length`, or all steps."""
    length = min(length, end - begin)
    return np.arange(begin, end - length + 1), length


def _seen(agent: Any, params: Tree, sequences: _Sequences) -> Tree:
    """Returns parameters whose statistics of observations are those of the recorded steps.

    What only critics see is not recorded; its moments stay as they began. All moments have one weight: it is
    small then, so that the first steps of training replace those.
    """
    seen = getattr(params, "seen", ())
    if not isinstance(seen, RunningStatistics):
        return params
    shown = agent._shown(sequences.sample)
    mean, variance = (without(each, PRIVILEGED) for each in (seen.mean, seen.variance))
    known = RunningStatistics(seen.weight, mean, variance)
    # Sums about the mean: those about 0 would lose a small spread far from it.
    centred = statistics.absorb(known, statistics.deviations(known, shown))
    found = statistics.absorb(known, statistics.deviations(centred, shown))
    if isinstance(shown, dict):
        mean, variance = {**seen.mean, **found.mean}, {**seen.variance, **found.variance}
        weight = found.weight
        if mean.keys() > shown.keys():
            weight = jnp.minimum(weight, _FEW)
        found = RunningStatistics(weight, mean, variance)
    return params._replace(seen=found)


def _without_slope(params: Tree) -> Tree:
    """Returns parameters through whose statistics no gradient flows."""
    if isinstance(getattr(params, "seen", ()), RunningStatistics):
        return params._replace(seen=jax.lax.stop_gradient(params.seen))
    return params
