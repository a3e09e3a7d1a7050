"""The comparison that SEED RL was published with: to act centrally, or in the actors, on equal terms.

    python benchmarks/central_or_actor.py                   # four networks, three turns of 45 s each
    python benchmarks/central_or_actor.py --quick           # one short turn, one network; nothing is saved
    python benchmarks/central_or_actor.py --networks nature --seconds 20 --turns 5

IMPALA learns Pong from two actor processes of 32 emulators each, over loopback, with TLS, lz4 and checksums.
"central" is `seedbed train --listen` with the supervisor of `seedbed actor`. "update" and "unroll" act in
the actors, as IMPALA does (_actor_inference.py): these get the parameters after each update, or at the start
of each unroll. Agent, update, batch and network are the same. Turns are interleaved. For two cores, run it
with `taskset -c 0,1`.

Bytes are those of the sockets by the kernel's count, TLS included. The latency of an action is from when its
timestep was complete in the environment's process until the action was there. CPU time is of all processes.
In "central", that of the learner's process is divided between inference and learning as the run does it: by
how long its two threads were busy. Where learning is the slowest part, acting waits for it: centrally that is
a part of actions' latencies, in the actors it comes after them, and "blocked" tells how much it is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from _acting_turns import run_actors, run_central
from _frame_costs import FRAME_SKIP, PLACES, PRICES, bytes_break_even, costs, crossing, sizes
from _stamp import write_result
from central import BUSY
from seedbed.machine import cpu_name, usable_cores

HERE = Path(__file__).parent
RESULT = HERE / "results" / "central_or_actor.json"
NETWORKS: dict[str, dict[str, Any]] = {
    # No network that anybody would train: it is there for the small end of the axis.
    "tiny": {"torso": "mlp", "hidden_sizes": [4]},
    "small": {"torso": "small"},
    "nature": {"torso": "nature"},
    "resnet-lstm": {"torso": "resnet", "recurrent": True, "lstm_size": 256},
}
WAYS = ("central", "update", "unroll")
SETTLE_S = 10.0  # of learning before a measurement
MEASURES = ("steps_per_s", "cpu_ms", "up_bytes", "down_bytes", "p50_ms", "p99_ms")


def side(row: dict[str, Any], way: str) -> tuple[float, float]:
    """Returns the CPU milliseconds of a step on the actors' side and on the learner's."""
    parts = row["cpu_ms_of"]
    actors = parts["environment"] + parts["wire of actors"]
    actors += 0.0 if way == "central" else parts["inference"]
    return actors, row["cpu_ms"] - actors


def tell(name: str, way: str, row: dict[str, Any]) -> None:
    """Prints a measurement."""
    actors, learner = side(row, way)
    parts = ", ".join(f"{part} {ms:.3f}" for part, ms in row["cpu_ms_of"].items())
    shipped = row.get("shipped_per_update")
    print(
        f"{name}, {way}: {row['steps_per_s']:,.0f} steps/s ({FRAME_SKIP * row['steps_per_s']:,.0f} frames/s)"
        f", bytes a step: {row['up_bytes']:,.0f} up, {row['down_bytes']:,.0f} down; action p50 "
        f"{row['p50_ms']:.1f} ms, p99 {row['p99_ms']:.1f} ms\n  CPU ms a step: {row['cpu_ms']:.3f} (actors "
        f"{actors:.3f}, learner {learner:.3f}: {parts})\n  acting blocked {row['blocked']:.0%}, lag "
        f"{row['lag']:.1f}, {row['environments_of_a_call']:.0f} environments a call"
        + ("" if shipped is None else f", an actor got the parameters of {shipped:.0%} of updates"),
        flush=True,
    )


def middle(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the medians of measurements, name by name."""
    found: dict[str, Any] = {}
    for name, value in rows[0].items():
        each = [row[name] for row in rows]
        found[name] = middle(each) if isinstance(value, dict) else statistics.median(each)
    return found


