from __future__ import annotations

import functools
import os
import signal
import threading

import pytest

from seedbed.run.reporting import after, stopping_signals
from seedbed.types import SeedbedError


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
    with stopping_signals(view) as interruption:
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
        with stopping_signals(View()) as interruption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interruption.requested()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_leave_signals_alone():
    before, found = signal.getsignal(signal.SIGTERM), []

    def look():
        with stopping_signals(View()) as interruption:
            found.append((interruption.requested(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [(False, before)]


def test_what_fails_after_a_failure_does_not_hide_it():
    failure, view = SeedbedError("the cause"), View()
    with after(failure, view):
        raise SeedbedError("no room")
    assert view.messages == ["no room"] and failure.__notes__ == ["and then: no room"]
    with pytest.raises(KeyboardInterrupt), after(failure, view):
        raise KeyboardInterrupt
