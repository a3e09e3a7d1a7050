"""Reads the folders of runs, to list them and to report on them, while they are trained and afterwards.

This module loads no JAX and takes no lock from a run.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from seedbed import strict_json
from seedbed.config.configuration import RUNTIMES
from seedbed.printable import printable
from seedbed.run.folder import CONFIG, METRICS, SCENE, RunFolder
from seedbed.run.history import read_history, state_of
from seedbed.run.lines import is_number, read_last_line, read_lines
from seedbed.run.options import FusedConfig
from seedbed.run.sizes import AUTO
from seedbed.strict_json import revived
from seedbed.types import SeedbedError
from seedbed.viewer.text import as_age, as_count, as_score

_MOST_OPTIONS = 1000
_START = {"run": str, "optimizer": bool, "partial": bool}
"""What is read of the weights that a run has begun with."""
_LAST_MOMENT = 2.5e11  # seconds since the epoch, in the year 9892: Python has no years above 9999
_COLOURS = {
    "running": "green",
    "finished": "blue",
    "interrupted": "yellow",
    "failed": "red",
    "damaged": "red",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as its folder tells of it, which anybody may have written."""

    path: Path
    config: dict[str, Any]  # its parts are there, and the runtime's numbers are numbers
    lines: list[dict[str, Any]]  # of metrics: numbers, and the list `lines.MEMBERS`
    history: list[dict[str, Any]]  # its stints, the first one first, as `_stint` makes them
    state: str  # running, finished, interrupted or failed
    last_write: float  # seconds since the epoch

    @property
    def name(self) -> str:
        """The name of the folder."""
        return Path(os.path.realpath(self.path)).name

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
    config = _config(folder)
    metrics, history = path / METRICS, [_stint(each) for each in read_history(path)]
    last = read_last_line(metrics)
    options = next(config[key] for key in RUNTIMES if key in config)
    done = last.get("env_steps", 0) >= options.get("steps", 0)
    return Run(
        path=path,
        config=config,
        lines=[line for line in [last] if line] if last_line_only else read_lines(metrics),
        history=history,
        state=state_of(folder, history, bool(last) and done),
        last_write=_modified(metrics) or _modified(path / CONFIG),
    )


def _config(folder: RunFolder) -> dict[str, Any]:
    """Returns a run's configuration; raises SeedbedError if a part is missing, too large or no number."""
    config = revived(folder.read_config())
    kinds = [key for key in RUNTIMES if isinstance(config.get(key), dict)]
    parts = all(isinstance(config.get(part), dict) for part in ("env", "agent"))
    if not (kinds and parts):
        raise SeedbedError(
            f"{folder.path} is not the folder of a run: its {CONFIG} names no environment, agent and "
            "runtime; check the path"
        )
    config["name"] = config["name"] if isinstance(config.get("name"), str) else ""
    options, defaults = config[kinds[0]], RUNTIMES[kinds[0]]()
    for name, value in options.items():
        default = getattr(defaults, name, None)
        # A run has `auto` actors until a plan has found their number.
        is_auto = name == "actors" and value == AUTO
        is_never = isinstance(default, float) and value == math.inf
        if is_number(default) and not (is_number(value) or is_auto or is_never):
            raise _damaged(folder, f"{name} is {str(value)[:40]!r} instead of a number")
    if not isinstance(options.get("sweep", ""), str):
        raise _damaged(folder, "sweep is no text")
    if options.get("sweep"):
        try:
            _ = FusedConfig(sweep=options["sweep"], seeds=options.get("seeds", 1)).variations
        except (SeedbedError, TypeError) as error:
            raise _damaged(folder, str(error)) from error
    if sum(len(config[part]) for part in ("env", "agent", kinds[0])) > _MOST_OPTIONS:
        raise _damaged(folder, f"it has more than {_MOST_OPTIONS} options")
    start = _dict(config.get("start"))
    return {
        **{part: config[part] for part in ("name", "env", "agent", kinds[0])},
        "start": {
            name: start[name] for name, kind in _START.items() if type(start.get(name)) is kind
        },
        SCENE: _text(config.get(SCENE)),
    }


def _damaged(folder: RunFolder, reason: str) -> SeedbedError:
    return SeedbedError(f"{folder.path / CONFIG} is damaged ({reason}): restore it")


def _stint(data: dict[str, Any]) -> dict[str, Any]:
    """Returns what a report tells of a stint: moments, texts, the machine and versions; leaves out others."""
    machine, versions = _dict(data.get("machine")), _dict(data.get("versions"))
    return {
        **{name: _moment(data.get(name)) for name in ("begun", "ended")},
        "env_steps": _number(data.get("env_steps")),
        **{name: _text(data.get(name)) for name in ("outcome", "failure")},
        "machine": {
            "cpu": _text(machine.get("cpu")) or "unknown",
            **{name: _text(machine.get(name)) for name in ("system", "python")},
            **{name: _number(machine.get(name)) or 0 for name in ("cores", "memory_bytes")},
            "devices": {
                kind: count
                for kind, count in _dict(machine.get("devices")).items()
                if is_number(count)
            },
        },
        "versions": {name: _text(version) for name, version in versions.items()},
    }


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any) -> float | None:
    return value if is_number(value) else None


def _moment(value: Any) -> float | None:
    return value if is_number(value) and 0 <= value < _LAST_MOMENT else None


def metrics_bytes(path: Path) -> int:
    """Returns the size of a run's metrics, 0 if there are none."""
    try:
        return (path / METRICS).stat().st_size
    except OSError:
        return 0


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
        raise SeedbedError(f"there is no folder {printable(folder)}: name the one with the runs")
    for root, folders, files in os.walk(folder):
        if CONFIG in files:
            folders.clear()
            yield Path(root)
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def overview(folder: Path) -> list[dict[str, Any]]:
    """Describes the runs at and below a folder as JSON values, the one that wrote last at the end.

    A folder that cannot be read has the state `damaged`, and hides no other. Raises SeedbedError as
    `find_runs`.
    """
    described = []
    for path in find_runs(folder):
        try:
            run = read_run(path, last_line_only=True)
        except Exception:  # whatever is in one folder, the others are listed
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
    rows, console = overview(folder), Console(highlight=False, emoji=False)
    if as_json:
        console.print(strict_json.dumps(rows, indent=1), markup=False, soft_wrap=True)  # in ASCII
        return
    if not rows:
        console.print(f"no runs in {printable(folder)}", markup=False)
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
            Text(printable(Path(os.path.realpath(row["run"])).name if name == "." else name)),
            Text(row["state"], _COLOURS[row["state"]]),
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
