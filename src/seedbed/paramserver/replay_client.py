"""A learner's stream to one replay shard, in a thread of its own: rows go there, and items come back."""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from seedbed.paramserver.caller import Caller, Stopped
from seedbed.paramserver.directory import Directory
from seedbed.paramserver.messages import Kind
from seedbed.paramserver.replay_folder import role_of
from seedbed.paramserver.replay_shard import (
    MOST_BYTES,
    RowLayout,
    SampleLayout,
    priorities_layout,
)
from seedbed.paramserver.shard import LEARNER
from seedbed.replay.host.layout import CHUNK, Layout
from seedbed.replay.host.replay import Sample
from seedbed.streams.messages import CONTROL_BYTES, Message
from seedbed.types import SeedbedError

# The age of a shard's figures from which a learner asks for newer ones: one that adds nothing would never
# hear of items, and would keep its lease from others.
_FIGURES_S = 0.2
# Rows of one message, and the sets of chunks of each group that may be on their way: the lease counts only
# the items that the shard has told of, so what it has not told must be little.
_ROWS, SETS_AHEAD = 16, 2


class Row(NamedTuple):
    """A step of a group on its way to a shard."""

    number: int  # of the learner's rows for this shard, from 1 on
    group: int  # of the shard
    opens: bool  # whether the group's streams begin with it
    transitions: int
    block: np.ndarray


class Draw(NamedTuple):
    """Items that are wanted from a shard."""

    tag: int
    items: int


class ShardFigures(NamedTuple):
    """The newest figures of a shard."""

    items: int = 0
    total: float = 0.0  # sum of the weights of its items


