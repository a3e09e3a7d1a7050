"""The number of actors that the model finds best: what `--actors auto` is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from seedbed.config.configuration import TrainConfig
from seedbed.machine import usable_cores
from seedbed.plan.calibration import calibrated, subject_of
from seedbed.plan.costs import Calibration
from seedbed.plan.hosts import HostKind, this_machine
from seedbed.plan.predict import predict
from seedbed.run.devices import dispatch_in_place
from seedbed.run.options import AUTO, CentralConfig
from seedbed.types import SeedbedError

_ENOUGH = 0.98
"""The share of the highest rate from which on fewer actors are better: they leave memory, and lag less."""
_A_CORE = 2  # actors of a core, at most


class Sized(NamedTuple):
    """A configuration with a number of actors, and the environment steps a second that each number makes."""

    config: TrainConfig
    foretold: dict[int, float]

    @property
    def note(self) -> str:
        """A line about the choice."""
        runtime = self.config.runtime
        assert isinstance(runtime, CentralConfig)
        every = ", ".join(f"{n}: {rate:,.0f}" for n, rate in self.foretold.items())
        return f"actors {runtime.actors}, as a plan finds best (steps/s foretold of {every})"


def sized(
    config: TrainConfig,
    kinds: Sequence[HostKind] | None,
    fresh: bool,
    tell: Callable[[str], None],
) -> Sized:
    """Returns a settled configuration whose `actors`, auto so far, are as many as learn fastest.

    `kinds` are the machines, the first of which has these actors; None is this one. What is not known of this
    machine is measured, after a line to `tell`. Starts JAX. Raises SeedbedError if there is no model of the
    run, or if no number of actors fits it.
    """
    dispatch_in_place()
    runtime = config.runtime
    assert isinstance(runtime, CentralConfig) and runtime.actors == AUTO
    if runtime.listen and kinds is None:
        raise SeedbedError(
            "actors is auto and the run listens: no model knows who joins it; name a number with --actors"
        )
    known: dict[int, Calibration] = {}
    found: dict[int, tuple[float, TrainConfig]] = {}
    refused = SeedbedError("no number of actors fits the run")
    for actors in _numbers(kinds[0].cores if kinds else usable_cores()):
        try:
            fitted = dataclasses.replace(runtime, actors=actors).fitted(config.agent)
        except SeedbedError as error:
            refused = error
            continue
        each, chosen = fitted.envs_per_actor, dataclasses.replace(config, runtime=fitted)
        subject = subject_of(chosen, kinds)
        if each not in known:
            known[each] = calibrated(chosen, False, fresh, tell)
        foretold = predict(subject, known[each], kinds or [this_machine(known[each])])
        found[actors] = foretold.env_steps_per_s, chosen
    if not found:
        raise refused
    rates = {actors: rate for actors, (rate, _) in found.items()}
    best = min(actors for actors, rate in rates.items() if rate >= _ENOUGH * max(rates.values()))
    return Sized(found[best][1], rates)


def _numbers(cores: float) -> list[int]:
    """Returns numbers of actors, of which each is at most twice the one before."""
    most = max(1, int(_A_CORE * cores))
    doubled = (number << times for number in (2, 3) for times in range(most.bit_length()))
    return sorted({1, most, *(number for number in doubled if number < most)})
