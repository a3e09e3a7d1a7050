"""Probe environments: each is solved in seconds and catches one class of bug.

Numpy environments in lock-step with next-step auto-reset, as `seedbed.types.HostEnv` asks, and a
synchronous training loop that runs any on-policy agent on one device.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.types import ArraySpec, Box, Discrete, EnvSpec, Timestep, Trajectory, bind

OBSERVATION = ArraySpec((2,), "float32")


class Probe:
    """One-step episodes, always the same, reward 1. Tests the value and its loss."""

    spec = EnvSpec(OBSERVATION, Discrete(2))
    length = 1

    def __init__(self, num_envs: int, seed: int = 0) -> None:
        self.num_envs = num_envs
        self.rng = np.random.default_rng(seed)
        self.step_of_episode = np.zeros(num_envs, np.int64)
        self.ended = np.zeros(num_envs, bool)
        self.secret = np.zeros(num_envs, np.int64)  # drawn anew in each episode: 0 or 1

    def observe(self) -> np.ndarray:
        """Observations [n, 2]."""
        return np.ones((self.num_envs, 2), np.float32)

    def reward(self, action: np.ndarray) -> np.ndarray:
        """Rewards [n] of taking actions in the current state."""
        return np.ones(self.num_envs, np.float32)

    def reset(self) -> Timestep:
        self.ended[:] = True
        return self.step(np.zeros((self.num_envs, *np.shape(self.action_example())), np.int32))

    def action_example(self) -> Any:
        return 0

    def step(self, action: np.ndarray) -> Timestep:
        first = self.ended.copy()
        reward = np.where(first, 0.0, self.reward(action)).astype(np.float32)
        self.step_of_episode = np.where(first, 0, self.step_of_episode + 1)
        self.secret = np.where(first, self.rng.integers(0, 2, self.num_envs), self.secret)
        self.ended = ~first & (self.step_of_episode >= self.length)
        terminated, truncated = self.end(self.ended)
        return Timestep(self.observe(), reward, terminated, truncated, first)

    def end(self, ended: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of the ended episodes terminated and which were truncated."""
        return ended.copy(), np.zeros_like(ended)

    def close(self) -> None: ...


class SecretReward(Probe):
    """One-step episodes; the observation shows the reward, -1 or 1. Tests the torso's gradient."""

    def observe(self) -> np.ndarray:
        return np.stack([2 * self.secret - 1, np.ones(self.num_envs)], -1).astype(np.float32)

    def reward(self, action: np.ndarray) -> np.ndarray:
        return 2.0 * self.secret - 1


class Delay(Probe):
    """Two steps, reward 1 at the end; the observation shows the step. Tests discounting."""

    length = 2

    def observe(self) -> np.ndarray:
        return np.stack([self.step_of_episode, np.ones(self.num_envs)], -1).astype(np.float32)

    def reward(self, action: np.ndarray) -> np.ndarray:
        return (self.step_of_episode == 1).astype(np.float32)


