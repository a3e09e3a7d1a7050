"""Inference over environments that a test steps."""

import types

import jax
import numpy as np

from counting_agent import CountingAgent
from seedbed.central.inference import Inference
from seedbed.run.stacking import stacked_spec
from seedbed.types import ArraySpec, Discrete, EnvSpec, Timestep

SPEC = EnvSpec(ArraySpec((3, 2), "uint8"), Discrete(7))


STACK, GROUPS, SIZE = 3, 3, 2


def make_inference(kind=CountingAgent):
    """Makes an agent, its parameters, and inference for it."""
    agent = kind(spec=stacked_spec(SPEC, STACK))
    ids = np.arange(GROUPS * SIZE).reshape(GROUPS, SIZE)
    device = jax.devices()[0]
    inference = Inference(agent, SPEC, STACK, device, ids, GROUPS * SIZE, jax.random.key(3))
    params = agent.init(jax.random.key(0)).params
    inference.publish(params, 0)
    inference.compile(SPEC)
    return types.SimpleNamespace(agent=agent, params=params, inference=inference)


class Environments:
    """Random timesteps with random episode ends, in next-step auto-reset."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.ended = np.ones((GROUPS, SIZE), bool)

    def next(self, group):
        first = self.ended[group].copy()
        end = (self.rng.random(SIZE) < 0.3) & ~first
        terminated = end & (self.rng.random(SIZE) < 0.5)
        self.ended[group] = end
        observation = self.rng.integers(0, 255, (SIZE, 3, 2)).astype(np.uint8)
        reward = np.where(first, 0, self.rng.random(SIZE)).astype(np.float32)
        return Timestep(observation, reward, terminated, end & ~terminated, first)
