"""The page of a search: its trials, best first, and how each option went with the score."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from seedbed.tuning.space import Choice, Range
from seedbed.tuning.study import ENDED, Study
from seedbed.viewer.html import WEB, fill
from seedbed.viewer.recording import written_whole
from seedbed.viewer.tables import colours, text

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 360, 240, 64, 34
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{{title}}</title><style>{{style}}
main svg { max-width: 100%; height: auto; }
.plots { display: flex; flex-wrap: wrap; gap: 16px; }
.wide { overflow-x: auto; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
</style></head><body><header><h1>{{title}}</h1><p>{{summary}}</p></header>
<main><section><h2>The best</h2>{{best}}</section>
<section><h2>Options and return</h2><p class="quiet">Filled: trained to the end. Hollow: given up at an
evaluation, with the return that it had there.</p><div class="plots">{{plots}}</div></section>
<section><h2>Trials</h2><div class="wide">{{trials}}</div></section></main></body></html>
"""


def write_page(study: Study, path: Path) -> None:
    """Writes the page of a study; raises StorageError if it cannot be written."""
    records = study.trials(*ENDED)
    ranked = sorted(records, key=lambda each: -_score(each))
    counts = {
        state: sum(each.state.name == state for each in records) for state in ("PRUNED", "FAIL")
    }
    style = fill(
        (WEB / "report.css").read_text(encoding="utf-8"),
        {each: colours(each) for each in ("light", "dark")},
    )
    parts = {
        "title": text(f"tune {study.config.name}"),
        "style": style,
        "summary": f"{len(records)} trials have ended; {counts['PRUNED']} of them were given up, and "
        f"{counts['FAIL']} failed. A score is the mean return of a trial's last evaluation, of "
        f"{study.config.runtime.evaluate_episodes} episodes.",
        "best": _best(study),
        "plots": "".join(_plot(study, name, each, records) for name, each in study.space.items()),
        "trials": _table(study, ranked),
    }
    with written_whole(path, ".html") as partial:
        partial.write_text(fill(_PAGE, parts), encoding="utf-8")


def _score(record: Any) -> float:
    """Returns a trial's score, or its last evaluation; -inf if it has none."""
    if record.value is not None:
        return record.value
    return record.intermediate_values[record.last_step] if record.intermediate_values else -math.inf


def _best(study: Study) -> str:
    best = study.best()
    if best is None:
        return "<p>No trial has ended with a return yet.</p>"
    command = text(study.command_of(best))
    return f"<p>Trial {best.number}: {best.value:.2f}</p><pre>{command}</pre>"


def _table(study: Study, records: list[Any]) -> str:
    names = [text(name) for name in study.space]
    head = "".join(f"<th>{name}</th>" for name in ("trial", "return", "", "s", *names))
    rows = []
    for record in records:
        score, values = _score(record), study.values_of(record)
        what = {"COMPLETE": "", "PRUNED": "given up"}.get(record.state.name)
        what = record.user_attrs.get("reason", "failed") if what is None else what
        seconds = (record.datetime_complete - record.datetime_start).total_seconds()
        cells = [
            str(record.number),
            "-" if score == -math.inf else f"{score:.2f}",
            text(what),
            f"{seconds:.0f}",
            *(text(_short(values.get(name, ""))) for name in study.space),
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plot(study: Study, name: str, dimension: Range | Choice, records: list[Any]) -> str:
    """Draws the score of each trial over an option."""
    shown = [each for each in records if _score(each) > -math.inf and name in each.params]
    if not shown:
        return ""
    scores = [_score(each) for each in shown]
    low, high = min(scores), max(scores)
    ticks, place = _axis(dimension)

    def x(value: Any) -> float:
        return _LEFT + place(value) * (_WIDTH - _LEFT - 16)

    def y(score: float) -> float:
        share = (score - low) / (high - low) if high > low else 0.5
        return _HEIGHT - _BOTTOM - 10 - share * (_HEIGHT - _BOTTOM - 44)

    marks = "".join(
        f'<circle cx="{x(study.values_of(each)[name]):.1f}" cy="{y(_score(each)):.1f}" r="4" '
        f'stroke="#0072b2" fill="{"#0072b2" if each.state.name == "COMPLETE" else "none"}">'
        f"<title>trial {each.number}: {_score(each):.2f}</title></circle>"
        for each in shown
    )
    axes = "".join(
        f'<text x="{x(value):.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{text(_short(value))}</text>'
        for value in ticks
    )
    axes += "".join(
        f'<text x="{_LEFT - 8}" y="{y(score) + 4:.1f}" text-anchor="end">{score:.4g}</text>'
        for score in sorted({low, high})
    )
    frame = f"M{_LEFT},28V{_HEIGHT - _BOTTOM}H{_WIDTH - 8}"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" font-size="12" fill="currentColor">'
        f'<text x="{_LEFT}" y="16" font-size="13">{text(name)}</text>'
        f'<path d="{frame}" stroke="currentColor" fill="none" opacity=".4"/>{axes}{marks}</svg>'
    )


def _axis(dimension: Range | Choice) -> tuple[list[Any], Any]:
    """Returns values to mark on an option's axis, and the function from a value to its place, 0 to 1."""
    if isinstance(dimension, Choice):
        order = [json.dumps(each) for each in dimension.values]
        return list(
            dimension.values
        ), lambda value: (order.index(json.dumps(value)) + 0.5) / len(order)
    scale = math.log if dimension.log else float
    low, high = scale(dimension.low), scale(dimension.high)
    middle = (low + high) / 2
    ticks = [dimension.low, math.exp(middle) if dimension.log else middle, dimension.high]
    return ticks, lambda value: (scale(value) - low) / (high - low)
