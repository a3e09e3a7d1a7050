"""Who runs what: the machine on which each role of a run has its process, as a pure function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

HERE = ""
"""The name of the machine that coordinates, which has no host."""
KINDS = ("parameters", "replay", "learners")
"""The kinds of roles that have a machine."""


class Machine(NamedTuple):
    """A machine that runs roles, or a part of one."""

    name: str
    cores: float
    accelerators: int = 0
    only: tuple[str, ...] = KINDS  # the kinds of roles that it takes


class Wish(NamedTuple):
    """A role that needs a machine."""

    name: str
    kind: str  # one of `KINDS`
    cores: float  # that it keeps busy


def place(
    wishes: Sequence[Wish], machines: Iterable[Machine], placed: Mapping[str, tuple[Wish, str]]
) -> dict[str, tuple[Wish, str]]:
    """Returns where each wished role goes, by its name, and where the `placed` ones are.

    Learners, which need most, choose first. A role goes where the fewest of its kind are, so that the loss of
    a machine costs as little as it can: learners for each accelerator, if the run has some, and else for each
    core; shards for each machine that has a core. Among equals it takes another machine than that which
    coordinates, so that nobody's bytes pass through it, then the one with the most cores to spare. It depends
    on the order of the names, not on that of the arguments. Raises ValueError if no machine takes a kind.
    """
    machines = sorted(machines)
    found = dict(placed)
    accelerated = any(each.accelerators for each in machines)
    order = {kind: number for number, kind in enumerate(("learners", "parameters", "replay"))}
    for wish in sorted(wishes, key=lambda each: (order[each.kind], _natural(each.name))):

        def cost(machine: Machine, wish: Wish = wish) -> tuple[float, bool, float, str]:
            mine = [each for each, where in found.values() if where == machine.name]
            same = sum(each.kind == wish.kind for each in mine)
            free = machine.cores - sum(each.cores for each in mine)
            size = 1.0 if machine.cores else 0.0
            if wish.kind == "learners":
                size = machine.accelerators if accelerated else machine.cores
            crowd = (same + 1) / size if size else float("inf")
            return (crowd, machine.name == HERE, -free, machine.name)

        takers = [machine for machine in machines if wish.kind in machine.only]
        if not takers:
            raise ValueError(f"no machine takes {wish.kind}")
        found[wish.name] = (wish, min(takers, key=cost).name)
    return found


def _natural(name: str) -> tuple[str, int]:
    """Returns a key that has learner-2 before learner-10."""
    kind, _, number = name.rpartition("-")
    return kind, int(number) if number.isdecimal() else 0
