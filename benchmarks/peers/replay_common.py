"""What every side of the replay benchmark does alike: the items, the loop and the report.

Needs numpy and psutil only, as it is imported in every peer's environment.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

BATCH, STEPS, CAPACITY = 32, 40, 1000
PRIORITY_EXPONENT, IMPORTANCE_EXPONENT = 0.6, 0.4


class Items(NamedTuple):
    """Items `[blocks, BATCH, STEPS, ...]`; a block is inserted at a time, over and over."""

    observation: np.ndarray  # uint8 [..., 84, 84]
    action: np.ndarray  # int32: the number of the item, so that what is drawn can be checked
    reward: np.ndarray  # float32
    done: np.ndarray  # bool


def load(path: Path) -> Items:
    """Reads what benchmarks/replay.py saved."""
    with np.load(path) as arrays:
        return Items(**arrays)


def check(items: Items, observation: np.ndarray, action: np.ndarray) -> None:
    """Raises unless drawn items, `[n, STEPS, ...]`, are what was inserted."""
    numbers = action[:, 0]
    blocks, lanes = np.divmod(numbers, BATCH)
    if (action != numbers[:, None]).any() or len(set(numbers.tolist())) < 2:
        raise SystemExit(f"drawn items are mixed up: {action[:, ::13].tolist()}")
    if (observation != items.observation[blocks, lanes]).any():
        raise SystemExit(f"the frames of drawn items {numbers.tolist()} are not those inserted")


def alternate(
    insert: Callable[[int], None], sample: Callable[[], Any], blocks: int, seconds: float
) -> dict[str, float]:
    """Fills the replay, then inserts a block and draws a batch in turns for a while.

    A block and a batch have BATCH items each, so items a second are inserted and drawn.
    """
    turn = 0
    for _ in range(2 * CAPACITY // BATCH):  # full, and memory touched
        insert(turn % blocks)
        turn += 1
    for _ in range(8):  # in turns too: JAX compiles anew after the first
        sample()
        insert(turn % blocks)
        turn += 1
    process, inserting, rounds = psutil.Process(), 0.0, 0
    before, start = process.cpu_times(), time.perf_counter()
    now = start
    while now < start + seconds:
        insert(turn % blocks)
        inserting += time.perf_counter() - now
        sample()
        turn, rounds, now = turn + 1, rounds + 1, time.perf_counter()
    after, wall = process.cpu_times(), now - start
    cpu = after.user + after.system - before.user - before.system
    return report(rounds * BATCH, rounds * BATCH, wall, cpu) | {
        "insert_items_per_s": rounds * BATCH / inserting,
        "sample_items_per_s": rounds * BATCH / (wall - inserting),
    }


def report(inserted: int, sampled: int, wall: float, cpu: float) -> dict[str, float]:
    """Names the figures of a window of `wall` seconds."""
    pairs = (inserted + sampled) / 2
    return {
        "items_per_s": pairs / wall,
        "cpu_ms_per_item": 1e3 * cpu / pairs,
        "cores": cpu / wall,
        "window_s": wall,
    }


def arguments() -> argparse.ArgumentParser:
    """Declares what benchmarks/replay.py passes to every side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("items", type=Path)
    parser.add_argument("--seconds", type=float, default=5.0)
    return parser


def finish(figures: dict[str, Any], packages: dict[str, str]) -> None:
    """Prints a peer's report, one JSON object."""
    print(json.dumps({**figures, "versions": packages}))
