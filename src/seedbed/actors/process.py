"""An actor process of this machine, as the learner sees it, and how it is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from seedbed.actors.child import ChildProcess
from seedbed.actors.slots import SlotLayout, spec_from_json
from seedbed.envs.host import registry
from seedbed.envs.host.contract import HostEnvConfig
from seedbed.types import SeedbedError

_MODULE = "seedbed.actors.actor"


@dataclasses.dataclass(frozen=True)
class Launcher:
    """The settings that all actor processes of a pool share; raises SeedbedError if the sizes do not work."""

    env: HostEnvConfig
    envs_per_group: int
    groups: int  # of an actor; one steps while another waits for actions
    seed: int
    niceness: int = 0  # of the processes, as in nice(1)
    allow: tuple[str, ...] | None = None  # modules whose callables may make environments; None: all

    def __post_init__(self) -> None:
        if self.envs_per_group < 1 or self.groups < 1:
            raise SeedbedError(
                f"actors with {self.groups} groups of {self.envs_per_group} environments do not work; "
                "take at least one of each"
            )

    def groups_of(self, actor: int) -> range:
        """Returns the pool's groups that an actor serves. Any thread may call this."""
        return range(actor * self.groups, (actor + 1) * self.groups)

    def start(self, actor: int, lives: Sequence[int]) -> ActorProcess:
        """Starts a process for an actor, whose groups begin these lives; only groups in life 0 are seeded.

        Raises SeedbedError if it cannot. Any thread may call this.
        """
        job = {
            "env": registry.to_json(self.env),
            "num_envs": self.envs_per_group,
            "seed": self.seed,
            "niceness": self.niceness,
            "allow": self.allow,
            "actor": actor,
            "lives": list(lives),
        }
        return ActorProcess(job, self.groups_of(actor))


class ActorProcess(ChildProcess):
    """A running actor process. Only the pool's thread uses it, but for `pid` and `cpu_seconds`.

    The constructor starts the process, and raises SeedbedError if it cannot.
    """

    def __init__(self, job: dict[str, Any], groups: range) -> None:
        super().__init__(_MODULE, job, groups, job["lives"])
        self._number = job["actor"]

    def _take(self, message: dict[str, Any]) -> None:
        self.spec = spec_from_json(message["spec"])

    def share(self, layout: SlotLayout) -> None:
        """Makes the shared memory and doorbells of the groups, and sends them to the actor.

        Another spec than the layout's is a fault. An actor that does not take what is sent is killed. Call
        from the pool's thread only.
        """
        if self.spec == layout.spec:
            super().share(layout)
            return
        self.fault = SeedbedError(
            f"actor {self._number} has another environment spec, {self.spec}, than the first, "
            f"{layout.spec}"
        )
