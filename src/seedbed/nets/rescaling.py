"""The scaling of observations before a network: offset, scale and clip."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

CLIP = 5.0
"""Bound to which scaled numbers are clipped, usually in standard deviations."""


class Scaling(NamedTuple):
    """The scaling of an observation x: `clip((x - offset) * scale, -CLIP, CLIP)`, float32.

    Both leaves have the shape of one observation. Differentiation treats them as constants.
    """

    offset: jax.Array
    scale: jax.Array


def rescale(x: jax.Array, scaling: Scaling) -> jax.Array:
    """Scales observations [N, ...] to float32; `scaling` has the shape of one observation.

    Raises:
        ValueError: the shapes differ.
        TypeError: `scaling` is not float32.
    """
    check_scaling(x, scaling)
    offset, scale = (lax.stop_gradient(s)[None] for s in scaling)
    return jnp.clip((x.astype(jnp.float32) - offset) * scale, -CLIP, CLIP)


def check_scaling(x: jax.Array, scaling: Scaling) -> None:
    """Raises what `rescale` raises if `scaling` does not fit the observations `x` [N, ...]."""
    for name, value in scaling._asdict().items():
        if value.shape != x.shape[1:]:
            raise ValueError(
                f"{name} has shape {value.shape}; pass that of one observation, {x.shape[1:]}"
            )
        if value.dtype != jnp.float32:
            raise TypeError(f"{name} is {value.dtype}; convert it to float32")
