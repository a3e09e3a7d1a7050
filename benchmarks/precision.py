"""Gradients of whole losses in bfloat16 and float32 against float64, and where bfloat16 harms.

Every agent acts in its environment, learns a little, and records a trajectory (_recorded.py). The gradient
of its loss from that trajectory, with all that `prepare` computes, is then computed with each
`compute_dtype`, and the same program in float64 (_recast.py). To see what float32 is kept for, the program
is also computed with every number in bfloat16: last layers, returns, losses and weights, too.

Sweeps: errors of values, from which priorities come, by the size of the values; outputs of networks by the
distance of observations from 0, with and without normalisation; running statistics; and small steps of an
optimizer.

    python benchmarks/precision.py [NAMES] [--updates 5] [--no-sweeps]
    python benchmarks/precision.py --run runs/pong-impala-0 --updates 100   # later in training
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from _recast import recast
from _recorded import Recorded, record
from _stamp import stamp
from seedbed.agents.base import Params
from seedbed.config import resolve
from seedbed.config.saved import resumed
from seedbed.machine import cpu_name
from seedbed.ops import statistics
from seedbed.run.options import CentralConfig
from seedbed.types import ArraySpec, SeedbedError, Timestep

RESULT = Path(__file__).parent / "results" / "precision.json"
NAMES = (
    "cartpole/impala",
    "cartpole/dqn",
    "CartPole-v1/r2d2",
    "half_cheetah/ppo",
    "half_cheetah/sac",
    "pong/impala",
    "pong/impala-deep",
    "pong/dqn",
    "pong/r2d2",
)
GOAL = 0.999
"""The least cosine of bfloat16's gradient with float64's."""
SIZES = (1.0, 10.0, 100.0, 1000.0)


def gradients(recorded: Recorded) -> dict[str, Any]:
    """Returns the gradient of the weights by float64, float32, bfloat16, and bfloat16 everywhere."""

    def of(dtype: str) -> Callable[..., Any]:
        return functools.partial(
            recorded.gradient, dataclasses.replace(recorded.agent, compute_dtype=dtype)
        )

    given = recorded.state, recorded.trajectory
    return {
        "float64": recast(of("float32"), jnp.float64, *given),
        "float32": jax.device_get(jax.jit(of("float32"))(*given)),
        "bfloat16": jax.device_get(jax.jit(of("bfloat16"))(*given)),
        "everywhere": recast(of("float32"), jnp.bfloat16, *given),
    }


def compared(gradient: Any, exact: Any) -> dict[str, Any] | None:
    """Returns cosine, ratio of norms, and the worst leaf of a gradient against the exact one.

    Of that leaf there are its cosine and its share of the exact squared norm. Returns None if the gradient
    is not finite.
    """
    if not all(np.isfinite(leaf.astype(np.float64)).all() for leaf in jax.tree.leaves(gradient)):
        return None
    pairs = zip(jax.tree_util.tree_leaves_with_path(exact), jax.tree.leaves(gradient), strict=True)
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            np.ravel(np.asarray(mine, np.float64)),
            np.ravel(theirs),
        )
        for (path, theirs), mine in pairs
    }
    whole = tuple(np.concatenate(each) for each in zip(*leaves.values(), strict=True))
    total = np.square(whole[1]).sum()
    cosines = {
        name: (cosine(*pair), float(np.square(pair[1]).sum() / total))
        for name, pair in leaves.items()
        if pair[1].any()
    }
    worst = min(cosines, key=lambda name: cosines[name][0])
    norm = float(np.linalg.norm(whole[0]) / np.sqrt(total))
    return {
        "cosine": cosine(*whole),
        "norm": norm,
        "worst": worst,
        "worst_cosine": cosines[worst][0],
        "worst_share": cosines[worst][1],
    }


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the cosine of the angle between two vectors; 0 if one is 0."""
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    return float(np.sum(a * b) / norms) if norms else 0.0


def measure(name: str, updates: int, run: Path | None = None) -> tuple[dict[str, Any], Recorded]:
    """Compares the gradients of one agent; returns the figures, and what was recorded.

    `run` is the folder of a central run of that agent, from which learning goes on.
    """
    config = resolve.train_config(name) if run is None else resumed(run, None, None)
    recorded = record(config, updates, start=run)
    if run is not None:
        name = f"{name} {run.name} after {int(recorded.state.updates):,} updates"
    found = gradients(recorded)
    exact = found.pop("float64")
    weights = sum(leaf.size for leaf in jax.tree.leaves(exact))
    row = {"name": name, "updates": updates, "weights": weights}
    return row | {way: compared(each, exact) for way, each in found.items()}, recorded


