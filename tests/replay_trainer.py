"""A slow loop for agents that learn from replay: lists of rows, items cut one by one, numpy draws."""

from __future__ import annotations

import functools
from collections import deque
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from probe_environments import Probe, Trainer, act, init
from seedbed.types import ActorState, Timestep, Trajectory, bind


class Row(NamedTuple):
    """What happened at one step of one environment."""

    timestep: Any
    action: Any
    extras: Any
    core: Any  # before acting


class Item(NamedTuple):
    """Rows of one environment, [burn_in + sequence + 1, ...]."""

    rows: Row
    core: Any


def cut(episode: list[Row], start: int, experience: Any) -> Item:
    """The item of an episode whose learned part starts at row `start`, padded where rows are missing."""
    padding = jax.tree.map(np.zeros_like, episode[0])
    padding = padding._replace(timestep=padding.timestep._replace(first=np.ones((), bool)))
    begin = start - experience.burn_in
    wanted = range(begin, start + experience.sequence + 1)
    rows = [episode[i] if 0 <= i < len(episode) else padding for i in wanted]
    return Item(jax.tree.map(lambda *x: np.stack(x), *rows), episode[max(begin, 0)].core)


def to_trajectory(items: list[Item], importance: np.ndarray) -> Trajectory:
    """Joins items along B, as a runtime does for `prepare`."""
    rows, core = jax.tree.map(lambda *x: np.stack(x), *items)
    rows = jax.tree.map(lambda x: np.swapaxes(x, 0, 1), rows)
    action, extras = jax.tree.map(lambda x: x[:-1], (rows.action, rows.extras))
    version = np.zeros(rows.timestep.first[:-1].shape, np.int32)
    state = ActorState(core, ())
    return Trajectory(rows.timestep, action, extras, state, version, importance.astype(np.float32))


class ReplayTrainer(Trainer):
    """Trains in a probe: acts, keeps items, and learns as often as `ratio` says."""

    def __init__(self, agent: Any, make_env: type[Probe], steps: int, num_envs: int = 8) -> None:
        self.env, self.seed, self.steps = make_env(num_envs), 0, steps
        self.agent = bind(agent, self.env.spec)
        self.experience = agent.experience
        self.state = init(self.agent, self.seed)
        self.episodes: list[list[Row]] = [[] for _ in range(num_envs)]
        self.items: deque[Item] = deque(maxlen=self.experience.capacity)
        self.priorities: deque[float] = deque(maxlen=self.experience.capacity)
        self.rng = np.random.default_rng(0)
        self.inserted = self.drawn = 0

    def train(self) -> ReplayTrainer:
        """Takes all steps; `state` then holds what was learnt."""
        n = self.env.num_envs
        actor_state = self.agent.actor_state(jnp.arange(n), n)
        timestep = self.env.reset()
        for step in range(self.steps):
            core = jax.device_get(actor_state.core)
            action, extras, actor_state = act(
                self.agent, self.state.params, actor_state, timestep, step, evaluate=False
            )
            row = Row(timestep, *jax.device_get((action, extras)), core)
            for i, episode in enumerate(self.episodes):
                self.append(episode, jax.tree.map(lambda x, i=i: np.array(x[i]), row))
            timestep = self.env.step(row.action)
            allowed = self.experience.ratio * self.inserted - self.experience.batch
            while self.inserted >= self.experience.min_size and self.drawn < allowed:
                self.update()
        return self

    def append(self, episode: list[Row], row: Row) -> None:
        """Adds a row to its episode, and the items that it completes to the rest."""
        if row.timestep.first:
            episode.clear()
        episode.append(row)
        last, sequence = len(episode) - 1, self.experience.sequence
        ended = row.timestep.terminated or row.timestep.truncated
        for start in range(0, last, self.experience.period):
            if start + sequence == last or (ended and start + sequence > last):
                self.insert(cut(episode, start, self.experience))

    def insert(self, item: Item) -> None:
        """Keeps an item with the priority that acting gives it."""
        rows = jax.tree.map(lambda x: x[:, None], item.rows)
        timesteps = rows.timestep._replace(observation=())
        self.items.append(item)
        self.priorities.append(float(initial_priorities(self.agent, timesteps, rows.extras)[0]))
        self.inserted += 1

    def update(self) -> None:
        """Draws a batch, learns from it, and changes its priorities."""
        weights = np.array(self.priorities) ** self.experience.priority_exponent
        probability = weights / weights.sum()
        chosen = self.rng.choice(len(self.items), self.experience.batch, p=probability)
        importance = (len(weights) * probability[chosen]) ** -self.experience.importance_exponent
        batch = to_trajectory([self.items[i] for i in chosen], importance / importance.max())
        self.state, output = learn(self.agent, self.state, batch)
        for i, priority in zip(chosen, np.asarray(output.priorities), strict=True):
            self.priorities[i] = float(priority)
        self.drawn += self.experience.batch


@functools.partial(jax.jit, static_argnums=0)
def initial_priorities(agent: Any, timesteps: Timestep, extras: Any) -> Any:
    return agent.initial_priorities(timesteps, extras)


@functools.partial(jax.jit, static_argnums=0)
def learn(agent: Any, state: Any, trajectory: Trajectory) -> Any:
    key = jax.random.key(0)
    grads, output = agent.gradients(state, agent.prepare(state, trajectory, key), key)
    return agent.apply(state, agent.clip_gradient(grads), output), output
