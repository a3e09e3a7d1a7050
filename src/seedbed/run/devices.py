"""The devices that a run names by their indices."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax

from seedbed.types import SeedbedError

Device: TypeAlias = Any
"""A `jax.Device`. Type checkers take that name for a variable, so this is Any."""


def start_jax() -> str:
    """Starts JAX, and returns the platform of this host's devices, such as cpu or gpu.

    On a CPU, calls wait for their results, as every runtime does anyway. Another setting has no effect once
    JAX has started, so call this first.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    return jax.local_devices()[0].platform


def choose_devices(indices: tuple[int, ...], option: str) -> list[Device]:
    """Returns the devices of this host with these indices, in order.

    Raises SeedbedError, which names the option, if an index is too large.
    """
    devices = jax.local_devices()
    for index in indices:
        if index >= len(devices):
            raise SeedbedError(
                f"{option} names device {index}: this host has {len(devices)} ({devices[0].platform}), "
                f"numbered from 0 to {len(devices) - 1}"
            )
    return [devices[index] for index in indices]
