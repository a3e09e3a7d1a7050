"""Times the updates of presets in float32 and bfloat16, turn about.

An update is all that an agent computes from one batch that it recorded in its environment (_recorded.py):
what `prepare` computes, gradients and the optimizer's steps, for all epochs and minibatches. The programs of
one preset run in one process, in turn, on all cores and, with --cores 1, on one. CPU time is that of the
whole process. Arguments after -- are those of `seedbed train`, for every preset.

    python benchmarks/updates.py [NAMES] [--rounds 15] [--cores N] [-- OVERRIDES]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from _stamp import stamp
from central import split_overrides
from seedbed.config import flags, resolve
from seedbed.config.configuration import TrainConfig
from seedbed.run.memory import set_up_malloc
from seedbed.types import SeedbedError, UsageError

NAMES = (
    "pong/impala",
    "pong/impala-deep",
    "pong/dqn",
    "pong/r2d2",
    "half_cheetah/sac",
    "ant/ppo",
    "humanoid/ppo",
    "cartpole/ppo",
    "cartpole/impala",
)
DTYPES = ("float32", "bfloat16")
RESULT = Path(__file__).parent / "results" / "updates.json"


def measure(config: TrainConfig, rounds: int) -> dict[str, Any]:
    """Returns the median and least wall and CPU milliseconds of an agent's update, for each dtype."""
    import jax

    from _recorded import record
    from seedbed.run.update import learn

    recorded = record(config, updates=1)
    programs = {}
    for dtype in DTYPES:
        agent = dataclasses.replace(recorded.agent, compute_dtype=dtype)
        programs[dtype] = jax.jit(lambda *given, agent=agent: learn(agent, *given, None))  # pyright: ignore[reportCallIssue]
    given = recorded.state, recorded.trajectory, recorded.key
    given = jax.device_put(given)
    for program in programs.values():
        jax.block_until_ready(program(*given))
    spent: dict[str, list[tuple[float, float]]] = {dtype: [] for dtype in DTYPES}
    for _ in range(rounds):
        for dtype, program in programs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(program(*given))
            spent[dtype].append(
                (1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu))
            )
    row: dict[str, Any] = {}
    for dtype, pairs in spent.items():
        for i, kind in enumerate(("wall_ms", "cpu_ms")):
            values = [pair[i] for pair in pairs]
            row[f"{dtype} {kind}"] = {"median": statistics.median(values), "least": min(values)}
    return row


def told(row: dict[str, Any]) -> str:
    """Writes a row as a line."""
    parts = []
    for kind in ("wall_ms", "cpu_ms"):
        wide, narrow = (row[f"{dtype} {kind}"]["median"] for dtype in DTYPES)
        parts.append(
            f"{kind[:-3]:4s} {wide:9.2f} ms, bfloat16 {narrow:9.2f} ms ({wide / narrow:4.2f})"
        )
    return f"{row['name']:18s} " + "   ".join(parts)


def main() -> None:
    """Measures, prints and saves."""
    set_up_malloc()  # as a run does
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names",
        nargs="*",
        default=list(NAMES),
        metavar="NAME",
        help="a preset, as `seedbed list` has",
    )
    parser.add_argument("--rounds", type=int, default=15, help="updates of each, turn about")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--cores", type=int, default=cores, choices=range(1, cores + 1))
    own, overrides = split_overrides(sys.argv[1:])
    args = parser.parse_args(own)
    configs = {}
    for preset in args.names:
        try:
            config = flags.override(resolve.train_config(preset), overrides, show_help=False)
        except (SeedbedError, UsageError) as error:
            parser.error(str(error))
        configs[" ".join([preset, *overrides])] = config
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    from seedbed.machine import cpu_name

    saved = json.loads(RESULT.read_text()) if RESULT.exists() else []
    for name, config in configs.items():
        figures = measure(config, args.rounds)
        row = {"name": name} | figures | {"cores": args.cores, "cpu": cpu_name(), "stamp": stamp()}
        print(told(row), flush=True)
        saved = [old for old in saved if (old["name"], old["cores"]) != (name, args.cores)] + [row]
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
