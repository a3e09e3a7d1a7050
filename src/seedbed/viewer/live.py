"""The display of a training run: a live view on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import collections
import sys
import time
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from seedbed.printable import printable
from seedbed.viewer.background import unbuffered
from seedbed.viewer.notebook import Output
from seedbed.viewer.text import as_count, as_duration, as_number, as_percent

SHARES = (
    ("environment", "green"),
    ("inference", "cyan"),
    ("learning", "magenta"),
    ("waiting", "bright_black"),
)
# The most characters in a line of the panel.
_WIDTH = 100
SHOWN_LEARNER = 8
"""The most learner metrics that are shown."""
_RUNTIME = frozenset(
    [
        "wall_s",
        "env_steps",
        "frames",
        "env_steps_per_s",
        "frames_per_s",
        "learner_steps",
        "episodes",
        "episode_return_mean",
        "episode_length_mean",
        "lag_mean",
        "lag_max",
        "bottleneck",
        "rss_mb",
        "inference_rows_mean",
        "inference_blocked_share",
        "inference_behind_share",
        "learner_waiting_share",
        "learner_program_ms",
        "queued_unrolls",
        "actor_restarts",
    ]
)
"""Metrics of the runtime. All metrics with other names are the agent's."""


def make_view(
    total_steps: int, title: str, run: str, console: Console | None = None
) -> LiveView | PlainLog:
    """Returns the live view if the console is a terminal or a notebook, else a log of plain lines."""
    console = console or Console(file=unbuffered(sys.stdout), highlight=False)
    title, run = printable(title), printable(run)
    if console.is_jupyter:
        # Rich would show each line that other code prints as an output of its own.
        plain = Console(file=sys.stdout, force_jupyter=False, width=_WIDTH, height=40)
        return LiveView(total_steps, title, run, plain, Output(_WIDTH))
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(total_steps, title, run, console)
    return PlainLog(total_steps, title, run, console)


class PlainLog:
    """A view that prints one plain line for every update and message."""

    report_every_s = 10.0
    printed = None  # other code may print between the lines

    def __init__(self, total_steps: int, title: str, run: str, console: Console) -> None:
        self._total_steps, self._title, self._run = total_steps, title, run
        self._console = console
        self._progress = _Progress(total_steps)

    def __enter__(self) -> PlainLog:
        self._print(
            f"training {self._title} for {as_count(self._total_steps)} steps in {self._run}"
        )
        return self

    def __exit__(self, *exception: object) -> None:
        """Does nothing: there is nothing to end."""

    def update(self, metrics: dict[str, Any]) -> None:
        """Prints the most important metrics in one line."""
        done, remaining = self._progress.update(metrics)
        parts = [
            as_duration(metrics.get("wall_s")),
            f"{as_count(metrics.get('env_steps'))} steps ({done:.0%}, {remaining} left)",
            f"return {as_number(metrics.get('episode_return_mean'))}",
            f"{as_count(metrics.get('env_steps_per_s'))} steps/s",
            f"{as_count(metrics.get('frames_per_s'))} frames/s",
            *(" ".join(part) for part in _experience(metrics)),
            *(" ".join(row[:2]) for row in [*_streams(metrics)[:1], *_learners(metrics)]),
            " ".join(f"{name[:3]} {as_percent(metrics.get(f'time/{name}'))}" for name, _ in SHARES),
            f"bottleneck {metrics.get('bottleneck') or '-'}",
            f"{as_number(metrics.get('rss_mb'), 0)} MB",
        ]
        evaluation = metrics.get("evaluation/episode_return_mean")
        if evaluation is not None:
            parts.append(f"evaluation {as_number(evaluation)}")
        self._print(" | ".join(parts))

    def message(self, text: str, at: float) -> None:
        """Prints a message, without its time."""
        del at
        self._print(text)

    def _print(self, text: str) -> None:
        # Do not wrap at the console's width: these lines go to files and pipes.
        self._console.print(Text(text), soft_wrap=True)
        self._console.file.flush()


class Surface(Protocol):
    """A place where something is drawn again and again: Rich's `Live`, or an output of a notebook."""

    def start(self) -> None:
        """Begins to show what is drawn."""
        ...

    def stop(self) -> None:
        """Ends drawing; what was drawn last stays."""
        ...

    def update(self, renderable: RenderableType, *, refresh: bool) -> None:
        """Draws, in place of what was drawn before."""
        ...


