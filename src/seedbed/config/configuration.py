"""The configuration of a run, and the table of the runtimes that it may name."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from seedbed.envs.host.contract import HostEnvConfig
from seedbed.run.options import CentralConfig, FusedConfig, ParamServerConfig, RuntimeConfig
from seedbed.types import Agent, Environment


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The configuration of a run: environment, agent and runtime, each with its options."""

    env: HostEnvConfig | Environment
    agent: Agent
    runtime: RuntimeConfig
    name: str = ""  # the name that the user asked for, such as pong/impala


class Runtime(NamedTuple):
    """A runtime: its options, and the module whose `train` trains."""

    options: type[RuntimeConfig]
    module: str


RUNTIMES = {
    "central": Runtime(CentralConfig, "seedbed.central.train"),
    "fused": Runtime(FusedConfig, "seedbed.fused.train"),
    "paramserver": Runtime(ParamServerConfig, "seedbed.paramserver.train"),
}
"""The runtimes, by the name that `--runtime` takes and a saved configuration has."""


def runtime_of(options: RuntimeConfig) -> str:
    """Returns the name of the runtime of some options."""
    (name,) = (name for name, each in RUNTIMES.items() if each.options is type(options))
    return name
