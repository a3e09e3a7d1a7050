"""Figures of pages and the committed files that they were read from: `python tests/figures.py` lists them.

Behind figures stands a comment that no reader sees. It names the source of each, in their order:

    median **5,140** in 56 s (54 to 60)<!-- from fused.json rows.preset=ant/ppo.learning:
    summary.gymnasium, summary.wall_s, min runs.wall_s, max runs.wall_s -->

    comment    from GROUP; GROUP ...
    GROUP      FILE START: SOURCE, SOURCE ...   START is put before each path, and may be left out
               protocol: NUMBER, NUMBER ...     numbers that were chosen and not measured
               no data: NUMBER, NUMBER ...      the line says "no data of this is committed"
    FILE       in benchmarks/results or docs/results: .json, .csv, or .md, of which the first table counts
    SOURCE     TERM, or TERM * TERM, likewise with / + - (from left to right), and at the end perhaps
               "to 100": the figure is rounded to hundreds; one TERM at least is a PATH
    TERM       NUMBER or PATH, perhaps after one of min, max, median, mean, sum, count, first, last
    PATH       parts between dots. A name is a key (with * and ? a pattern, for keys with dots, commas or
               spaces); of a list it is taken of every element. A whole number is the place in a list, or of
               a number in a text. NAME=VALUE keeps what has that value.

A figure must be its source, rounded to the digits that it shows. `protocol` and `no data` may also begin a
comment. `python tests/figures.py "fused.json rows.preset=ant/ppo: learning.summary.gymnasium"` shows values.
"""

from __future__ import annotations

import csv
import functools
import json
import operator
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks/results", "docs/results")
REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "min": min,
    "max": max,
    "median": statistics.median,
    "mean": statistics.fmean,
    "sum": sum,
    "count": len,
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
}
OPERATORS = {"*": operator.mul, "/": operator.truediv, "+": operator.add, "-": operator.sub}
# Names such as Ant-v5, versions such as 2.1.1 and commits have no figures.
_NUMBER = re.compile(
    r"(?<![\w.,-])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?!\w|\.\d|,\d)", re.ASCII
)
_COMMENT = re.compile(r"<!--\s*((?:from|protocol:|no data:)\s.*?)-->", re.DOTALL)
# A table whose header has one of these words holds measurements; these columns of it do not.
_MEASURED = {"measured", "result"}
_OTHER = {"command", "commit", "machine", "machine, commit", "seeds"}


class Figure(NamedTuple):
    """A number in a page, and what its comment says of it."""

    place: str  # page:line
    shown: str
    file: str  # "protocol" and "no data" are none
    source: str  # "" where nothing is said


# Pages


def figures(page: Path, strict: bool) -> Iterator[Figure]:
    """Lists the figures of a page that have a source.

    A comment speaks for the last numbers before it in its paragraph or line of a table, as many as it
    names. If `strict`, it must name all since the comment before, where a table holds measurements, and the
    numbers that no comment names are listed without a source.
    """
    text = re.sub(r"^```.*?^```", _blank, page.read_text(), flags=re.DOTALL | re.MULTILINE)
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    for line, block, checked in _blocks(text):
        yield from _figures_of_block(f"{name}:{line}", block, checked and strict)


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0])


def _blocks(text: str) -> Iterator[tuple[int, str, bool]]:
    """Lists paragraphs and lines of tables: the first line, the text, and whether it holds measurements."""
    checked: list[bool] | None = None  # of the columns of the table that this is
    paragraph: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        row = line.lstrip().startswith("|")
        if paragraph and (row or not line.strip()):
            yield number - len(paragraph), "\n".join(paragraph), False
            paragraph = []
        if not row:
            checked = None
            paragraph += [line] if line.strip() else []
            continue
        cells = _cells(line)
        if checked is None:
            names = [cell.partition(",")[0] for cell in cells]
            measured = bool(_MEASURED & set(names))
            checked = [measured and n > 0 and c not in _OTHER for n, c in enumerate(cells)]
        elif any(checked):
            kept = [cell for cell, one in zip(cells, checked, strict=True) if one]
            yield number, " | ".join(kept), True
        else:
            yield number, line, False


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _figures_of_block(place: str, block: str, strict: bool) -> Iterator[Figure]:
    before = 0
    for comment in _COMMENT.finditer(block):
        if not block[: comment.start()].rpartition("\n")[2].strip():
            raise ValueError(f"{place}: a comment that begins a line would end the paragraph")
        shown = numbers(block[before : comment.start()])
        sources = list(_sources(comment[1]))
        if len(sources) > len(shown) or (strict and len(sources) < len(shown)):
            raise ValueError(f"{place}: {len(sources)} sources for the numbers {', '.join(shown)}")
        before = comment.end()
        for number, (file, source) in zip(shown[-len(sources) :], sources, strict=True):
            if file == "no data" and "no data of" not in block:
                raise ValueError(
                    f"{place}: no data of {number} is committed, which no reader is told"
                )
            yield Figure(place, number, file, source)
    if strict:
        for number in numbers(block[before:]):
            yield Figure(place, number, "", "")


def _sources(comment: str) -> Iterator[tuple[str, str]]:
    for group in " ".join(comment.split()).removeprefix("from ").split(";"):
        head, _, listed = group.strip().partition(": ")
        file, _, start = (head, "", "") if head in ("protocol", "no data") else head.partition(" ")
        for source in filter(None, map(str.strip, listed.split(", "))):
            yield file, _started(source, start)


