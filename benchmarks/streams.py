"""Environment steps a second from streams into the learner's slots, and what TLS and compression cost.

    python benchmarks/streams.py                    # each way of sending in turns, then 256 small streams
    python benchmarks/streams.py --quick            # every part for a moment; nothing is saved

Echoes of messages are compared with gRPC's. Then clients send recorded Pong, 64 different games of random
play at once, over loopback, as fast as answers come; they share the cores with the ingest process and with a
learner that answers at once. There is no network. For two cores, run it with `taskset -c 0,1`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from _stamp import write_result
from _training import output, started
from seedbed.actors.pool import ActorPool
from seedbed.actors.remote import Listening, RemoteActors
from seedbed.actors.slots import spec_to_json
from seedbed.envs.host.atari import AtariEnv
from seedbed.machine import cpu_name, usable_cores
from seedbed.streams import credentials

HERE = Path(__file__).parent
RESULT = HERE / "results" / "streams.json"
GAMES = 64  # different, recorded at once
TARGET = 90_000.0  # steps/s with TLS, lz4 and checksums, 64 environments in a message, on two cores
SMALL_TARGET = 20_000.0  # steps/s of 256 streams of 8 environments together
START_S = 2.0  # from the start of an actor to its first timestep, at most


def record(path: Path, games: int, steps: int, noise: bool) -> None:
    """Writes timesteps of Pong under random actions, or frames of noise, which cannot be compressed."""
    env, rng = AtariEnv("pong").make(games, 0), np.random.default_rng(0)
    timestep, rows = env.reset(), []
    for _ in range(steps):
        rows.append(timestep)
        timestep = env.step(rng.integers(0, 6, games, dtype=np.int32))
    env.close()
    fields = {name: np.stack([getattr(row, name) for row in rows]) for name in rows[0]._fields}
    if noise:
        shape = fields["observation"].shape
        fields["observation"] = rng.integers(0, 256, shape, dtype=np.uint8)
    np.savez(path, **fields, spec=json.dumps(spec_to_json(env.spec)))


class Serving(NamedTuple):
    """A learner that listens, and the clients that send to it."""

    pool: ActorPool
    remote: RemoteActors
    listening: Listening
    port: int
    clients: list[psutil.Process]


@contextlib.contextmanager
def clients(
    served: Serving, recording: Path, streams: int, processes: int, pace_s: float
) -> Iterator[list[psutil.Process]]:
    """Starts client processes, which share the streams; they wait `pace_s` seconds after each answer."""
    each, started, listening = streams // processes, [], served.listening
    try:
        for number in range(processes):
            command = [
                *(sys.executable, str(HERE / "_stream_client.py")),
                *(str(listening.folder / credentials.KEY), str(served.port), str(recording)),
                *(str(each), str(number * each), str(int(not listening.insecure)), str(pace_s)),
            ]
            started.append(subprocess.Popen(command))
        yield [psutil.Process(process.pid) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def serve(pool: ActorPool, until_s: float) -> int:
    """Answers every timestep at once with random actions; returns their number."""
    rng, answered = np.random.default_rng(0), 0
    while time.monotonic() < until_s:
        for group in pool.poll(0.05):
            pool.slots[group].action[...] = rng.integers(0, 6, pool.group_size, dtype=np.int32)
            pool.reply(group)
            answered += 1
    return answered


def cpu(processes: list[psutil.Process]) -> float:
    """CPU seconds of processes so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


