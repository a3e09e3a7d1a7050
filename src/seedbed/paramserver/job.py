"""What the processes of a run are told, in its folder: the coordinator writes it before it starts them."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from seedbed import strict_json
from seedbed.actors.slots import spec_from_json, spec_to_json
from seedbed.envs.host import registry
from seedbed.envs.host.contract import HostEnvConfig
from seedbed.files import load_json, write_json
from seedbed.paramserver.directory import JOB
from seedbed.paramserver.plan import Plan
from seedbed.printable import printable
from seedbed.run.encoding import BOUND, decode, decode_shapes, encode, encode_shapes
from seedbed.run.folder import ROLES
from seedbed.run.options import ParamServerConfig
from seedbed.run.stacking import stacked_spec
from seedbed.run.trust import Trust
from seedbed.streams.addresses import Listening, listening_ports
from seedbed.strict_json import revived
from seedbed.types import Agent, EnvSpec, SeedbedError, Tree, bind


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
    trusted: bool = (
        False  # whether the user trusts the run's folder, whoever can write it; not written
    )

    def listening(self, hosted: bool) -> Listening | None:
        """Returns where roles listen for other machines, None if there are none.

        Those that a host has started listen at all addresses of its machine.
        """
        if not self.config.listen:
            return None
        found = listening_ports(self.config.listen)
        return found._replace(host="") if hosted else found

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
        path = (folder or self.folder(run)) / JOB
        try:
            # Others must not be able to write what the run's roles import.
            path.parent.mkdir(0o755, exist_ok=True)
            write_json(path, self._content())
        except OSError as error:
            raise SeedbedError(
                f"{printable(path)} cannot be written ({error.strerror}): name another folder with --run"
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
            written = load_json(self.folder(run) / JOB)
        except (OSError, ValueError):
            return False
        return written == strict_json.loads(strict_json.dumps(self._content()))

    @classmethod
    def read(cls, run: Path, folder: Path | None = None, trusted: bool = False) -> Job:
        """Reads the job of a run, in its folder `roles` or another.

        Raises SeedbedError if there is none, and Untrusted if it names code of users, and others could have
        written it, unless the user has `trusted` the run.
        """
        path = (folder or cls.folder(run)) / JOB
        try:
            content, trust = Trust.reading(run, path, trusted)
            content = revived(content)
            env, spec = registry.from_json(content["env"]), spec_from_json(content["spec"])
            trust.require_env(env)
            trust.require_agent(content["agent"])
            agent = bind(decode(content["agent"], trust), stacked_spec(spec, env.frame_stack))
            gradient = decode_shapes(content["gradient"], trust)
            return cls(env, agent, spec, decode(content["config"], trust), gradient, trusted)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SeedbedError(
                f"{printable(path)} cannot be read ({error}): the run has another runtime, or has not begun"
            ) from error
