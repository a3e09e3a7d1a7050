"""Signals while the main thread is outside of Python, as when XLA compiles."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading

import pytest

from seedbed.exit_status import ExitStatus, StoppedEarly
from seedbed.run.signals import stopping_early

BUSY = """
import hashlib, sys
from seedbed.exit_status import ExitStatus
from seedbed.run.signals import end_program_with, stopping_signals
if {program}:
    end_program_with(ExitStatus.GIVEN_UP)
with stopping_signals(print) as interruption:
    interruption.ending.append(lambda: 1 / 0)
    interruption.ending.append(lambda: print("roles ended", flush=True))
    print("busy", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", {rounds})
    interruption.requested()
print("done", flush=True)
"""


def start(*, program: bool, rounds: int) -> subprocess.Popen[str]:
    """A process whose main thread is in C, which no signal interrupts."""
    code = BUSY.format(program=program, rounds=rounds)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "busy\n"
    return process


@pytest.mark.slow
def test_a_busy_program_answers_the_first_signal_and_ends_at_the_second():
    process = start(program=True, rounds=10**9)  # minutes
    assert process.stderr is not None
    try:
        process.send_signal(signal.SIGINT)
        lines = [process.stderr.readline() for _ in range(2)]
        assert "SIGINT: stopping and saving when what is under way has ended" in "".join(lines)
        process.send_signal(signal.SIGINT)
        output, rest = process.communicate(timeout=60)
        assert process.returncode == ExitStatus.GIVEN_UP
        # What it has started is ended with it, whatever else fails.
        assert output == "roles ended\n"
        assert rest.strip().endswith("seedbed: interrupted")
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_script_ends_in_its_own_way():
    """Its second signal is an exception, once Python is back; it has things of its own to end."""
    process = start(program=False, rounds=10**7)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert "KeyboardInterrupt" in errors and process.returncode == -signal.SIGINT


def test_a_stop_that_python_ignores_comes_again():
    """Nothing that is raised in a callback of the collector reaches the program."""
    fresh = [True]

    def callback(phase: str, info: dict[str, int]) -> None:
        if fresh and fresh.pop():
            signal.raise_signal(signal.SIGTERM)

    hook = sys.unraisablehook
    gc.callbacks.append(callback)
    try:
        with pytest.raises(StoppedEarly), stopping_early():
            gc.collect()
            threading.Event().wait(60)
    finally:
        gc.callbacks.remove(callback)
    assert not fresh and sys.unraisablehook is hook
