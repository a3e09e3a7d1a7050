"""Whose code may be imported because a run's folder names it.

A folder that somebody else could have written is data. Seedbed's own classes come from the table `OWN`, and
nothing else that such a folder names is imported unless the user says so.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import operator
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seedbed.envs.host.contract import HostEnvConfig
from seedbed.envs.host.registry import code_of
from seedbed.envs.names import ON_DEVICE
from seedbed.files import json_of, open_regular
from seedbed.named import import_named, is_local
from seedbed.printable import printable
from seedbed.streams.credentials import ELSEWHERE
from seedbed.types import Environment, SeedbedError

OPTION = "--trust-run"
"""The option with which a user trusts a folder."""
HELP = "import the code that the run's folder names, although others could have written the folder"
"""What `--trust-run` does."""
AGENTS = {
    "impala": "seedbed.agents.impala:Impala",
    "ppo": "seedbed.agents.ppo:Ppo",
    "apg": "seedbed.agents.apg:Apg",
    "ars": "seedbed.agents.ars:Ars",
    "awr": "seedbed.agents.awr:Awr",
    "dqn": "seedbed.agents.dqn:Dqn",
    "es": "seedbed.agents.es:Es",
    "r2d2": "seedbed.agents.r2d2:R2d2",
    "sac": "seedbed.agents.sac:Sac",
    "vmpo": "seedbed.agents.vmpo:Vmpo",
}
"""Paths `module:Class` of Seedbed's own agents, by name."""
OWN = frozenset(
    {
        *AGENTS.values(),
        *ON_DEVICE.values(),
        *(
            f"seedbed.envs.device.probes:{name}Probe"
            for name in ("Delay", "Truncation", "Repeat", "TMaze", "Mask", "Privileged")
        ),
        *(
            f"seedbed.envs.device.changes:{name}"
            for name in ("_ScaleReward", "_ClipAction", "_NormaliseObservation", "_Delay")
        ),
        *(
            f"seedbed.envs.device.wrappers:{name}"
            for name in ("Wrapper", "_TimeLimit", "_AutoReset", "_EpisodeStatistics")
        ),
        *(
            f"seedbed.envs.device.randomisation:{name}"
            for name in ("_Randomise", "Scale", "Offset")
        ),
        "seedbed.envs.device.functional:Functional",
        *(
            f"seedbed.envs.device.robots.{name.lower()}:{name}Scales"
            for name in ("Go1", "Spot", "T1", "G1", "H1", "Berkeley", "Apollo", "Op3", "Legged")
        ),
        "seedbed.envs.device.robots.legged:Legged",
        "seedbed.envs.device.robots.go1_tricks:GetupScales",
        "seedbed.envs.device.robots.go1_tricks:HandstandScales",
        "seedbed.envs.device.robots.leap:LeapScales",
        "seedbed.envs.device.robots.g1_motion:MotionScales",
        "seedbed.run.options:ParamServerConfig",
        # What gradients are made of.
        "seedbed.agents.base:Gradient",
        "seedbed.agents.base:Params",
        "seedbed.agents.base:Sums",
        "seedbed.agents.sac:Weights",
        "seedbed.agents.vmpo:Duals",
        "seedbed.ops.statistics:Deviations",
    }
)
"""Seedbed's own classes that a run's folder may name, as `module:Class`."""
MOVED = {"seedbed.paramserver.options:ParamServerConfig": "seedbed.run.options:ParamServerConfig"}
"""What folders of earlier versions name, and where it is now."""


