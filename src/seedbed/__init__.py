"""Trains reinforcement-learning agents as fast as the hardware allows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from seedbed.version import __version__

if TYPE_CHECKING:
    from seedbed.api import (
        Callback,
        Weights,
        evaluate,
        export,
        load,
        make_gymnasium,
        make_sb3,
        report,
        train,
    )

__all__ = [
    "Callback",
    "Weights",
    "__version__",
    "evaluate",
    "export",
    "load",
    "make_gymnasium",
    "make_sb3",
    "report",
    "train",
]


def __getattr__(name: str) -> Any:
    # Actor processes import this package too, and must not spend time and memory on JAX.
    if name in __all__:
        from seedbed import api

        return getattr(api, name)
    raise AttributeError(f"module 'seedbed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
