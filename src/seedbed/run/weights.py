"""What a person asks a new run to begin with. No JAX."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from seedbed.arguments import require_fields


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights that a new run begins with: those of another run's best checkpoint, or of an export.

    Observation statistics, target networks and critics are among them. Steps, schedules and random numbers
    are the new run's own.
    """

    run: str | Path
    """The folder of a run, a bucket's address, or the folder of an exported policy."""
    optimizer: bool = False
    """Whether the optimizer's state goes on, too; else it begins anew."""
    partial: bool = False
    """Whether parts that do not fit begin anew; else they are refused."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for a value that cannot be."""
        require_fields(self)
