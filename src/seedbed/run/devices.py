"""The devices that a run names by their indices, and how the central runtime uses each kind of them."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, TypeAlias

import jax

from seedbed.nets.native.bfloat16.instructions import LABELS, host_instructions
from seedbed.types import SeedbedError

Device: TypeAlias = Any
"""A `jax.Device`. Type checkers take that name for a variable, so this is Any."""


def dispatch_in_place() -> None:
    """Makes calls on a CPU wait for their results, which takes less time than handing them to a thread.

    This has no effect once JAX has started.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def keep_to_the_host() -> None:
    """Keeps this process off accelerators: it computes too little to take their memory. Before JAX starts."""
    dispatch_in_place()
    jax.config.update("jax_platforms", "cpu")


def share_accelerators() -> None:
    """Makes this process and its children take a GPU's memory as they need it. Before JAX starts.

    By default a process takes three quarters at once, and other roles of the run find none.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def start_jax() -> str:
    """Starts JAX, whose calls on a CPU wait; returns the platform of this host's devices: cpu, gpu, ..."""
    dispatch_in_place()
    return jax.local_devices()[0].platform


def multiplies_bfloat16(device: Device) -> bool:
    """Returns whether products of bfloat16 are faster on a device than those of float32.

    They are on NVIDIA's GPUs since Ampere (8.0), on TPUs, and on CPUs that have instructions for them.
    """
    if device.platform == "cpu":
        return host_instructions() is not None
    if device.platform != "gpu":
        return device.platform == "tpu"
    # AMD's GPUs have names here, such as gfx90a.
    major, _, _ = str(device.compute_capability).partition(".")
    return major.isdecimal() and int(major) >= 8


def kind_of_device(device: Device) -> str:
    """Returns the name of a kind of device; a CPU's says what it has for products of bfloat16."""
    if device.platform != "cpu" or (unit := host_instructions()) is None:
        return device.device_kind
    return f"{device.device_kind} with {LABELS[unit]}"


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


def choose_shared_devices(indices: tuple[int, ...], option: str) -> list[Device]:
    """Returns the devices with these indices of every process that trains as one learner, one by one.

    Raises SeedbedError, which names the option, if an index is too large.
    """
    choose_devices(indices, option)
    processes: dict[int, list[Device]] = {}
    for device in jax.devices():
        processes.setdefault(device.process_index, []).append(device)
    return [devices[index] for devices in processes.values() for index in indices]


@dataclasses.dataclass(frozen=True)
class DevicePolicy:
    """The way in which the central runtime uses a kind of device."""

    calls: int
    """The most inference calls that are under way at once."""
    pads: bool
    """Whether a call is padded to the next compiled size. Without, it takes the largest that is ready."""
    deadline_s: float
    """The seconds that a call waits, after its first group, for others to join it."""
    queues: bool
    """Whether the device has a queue of programs and memory of its own.

    Then learning passes acting at a gate (`central.gate`), results are copied to the host as soon as they
    exist, and batches of replay are copied to the device as soon as they are drawn.
    """


CPU = DevicePolicy(calls=1, pads=False, deadline_s=0.0, queues=False)
"""A padded row costs as much as any other, and a larger batch gains less than waiting for it costs."""
ACCELERATOR = DevicePolicy(calls=2, pads=True, deadline_s=0.5e-3, queues=True)
"""Rows are cheap and calls are not; one call is staged while another one runs."""


def policy_of(device: Device) -> DevicePolicy:
    """Returns how a device is used. Nothing else asks which platform it is of."""
    return CPU if device.platform == "cpu" else ACCELERATOR


def host_device() -> Device:
    """Returns the host's own processor, for small computations that must not wait for an accelerator.

    Raises SeedbedError if JAX may not use it.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise SeedbedError(
            f"JAX has no CPU here ({error}): add it to JAX_PLATFORMS, as in JAX_PLATFORMS=cuda,cpu"
        ) from error
