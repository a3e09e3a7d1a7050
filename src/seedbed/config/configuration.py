"""The configuration of a run, and the table of the runtimes that it may name."""

from __future__ import annotations

import dataclasses

from seedbed.envs.host.contract import HostEnvConfig
from seedbed.run.options import CentralConfig, FusedConfig, ParamServerConfig, RuntimeConfig
from seedbed.run.weights import Weights
from seedbed.types import Agent, Environment


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The configuration of a run: environment, agent and runtime, each with its options."""

    env: HostEnvConfig | Environment
    agent: Agent
    runtime: RuntimeConfig
    name: str = ""  # the name that the user asked for, such as pong/impala
    start: Weights | None = None  # what a new run begins with; None is random weights


RUNTIMES: dict[str, type[RuntimeConfig]] = {
    kind.runtime: kind for kind in (CentralConfig, FusedConfig, ParamServerConfig)
}
"""The options of each runtime, by the name that `--runtime` takes and a saved configuration has.

The module `seedbed.NAME.train` trains in it.
"""
