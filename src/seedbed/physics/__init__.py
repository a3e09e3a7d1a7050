"""MuJoCo's physics for one environment, as pure JAX functions."""

from seedbed.physics.constants import set_const
from seedbed.physics.mjcf import load
from seedbed.physics.model import Data, Model, State
from seedbed.physics.sensors import sensor
from seedbed.physics.step import energy, forward, init, make_data, refresh, step, step_data

__all__ = [
    "Data",
    "Model",
    "State",
    "energy",
    "forward",
    "init",
    "load",
    "make_data",
    "refresh",
    "sensor",
    "set_const",
    "step",
    "step_data",
]
