"""What a pool asks of its peers, and of those that judge their faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from seedbed.actors.slots import Slot, SlotLayout
from seedbed.types import EnvSpec


class Peer(Protocol):
    """A publisher of the timesteps of some groups, for instance an actor process.

    The pool's thread alone uses it, but for `pid` and `cpu_seconds`. The pool greets a peer with the layout
    of the slots (`share`) once it has told its `spec`, since the first spec decides the layout. A peer that
    has hung up shows no descriptors any more: its groups yield nothing from then on, and the pool asks often
    whether it has `ended`, because to wait for that would keep the other peers waiting. `leave` is apart from
    `close` so that peers end side by side.
    """

    @property
    def groups(self) -> range:
        """The groups of the pool that it serves."""
        ...

    @property
    def present(self) -> Sequence[int]:
        """Those of its groups whose environments are there, in order."""
        ...

    @property
    def beats(self) -> int:
        """How often it has said that it lives, besides by timesteps."""
        ...

    @property
    def spec(self) -> EnvSpec | None:
        """The specification of its environments, or None until it has told it."""
        ...

    @property
    def slots(self) -> Sequence[Slot]:
        """The slots by group, opened in the lives that the pool assigned; empty before `share`."""
        ...

    @property
    def bells(self) -> Sequence[tuple[int, int]]:
        """Descriptors of doorbells (eventfds) by group: (of observations, of actions)."""
        ...

    @property
    def descriptors(self) -> Mapping[int, Callable[[], None]]:
        """Other descriptors, and what to call when one is readable; after that call, anything may differ."""
        ...

    @property
    def pid(self) -> int:
        """The id of its process. Any thread may read it."""
        ...

    def share(self, layout: SlotLayout) -> None:
        """Makes slots and doorbells. A peer whose spec is not the layout's has to end instead."""
        ...

    def ended(self) -> str | None:
        """Returns None while it lives, and then a phrase that says how it ended. Does not wait."""
        ...

    def cpu_seconds(self) -> float:
        """Returns the CPU seconds of its process so far, also after `close`. Any thread may call this."""
        ...

    def leave(self, patience_s: float = 1.0) -> None:
        """Asks it to end within so many seconds, without waiting; a second call asks more firmly."""
        ...

    def gone(self) -> bool:
        """Waits until it has ended, or the time of the last `leave` is over; returns whether it has ended."""
        ...

    def close(self) -> None:
        """Ends it and closes its descriptors; a second call does nothing."""
        ...


class Policy(Protocol):
    """The consequences that a peer's faults have for the run. The pool's thread calls it.

    Either method raises SeedbedError to end the run.
    """

    def silent(self, silent_s: float) -> None:
        """Called about once a second with the seconds for which the peer has owed a step; 0 if it owes none.

        Only time in which the pool is attended to counts. Before its first steps, a peer owes its start.
        """
        ...

    def ended(self, how: str) -> None:
        """Called once when the peer has ended; closes it, and may attach another one for the same groups."""
        ...
