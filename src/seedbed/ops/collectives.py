"""Means over the devices that share a batch, for code that does not know whether there are several."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax

_AXIS: contextvars.ContextVar[str | None] = contextvars.ContextVar("data_axis", default=None)


@contextlib.contextmanager
def data_axis(name: str | None) -> Iterator[None]:
    """Names the mapped axis over which a batch is divided, while a function is traced; None is no axis."""
    token = _AXIS.set(name)
    try:
        yield
    finally:
        _AXIS.reset(token)


def mean_over_devices(x: Any) -> Any:
    """Averages each leaf over the devices that share the batch in equal parts."""
    axis = _AXIS.get()
    return x if axis is None else jax.lax.pmean(x, axis)
