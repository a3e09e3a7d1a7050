"""`seedbed plan`: what a run would do here or on other machines, by a model that this machine calibrates."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seedbed import strict_json
from seedbed.exit_status import ExitStatus
from seedbed.machine import usable_cores
from seedbed.printable import printable
from seedbed.types import UsageError

if TYPE_CHECKING:
    from seedbed.config.configuration import TrainConfig
    from seedbed.plan.costs import Calibration
    from seedbed.plan.engine import Cost
    from seedbed.plan.hosts import HostKind
    from seedbed.plan.predict import Prediction, Subject

DESCRIPTION = """\
Predicts steps, updates, latency, lag and cost of a run of a preset or an environment, and what limits it.
Parts of the run are measured on this machine, each alone, which takes up to a minute; a model puts them
together (docs/plan.md). FILE names other machines, in TOML:

  [[hosts]]
  name = "learner"        # the first machine learns, or coordinates
  cores = 32
  speed = 1.3             # of a core; one of this machine is 1
  accelerators = 1
  learning = 20           # times as fast as what learns here
  inference = 15
  gbit_per_s = 25
  latency_ms = 0.1
  price_per_hour = 2.5

  [[hosts]]
  name = "actors"
  count = 10
  cores = 64"""
Tell = Callable[[str], None]


def declare(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `seedbed plan`; those of `seedbed train` come besides."""
    parser.usage = "seedbed plan NAME [--hosts FILE] [--json] [--fresh] [OPTIONS of seedbed train]"
    parser.add_argument(
        "--hosts", metavar="FILE", type=Path, help="the machines (default: this one)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--fresh", action="store_true", help="measure again what was measured before"
    )


def serve(arguments: Sequence[str], parser: argparse.ArgumentParser, tell: Tell) -> None:
    """Runs the command. Raises SeedbedError if the run cannot be, or does not fit the machines."""
    declare(parser)
    own, rest = parser.parse_known_args(arguments)
    from seedbed.config import flags
    from seedbed.config.settle import settle
    from seedbed.plan.hosts import for_machine, read_hosts
    from seedbed.plan.sizing import sized
    from seedbed.run.devices import dispatch_in_place
    from seedbed.run.programs import keep_programs
    from seedbed.run.sizes import AUTO

    flags.reject_near(rest, parser)
    given = flags.split_train_arguments(rest)
    if given.request.what is None and given.request.file is None:
        raise UsageError("name what to plan first: seedbed plan pong --hosts FILE")
    if given.request.run is not None or given.request.resume or given.cluster is not None:
        raise UsageError("a plan makes no run: leave out --run, --resume and --cluster")
    kinds = read_hosts(own.hosts) if own.hosts is not None else None
    # As a run does.
    keep_programs()
    dispatch_in_place()

    def change(found: TrainConfig) -> TrainConfig:
        found = flags.override(found, given.rest, False)
        return for_machine(found, kinds[0]) if kinds else found

    config = settle(given.request, change).config

    def progress(part: str) -> None:
        if sys.stderr.isatty():
            print(f"measuring {part} ...", file=sys.stderr, flush=True)  # noqa: T201

    # Shards that are measured are processes of their own, which have to be ended.
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitStatus.STOPPED))
    rates: dict[int, float] = {}
    try:
        if getattr(config.runtime, "actors", 0) == AUTO:
            config, rates, _ = sized(config, kinds, own.fresh, progress)
        fresh = own.fresh and not rates
        kinds, subject, calibration, found = plan(config, kinds, fresh, progress)
    finally:
        signal.signal(signal.SIGTERM, former)
    if own.json:
        said = as_json(kinds, calibration, found)
        if rates:
            chosen = getattr(config.runtime, "actors", 0)
            said["actors"] = {"chosen": chosen, "env_steps_per_s": rates}
        tell(strict_json.dumps(said, indent=1))
    else:
        table = [*lines(config, kinds, subject, calibration, found), *_choice(config, rates)]
        tell("\n".join(table))


