"""Slow, plain loops that train an agent in a probe: what a runtime does, in numpy and in one thread."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.testing.probes import Probe
from seedbed.types import (
    ActorState,
    Agent,
    AgentT,
    Array,
    LearnerState,
    OnPolicy,
    Output,
    Replay,
    SeedbedError,
    Timestep,
    Trajectory,
    Tree,
    bind,
)

MakeProbe: TypeAlias = Callable[[int, int], Probe]
"""A class of probes, or another function of the number of environments and a seed."""
_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])


class _Training(Generic[AgentT]):
    """The agent, its state and its environments, and evaluation; `state` is that of the last update."""

    def __init__(self, agent: AgentT, make_env: MakeProbe, num_envs: int, seed: int) -> None:
        self._make_env, self.seed = make_env, seed
        self.env = make_env(num_envs, seed)
        self.agent = bind(agent, self.env.spec)
        self.state: LearnerState = init(self.agent, seed)
        self.metrics: dict[str, Array] = {}

    def mean_reward(self, steps: int) -> float:
        """Evaluates for some steps in new environments; returns the mean reward of an episode."""
        env = self._make_env(self.env.num_envs, self.seed + 1)
        actor_state = self.agent.actor_state(jnp.arange(env.num_envs), env.num_envs)
        timestep, total, episodes = env.reset(), 0.0, 0
        for t in range(steps):
            action, _, actor_state = act(
                self.agent, self.state.params, actor_state, timestep, t, evaluate=True
            )
            timestep = env.step(np.asarray(action))
            total += np.sum(timestep.reward)
            episodes += np.logical_or(timestep.terminated, timestep.truncated).sum()
        return float(total / episodes)


class Trainer(_Training[AgentT]):
    """A loop for an agent that learns on-policy: act, collect an unroll, update; repeat."""

    def __init__(self, agent: AgentT, make_env: MakeProbe, updates: int, seed: int = 0) -> None:
        """Makes the environments, one for each unroll of a batch, and the first state."""
        experience = agent.experience
        assert isinstance(experience, OnPolicy), (
            "ReplayTrainer trains agents that learn from replay"
        )
        super().__init__(agent, make_env, experience.batch, seed)
        self._unroll, self._updates = experience.unroll, updates

    def train(self) -> Self:
        """Runs all updates; `state` and `metrics` then hold the last."""
        env_ids = jnp.arange(self.env.num_envs)
        actor_state = self.agent.actor_state(env_ids, self.env.num_envs)
        timestep = self.env.reset()
        for update in range(self._updates):
            trajectory, actor_state, timestep = self.collect(actor_state, timestep, update)
            state = self.state._replace(progress=jnp.float32(update / self._updates))
            self.state, self.metrics = learn(self.agent, state, trajectory, update)
        return self

    def collect(
        self, actor_state: ActorState, timestep: Timestep, update: int
    ) -> tuple[Trajectory, ActorState, Timestep]:
        """Returns a trajectory, and the actor state and timestep from which the next one starts."""
        opening, timesteps, actions, extras = actor_state, [timestep], [], []
        for t in range(self._unroll):
            counter = update * self._unroll + t
            action, extra, actor_state = act(
                self.agent, self.state.params, actor_state, timestep, counter, evaluate=False
            )
            timestep = self.env.step(np.asarray(action))
            timesteps.append(timestep)
            actions.append(action)
            extras.append(extra)
        steps, action, extra = (
            jax.tree.map(lambda *rows: np.stack(rows), *rows)
            for rows in (timesteps, actions, extras)
        )
        version = np.full((self._unroll, self.env.num_envs), update, np.int32)
        return Trajectory(steps, action, extra, opening, version), actor_state, timestep


class Row(NamedTuple):
    """One step of one environment."""

    timestep: Timestep
    action: Tree
    extras: Tree
    core: Tree  # before acting


class Item(NamedTuple):
    """Rows of one environment, `[burn_in + sequence + 1, ...]`."""

    rows: Row
    core: Tree  # before the first row


class ReplayTrainer(_Training[AgentT]):
    """A loop for an agent that learns from replay: acts, keeps items, and learns as often as `ratio` says."""

    def __init__(
        self, agent: AgentT, make_env: MakeProbe, steps: int, num_envs: int = 8, seed: int = 0
    ) -> None:
        """Makes the environments, the first state, and an empty replay."""
        super().__init__(agent, make_env, num_envs, seed)
        experience = self.agent.experience
        assert isinstance(experience, Replay), "Trainer trains agents that learn on-policy"
        self._experience, self._steps = experience, steps
        # Whether items go on through resets, as in the fused runtime; in others they are cut there.
        self.crosses = experience.cross_episodes
        self.items: deque[Item] = deque(maxlen=experience.capacity)
        self._episodes: list[list[Row]] = [[] for _ in range(num_envs)]
        self._priorities: deque[float] = deque(maxlen=experience.capacity)
        self._rng = np.random.default_rng(seed)
        self.inserted = self.drawn = 0

    def train(self, learning: bool = True) -> Self:
        """Takes all steps; `state` then holds what was learnt. Without learning, items are only collected."""
        n, experience = self.env.num_envs, self._experience
        actor_state = self.agent.actor_state(jnp.arange(n), n)
        timestep = self.env.reset()
        for step in range(self._steps):
            core = jax.device_get(actor_state.core)
            action, extras, actor_state = act(
                self.agent, self.state.params, actor_state, timestep, step, evaluate=False
            )
            action, extras = jax.device_get((action, extras))
            row = Row(timestep, action, extras, core)
            for i, episode in enumerate(self._episodes):
                self._append(episode, jax.tree.map(lambda x, i=i: np.array(x[i]), row))
            timestep = self.env.step(action)
            allowed = experience.ratio * self.inserted - experience.batch
            while learning and self.inserted >= experience.min_size and self.drawn < allowed:
                self._update()
        return self

    def draw(self) -> tuple[Array, Trajectory]:
        """Draws a batch by its priorities; returns the items' indices, and the trajectory for `prepare`."""
        experience = self._experience
        weights = np.array(self._priorities) ** experience.priority_exponent
        probability = weights / weights.sum()
        chosen = self._rng.choice(len(self.items), experience.batch, p=probability)
        importance = (len(weights) * probability[chosen]) ** -experience.importance_exponent
        items = [self.items[i] for i in chosen]
        return chosen, to_trajectory(items, importance / importance.max())

    def _append(self, episode: list[Row], row: Row) -> None:
        """Adds a row to its episode, and the items that it completes to the rest."""
        experience = self._experience
        sequence = experience.sequence
        if row.timestep.first and not self.crosses:
            episode.clear()
        if len(episode) > experience.burn_in + sequence + 2 * experience.period:
            del episode[: experience.period]  # no item to come has these rows
        episode.append(row)
        last = len(episode) - 1
        ended = (row.timestep.terminated or row.timestep.truncated) and not self.crosses
        for start in range(0, last, self._experience.period):
            if start + sequence == last or (ended and start + sequence > last):
                self._insert(_cut(episode, start, self._experience))

    def _insert(self, item: Item) -> None:
        """Keeps an item with the priority that acting gives it."""
        rows = jax.tree.map(lambda x: x[:, None], item.rows)
        timesteps = rows.timestep._replace(observation=())
        self.items.append(item)
        given = initial_priorities(self.agent, timesteps, rows.extras)
        if self._experience.priority_exponent:
            require_priorities(f"{type(self.agent).__name__}.initial_priorities", given)
        self._priorities.append(float(given[0]))
        self.inserted += 1

    def _update(self) -> None:
        """Draws a batch, learns from it, and changes its priorities."""
        chosen, batch = self.draw()
        self.state, output = learn_replayed(self.agent, self.state, batch)
        self.metrics = output.metrics
        if self._experience.priority_exponent:
            require_priorities(f"{type(self.agent).__name__}.gradients", output.priorities)
            for i, priority in zip(chosen, np.asarray(output.priorities), strict=True):
                self._priorities[i] = float(priority)
        self.drawn += self._experience.batch


