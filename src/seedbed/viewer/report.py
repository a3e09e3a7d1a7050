"""Writes a report on runs: one HTML file with curves, settings and episodes, which loads nothing else."""

from __future__ import annotations

import argparse
import base64
import datetime
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seedbed.printable import pasted, printable
from seedbed.run.bucket import run_path
from seedbed.run.trust import Untrusted
from seedbed.types import SeedbedError, UsageError
from seedbed.version import __version__
from seedbed.viewer import tables
from seedbed.viewer.curves import (
    LAGS,
    TRAINED,
    Group,
    evaluation_traces,
    evaluations,
    group_runs,
    thin_together,
    traces,
)
from seedbed.viewer.figures import task_metrics
from seedbed.viewer.html import WEB, fill, json_in_page, replay_page
from seedbed.viewer.recording import written_whole
from seedbed.viewer.runs import Run, metrics_bytes, read_run
from seedbed.viewer.tables import text

DESCRIPTION = (
    "Writes one page with the curves, settings and episodes of runs, which needs no network."
)
MOST_BYTES = 5_000_000
"""The most bytes of a page: what episodes would be above are left out by name."""
_MUCH_BYTES = 20_000_000  # of metrics, which take seconds to read
MOST_FILMED = 1_800
"""The most steps of a game that are filmed: two minutes."""

Warn = Callable[[str], None]


class Player(NamedTuple):
    """The player of the episodes of a group's best run."""

    markup: str
    replay: dict[str, Any] | None = None  # of a MuJoCo task

    @property
    def size(self) -> int:
        """Its characters in the page."""
        return len(self.markup) + len(json_in_page(self.replay))

    def markup_at(self, number: int) -> str:
        """Returns the markup, for the replay of this number in the page."""
        return self.markup.replace("{number}", str(number))


