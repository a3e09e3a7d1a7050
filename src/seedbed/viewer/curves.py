"""The curves of a report: which runs differ by their seed only, their median and band, what is plotted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seedbed import strict_json
from seedbed.envs.host.pickled import called
from seedbed.run.lines import MEMBERS, is_number
from seedbed.run.metrics import STAGES
from seedbed.run.options import FusedConfig
from seedbed.run.task import task_of
from seedbed.viewer.runs import Run

MOST_POINTS = 100_000
"""The most points of all curves of a page together: two to three megabytes."""
LEAST, MOST = 8, 600
"""The fewest and the most points that are kept of one curve; it keeps the extremes of what is left out."""
DIGITS = 7
"""Significant digits of a point."""
LAGS = ("lag_mean", "cluster/staleness_mean")
EVALUATED = "evaluation/episode_return_mean"
TRAINED = "episode_return_mean"

Points = tuple[NDArray[np.float64], NDArray[np.float64]]
"""x and y `[N]` of a curve; x never falls."""


@dataclasses.dataclass(frozen=True)
class Series:
    """Runs that differ by their seed only, or those members of a population that share a value of a sweep."""

    label: str
    runs: tuple[Run, ...]
    members: tuple[
        int, ...
    ] = ()  # of a population, whose evaluations are meant; empty: the whole run

    @property
    def is_mixed(self) -> bool:
        """Whether it is a whole sweep, whose members differ by more than their seed."""
        return not self.members and bool(self.runs[0].options.get("sweep"))

    @property
    def kind(self) -> str:
        """The unit that `size` counts, in words."""
        return "members" if self.is_mixed else "seeds"

    @property
    def size(self) -> int:
        """The number of seeds, or of members if it is a whole sweep."""
        swept = sum(map(len, _sweep(self.runs[0]).values()))
        each = len(self.members) or swept or self.runs[0].options.get("seeds", 1)
        return len(self.runs) * each


class Group(NamedTuple):
    """The runs of one environment."""

    name: str
    series: tuple[Series, ...]

    @property
    def runs(self) -> list[Run]:
        """All runs, those of one series one after another."""
        return [run for one in self.series if not one.members for run in one.runs]


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Divides runs by their environment, and those of one environment into series."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(environment(run), []).append(run)
    short = [name.rpartition(":")[2] for name in by_name]
    return [
        Group(last if short.count(last) == 1 else name, tuple(_series(those)))
        for last, (name, those) in zip(short, by_name.items(), strict=True)
    ]


def environment(run: Run) -> str:
    """Returns the name of a run's environment: as the user gave it, or else as its configuration has it."""
    return run.config.get("name", "").rpartition("/")[0] or called(run.config["env"])


def options_of(run: Run) -> dict[str, Any]:
    """Returns all options of a run by their names on the command line, without dashes."""
    options: dict[str, Any] = {"runtime": run.runtime}
    begun = {name: value for name, value in run.config["start"].items() if value}
    options |= {"from" if name == "run" else f"from_{name}": begun[name] for name in begun}
    options |= run.options
    for part, values in (("agent", run.config["agent"]), ("env", task_of(run.config))):
        for name, value in values.items():
            options[part if name in ("class", "kind") else f"{part}.{name}"] = value
    return options


def differing(runs: Iterable[Run]) -> dict[str, list[Any]]:
    """Returns the options that differ between runs, but for the seed, with the value of each run.

    An option that a run does not have is None there.
    """
    each = [options_of(run) for run in runs]
    names = dict.fromkeys(name for options in each for name in options if name != "seed")
    columns = {name: [options.get(name) for options in each] for name in names}
    return {name: values for name, values in columns.items() if any(v != values[0] for v in values)}


def _series(runs: list[Run]) -> Iterator[Series]:
    alike: dict[str, list[Run]] = {}
    for run in runs:
        options = {name: value for name, value in options_of(run).items() if name != "seed"}
        alike.setdefault(strict_json.dumps(options, sort=True), []).append(run)
    for those, label in zip(alike.values(), _labels(list(alike.values())), strict=True):
        values = _sweep(those[0])
        yield Series(f"{label}, all values" if values else label, tuple(those))
        for value, members in values.items():
            yield Series(f"{label}, {value}", tuple(those), members)


