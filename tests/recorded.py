"""A recorded trajectory."""

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.types import ArraySpec, Discrete, EnvSpec, Timestep

SPEC = EnvSpec(ArraySpec((3,), "float32"), Discrete(7))


def record(agent, state, envs):
    """Acts along random timesteps in which episodes end in both ways and are opened again."""
    rng, rows = np.random.default_rng(4), 7
    ended, timesteps, steps = np.ones(envs, bool), [], []
    core = before = agent.actor_state(jnp.arange(envs), envs)
    act = jax.jit(agent.act, static_argnums=4)
    for row in range(rows):
        end = (rng.random(envs) < 0.4) & ~ended
        truncated = end & (rng.random(envs) < 0.5)
        reward = np.where(ended, 0, rng.normal(size=envs)).astype(np.float32)
        observation = rng.normal(size=(envs, 3)).astype(np.float32)
        timesteps.append(Timestep(observation, reward, end & ~truncated, truncated, ended))
        keys = jax.random.split(jax.random.key(row), envs)
        action, extras, core = act(state.params, core, timesteps[-1], keys, False)
        steps.append((action, extras))
        ended = end
    timesteps = jax.tree.map(lambda *leaves: np.stack(leaves), *timesteps)
    for kind in (timesteps.terminated, timesteps.truncated, timesteps.first):
        assert kind[1:-1].any(), "of each something"
    action, extras = jax.tree.map(lambda *leaves: np.stack(leaves), *steps[:-1])
    return timesteps, action, extras, before
