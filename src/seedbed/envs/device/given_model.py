"""Options of a task against a model that it was given, which replaces what they would make of its file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from seedbed.physics.model import EULER, Model
from seedbed.types import SeedbedError

_HAS: dict[str, Callable[[Model], Any]] = {
    "integrator": lambda model: np.array(["euler" if model.opt.integrator == EULER else "xml"]),
    "kp": lambda model: model.actuator_gainprm[:, 0],
    "kd": lambda model: model.dof_damping,
    "solver_iterations": lambda model: np.array([model.opt.iterations]),
}
"""All numbers of a model that an option of this name would make, by the option."""


def require_like(task: Any, *names: str) -> None:
    """Raises SeedbedError if a task was given one of these options and its own `model` does not have it."""
    model: Model | None = task.model
    if model is None:
        return
    for name in names:
        found, mine, usual = _HAS[name](model), getattr(task, name), getattr(type(task), name)
        # Numbers that are drawn for an episode are no numpy arrays, and differ from those of the options.
        if mine not in (0, usual) and isinstance(found, np.ndarray) and not (found == mine).any():
            raise SeedbedError(
                f"{type(task).__name__}.{name} is {mine}, but its model, which is used, has another: change "
                f"the model, or leave out {name}"
            )