def _labels(alike: list[list[Run]]) -> list[str]:
    """Names each series by its agent, and by as few of its options as tell it from others of that agent.

    If it takes more than two options, the folder's name stands for them.
    """
    agents = [_agent(those[0]) for those in alike]
    labels = []
    for agent, those in zip(agents, alike, strict=True):
        rivals = [other[0] for name, other in zip(agents, alike, strict=True) if name == agent]
        names = _telling(rivals)
        own = options_of(those[0])
        parts = [f"{name.rpartition('.')[2]} {plain(own.get(name))}" for name in names]
        parts = parts if len(parts) <= 2 else [those[0].name]
        labels.append(", ".join([agent, *parts]))
    return labels


def _telling(runs: list[Run]) -> list[str]:
    """Returns the names of a few options by which every run can be told from the others."""
    varied = differing(runs)
    # Those of the agent say most.
    names = sorted(varied, key=lambda name: (not name.startswith("agent"), "_every" in name))
    chosen: list[str] = []
    told = {""}
    while names and len(told) < len(runs):
        chosen.append(names.pop(0))
        told = {" ".join(plain(varied[name][at]) for name in chosen) for at in range(len(runs))}
    return chosen


def _agent(run: Run) -> str:
    kind = str(run.config["agent"].get("class", "")).rpartition(":")[2].lower()
    return run.config.get("name", "").rpartition("/")[2] or kind or "agent"


def plain(value: Any) -> str:
    """Writes the value of an option."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(plain(each) for each in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name}={plain(each)}" for name, each in value.items()) or "none"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"


def _sweep(run: Run) -> dict[str, tuple[int, ...]]:
    """Returns the members of a population for each value of its sweep; empty if there is no sweep."""
    if not run.options.get("sweep"):
        return {}
    given = FusedConfig(sweep=run.options["sweep"], seeds=run.options.get("seeds", 1))
    found: dict[str, list[int]] = {}
    for member, variation in enumerate(given.variations):
        name = ", ".join(f"{name} {value:g}" for name, value in variation.items())
        found.setdefault(name, []).append(member)
    return {name: tuple(members) for name, members in found.items()}


def column(lines: Iterable[dict[str, Any]], x: str, names: Sequence[str]) -> Points:
    """Returns a metric over another, from the lines that have both; `names` are tried in order."""
    found: dict[float, float] = {}
    for line in lines:
        y = next((line[name] for name in names if is_number(line.get(name))), None)
        if y is not None and is_number(line.get(x)):
            found[float(line[x])] = float(y)
    places = np.array(sorted(found))
    return places, np.array([found[place] for place in places])


def evaluations(run: Run) -> list[dict[str, Any]]:
    """Returns the first line after each evaluation, which has its result.

    Of a step that was evaluated again, as by a run that goes on with another number of episodes, it is the
    last evaluation.
    """
    found: dict[Any, dict[str, Any]] = {}
    for line in run.lines:
        step = line.get("evaluation/env_steps")
        before = found.get(step, {})
        again = any(before.get(x) != line.get(x) for x in (EVALUATED, "evaluation/episodes"))
        if is_number(line.get(EVALUATED)) and again:
            found[step] = line
    return list(found.values())


def evaluation_curves(series: Series, x: str) -> list[Points]:
    """Returns the evaluations of each seed of a series, over `env_steps` or `wall_s`."""
    over = "evaluation/env_steps" if x == "env_steps" else x
    curves = []
    for run in series.runs:
        lines = evaluations(run)
        own = [line[MEMBERS] for line in lines if MEMBERS in line]
        count = min(map(len, own), default=0)
        if len(own) < len(lines) or count <= max(series.members, default=-1):
            curves.append(column(lines, over, [EVALUATED]))
            continue
        for member in series.members or range(count):
            pairs = [
                {over: line.get(over), "y": each[member]}
                for line, each in zip(lines, own, strict=True)
            ]
            curves.append(column(pairs, over, ["y"]))
    return [curve for curve in curves if len(curve[0])]


class Band(NamedTuple):
    """The median of several curves, and the lowest and highest of them, where all of them are."""

    x: NDArray[np.float64]
    median: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def band_of(curves: Sequence[Points]) -> Band | None:
    """Returns median, lowest and highest value wherever all curves are, which are straight between points.

    Returns None if they have no x in common.
    """
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    grid = grid[(grid >= start) & (grid <= end)]
    if not len(grid):
        return None
    grid = grid[np.unique(np.linspace(0, len(grid) - 1, MOST).astype(int))]
    return _across(grid, np.stack([np.interp(grid, x, y) for x, y in curves]))


def band_of_evaluations(curves: Sequence[Points]) -> Band:
    """Returns median, lowest and highest of the first evaluations, the second ones, and so on.

    The seeds of a series are evaluated at nearly the same steps; x is the median of theirs.
    """
    count = min(len(x) for x, _ in curves)
    return _across(
        np.median([x[:count] for x, _ in curves], axis=0), np.stack([y[:count] for _, y in curves])
    )


def _across(x: NDArray[np.float64], values: NDArray[np.float64]) -> Band:
    return Band(x, np.median(values, axis=0), values.min(0), values.max(0))


def thinned(points: Points, most: int = MOST) -> Points:
    """Leaves out points beyond `most`, but keeps the ends and the lowest and highest of every stretch."""
    x, y = points
    if len(x) <= most:
        return points
    chosen = _kept(y, most)
    return x[chosen], y[chosen]


def _kept(y: NDArray[np.float64], most: int) -> list[int]:
    """Returns the places of at most `most` values: the ends, lowest and highest of each stretch."""
    kept = {0, len(y) - 1}
    for stretch in np.array_split(np.arange(len(y)), most // 2 - 1):
        kept |= {int(stretch[np.argmin(y[stretch])]), int(stretch[np.argmax(y[stretch])])}
    return sorted(kept)


def thin_together(drawn: Sequence[dict[str, Any]]) -> None:
    """Leaves out points of the longest of all traces of a page, until there are at most `MOST_POINTS`."""
    most = MOST
    while most > LEAST and sum(min(len(trace["x"]), most) for trace in drawn) > MOST_POINTS:
        most -= max(1, most // 8)
    for trace in drawn:
        if len(trace["x"]) > most:
            chosen = _kept(np.array(trace["y"]), most)
            for name in trace.keys() & {"x", "y", "low", "high"}:
                trace[name] = [trace[name][i] for i in chosen]


def traces(group: Group, x: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns what a chart of a metric draws: for each series a line, or its seeds and their band."""
    whole = [(number, one) for number, one in enumerate(group.series) if not one.members]
    drawn: list[dict[str, Any]] = []
    for number, one in whole:
        curves = [column(run.lines, x, names) for run in one.runs]
        curves = [curve for curve in curves if len(curve[0])]
        if len(curves) > 1:
            drawn += [_trace(number, "seed", *thinned(curve)) for curve in curves]
            drawn += _band_trace(number, band_of(curves))
        else:
            drawn += [_trace(number, "line", *thinned(curve)) for curve in curves]
    return drawn


