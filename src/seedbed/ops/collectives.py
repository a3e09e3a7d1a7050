"""What devices that share a batch compute together. The caller need not know how many there are."""

from __future__ import annotations

from typing import Any

import jax


def mean_over_devices(x: Any) -> Any:
    """Averages each leaf over the devices on which it differs; a leaf that is the same on all stays as it is.

    Every device must hold an equal part of the batch. Call it while JAX traces, inside `jax.shard_map` if
    there are several devices.
    """

    def mean(leaf: jax.Array) -> jax.Array:
        axes = tuple(jax.typeof(leaf).manual_axis_type.varying)
        return jax.lax.pmean(leaf, axes) if axes else leaf

    return jax.tree.map(mean, x)


def from_all_devices(x: jax.Array) -> jax.Array:
    """Returns the parts of an array from all devices on which it differs, joined along axis 0.

    Call it while JAX traces, inside `jax.shard_map` if there are several devices.
    """
    axes = tuple(jax.typeof(x).manual_axis_type.varying)
    return jax.lax.all_gather(x, axes, tiled=True) if axes else x
