"""The softness of constraint rows: spring, damper and impedance (mj_makeImpedance, getimpedance)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from seedbed.physics.collision import Row
from seedbed.physics.model import Model
from seedbed.types import Array


def softness(model: Model, solref: np.ndarray, solimp: np.ndarray) -> dict[str, np.ndarray]:
    """Computes the constants of the reference acceleration and of the impedance, for each row [n].

    Spring and damper come from solref [n, 2] (mj_makeImpedance). The impedance comes from solimp [n, 5]: it
    is loose + (stiff - loose) y(x). Both are returned as one minus the impedance, so that float32 keeps
    their digits.
    """
    ref = np.asarray(solref, np.float64).reshape(-1, 2)
    mixed = (ref[:, 0] > 0) ^ (ref[:, 1] > 0)
    time, ratio = np.where(mixed[:, None], [0.02, 1.0], ref).T
    loose, stiff, width, middle, power = np.asarray(solimp, np.float64).reshape(-1, 5).T
    loose, stiff, middle = (np.clip(x, 1e-4, 0.9999) for x in (loose, stiff, middle))
    power, flat = np.maximum(power, 1), width <= 1e-15
    standard = time > 0
    least = 2 * model.opt.timestep if model.opt.refsafe else 0.0
    time = np.where(standard, np.maximum(time, least), time)
    spring = 1 / np.maximum(stiff**2 * np.where(standard, time * ratio, 1) ** 2, 1e-15)
    damper = 1 / np.maximum(stiff * np.where(standard, time, 1), 1e-15)
    mean = 0.5 * (loose + stiff)
    loose, stiff = np.where(flat, mean, loose), np.where(flat, mean, stiff)
    return {
        "spring": np.where(standard, 1, -time) * spring,
        "damper": np.where(standard, 2, -ratio) * damper,
        "loose": 1 - loose,
        "stiff": 1 - stiff,
        "width": np.where(flat, 1, width),
        "middle": middle,
        "power": power,
        "below": middle ** (1 - power),
        "above": (1 - middle) ** (1 - power),
    }


def impedance(row: Row, depth: Array) -> Array:
    """Returns one minus the impedance at a distance `depth` from the margin (getimpedance)."""
    x = jnp.minimum(jnp.abs(depth) / row["width"], 1)
    y = jnp.where(
        x <= row["middle"],
        row["below"] * _power(x, row["power"]),
        1 - row["above"] * _power(1 - x, row["power"]),
    )
    return row["loose"] - y * (row["loose"] - row["stiff"])


def _power(x: Array, power: Array) -> Array:
    constant = isinstance(power, np.ndarray | np.generic)
    if constant and (power == 2).all():
        return x * x
    return x if constant and (power == 1).all() else x**power
