"""Predictions: a run and its machines become a model, which is played until it is steady."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from seedbed.paramserver.placement import Machine as Taker
from seedbed.paramserver.placement import Wish, place
from seedbed.plan.acting import Group, Learner, Path, Sizes, Source, Unrolls
from seedbed.plan.costs import ActingCosts, Calibration
from seedbed.plan.engine import Cost, Machine, Worker
from seedbed.plan.fused import Iteration, begin
from seedbed.plan.hosts import HostKind, actors_of, machines_of
from seedbed.plan.playing import Model
from seedbed.plan.replayed import Replayed
from seedbed.plan.sharded import ParameterShards, ReplayShards, ShardedReplay, Traffic
from seedbed.replay.host.layout import CHUNK
from seedbed.run.options import GROUPS, CentralConfig, FusedConfig, ParamServerConfig, RuntimeConfig
from seedbed.types import Replay, SeedbedError

_MODEST = 0.1
"""The weight of a process of niceness 10, as Linux has it."""
_BATCHES, _EACH = 100, 60  # that are played in each half, and by each learner, at least
_CHUNKS = 4  # of each group in each half, with replay
_TURNS = 3  # of each group in each half, at least
_BUSY = 0.7  # the load from which on a resource limits
_ALIKE = 0.97  # of the highest load, from which on resources are as busy


class Subject(NamedTuple):
    """A configuration in numbers."""

    runtime: RuntimeConfig
    frame_skip: int
    sizes: Sizes | None = None  # of a learner with actors
    iteration: Iteration | None = None
    traffic: Traffic | None = None


class Prediction(NamedTuple):
    """The rates, delays and loads of a run when it is steady."""

    env_steps_per_s: float
    frames_per_s: float
    updates_per_s: float
    action_p50_ms: float | None  # from a timestep to its action; None in the fused runtime
    action_p95_ms: float | None
    rows_per_call: float | None  # environments of an inference call
    lag_mean: (
        float | None
    )  # updates between acting and learning; of gradients with parameter shards
    discarded_share: float | None  # of gradients
    cores_busy: float  # of all machines
    bytes_per_s: float  # between machines
    loads: dict[str, float]  # by resource, of the busiest of its kind
    saturated: str  # the resource that limits, "" if none does
    cost_of_1e9_frames: float | None  # None without prices


def predict(subject: Subject, calibration: Calibration, kinds: Sequence[HostKind]) -> Prediction:
    """Returns what a run does on machines of these kinds, the first of which coordinates or learns.

    Raises SeedbedError if the run does not fit the machines.
    """
    if isinstance(subject.runtime, FusedConfig):
        return _predict_fused(subject, calibration, kinds)
    acting = calibration.acting
    assert acting is not None and subject.sizes is not None
    model = Model(machines_of(kinds), acting.crowding)
    shards: ParameterShards | None = None
    if isinstance(subject.runtime, CentralConfig):
        learners = [_central(model, subject, calibration, subject.runtime)]
    else:
        assert isinstance(subject.runtime, ParamServerConfig)
        learners, shards = _paramserver(model, subject, calibration, subject.runtime)

    def batches() -> int:
        return sum(learner.batches for learner in learners)

    def acted() -> int:
        return sum(len(learner.latencies) for learner in learners)

    groups = sum(len(learner.groups) for learner in learners)
    goal = max(_BATCHES, _EACH * len(learners), round(_CHUNKS * _chunk(subject.sizes) * groups))
    model.play(batches, goal, lambda: acted() >= _TURNS * groups)
    first = acted()
    before = _counts(learners, shards)
    used = model.used()
    busy, marks = model.busy(), [(len(x.latencies), len(x.lags)) for x in learners]
    pushed = len(shards.lags) if shards else 0
    passed_s = model.play(batches, goal, lambda: acted() >= first + _TURNS * groups)
    after = _counts(learners, shards)
    steps, updates, rows, calls, pushes, discarded = (
        b - a for a, b in zip(before, after, strict=True)
    )
    pairs = list(zip(learners, marks, strict=True))
    latencies = sorted(x for learner, mark in pairs for x in learner.latencies[mark[0] :])
    lags: list[float] = [x for learner, mark in pairs for x in learner.lags[mark[1] :]]
    lags = list(shards.lags[pushed:]) if shards else lags
    loads = _loads(busy, model.busy(), passed_s)
    frames = steps / passed_s * subject.frame_skip
    return Prediction(
        env_steps_per_s=steps / passed_s,
        frames_per_s=frames,
        updates_per_s=updates / passed_s,
        action_p50_ms=1e3 * latencies[len(latencies) // 2],
        action_p95_ms=1e3 * latencies[int(0.95 * len(latencies))],
        rows_per_call=rows / calls,
        lag_mean=statistics.fmean(lags) if lags else None,
        discarded_share=discarded / pushes if shards else None,
        cores_busy=(model.used()[0] - used[0]) / passed_s,
        bytes_per_s=(model.used()[1] - used[1]) / passed_s,
        loads=loads,
        saturated=_saturated(loads),
        cost_of_1e9_frames=_dollars(kinds, frames),
    )


def _chunk(sizes: Sizes) -> float:
    """Returns the batches that a chunk of a group's rows asks for: replay gets no fewer at a time."""
    experience = sizes.experience
    if not isinstance(experience, Replay):
        return 0.0
    items = CHUNK * sizes.group_size / experience.period
    return items * experience.ratio / experience.batch


