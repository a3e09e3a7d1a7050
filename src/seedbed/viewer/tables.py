"""The parts of a report that need no script: figures, legends, bars and tables, as HTML."""

from __future__ import annotations

import datetime
import html
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from seedbed.printable import printable
from seedbed.run.metrics import STAGES
from seedbed.viewer.curves import (
    Group,
    Series,
    differing,
    evaluation_curves,
    evaluations,
    options_of,
    plain,
    time_shares,
)
from seedbed.viewer.palette import DARK, LIGHT
from seedbed.viewer.runs import Run
from seedbed.viewer.text import as_count, as_duration, as_number, as_percent, as_score

_LONGEST = 500  # characters of a text
NUMBER = ' class="number"'
DASHES = ("", "9 4", "3 3", "12 4 3 4", "6 2", "2 4")
"""How the lines of a legend are broken; web/report/chart.js has the same."""


def colours(theme: str) -> str:
    """Returns the colours of series as CSS, for the theme light or dark."""
    values = LIGHT if theme == "light" else DARK
    return " ".join(f"--series-{number}: {value};" for number, value in enumerate(values))


def text(value: object) -> str:
    """Escapes a text for HTML; what cannot be seen is written out, and long texts are cut."""
    shown = printable(value)
    return html.escape(shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…")


def mark(number: int) -> str:
    """Draws the line of a series, as the charts draw it."""
    colour = number % len(LIGHT)
    dash = DASHES[(number + number // len(DASHES)) % len(DASHES)]
    return (
        '<svg class="mark" viewBox="0 0 26 10" aria-hidden="true"><line x1="0" y1="5" x2="26" y2="5" '
        f'stroke="var(--series-{colour})" stroke-dasharray="{dash}"/></svg>'
    )


def cards(group: Group) -> str:
    """Tells for each series how good it is, and what that took."""
    parts = []
    for number, series in enumerate(group.series):
        figure, meaning = _result(series)
        last = [run.last for run in series.runs]
        rows = {
            "environment steps": _span([line.get("env_steps") for line in last], as_count),
            "wall-clock": _span([line.get("wall_s") for line in last], as_duration),
            "speed": _span([speed(run) for run in series.runs], as_count) + " steps/s",
            "largest memory": _span([memory(run) for run in series.runs], as_count) + " MB",
            "state": _states(series.runs),
        }
        told = "".join(f"<dt>{name}</dt><dd>{text(value)}</dd>" for name, value in rows.items())
        parts.append(
            f'<div class="card"><div class="name">{mark(number)}{text(series.label)}</div>'
            f'<div class="figure">{figure}</div><div class="quiet">{meaning}</div>'
            + ("" if series.members else f"<dl>{told}</dl>")
            + "</div>"
        )
    return f'<div class="cards">{"".join(parts)}</div>'


def _result(series: Series) -> tuple[str, str]:
    """Returns the return in the last evaluation, or in training if there is none, and what it is."""
    scores = [curve[1][-1] for curve in evaluation_curves(series, "env_steps")]
    what = "last evaluation"
    if not scores:
        last = (run.last.get("episode_return_mean") for run in series.runs)
        scores, what = [score for score in last if score is not None], "last episodes of training"
    if not scores:
        return "-", "no episode has ended yet"
    figure = as_score(statistics.median(scores))
    if len(scores) == 1:
        return figure, f"mean return in the {what}"
    spread = f"{as_score(min(scores))} to {as_score(max(scores))}"
    return figure, f"mean return in the {what}: median of {len(scores)} {series.kind} ({spread})"


def _span(values: Iterable[Any], write: Any) -> str:
    """Writes the median of some values; unknown ones do not count."""
    known = [value for value in values if value is not None]
    return write(statistics.median(known)) if known else "-"


def _states(runs: Sequence[Run]) -> str:
    states = [run.state for run in runs]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    if len(runs) == 1:
        return states[0]
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def speed(run: Run) -> float | None:
    """Returns the steps per second of a run from its first line of metrics to the last; None if unknown.

    Those of all members of a population count, as in the metrics.
    """
    if len(run.lines) < 2:
        return None
    first, last = run.lines[0], run.lines[-1]
    passed = (last.get("wall_s") or 0.0) - (first.get("wall_s") or 0.0)
    made = (last.get("env_steps") or 0) - (first.get("env_steps") or 0)
    return made * Series("", (run,)).size / passed if passed > 0 else None


def memory(run: Run) -> float | None:
    """Returns the most memory that a run has had, in MB; None if unknown."""
    return max(
        (line["rss_mb"] for line in run.lines if line.get("rss_mb") is not None), default=None
    )


def legend(group: Group, number: int) -> str:
    """Returns buttons that name the series, and hide and show them in all charts of a group."""
    if len(group.series) == 1 and group.series[0].size == 1:
        return '<div class="legend"></div>'
    entries = "".join(
        f'<button type="button" class="entry" data-entry="{number}.{at}" aria-pressed="true">'
        f"{mark(at)}{text(series.label)}{_seeds(series)}</button>"
        for at, series in enumerate(group.series)
    )
    told = ""
    if any(series.size > 1 for series in group.series):
        told = "Of several seeds: the median, and a band from the lowest to the highest."
    if any(series.runs[0].options.get("seeds", 1) > 1 for series in group.series):
        told += " Training tells only the mean over the members of a population."
    return f'<div class="legend">{entries}<span class="quiet">{told}</span></div>'


def _seeds(series: Series) -> str:
    return "" if series.size == 1 else f' <span class="quiet">{series.size} {series.kind}</span>'


def times(group: Group) -> str:
    """Shows where the time of each series went, as bars and numbers; empty if no run has measured it."""
    names = [*STAGES, "waiting"]
    shares = [(series, time_shares(series)) for series in group.series if not series.members]
    rows = "".join(
        f"<tr><th>{text(series.label)}</th>"
        f'<td class="wide"><div class="bar">{_segments(share)}</div></td>'
        + "".join(f"<td{NUMBER}>{as_percent(share[name])}</td>" for name in names)
        + "</tr>"
        for series, share in shares
        if share
    )
    if not rows:
        return ""
    head = "".join(f'<th{NUMBER}><i class="stage {name}"></i>{name}</th>' for name in names)
    return _table(f"<th></th><th>share of the machine's time</th>{head}", rows, "times")


def _segments(share: dict[str, float]) -> str:
    return "".join(
        f'<i class="{name}" style="flex:{value:.4f} 0 0"></i>' for name, value in share.items()
    )


def runs_table(group: Group) -> str:
    """Lists the runs of a group with their figures."""
    rows = []
    for number, series in enumerate(group.series):
        if series.members:
            continue
        for run in series.runs:
            last, evaluated = run.last, evaluations(run)
            scores = evaluated[-1] if evaluated else {}
            mean = scores.get("evaluation/episode_return_mean")
            spread = as_number(scores.get("evaluation/episode_return_std"), 1)
            cells = [
                plain(run.options.get("seed")),
                as_count(last.get("env_steps")),
                as_duration(last.get("wall_s")),
                as_score(last.get("episode_return_mean")),
                "-" if mean is None else f"{as_score(mean)} ± {spread}",
                plain(scores.get("evaluation/episodes")),
                as_count(speed(run)),
                as_count(memory(run)),
            ]
            failure = run.history[-1].get("failure", "") if run.history else ""
            told = f": {text(failure)}" if run.state == "failed" and failure else ""
            rows.append(
                f'<tr><th>{mark(number)} {text(run.name)}</th><td class="state {run.state}">{run.state}'
                f"{told}</td>"
                + "".join(f"<td{NUMBER}>{text(cell)}</td>" for cell in cells)
                + "</tr>"
            )
    names = ("seed", "steps", "wall-clock", "training", "evaluation", "episodes", "steps/s", "MB")
    head = "".join(f"<th{NUMBER}>{name}</th>" for name in names)
    return _table(f"<th>run</th><th>state</th>{head}", "".join(rows))


def differences(group: Group) -> str:
    """Shows the options in which the series of a group differ."""
    whole = [series for series in group.series if not series.members]
    varied = differing(series.runs[0] for series in whole)
    if len(whole) == 1:
        count = len(whole[0].runs)
        told = "" if count == 1 else f"<p>The {count} runs differ by their seed only.</p>"
        if whole[0].is_mixed:
            sweep = text(whole[0].runs[0].options["sweep"])
            told += f"<p>The members of a population differ by their seed and by {sweep}.</p>"
        return told
    rows = "".join(
        f"<tr><th>{text(name)}</th>"
        + "".join(f"<td>{text(plain(value))}</td>" for value in values)
        + "</tr>"
        for name, values in varied.items()
    )
    head = "".join(f"<th>{text(series.label)}</th>" for series in whole)
    return _table(f"<th>option</th>{head}", rows)


def configuration(group: Group) -> str:
    """Lists the options that all runs of a group share."""
    varied = differing(group.runs)
    shared = {
        name: value for name, value in options_of(group.runs[0]).items() if name not in varied
    }
    if len({run.options.get("seed") for run in group.runs}) > 1:
        shared.pop("seed", None)
    rows = "".join(
        f"<tr><th>{text(name)}</th><td>{text(plain(value))}</td></tr>"
        for name, value in shared.items()
    )
    title = "Configuration" if not varied else "Configuration that all of them share"
    table = _table("<th>option</th><th>value</th>", rows)
    return f"<details><summary>{title}</summary>{table}</details>"


def machines(group: Group) -> str:
    """Tells when each run was trained, on what machine and with which versions."""
    described: dict[str, int] = {}
    rows = []
    for run in group.runs:
        if not run.history:
            rows.append(f'<tr><th>{text(run.name)}</th><td colspan="5">not recorded</td></tr>')
        for stint in run.history:
            place = described.setdefault(_place(stint), len(described) + 1)
            rows.append(
                f"<tr><th>{text(run.name)}</th><td>{_moment(stint.get('begun'))}</td>"
                f"<td{NUMBER}>{as_count(stint.get('env_steps'))}</td>"
                f"<td>{_moment(stint.get('ended'))}</td>"
                f"<td>{text(stint.get('outcome') or _unended(run, stint))}</td><td{NUMBER}>{place}</td></tr>"
            )
    head = (
        f"<th>run</th><th>started (UTC)</th><th{NUMBER}>at step</th><th>ended (UTC)</th>"
        f"<th>outcome</th><th{NUMBER}>machine</th>"
    )
    places = "".join(f"<p>Machine {number}: {told}</p>" for told, number in described.items())
    return places + _table(head, "".join(rows))


def _unended(run: Run, stint: dict[str, Any]) -> str:
    """Returns what became of a stint without an outcome: only the last one may still go on."""
    return "running" if run.state == "running" and stint is run.history[-1] else "killed"


def _place(stint: dict[str, Any]) -> str:
    """Describes the machine and the versions of a stint in one sentence, as HTML."""
    machine, versions = stint.get("machine", {}), stint.get("versions", {})
    devices = ", ".join(
        f"{count} x {kind}" for kind, count in machine.get("devices", {}).items() if kind != "cpu"
    )
    parts = [
        f"{machine.get('cpu', 'unknown')}, {machine.get('cores', 0):g} cores",
        f"{machine.get('memory_bytes', 0) / 1e9:.0f} GB",
        devices,
        machine.get("system", ""),
        f"Python {machine.get('python', '')}",
        *(f"{name} {version}" for name, version in versions.items()),
    ]
    return text(", ".join(part for part in parts if part)) + "."


def _moment(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M}"


def _table(head: str, rows: str, kind: str = "") -> str:
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