def require_priorities(method: str, priorities: Tree) -> None:
    """Raises SeedbedError unless all priorities `[B]`, which a method gave, are finite and above 0."""
    given = np.asarray(priorities, np.float64)
    wrong = given[~(np.isfinite(given) & (given > 0))]
    if wrong.size:
        raise SeedbedError(
            f"{method} gave the priority {wrong[0]}; give finite numbers above 0, if need be by adding a "
            "small one"
        )


def to_trajectory(items: list[Item], importance: Array) -> Trajectory:
    """Joins items along B, with the weights `[B]` of their losses, as a runtime does for `prepare`."""
    rows, core = jax.tree.map(lambda *x: np.stack(x), *items)
    rows = jax.tree.map(lambda x: np.swapaxes(x, 0, 1), rows)
    action, extras = jax.tree.map(lambda x: x[:-1], (rows.action, rows.extras))
    state = ActorState(core, ())
    return Trajectory(rows.timestep, action, extras, state, (), np.float32(importance))


def _cut(episode: list[Row], start: int, experience: Replay) -> Item:
    """Returns the item whose learned part starts at row `start`, padded where rows are missing."""
    padding = jax.tree.map(np.zeros_like, episode[0])
    padding = padding._replace(timestep=padding.timestep._replace(first=np.ones((), bool)))
    begin = start - experience.burn_in
    wanted = range(begin, start + experience.sequence + 1)
    rows = [episode[i] if 0 <= i < len(episode) else padding for i in wanted]
    return Item(jax.tree.map(lambda *x: np.stack(x), *rows), episode[max(begin, 0)].core)


