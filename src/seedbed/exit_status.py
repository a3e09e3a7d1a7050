"""The exit statuses of every program: the command line, its roles and its actors. It imports no JAX."""

from __future__ import annotations

import enum
import errno

from seedbed.types import SeedbedError, StorageError, UsageError


class ExitStatus(enum.IntEnum):
    """How a program has ended, for whoever started it: a scheduler, a script, a coordinator.

    Commands end with the first six. Roles of Gorila end with FINISHED, FAILED, or one of the last four,
    which are for their coordinator. Numbers from 64 to 78 are those of sysexits.h.
    """

    FINISHED = 0
    """All is done. Nothing is to be started again."""
    FAILED = 1
    """A command failed, and would again. A role that ends with it is started again.

    Python itself ends with this number after an unforeseen error.
    """
    USAGE = 2
    """The command line cannot be understood."""
    TRY_AGAIN = 75  # EX_TEMPFAIL
    """Something is missing that may be there later: a learner, a port, a run's lock, room on the disk."""
    GIVEN_UP = 130  # 128 + SIGINT
    """A signal ended the program before it saved; a run is as its last checkpoint left it."""
    STOPPED = 143  # 128 + SIGTERM
    """A signal stopped the program, nothing is lost, and it can go on."""

    DIVERGED = 65  # EX_DATAERR
    """A role has met what is not finite. Its last line is for the user."""
    ALONE = 69  # EX_UNAVAILABLE
    """A process has lost the one that it works for."""
    NO_ROOM = 74  # EX_IOERR
    """The disk has no room for a role. It is started again later."""
    REFUSED = 78  # EX_CONFIG
    """A role cannot work until the user mends something. Its last line is for the user."""


class TemporaryError(SeedbedError):
    """Raised when something is missing that may be there later, so that the same command may succeed then."""


class PeerLost(TemporaryError):
    """Raised when a process that trains as one learner with this one is gone: the others begin again."""


class TrainingDiverged(SeedbedError):
    """Raised when a metric of an update, a gradient or a learner state is not finite."""


class StoppedEarly(KeyboardInterrupt):
    """Raised when a first signal stops a run that has made nothing yet, so that nothing is lost."""

    def __init__(self) -> None:
        super().__init__("interrupted before training began: there was nothing to save")


def is_no_room(error: BaseException | None) -> bool:
    """Returns whether an error says that the disk, or the user's part of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def status_of(error: BaseException) -> ExitStatus:
    """Returns the status with which a command ends after an error."""
    if isinstance(error, StoppedEarly):
        return ExitStatus.STOPPED
    if isinstance(error, KeyboardInterrupt):
        return ExitStatus.GIVEN_UP
    if isinstance(error, UsageError):
        return ExitStatus.USAGE
    if isinstance(error, PeerLost):
        return ExitStatus.ALONE
    temporary = isinstance(error, TemporaryError | StorageError)
    if temporary or is_no_room(error) or is_no_room(error.__cause__):
        return ExitStatus.TRY_AGAIN
    return ExitStatus.FAILED