def _started(source: str, start: str) -> str:
    """Puts the start of a group before each path of a source."""
    if not start:
        return source
    words = source.split(" ")
    plain = {*REDUCTIONS, *OPERATORS, "to"}
    return " ".join(w if w in plain or _NUMBER.fullmatch(w) else f"{start}.{w}" for w in words if w)


def numbers(text: str) -> list[str]:
    """Lists the numbers that a reader sees, but for those in code and in links' targets."""
    for unseen in (r"<!--.*?-->", r"`[^`]*`", r"(?<=\])\([^)]*\)", r"</?\w[^>]*>"):
        text = re.sub(unseen, " ", text, flags=re.DOTALL)
    return _NUMBER.findall(text)


# Files


@functools.cache
def read(name: str) -> Any:
    """Reads a committed file: rows of a table are dicts."""
    found = [ROOT / folder / name for folder in FOLDERS if (ROOT / folder / name).is_file()]
    if len(found) != 1:
        raise ValueError(f"{len(found)} files {name} are in {' and '.join(FOLDERS)}")
    text = found[0].read_text()
    if name.endswith(".json"):
        return json.loads(text)
    if name.endswith(".csv"):
        return list(csv.DictReader(text.splitlines()))
    heads, _, *rows = [_cells(line) for line in _first_table(text)]
    return [dict(zip(heads, row, strict=True)) for row in rows]


def _first_table(text: str) -> list[str]:
    found = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return found[0].splitlines() if found else ["|", "|"]


def value(file: str, source: str) -> tuple[float, float]:
    """Returns what a source is, and what it is rounded to, or 0."""
    first, *rest = re.split(r" (\*|/|\+|-|to) ", source)
    if all(_NUMBER.fullmatch(term) for term in (first, *rest[1::2])):
        raise ValueError("a source must name a key")
    result, rounded = _term(file, first), 0.0
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        if sign == "to":
            rounded = float(term)
        else:
            result = OPERATORS[sign](result, _term(file, term))
    return result, rounded


def _term(file: str, term: str) -> float:
    if _NUMBER.fullmatch(term):
        return as_number(term)
    reduction, _, path = term.rpartition(" ")
    found = _found(file, path)
    if reduction == "count":
        return len(found)
    values = list(_leaves(found))
    if not values or (not reduction and len(values) > 1):
        raise ValueError(f"{file} has {len(values)} values at {path}")
    return REDUCTIONS[reduction](values) if reduction else values[0]


def _found(file: str, path: str) -> list[Any]:
    found = [read(file)]
    for part in path.split("."):
        found = list(_step(found, part))
    return found


def _step(things: list[Any], part: str) -> Iterator[Any]:
    name, equals, wanted = part.partition("=")
    for thing in things:
        if isinstance(thing, list):
            yield from [thing[int(part)]] if part.isdigit() else _step(thing, part)
        elif isinstance(thing, str) and part.isdigit():
            yield numbers(thing)[int(part)]
        elif isinstance(thing, dict) and equals:
            yield from [thing] if fnmatchcase(str(thing.get(name)), wanted) else []
        elif isinstance(thing, dict):
            keys = [part] if part in thing else [key for key in thing if fnmatchcase(key, part)]
            yield from (thing[key] for key in keys)


def _leaves(things: list[Any]) -> Iterator[float]:
    for thing in things:
        if isinstance(thing, list):
            yield from _leaves(thing)
        elif isinstance(thing, str):
            yield from map(as_number, numbers(thing)[:1])
        elif isinstance(thing, int | float):
            yield float(thing)


def as_number(text: str) -> float:
    """Reads a number as a page writes it."""
    return float(text.replace(",", ""))


# Comparison


def wrong(figure: Figure) -> str:
    """Returns what is wrong with a figure, or an empty text."""
    if not figure.source:
        return f"{figure.place}: {figure.shown} has no source"
    if figure.file in ("protocol", "no data"):
        same = figure.source == figure.shown
        return "" if same else f"{figure.place}: {figure.shown} is called {figure.source}"
    try:
        exact, rounded = value(figure.file, figure.source)
    except (ValueError, LookupError) as error:
        return f"{figure.place}: {figure.shown}: {error} ({figure.file} {figure.source})"
    digits, _, exponent = figure.shown.partition("e")
    unit = rounded or 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    if abs(as_number(figure.shown) - exact) <= unit / 2 * (1 + 1e-9):
        return ""
    return f"{figure.place}: {figure.shown} is {exact:,.6g} in {figure.file} at {figure.source}"


def pages() -> list[Path]:
    """Returns the pages that may have sources."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(comments: list[str]) -> None:
    """Prints the values of the given sources, or the keys there; without any, all figures of all pages."""
    for comment in comments:
        for file, source in _sources(comment):
            try:
                print(f"{value(file, source)[0]:,.6g}  {file} {source}")
            except ValueError:
                for thing in _found(file, source.rpartition(" ")[2]):
                    print(list(thing) if isinstance(thing, dict) else thing, f" {file} {source}")
    if not comments:
        for figure in (each for page in pages() for each in figures(page, strict=False)):
            print(f"{figure.place}: {figure.shown}  {figure.file} {figure.source}")


if __name__ == "__main__":
    main(sys.argv[1:])
