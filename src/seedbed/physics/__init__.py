"""MuJoCo's physics for one environment, as pure JAX functions."""

from seedbed.physics.mjcf import load
from seedbed.physics.model import Model, State
from seedbed.physics.step import energy, forward, init, step

__all__ = ["Model", "State", "energy", "forward", "init", "load", "step"]
