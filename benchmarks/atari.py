"""Trains Atari games for a while each, and writes their scores, random play's and people's to docs/results/.

    python benchmarks/atari.py
    python benchmarks/atari.py --games pong --agent dqn --minutes 5

Games run one after another, each with the whole machine, from their presets' options. A run whose folder is
there already is not repeated. A run that fails, or ends before its time, fails this.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import learning
from _training import CommandError, output, started
from seedbed.config import resolve
from seedbed.envs.host.atari import AtariEnv
from seedbed.exit_status import ExitStatus
from seedbed.machine import cpu_name
from seedbed.run.lines import read_lines

GAMES = ("breakout", "space_invaders", "qbert", "seaquest", "ms_pacman")
EPISODES = 32  # of random play, and of an evaluation
# Scores of random play and of a professional tester, both after up to 30 no-ops: Wang et al. (2016), "Dueling
# network architectures for deep reinforcement learning", Table 2.
PUBLISHED = {
    "breakout": (1.7, 30.5),
    "ms_pacman": (307.3, 6951.6),
    "pong": (-20.7, 14.6),
    "qbert": (163.9, 13455.0),
    "seaquest": (68.4, 42054.7),
    "space_invaders": (148.0, 1668.7),
}
HUMAN = (
    "The checkpoint evaluated is the one that did best in the run's own evaluations, not the newest. "
    "Human-normalised: evaluations in % of the way from random play (0) to a professional tester (100), both "
    "as Wang et al. (2016) published them."
)
FIELDS = (
    "wall_s",
    "env_steps",
    "frames",
    "episodes",
    "episode_return_mean",
    "frames_per_s",
    "rss_mb",
)


def train(game: str, agent: str, minutes: float, run: Path) -> list[str]:
    """Trains a game for so long in a folder, unless it is there; returns the command."""
    command = ["seedbed", "train", game, "--agent", agent, "--seed", "0"]
    if not (run / "config.json").exists():
        with started([sys.executable, "-m", *command, "--run", str(run)]) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60 * minutes)
                raise CommandError(f"{' '.join(command)} ended by itself")
            process.send_signal(signal.SIGINT)
            if process.wait(300) not in (ExitStatus.FINISHED, ExitStatus.STOPPED):
                raise CommandError(
                    f"{' '.join(command)} ended with {process.returncode} when interrupted"
                )
    if read_lines(run / "metrics.jsonl")[-1]["wall_s"] < 60 * minutes:
        raise CommandError(
            f"the run in {run} has less than {minutes:g} minutes: remove it, and start again"
        )
    return command


def random_returns(env: AtariEnv) -> np.ndarray:
    """Returns the scores of whole games under random actions."""
    host, rng = env.for_evaluation().make(EPISODES, 0), np.random.default_rng(0)
    host.reset()
    total, scores = np.zeros(EPISODES), np.full(EPISODES, np.nan)
    while np.isnan(
        scores
    ).any():  # the first of each environment: short games would come more often
        timestep = host.step(rng.integers(0, host.spec.action.n, EPISODES, dtype=np.int32))  # type: ignore[union-attr]
        total += timestep.reward
        ended = (timestep.terminated | timestep.truncated) & np.isnan(scores)
        scores[ended] = total[ended]
    host.close()
    return scores


def human_normalised(game: str, score: float) -> float:
    """Returns a score in % of the way from published random play, 0, to a published human's, 100."""
    chance, human = PUBLISHED[game]
    return 100.0 * (score - chance) / (human - chance)


def row(game: str, lines: list[dict[str, Any]], chance: np.ndarray, run: Path) -> str:
    """Plays the checkpoint that evaluated best, and writes a line of the table."""
    command = [sys.executable, "-m", "seedbed", "evaluate", str(run), "--episodes", str(EPISODES)]
    found, last = output([*command, "--json"]), lines[-1]
    scores = [line["episode_return_mean"] for line in lines if line["episodes"]]
    mean = found["episode_return_mean"]
    evaluations = len({x for line in lines if (x := line.get("evaluation/env_steps")) is not None})
    judged = f"of {found['env_steps']:,} steps" + (
        f", best of {evaluations} evaluations" if evaluations > 1 else ""
    )
    return (
        f"| {game} | {chance.mean():.1f} ± {chance.std():.1f} | {scores[-1]:.1f} | {max(scores):.1f} | "
        f"{mean:.1f} ± {found['episode_return_std']:.1f} | {human_normalised(game, mean):.1f} % | {judged} | "
        f"{last['frames'] / 1e6:.2f} M | {last['frames'] / last['wall_s']:,.0f} |"
    )


def write_points(path: Path, curves: dict[str, list[dict[str, Any]]]) -> None:
    """Writes the points of all games."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("game", *FIELDS))
        for game, lines in curves.items():
            writer.writerows((game, *(line.get(field) for field in FIELDS)) for line in lines)


def main() -> None:
    """Trains, plays, and writes the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--games", nargs="+", default=GAMES)
    parser.add_argument("--agent", default="r2d2")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--runs", type=Path, default=learning.ROOT / "runs" / "atari")
    parser.add_argument(
        "--note", default="", help="a sentence for the page, such as what ran beside"
    )
    parser.add_argument(
        "--commit", default=learning.head(), help="that trained runs which are there already"
    )
    args = parser.parse_args()
    for game in args.games:
        if game not in PUBLISHED:
            parser.error(f"{game} has no published score here; {', '.join(PUBLISHED)} have")
    name, out = f"atari-{args.agent}", learning.ROOT / "docs" / "results"
    curves: dict[str, list[dict[str, Any]]] = {}
    rows, pictures, commands = [], [], []
    for game in args.games:
        run = args.runs / game
        try:
            commands.append(" ".join(train(game, args.agent, args.minutes, run)))
            env = resolve.train_config(game, args.agent).env
            assert isinstance(env, AtariEnv)
            chance = random_returns(env)
            lines = curves[game] = read_lines(run / "metrics.jsonl")
            rows.append(row(game, lines, chance, run))
        except CommandError as error:
            raise SystemExit(str(error)) from None
        title = f"{game}: mean score of the last 100 games"
        picture = learning.curve({0: lines}, float(chance.mean()), title, "random play")
        (out / f"{name}-{game}.svg").write_text(picture)
        pictures.append(f"![{game}]({name}-{game}.svg)")
        print(rows[-1], flush=True)
    write_points(out / f"{name}.csv", curves)
    text = [
        f"# {name}",
        "",
        f"Atari games, {args.minutes:g} minutes each, one seed.",
        "",
        "| game | random play | training, at the end | at its best | evaluation | human-normalised | "
        "checkpoint evaluated | frames | frames/s |",
        "|---" * 9 + "|",
        *rows,
        "",
        f"{learning.REMARK}{learning.EXPLORES} Random play and evaluations are of {EPISODES} games, mean and "
        f"standard deviation; no sticky actions. {HUMAN} {args.note}".rstrip(),
        f"Commit {args.commit}; {len(os.sched_getaffinity(0))} cores of {cpu_name()}; points in "
        f"[{name}.csv]({name}.csv). Interrupted after their time; commands:",
        "",
        "```sh",
        *commands,
        "```",
        "",
        *pictures,
        "",
    ]
    (out / f"{name}.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