def evaluation_traces(group: Group, x: str) -> list[dict[str, Any]]:
    """Returns what the chart of evaluations draws."""
    drawn: list[dict[str, Any]] = []
    for number, one in enumerate(group.series):
        # The members of a sweep are drawn for each of its values instead.
        if one.is_mixed:
            continue
        curves = evaluation_curves(one, x)
        if len(curves) > 1:
            drawn += [_trace(number, "seed", *thinned(curve)) for curve in curves]
            # At one moment, seeds may have had different numbers of evaluations.
            band = band_of_evaluations(curves) if x == "env_steps" else band_of(curves)
            drawn += _band_trace(number, band)
        else:
            drawn += [_trace(number, "line", *thinned(curve)) for curve in curves]
    return drawn


def _band_trace(number: int, band: Band | None) -> list[dict[str, Any]]:
    if band is None:
        return []
    low, high = _rounded(band.low), _rounded(band.high)
    return [{**_trace(number, "median", band.x, band.median), "low": low, "high": high}]


def _trace(
    number: int, kind: str, x: NDArray[np.float64], y: NDArray[np.float64]
) -> dict[str, Any]:
    return {"series": number, "kind": kind, "x": _rounded(x), "y": _rounded(y)}


def _rounded(values: NDArray[np.float64]) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values]


def time_shares(series: Series) -> dict[str, float]:
    """Returns the share of each stage, and of waiting, in the whole time that was measured; empty if none."""
    names = [*STAGES, "waiting"]
    sums, measured = dict.fromkeys(names, 0.0), 0.0
    for run in series.runs:
        before = 0.0
        for line in run.lines:
            now = float(line.get("wall_s") or before)
            if all(f"time/{name}" in line for name in names):
                measured += now - before
                for name in names:
                    sums[name] += (now - before) * line[f"time/{name}"]
            before = now
    return {name: total / measured for name, total in sums.items()} if measured > 0 else {}
