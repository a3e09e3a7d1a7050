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
from seedbed.terminal import unbuffered
from seedbed.viewer.figures import (
    Progress,
    bar,
    experience,
    grid,
    learners,
    streams,
    task_metrics,
)
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
        "episode_success_mean",
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
    console = console or Console(file=unbuffered(sys.stdout), highlight=False, emoji=False)
    title, run = printable(title), printable(run)
    if console.is_jupyter:
        # Rich would show each line that other code prints as an output of its own.
        plain = Console(file=sys.stdout, force_jupyter=False, emoji=False, width=_WIDTH, height=40)
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
        self._progress = Progress(total_steps)
        self._begun, self._stage = time.monotonic(), ""

    def __enter__(self) -> PlainLog:
        self._print(
            f"training {self._title} for {as_count(self._total_steps)} steps in {self._run}"
        )
        return self

    def __exit__(self, *exception: object) -> None:
        """Does nothing: there is nothing to end."""

    def update(self, metrics: dict[str, Any]) -> None:
        """Prints the most important metrics in one line."""
        self._stage = ""
        done, remaining = self._progress.update(metrics)
        parts = [
            as_duration(metrics.get("wall_s")),
            f"{as_count(metrics.get('env_steps'))} steps ({done:.0%}, {remaining} left)",
            f"return {as_number(metrics.get('episode_return_mean'))}",
            f"{as_count(metrics.get('env_steps_per_s'))} steps/s",
            f"{as_count(metrics.get('frames_per_s'))} frames/s",
            *(" ".join(part) for part in experience(metrics)),
            *(" ".join(row[:2]) for row in [*streams(metrics)[:1], *learners(metrics)]),
            " ".join(f"{name[:3]} {as_percent(metrics.get(f'time/{name}'))}" for name, _ in SHARES),
            f"bottleneck {metrics.get('bottleneck') or '-'}",
            f"{as_number(metrics.get('rss_mb'), 0)} MB",
            *(f"{name} {as_number(metrics[name])}" for name in task_metrics(metrics)),
        ]
        evaluation = metrics.get("evaluation/episode_return_mean")
        if evaluation is not None:
            parts.append(f"evaluation {as_number(evaluation)}")
        self._print(" | ".join(parts))

    def message(self, text: str, at: float) -> None:
        """Prints a message, without its time."""
        del at
        self._stage = text
        self._print(text)

    def tick(self) -> None:
        """Prints for how long the run has been in its present stage, if that has no figures."""
        if self._stage:
            self._print(f"{as_duration(time.monotonic() - self._begun)} | {self._stage}")

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
        self._progress = Progress(total_steps)
        self._done, self._remaining = 0.0, "-"
        self._metrics: dict[str, Any] = {}
        # When the metrics came, or the view was made, and the run's wall time then.
        self._at, self._wall_s = time.monotonic(), 0.0
        self._messages: collections.deque[str] = collections.deque(maxlen=5)
        self._stage = "starting"
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
        """Draws new metrics. Metrics that are absent keep their old values, but for those of evaluations."""
        kept = {key: x for key, x in self._metrics.items() if not key.startswith("evaluation/")}
        self._metrics = kept | metrics
        self._at, self._wall_s = time.monotonic(), metrics.get("wall_s") or self._wall_s
        self._done, self._remaining = self._progress.update(self._metrics)
        self._draw()

    def message(self, text: str, at: float) -> None:
        """Adds a message, sent at `at` (seconds since the epoch), below the figures.

        One that the panel has no room for appears above it.
        """
        self._stage = text
        self._messages.append(f"{time.strftime('%H:%M:%S', time.localtime(at))}  {text}")
        if not self._shown(self._parts()):
            self.printed(self._messages.pop())
        self._draw()

    def tick(self) -> None:
        """Draws again, with the time that has passed."""
        self._draw()

    def printed(self, text: str) -> None:
        """Writes a line that other code in the process printed; it appears above the panel."""
        self._console.print(Text.from_ansi(text))

    def _draw(self) -> None:
        self._surface.update(self.render(), refresh=True)

    def render(self) -> RenderableType:
        """Returns the panel that shows the present metrics and messages."""
        parts = self._parts()
        if shown := self._shown(parts):
            parts += [Text(), *shown]
        run = Text(self._run, style="bright_black", overflow="ellipsis", no_wrap=True)
        return Panel(
            Group(*parts),
            title=Text(f"seedbed  {self._title}", style="bold"),
            subtitle=run,
            width=self._width + 4,
            border_style="green",
        )

    @property
    def _width(self) -> int:
        """The characters in a line of the panel."""
        return max(40, min(self._console.width, _WIDTH)) - 4

    def _parts(self) -> list[RenderableType]:
        """Returns what the panel shows above the messages."""
        parts = [self._progress_line(), Text(), self._figures(), Text(), self._time_bars()]
        for metrics in (self._learner(), self._task()):
            if metrics:
                parts += [Text(), grid(metrics)]
        return parts

    def _shown(self, parts: list[RenderableType]) -> list[Text]:
        """Returns the newest messages that fit whole below `parts`: the panel must fit the console."""
        options = self._console.options.update(width=self._width)

        def height(shown: RenderableType) -> int:
            return len(self._console.render_lines(shown, options))

        room = self._console.height - height(Group(*parts)) - 4
        shown: list[Text] = []
        for message in reversed(self._messages):
            text = Text(message, style="bright_black", overflow="fold")
            room -= height(text)
            if room < 0:
                break
            shown.insert(0, text)
        return shown

    def _progress_line(self) -> Text:
        steps, width = self._metrics.get("env_steps"), self._width
        elapsed = as_duration(self._wall_s + time.monotonic() - self._at)
        if steps is None:
            line = Text(f"{elapsed}  {self._stage}", overflow="ellipsis", no_wrap=True)
            line.truncate(width)
            return line
        tail = (
            f" {self._done:4.0%}  {as_count(steps)} of {as_count(self._total_steps)} steps  "
            f"{elapsed}, {self._remaining} left"
        )
        if width < 66:
            tail = f" {self._done:4.0%}  {as_count(steps)} steps, {self._remaining} left"
        return bar(self._done, max(8, width - len(tail)), "green").append(tail)

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
        label, held = next(iter(experience(self._metrics)), ("lag", "none"))
        rows = (
            ("return (last 100)", as_number(value("episode_return_mean")), "evaluation", last),
            (
                "env steps/s",
                as_count(value("env_steps_per_s")),
                "frames/s",
                as_count(value("frames_per_s")),
            ),
            ("episodes", as_count(value("episodes")), "updates", as_count(value("learner_steps"))),
            (label, held, "memory", f"{as_number(value('rss_mb'), 0)} MB"),
            *streams(self._metrics),
            *learners(self._metrics),
        )
        for row in rows:
            table.add_row(*row)
        return table

    def _time_bars(self) -> Table:
        table = Table.grid(padding=(0, 1))
        bottleneck = self._metrics.get("bottleneck")
        for name, colour in SHARES:
            share = self._metrics.get(f"time/{name}")
            filled = bar(share or 0.0, max(10, self._width - 36), colour)
            note = Text("<- bottleneck", style="bold yellow") if name == bottleneck else Text()
            table.add_row(Text(name, style=colour), filled, as_percent(share).rjust(4), note)
        return table

    def _learner(self) -> list[tuple[str, str]]:
        """Returns names and values of the agent's metrics."""
        hidden = ("time/", "evaluation/", "replay/", "streams/", "cluster/", "env/")
        names = [
            name
            for name, value in self._metrics.items()
            if name not in _RUNTIME
            and not name.startswith(hidden)
            and isinstance(value, int | float)
        ]
        return [
            (name.removeprefix("learner/"), as_number(self._metrics[name], 4))
            for name in names[:SHOWN_LEARNER]
        ]

    def _task(self) -> list[tuple[str, str]]:
        """Returns names and values of the task's metrics."""
        return [(name, as_number(self._metrics[name], 3)) for name in task_metrics(self._metrics)]