def _counts(learners: Sequence[Learner], shards: ParameterShards | None) -> list[float]:
    """Returns steps, updates, rows and calls so far; and pushes, and those that were discarded."""
    updates: float = sum(learner.version for learner in learners)
    if shards is not None:
        updates = sum(shards.applied) / len(shards.applied)
    steps = sum(learner.source.steps for learner in learners)
    rows, calls = (sum(getattr(x, name) for x in learners) for name in ("rows", "calls"))
    pushes = (shards.pushes, shards.discarded) if shards else (0, 0)
    return [steps, updates, rows, calls, *pushes]


def _loads(
    before: dict[str, list[float]], after: dict[str, list[float]], passed_s: float
) -> dict[str, float]:
    return {
        name: max(b - a for a, b in zip(before[name], each, strict=True)) / passed_s
        for name, each in after.items()
    }


def _saturated(loads: dict[str, float]) -> str:
    """Returns the resource with the highest load; among equals the one that was counted first.

    Returns "" if none has much to do: then parts wait for one another, or for messages.
    """
    most = max(loads.values())
    if most < _BUSY:
        return ""
    return next(name for name, load in loads.items() if load >= _ALIKE * most)


def _dollars(kinds: Sequence[HostKind], frames_per_s: float) -> float | None:
    hourly = sum(kind.count * kind.price_per_hour for kind in kinds)
    return hourly / 3600 / frames_per_s * 1e9 if hourly else None


def _require_accelerators(kind: HostKind, platform: str) -> None:
    if not kind.accelerators and platform != "cpu":
        raise SeedbedError(
            f"{kind.name} has no accelerators, and what learns here is one ({platform}): run `seedbed plan` "
            "with JAX_PLATFORMS=cpu to plan for machines without"
        )


def _accelerated(costs: ActingCosts, kind: HostKind, platform: str) -> ActingCosts:
    """Returns the costs of a learner on a machine: an accelerator takes over what was measured here."""
    _require_accelerators(kind, platform)
    if not kind.accelerators:
        return costs
    calls = (
        call._replace(program=Cost(0.0, 1.0, call.program.wall_s / kind.inference))
        for call in costs.calls
    )
    update = Cost(0.0, 1.0, costs.update.wall_s / kind.learning)
    return dataclasses.replace(costs, calls=tuple(calls), update=update)


def _learner(
    model: Model,
    sizes: Sizes,
    costs: ActingCosts,
    machine: Machine,
    devices: tuple[int, int] = (0, 0),
    name: str = "",
) -> Learner:
    """Makes a learner; `devices` are the indices of the accelerators that act and learn, if it has some."""
    every, rng = machine.devices, random.Random(model.rng.random())
    found = (every[devices[0] % len(every)], every[devices[1] % len(every)]) if every else None
    learner = Learner(model.simulation, sizes, costs, machine, rng, found)
    model.note(f"learner thread{name}", lambda: learner.learning.busy_s)
    model.note(f"inference thread{name}", lambda: learner.acting.busy_s)
    return learner


def _local_groups(
    model: Model, subject: Subject, costs: ActingCosts, machine: Machine, actors: int
) -> list[Group]:
    assert subject.sizes is not None
    weight = _MODEST if isinstance(subject.sizes.experience, Replay) else 1.0
    workers = [model.worker("actors", machine, weight, costs.wake_s) for _ in range(actors)]
    return [Group(worker, None) for worker in workers for _ in range(GROUPS)]


def _central(
    model: Model, subject: Subject, calibration: Calibration, config: CentralConfig
) -> Learner:
    costs, sizes = calibration.acting, subject.sizes
    assert costs is not None and sizes is not None
    machine = model.machines[0]
    costs = _accelerated(costs, model.kinds[0], calibration.platform)
    devices = config.inference_devices[0], config.learner_devices[0]
    learner = _learner(model, sizes, costs, machine, devices)
    groups = _local_groups(model, subject, costs, machine, config.local_actors)
    away = _remote_groups(model, calibration, costs)
    if isinstance(sizes.experience, Replay):
        thread = model.worker("replay thread", machine, fellows=learner.fellows)
        source = Replayed(model.simulation, sizes, costs, thread)
    else:
        source = Unrolls(model.simulation, sizes, groups + away)
    learner.begin(groups + away, source)
    return learner