def declare(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--trust-run` to a command's parser."""
    parser.add_argument(OPTION, action="store_true", help=HELP)


class Untrusted(SeedbedError):
    """Raised for code that a folder names which others could have written; `reason` is without a remedy."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}: read that code, then add --trust-run (in Python trust=True)")
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class Trust:
    """The names that a file of a run's folder may use."""

    run: Path
    file: Path  # config.json or job.json, somewhere in the run's folder
    given: bool = False  # whether the user trusts the folder, whoever can write it
    # How others could have written the file, in words; "" if nobody could.
    distrust: str = "nobody has looked who can write it"

    @classmethod
    def reading(cls, run: Path, file: Path, given: bool = False) -> tuple[Any, Trust]:
        """Reads a JSON file in a run's folder; returns its value, and whether the names in it are trusted.

        Who could have written it is told by what was opened, and not by what has that path afterwards. Raises
        OSError and ValueError as `load_json` does.
        """
        with contextlib.ExitStack() as opened:
            folders, at, found = list[int](), Path(), list[tuple[Path, os.stat_result]]()
            for part in (run, *file.relative_to(run).parts[:-1]):
                # O_PATH, where there is one, needs no right to read the folder.
                above, look = folders[-1:], getattr(os, "O_PATH", os.O_RDONLY)
                flags = look | os.O_CLOEXEC | os.O_DIRECTORY
                folders.append(os.open(part, flags, dir_fd=above[0] if above else None))
                opened.callback(os.close, folders[-1])
                at /= part
                found.append((at, os.fstat(folders[-1])))
            content = opened.enter_context(open_regular(Path(file.name), folders[-1]))
            found.append((file, os.fstat(content.fileno())))
            sent = os.access(ELSEWHERE, os.F_OK, dir_fd=folders[0])
            distrust = "another machine has sent it" if sent else _writable_by_others(found)
            return json_of(content), cls(run, file, given, distrust)

    def load(self, name: str) -> type:
        """Imports the class `module:Class`.

        Raises Untrusted if it is neither Seedbed's own nor in a folder that only this user can write,
        SeedbedError if it cannot be imported or is no class.
        """
        if not isinstance(name, str) or name.count(":") != 1:
            raise SeedbedError(
                f"{printable(self.file)} names the class {name!r}: it must be module:Class"
            )
        name = MOVED.get(name, name)
        module, _, attribute = name.partition(":")
        own = name in OWN
        if not own:
            self.require(name)
        try:
            imported = importlib.import_module(module) if own else import_named(module)
            found = operator.attrgetter(attribute)(imported)
        except (ImportError, AttributeError, ValueError) as error:
            remedy = "start in the folder of its file, or name that in PYTHONPATH"
            if is_local(module, attribute):
                module = "my_module" if module == "__main__" else module
                own_name = f"{module}:{attribute.rpartition('.')[2]}"
                remedy = (
                    "it is of a script or notebook, or of a function: open the run there, or put the class "
                    f"into a module, and into {printable(self.file)} its name, such as {own_name}"
                )
            elif module.startswith("seedbed."):
                remedy = "go on with the version of seedbed that began the run, or start a new run"
            raise SeedbedError(
                f"the run's class {name} cannot be imported ({error}): {remedy}"
            ) from error
        if not isinstance(found, type):
            raise SeedbedError(
                f"{printable(self.file)} names {name}, which is no class: restore the file"
            )
        return found

    def require_env(self, env: HostEnvConfig | Environment) -> None:
        """Raises Untrusted if an environment that the file describes is code that may not be imported."""
        if name := code_of(env):
            self.require(name)

    def require_agent(self, described: Mapping[str, Any]) -> None:
        """Raises Untrusted if an agent, as the file describes it, has a torso that may not be imported."""
        if ":" in (torso := str(described.get("torso", ""))):
            self.require(torso)

    def require(self, name: str) -> None:
        """Tells on stderr that code is imported because of the file; raises Untrusted if it may not be."""
        if not self.given and self.distrust:
            raise Untrusted(
                f"{printable(self.file)} names the code {name}, which is not imported because {self.distrust}"
            )
        _tell(name, printable(self.file), self.file.absolute())


def _writable_by_others(opened: Sequence[tuple[Path, os.stat_result]]) -> str:
    """Returns in words how somebody else could have written what was opened, "" if nobody could."""
    me = os.geteuid()
    for path, found in opened:
        if found.st_uid != me:
            return f"{printable(path)} belongs to the user {found.st_uid}, and you are {me}"
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return (
                f"others can write {printable(path)} (its mode is {stat.S_IMODE(found.st_mode):o})"
            )
    return ""


@functools.cache
def _tell(name: str, shown: str, _: Path) -> None:
    """Tells on stderr, once in a process, what is imported because of the file at a path."""
    if sys.stderr is not None:
        sys.stderr.write(f"importing {printable(name)}, which {shown} names\n")
