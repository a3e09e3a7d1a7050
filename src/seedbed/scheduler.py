"""What the signals of a scheduler mean, which sends them to all processes of a job. It imports no JAX."""

from __future__ import annotations

import signal

NOTICE = signal.SIGUSR2
"""The signal with which a scheduler tells that a job's time is nearly over."""
_obeyed = False


def obey_scheduler() -> None:
    """From now on, signals have the meaning that a scheduler gives them.

    `NOTICE` ends neither this process nor those that it starts: who waits for it gets it. SIGTERM says
    nothing new the second time. Call it before any other thread is started.
    """
    global _obeyed
    _obeyed = True
    signal.pthread_sigmask(signal.SIG_BLOCK, [NOTICE])


def gives_up(number: int) -> bool:
    """Returns whether a signal that is not the first one asks to end at once."""
    return not (_obeyed and number == signal.SIGTERM)
