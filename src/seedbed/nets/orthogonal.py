"""Orthogonal kernels (Saxe et al., 2014), drawn one at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.custom_batching import sequential_vmap


def orthogonal(scale: float = 1.0) -> Any:
    """Returns an initializer `(key, shape, dtype)` of orthogonal kernels times `scale`; it consumes the key.

    Under vmap, as for twin critics, kernels are drawn in a loop. jaxlib divides a batch of factorisations
    among XLA's threads and waits for them on one: two batches on two threads wait for each other for ever.
    """
    draw = nn.initializers.orthogonal(scale)

    def initial(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        return sequential_vmap(lambda key: draw(key, shape, dtype))(key)

    return initial
