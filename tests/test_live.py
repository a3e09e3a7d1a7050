from __future__ import annotations

import errno
import io
import os
import pty
import sys
import termios
import threading

import pytest
from rich.console import Console

from seedbed.terminal import Descriptor, tell
from seedbed.viewer.background import MAX_TEXTS, BackgroundView
from seedbed.viewer.figures import Progress
from seedbed.viewer.live import LiveView, PlainLog, make_view

METRICS = {
    "wall_s": 754.2,
    "env_steps": 1_800_000,
    "frames": 7_200_000,
    "env_steps_per_s": 2403.2,
    "frames_per_s": 9612.8,
    "learner_steps": 5662,
    "episodes": 812,
    "episode_return_mean": -3.21,
    "lag_mean": 1.5,
    "lag_max": 3,
    "time/environment": 0.25,
    "time/inference": 0.1,
    "time/learning": 0.6,
    "time/waiting": 0.05,
    "bottleneck": "learning",
    "rss_mb": 1432.1,
    "loss/total": 1.25,
    "entropy": 0.75,
}


def console(width=80, terminal=True):
    return Console(
        file=io.StringIO(), width=width, height=40, force_terminal=terminal, color_system=None
    )


def rendered(view, width=80):
    out = console(width)
    out.print(view.render())
    return out.file.getvalue()


STREAMS = {
    "streams/hosts": 3,
    "streams/streams": 24,
    "streams/reconnects": 17,
    "streams/refused": 5,
    "streams/action_p50_s": 0.0254,
    "streams/action_p99_s": 0.0531,
    "streams/steps": 1234,
}


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_views_tell_of_actors_elsewhere(width):
    view = LiveView(10_000_000, "pong/impala", "runs/pong", console(width))
    with view:
        view.update({**METRICS, **STREAMS})
    text = rendered(view, width)
    assert max(len(line) for line in text.splitlines()) <= width
    for part in ("3, 24 streams", "25, 53 ms", "17", "refused"):
        assert part in text
    assert "1234" not in text and "1,234" not in text
    out = console(width, terminal=False)
    log = PlainLog(10_000_000, "pong/impala", "runs/pong", out)
    log.update({**METRICS, **STREAMS})
    assert "| hosts 3, 24 streams |" in out.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_live_view_fits_and_tells_all(width):
    view = LiveView(10_000_000, "pong/impala", "runs/pong-impala-20250131-142500", console(width))
    with view:
        view.update(METRICS)
        evaluated = {"evaluation/episode_return_mean": 12.5, "evaluation/episode_return_std": 2.0}
        later = {**METRICS, "wall_s": 824.2, "env_steps": 1_968_000}
        view.update(later | evaluated)
        view.message("evaluated 8 episodes", 0.0)
    text = rendered(view, width)
    view.update(later)  # one that failed
    assert "12.50" not in rendered(view, width)
    assert max(len(line) for line in text.splitlines()) <= width
    for part in (
        "pong/impala",
        "-3.21",
        "2,403",
        "9,613",
        "20%",
        "1432 MB",
        "12.50",
        "1.50 (max",
        "loss/total",
        "0.7500",
    ):
        assert part in text
    for part in ("1.50 (max", "loss/total", "0.7500"):
        assert part in text
    learning = next(line for line in text.splitlines() if "<- bottleneck" in line)
    assert "learning" in learning
    assert "60%" in learning
    assert "evaluated 8 episodes" in text
    assert "55m46s left" in text  # 8.032 M steps at 2,400 a second


def test_live_view_fits_a_small_terminal():
    out = console()
    out.height = 24
    view = LiveView(10_000_000, "pong/impala", "runs/x", out)
    with view:
        view.update({**METRICS, **{f"loss/{n}": 1.0 for n in range(9)}})
        for n in range(6):
            view.message(f"message {n} " * 20, 0.0)
    text = rendered(view)
    assert len(text.splitlines()) < 24
    # What is shown of events is whole, and there is always the newest.
    assert text.count("message 5") == 20
    for n in range(5):
        assert text.count(f"message {n}") in (0, 20)


def test_the_time_left_follows_the_recent_speed():
    """A run that begins at a tenth of its speed: nothing is said for a minute, and the truth soon after."""
    progress = Progress(100_000)
    told = []
    for second in range(181):
        steps = 10 * second if second < 30 else 300 + 100 * (second - 30)
        told.append(progress.update({"env_steps": steps, "wall_s": 500.0 + second})[1])
    assert set(told[:60]) == {"-"}
    assert told[100] == "15m27s"  # (100,000 - 7,300) / 100
    assert told[180] == "14m07s"
    assert Progress(100).update({"env_steps": 100, "wall_s": 5.0}) == (1.0, "0s")


def test_a_run_that_stands_still_has_no_time_left():
    progress = Progress(1000)
    told = [progress.update({"env_steps": 10, "wall_s": float(s)})[1] for s in range(100)]
    assert set(told) == {"-"}