def plan(
    config: TrainConfig, kinds: Sequence[HostKind] | None, fresh: bool, progress: Tell
) -> tuple[list[HostKind], Subject, Calibration, Prediction]:
    """Calibrates and predicts; returns the machines, too, which are this one by default."""
    from seedbed.plan.calibration import calibrated, subject_of
    from seedbed.plan.hosts import HostKind, machines_of, require_fit, this_machine
    from seedbed.plan.predict import predict

    far = kinds is not None and len(machines_of(kinds)) > 1
    require_fit(kinds or [HostKind("here", usable_cores())], config.runtime)
    subject = subject_of(config, kinds)
    calibration = calibrated(config, far, fresh, progress)
    kinds = [this_machine(calibration)] if kinds is None else list(kinds)
    return kinds, subject, calibration, predict(subject, calibration, kinds)


def as_json(
    kinds: Sequence[HostKind], calibration: Calibration, found: Prediction
) -> dict[str, Any]:
    """Returns all that is told, as JSON types."""
    from seedbed.plan.costs import to_json

    return {
        "hosts": [vars(kind) for kind in kinds],
        "measured": to_json(calibration),
        "predicted": found._asdict(),
    }


def lines(
    config: TrainConfig,
    kinds: Sequence[HostKind],
    subject: Subject,
    calibration: Calibration,
    found: Prediction,
) -> Iterator[str]:
    """Yields the lines of the table, of at most 80 columns."""
    name = printable(config.name)
    machines = ", ".join(
        f"{kind.count} x {printable(kind.name)} ({kind.cores:g} cores)" for kind in kinds
    )
    yield f"{name}, {config.runtime.runtime}, on {machines}"[:80]
    yield ""
    yield f"measured on {calibration.machine}, {calibration.cores:g} cores"[:80]
    for what, cost in _costs(subject, calibration):
        yield f"  {what:<44} {1e3 * cost.wall_s:10.3f} ms on {cost.width:.1f} cores"
    yield ""
    yield "predicted"
    for what, value in _figures(subject, found):
        yield f"  {what:<44} {value:>10}"
    yield ""
    yield "busy"
    for what, load in found.loads.items():
        mark = "  <- saturates first" if what == found.saturated else ""
        yield f"  {printable(what)[:44]:<44} {100 * load:8.0f} %{mark}"
    if not found.saturated:
        yield "  nothing is saturated: parts wait for each other, or for the network"


def _costs(subject: Subject, calibration: Calibration) -> Iterator[tuple[str, Cost]]:
    if (fused := calibration.fused) is not None:
        yield f"a rollout of {fused.steps:,} steps", fused.rollout
        yield "the updates of an iteration", fused.update
    if (acting := calibration.acting) is not None and subject.sizes is not None:
        size = subject.sizes.group_size
        yield f"a step of {size} environments", acting.step
        for call in (acting.calls[0], acting.calls[-1]):
            yield f"acting for {call.groups * size} environments", call.program
        yield "a gradient" if calibration.shards else "the updates of a batch", acting.update
        if acting.draw.cpu_s:
            yield "drawing a batch from replay", acting.draw
    if (stream := calibration.stream) is not None:
        yield "a timestep over TLS, at the learner", stream.take


def _figures(subject: Subject, found: Prediction) -> Iterator[tuple[str, str]]:
    yield "environment steps/s", f"{found.env_steps_per_s:,.0f}"
    if subject.frame_skip != 1:
        yield "frames/s", f"{found.frames_per_s:,.0f}"
    yield "updates/s", f"{found.updates_per_s:,.1f}"
    for what, value, form in (
        ("action latency p50, ms", found.action_p50_ms, ".2f"),
        ("action latency p95, ms", found.action_p95_ms, ".2f"),
        ("environments of an inference call", found.rows_per_call, ",.0f"),
        ("lag, updates", found.lag_mean, ".1f"),
        ("cores busy", found.cores_busy, ",.1f"),
        ("MB/s between machines", found.bytes_per_s / 1e6 or None, ",.1f"),
        ("gradients discarded, %", _percent(found.discarded_share), ".1f"),
        ("cost of 1e9 frames", found.cost_of_1e9_frames, ",.2f"),
    ):
        if value is not None:
            yield what, format(value, form)


def _choice(config: TrainConfig, rates: dict[int, float]) -> Iterator[str]:
    """Yields the rates among which --actors auto has chosen."""
    if rates:
        yield ""
        yield "environment steps/s by the number of actors"
    for actors, rate in rates.items():
        mark = "  <- chosen" if actors == getattr(config.runtime, "actors", 0) else ""
        yield f"  {actors:<44} {rate:10,.0f}{mark}"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