@contextlib.contextmanager
def learner(*, tls: bool = True, size: int, groups: int) -> Iterator[Serving]:
    """Starts a learner that listens, without clients."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "listen"
        credentials.ensure_credentials(path)
        pool, ports = ActorPool(num_groups=groups, group_size=size, timeout_s=60.0), []
        listening = Listening(
            host="127.0.0.1",
            port=0,
            former_port=0,
            folder=path,
            insecure=not tls,
            term=1,
            env=AtariEnv("pong"),
            group_size=size,
            groups=range(groups),
            seed=0,
            timeout_s=60.0,
        )
        with pool:
            remote = RemoteActors(pool, listening, ports.append)
            while not ports:
                pool.poll(0.05)
            yield Serving(pool, remote, listening, ports[0], [])


@contextlib.contextmanager
def serving(
    recording: Path,
    *,
    tls: bool = True,
    size: int,
    streams: int,
    processes: int = 1,
    free: int = 0,
    pace_s: float = 0.0,
) -> Iterator[Serving]:
    """Starts a learner, with room for `free` more streams, and clients, and waits for their streams."""
    with (
        learner(tls=tls, size=size, groups=streams + free) as served,
        clients(served, recording, streams, processes, pace_s) as sending,
    ):
        while served.remote.report().get("streams", 0) < streams:
            serve(served.pool, time.monotonic() + 0.1)
        yield served._replace(clients=sending)


def start_of_actor() -> float:
    """Returns the seconds from the start of `seedbed actor` until its first timestep is in a slot."""
    with learner(size=4, groups=2) as served:
        key = str(served.listening.folder / credentials.KEY)
        where = f"127.0.0.1:{served.port}"
        command = [sys.executable, "-m", "seedbed", "actor", where, "--key", key]
        begun = time.monotonic()
        with started([*command, "--processes", "1"], stdout=subprocess.DEVNULL):
            while not served.pool.poll(0.05):
                if time.monotonic() > begun + 60:
                    raise TimeoutError("the actor does not step")
            return time.monotonic() - begun


def measure(
    recording: Path, *, tls: bool, size: int, streams: int, processes: int, seconds: float
) -> dict[str, Any]:
    """Lets clients send for a while; returns rates, latencies, CPU time and bytes."""
    shape = {"tls": tls, "size": size, "streams": streams, "processes": processes}
    with serving(recording, **shape) as served:
        pool, remote = served.pool, served.remote
        serve(pool, time.monotonic() + min(2.0, seconds))
        ingest = [psutil.Process(pool.pids()[0])]
        parties = {"ingest": ingest, "clients": served.clients, "learner": [psutil.Process()]}
        before = {name: cpu(of) for name, of in parties.items()}
        first, memory = remote.report(), ingest[0].memory_info().rss
        begun = time.monotonic()
        serve(pool, begun + seconds)
        # The newest report is up to a second old, as the first was.
        last, wall = remote.report(), time.monotonic() - begun
        grown = ingest[0].memory_info().rss - memory
        spent = {name: cpu(of) - before[name] for name, of in parties.items()}
    steps = last["steps"] - first["steps"]
    frames = steps * size
    return {
        "steps_per_s": frames / wall,
        "messages_per_s": steps / wall,
        "bytes_per_step": (last["received_bytes"] - first["received_bytes"]) / max(1, frames),
        "cpu_us_per_message": {name: 1e6 * s / max(1, steps) for name, s in spent.items()},
        "p50_ms": 1e3 * last["action_p50_s"],
        "p99_ms": 1e3 * last["action_p99_s"],
        "reconnects": last["reconnects"],
        "ingest_grew_mb": grown / 1e6,
        "window_s": wall,
    }


WAYS = {  # recording, TLS
    "TLS, lz4": ("pong", True),
    "plaintext, lz4": ("pong", False),
    "TLS, frames of noise, which go raw": ("noise", True),
}


ECHO_BYTES = (7_000, 110_000)  # what 64 frames of Pong take compressed, and 16 as they are


def echo(folder: Path, rounds: int, seconds: float) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Echoes messages over our connections and over gRPC in turns; prints and returns the figures."""
    credentials.ensure_credentials(folder)
    script, found = str(HERE / "peers" / "stream_echo.py"), {}
    for size in ECHO_BYTES:
        rows: dict[str, list[dict[str, float]]] = {"seedbed": [], "grpc": []}
        for _ in range(rounds):
            for side, measured in rows.items():
                options = ["--bytes", str(size), "--seconds", str(seconds)]
                measured.append(output([sys.executable, script, side, str(folder), *options]))
        middle = {
            side: {name: statistics.median(row[name] for row in measured) for name in measured[0]}
            for side, measured in rows.items()
        }
        ratios = [
            (b["server_us"] + b["client_us"]) / (a["server_us"] + a["client_us"])
            for a, b in zip(rows["seedbed"], rows["grpc"], strict=True)
        ]
        for side, row in middle.items():
            print(
                f"echo of {size:,} bytes, {side}: {row['messages_per_s']:,.0f} messages/s, CPU us a message: "
                f"server {row['server_us']:.0f}, client {row['client_us']:.0f}; p50 {row['p50_ms']:.2f} ms, "
                f"p99 {row['p99_ms']:.2f} ms"
            )
        print(
            f"  gRPC takes {statistics.median(ratios):.1f} x our CPU time "
            f"({min(ratios):.1f} to {max(ratios):.1f})",
            flush=True,
        )
        found[str(size)] = rows
    return found


