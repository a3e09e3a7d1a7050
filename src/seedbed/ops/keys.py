"""Keys and seeds of a run, and the counts of steps beyond 32 bits that they depend on.

JAX folds 32 bits into a key, but a run may have more steps than that. On the device a count is therefore
uint32 `[2]`, with its low half first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

AXIS = "batch"
"""The mapped axis that divides a batch among devices."""
_LOW = (1 << 32) - 1
_EVALUATION = 1 << 32  # beyond all ranks


def halves(count: int) -> np.ndarray:
    """Splits a count into uint32 `[2]`, low half first. The count must be from 0 to 2^64 - 1."""
    return np.array([count & _LOW, count >> 32], np.uint32)


def later(count: Array, steps: Array | int) -> Array:
    """Returns a count, uint32 `[2]`, plus `steps`, uint32 `[...]`, as `[..., 2]`."""
    low = count[0] + jnp.asarray(steps, jnp.uint32)
    overflow = (low < count[0]).astype(jnp.uint32)
    return jnp.stack([low, count[1] + overflow], axis=-1)


def fold_count(key: Array, count: Array | np.ndarray) -> Array:
    """Derives a key from `key` and a count, uint32 `[2]`. `key` is not consumed."""
    return jax.random.fold_in(jax.random.fold_in(key, count[1]), count[0])


def derived_seed(seed: int, count: int) -> int:
    """Derives a seed from 0 to 2^31 - 1. `seed` and `count` are non-negative and may be of any size."""
    return int(np.random.SeedSequence([seed, count]).generate_state(1)[0]) >> 1


def evaluation_seed(seed: int, step: int) -> int:
    """Derives the seed of an evaluation at a step, which no actor of training has.

    A run that goes on from the step trains with `derived_seed(seed, step)`, and what ranks derive from that.
    """
    return derived_seed(derived_seed(seed, step), _EVALUATION)


def normal_rows(key: Array, shape: tuple[int, ...]) -> Array:
    """Draws normal numbers `[T, B, ...]` for this device's B rows of a batch. Consumes the key.

    They are those that the same rows of the whole batch have on one device.
    """
    steps, rows, *rest = shape
    try:
        first = jax.lax.axis_index(AXIS).astype(jnp.uint32) * rows
    except NameError:  # so JAX says that no axis is mapped: there is one device
        first = jnp.uint32(0)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, first + jnp.arange(rows, dtype=jnp.uint32))
    return jax.vmap(lambda row: jax.random.normal(row, (steps, *rest)), out_axes=1)(keys)


def environment_keys(run_key: Array, env_ids: Array, step: Array) -> Array:
    """Derives one key for each of `env_ids` `[B]`; it depends only on the run, the environment and `step`.

    `step` is a count, uint32 `[2]`. `run_key` is not consumed.
    """
    return jax.vmap(jax.random.fold_in, (None, 0))(fold_count(run_key, step), env_ids)
