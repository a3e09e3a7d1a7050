"""What the processes of a run are told, in its folder: the coordinator writes it before it starts them."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

from seedbed.actors.slots import spec_from_json, spec_to_json
from seedbed.files import write_json
from seedbed.paramserver.directory import FOLDER
from seedbed.paramserver.plan import Plan
from seedbed.run.encoding import BOUND, decode, encode
from seedbed.types import Agent, SeedbedError, bind

_NAME = "job.json"


@dataclasses.dataclass(frozen=True)
class Job:
    """A run, as its roles have to know it."""

    agent: Agent  # bound
    parameter_shards: int
    most_lag: int  # gradients that may have been applied since a gradient's parameters were pulled
    host: str | None  # at which roles listen for other machines; None if there are none

    @functools.cached_property
    def plan(self) -> Plan:
        """How the learner state is divided."""
        return Plan(self.agent, self.parameter_shards)

    def write(self, run: Path) -> None:
        """Writes the job into a run's folder. Raises SeedbedError if the disk refuses."""
        assert self.agent.spec is not None
        path = run / FOLDER / _NAME
        content = {
            "agent": encode(self.agent, BOUND),
            "spec": spec_to_json(self.agent.spec),
            "parameter_shards": self.parameter_shards,
            "most_lag": self.most_lag,
            "host": self.host,
        }
        try:
            path.parent.mkdir(exist_ok=True)
            write_json(path, content)
        except OSError as error:
            raise SeedbedError(
                f"{path} cannot be written ({error.strerror}): name another folder with --run"
            ) from error

    @classmethod
    def read(cls, run: Path) -> Job:
        """Reads the job of a run; raises SeedbedError if there is none."""
        path = run / FOLDER / _NAME
        try:
            content = json.loads(path.read_text())
            agent = bind(decode(content.pop("agent")), spec_from_json(content.pop("spec")))
            return cls(agent, **content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SeedbedError(
                f"{path} cannot be read ({error}): the run has another runtime, or has not begun"
            ) from error
