from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import threading
import types

import numpy as np
import pytest

from seedbed.errors import after
from seedbed.exit_status import TrainingDiverged
from seedbed.run.checkpoint_helper import list_steps
from seedbed.run.folder import RunFolder
from seedbed.run.interval import Interval
from seedbed.run.runtime import Progress, Score, Snapshot, Start
from seedbed.run.session import Session
from seedbed.run.signals import stopping_signals
from seedbed.types import LearnerState, SeedbedError


class View:
    """Remembers messages; fails if a signal handler shows one."""

    report_every_s = 1.0

    def __init__(self):
        self.messages, self.handling = [], False

    def update(self, metrics):
        """Shows nothing."""

    def message(self, text):
        assert not self.handling
        self.messages.append(text)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_noted_and_the_second_gives_up(number, request):
    # Under nohup SIGHUP is ignored, and stays so.
    request.addfinalizer(functools.partial(signal.signal, number, signal.getsignal(number)))
    signal.signal(number, signal.SIG_DFL)
    before, view = signal.getsignal(number), View()
    with stopping_signals(view.message) as interruption:
        assert not interruption.requested()
        view.handling = True
        os.kill(os.getpid(), number)
        view.handling = False
        assert interruption.requested() and interruption.requested()
        name = signal.Signals(number).name
        assert view.messages == [f"{name}: stopping and saving; again to give up at once"]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_hang_up_that_is_ignored_stays_ignored(monkeypatch):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping_signals(View().message) as interruption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interruption.requested()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_leave_signals_alone():
    before, found = signal.getsignal(signal.SIGTERM), []

    def look():
        with stopping_signals(View().message) as interruption:
            found.append((interruption.requested(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [(False, before)]


def test_what_fails_after_a_failure_does_not_hide_it():
    failure, view = SeedbedError("the cause"), View()
    with after(failure, view.message):
        raise SeedbedError("no room")
    assert view.messages == ["no room"] and failure.__notes__ == ["and then: no room"]
    with pytest.raises(KeyboardInterrupt), after(failure, view.message):
        raise KeyboardInterrupt


def test_rates_are_of_the_time_since_the_line_before(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(
        "seedbed.run.interval.time", types.SimpleNamespace(monotonic=lambda: now[0])
    )
    counts, passed = [0], []
    meter = types.SimpleNamespace(read=lambda seconds: passed.append(seconds) or {"x": len(passed)})
    runtime = types.SimpleNamespace(
        meter=lambda: meter, progress=lambda: types.SimpleNamespace(transitions=counts[0])
    )
    interval = Interval(runtime)  # type: ignore[arg-type]
    found = []
    for transitions, left_out in ((100, 0.0), (300, 0.0), (300, 0.0), (500, 10.0)):
        counts[0] = transitions
        now[0] += 20.0
        interval.leave_out(left_out)
        found.append(interval.read())
    assert found == [(5.0, {"x": 1}), (10.0, {"x": 2}), (0.0, {"x": 3}), (20.0, {"x": 4})]
    assert passed == [20.0, 20.0, 20.0, 10.0]


class Diverging:
    """A runtime whose third snapshot, and all after it, is not finite."""

    options = types.SimpleNamespace(
        steps=100,
        evaluate_every=0,
        log_every_s=60.0,
        checkpoint_every_s=1e-6,
        keep_checkpoints=3,
        until_return=math.inf,
        until_stale=0,
        max_minutes=math.inf,
    )
    frame_skip = 1
    finite = 2  # snapshots

    def __init__(self) -> None:
        self.taken = 0

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def request_snapshot(self) -> None: ...

    def save_beside(self, step, settle) -> None: ...

    def advance(self) -> bool:
        return self.taken < 5

    def join(self) -> None:
        return None

    def progress(self) -> Progress:
        return Progress(self.taken, self.taken, self.taken)

    def meter(self):
        return types.SimpleNamespace(read=lambda passed_s: {})

    def take_snapshot(self) -> Snapshot:
        self.taken += 1
        weights = np.full(3, np.nan if self.taken > self.finite else 1.0, np.float32)
        state = LearnerState({"w": weights}, (), (), np.int32(self.taken), np.float32(0))
        return Snapshot(self.taken, state, {}, self.taken)

    last_snapshot = take_snapshot

    def take_notices(self) -> list[str]:
        return []

    def pids(self) -> list[int]:
        return []


def test_no_checkpoint_holds_what_is_not_finite(run_folder):
    run, runtime = RunFolder.create(run_folder), Diverging()
    text = r"at learner step 3 \(params.w\): it is not saved"
    with (
        contextlib.closing(run),
        Session(run, View()) as session,
        pytest.raises(TrainingDiverged, match=text),
    ):
        session.train(runtime)  # type: ignore[arg-type]
    assert runtime.taken == 3, "the state is not asked for again"
    assert list_steps(run.checkpoints) == [1, 2]


class Short(Diverging):
    """A runtime that has its steps at once, after so many updates."""

    options = types.SimpleNamespace(**vars(Diverging.options), evaluate_episodes=1, seed=0)

    def __init__(self, updates: int) -> None:
        super().__init__()
        self.updates = updates

    def advance(self) -> bool:
        return False

    def progress(self) -> Progress:
        return Progress(100, self.updates, 100)

    def evaluate(self, snapshot, seed, give_up):
        score = Score(0.0, "0", {"episode_return_mean": 0.0}, {})
        return types.SimpleNamespace(
            done=True, score=score, failure=None, wait=lambda give_up: None
        )


class Brief(Short):
    """A runtime that is asked twice whether it goes on, and has a minute."""

    options = types.SimpleNamespace(**{**vars(Short.options), "max_minutes": 1.0})

    def advance(self) -> bool:
        return self.taken < 2

    def last_snapshot(self) -> None:
        return None


def test_what_came_before_training_is_no_training_after_a_resume_either(run_folder):
    run, view = RunFolder.create(run_folder), View()
    with contextlib.closing(run), Session(run, view) as session:
        session.start = Start(env_steps=0, wall_s=600.0, updates=0, trained_s=30.0)
        session._begun -= 600.0
        session.train(Brief(1))  # type: ignore[arg-type]
    assert not any("minutes" in text for text in view.messages)
    assert session._newest is not None
    start = Start.read(session._newest.metadata)
    assert start.wall_s > 1200.0 and 30.0 < start.trained_s < 60.0
    former = {"start": {"env_steps": 1, "wall_s": 5.0, "updates": 2}}
    assert Start.read(former).trained_s == 5.0


@pytest.mark.parametrize("every", [0, 1, 2, 50])
def test_a_return_is_confirmed_however_often_evaluations_are_due(run_folder, every):
    """Each turn makes a step; evaluations of 10 follow it at once."""

    class Climbing(Short):
        options = types.SimpleNamespace(
            **{**vars(Short.options), "evaluate_every": every, "until_return": 5.0}
        )

        finite = 100

        def advance(self) -> bool:
            return self.taken < 90

        def progress(self) -> Progress:
            return Progress(self.taken, self.taken, self.taken)

        def recent_episodes(self) -> dict[str, float]:
            return {"episodes": 100 * self.taken, "episode_return_mean": 10.0}

        def evaluate(self, snapshot, seed, give_up):
            score = Score(10.0, "10", {"episode_return_mean": 10.0}, {})
            return types.SimpleNamespace(
                done=True, score=score, failure=None, wait=lambda give_up: None
            )

    run, view, runtime = RunFolder.create(run_folder), View(), Climbing(1)
    with contextlib.closing(run), Session(run, view) as session:
        session.train(runtime)  # type: ignore[arg-type]
    assert any("the return of 5 is reached" in text for text in view.messages)
    assert runtime.taken < 10


@pytest.mark.parametrize("updates", [0, 1])
def test_a_run_that_learned_nothing_says_so(run_folder, updates):
    run, view = RunFolder.create(run_folder), View()
    with contextlib.closing(run), Session(run, view) as session:
        session.train(Short(updates))  # type: ignore[arg-type]
    text = (
        "nothing was learned: 100 steps are too few for a batch, or for replay's min_size: "
        "raise --steps, or lower --agent.min-size"
    )
    assert (text in view.messages) == (updates == 0)
