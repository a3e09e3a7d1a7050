"""Items a second through our own replay, in process, called as the peers are.

    python replay_seedbed.py ITEMS.npz --seconds 5 --compress --alone

Rows come as an actor's slot has them, a step of 32 environments at a time. Prints one JSON object.
"""

from __future__ import annotations

import itertools
import threading
import time
from importlib.metadata import version

import numpy as np
import psutil
import replay_common as common

from seedbed import types
from seedbed.replay.host.layout import Layout
from seedbed.replay.host.replay import HostReplay


def make(compress: bool) -> HostReplay:
    """Makes a replay whose items share no rows: one begins every STEPS rows and has as many."""
    experience = types.Replay(
        batch=common.BATCH,
        sequence=common.STEPS - 1,
        period=common.STEPS,
        capacity=common.CAPACITY,
        min_size=common.BATCH,
        ratio=1.0,
        priority_exponent=common.PRIORITY_EXPONENT,
        importance_exponent=common.IMPORTANCE_EXPONENT,
    )
    spec = types.EnvSpec(types.ArraySpec((84, 84), "uint8"), types.Discrete(2**31 - 1))
    return HostReplay(Layout(experience, spec, (), (), 1, common.BATCH, compress=compress))


def rows(items: common.Items) -> list[tuple[types.Timestep, np.ndarray]]:
    """Turns blocks of items into timesteps and actions `[BATCH, ...]`, one after the other."""
    blocks, lanes, steps = items.done.shape
    time_major = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in items)
    observation, action, reward, done = (
        x.reshape(blocks * steps, lanes, *x.shape[3:]) for x in time_major
    )
    first, never = np.zeros_like(done), np.zeros(lanes, bool)
    first[0] = True
    return [
        (types.Timestep(observation[t], reward[t], done[t], never, first[t]), action[t])
        for t in range(len(done))
    ]


def together(
    replay: HostReplay, stream: list[tuple[types.Timestep, np.ndarray]], seconds: float
) -> dict[str, float]:
    """Inserts in one thread, seals and draws in this one, as training does, both at the limiter's pace."""
    over, rng = threading.Event(), np.random.default_rng(0)

    def insert() -> None:
        for timestep, action in itertools.cycle(stream):
            if not (replay.can_insert() or replay.wait_until(replay.can_insert, over.is_set)):
                return
            replay.append(0, timestep, action, (), ())

    def draw() -> None:
        replay.wait_until(
            lambda: replay.pending > 0 or replay.can_sample(common.BATCH), over.is_set
        )
        replay.seal_pending()
        if replay.can_sample(common.BATCH):
            drawn = replay.sample(common.BATCH, out=buffers)
            priorities = rng.uniform(0.1, 1.0, common.BATCH)
            replay.update_priorities(drawn.slots, drawn.generations, priorities)

    buffers, process = replay.make_sample(common.BATCH), psutil.Process()
    inserting = threading.Thread(target=insert, daemon=True)
    inserting.start()
    while replay.inserted < 2 * common.CAPACITY:
        draw()
    inserted, sampled = replay.inserted, replay.sampled
    before, start = process.cpu_times(), time.perf_counter()
    while time.perf_counter() < start + seconds:
        draw()
    after, wall = process.cpu_times(), time.perf_counter() - start
    inserted, sampled = replay.inserted - inserted, replay.sampled - sampled
    over.set()
    inserting.join()
    cpu = after.user + after.system - before.user - before.system
    return common.report(inserted, sampled, wall, cpu) | {
        "insert_items_per_s": inserted / wall,
        "sample_items_per_s": sampled / wall,
    }


def alone(
    replay: HostReplay, stream: list[tuple[types.Timestep, np.ndarray]], seconds: float
) -> dict[str, float]:
    """Inserts and draws in turns in one thread, as the peers in process do."""
    buffers, rng = replay.make_sample(common.BATCH), np.random.default_rng(0)

    def insert(block: int) -> None:
        for timestep, action in stream[block * common.STEPS : (block + 1) * common.STEPS]:
            replay.append(0, timestep, action, (), ())
        replay.seal_pending()

    def sample() -> None:
        drawn = replay.sample(common.BATCH, out=buffers)
        priorities = rng.uniform(0.1, 1.0, common.BATCH)
        replay.update_priorities(drawn.slots, drawn.generations, priorities)

    return common.alternate(insert, sample, len(stream) // common.STEPS, seconds)


def main() -> None:
    """Measures and prints."""
    parser = common.arguments()
    parser.add_argument("--compress", action="store_true")
    parser.add_argument("--alone", action="store_true", help="in one thread (and the compressor's)")
    args = parser.parse_args()
    items = common.load(args.items)
    replay, stream = make(args.compress), rows(items)
    figures = (alone if args.alone else together)(replay, stream, args.seconds)
    drawn = replay.sample(common.BATCH)
    common.check(items, drawn.timesteps.observation.swapaxes(0, 1), drawn.action.T)
    replay.check_valid()
    common.finish(figures, {name: version(name) for name in ("seedbed", "numpy", "lz4")})


if __name__ == "__main__":
    main()
