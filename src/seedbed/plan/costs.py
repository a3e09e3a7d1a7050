"""What is measured of a machine for a configuration, and the file that keeps it."""

from __future__ import annotations

import bisect
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from seedbed.plan.engine import ALONE, NOTHING, Company, Cost

MB = 1e6
T = TypeVar("T")


class CallCost(NamedTuple):
    """The costs of one turn of the inference thread."""

    groups: int  # that the call acts on
    host: Cost  # gathering, staging, and sending the actions
    program: Cost  # the compiled call
    keep: Cost  # giving the steps to unrolls or replay, after the actions were sent


@dataclasses.dataclass(frozen=True)
class ActingCosts:
    """The costs of a learner that acts by central inference, and of its actors."""

    step: Cost  # of a group of environments, in its actor
    crowding: (
        float  # how much longer work takes when all cores of this machine are busy; 0.2 is a fifth
    )
    wake_s: float  # core seconds until a process that waits at a doorbell goes on
    calls: tuple[CallCost, ...]  # in the order of their groups
    update: Cost  # of a batch, until parameters are published; for shards, until the host has its gradient
    seal: Cost = NOTHING  # of a group's step in replay
    draw: Cost = NOTHING  # of a batch from replay, with the new priorities of its items
    company: Company = ALONE  # what the threads of a learner lose by working at once

    def call(self, groups: int) -> CallCost:
        """Returns the cost of a call of any size, on the line through the two nearest that were measured.

        Beyond the largest, it grows as from the smallest to the largest, on as many cores.
        """
        if len(self.calls) == 1:
            return self.calls[0]._replace(groups=groups)
        at = bisect.bisect_left([each.groups for each in self.calls], groups)
        beyond = at == len(self.calls)
        low, high = (self.calls[0], self.calls[-1]) if beyond else self.calls[max(0, at - 1) :][:2]
        share = (groups - low.groups) / (high.groups - low.groups)

        def between(a: Cost, b: Cost) -> Cost:
            cpu_s, width, device_s = (x + share * (y - x) for x, y in zip(a, b, strict=True))
            if beyond:  # more cannot cost less
                cpu_s, width, device_s = max(b.cpu_s, cpu_s), b.width, max(b.device_s, device_s)
            return Cost(cpu_s, width, device_s)

        return CallCost(groups, *(between(a, b) for a, b in zip(low[1:], high[1:], strict=True)))


class StreamCosts(NamedTuple):
    """The costs of a group's timestep over TLS, and of its answer."""

    send: Cost  # at the actor's end: reading the slot, compressing, sending
    take: Cost  # at the learner's
    answer: Cost  # at the learner's
    read: Cost  # at the actor's
    up_bytes: float
    down_bytes: float


class Linear(NamedTuple):
    """CPU seconds that depend on the number of shards and on the bytes."""

    base: float
    shard: float  # for each shard; of a learner only
    megabyte: float

    def of(self, shards: int, size: float) -> float:
        """Returns the seconds for an update of `size` bytes, up and down, with so many shards."""
        return self.base + self.shard * shards + self.megabyte * size / MB


class ShardCosts(NamedTuple):
    """The costs of a round trip to parameter shards."""

    learner: Linear  # of pushing and pulling, to shards on this machine
    shard: Linear
    far_learner: Linear  # to shards on other machines, over TLS
    far_shard: Linear


class ReplayTrip(NamedTuple):
    """CPU seconds of what goes to a replay shard, or comes from there."""

    caller: float  # of the thread that takes; of one that adds, `CallCost.keep` has it
    stream: float  # of the thread of the stream, in the same process
    shard: float


class ReplayCosts(NamedTuple):
    """The costs of one replay shard."""

    row: ReplayTrip  # a group's step, which goes alone
    draw: ReplayTrip  # a batch, and the new priorities of its items


class FusedCosts(NamedTuple):
    """The costs of an iteration of the fused runtime on one machine."""

    rollout: Cost
    update: Cost  # all minibatches
    steps: int = 0  # of all environments


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Everything that was measured, and where."""

    machine: str
    cores: float
    device: str  # the kind of the accelerator, or that of the CPU
    platform: str
    version: str
    acting: ActingCosts | None = None
    stream: StreamCosts | None = None
    shards: ShardCosts | None = None
    replay: ReplayCosts | None = None  # of a shard on this machine
    far_replay: ReplayCosts | None = None  # of one on another, over TLS
    fused: FusedCosts | None = None


def median_of(measured: Sequence[T]) -> T:
    """Returns the medians of what was measured several times, field by field."""
    one = measured[0]
    if one is None or isinstance(one, str):
        return one
    if isinstance(one, int | float):
        return type(one)(statistics.median(measured))  # type: ignore[type-var, arg-type]
    if dataclasses.is_dataclass(one):
        found = {name: median_of([vars(each)[name] for each in measured]) for name in vars(one)}
        return dataclasses.replace(one, **found)  # type: ignore[type-var]
    assert isinstance(one, tuple), type(one)
    fields = [median_of(each) for each in zip(*measured, strict=True)]  # type: ignore[call-overload]
    return type(one)(*fields) if hasattr(one, "_fields") else type(one)(fields)


def to_json(calibration: Calibration) -> dict[str, Any]:
    """Returns a calibration as JSON types."""
    return dataclasses.asdict(calibration)


def from_json(data: dict[str, Any]) -> Calibration:
    """Reads the result of `to_json`; raises KeyError, TypeError or ValueError if it is not one."""
    parts: dict[str, Any] = {}
    if (acting := data["acting"]) is not None:
        calls = [CallCost(groups, *map(_cost, costs)) for groups, *costs in acting["calls"]]
        costs: dict[str, Any] = {n: _cost(acting[n]) for n in ("step", "update", "seal", "draw")}
        costs |= {name: acting[name] for name in ("crowding", "wake_s")}
        company = Company(*map(float, acting["company"]))
        parts["acting"] = ActingCosts(calls=tuple(calls), company=company, **costs)
    if (stream := data["stream"]) is not None:
        send, take, answer, read = map(_cost, stream[:4])
        parts["stream"] = StreamCosts(send, take, answer, read, *stream[4:])
    if (shards := data["shards"]) is not None:
        parts["shards"] = ShardCosts(*(Linear(*each) for each in shards))
    for name in ("replay", "far_replay"):
        if (replay := data[name]) is not None:
            parts[name] = ReplayCosts(*(ReplayTrip(*each) for each in replay))
    if (fused := data["fused"]) is not None:
        parts["fused"] = FusedCosts(_cost(fused[0]), _cost(fused[1]), fused[2])
    return Calibration(**{**data, **parts})


def _cost(numbers: list[float]) -> Cost:
    return Cost(*map(float, numbers))
