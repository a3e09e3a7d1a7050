"""The two ends of a group's stream as states, without sockets and clocks: see "Lives" in docs/protocol.md.

The learner's end decides which timesteps are published, and the actor's end when environments are reset.
Both answer an event with what is to be done. Use each from one thread only.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from seedbed.streams.messages import ProtocolError

KEPT_S = 30.0
"""Seconds for which a group keeps its life without a stream."""


class Begin(NamedTuple):
    """The learner's end's word to a stream: the group's life, and the last timestep of it that has arrived.

    Step 0 begins a new life. Any other step goes on with the life that the actor is in.
    """

    life: int
    step: int


class Arrival(enum.Enum):
    """The learner's end's treatment of a timestep."""

    PUBLISH = enum.auto()  # it goes into the slot
    HOLD = enum.auto()  # it waits: the learner still uses the slot for an earlier life
    ANSWER = enum.auto()  # its answer is sent
    WAIT = enum.auto()  # nothing: it is known, and its answer will come


class LearnerEnd:
    """The learner's end of a group: its life, and the timesteps that have arrived in it.

    The slot belongs to the learner from `PUBLISH` to `answered`. The first stream begins life `life` + 1.
    """

    def __init__(self, life: int) -> None:
        self.life, self.step = life, 0
        self._answered = True  # whether timestep `step` is, or there is none
        self._slot_taken = False  # whether the slot is the learner's
        self._held = False  # whether timestep 1 of this life waits for the slot
        self._left_s: float | None = None  # when the stream ended; None while there is one

    def enter(self, life: int, step: int, now_s: float) -> Begin:
        """Begins a stream of the instance that had the group; its last timestep was `step` of `life`.

        The life goes on if the stream comes in time and no timestep is missing. Otherwise another one begins.
        """
        in_time = not self.expired(now_s)
        self._left_s = None
        if in_time and life == self.life and self.step > 0 and self.step in (step - 1, step):
            return Begin(self.life, self.step)
        return self.begin_anew()

    def begin_anew(self) -> Begin:
        """Begins a new life."""
        self.life, self.step = self.life + 1, 0
        self._answered, self._held, self._left_s = True, False, None
        return Begin(self.life, 0)

    def leave(self, now_s: float) -> None:
        """Notes that the stream has ended."""
        self._left_s = now_s

    def expired(self, now_s: float) -> bool:
        """Returns whether the group has been without a stream for too long to keep its life."""
        return self._left_s is not None and now_s > self._left_s + KEPT_S

    def arrive(self, life: int, step: int) -> Arrival:
        """Takes a timestep; raises ProtocolError for one that cannot come now."""
        if (life, step) == (self.life, self.step):
            return Arrival.ANSWER if self._answered else Arrival.WAIT
        if (life, step) != (self.life, self.step + 1) or not self._answered:
            raise ProtocolError(
                f"timestep {step} of life {life} came after timestep {self.step} of life {self.life}"
                + ("" if self._answered else ", which has no answer yet")
            )
        self.step, self._answered, self._held = step, False, self._slot_taken
        self._slot_taken = True
        return Arrival.HOLD if self._held else Arrival.PUBLISH

    def answered(self, life: int, step: int) -> Arrival | None:
        """Takes the slot back from the learner, with the answer to a timestep.

        Returns ANSWER if the answer is to be sent, PUBLISH if the timestep that was held is to be published,
        and None if there is nothing to do: the life of the answer is over.
        """
        self._slot_taken = self._held
        if self._held:
            self._held = False
            return Arrival.PUBLISH
        if (life, step) != (self.life, self.step):
            return None
        self._answered = True
        return Arrival.ANSWER


class Act(enum.Enum):
    """The next act of the actor's end."""

    NOTHING = enum.auto()
    SEND = enum.auto()  # send the timestep that is held
    RESET = enum.auto()  # reset the environments, which then have an opening timestep
    ANEW = enum.auto()  # ask for another life
    STEP = enum.auto()  # give the actions to the environments


class _Environments(enum.Enum):
    """What the environments of a group do."""

    STEPPING = enum.auto()
    HOLDING = enum.auto()  # their timestep waits for an answer
    RESETTING = enum.auto()


class ActorEnd:
    """The actor's end of a group: what its environments do, and in which life.

    `life` is 0 if the environments are in none yet. `step` is the number of their newest timestep, or of the
    one that they will have after a reset.
    """

    def __init__(self) -> None:
        self.life, self.step = 0, 0
        self._environments = _Environments.STEPPING
        # Whether the environments must be reset when they have stepped: a life has begun meanwhile.
        self._reset_due = False
        self._streaming = False  # between BEGIN and the end of the stream
        self._asked = False  # ANEW was sent, and BEGIN has not come

    def begin(self, begin: Begin) -> Act:
        """Takes a BEGIN; raises ProtocolError if it goes on with a life that is not this one."""
        self._streaming, self._asked = True, False
        holding = self._environments is _Environments.HOLDING
        if begin.step and not self.life:
            # The environments have begun anew since the stream said in which life they were.
            self._asked = True
            return Act.ANEW
        if begin.step:
            if begin.life != self.life:
                raise ProtocolError(f"life {begin.life} cannot go on: this is life {self.life}")
            # It is sent although the learner may have it: its answer may have been lost.
            return Act.SEND if holding else Act.NOTHING
        unused, self.life, self.step = not self.life, begin.life, 1
        if holding and unused:
            return Act.SEND
        if holding:
            self._environments = _Environments.RESETTING
            return Act.RESET
        self._reset_due = self._environments is _Environments.STEPPING
        return Act.NOTHING

    def timestep(self, opening: bool) -> Act:
        """Takes the next timestep, an `opening` one if the environments began anew, by order or not."""
        ordered = self._reset_due or self._environments is _Environments.RESETTING
        self._reset_due = False
        if ordered and not opening:
            self._environments = _Environments.RESETTING
            return Act.RESET
        self._environments = _Environments.HOLDING
        if not ordered and opening:
            self.life, self.step = 0, 0
            if not self._streaming or self._asked:
                return Act.NOTHING
            self._asked = True
            return Act.ANEW
        if not ordered:
            self.step += 1
        return Act.SEND if self._streaming else Act.NOTHING

    def answer(self, life: int, step: int) -> Act:
        """Takes an ANSWER; one that answers nothing that is held is ignored."""
        if self._environments is not _Environments.HOLDING or (life, step) != (
            self.life,
            self.step,
        ):
            return Act.NOTHING
        self._environments = _Environments.STEPPING
        return Act.STEP

    def leave(self) -> None:
        """Notes that the stream has ended."""
        self._streaming = self._asked = False