def told(row: dict[str, Any]) -> str:
    """Returns a line about a row; an exclamation mark is at a cosine below the goal."""
    parts = [f"{row['name']:18} {row['weights']:9,} weights"]
    for way in ("float32", "bfloat16", "everywhere"):
        found = row[way]
        if found is None:
            parts.append(f"{way} not finite")
            continue
        missed = "!" if way == "bfloat16" and found["cosine"] < GOAL else ""
        parts.append(
            f"{way} 1 - {1 - found['cosine']:.1e}{missed} norm {found['norm']:.4f} worst leaf "
            f"1 - {1 - found['worst_cosine']:.1e} ({found['worst']}, {found['worst_share']:.1e} of all)"
        )
    return "   ".join(parts)


def sweep_values(recorded: Recorded) -> list[dict[str, Any]]:
    """Returns how wrong errors of size 1 are for values of each size, and so the order of priorities.

    The last layer of a network of DQN is scaled until its values have the size. Rewards are then chosen so
    that the exact errors are normal with deviation 1.
    """
    observation = recorded.trajectory.timesteps.observation
    rows = observation.reshape(-1, *observation.shape[2:])
    weights = recorded.state.params.weights

    def values(dtype: str, layers: Any) -> Any:
        agent = dataclasses.replace(recorded.agent, compute_dtype=dtype)
        return agent._values(layers, recorded.state.params.seen, rows)[:, 0]

    size = np.sqrt(
        np.square(recast(functools.partial(values, "float32"), jnp.float64, weights)).mean()
    )
    found = []
    for asked in SIZES:
        head = jax.tree.map(lambda x: x * np.float32(asked / size), weights["params"]["Dense_0"])  # noqa: B023
        scaled = {"params": weights["params"] | {"Dense_0": head}}
        plain = functools.partial(values, "float32")
        exact = recast(plain, jnp.float64, scaled)
        error = np.random.default_rng(0).normal(size=len(exact) - 1)
        reward = exact[:-1] + error - 0.99 * exact[1:]
        ways = {
            "float32": (jax.jit(plain)(scaled), np.float32),
            "bfloat16": (jax.jit(functools.partial(values, "bfloat16"))(scaled), np.float32),
            "everywhere": (recast(plain, jnp.bfloat16, scaled), jnp.bfloat16),
        }
        row: dict[str, Any] = {"size": asked}
        for way, (value, dtype) in ways.items():
            value = np.asarray(value, dtype)
            mine = np.asarray(reward, dtype) + np.asarray(0.99, dtype) * value[1:] - value[:-1]
            mine = np.asarray(mine, np.float64)
            orders = (np.argsort(np.argsort(np.abs(x))).astype(float) for x in (mine, error))
            row[way] = {
                "wrong": float(np.sqrt(np.square(mine - error).mean())),
                "rank": float(np.corrcoef(*orders)[0, 1]),  # pyright: ignore[reportCallIssue]
            }
        found.append(row)
    return found


def sweep_observations(recorded: Recorded) -> list[dict[str, Any]]:
    """Returns how wrong the outputs of IMPALA's network are for observations that are moved away from 0.

    It is the share of the outputs' deviations from their mean over the rows: that mean says nothing about
    observations. Their own deviations stay as they were. Without normalisation, they are lost where the
    input of the first layer is rounded.
    """
    state, steps = recorded.state, recorded.trajectory.timesteps
    found = []
    for asked in (0.0, *SIZES):
        moved = steps._replace(observation=steps.observation + np.float32(asked))
        seen = state.params.seen._replace(mean=state.params.seen.mean + np.float32(asked))
        row: dict[str, Any] = {"offset": asked}
        for way, its in (("normalised", seen), ("plain", ())):
            params = Params(state.params.weights, its)

            def outputs(dtype: str, params: Params, steps: Timestep) -> Any:
                agent = dataclasses.replace(recorded.agent, compute_dtype=dtype)
                parameters, values, _ = agent._evaluate(params, steps, (), ())
                every = jnp.concatenate([parameters, values[..., None]], -1)
                return every.reshape(-1, every.shape[-1])

            def deviations(every: Any) -> np.ndarray:
                every = np.asarray(every, np.float64)
                return every - every.mean(0)

            plain = functools.partial(outputs, "float32")
            exact = deviations(recast(plain, jnp.float64, params, moved))
            half = jax.jit(functools.partial(outputs, "bfloat16"))
            every = {
                "float32": jax.jit(plain)(params, moved),
                "bfloat16": half(params, moved),
                "everywhere": recast(plain, jnp.bfloat16, params, moved),
            }
            row[way] = {
                name: float(np.linalg.norm(deviations(mine) - exact) / np.linalg.norm(exact))
                for name, mine in every.items()
            }
        found.append(row)
    return found


