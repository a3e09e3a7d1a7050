"""The commands of other systems that fused.py compares training with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PEERS = Path("~/.cache/seedbed/peers").expanduser()
SB3_ENVS = 8


def gymnasium_id(preset: str) -> str:
    """Names the preset's task in Gymnasium."""
    from seedbed.config import resolve

    return resolve.train_config(preset).env.gymnasium_id  # type: ignore[union-attr]


def peer_commands(preset: str, run: Path) -> dict[str, list[str]]:
    """Returns the peers' commands: each as it is published, and with hyperparameters equal to ours."""
    from seedbed.config.saved import saved_config
    from seedbed.run.folder import RunFolder

    config = saved_config(RunFolder.read(run))
    agent: Any = config.agent
    # The peers have no shared network: where ours is one, the value gets a second of its size.
    layers = ["--policy", *map(str, agent.hidden_sizes)]
    layers += ["--value", *map(str, agent.value_sizes or agent.hidden_sizes)]
    layers += ["--activation", agent.activation]
    brax = [str(PEERS / "brax" / "bin" / "python"), str(HERE / "peers" / "brax_ppo.py")]
    brax += ["--environment", preset.partition("/")[0]]
    brax_equal = {
        "num-envs": agent.batch,
        "unroll": agent.unroll,
        "batch": agent.batch // agent.minibatches,
        "minibatches": agent.minibatches,
        "updates": agent.epochs,
    }
    sb3 = [str(PEERS / "sb3" / "bin" / "python"), str(HERE / "peers" / "sb3_ppo.py")]
    sb3 += ["--env", gymnasium_id(preset)]
    sb3 += ["--options", json.dumps(config.env.gymnasium_options())]  # type: ignore[union-attr]
    rows = agent.batch * agent.unroll
    sb3_equal = {
        "num-envs": SB3_ENVS,  # a process each: more of them share the same cores
        "unroll": rows // SB3_ENVS,
        "batch": rows // agent.minibatches,
        "epochs": agent.epochs,
    }
    return {
        "brax": brax,
        "brax_equal": [*brax, *_options(brax_equal), *layers],
        "sb3": sb3,
        "sb3_equal": [*sb3, *_options(sb3_equal), *layers],
    }


def _options(named: dict[str, int]) -> list[str]:
    return [f"--{name}={value}" for name, value in named.items()]


def gradients(run: Path) -> dict[str, int]:
    """Returns how many gradient steps a run of PPO makes on how many rows."""
    from seedbed.config.saved import saved_config
    from seedbed.run.folder import RunFolder

    agent: Any = saved_config(RunFolder.read(run)).agent
    return {
        "gradient_steps": agent.epochs * agent.minibatches,
        "rows": agent.batch * agent.unroll,
    }
