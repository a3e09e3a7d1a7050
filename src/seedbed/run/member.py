"""Which of the processes that train as one learner this one is. It imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from seedbed.types import SeedbedError

VARIABLE = "SEEDBED_MEMBER"
"""The environment variable that makes a process a member."""


class Member(NamedTuple):
    """One of the processes that train as one learner."""

    number: int  # from 0 on; 0 leads
    of: int
    rank: int  # of the job, which has `of` ranks or more
    address: str  # HOST:PORT of JAX's coordination service, which the leader runs
    interface: str  # the network interface of collectives, such as lo
    parent: int  # the process without which this one must not live

    def environment(self) -> dict[str, str]:
        """Returns the variable that makes a process this member."""
        return {VARIABLE: "/".join(map(str, self))}

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> Member | None:
        """Returns the member that a process is, None if it is none; raises SeedbedError for nonsense."""
        text = environ.get(VARIABLE)
        if text is None:
            return None
        try:
            number, of, rank, address, interface, parent = text.split("/")
            return cls(int(number), int(of), int(rank), address, interface, int(parent))
        except ValueError:
            raise SeedbedError(
                f"{VARIABLE} is {text!r}: --cluster sets it for processes of its own; unset it"
            ) from None