class _Fixed:
    """An agent as a static argument; a spec with a dict has no hash."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    def __hash__(self) -> int:
        return hash(type(self.agent))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Fixed) and self.agent == other.agent


def _compiled(function: _FunctionT, static: tuple[str, ...] = ()) -> _FunctionT:
    """Compiles a function of an agent once for all equal agents, so that probes share their programs."""
    compiled = jax.jit(
        lambda fixed, *given, **named: function(fixed.agent, *given, **named),
        static_argnums=0,
        static_argnames=static,
    )

    @functools.wraps(function)
    def call(agent: Agent, *given: Any, **named: Any) -> Any:
        return compiled(_Fixed(agent), *given, **named)

    return call  # type: ignore[return-value]


@_compiled
def init(agent: Agent, seed: int) -> LearnerState:
    """Makes the learner state of a seed."""
    return agent.init(jax.random.key(seed))


@functools.partial(_compiled, static=("evaluate",))
def act(
    agent: Agent,
    params: Tree,
    actor_state: ActorState,
    timestep: Timestep,
    counter: int,
    evaluate: bool,
) -> tuple[Tree, Tree, ActorState]:
    """Acts with a key for each environment, made of the number of the step."""
    key = jax.random.fold_in(jax.random.key(0), counter)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(timestep.first.shape[0]))
    return agent.act(params, actor_state, timestep, keys, evaluate)


@_compiled
def learn(
    agent: Agent, state: LearnerState, trajectory: Trajectory, update: int
) -> tuple[LearnerState, dict[str, Array]]:
    """Runs all epochs and minibatches; returns the state and the last metrics."""
    metrics: dict[str, Array] = {}
    key = jax.random.fold_in(jax.random.key(1), update)
    batch = agent.prepare(state, trajectory, key)
    num_envs = trajectory.timesteps.first.shape[1]
    size = num_envs // agent.minibatches
    for epoch in range(agent.epochs):
        key, shuffle = jax.random.split(jax.random.fold_in(key, epoch))
        order = jax.random.permutation(shuffle, num_envs)
        for i in range(agent.minibatches):
            rows = order[i * size : (i + 1) * size]
            part = jax.tree.map(lambda x, rows=rows: x[:, rows], batch)
            grads, output = agent.gradients(state, part, jax.random.fold_in(key, i))
            state = agent.apply(state, agent.clip_gradient(grads), output)
            metrics = output.metrics
    return state, metrics


@_compiled
def initial_priorities(agent: Any, timesteps: Timestep, extras: Tree) -> Array:
    """Calls the agent's method of this name."""
    return agent.initial_priorities(timesteps, extras)


@_compiled
def learn_replayed(
    agent: Agent, state: LearnerState, trajectory: Trajectory
) -> tuple[LearnerState, Output]:
    """Makes an update with a batch of items; returns the state and the output of the gradient."""
    key = jax.random.key(0)
    grads, output = agent.gradients(state, agent.prepare(state, trajectory, key), key)
    return agent.apply(state, agent.clip_gradient(grads), output), output