def _remote_groups(model: Model, calibration: Calibration, costs: ActingCosts) -> list[Group]:
    """Makes the actors of `seedbed actor`, on all machines that have some."""
    found: list[Group] = []
    ingest: Worker | None = None
    every = zip(model.kinds, model.machines, actors_of(model.kinds), strict=True)
    for kind, machine, actors in every:
        if not actors:
            continue
        assert calibration.stream is not None
        ingest = ingest or model.worker("ingest process", model.machines[0], 1.0, costs.wake_s)
        name = f"stream process of {kind.name}"
        supervisor = model.worker(name, machine, 1.0, costs.wake_s)
        path = Path(supervisor, ingest, calibration.stream)
        for _ in range(actors):
            worker = model.worker(f"actors of {kind.name}", machine, 1.0, costs.wake_s)
            found += [Group(worker, path) for _ in range(GROUPS)]
    return found


def _paramserver(
    model: Model, subject: Subject, calibration: Calibration, config: ParamServerConfig
) -> tuple[list[Learner], ParameterShards]:
    acting, sizes, parts = calibration.acting, subject.sizes, subject.traffic
    assert acting is not None and sizes is not None and parts is not None
    assert calibration.shards is not None
    replays = config.replay_shards if isinstance(sizes.experience, Replay) else 0
    numbers = {"learners": config.learners, "parameters": len(parts.up), "replay": replays}
    where = _placed(model, numbers, {"learners": 1.0 + config.actors})
    homes = {kind: [model.machines[i] for i in places] for kind, places in where.items()}
    costs, simulation = calibration.shards, model.simulation
    shards = ParameterShards(simulation, homes["parameters"], costs, parts, config.most_lag)
    for worker in shards.workers:
        model.note("parameter shards", lambda worker=worker: worker.busy_s)
    replay: ReplayShards | None = None
    if replays:
        assert calibration.replay is not None and calibration.far_replay is not None
        trips = calibration.replay, calibration.far_replay
        replay = ReplayShards(simulation, homes["replay"], sizes, trips, parts, config.learners)
        for worker in replay.workers:
            model.note("replay shards", lambda worker=worker: worker.busy_s)
    learners = []
    for seat, number in enumerate(where["learners"]):
        machine = model.machines[number]
        own = _accelerated(acting, model.kinds[number], calibration.platform)
        # Learners of a machine take its accelerators in turn.
        device = where["learners"][:seat].count(number)
        learner = _learner(model, sizes, own, machine, (device, device), "s")
        groups = _local_groups(model, subject, own, machine, config.actors)
        numbered = {group: seat * len(groups) + i for i, group in enumerate(groups)}
        source: Source = (
            ShardedReplay(replay, learner, numbered)
            if replay
            else Unrolls(simulation, sizes, groups)
        )
        learner.begin(groups, source, lambda learner=learner: shards.update(learner))
        learners.append(learner)
    return learners, shards


def _placed(model: Model, numbers: dict[str, int], cores: dict[str, float]) -> dict[str, list[int]]:
    """Returns the places of all roles among the machines, as a run chooses them."""
    # As paramserver/hosts.py: accelerators are those of hosts, and the coordinator's machine takes all kinds.
    takers = [
        Taker(f"{number:06}", kind.cores, kind.accelerators, kind.only)
        if number
        else Taker("", kind.cores)
        for number, kind in enumerate(model.kinds)
    ]
    wishes = [
        Wish(f"{kind}-{i}", kind, cores.get(kind, 0.5))  # as paramserver/beginning.py
        for kind, count in numbers.items()
        for i in range(count)
    ]
    try:
        found = place(wishes, takers, {})
    except ValueError as error:
        raise SeedbedError(f"{error} of the hosts: change `only` of a kind") from error
    return {
        kind: [int(found[f"{kind}-{i}"][1] or 0) for i in range(count)]
        for kind, count in numbers.items()
    }


def _predict_fused(
    subject: Subject, calibration: Calibration, kinds: Sequence[HostKind]
) -> Prediction:
    """Plays iterations of all machines, which share the environments and each batch evenly."""
    costs, sizes = calibration.fused, subject.iteration
    assert costs is not None and sizes is not None
    for kind in kinds:
        _require_accelerators(kind, calibration.platform)
    # Its costs were measured with all cores busy.
    model = Model(machines_of(kinds), crowding=0.0)
    iterations = 0

    def ended() -> None:
        nonlocal iterations
        iterations += 1

    begin(model, costs, sizes, ended)
    model.play(lambda: iterations, _EACH, lambda: True)
    used, busy, first = model.used(), model.busy(), iterations
    passed_s = model.play(lambda: iterations, _EACH, lambda: True)
    loads = _loads(busy, model.busy(), passed_s)
    rate = (iterations - first) / passed_s
    frames = rate * costs.steps * subject.frame_skip
    return Prediction(
        env_steps_per_s=rate * costs.steps,
        frames_per_s=frames,
        updates_per_s=rate * sizes.updates,
        action_p50_ms=None,
        action_p95_ms=None,
        rows_per_call=None,
        lag_mean=None,
        discarded_share=None,
        cores_busy=(model.used()[0] - used[0]) / passed_s,
        bytes_per_s=(model.used()[1] - used[1]) / passed_s,
        loads=loads,
        saturated=_saturated(loads),
        cost_of_1e9_frames=_dollars(kinds, frames),
    )
