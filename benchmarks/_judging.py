"""Plays what `seedbed train` made, in Gymnasium's task and in ours, and says how far they are apart."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from _training import output

EPISODES = 40


def play(run: Path, env: str | None) -> dict[str, float]:
    """Evaluates a run's newest checkpoint, in Gymnasium's task or in its own."""
    command = [sys.executable, "-m", "seedbed", "evaluate", str(run)]
    command += ["--episodes", str(EPISODES), "--newest", "--json", *(["--env", env] if env else [])]
    result = output(command)
    found = {name: result[f"episode_return_{name}"] for name in ("mean", "std", "min", "max")}
    found["standard_error"] = found["std"] / math.sqrt(result["episodes"])
    return found | {"episodes": result["episodes"]}


def gap(theirs: dict[str, float], ours: dict[str, float]) -> dict[str, float]:
    """Returns the difference of two means in % of the larger, and in standard errors of it."""
    apart = abs(theirs["mean"] - ours["mean"])
    error = math.hypot(theirs["standard_error"], ours["standard_error"])
    largest = max(abs(theirs["mean"]), abs(ours["mean"]))
    return {
        "gap_percent": 100.0 * apart / max(largest, 1e-9),
        "gap_standard_errors": apart / max(error, 1e-9),
    }


def physics(run: Path) -> str:
    """Says by which integrators a run was trained and judged, and what its policy does not see."""
    from seedbed.config.saved import saved_config
    from seedbed.physics.model import EULER
    from seedbed.run.folder import RunFolder

    config = saved_config(RunFolder.read(run))
    env: Any = config.env
    if not hasattr(env, "physics_model"):
        return "The task is the same in both."

    def called(number: int) -> str:
        return "Euler" if number == EULER else "RK4"

    exact = type(env)()
    ours, theirs = (called(task.physics_model().opt.integrator) for task in (env, exact))
    share: float = config.runtime.euler_share  # type: ignore[union-attr]
    whole_run = {0.0: ours, 1.0: "Euler"}
    training = whole_run.get(share, f"Euler for {share:.0%} of the steps, then {ours}")
    text = f"Integrators: training {training}; evaluation in ours {ours}, in Gymnasium's {theirs}."
    seen, whole = (task.spec.observation.shape[0] for task in (env, exact))
    if seen == whole:
        return f"{text} The policy sees all {whole} numbers of the observation."
    full = exact.gymnasium_options()
    without = [name for name, shown in env.gymnasium_options().items() if shown != full[name]]
    parts = ", ".join(
        name.removeprefix("include_").removesuffix("_in_observation") for name in without
    )
    return (
        f"{text} The policy sees {seen} of the {whole} numbers of the observation: without {parts}."
    )


def returned(found: dict[str, float]) -> str:
    """Writes a mean with its standard error."""
    return f"{found['mean']:,.1f} ± {found['standard_error']:.1f}"


def apart(run: dict[str, Any]) -> str:
    """Writes a gap."""
    return f"{run['gap_percent']:.1f} %, {run['gap_standard_errors']:.1f} standard errors"
