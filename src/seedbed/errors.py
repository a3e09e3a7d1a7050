"""The errors that a user can repair; `seedbed.types` has them, too."""

from __future__ import annotations

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