def tell(name: str, row: dict[str, Any]) -> None:
    """Prints a measurement."""
    spent = ", ".join(f"{who} {us:.0f}" for who, us in row["cpu_us_per_message"].items())
    print(
        f"{name}: {row['steps_per_s']:,.0f} steps/s, {row['bytes_per_step']:,.0f} bytes a step, action "
        f"p50 {row['p50_ms']:.1f} ms, p99 {row['p99_ms']:.1f} ms; CPU us a message: {spent}",
        flush=True,
    )


def conclude(
    rows: dict[str, list[dict[str, Any]]], small: dict[str, Any], starts: list[float]
) -> tuple[dict[str, float], list[float]]:
    """Prints targets and what was reached; returns median steps/s by way, and ratios of TLS to plaintext."""
    medians = {
        name: statistics.median(row["steps_per_s"] for row in found) for name, found in rows.items()
    }
    ratios = [
        ours["steps_per_s"] / plain["steps_per_s"]
        for ours, plain in zip(rows["TLS, lz4"], rows["plaintext, lz4"], strict=True)
    ]
    first = medians["TLS, lz4"]
    print(f"median with TLS and lz4: {first:,.0f} steps/s, target {TARGET:,.0f}: {first >= TARGET}")
    print(
        f"TLS to plaintext: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    )
    print(
        f"256 streams: {small['steps_per_s']:,.0f} steps/s, target {SMALL_TARGET:,.0f}: "
        f"{small['steps_per_s'] >= SMALL_TARGET}; in {small['window_s']:.0f} s the ingest process grew by "
        f"{small['ingest_grew_mb']:.1f} MB, {small['reconnects']:.0f} reconnects"
    )
    first_s = statistics.median(starts)
    print(
        f"an actor's first timestep: {first_s:.2f} s after its start ({min(starts):.2f} to "
        f"{max(starts):.2f}), target {START_S}: {first_s < START_S}"
    )
    return medians, ratios


def main() -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--minutes", type=float, default=10.0, help="of 256 small streams")
    args = parser.parse_args()
    rounds, seconds = (1, 2.0) if args.quick else (5, 10.0)
    with tempfile.TemporaryDirectory() as folder:
        recordings = {kind: Path(folder) / f"{kind}.npz" for kind in ("pong", "noise", "small")}
        record(recordings["pong"], GAMES, 100 if args.quick else 500, noise=False)
        record(recordings["noise"], GAMES, 50, noise=True)
        record(recordings["small"], 8, 100 if args.quick else 2000, noise=False)
        echoes = echo(Path(folder) / "echo", rounds, seconds / 3)
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
        for _ in range(rounds):
            for name, (kind, tls) in WAYS.items():
                found = measure(
                    recordings[kind], tls=tls, size=GAMES, streams=4, processes=1, seconds=seconds
                )
                rows[name].append(found)
                tell(name, found)
        small_s = 3.0 if args.quick else 60 * args.minutes
        small = measure(
            recordings["small"], tls=True, size=8, streams=256, processes=1, seconds=small_s
        )
        tell("256 streams of 8 environments", small)
    starts = [start_of_actor() for _ in range(rounds)]
    medians, ratios = conclude(rows, small, starts)
    if not args.quick:
        result = {
            "cpu": cpu_name(),
            "cores": usable_cores(),
            "medians_steps_per_s": medians,
            "tls_to_plaintext": ratios,
            "echo": echoes,
            "rounds": rows,
            "small": small,
            "actor_starts_s": starts,
        }
        write_result(RESULT, result)


if __name__ == "__main__":
    main()