def declare(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `seedbed report`."""
    parser.add_argument("runs", metavar="RUN", type=run_path, nargs="+", help="the folder of a run")
    parser.add_argument(
        "-o",
        dest="output",
        metavar="F.html",
        type=Path,
        default=Path("report.html"),
        help="the page to write (default: report.html)",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def write_report(folders: Sequence[Path], path: Path, warn: Warn) -> None:
    """Writes a report on the runs in these folders to `path`, which must end in .html.

    Runs may be under way. The best run of each environment plays episodes; `warn` is called with a message
    about each that cannot, and about each of several runs that is damaged, and the page says so. Raises
    SeedbedError if no folder is that of a run, if one is named twice, or if the page cannot be written.
    """
    named = [os.path.realpath(folder) for folder in folders]
    for folder, place in zip(folders, named, strict=True):
        if named.count(place) > 1:
            raise UsageError(f"{printable(folder)} is named twice: name every run once")
    with written_whole(path, ".html") as partial:
        runs, notices = _read(folders, warn)
        page = _page(group_runs(runs), notices, warn)
        partial.write_text(page, encoding="utf-8")


def _read(folders: Sequence[Path], warn: Warn) -> tuple[list[Run], list[str]]:
    """Returns the runs, and what is wrong with others; raises SeedbedError if there is no run."""
    runs, notices = [], []
    for folder in folders:
        size = metrics_bytes(folder)
        if size > _MUCH_BYTES:
            warn(f"reading {size / 1e6:,.0f} MB of metrics of {folder}")
        try:
            runs.append(read_run(folder))
        except SeedbedError as error:
            notices.append(str(error))
        except Exception as error:  # whatever is in one folder, the others are reported
            notices.append(f"{printable(folder)} cannot be read: {printable(error)}")
    if not runs:
        raise SeedbedError(notices[0])
    for notice in notices:
        warn(f"left out: {notice}")
    return runs, notices


def _page(groups: list[Group], notices: list[str], warn: Warn) -> str:
    charts = [_charts(group) for group in groups]
    thin_together([trace for drawn in charts for chart in drawn for trace in chart["traces"]])
    replays: list[dict[str, Any]] = []
    sections, room = [], MOST_BYTES - len(json_in_page(charts)) - (1 << 20)
    for number, group in enumerate(groups):
        player = _player(group, warn, room, episodes=3 if len(groups) == 1 else 1)
        room -= player.size
        title = f"<h2>{text(group.name)}</h2>" if len(groups) > 1 else ""
        content = _section(group, number, charts[number], player.markup_at(len(replays)))
        sections.append(f'<section id="g{number}">{title}{content}</section>')
        replays += [] if player.replay is None else [player.replay]
    style = (WEB / "report.css").read_text(encoding="utf-8")
    described = [
        {"series": [printable(series.label)[:100] for series in group.series], "charts": drawn}
        for group, drawn in zip(groups, charts, strict=True)
    ]
    now = datetime.datetime.now(datetime.UTC)
    contents = [f'<a href="#g{n}">{text(group.name)}</a>' for n, group in enumerate(groups)]
    parts = {
        "title": text(_title(groups)),
        "subtitle": f"Written {now:%Y-%m-%d %H:%M} UTC by Seedbed {__version__}. "
        "Drag over a chart to zoom, double-click to zoom out.",
        "contents": "".join(contents) if len(groups) > 1 else "",
        "body": "".join(f'<p class="notice">Left out: {text(each)}</p>' for each in notices)
        + "".join(sections),
        "style": fill(style, {name: tables.colours(name) for name in ("light", "dark")}),
        "replay": json_in_page(replay_page() if replays else ""),
        "data": json_in_page({"groups": described, "players": replays}),
        "script": (WEB / "report.js").read_text(encoding="utf-8"),
    }
    return fill((WEB / "report.html").read_text(encoding="utf-8"), parts)


def _title(groups: list[Group]) -> str:
    parts = []
    for group in groups:
        count = len(group.runs)
        agents = dict.fromkeys(series.label.partition(",")[0] for series in group.series)
        parts.append(
            f"{group.name}/{' and '.join(agents)}" + (f", {count} runs" if count > 1 else "")
        )
    return "; ".join(parts) if len(parts) <= 3 else f"{sum(len(g.runs) for g in groups)} runs"


def _charts(group: Group) -> list[dict[str, Any]]:
    """Returns the charts of a group that have something to draw."""
    trained = "mean of the last 100 episodes"
    largest = max((line.get("lag_max") or 0 for run in group.runs for line in run.lines), default=0)
    lag = "updates between acting and learning" + (f", largest {largest:g}" if largest else "")
    if any(LAGS[1] in run.last for run in group.runs):
        lag = "updates between pulling parameters and applying the gradient"
    found = [
        _chart(
            "Return in training",
            trained,
            "return",
            "env_steps",
            traces(group, "env_steps", [TRAINED]),
        ),
        _chart(
            "Return in training", trained, "return", "wall_s", traces(group, "wall_s", [TRAINED])
        ),
        *(
            _chart("Return in evaluation", _played(group), "return", x, evaluation_traces(group, x))
            | {"points": True}
            for x in ("env_steps", "wall_s")
        ),
        *_task_charts(group),
        _chart("Lag", lag, "updates", "env_steps", traces(group, "env_steps", LAGS)),
        _chart("Speed", "", "steps/s", "wall_s", traces(group, "wall_s", ["env_steps_per_s"])),
        _chart("Memory", "of all processes", "MB", "wall_s", traces(group, "wall_s", ["rss_mb"])),
    ]
    return [chart for chart in found if chart["traces"]]


def _task_charts(group: Group) -> Iterator[dict[str, Any]]:
    """Yields a chart of each metric of the task."""
    for name in task_metrics({key: value for run in group.runs for key, value in run.last.items()}):
        drawn = traces(group, "env_steps", [name])
        yield _chart(printable(name)[:60], "a metric of the task", "", "env_steps", drawn)


def _chart(title: str, note: str, unit: str, x: str, drawn: list[dict[str, Any]]) -> dict[str, Any]:
    return {"title": title, "note": note, "unit": unit, "x": x, "traces": drawn, "points": False}


def _played(group: Group) -> str:
    counts = {run.options.get("evaluate_episodes") for run in group.runs}
    count = counts.pop() if len(counts) == 1 else 0
    if not count:
        return "means over episodes"
    return f"mean of {count} episodes" if count > 1 else "one episode each"


def _section(group: Group, number: int, charts: list[dict[str, Any]], player: str) -> str:
    figures = "".join(_figure(chart, f"{number}.{at}") for at, chart in enumerate(charts))
    if not charts:
        figures = '<p class="notice">There are no metrics yet.</p>'
    parts = [
        tables.cards(group),
        tables.legend(group, number),
        f'<div class="charts">{figures}</div>',
    ]
    for title, content in (
        ("Where the time went", tables.times(group)),
        ("Episodes", player),
        ("Runs", tables.runs_table(group)),
        ("What differs", tables.differences(group)),
        ("Machine and versions", tables.machines(group)),
    ):
        if content:
            parts.append(f"<h3>{title}</h3>{content}")
    return "".join([*parts, tables.configuration(group)])


def _figure(chart: dict[str, Any], place: str) -> str:
    title, over = text(chart["title"]), text(_over(chart))
    return (
        f'<figure class="chart" data-chart="{place}">'
        f"<figcaption><b>{title}</b><span>{over}</span></figcaption>"
        f'<div class="plot" role="img" aria-label="{title} {over}"></div></figure>'
    )


def _over(chart: dict[str, Any]) -> str:
    over = "over steps" if chart["x"] == "env_steps" else "over wall-clock"
    return f"{over}; {chart['note']}" if chart["note"] else over


def _player(group: Group, warn: Warn, room: int, episodes: int) -> Player:
    """Plays episodes of a group's best run; without any, the markup says why."""
    run = max(group.runs, key=_score)
    if room <= 0:
        return _too_large(run, warn)
    try:
        player = _play(run, episodes)
    except Untrusted as error:
        told = (
            f"no episodes of {run.name} are shown: {error.reason}; read that code, then show them with: "
            f"seedbed evaluate {pasted(run.path)} --trust-run --html F.html"
        )
        warn(told)
        return Player(f'<p class="notice">{text(told[0].upper() + told[1:])}</p>')
    except Exception as error:
        # Agents and environments of users may fail in any way, and the rest of the report does without them.
        lines = str(error).splitlines() or [type(error).__name__]
        told = f"no episodes of {run.name} are shown: {lines[0]}"
        warn(told)
        return Player(f'<p class="notice">{text(told[0].upper() + told[1:])}</p>')
    return player if player.size <= room else _too_large(run, warn)


def _too_large(run: Run, warn: Warn) -> Player:
    told = (
        f"no episodes of {run.name} are shown, as the page would be too large: "
        f"show them with: seedbed evaluate {pasted(run.path)} --html F.html"
    )
    warn(told)
    return Player(f'<p class="notice">{text(told[0].upper() + told[1:])}</p>')


def _score(run: Run) -> float:
    """Returns the best evaluation of a run, or minus infinity: its episodes are those worth seeing."""
    scores = [line["evaluation/episode_return_mean"] for line in evaluations(run)]
    return max(scores, default=float("-inf"))


def _play(run: Run, episodes: int) -> Player:
    """Plays the policy with a run's best evaluation, or its newest; raises what the run's own code raises."""
    # These load JAX.
    from seedbed.config.settle import called
    from seedbed.policy import restore
    from seedbed.viewer.film import Game, film_game
    from seedbed.viewer.html import describe
    from seedbed.viewer.record import record

    trained = restore(run.path)
    what = f"the policy of {run.name} after {trained.step:,} steps"
    if trained.member:
        what += f", {trained.member}"
    if isinstance(trained.env, Game):
        with tempfile.TemporaryDirectory() as folder:
            film = Path(folder) / "film.mp4"
            (score,) = film_game(trained.env, trained, 1, 0, film, MOST_FILMED)
            data = base64.b64encode(film.read_bytes()).decode()
        told = f"The first two minutes at most of a game, {score:g} points in them, by {what}."
        return Player(
            f'<p>{text(told)}</p><div class="player"><video controls loop muted playsinline '
            f'preload="metadata" src="data:video/mp4;base64,{data}"></video></div>'
        )
    title = printable(f"{run.name} in {called(trained.env)}")
    replay = describe(record(trained.env, trained, episodes, 0, title))
    count = len(replay["episodes"])
    told = f"{count} episode{'s' if count > 1 else ''} with {what}."
    return Player(
        f'<p>{text(told)}</p><div class="player" data-player="{{number}}"><div class="empty">'
        "The episodes appear here.</div></div>",
        replay,
    )