class LiveView:
    """A panel that is redrawn in place. Only its methods draw, in the thread that calls them."""

    report_every_s = 1.0

    def __init__(
        self,
        total_steps: int,
        title: str,
        run: str,
        console: Console,
        surface: Surface | None = None,
    ) -> None:
        """Draws on `surface`, by default on the console, where other code's lines go in any case."""
        self._total_steps, self._title, self._run = total_steps, title, run
        self._console = console
        self._progress = _Progress(total_steps)
        self._done, self._remaining = 0.0, "-"
        self._metrics: dict[str, Any] = {}
        self._messages: collections.deque[str] = collections.deque(maxlen=5)
        # Other code's output comes through `printed`: if Rich redirected it, that code would wait for the
        # terminal.
        self._surface: Surface = surface or Live(
            console=self._console,
            auto_refresh=False,
            transient=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> LiveView:
        self._surface.start()
        self._draw()
        return self

    def __exit__(self, *exception: object) -> None:
        self._surface.stop()

    def update(self, metrics: dict[str, Any]) -> None:
        """Draws new metrics. Metrics that are absent keep their old values."""
        self._metrics.update(metrics)
        self._done, self._remaining = self._progress.update(self._metrics)
        self._draw()

    def message(self, text: str, at: float) -> None:
        """Adds a message, sent at `at` (seconds since the epoch), below the figures."""
        self._messages.append(f"{time.strftime('%H:%M:%S', time.localtime(at))}  {text}")
        self._draw()

    def printed(self, text: str) -> None:
        """Writes a line that other code in the process printed; it appears above the panel."""
        self._console.print(Text.from_ansi(text))

    def _draw(self) -> None:
        self._surface.update(self.render(), refresh=True)

    def render(self) -> RenderableType:
        """Returns the panel that shows the present metrics and messages."""
        width = max(40, min(self._console.width, _WIDTH))
        inner = width - 4
        parts: list[RenderableType] = [
            self._progress_line(inner),
            Text(),
            self._figures(),
            Text(),
            self._time_bars(inner),
        ]
        learner = self._learner()
        if learner is not None:
            parts += [Text(), learner]
        # The panel must not be taller than the console.
        rows = 20 + len(_streams(self._metrics))
        shown = list(self._messages)[-max(1, self._console.height - rows) :]
        if shown:
            parts.append(Text())
            parts += [
                Text(text, style="bright_black", overflow="ellipsis", no_wrap=True)
                for text in shown
            ]
        run = Text(self._run, style="bright_black", overflow="ellipsis", no_wrap=True)
        return Panel(
            Group(*parts),
            title=Text(f"seedbed  {self._title}", style="bold"),
            subtitle=run,
            width=width,
            border_style="green",
        )

    def _progress_line(self, width: int) -> Text:
        steps = self._metrics.get("env_steps")
        tail = (
            f" {self._done:4.0%}  {as_count(steps)} of {as_count(self._total_steps)} steps  "
            f"{as_duration(self._metrics.get('wall_s'))}, {self._remaining} left"
        )
        if width < 66:
            tail = f" {self._done:4.0%}  {as_count(steps)} steps, {self._remaining} left"
        return _bar(self._done, max(8, width - len(tail)), "green").append(tail)

    def _figures(self) -> Table:
        value = self._metrics.get
        evaluation = value("evaluation/episode_return_mean")
        deviation = value("evaluation/episode_return_std")
        last = "-" if evaluation is None else as_number(evaluation)
        if evaluation is not None and deviation is not None:
            last += f" ± {as_number(deviation)}"
        table = Table.grid(expand=True, padding=(0, 1))
        for style in ("bright_black", "bold", "bright_black", "bold"):
            table.add_column(style=style, no_wrap=True, ratio=1)
        label, experience = next(iter(_experience(self._metrics)), ("lag", "none"))
        rows = (
            ("return (last 100)", as_number(value("episode_return_mean")), "evaluation", last),
            (
                "env steps/s",
                as_count(value("env_steps_per_s")),
                "frames/s",
                as_count(value("frames_per_s")),
            ),
            ("episodes", as_count(value("episodes")), "updates", as_count(value("learner_steps"))),
            (label, experience, "memory", f"{as_number(value('rss_mb'), 0)} MB"),
            *_streams(self._metrics),
            *_learners(self._metrics),
        )
        for row in rows:
            table.add_row(*row)
        return table

    def _time_bars(self, width: int) -> Table:
        table = Table.grid(padding=(0, 1))
        bottleneck = self._metrics.get("bottleneck")
        for name, colour in SHARES:
            share = self._metrics.get(f"time/{name}")
            bar = _bar(share or 0.0, max(10, width - 36), colour)
            note = Text("<- bottleneck", style="bold yellow") if name == bottleneck else Text()
            table.add_row(Text(name, style=colour), bar, as_percent(share).rjust(4), note)
        return table

    def _learner(self) -> Table | None:
        names = [
            name
            for name, value in self._metrics.items()
            if name not in _RUNTIME
            and not name.startswith(("time/", "evaluation/", "replay/", "streams/", "cluster/"))
            and isinstance(value, int | float)
        ]
        if not names:
            return None
        table = Table.grid(expand=True, padding=(0, 1))
        for style in ("bright_black", "", "bright_black", ""):
            table.add_column(style=style, no_wrap=True, ratio=1)
        cells = [
            cell
            for name in names[:SHOWN_LEARNER]
            for cell in (name.removeprefix("learner/"), as_number(self._metrics[name], 4))
        ]
        cells += [""] * (-len(cells) % 4)
        for start in range(0, len(cells), 4):
            table.add_row(*cells[start : start + 4])
        return table


class _Progress:
    """An estimate of the time left, from the speed since the run was started or resumed."""

    def __init__(self, total_steps: int) -> None:
        self._total = max(1, total_steps)
        self._first: tuple[float, float] | None = None

    def update(self, metrics: dict[str, Any]) -> tuple[float, str]:
        steps, wall = metrics.get("env_steps"), metrics.get("wall_s")
        if steps is None or wall is None:
            return 0.0, "-"
        done = min(1.0, steps / self._total)
        if self._first is None:
            self._first = (steps, wall)
        speed = (steps - self._first[0]) / max(1e-9, wall - self._first[1])
        speed = speed if speed > 0.0 else metrics.get("env_steps_per_s") or 0.0
        remaining = (self._total - steps) / speed if speed > 0.0 else None
        return done, as_duration(None if remaining is None else max(0.0, remaining))


def _bar(fraction: float, width: int, colour: str) -> Text:
    filled = round(min(1.0, max(0.0, fraction)) * width)
    return Text().append("━" * filled, colour).append("─" * (width - filled), "bright_black")


def _experience(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns (label, text) for the size of replay, or for the age of experience in updates.

    Returns an empty list if the metrics have neither, as in a fused run.
    """
    if "replay/items" in metrics:
        items, size = as_count(metrics["replay/items"]), metrics["replay/bytes"] / 1e6
        return [("replay", f"{items}, {size:,.0f} MB")]
    if "lag_mean" in metrics:
        oldest = as_number(metrics.get("lag_max"))
        return [("lag", f"{as_number(metrics['lag_mean'])} (max {oldest})")]
    return []


def _streams(metrics: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Returns rows of figures about actors of other machines; none for a run that does not listen."""
    if "streams/hosts" not in metrics:
        return []
    p50_ms, p99_ms = (1e3 * metrics[f"streams/action_{name}_s"] for name in ("p50", "p99"))
    return [
        (
            "hosts",
            f"{as_count(metrics['streams/hosts'])}, {as_count(metrics['streams/streams'])} streams",
            "action p50, p99",
            f"{p50_ms:.0f}, {p99_ms:.0f} ms",
        ),
        (
            "reconnects",
            as_count(metrics["streams/reconnects"]),
            "refused",
            as_count(metrics["streams/refused"]),
        ),
    ]


def _learners(metrics: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Returns a row of figures about learners and their gradients; none where there is one learner only."""
    if "cluster/learners" not in metrics:
        return []
    mean, largest = (metrics[f"cluster/staleness_{name}"] for name in ("mean", "max"))
    return [
        (
            "learners",
            f"{as_count(metrics['cluster/learners'])}, staleness {mean:.1f} (max {as_count(largest)})",
            "discarded",
            f"{metrics['cluster/discarded_share']:.1%}, {as_count(metrics['cluster/restarts'])} restarts",
        )
    ]
