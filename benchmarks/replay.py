"""Items a second through our replay and its peers, what a frame takes, and how what is drawn is distributed.

    python benchmarks/replay.py
    python benchmarks/replay.py --quick                 # every part for a moment; nothing is saved

An item is 40 frames of 84x84 with action, reward and end; 1,000 are kept by priority, and 32 are inserted for
32 drawn and given a new priority. Each side takes its turn in a process of its own, with the same items: Pong
under random actions, then random bytes. Make the peers' environments with benchmarks/peers/replay_setup.sh.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from scipy import stats

from _stamp import write_result
from _training import CommandError, output
from fused import met, spread
from peers import replay_common as common
from seedbed.envs.host.atari import SIZE, AtariEnv
from seedbed.replay.host import replay
from seedbed.replay.host.layout import Layout
from seedbed.types import ArraySpec, Discrete, EnvSpec, Replay, SeedbedError, Timestep

HERE = Path(__file__).parent
RESULT = HERE / "results" / "replay.json"
PEERS = Path("~/.cache/seedbed/peers").expanduser()
OURS = {  # in two threads, as in training, or in one, as the peers in process
    "raw": [],
    "compressed": ["--compress"],
    "raw_alone": ["--alone"],
    "compressed_alone": ["--compress", "--alone"],
}
OTHERS = ("cpprb", "reverb", "flashbax")
RATIOS = {"cpprb": 1.0, "reverb": 3.0, "flashbax": 3.0}  # ours raw to theirs, at least
RAW, COMPRESSED = 19_100.0, 10_000.0  # items/s, at least, compressed of Pong
SEED_ITEMS, NEW_FRAMES, SEED_GB = 100_000, 80, 10.0  # SEED's replay, in at most so much
P = 0.01  # of the chi-square test, at least
GAMES = ("pong", "breakout")


class Effort(NamedTuple):
    """How much is measured."""

    rounds: int
    seconds: float  # of a side's turn
    blocks: int  # of 32 items that go round
    game_steps: int  # of 32 environments, for what a frame takes
    seed_items: int  # in the replay whose memory is measured
    draws: int


FULL = Effort(
    rounds=3, seconds=5.0, blocks=12, game_steps=1600, seed_items=SEED_ITEMS, draws=1_000_000
)
QUICK = Effort(rounds=1, seconds=0.5, blocks=2, game_steps=250, seed_items=200, draws=50_000)


def play(game: str, steps: int) -> Iterator[tuple[Timestep, np.ndarray]]:
    """Plays 32 games by random actions; yields timesteps and the actions in them."""
    env, rng = AtariEnv(game).make(common.BATCH, 0), np.random.default_rng(0)
    timestep = env.reset()
    for _ in range(steps):
        action = rng.integers(0, env.spec.action.n, common.BATCH, dtype=np.int32)  # type: ignore[union-attr]
        yield timestep, action
        timestep = env.step(action)
    env.close()


def save_items(path: Path, blocks: int, kind: str) -> None:
    """Writes blocks of items, of Pong or of random bytes; an item's action is its number."""
    shape = (blocks, common.BATCH, common.STEPS)
    reward, done = np.zeros(shape, np.float32), np.zeros(shape, bool)
    if kind == "pong":
        frames = np.empty((*shape, SIZE, SIZE), np.uint8)
        for t, (timestep, _) in enumerate(play("pong", blocks * common.STEPS)):
            at = (t // common.STEPS, slice(None), t % common.STEPS)
            frames[at], reward[at] = timestep.observation, timestep.reward
            done[at] = timestep.terminated | timestep.truncated
    else:
        frames = np.random.default_rng(0).integers(0, 256, (*shape, SIZE, SIZE), dtype=np.uint8)
    number = np.arange(blocks * common.BATCH, dtype=np.int32).reshape(*shape[:2], 1)
    action = np.ascontiguousarray(np.broadcast_to(number, shape))
    np.savez(path, observation=frames, action=action, reward=reward, done=done)


def command(side: str, items: Path, seconds: float) -> list[str]:
    """The command of one side's turn."""
    if side in OURS:
        start = [sys.executable, str(HERE / "peers" / "replay_seedbed.py"), *OURS[side]]
    else:
        start = [str(PEERS / side / "bin" / "python"), str(HERE / "peers" / f"replay_{side}.py")]
    return [*start, str(items), "--seconds", str(seconds)]


def speed(kind: str, effort: Effort, folder: Path) -> dict[str, Any]:
    """Lets the sides take turns with items of a kind; prints and returns the figures."""
    items, rows = folder / f"{kind}.npz", {side: [] for side in (*OURS, *OTHERS)}
    save_items(items, effort.blocks, kind)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    for turn in range(effort.rounds):
        for side in rows:
            found = output(command(side, items, effort.seconds), environment)
            rows[side].append(found)
            print(
                f"  {kind}, round {turn}: {side} {found['items_per_s']:,.0f} items/s (inserting "
                f"{found['insert_items_per_s']:,.0f}, drawing {found['sample_items_per_s']:,.0f}), "
                f"{found['cpu_ms_per_item']:.3f} CPU ms an item, {found['cores']:.2f} cores",
                flush=True,
            )
    rates = {side: [row["items_per_s"] for row in found] for side, found in rows.items()}
    ratios = {
        ours: {
            other: [a / b for a, b in zip(rates[ours], rates[other], strict=True)]
            for other in OTHERS
        }
        for ours in OURS
    }
    tell_speed(kind, rows, ratios)
    medians = {side: statistics.median(values) for side, values in rates.items()}
    return {"median_items_per_s": medians, "ratios": ratios, "rounds": rows}


def tell_speed(
    kind: str, rows: dict[str, list[dict[str, float]]], ratios: dict[str, dict[str, list[float]]]
) -> None:
    """Prints medians (minimum to maximum) beside their targets."""
    wanted = {"raw": RAW} | ({"compressed": COMPRESSED} if kind == "pong" else {})
    print(f"{kind}: items/s inserted and drawn, CPU ms an item; medians (minimum to maximum)")
    for side, found in rows.items():
        rates = [row["items_per_s"] for row in found]
        target = ""
        if side in wanted:
            target = (
                f"; target {wanted[side]:,.0f}: {met(statistics.median(rates) >= wanted[side])}"
            )
        cpu = spread([row["cpu_ms_per_item"] for row in found], 3)
        print(f"  {side:<16} {spread(rates)}, {cpu} CPU ms{target}")
    for side, others in ratios.items():
        for other, values in others.items():
            target = (
                f"; target {RATIOS[other]:g}: {met(statistics.median(values) >= RATIOS[other])}"
            )
            print(f"  {side} is {spread(values, 2)} x {other}{target if side == 'raw' else ''}")
    sys.stdout.flush()


def frame_bytes(game: str, effort: Effort) -> dict[str, float]:
    """Fills a compressed replay as large as SEED's with R2D2's items; prints and returns what that takes.

    The same games go round until it is full. Memory (512 units), action values of acting and everything else
    that is kept with the frames counts.
    """
    experience = Replay(
        batch=64,
        sequence=NEW_FRAMES,
        period=NEW_FRAMES,
        burn_in=40,
        capacity=effort.seed_items,
        min_size=64,
        ratio=1.0,
    )
    spec = EnvSpec(ArraySpec((SIZE, SIZE), "uint8"), Discrete(18))
    extras = (np.zeros(common.BATCH, np.float32),) * 2
    core = (*(np.zeros((common.BATCH, 512), np.float32),) * 2, np.zeros(common.BATCH, np.int32))
    extra, memory = (tuple(x[0] for x in tree) for tree in (extras, core))
    steps = [
        (Timestep(*(np.array(leaf) for leaf in timestep)), action)
        for timestep, action in play(game, effort.game_steps)
    ]
    before = psutil.Process().memory_info().rss
    kept = replay.HostReplay(
        Layout(experience, spec, extra, memory, 1, common.BATCH, frame_stack=4)
    )
    while kept.inserted < effort.seed_items:
        for timestep, action in steps:
            kept.append(0, timestep, action, extras, core)
            kept.seal_pending()
        kept.restart(0)
    found, resident = kept.stats(), psutil.Process().memory_info().rss - before
    frame, gigabytes = found["bytes_per_frame"], resident / 1e9
    target = f"; target {SEED_GB:g} GB: {met(gigabytes <= SEED_GB)}"
    print(
        f"{game}: {frame:,.0f} bytes a frame, images {found['compression']:.0f} times smaller; "
        f"{found['items']:,} items of {NEW_FRAMES} new frames: {gigabytes:.2f} GB resident"
        f"{target if effort.seed_items == SEED_ITEMS else ''}",
        flush=True,
    )
    return {"bytes_per_frame": frame, "items": found["items"], "resident_gb": gigabytes}


def draw_many(draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws while items come and priorities change; returns how often each item was drawn, and should be.

    What should be is reckoned here from the priorities that were given, without the replay's help.
    """
    capacity, exponent = common.CAPACITY, common.PRIORITY_EXPONENT
    experience = Replay(
        batch=common.BATCH,
        sequence=1,
        period=1,
        capacity=capacity,
        min_size=1,
        ratio=1.0,
        priority_exponent=exponent,
    )
    spec, rng = EnvSpec(ArraySpec((1,), "float32"), Discrete(2)), np.random.default_rng(1)
    kept = replay.HostReplay(Layout(experience, spec, (), (), 1, common.BATCH), seed=2)
    size = 3 * capacity + draws // 100
    seen, expected, priority = np.zeros(size), np.zeros(size), np.zeros(size)
    inserted, largest, drawn = 0, 1.0, None
    opening = np.ones(common.BATCH, bool)  # of the one episode that all rows are of
    flags = np.zeros(common.BATCH, bool)
    reward = np.zeros(common.BATCH, np.float32)
    action = np.zeros(common.BATCH, np.int32)
    for turn in range(draws // common.BATCH):
        while inserted < capacity + turn * common.BATCH // 100:
            timestep = Timestep(reward[:, None], reward, flags, flags, opening)
            kept.append(0, timestep, action, (), ())
            opening = flags
            kept.seal_pending()
            priority[inserted : kept.inserted] = largest  # of a new item: the largest so far
            inserted = kept.inserted
        alive = slice(inserted - capacity, inserted)
        weight = priority[alive] ** exponent
        expected[alive] += common.BATCH * weight / weight.sum()
        drawn = kept.sample(common.BATCH, out=drawn)
        np.add.at(seen, drawn.generations, 1)
        given = rng.uniform(0.1, 4.0, common.BATCH)
        kept.update_priorities(drawn.slots, drawn.generations, given)
        priority[drawn.generations] = given
        largest = max(largest, given.max())
    return seen[:inserted], expected[:inserted]


def distribution(draws: int) -> dict[str, float]:
    """Prints and returns the chi-square test of many draws."""
    seen, expected = draw_many(draws)
    often = expected >= 5.0  # fewer are too few for the test; they count as one
    seen, expected = (np.append(x[often], x[~often].sum()) for x in (seen, expected))
    seen, expected = seen[expected > 0], expected[expected > 0]
    statistic = float((np.square(seen - expected) / expected).sum())
    p = float(stats.chi2.sf(statistic, len(seen) - 1))
    print(
        f"{draws:,} draws of {len(seen):,} items while items come and priorities change: chi-square "
        f"{statistic:,.0f}, p {p:.3f}; target at least {P:g}: {met(p >= P)}",
        flush=True,
    )
    return {"draws": draws, "items": len(seen), "chi_square": statistic, "p": p}


def main() -> None:
    """Measures everything, saving at the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="every part for a moment; saves nothing"
    )
    args = parser.parse_args()
    for side in OTHERS:
        if not (PEERS / side / "bin" / "python").exists():
            parser.error(f"no {PEERS / side}: make it with {HERE}/peers/replay_setup.sh")
    effort = QUICK if args.quick else FULL
    result: dict[str, Any] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="seedbed-replay-") as folder:
            result["speed"] = {k: speed(k, effort, Path(folder)) for k in ("pong", "random")}
        result["memory"] = {game: frame_bytes(game, effort) for game in GAMES}
        result["distribution"] = distribution(effort.draws)
    except (CommandError, SeedbedError) as error:
        raise SystemExit(str(error)) from None
    if not args.quick:
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        write_result(RESULT, result)


if __name__ == "__main__":
    main()