def test_the_time_that_passes_and_the_stage_are_shown_before_there_are_figures(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("seedbed.viewer.live.time.monotonic", lambda: now[0])
    view = LiveView(10, "ant/ppo", "runs/x", console())
    with view:
        assert "0s  starting" in rendered(view)
        view.message("compiling", 0.0)
        now[0] += 65
        view.tick()
        assert "1m05s  compiling" in rendered(view)
        view.update({**METRICS, "bottleneck": None})
        now[0] += 10
        assert "12m44s" in rendered(view) and "bottleneck" not in rendered(view)
    out = console(terminal=False)
    log = PlainLog(10, "ant/ppo", "runs/x", out)
    log.tick()
    log.message("compiling", 0.0)
    now[0] += 10
    log.tick()
    log.update(METRICS)
    log.tick()
    first, second, _ = out.file.getvalue().splitlines()
    assert (first, second) == ("compiling", "10s | compiling")


def test_the_task_s_metrics_are_shown():
    task = {f"env/reward_{n}": 0.5 + n for n in range(9)} | {"env/solver_error": 9.0}
    losses = {f"loss/{n}": 1.0 for n in range(12)}
    view = LiveView(10, "ant/ppo", "runs/x", console())
    with view:
        view.update({**METRICS, **losses, **task})
    text = rendered(view)
    assert "env/reward_0" in text and "5.500" in text
    assert "env/reward_6" not in text and "solver_error" not in text
    out = console(terminal=False)
    PlainLog(10, "ant/ppo", "runs/x", out).update({**METRICS, **task})
    assert "| env/reward_0 0.50 | env/reward_1 1.50" in out.file.getvalue()


def test_plain_log_is_one_line_an_update():
    out = console(40, terminal=False)
    with PlainLog(10_000_000, "pong/impala", "runs/x", out) as view:
        view.update({**METRICS, "evaluation/episode_return_mean": 12.5})
        view.message("saved [brackets] stay", 0.0)
    lines = out.file.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[1] == (
        "12m34s | 1.80M steps (18%, - left) | return -3.21 | 2,403 steps/s | 9,613 frames/s | "
        "lag 1.50 (max 3.00) | env 25% inf 10% lea 60% wai 5% | bottleneck learning | 1432 MB | "
        "evaluation 12.50"
    )
    assert lines[2] == "saved [brackets] stay"


def test_the_terminal_decides():
    assert isinstance(make_view(1, "t", "r", console(terminal=True)), LiveView)
    assert isinstance(make_view(1, "t", "r", console(terminal=False)), PlainLog)


class Gate:
    """A screen that is stuck in its first message until the gate opens."""

    report_every_s = 1.0
    printed = None

    def __init__(self):
        self.open, self.shown = threading.Event(), []

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.shown.append("end")

    def message(self, text, at):
        self.open.wait()
        self.shown.append(text)

    def update(self, metrics):
        self.shown.append(metrics)

    def tick(self):
        """Shows nothing."""


def test_a_stuck_screen_gets_the_newest_metrics_and_messages():
    screen = Gate()
    with BackgroundView(screen, patience_s=60.0) as view:
        for n in range(MAX_TEXTS + 50):
            view.message(f"{n}")
            view.update({"n": n})
        assert screen.shown == []
        screen.open.set()
    told = [text for text in screen.shown[:-2] if text.endswith("messages were not shown")]
    texts = [text for text in screen.shown[:-2] if text not in told]
    assert sum(int(text.split()[0]) for text in told) == MAX_TEXTS + 50 - len(texts) > 0
    assert texts[-MAX_TEXTS:] == [f"{n}" for n in range(50, MAX_TEXTS + 50)]
    assert screen.shown[-2:] == [{"n": MAX_TEXTS + 49}, "end"]


def test_a_disk_that_was_full_for_a_moment_loses_one_message_only():
    refusals, shown = [OSError(errno.ENOSPC, "no space left")], []

    class Full(Gate):
        """A log on a disk that is full at its first line."""

        def message(self, text, at):
            if refusals:
                raise refusals.pop()
            shown.append(text)

    screen = Full()
    screen.open.set()
    with BackgroundView(screen, patience_s=60.0) as view:
        view.message("lost")
        view.message("seen")
    assert shown == ["seen"]


@pytest.fixture
def stopped_terminal():
    """A terminal whose user has pressed Ctrl-S, and a function that lets it go on."""
    ours, theirs = pty.openpty()
    termios.tcflow(theirs, termios.TCOOFF)
    yield theirs, lambda: os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("kind", ["full_pipe", "stopped_terminal"])
def test_a_blocked_terminal_blocks_only_its_thread(kind, request):
    descriptor, release = request.getfixturevalue(kind)
    with os.fdopen(descriptor, "w", closefd=False) as file:
        console = Console(file=Descriptor(file), force_terminal=True)
        before = sys.stdout
        with BackgroundView(LiveView(10, "t", "r", console), patience_s=0.1) as view:
            view.update(METRICS)
            view.message("hello")
            print("what an agent prints")
            print("a warning", file=sys.stderr)
        thread = view._thread
        assert thread.is_alive() and sys.stdout is before
        release()
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_nothing_is_told_where_the_process_has_no_stdout():
    tell("trained", None)


def test_a_closed_terminal_is_left_alone():
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as file:
        console = Console(file=Descriptor(file))
        with BackgroundView(PlainLog(10, "t", "r", console), patience_s=60.0) as view:
            view.message("nobody reads this")
            view.update(METRICS)
    tell("nor this", file)


def test_what_others_print_is_shown_above_the_panel(capsys):
    out = console(60)
    with BackgroundView(LiveView(10, "t", "r", out), patience_s=60.0) as view:
        print("one\ntwo", end="")
        sys.stdout.flush()
        print("careful", file=sys.stderr)
        view.message("a message")
    text = out.file.getvalue()
    assert all(text.index(word) < text.rindex("a message") for word in ("one", "two", "careful"))
    assert capsys.readouterr() == ("", "")