def sweep_statistics() -> list[dict[str, Any]]:
    """Returns the mean and deviation that running statistics find in 200 batches of normal numbers."""

    def run(x: Any) -> Any:
        start = statistics.initial(ArraySpec(x.shape[2:], "float32"))
        add = lambda seen, rows: (statistics.absorb(seen, statistics.deviations(seen, rows)), ())  # noqa: E731
        return lax.scan(add, start, x)[0]

    found = []
    for mean in (0.0, *SIZES):
        x = (mean + np.random.default_rng(0).normal(size=(200, 32, 8))).astype(np.float32)
        row: dict[str, Any] = {"mean": mean}
        for way, dtype in (("float32", jnp.float32), ("everywhere", jnp.bfloat16)):
            seen = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), recast(run, dtype, x))
            row[way] = {
                "rows": float(seen.weight),
                "wrong": float(np.abs(seen.mean - x.mean((0, 1))).max()),
                "deviation": float(np.sqrt(seen.variance).mean()),
            }
        found.append(row)
    return found


def lost_steps(recorded: Recorded) -> float:
    """Returns the share of the weights that one update moves by less than bfloat16 can hold."""

    def step(state: Any) -> Any:
        batch = recorded.agent.prepare(state, recorded.trajectory, recorded.key)
        grads, output = recorded.agent.gradients(state, batch, recorded.key)
        return recorded.agent.apply(state, recorded.agent.clip_gradient(grads), output)

    after = jax.device_get(jax.jit(step)(recorded.state)).params.weights
    before = recorded.state.params.weights
    pairs = list(zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
    moved = sum((a != b).sum() for a, b in pairs)
    lost = sum(
        ((a != b) & (a.astype(jnp.bfloat16) == b.astype(jnp.bfloat16))).sum() for a, b in pairs
    )
    return float(lost / moved)


def sweeps(found: dict[str, Recorded]) -> dict[str, Any]:
    """Runs the sweeps whose agents were measured, and prints them."""
    results: dict[str, Any] = {"statistics": sweep_statistics()}
    if "cartpole/dqn" in found:
        results["values"] = sweep_values(found["cartpole/dqn"])
    if "cartpole/impala" in found:
        results["observations"] = sweep_observations(found["cartpole/impala"])
        results["lost_steps"] = lost_steps(found["cartpole/impala"])
    for name, rows in results.items():
        print(name)
        for row in rows if isinstance(rows, list) else [rows]:
            print(f"  {json.dumps(row)}", flush=True)
    return results


def save(rows: list[dict[str, Any]], sweep: dict[str, Any]) -> None:
    """Puts rows and sweeps in the place of former ones of the same name."""
    old = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": [], "sweeps": {}}
    stamped = [row | {"stamp": stamp()} for row in rows]
    kept = {row["name"]: row for row in [*old["rows"], *stamped]}
    ordered = sorted(kept.values(), key=lambda row: NAMES.index(row["name"].split()[0]))
    result = {"cpu": cpu_name(), "rows": ordered, "sweeps": old["sweeps"] | sweep}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


def measure_run(run: Path, updates: int) -> None:
    """Compares the gradients of a run's agent as it is now, prints and saves them."""
    try:
        name = resumed(run, None, None).name
    except SeedbedError as error:
        raise SystemExit(str(error)) from None
    central = [n for n in NAMES if isinstance(resolve.train_config(n).runtime, CentralConfig)]
    if name not in central:
        raise SystemExit(f"{run} trains {name}; --run takes a run of {', '.join(central)}")
    row, _ = measure(name, updates, run)
    print(told(row), flush=True)
    save([row], {})


def main() -> None:
    """Compares gradients, runs the sweeps, prints both, and saves JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", default=list(NAMES), metavar="NAME", help=", ".join(NAMES)
    )
    parser.add_argument("--updates", type=int, default=5, help="before the trajectory is recorded")
    parser.add_argument("--no-sweeps", action="store_true", help="compare gradients only")
    parser.add_argument(
        "--run", type=Path, help="go on from the newest checkpoint of a run of a central preset"
    )
    args = parser.parse_args()
    if args.run is not None:
        measure_run(args.run, args.updates)
        return
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(NAMES)}")
    found = {}
    for name in args.names:
        row, found[name] = measure(name, args.updates)
        print(told(row), flush=True)
        save([row], {})
    if not args.no_sweeps:
        save([], sweeps(found))


if __name__ == "__main__":
    main()
