"""Trains reinforcement-learning agents as fast as the hardware allows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from seedbed.version import __version__

if TYPE_CHECKING:
    from seedbed.api import Weights, load, make_gymnasium, train

__all__ = ["Weights", "__version__", "load", "make_gymnasium", "train"]


def __getattr__(name: str) -> Any:
    # Actor processes import this package too, and must not spend time and memory on JAX.
    if name in ("Weights", "load", "make_gymnasium", "train"):
        from seedbed import api

        return getattr(api, name)
    raise AttributeError(f"module 'seedbed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
