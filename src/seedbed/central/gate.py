"""The gate of a device that acts and learns: learning waits there, acting passes."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from seedbed.run import devices
from seedbed.run.devices import Device
from seedbed.run.measures import Stopwatch

PROGRAM_S = 0.02
"""The longest that one program of the learner should take on a device that acts, too."""
# A program is judged after so many runs. The first run, which compiles, does not count.
_RUNS = 8


class Gate:
    """Bounds the learning that is queued ahead of an action on a device that both use.

    A device works through its programs in the order in which they were started, so an action waits for all
    that the learner has started before. The learner therefore starts one program at a time, when the one
    before has ended, and not while acting is about to start a call. Acting itself never waits here.
    """

    def __init__(self, shared: Sequence[Device]) -> None:
        """Takes the devices that act and learn."""
        self.devices = frozenset(shared)
        # Runs while the actions of a call wait for a program that the learner had started before.
        self.waited = Stopwatch()
        # Guards all that follows; notified when the learner may go on.
        self._changed = threading.Condition()
        self._announced = False
        self._passed = 0  # announcements that have ended
        self._calls = 0  # inference calls that are under way
        self._learning = False  # whether a program of the learner is under way
        self._behind = False  # whether a call was started after it
        self._runs = collections.Counter[str]()
        self._quickest_s: dict[str, float] = {}
        self._notices: collections.deque[str] = collections.deque()
        self._told = False

    def announce(self) -> None:
        """Says that a call will start soon. Call from the inference thread, which must `withdraw` it."""
        if not self._announced:
            with self._changed:
                self._announced = True

    def withdraw(self) -> None:
        """Lets the learner go on: the calls that were announced have started. Call from the same thread."""
        if self._announced:
            with self._changed:
                self._announced = False
                self._passed += 1
                self._changed.notify_all()

    def started(self) -> None:
        """Says that a call has been started. Call from the inference thread only."""
        with self._changed:
            self._calls += 1
            if self._learning and not self._behind:
                self._behind = True
                self.waited.start()

    def finished(self) -> None:
        """Says that a call has ended. Call from the inference thread only."""
        with self._changed:
            self._calls -= 1
            if not self._calls:
                self._catch_up()

    def run(self, name: str, program: Callable[..., Any], *operands: Any) -> Any:
        """Lets announced calls pass, runs a program of the learner and waits for it; returns its result.

        At most one announcement is waited for, so that acting without a pause does not keep learning from
        going on. Call from the learner thread only.
        """
        with self._changed:
            passed = self._passed
            self._changed.wait_for(lambda: not self._announced or self._passed != passed)
            self._learning = True
        begun = time.perf_counter()
        try:
            return jax.block_until_ready(program(*operands))
        finally:
            with self._changed:
                self._learning = False
                self._catch_up()
                self._note(name, time.perf_counter() - begun)

    def _catch_up(self) -> None:
        """Ends the time in which a call is behind the learner. The caller must hold `_changed`."""
        self._behind = False
        self.waited.stop()

    def _note(self, name: str, took_s: float) -> None:
        """Judges a program by its quickest run: the others had calls before them in the queue."""
        self._runs[name] += 1
        if self._runs[name] > 1:
            self._quickest_s[name] = min(took_s, self._quickest_s.get(name, took_s))
        if self._runs[name] >= _RUNS and self._quickest_s[name] > PROGRAM_S and not self._told:
            self._told = True
            self._notices.append(
                f"a program of the learner ({name}) takes {1e3 * self._quickest_s[name]:.0f} ms on a device "
                "that acts, too, and actions wait so long: give acting a device of its own with "
                "--inference-devices, or make the agent's batch smaller, or its minibatches more"
            )

    @property
    def program_s(self) -> float:
        """The seconds of the learner's longest program, each by its quickest run. Any thread may read it."""
        return max(list(self._quickest_s.values()), default=0.0)

    def take_notices(self) -> list[str]:
        """Returns a message about a program that takes too long, once. One thread at a time may call this."""
        return [self._notices.popleft() for _ in range(len(self._notices))]


def shared_gate(acting: Sequence[Device], learning: Sequence[Device]) -> Gate | None:
    """Returns a gate for the devices that act and learn, or None if there are none that have a queue."""
    shared = [each for each in acting if each in learning and devices.policy_of(each).queues]
    return Gate(shared) if shared else None