class ReplayClient:
    """The stream to a replay shard. The constructor starts its thread; other methods say who may call them.

    `drawn` is called with items that have come, and with None for a draw that the shard could not serve;
    `changed` when figures are new. Both are called from the stream's thread.
    """

    def __init__(
        self,
        layout: Layout,
        shard: int,
        learner: int,
        places: tuple[Directory, Path],
        drawn: Callable[[ReplayClient, int, Sample | None, float], None],
        changed: Callable[[], None],
    ) -> None:
        """`learner` is the learner's number; `places` are the run's directory and folder of credentials."""
        self.shard, self._learner, self._layout = shard, learner, layout
        self._drawn, self._changed = drawn, changed
        self._closed = threading.Event()
        self._caller = Caller(*places, role_of(shard), self._closed.is_set)
        self._caller.most_bytes += SampleLayout(layout, layout.experience.batch).size
        self._rows_layout = RowLayout(layout)
        room = MOST_BYTES - CONTROL_BYTES
        self._most_rows = min(_ROWS, room // max(1, self._rows_layout.size))
        if not self._most_rows:
            raise SeedbedError(
                f"a step of a group of environments takes {self._rows_layout.size:,} bytes, and replay "
                f"shards take {room:,}: lower --envs-per-actor"
            )
        self._samples: dict[int, SampleLayout] = {}
        # Guards what follows.
        self._lock = threading.Lock()
        self._numbered = 0
        self._unsent: collections.deque[Row] = collections.deque()
        self._unacked: collections.deque[Row] = collections.deque()
        self._ends: list[int] = []  # groups whose end the shard has not answered yet
        self._ends_sent = False
        self._draws: collections.deque[Draw] = collections.deque()
        self._asked: dict[int, Draw] = {}
        self._priorities: collections.deque[tuple[int, np.ndarray, int]] = collections.deque()
        self._epoch = 0
        self._added_before = self._added = (
            0  # items of this learner: of past epochs, and of this one
        )
        self.transitions = 0  # of rows that the shard has
        self.appended = 0  # transitions of all rows
        self.figures = ShardFigures()
        self._asked_s = 0.0  # when the shard was last asked for figures, or for more
        self.failure: BaseException | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name=f"replay-{shard}", daemon=True)
        self._thread.start()

    @property
    def added(self) -> int:
        """The items that came of this learner's rows. Any thread may read it."""
        return self._added_before + self._added

    @property
    def epoch(self) -> int:
        """The number of the shard's start; 0 before the first one. Any thread may read it."""
        return self._epoch

    @property
    def full(self) -> bool:
        """Whether so much waits for the shard that acting has to wait. Any thread may read it."""
        most = SETS_AHEAD * CHUNK * self._layout.num_groups
        return len(self._unsent) + len(self._unacked) >= most

    @property
    def idle(self) -> bool:
        """Whether the shard has all rows, and knows of all ends. Any thread may read it."""
        with self._lock:
            return not (self._unsent or self._unacked or self._ends)

    def append(self, group: int, opens: bool, transitions: int, step: tuple) -> None:
        """Sends a step of a group, leaves `[n, ...]`, copied at once. For the inference thread."""
        block = np.empty(self._rows_layout.size, np.uint8)
        self._rows_layout.write(step, block)
        self.appended += transitions
        with self._lock:
            self._numbered += 1
            self._unsent.append(Row(self._numbered, group, opens, transitions, block))
        os.eventfd_write(self._wake, 1)

    def end(self, groups: list[int]) -> None:
        """Ends the streams of groups, behind all rows. Any thread may call this."""
        with self._lock:
            self._ends += groups
            self._ends_sent = False
        os.eventfd_write(self._wake, 1)

    def draw(self, draw: Draw) -> None:
        """Asks for items; `drawn` is called with them. Any thread may call this."""
        with self._lock:
            self._draws.append(draw)
        os.eventfd_write(self._wake, 1)

    def prioritise(
        self, epoch: int, slots: np.ndarray, generations: np.ndarray, priorities: np.ndarray
    ) -> None:
        """Gives items that were drawn in an epoch new priorities, `[k]` each. Any thread may call this."""
        layout = priorities_layout(len(slots))
        block = np.empty(layout.size, np.uint8)
        layout.write([slots, generations, priorities], block)
        with self._lock:
            self._priorities.append((epoch, block, len(slots)))
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                try:
                    if not self._caller.connected:
                        self._greet()
                    self._send_all()
                    message = self._caller.receive(time.monotonic() + 0.1, self._wake)
                    if message is not None:
                        self._take(message)
                except ConnectionError:
                    self._caller.close()
                    self._give_back()
        except Stopped:
            pass
        except BaseException as failure:
            self.failure = failure
            self._changed()
        finally:
            self._caller.close()

    def _greet(self) -> None:
        """Connects; the rows that the shard does not have are to be sent again."""
        said = self._caller.connect(lambda: {"role": LEARNER, "number": self._learner})
        with self._lock:
            epoch = said["epoch"]
            if epoch != self._epoch:
                # Another start of the shard knows nothing of this learner.
                self._epoch, self._added_before, self._added = epoch, self.added, 0
                self._priorities.clear()
            self._settle(said["acked"])
            again = [*self._unacked, *self._unsent]
            self._unacked.clear()
            if not said["acked"]:
                seen: set[int] = set()
                for place, row in enumerate(again):
                    if row.group not in seen:
                        seen.add(row.group)
                        again[place] = row._replace(opens=True)
            self._unsent = collections.deque(again)
            self._ends_sent = False
        self._note(said)

    def _settle(self, acked: int) -> None:
        """Forgets rows that the shard has. The lock is held."""
        while self._unacked and self._unacked[0].number <= acked:
            self.transitions += self._unacked.popleft().transitions

    def _send_all(self) -> None:
        """Sends what waits: priorities and draws first, as learning waits for them."""
        caller = self._caller
        while True:
            with self._lock:
                rows = [
                    self._unsent.popleft() for _ in range(min(self._most_rows, len(self._unsent)))
                ]
                self._unacked.extend(rows)
                ends = [] if self._unsent or self._ends_sent else list(self._ends)
                self._ends_sent |= bool(ends)
                draws = [self._draws.popleft() for _ in range(len(self._draws))]
                self._asked |= {draw.tag: draw for draw in draws}
                priorities = [self._priorities.popleft() for _ in range(len(self._priorities))]
            for epoch, block, count in priorities:
                if epoch == self._epoch:
                    caller.send(Kind.PRIORITIES, block, count=count)
            for draw in draws:
                caller.send(Kind.DRAW, tag=draw.tag, count=draw.items)
            old = time.monotonic() > self._asked_s + _FIGURES_S
            if rows or ends or old:
                self._asked_s = time.monotonic()
                block = np.concatenate([row.block for row in rows]) if rows else None
                described = [[row.group, row.opens] for row in rows]
                first = rows[0].number if rows else 0
                caller.send(Kind.APPEND, block, first=first, rows=described, ends=ends)
            if not (rows or draws or priorities):
                return

    def _take(self, message: Message) -> None:
        fields = message.fields
        if message.kind is Kind.APPENDED:
            with self._lock:
                self._settle(fields["acked"])
                self._ends = [group for group in self._ends if group not in fields["ends"]]
            self._note(fields)
        elif message.kind is Kind.ITEMS:
            with self._lock:
                draw = self._asked.pop(fields["tag"], None)
            if draw is None:
                return
            sample = None
            if fields["count"] == draw.items:
                layout = self._samples.setdefault(
                    draw.items, SampleLayout(self._layout, draw.items)
                )
                if len(message.block) != layout.size:
                    raise ConnectionError("the items have another size")
                sample = layout.views(np.frombuffer(message.block, np.uint8))
            self._drawn(self, draw.tag, sample, fields["total"])
        else:
            raise ConnectionError(f"{message.kind.name} came out of turn")

    def _note(self, fields: dict) -> None:
        self._added = fields["added"]
        self.figures = ShardFigures(fields["items"], fields["total"])
        self._changed()

    def _give_back(self) -> None:
        """Gives draws without answer back, to be made elsewhere."""
        with self._lock:
            lost = [*self._asked, *(draw.tag for draw in self._draws)]
            self._asked.clear()
            self._draws.clear()
        self.figures = ShardFigures()
        for tag in lost:
            self._drawn(self, tag, None, 0.0)

    def close(self) -> None:
        """Ends the stream and its thread. Any other thread may call this."""
        self._closed.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
