"""The errors that a user can repair; `seedbed.types` has them, too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from seedbed.printable import printable


class SeedbedError(Exception):
    """A failure that the user can repair. Its text names the thing, its value and the remedy.

    Lines below its first are for `--debug`, except those of a list, which are indented.
    What cannot be seen is written out in its text: names of files and of what is in them may be a stranger's.
    """

    def __str__(self) -> str:
        """Returns the text as a terminal may show it."""
        return printable(super().__str__(), keep="\n\t")


class StorageError(SeedbedError):
    """Raised when the disk refuses to store something. Nothing else is wrong: training can go on."""


class UsageError(SeedbedError):
    """Raised when it cannot be understood what a person asks for. The text has one line."""


@contextlib.contextmanager
def after(failure: BaseException, tell: Callable[[str], None]) -> Iterator[None]:
    """Runs the last steps of a program after a failure, in a `with` block.

    If the block raises an Exception, its text goes to `tell` and is added to `failure` as a note; it is not
    raised.
    """
    try:
        yield
    except Exception as error:
        tell(str(error))
        failure.add_note(f"and then: {error}")
