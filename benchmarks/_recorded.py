"""Batches as an agent records them: it acts in its environment, learns a little, and acts again."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed import simd
from seedbed.agents.base import Gradient
from seedbed.config.configuration import TrainConfig
from seedbed.envs.device.wrappers import training
from seedbed.envs.host.contract import is_on_device
from seedbed.run.folder import RunFolder
from seedbed.run.restoring import restore_newest
from seedbed.run.stacking import stack_timesteps, stacked_spec
from seedbed.run.update import learn
from seedbed.types import ActorState, EnvSpec, LearnerState, Replay, Timestep, Trajectory, bind

_REPLAY_ENVS, _REPLAY_ROWS = 16, 256


class Recorded(NamedTuple):
    """An agent, what it has learned, and a trajectory that it has not learned from."""

    agent: Any  # bound
    state: LearnerState
    trajectory: Trajectory
    key: Any

    def gradient(self, agent: Any, state: LearnerState, trajectory: Trajectory) -> Any:
        """Returns the gradient of the weights from the trajectory's first minibatch, for a like agent."""
        batch = agent.prepare(state._replace(optimizer_state=()), trajectory, self.key)
        items = trajectory.timesteps.first.shape[1] // agent.minibatches
        part = jax.tree.map(lambda x: x[:, :items], batch)
        grads, _ = agent.gradients(state, part, self.key)
        return grads.weights if isinstance(grads, Gradient) else grads


class OnDevice:
    """Environments on the device with the methods of those on the host."""

    def __init__(self, env: Any, num_envs: int, seed: int) -> None:
        env = training(env)
        self.spec: EnvSpec = env.spec
        self._keys = jax.random.split(jax.random.key(seed), num_envs)
        self._reset, self._step = (jax.jit(simd.vectorize(f)) for f in (env.reset, env.step))

    def reset(self) -> Timestep:
        """Opens an episode in every environment."""
        self._state = self._reset(self._keys)
        return jax.device_get(self._state.timestep)

    def step(self, action: Any) -> Timestep:
        """Steps every environment."""
        self._state = self._step(self._state, action)
        return jax.device_get(self._state.timestep)

    def close(self) -> None:
        """Releases nothing."""


class Row(NamedTuple):
    """A step of all environments; leaves `[B, ...]`."""

    timestep: Any  # with frames stacked
    action: Any
    extras: Any
    core: Any  # before acting


class Actor:
    """Acts in environments and keeps what it did."""

    def __init__(self, agent: Any, env: Any, frame_stack: int, num_envs: int, key: Any) -> None:
        self._env, self._key, self._count = env, key, 0
        self._stack = jax.jit(
            lambda frames: jax.tree.map(_newest, stack_timesteps(frames, frame_stack))
        )
        self._act = jax.jit(functools.partial(agent.act, evaluate=False))
        self._state = agent.actor_state(jnp.arange(num_envs), num_envs)
        self._frames = [env.reset()] * frame_stack

    def timestep(self) -> Timestep:
        """Returns the newest timestep, with frames stacked."""
        rows = jax.tree.map(lambda *x: np.stack(x), *self._frames)
        return jax.device_get(self._stack(rows))

    def steps(self, params: Any, count: int) -> list[Row]:
        """Takes so many steps."""
        rows = []
        for _ in range(count):
            self._count += 1
            timestep, core = self.timestep(), self._state.core
            keys = jax.random.fold_in(self._key, self._count)
            keys = jax.random.split(keys, len(timestep.first))
            action, extras, self._state = self._act(params, self._state, timestep, keys)
            row = jax.device_get(Row(timestep, action, extras, core))
            rows.append(row)
            self._frames = [*self._frames[1:], self._env.step(row.action)]
        return rows


def record(config: TrainConfig, updates: int, seed: int = 0, start: Path | None = None) -> Recorded:
    """Acts and learns `updates` times from what was recorded last; then records a trajectory.

    Unrolls are new each time. From replay, as many items as a batch has are drawn at random from the newest
    rows. `start` is the folder of a central run, from whose newest checkpoint learning goes on.
    """
    env, stack = config.env, 1
    experience = config.agent.experience
    num_envs = _REPLAY_ENVS if isinstance(experience, Replay) else experience.batch
    if is_on_device(env):
        made: Any = OnDevice(env, num_envs, seed)
    else:
        made, stack = env.make(num_envs, seed), env.frame_stack
    agent = bind(config.agent, stacked_spec(made.spec, stack))
    key, rng = jax.random.key(seed), np.random.default_rng(seed)
    actor = Actor(agent, made, stack, num_envs, key)
    state = jax.jit(agent.init)(key)
    if start is not None:
        _, state, _ = restore_newest(RunFolder.read(start).checkpoints, state)
    learned = jax.jit(
        lambda state, trajectory, key: learn(agent, state, trajectory, key, None).state
    )
    rows: list[Row] = []
    for update in range(updates + 1):
        if isinstance(experience, Replay):
            rows = (rows + actor.steps(state.params, experience.steps))[-_REPLAY_ROWS:]
            trajectory = _drawn(rows, experience, rng)
        else:
            rows = actor.steps(state.params, experience.unroll)
            trajectory = _unrolled(rows, actor.timestep(), update)
        if update < updates:
            state = learned(state, trajectory, jax.random.fold_in(key, update))
    made.close()
    return Recorded(agent, jax.device_get(state), trajectory, key)


def _newest(leaf: Any) -> Any:
    return leaf[-1]


def _unrolled(rows: list[Row], last: Timestep, update: int) -> Trajectory:
    timesteps = [row.timestep for row in rows] + [last]
    timestep, action, extras = (
        jax.tree.map(lambda *x: np.stack(x), *each)
        for each in (timesteps, [row.action for row in rows], [row.extras for row in rows])
    )
    version = np.full(timestep.first[1:].shape, update, np.int32)
    return Trajectory(timestep, action, extras, ActorState(rows[0].core, ()), version)


def _drawn(rows: list[Row], experience: Replay, rng: np.random.Generator) -> Trajectory:
    """Draws windows of rows; one may go on through an auto-reset, as in the fused runtime."""
    count, envs = experience.batch, len(rows[0].timestep.first)
    starts = rng.integers(0, len(rows) - experience.steps + 1, count)
    pairs = list(zip(starts, rng.integers(0, envs, count), strict=True))

    def at(t: int) -> Row:
        return jax.tree.map(lambda *x: np.stack([x[s + t][e] for s, e in pairs]), *rows)

    windows = [at(t) for t in range(experience.steps)]
    all_rows = jax.tree.map(lambda *x: np.stack(x), *(row._replace(core=()) for row in windows))
    action, extras = jax.tree.map(lambda x: x[:-1], (all_rows.action, all_rows.extras))
    state, importance = ActorState(windows[0].core, ()), np.ones(count, np.float32)
    return Trajectory(all_rows.timestep, action, extras, state, (), importance)
