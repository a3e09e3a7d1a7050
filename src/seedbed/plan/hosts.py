"""The machines of a plan: a file that the user writes, TOML with a table `[[hosts]]` for each kind."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seedbed.config.configuration import TrainConfig
from seedbed.nearest import require_options
from seedbed.paramserver.placement import KINDS
from seedbed.plan.costs import Calibration
from seedbed.printable import printable
from seedbed.run.options import GROUPS, CentralConfig, ParamServerConfig, RuntimeConfig
from seedbed.run.sizes import usual_actors
from seedbed.types import SeedbedError, on_policy

EXAMPLE = """[[hosts]]
name = "learner"
cores = 32
price_per_hour = 1.5

[[hosts]]
name = "actors"
count = 10
cores = 64"""


@dataclasses.dataclass(frozen=True)
class HostKind:
    """Some machines that are alike."""

    name: str
    cores: float
    count: int = 1
    speed: float = 1.0
    """How fast a core is, in units of one of the machine where costs are measured."""
    accelerators: int = 0
    inference: float = 1.0
    """How many times as fast an accelerator acts as what acts here."""
    learning: float = 1.0
    """How many times as fast an accelerator learns as what learns here."""
    gbit_per_s: float = 10.0
    """The rate of the network card, in each direction."""
    latency_ms: float = 0.1
    """That of the network, one way."""
    price_per_hour: float = 0.0
    """Of one machine, in any currency."""
    actors: int | None = None
    """Processes of `seedbed actor` on each; by default one a core, and none on the learner's machine."""
    only: tuple[str, ...] = KINDS
    """The kinds of roles of a parameter server that they take, as `seedbed host --only`."""


def read_hosts(path: Path) -> list[HostKind]:
    """Reads a file of hosts; raises SeedbedError, which names what cannot be and the remedy."""
    if path.name.isdecimal() and not path.exists():
        raise SeedbedError(
            f"--hosts {path}: a plan takes a file with the machines here, which stand for those of the run"
        )
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SeedbedError(f"{printable(path)} cannot be read: {why}") from error
    except tomllib.TOMLDecodeError as error:
        raise SeedbedError(
            f"{printable(path)} is not TOML: {error}; write\n{_indented()}"
        ) from error
    tables = data.pop("hosts", None)
    if data or not isinstance(tables, list) or not tables:
        found = ", ".join(data) or "nothing else"
        raise SeedbedError(
            f"{printable(path)} has to have a table [[hosts]] for each kind of machine, and has {found}; "
            f"write\n{_indented()}"
        )
    kinds = [_kind(path, number, table) for number, table in enumerate(tables, 1)]
    names = [kind.name for kind in kinds]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SeedbedError(
            f"{printable(path)} names {twice!r} twice: give each kind a name of its own"
        )
    return kinds


def _indented() -> str:
    return "\n".join(f"  {line}" for line in EXAMPLE.splitlines())


def _kind(path: Path, number: int, table: Any) -> HostKind:
    fields = {field.name: field for field in dataclasses.fields(HostKind)}
    where = f"{printable(path)}, [[hosts]] {number}"
    if not isinstance(table, dict):
        raise SeedbedError(f"{where} is {table!r}: write a table")
    require_options(where, table, list(fields))
    for name in ("name", "cores"):
        if name not in table:
            raise SeedbedError(f"{where} has no {name}: add it, as in\n{_indented()}")
    values: dict[str, Any] = {}
    for name, value in table.items():
        values[name] = _checked(f"{where}, {name}", name, value)
    kind = HostKind(**values)
    for name in ("inference", "learning"):
        if name in table and not kind.accelerators:
            raise SeedbedError(
                f"{where} has `{name}`, which tells how fast its accelerators are, and it has none: add "
                "accelerators = 1, or leave it out"
            )
    return kind


_LEAST = {"count": 1, "accelerators": 0, "actors": 0, "latency_ms": 0.0, "price_per_hour": 0.0}
_MOST = {"count": 10_000, "accelerators": 1000, "actors": 10_000}
_MOST_CORES = 1e6


