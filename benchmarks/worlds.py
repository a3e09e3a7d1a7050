"""Trains 10,000 steps in one environment of each family that is installed, and writes docs/results/worlds.md.

    python benchmarks/worlds.py                        # all that are installed
    python benchmarks/worlds.py envpool:Ant-v5         # others

Each trains with its default agent and two actor processes, one after another. A family that is not installed
is left out of the table, which says so; a failure is printed and ends the command.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from _training import run_training
from learning import ROOT, head
from seedbed.config import resolve
from seedbed.envs.host.contract import is_on_device
from seedbed.envs.specs import shown
from seedbed.machine import cpu_name, usable_cores
from seedbed.types import SeedbedError

PAGE = ROOT / "docs" / "results" / "worlds.md"
WORLDS = {
    "Atari": "pong",
    "Gymnasium": "CartPole-v1",
    "Gymnasium, MuJoCo": "HalfCheetah-v5",
    "Doom": "doom/health_gathering_supreme",
    "EnvPool, Football": "football/academy_empty_goal_close",
    "EnvPool, MiniGrid": "envpool:MiniGrid-MemoryS13-v0",
    "EnvPool, BabyAI": "envpool:BabyAI-GoToObj-v0",
    "EnvPool, MetaWorld": "envpool:MetaWorld/Reach-v3",
    "EnvPool, MyoSuite": "envpool:MyoSuite/MyoHandAirplaneFixed-v0",
    "EnvPool, Jumanji": "envpool:Jumanji/Snake-v1",
    "EnvPool, dm_control": "envpool:WalkerWalk-v1",
    "EnvPool, Playground": "envpool:MuJoCoPlayground/Go1JoystickFlatTerrain-v1",
    "EnvPool, Box2D": "envpool:LunarLander-v3",
    "gymnax": "gymnax.environments.minatar.breakout:MinBreakout",
}
"""An environment of each family."""
STEPS = 10_000


def row(family: str, name: str, steps: int) -> str:
    """Trains in an environment and returns its line of the table; raises SeedbedError if it is missing."""
    config = resolve.train_config(name)
    options = ["--steps", str(steps), "--evaluate-every", "0", "--evaluate-episodes", "1"]
    options += ["--log-every-s", "0.5"]
    if is_on_device(config.env):
        spec = config.env.spec
    else:
        options += ["--actors", "2"]
        made = config.env.make(1, 0)
        spec = made.spec
        made.close()
    with tempfile.TemporaryDirectory() as folder:
        command = ["seedbed", "train", name, *options]
        took = run_training(command, Path(folder, "run"))
    agent = type(config.agent).__name__.lower()
    kind = repr(spec.action)
    kind = kind if len(kind) < 40 else f"{type(spec.action).__name__}{spec.action.shape}"  # type: ignore[union-attr]
    rate = took["env_steps_per_s"]
    return f"| {family} | `{name}` | {shown(spec.observation)} | {kind} | {agent} | {rate:,.0f} |"


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="other environments than one of each family")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    worlds = {name: name for name in args.names} or WORLDS
    rows, missing = [], []
    for family, name in worlds.items():
        try:
            rows.append(row(family, name, args.steps))
        except SeedbedError as error:
            if "lacks a package" not in str(error) and "no module" not in str(error):
                raise
            missing.append(family)
    table = [
        "| family | name | observation | action | default agent | steps/s |",
        "|---" * 6 + "|",
        *rows,
    ]
    text = "\n".join(table)
    print(text)
    if args.names:
        return
    left_out = f" Not installed there: {', '.join(missing)}." if missing else ""
    PAGE.write_text(
        "# Worlds\n\nOne environment of each family, trained for "
        f"{args.steps:,} steps with its default agent: on the host with two actor processes, on the device "
        "in the fused runtime. Steps a second are of the run without its start; so few steps tell little."
        f"{left_out}\n\n{text}\n\nCommit {head()}; {usable_cores():g} cores of {cpu_name()}. Command: "
        "`seedbed bench worlds`.\n"
    )


if __name__ == "__main__":
    main()
