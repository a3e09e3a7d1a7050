"""The machines of a plan, what is counted of them, and how long a model is played."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from seedbed.plan.engine import Card, Cores, Device, Fellows, Machine, Simulation, Worker
from seedbed.plan.hosts import HostKind
from seedbed.types import SeedbedError

_EVENTS = 3_000_000  # that are played at once, at most
_LEAST = 0.25  # of the batches, that have to be played


class Model:
    """The machines of a run, what is counted, and the simulation. For one thread."""

    def __init__(self, kinds: Sequence[HostKind], crowding: float) -> None:
        """Makes all machines."""
        self.simulation, self.rng = Simulation(), random.Random(0)
        self.kinds = list(kinds)
        self.machines = [self._machine(kind, crowding) for kind in kinds]
        # By name: how much each of these resources was busy so far, in units of its whole time.
        self.resources: dict[str, list[Callable[[], float]]] = {}
        for kind, machine in zip(kinds, self.machines, strict=True):
            cores = machine.cores
            self.note(f"cores of {kind.name}", lambda cores=cores: cores.busy_s / cores.count)
            if len(kinds) > 1:
                self.note(f"network of {kind.name}", lambda card=machine.card: card.busy_s)
            for device in machine.devices:
                self.note(f"accelerators of {kind.name}", lambda device=device: device.busy_s)

    def _machine(self, kind: HostKind, crowding: float) -> Machine:
        simulation = self.simulation
        return Machine(
            Cores(simulation, kind.cores, kind.speed, crowding),
            Card(simulation, kind.gbit_per_s, 1e-3 * kind.latency_ms),
            tuple(Device(simulation) for _ in range(kind.accelerators)),
        )

    def note(self, name: str, busy: Callable[[], float]) -> None:
        """Counts a resource of a kind."""
        self.resources.setdefault(name, []).append(busy)

    def worker(
        self,
        name: str,
        machine: Machine,
        weight: float = 1.0,
        wake_s: float = 0.0,
        fellows: Fellows | None = None,
    ) -> Worker:
        """Makes a worker and counts it."""
        worker = Worker(self.simulation, machine, weight, wake_s, fellows=fellows)
        self.note(name, lambda: worker.busy_s)
        return worker

    def play(self, batches: Callable[[], int], goal: int, turns: Callable[[], bool]) -> float:
        """Plays until there are `goal` more batches, and `turns` returns True; returns the seconds.

        If that needs too many events, it ends after `_LEAST` of the batches at the earliest. Raises
        SeedbedError if those are too many, too, or if nothing goes on any more.
        """
        first, begun = batches(), self.simulation.now
        over = self.simulation.run(lambda: batches() >= first + goal and turns(), _EVENTS)
        if not over and self.simulation.idle:
            raise SeedbedError(
                "the model makes no update: too little is acted for a batch; give it more actors"
            )
        if not over and not (batches() >= first + _LEAST * goal and turns()):
            raise SeedbedError(
                "so many machines take too many events to simulate: plan a part of them, such as half as "
                "many actors, learners and shards"
            )
        return self.simulation.now - begun

    def used(self) -> tuple[float, float]:
        """Returns the core seconds of all machines, and the bytes between them, so far."""
        cores = sum(machine.cores.busy_s for machine in self.machines)
        return cores, sum(machine.card.bytes for machine in self.machines)

    def busy(self) -> dict[str, list[float]]:
        """Returns how much each resource was busy so far."""
        return {name: [each() for each in every] for name, every in self.resources.items()}
