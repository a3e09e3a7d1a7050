"""What the processes of a run are told, in its folder: the coordinator writes it before it starts them."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from seedbed.actors.slots import spec_from_json, spec_to_json
from seedbed.envs.host import registry
from seedbed.envs.host.contract import HostEnvConfig
from seedbed.files import write_json
from seedbed.paramserver.options import ParamServerConfig
from seedbed.paramserver.plan import Plan
from seedbed.run.encoding import BOUND, decode, decode_shapes, encode, encode_shapes
from seedbed.run.folder import ROLES
from seedbed.run.stacking import stacked_spec
from seedbed.types import Agent, EnvSpec, SeedbedError, Tree, bind

_NAME = "job.json"


@dataclasses.dataclass(frozen=True)
class Job:
    """A run, as its roles have to know it."""

    env: HostEnvConfig
    agent: Agent  # bound
    spec: EnvSpec  # of single frames
    config: ParamServerConfig
    gradient: (
        Tree  # the shapes of the agent's gradient; tracing it takes seconds, so one process does it
    )

    @property
    def host(self) -> str | None:
        """Where roles of this machine listen for others; None if there are none."""
        return self.config.listen or None

    @property
    def frame_stack(self) -> int:
        """The number of frames that the agent sees as one."""
        return self.env.frame_stack

    @functools.cached_property
    def plan(self) -> Plan:
        """How the learner state is divided."""
        return Plan(self.agent, self.config.parameter_shards, self.gradient)

    @staticmethod
    def folder(run: Path) -> Path:
        """Returns the folder, in a run's, with a folder for each role."""
        return run / ROLES

    def write(self, run: Path, folder: Path | None = None) -> None:
        """Writes the job into a run's folder `roles`, or another; raises SeedbedError if the disk refuses."""
        path = (folder or self.folder(run)) / _NAME
        try:
            path.parent.mkdir(exist_ok=True)
            write_json(path, self._content())
        except OSError as error:
            raise SeedbedError(
                f"{path} cannot be written ({error.strerror}): name another folder with --run"
            ) from error

    def _content(self) -> dict[str, Any]:
        return {
            "env": registry.to_json(self.env),
            "agent": encode(self.agent, BOUND),
            "spec": spec_to_json(self.spec),
            "config": encode(self.config),
            "gradient": encode_shapes(self.gradient),
        }

    def is_written(self, run: Path) -> bool:
        """Returns whether the job in a run's folder is this one, with all its options."""
        try:
            written = json.loads((self.folder(run) / _NAME).read_text())
        except (OSError, ValueError):
            return False
        return written == json.loads(json.dumps(self._content()))

    @classmethod
    def read(cls, run: Path, folder: Path | None = None) -> Job:
        """Reads the job of a run, in its folder `roles` or another; raises SeedbedError if there is none."""
        path = (folder or cls.folder(run)) / _NAME
        try:
            content = json.loads(path.read_text())
            env, spec = registry.from_json(content["env"]), spec_from_json(content["spec"])
            agent = bind(decode(content["agent"]), stacked_spec(spec, env.frame_stack))
            return cls(
                env, agent, spec, decode(content["config"]), decode_shapes(content["gradient"])
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SeedbedError(
                f"{path} cannot be read ({error}): the run has another runtime, or has not begun"
            ) from error