class Endless(Probe):
    """Reward 1 at every step, truncated after four: worth 1 / (1 - gamma). Tests truncation."""

    length = 4

    def end(self, ended: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros_like(ended), ended.copy()


class Choice(Probe):
    """One-step episodes: action 1 earns 1, action 0 earns -1. Tests the policy gradient's sign."""

    def reward(self, action: np.ndarray) -> np.ndarray:
        return 2.0 * action - 1


class Match(SecretReward):
    """One-step episodes: the action that the observation names earns 1, the other -1."""

    def reward(self, action: np.ndarray) -> np.ndarray:
        return 1.0 - 2.0 * (action != self.secret)


class Aim(SecretReward):
    """One-step episodes with an action from -2 to 2: reward falls with the distance from +-1."""

    spec = EnvSpec(OBSERVATION, Box((1,), (-2.0,), (2.0,)))

    def action_example(self) -> Any:
        return [0.0]

    def reward(self, action: np.ndarray) -> np.ndarray:
        return 1.0 - np.abs(action[:, 0] - (2 * self.secret - 1))


class Memory(Probe):
    """Four steps; only the opening observation names the action that earns 1 at the last."""

    length = 4

    def observe(self) -> np.ndarray:
        opening = self.step_of_episode == 0
        shown = np.where(opening, 2 * self.secret - 1, 0)
        return np.stack([shown, self.step_of_episode / 4], -1).astype(np.float32)

    def reward(self, action: np.ndarray) -> np.ndarray:
        right = 1.0 - 2.0 * (action != self.secret)
        return np.where(self.step_of_episode == self.length - 1, right, 0.0)


class Trainer:
    """Trains an on-policy agent in a probe: act, collect an unroll, update; repeat."""

    def __init__(self, agent: Any, make_env: type[Probe], updates: int, seed: int = 0) -> None:
        experience = agent.experience
        self.env = make_env(experience.batch, seed)
        self.agent = bind(agent, self.env.spec)
        self.unroll, self.updates, self.seed = experience.unroll, updates, seed
        self.state = init(self.agent, seed)
        self.metrics: dict[str, Any] = {}

    def train(self) -> Trainer:
        """Runs all updates; `state` and `metrics` then hold the last."""
        env_ids = jnp.arange(self.env.num_envs)
        actor_state = self.agent.actor_state(env_ids, self.env.num_envs)
        timestep = self.env.reset()
        for update in range(self.updates):
            trajectory, actor_state, timestep = self.collect(actor_state, timestep, update)
            state = self.state._replace(progress=jnp.float32(update / self.updates))
            self.state, self.metrics = learn(self.agent, state, trajectory, update)
        return self

    def collect(self, actor_state: Any, timestep: Timestep, update: int) -> tuple[Any, Any, Any]:
        """Returns a trajectory, and the actor state and timestep from which the next one starts."""
        opening, timesteps, actions, extras = actor_state, [timestep], [], []
        for t in range(self.unroll):
            counter = update * self.unroll + t
            action, extra, actor_state = act(
                self.agent, self.state.params, actor_state, timestep, counter, evaluate=False
            )
            timestep = self.env.step(np.asarray(action))
            timesteps.append(timestep)
            actions.append(action)
            extras.append(extra)
        timesteps, actions, extras = (
            jax.tree.map(lambda *rows: np.stack(rows), *rows)
            for rows in (timesteps, actions, extras)
        )
        version = np.full((self.unroll, self.env.num_envs), update, np.int32)
        return Trajectory(timesteps, actions, extras, opening, version), actor_state, timestep

    def mean_reward(self, steps: int) -> float:
        """Evaluates in a fresh environment: mean reward of an episode."""
        env = type(self.env)(self.env.num_envs, self.seed + 1)
        actor_state = self.agent.actor_state(jnp.arange(env.num_envs), env.num_envs)
        timestep, total, episodes = env.reset(), 0.0, 0
        for t in range(steps):
            action, _, actor_state = act(
                self.agent, self.state.params, actor_state, timestep, t, evaluate=True
            )
            timestep = env.step(np.asarray(action))
            total += timestep.reward.sum()
            episodes += (timestep.terminated | timestep.truncated).sum()
        return float(total / episodes)


# Compiled once for each agent, so that probes of one action space share their programs.
@functools.partial(jax.jit, static_argnums=0)
def init(agent, seed):
    return agent.init(jax.random.key(seed))


@functools.partial(jax.jit, static_argnums=0, static_argnames="evaluate")
def act(agent, params, actor_state, timestep, counter, evaluate):
    """Acts with a key for each environment, made of the number of the step."""
    key = jax.random.fold_in(jax.random.key(0), counter)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(timestep.first.shape[0]))
    return agent.act(params, actor_state, timestep, keys, evaluate)


@functools.partial(jax.jit, static_argnums=0)
def learn(agent, state, trajectory, update):
    """Runs all epochs and minibatches; returns the state and the last metrics."""
    metrics = {}
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
