"""The number of actors that the model finds best: what `--actors auto` is."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import NamedTuple

from seedbed.config.configuration import TrainConfig
from seedbed.machine import usable_cores
from seedbed.plan.calibration import calibrated, subject_of
from seedbed.plan.hosts import HostKind, require_fit, this_machine
from seedbed.plan.predict import predict
from seedbed.run.devices import dispatch_in_place
from seedbed.run.options import CentralConfig
from seedbed.run.sizes import AUTO
from seedbed.types import SeedbedError

_ENOUGH = 0.95
"""The share of the highest rate from which on fewer actors are better: they leave memory, and lag less."""
_A_CORE, _MOST = 2, 512  # actors of a core and of a machine, at most


class Sized(NamedTuple):
    """A configuration with a number of actors, and the environment steps a second that each number makes."""

    config: TrainConfig
    foretold: dict[int, float]
    kept: bool  # whether nothing was measured now

    @property
    def note(self) -> str:
        """A line about the choice."""
        runtime = self.config.runtime
        assert isinstance(runtime, CentralConfig)
        every = ", ".join(f"{n}: {rate:,.0f}" for n, rate in self.foretold.items())
        earlier = "; measured earlier, anew by seedbed plan --fresh" * self.kept
        return (
            f"actors {runtime.actors}, as a plan finds best (steps/s foretold of {every}{earlier})"
        )


def sized(
    config: TrainConfig,
    kinds: Sequence[HostKind] | None,
    fresh: bool,
    tell: Callable[[str], None],
) -> Sized:
    """Returns a settled configuration whose `actors`, auto so far, are as many as learn fastest.

    `kinds` are the machines, of which there is one; None is this one. What is not known of this machine is
    measured, after a line to `tell`. Starts JAX. Raises SeedbedError if there is no model of the run, or if
    no number of actors makes progress.
    """
    dispatch_in_place()
    runtime, measured = config.runtime, list[str]()
    assert isinstance(runtime, CentralConfig) and runtime.actors == AUTO

    def with_actors(actors: int) -> TrainConfig:
        return dataclasses.replace(config, runtime=dataclasses.replace(runtime, actors=actors))

    def told(part: str) -> None:
        measured.append(part)
        tell(part)

    require_fit(kinds or [HostKind("here", usable_cores())], with_actors(1).runtime)
    calibration = calibrated(with_actors(1), False, fresh, told)
    # Parts of the run's own size were made for measuring, in circles.
    gc.collect()
    machines = kinds or [this_machine(calibration)]
    rates, refused = dict[int, float](), None
    for actors in _numbers(machines[0].cores):
        try:
            chosen = with_actors(actors)
            chosen.runtime.fitted(config.agent)  # a batch may need more actors
            found = predict(subject_of(chosen, kinds), calibration, machines)
        except SeedbedError as error:
            refused = error
        else:
            rates[actors] = found.env_steps_per_s
    if not rates:
        assert refused is not None
        raise refused
    best = min(actors for actors, rate in rates.items() if rate >= _ENOUGH * max(rates.values()))
    return Sized(with_actors(best), rates, not measured)


def _numbers(cores: float) -> list[int]:
    """Returns numbers of actors, of which each is at most twice the one before."""
    most = min(_MOST, max(1, int(_A_CORE * cores)))
    doubled = (number << times for number in (2, 3) for times in range(most.bit_length()))
    return sorted({1, most, *(number for number in doubled if number < most)})