def _checked(where: str, name: str, value: Any) -> Any:
    """Returns a field's value; raises SeedbedError if it cannot be."""
    if name == "name":
        if not isinstance(value, str) or not value:
            raise SeedbedError(f"{where} is {value!r}: give a word")
        return value
    if name == "only":
        if not isinstance(value, list) or not value or any(each not in KINDS for each in value):
            raise SeedbedError(f"{where} is {value!r}: give a list of some of {', '.join(KINDS)}")
        return tuple(value)
    whole = name in ("count", "accelerators", "actors")
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise SeedbedError(f"{where} is {value!r}: give a {'whole ' * whole}number")
    least, most = _LEAST.get(name), _MOST.get(name, _MOST_CORES)
    if value > most:
        shown = value if value < 1e18 else "too large"
        raise SeedbedError(f"{where} is {shown}: it may be {most:g} at most")
    if not math.isfinite(value) or (value <= 0 if least is None else value < least):
        raise SeedbedError(
            f"{where} is {value}: it must be {'more than 0' if least is None else f'{least} or more'}"
        )
    return value if whole else float(value)


def machines_of(kinds: Sequence[HostKind]) -> list[HostKind]:
    """Returns the kind of every machine, in order."""
    return [kind for kind in kinds for _ in range(kind.count)]


def actors_of(kinds: Sequence[HostKind]) -> list[int]:
    """Returns the processes of `seedbed actor` on each machine; by default there are none on the first."""
    usual = [0, *(max(1, int(kind.cores)) for kind in kinds[1:])]
    return [n if kind.actors is None else kind.actors for n, kind in zip(usual, kinds, strict=True)]


def require_fit(kinds: Sequence[HostKind], runtime: RuntimeConfig) -> None:
    """Raises SeedbedError if a run with these options does not use the machines as they are described."""
    central, server = (isinstance(runtime, kind) for kind in (CentralConfig, ParamServerConfig))
    for kind in kinds:
        for field, wanted, used in (
            ("actors", kind.actors, central),
            ("only", kind.only != KINDS, server),
            ("inference", kind.inference != HostKind.inference, central or server),
        ):
            if wanted and not used:
                raise SeedbedError(
                    f"{printable(kind.name)} has `{field}`, which the {runtime.runtime} runtime does not "
                    "know: leave it out"
                )
    machines = machines_of(kinds)
    if server and kinds[0].only != KINDS:
        raise SeedbedError(
            f"{printable(kinds[0].name)} has `only`, and the machine that coordinates takes every kind: "
            "leave it out, or name another machine first"
        )
    if not isinstance(runtime, CentralConfig):
        return
    away = sum(actors_of(machines))
    if away and not runtime.listen:
        raise SeedbedError(
            f"{away} actors are on other machines, and the run does not listen: add --listen 0.0.0.0:4711, "
            "or leave other machines out of the hosts"
        )
    if away * GROUPS > runtime.stream_groups:
        raise SeedbedError(
            f"the hosts have {away * GROUPS} groups of environments, and stream_groups is "
            f"{runtime.stream_groups}: give --stream-groups {away * GROUPS}, or fewer actors"
        )
    if not away and not runtime.actors:
        raise SeedbedError(
            "the run listens and has no actors: name their machines with --hosts FILE, or give --actors 1"
        )


def for_machine(config: TrainConfig, kind: HostKind) -> TrainConfig:
    """Returns a configuration with the actors of a run on the learner's machine, where they are left open.

    Agents that act, stop and learn keep the number that fits their batch here.
    """
    runtime, experience = config.runtime, on_policy(config.agent)
    if not isinstance(runtime, CentralConfig) or runtime.actors or runtime.listen:
        return config
    if experience is not None and experience.synchronous:
        return config
    envs = runtime.fitted(config.agent).envs_per_actor
    each = runtime.steps // (envs * runtime.learners)
    actors = usual_actors(config.agent, each, max(1, int(kind.cores)))
    return dataclasses.replace(config, runtime=dataclasses.replace(runtime, actors=actors))


def this_machine(calibration: Calibration) -> HostKind:
    """Returns the machine where costs were measured."""
    accelerators = int(calibration.platform != "cpu")
    return HostKind(name="here", cores=calibration.cores, accelerators=accelerators)
