"""README's table of agents is what the code says. Any agent runs in the fused runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from seedbed.agents.apg import Apg
from seedbed.agents.ars import Ars
from seedbed.agents.awr import Awr
from seedbed.agents.dqn import Dqn
from seedbed.agents.es import Es
from seedbed.agents.impala import Impala
from seedbed.agents.ppo import Ppo
from seedbed.agents.r2d2 import R2d2
from seedbed.agents.sac import Sac
from seedbed.agents.vmpo import Vmpo
from seedbed.run.options import CentralConfig, ParamServerConfig
from seedbed.run.sizes import require_sizes
from seedbed.types import (
    Agent,
    ArraySpec,
    Box,
    Discrete,
    EnvSpec,
    MultiDiscrete,
    SeedbedError,
    bind,
)

README = Path(__file__).parent.parent / "README.md"
AGENTS = (Impala, Ppo, Dqn, R2d2, Sac, Vmpo, Awr, Apg, Es, Ars)
VECTOR, IMAGE = ArraySpec((4,), np.float32), ArraySpec((84, 84, 4), np.uint8)
ACTIONS = {
    "a choice": Discrete(3),
    "several": MultiDiscrete((2, 3)),
    "real": Box((2,), low=(-1.0, -1.0), high=(1.0, 1.0)),
}
OBSERVATIONS = {"vectors": VECTOR, "images": IMAGE, "both": {"a": VECTOR, "b": IMAGE}}


def fits(attempt: Callable[[], Any]) -> bool:
    """Whether something is not refused."""
    try:
        attempt()
    except SeedbedError:
        return False
    return True


def learns(agent: Agent, action: Any, observation: Any) -> bool:
    spec = EnvSpec(observation=observation, action=action)
    return fits(lambda: jax.eval_shape(bind(agent, spec).init, jax.random.key(0)))


def row(agent: Agent) -> list[str]:
    """The cells of an agent: its name, actions, observations, memory and runtimes."""
    actions = [name for name, action in ACTIONS.items() if learns(agent, action, VECTOR)]
    own = ACTIONS[actions[0]]
    observations = [name for name, each in OBSERVATIONS.items() if learns(agent, own, each)]
    fields = {field.name for field in dataclasses.fields(agent)}  # type: ignore[arg-type]
    memory = "on request" if "recurrent" in fields else "always" if "lstm_size" in fields else ""
    runtimes = {
        "fused": lambda: require_sizes(agent),
        "central": lambda: CentralConfig().fitted(agent),
        "central with remote actors": lambda: CentralConfig(listen="127.0.0.1:0").fitted(agent),
        "parameter servers": lambda: ParamServerConfig().fitted(agent),
    }
    possible = [name for name, attempt in runtimes.items() if fits(attempt)]
    return [
        type(agent).__name__.upper(),
        *map(", ".join, (actions, observations)),
        memory,
        ", ".join(possible),
    ]


def table() -> str:
    cells = [["agent", "actions", "observations", "memory", "runtimes"], ["---"] * 5]
    cells += [row(agent()) for agent in AGENTS]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


@pytest.mark.slow
def test_the_table_of_agents_is_what_the_code_says():
    assert table() in README.read_text(), table()