def compare(name: str, args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Measures all ways with a network in turns."""
    rows: dict[str, list[dict[str, Any]]] = {way: [] for way in args.ways}
    options = NETWORKS[name]
    for turn in range(args.turns):
        for way in args.ways if turn % 2 == 0 else args.ways[::-1]:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as text:
                folder = Path(text)
                if way == "central":
                    row = run_central(folder, options, args.settle, args.seconds)
                else:
                    row = run_actors(folder, options, way, args.settle, args.seconds)
            rows[way].append(row)
            tell(f"turn {turn}, {name}", way, row)
    return rows


def summary(rows: dict[str, list[dict[str, Any]]], size: dict[str, float]) -> dict[str, Any]:
    """Returns the medians of a network's measurements, their costs, and ratios to central inference.

    A ratio is the median of those of the turns: what a way needs, or reaches, in units of "central".
    """
    found: dict[str, Any] = {"size": size, "median": {}, "dollars": {}, "ratio": {}}
    for way, each in rows.items():
        found["median"][way] = middle(each)
        found["dollars"][way] = middle([costs(row) for row in each])
        if way == "central" or "central" not in rows:
            continue
        pairs = list(zip(each, rows["central"], strict=True))
        ratios = {name: [a[name] / b[name] for a, b in pairs] for name in MEASURES}
        ratios |= {place: [costs(a)[place] / costs(b)[place] for a, b in pairs] for place in PLACES}
        found["ratio"][way] = {
            name: {"median": statistics.median(x), "least": min(x), "most": max(x)}
            for name, x in ratios.items()
        }
    return found


def tell_summary(name: str, found: dict[str, Any]) -> None:
    """Prints what a network's frames cost, and the ratios."""
    size = found["size"]
    print(
        f"{name}: {size['params_bytes'] / 1e6:.2f} MB of parameters, "
        f"{size['flops'] / 1e6:.1f} MFLOP an action"
    )
    for way, dollars in found["dollars"].items():
        text = ", ".join(f"{place} ${x:,.2f}" for place, x in dollars.items())
        print(f"  a billion frames, {way}: {text}")
    for way, ratios in found["ratio"].items():
        text = ", ".join(
            f"{measure} {x['median']:.3g} ({x['least']:.3g} to {x['most']:.3g})"
            for measure, x in ratios.items()
        )
        print(f"  {way} to central: {text}")


def overtaking(found: dict[str, dict[str, Any]], way: str) -> dict[str, Any]:
    """Returns the sizes of networks at which a way of acting in the actors equals acting centrally."""
    each = list(found.values())
    crossings: dict[str, Any] = {}
    for measure in (*PLACES, "steps_per_s"):
        ratio = [one["ratio"][way][measure]["median"] for one in each]
        for axis in ("params_bytes", "flops"):
            size = [one["size"][axis] for one in each]
            crossings[f"{measure}, {axis}"] = crossing(size, ratio)
    crossings["bytes, params_bytes"] = bytes_break_even(
        [one["size"]["params_bytes"] for one in each],
        [one["median"][way] for one in each],
        [one["median"]["central"] for one in each],
    )
    return crossings


def tell_overtaking(way: str, crossings: dict[str, Any]) -> None:
    """Prints the sizes at which one way overtakes the other."""
    for name, found in crossings.items():
        text = "none in or near what was measured"
        if found is not None:
            text = f"{found['size']:,.0f} ({found['how']})"
            text += f", {'less' if found['less_below'] else 'more'} below"
        print(f"{way} equals central, {name}: {text}")


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="save nothing; one network if none is named"
    )
    parser.add_argument("--seconds", type=float, help="of each measurement (45; 3 if quick)")
    parser.add_argument("--turns", type=int, help="of each way (3; 1 if quick)")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="those of the actors, and central")
    args = parser.parse_args()
    args.seconds = args.seconds or (3.0 if args.quick else 45.0)
    args.turns = args.turns or (1 if args.quick else 3)
    args.networks = args.networks or (["small"] if args.quick else list(NETWORKS))
    args.ways = args.ways or list(WAYS[:2] if args.quick else WAYS)
    args.settle = 1.0 if args.quick else SETTLE_S
    return args


def main() -> None:
    """Measures, prints and saves."""
    args, load = parse(), os.getloadavg()[0]
    if load > BUSY:
        print(f"load {load:.1f}: others use the machine, so this measures them too")
    found, rows = {}, {}
    for name in args.networks:
        rows[name] = compare(name, args)
        found[name] = summary(rows[name], sizes(NETWORKS[name]))
        tell_summary(name, found[name])
    crossings = {}
    if "central" in args.ways and len(found) > 1:
        crossings = {way: overtaking(found, way) for way in args.ways if way != "central"}
    for way, each in crossings.items():
        tell_overtaking(way, each)
    if not args.quick:
        result = {
            "cpu": cpu_name(),
            "cores": usable_cores(),
            "load_before": load,
            "prices": PRICES,
            "networks": found,
            "overtaking": crossings,
            "turns": rows,
        }
        write_result(RESULT, result)


if __name__ == "__main__":
    main()
