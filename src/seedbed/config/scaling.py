"""The parts of a run that depend on the kind of device: its sizes, and the dtype of its networks.

A GPU wants many more environments than a CPU; `FACTORS` is the whole of that. Presets and the defaults of
other environments are written for a CPU, and what a user names on the command line replaces both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from seedbed.agents.base import BaseAgent
from seedbed.config.configuration import TrainConfig
from seedbed.run.devices import (
    kind_of_device,
    multiplies_bfloat16,
    share_accelerators,
    start_jax,
)
from seedbed.run.folder import RunFolder
from seedbed.run.options import FusedConfig, ParamServerConfig
from seedbed.run.trust import AGENTS

_REPLAY = {"envs": 8, "unroll": 1 / 8}
FACTORS: dict[str, dict[str, dict[str, float]]] = {
    "gpu": {
        "ppo": {"agent.batch": 8, "agent.minibatches": 2, "steps": 4},
        "dqn": _REPLAY,
        "r2d2": _REPLAY,
        "sac": _REPLAY,
    }
}
"""Factors of options in the fused runtime, by platform (as `jax.Device` names it) and agent.

A GPU steps a few thousand environments in the time of one. PPO gets eight times as many, in twice as many
minibatches, for four times as many steps: as many gradients as on a CPU, each from four times as many rows,
so step sizes stay. Agents that learn from replay get as many transitions between updates as on a CPU, of more
environments: one step of each. IMPALA's gradient is summed over a batch, whose size therefore stays.
"""


def for_this_device(config: TrainConfig) -> TrainConfig:
    """Returns a configuration that was written for a CPU, with the sizes for this host's devices.

    Only the fused runtime and agents of `AGENTS` have sizes that depend on them. For the fused runtime it
    starts JAX.
    """
    return sized(config, _values(config))


def everywhere(config: TrainConfig) -> list[TrainConfig]:
    """Returns a configuration that was written for a CPU, with the sizes for each kind of device."""
    return [config, *(sized(config, _values(config, platform)) for platform in FACTORS)]


def sized(config: TrainConfig, values: Mapping[str, int]) -> TrainConfig:
    """Returns a configuration with other sizes, by names as on the command line."""
    of_agent = {
        name.partition(".")[2]: n for name, n in values.items() if name.startswith("agent.")
    }
    of_runtime = {name: n for name, n in values.items() if not name.startswith("agent.")}
    return dataclasses.replace(
        config,
        agent=dataclasses.replace(config.agent, **of_agent),  # type: ignore[type-var]
        runtime=dataclasses.replace(config.runtime, **of_runtime),
    )


def note(plain: TrainConfig, config: TrainConfig) -> str | None:
    """Returns a line about the sizes of `config` that `for_this_device(plain)` has; None if there are none.

    `config` may have other values where the user has named them.
    """
    kept = [
        f"{name} {value:,} (on a CPU {_value(plain, name):,})"
        for name, value in _values(plain).items()
        if _value(config, name) == value
    ]
    return f"sizes for this {start_jax().upper()}: {', '.join(kept)}" if kept else None


def with_compute_dtype(config: TrainConfig, run: Path | None) -> tuple[TrainConfig, str | None]:
    """Replaces `compute_dtype` auto by the dtype that this host's devices are fast at; starts JAX for it.

    The dtype is bfloat16 if all devices are faster with it. A run that is resumed, whose folder is `run`,
    keeps its own. Also returns a line about the choice; None if the agent's dtype is not auto.
    """
    agent = config.agent
    if not isinstance(agent, BaseAgent) or agent.compute_dtype != "auto":
        return config, None
    former = {} if run is None else RunFolder.read(run).read_config().get("agent")
    began = former.get("compute_dtype") if isinstance(former, dict) else None
    if began is not None:
        dtype, reason = began, "as the run began"
    else:
        if isinstance(config.runtime, ParamServerConfig):
            share_accelerators()
        start_jax()
        devices = jax.local_devices()
        dtype = "bfloat16" if all(map(multiplies_bfloat16, devices)) else "float32"
        reason = " and ".join(sorted(set(map(kind_of_device, devices))))
    agent = dataclasses.replace(agent, compute_dtype=dtype)
    return dataclasses.replace(config, agent=agent), f"compute dtype: {dtype} (auto: {reason})"


def _values(config: TrainConfig, platform: str = "") -> dict[str, int]:
    """Returns the options that depend on the platform, by name, with their values there; "": on this host."""
    if not isinstance(config.runtime, FusedConfig):
        return {}
    kind = f"{type(config.agent).__module__}:{type(config.agent).__name__}"
    agent = next((name for name, path in AGENTS.items() if path == kind), "")
    factors = FACTORS.get(platform or start_jax(), {}).get(agent, {})
    return {name: max(1, round(factor * _value(config, name))) for name, factor in factors.items()}


def _value(config: TrainConfig, name: str) -> Any:
    """Returns the value of an option, named as on the command line."""
    part, _, field = name.rpartition(".")
    return getattr(config.agent if part else config.runtime, field)
