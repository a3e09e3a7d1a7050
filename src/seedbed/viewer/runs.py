"""Reads the folders of runs, to list them and to report on them, while they are trained and afterwards.

This module loads no JAX and takes no lock from a run.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from seedbed import strict_json
from seedbed.resolve import RUNTIMES
from seedbed.run.folder import CONFIG, METRICS, RunFolder
from seedbed.run.history import read_history, state_of
from seedbed.run.metrics import read_last_line, read_lines
from seedbed.types import SeedbedError
from seedbed.viewer.text import as_age, as_count, as_score

_COLOURS = {
    "running": "green",
    "finished": "blue",
    "interrupted": "yellow",
    "failed": "red",
    "damaged": "red",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as its folder tells of it."""

    path: Path
    config: dict[str, Any]
    lines: list[dict[str, Any]]  # of metrics
    history: list[dict[str, Any]]  # its stints, the first one first
    state: str  # running, finished, interrupted or failed
    last_write: float  # seconds since the epoch

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.resolve().name

    @property
    def runtime(self) -> str:
        """The key of the runtime: central, fused or paramserver."""
        return next(key for key in RUNTIMES if key in self.config)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the runtime."""
        return self.config[self.runtime]

    @property
    def last(self) -> dict[str, Any]:
        """The newest metrics; empty if there are none yet."""
        return self.lines[-1] if self.lines else {}


def read_run(path: Path, last_line_only: bool = False) -> Run:
    """Reads a run's folder; with `last_line_only`, the newest line of its metrics and no other.

    Raises SeedbedError if it is not the folder of a run, or if its configuration is damaged.
    """
    folder = RunFolder.read(path)
    config = folder.read_config()
    kinds = [key for key in RUNTIMES if isinstance(config.get(key), dict)]
    parts = all(isinstance(config.get(part), dict) for part in ("env", "agent"))
    if not (kinds and parts):
        raise SeedbedError(
            f"{path} is not the folder of a run: its {CONFIG} names no environment, agent and runtime; "
            "check the path"
        )
    metrics, history = path / METRICS, read_history(path)
    last = read_last_line(metrics)
    done = (last.get("env_steps") or 0) >= config[kinds[0]].get("steps", 0)
    return Run(
        path=path,
        config=config,
        lines=[line for line in [last] if line] if last_line_only else read_lines(metrics),
        history=history,
        state=state_of(folder, history, bool(last) and done),
        last_write=_modified(metrics) or _modified(path / CONFIG),
    )


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def find_runs(folder: Path) -> Iterator[Path]:
    """Yields the folders of runs at and below a folder, sorted. Hidden folders are left out.

    Raises SeedbedError if there is no such folder.
    """
    if not folder.is_dir():
        raise SeedbedError(f"there is no folder {folder}: name the one with the runs")
    for root, folders, files in os.walk(folder):
        if CONFIG in files:
            folders.clear()
            yield Path(root)
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def overview(folder: Path) -> list[dict[str, Any]]:
    """Describes the runs at and below a folder as JSON values, the one that wrote last at the end.

    A folder whose configuration is damaged has the state `damaged`. Raises SeedbedError as `find_runs`.
    """
    described = []
    for path in find_runs(folder):
        try:
            run = read_run(path, last_line_only=True)
        except SeedbedError:
            described.append({"run": str(path), "state": "damaged"})
            continue
        last = run.last
        described.append(
            {
                "run": str(path),
                "state": run.state,
                "trains": run.config.get("name", ""),
                "env_steps": last.get("env_steps") or 0,
                "steps": run.options.get("steps"),
                "evaluation": last.get("evaluation/episode_return_mean"),
                "training": last.get("episode_return_mean"),
                "age_s": max(0.0, time.time() - run.last_write),
            }
        )
    return sorted(described, key=lambda each: -each.get("age_s", float("inf")))


def print_overview(folder: Path, as_json: bool) -> None:
    """Prints a table, or JSON, of the runs at and below a folder, the one that wrote last at the end.

    Raises SeedbedError as `find_runs`.
    """
    rows, console = overview(folder), Console(highlight=False)
    if as_json:
        console.print(strict_json.dumps(rows, indent=1), markup=False, soft_wrap=True)
        return
    if not rows:
        console.print(f"no runs in {folder}")
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("run", overflow="fold")
    table.add_column("state", style="none", no_wrap=True)
    table.add_column("steps", justify="right", no_wrap=True)
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    for row in rows:
        name = os.path.relpath(row["run"], folder)
        table.add_row(
            Path(row["run"]).resolve().name if name == "." else name,
            f"[{_COLOURS[row['state']]}]{row['state']}[/]",
            f"{as_count(row['env_steps'])} of {as_count(row['steps'])}" if "steps" in row else "-",
            _score(row),
            as_age(row.get("age_s")),
        )
    console.print(table)
    if any(_score(row).endswith("*") for row in rows):
        console.print(
            "* mean return in training; the others are of the last evaluation", style="dim"
        )


def _score(row: dict[str, Any]) -> str:
    """Returns the mean return of the last evaluation; without one, that of training with a star."""
    if row.get("evaluation") is not None:
        return as_score(row["evaluation"])
    trained = row.get("training")
    return "-" if trained is None else f"{as_score(trained)}*"
