"""Random trajectories for the agents that learn from unrolls."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from seedbed.agents.acting import Behaviour
from seedbed.types import ArraySpec, Discrete, EnvSpec, MultiDiscrete, Timestep, Trajectory, bind

THREE = Discrete(3)


def bound(agent, action=THREE):
    return bind(agent, EnvSpec(ArraySpec((4,), "float32"), action))


def draws_of(agent, rng, shape):
    action = agent.spec.action
    if isinstance(action, Discrete):
        return rng.integers(0, action.n, shape).astype(np.int32)
    if isinstance(action, MultiDiscrete):
        return np.stack([rng.integers(0, n, shape) for n in action.nvec], -1).astype(np.int32)
    return rng.normal(size=(*shape, math.prod(action.shape))).astype(np.float32)


def trajectory_of(agent, seed=0):
    """A random trajectory with ends of both kinds; the probabilities of its draws mean nothing."""
    rng = np.random.default_rng(seed)
    rows, batch = agent.unroll, agent.batch
    first, terminated, truncated = (np.zeros((rows + 1, batch), bool) for _ in range(3))
    first[0] = rng.random(batch) < 0.5
    for t in range(1, rows + 1):
        first[t] = terminated[t - 1] | truncated[t - 1]
        kind = np.where(first[t], 1.0, rng.random(batch))
        terminated[t], truncated[t] = kind < 0.2, (kind >= 0.15) & (kind < 0.4)  # and both
    observation = rng.normal(size=(rows + 1, batch, 4)).astype(np.float32)
    reward = np.where(first, 0, rng.normal(size=(rows + 1, batch))).astype(np.float32)
    timesteps = Timestep(observation, reward, terminated, truncated, first)
    draw = draws_of(agent, rng, (rows, batch))
    behaviour = Behaviour(rng.normal(size=(rows, batch)).astype(np.float32), draw)
    actor_state = agent.actor_state(jnp.arange(batch), batch)
    if agent.recurrent:
        core = actor_state.core._replace(action=draws_of(agent, rng, (batch,)))
        actor_state = actor_state._replace(core=core)
    version = np.zeros((rows, batch), np.int32)
    return Trajectory(timesteps, draw, behaviour, actor_state, version)
