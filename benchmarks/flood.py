"""What 10,000 connections from nobody leave to the streams that are there, and to an actor after them.

    python benchmarks/flood.py            # three floods
    python benchmarks/flood.py --quick    # one of 3,000 connections; nothing is saved

Sixteen streams of eight recorded games of Pong step at a pace that leaves the learner time, as emulators do;
everything is on one machine, the flood, too. For two cores, run it with `taskset -c 0,1`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _stamp import write_result
from seedbed.machine import cpu_name, usable_cores
from streams import HERE, clients, record, serve, serving

RESULT = HERE / "results" / "flood.json"
CONNECTIONS, STREAMS, SIZE, PACE_S = 10_000, 16, 8, 0.01
LEAST, ENTRY_S = 0.9, 60.0  # the targets


def flood(recording: Path, connections: int, seconds: float) -> dict[str, Any]:
    """Measures streams with a flood, before it and after, and how long an actor takes to enter after it."""
    with serving(recording, size=SIZE, streams=STREAMS, free=1, pace_s=PACE_S) as served:
        pool, remote = served.pool, served.remote
        serve(pool, time.monotonic() + 2.0)
        usual = SIZE * serve(pool, time.monotonic() + seconds) / seconds
        before = remote.report()["streams"]
        command = [sys.executable, str(HERE / "_flood_client.py"), str(served.port)]
        with subprocess.Popen([*command, str(connections)], stdout=subprocess.PIPE) as process:
            begun, answered = time.monotonic(), 0
            while process.poll() is None:
                answered += serve(pool, time.monotonic() + 0.2)
            during = SIZE * answered / (time.monotonic() - begun)
            assert process.stdout is not None and not process.returncode
            told = json.loads(process.stdout.read())
        # Streams that have just begun are slower: the usual rate is the better of before and after.
        usual = max(usual, SIZE * serve(pool, time.monotonic() + seconds) / seconds)
        lost = before - remote.report()["streams"]
        begun = time.monotonic()
        with clients(served, recording, 1, 1, PACE_S):
            while remote.report()["streams"] <= STREAMS and time.monotonic() < begun + ENTRY_S:
                serve(pool, time.monotonic() + 0.05)
            entered_s = time.monotonic() - begun
    return {
        "usual_steps_per_s": usual,
        "flooded_steps_per_s": during,
        "ratio": during / usual,
        "streams_lost": lost,
        "entered_s": entered_s,
        "refused": remote.report()["refused"],
        **told,
    }


def main() -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    floods, connections, seconds = (1, 3000, 3.0) if args.quick else (3, CONNECTIONS, 10.0)
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "pong.npz"
        record(recording, SIZE, 100 if args.quick else 2000, noise=False)
        rows = []
        for _ in range(floods):
            rows.append(row := flood(recording, connections, seconds))
            print(
                f"{row['connections']:,} connections in {row['seconds']:.0f} s: {STREAMS} streams make "
                f"{row['flooded_steps_per_s']:,.0f} steps/s, {row['ratio']:.2f} of their usual "
                f"{row['usual_steps_per_s']:,.0f}; {row['streams_lost']:.0f} were lost; an actor entered "
                f"{row['entered_s']:.1f} s after the last",
                flush=True,
            )
    ratio, entered = min(row["ratio"] for row in rows), max(row["entered_s"] for row in rows)
    print(
        f"worst: {ratio:.2f} (target {LEAST}: {ratio >= LEAST}), entered after {entered:.1f} s (target "
        f"{ENTRY_S:.0f}: {entered < ENTRY_S}); median {statistics.median(r['ratio'] for r in rows):.2f}"
    )
    if not args.quick:
        result = {
            "cpu": cpu_name(),
            "cores": usable_cores(),
            "floods": rows,
        }
        write_result(RESULT, result)


if __name__ == "__main__":
    main()
