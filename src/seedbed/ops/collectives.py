"""Means over the devices that share a batch. The caller need not know how many devices there are."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax

_AXIS: contextvars.ContextVar[str | None] = contextvars.ContextVar("data_axis", default=None)


@contextlib.contextmanager
def data_axis(name: str | None) -> Iterator[None]:
    """Names the mapped axis that divides the batch; None means no axis.

    The name holds inside the `with` block, in the current context only. Enter it while tracing.
    """
    token = _AXIS.set(name)
    try:
        yield
    finally:
        _AXIS.reset(token)


def mean_over_devices(x: Any) -> Any:
    """Averages each leaf over the devices of the axis that `data_axis` names; returns `x` if there is none.

    Every device must hold an equal part of the batch.
    """
    axis = _AXIS.get()
    return x if axis is None else jax.lax.pmean(x, axis)
