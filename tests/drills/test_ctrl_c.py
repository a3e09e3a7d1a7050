"""Ctrl-C twice at random moments: a run of any runtime ends with status 130 within two seconds."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from machines import wait_until
from stopping import CENTRAL, GORILA, Moment, Trained, left_of

from seedbed.exit_status import ExitStatus

SEEDS = int(os.environ.get("SEEDBED_DRILL_SEEDS", "20"))
WITHIN_S = 2.0
"""Seconds from the second signal to the end of the program."""
_RUNS = ("ant --checkpoint-every-s 0.5 --log-every-s 0.5", CENTRAL[2], GORILA[1])
_MOMENTS = (
    ("", 6.0),
    ("compiling|parameter shards", 8.0),
    ("compiling|parameter shards", 2.0),
    ("SAVED", 0.6),
    ("SAVED", 8.0),
)
"""What is waited for, and the most seconds after it."""


@pytest.fixture(autouse=True)
def signals_come():
    """A shell lets its background jobs ignore SIGINT, and their children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_second_ctrl_c_gives_up_at_once(tmp_path, seed):
    chance, run = random.Random(seed), tmp_path / "run"
    moment = Moment(*_MOMENTS[seed % len(_MOMENTS)], "all, twice")
    command = _RUNS[seed % len(_RUNS)]
    with Trained(run, f"{command} --steps 1_000_000_000") as trained:
        trained.await_moment(moment, chance)
        # A terminal sends it to every process of the group.
        os.killpg(trained.popen.pid, signal.SIGINT)
        time.sleep(chance.uniform(0.02, 0.3))
        begun, ended = time.monotonic(), trained.popen.poll() is not None
        if not ended:
            os.killpg(trained.popen.pid, signal.SIGINT)
        wait_until(lambda: trained.popen.poll() is not None, "the end of the program", 20)
        seconds, status, said = time.monotonic() - begun, trained.popen.returncode, trained.said()
        print({"seed": seed, "command": command, "moment": moment, "seconds": seconds,
               "status": status, "ended": ended})  # fmt: skip
        # The first signal alone may have saved all by then, and ends a program that has hardly begun.
        saved = status == ExitStatus.STOPPED and "stopped and saved" in said
        before_it_began = status == ExitStatus.STOPPED and "nothing to save" in said
        assert status == ExitStatus.GIVEN_UP or saved or before_it_began, (status, said)
        assert seconds < WITHIN_S, said
        assert "Traceback" not in said and "Fatal" not in said, said
        wait_until(lambda: not left_of(run), "the end of all processes", 10)
