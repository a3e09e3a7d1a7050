"""The model of the fused runtime: all machines go through iterations together, as one learner.

Environments and batches are divided among them evenly. After each minibatch, gradients are summed around a
ring. The accelerators of a machine that the run uses take over all that was measured here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from seedbed.plan.acting import JITTER
from seedbed.plan.costs import FusedCosts
from seedbed.plan.engine import Cost, Process, Worker
from seedbed.plan.hosts import HostKind
from seedbed.plan.playing import Model


class Iteration(NamedTuple):
    """The sizes of an iteration of the fused runtime."""

    updates: int
    gradient_bytes: int
    devices: int = 1  # of each machine that are used, if it has so many


def begin(model: Model, costs: FusedCosts, sizes: Iteration, ended: Callable[[], None]) -> None:
    """Starts the process that goes through iterations, machine by machine and part by part."""
    machines, simulation, rng = model.machines, model.simulation, model.rng
    count = len(machines)
    workers = [
        Worker(simulation, machine, device=machine.devices[0] if machine.devices else None)
        for machine in machines
    ]
    for worker in workers:
        model.note("compiled program", lambda worker=worker: worker.busy_s)

    def of(kind: HostKind, cost: Cost, factor: float) -> Cost:
        if not kind.accelerators:
            return cost.times(factor)
        used = min(sizes.devices, kind.accelerators)
        return Cost(0.0, 1.0, factor * cost.wall_s / kind.learning / used)

    def part(number: int, cost: Cost, share: float) -> Process:
        factor = share / count * rng.uniform(1 - JITTER, 1 + JITTER)
        yield workers[number].do(of(model.kinds[number], cost, factor))

    def sent(number: int) -> Process:
        # A ring: each sends as much as this to the next, in 2 (n - 1) messages one after another.
        size = 2 * (count - 1) / count * sizes.gradient_bytes
        yield machines[number].card.send(machines[(number + 1) % count].card, size)
        yield simulation.sleep((2 * (count - 1) - 1) * 1e-3 * model.kinds[number].latency_ms)

    def every(cost: Cost, share: float) -> Process:
        yield simulation.all_of(part(number, cost, share) for number in range(count))

    def run() -> Process:
        while True:
            yield from every(costs.rollout, 1.0)
            for _ in range(sizes.updates):
                yield from every(costs.update, 1.0 / sizes.updates)
                if count > 1:
                    yield simulation.all_of(sent(number) for number in range(count))
            ended()

    simulation.start(run())
