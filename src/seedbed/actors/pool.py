"""The learner's side of whatever publishes timesteps: one epoll over the doorbells of all groups."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import select
import time
from collections.abc import Callable
from types import TracebackType

from seedbed.actors.actor import CLOSING_S
from seedbed.actors.peers import Peer, Policy
from seedbed.actors.slots import Slot, SlotLayout, blank_slot, slot_layout
from seedbed.types import EnvSpec, SeedbedError

# The time between two looks at the peers counts as at most this share of the timeout.
_LOOK = 0.125
_LOOK_S = 1.0  # from one look at the peers to the next, at least
_ABSENCE_S = 5.0  # without any peer, after which a notice says so
_MAX_NOTICES = 16


@dataclasses.dataclass(slots=True, eq=False)
class _Seat:
    """A peer in the pool."""

    peer: Peer
    policy: Policy
    owed: int  # groups without a step that waits for a reply
    heard_s: float  # when it last gave a sign or began to owe a step, on the clock of attended time
    beats: int = 0  # signs of life that were seen, besides timesteps
    greeted: bool = False
    watched: set[int] = dataclasses.field(default_factory=set)  # of the peer's `descriptors`


@dataclasses.dataclass(slots=True, eq=False)
class _Stream:
    """A group while a peer serves it."""

    group: int
    seat: _Seat
    slot: Slot
    bells: tuple[int, int]
    life: int  # the one that was assigned, or a later one that the peer has begun
    step: int = 0  # the last one of this life that has arrived
    awaiting: bool = False  # a step has arrived without a reply


class ActorPool:
    """The groups of environments that a learner acts for; group g is `[g * group_size, ...)` of them.

    Peers serve the groups, and come and go (`attach`). A group's timesteps are known by (life, step): the
    pool assigns a new life with every peer, and a peer may begin a later one by itself. While nobody serves a
    group it yields nothing; its slot object is replaced at the first timestep of another peer.

    One thread at a time may use the pool; any thread may call `take_notices`, `cpu_seconds` and `pids` and
    read `restarts` and `members`. `timeout_s` is the silence after which peers are to be given up, for their
    policies.
    """

    def __init__(self, *, num_groups: int, group_size: int, timeout_s: float) -> None:
        self.num_groups, self.group_size, self.timeout_s = num_groups, group_size, timeout_s
        self.num_envs = num_groups * group_size
        self.layout: SlotLayout | None = None  # of the slots; None until the spec is known
        self.slots: list[Slot] = []  # by group; empty until the spec is known
        self.restarts = 0  # peers that came after another one for the same groups
        # The groups whose environments are there; replaced when they come or go.
        self.members: tuple[int, ...] = ()
        self._lives = [-1] * num_groups  # by group: the latest
        self._seats: list[_Seat] = []  # by group; never changed in place, since any thread reads it
        self._leaving: list[_Seat] = []  # those of peers that have hung up but not ended
        self._streams: list[_Stream | None] = [None] * num_groups
        self._ready: list[int] = []
        self._doorbells: dict[int, _Stream] = {}  # by descriptor
        self._watched: dict[int, _Seat] = {}  # by other descriptor
        self._epoll = select.epoll()
        self._failure: SeedbedError | None = None
        self._closed = False
        self._notices: collections.deque[str] = collections.deque(maxlen=_MAX_NOTICES)
        self._retired_cpu_seconds = 0.0
        self._looked = time.monotonic()
        # A clock that advances only a little while this process is stopped or busy elsewhere.
        self._attended_s = 0.0
        # When a look first found no peer, on that clock; None if there is one, infinity once it was told.
        self._absent_since: float | None = None

    @property
    def spec(self) -> EnvSpec:
        """Waits for the spec like `wait_spec` and returns it. One thread at a time may read it."""
        spec = self.wait_spec(lambda: False)
        assert spec is not None
        return spec

    def wait_spec(self, stop: Callable[[], bool]) -> EnvSpec | None:
        """Waits for the first peer to tell the spec and returns it; returns None if `stop` returns True.

        `stop` is called about every 0.1 s. Raises SeedbedError in the cases in which `poll` does. One thread
        at a time may call this.
        """
        while self.layout is None:
            if stop():
                return None
            self._attend(0.1)
        return self.layout.spec

    def poll(self, timeout_s: float) -> list[int]:
        """Returns the groups with a new timestep, oldest first; waits up to `timeout_s` seconds for one.

        Each timestep is returned once. Raises SeedbedError if the pool is closed, or if the policy of a peer
        ends the run. One thread at a time may call this.
        """
        deadline = time.monotonic() + timeout_s
        self._attend(0.0 if self._ready else timeout_s)
        while not self._ready and (remaining := deadline - time.monotonic()) > 0:
            self._attend(remaining)
        ready, self._ready = self._ready, []
        if len(ready) > 1:
            ready.sort(key=lambda group: self.slots[group].published_ns)
        return ready

    def reply(self, group: int) -> bool:
        """Hands over the action in the group's slot; returns whether there was a step to answer.

        It does nothing if the group is not waiting. Call from the thread that calls `poll`.
        """
        stream = self._streams[group]
        if stream is None or not stream.awaiting:
            return False
        self._hand_over(stream, stream.life, stream.step)
        return True

    def reset(self, group: int) -> bool:
        """Asks a group that waits for an action to reset its environments instead, and to begin a new life.

        Returns whether it was waiting. Call from the thread that calls `poll`.
        """
        stream = self._streams[group]
        if stream is None or not stream.awaiting:
            return False
        self._lives[group] += 1
        self._hand_over(stream, self._lives[group], 0)
        return True

    def _hand_over(self, stream: _Stream, life: int, step: int) -> None:
        """Gives the slot back to its peer, with the answer to a step, or with a life to begin."""
        stream.awaiting = False
        stream.slot.answer(life, step)
        seat = stream.seat
        if not seat.owed:
            seat.heard_s = self._attended_s
        seat.owed += 1
        os.eventfd_write(stream.bells[1], 1)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `poll` has something to do. Any thread may call this."""
        return self._epoll.fileno()

    def assign_lives(self, groups: range) -> list[int]:
        """Begins a new life of each group, and returns their numbers, for a peer that is to be attached.

        Call from the thread that calls `poll`, or before it does.
        """
        for group in groups:
            self._lives[group] += 1
        return [self._lives[group] for group in groups]

    def attach(self, peer: Peer, policy: Policy) -> None:
        """Lets a peer serve its groups, in lives from `assign_lives`; nobody else may serve them still.

        The pool closes it at the end. Call from the thread that calls `poll`, or before it does.
        """
        assert all(self._streams[group] is None for group in peer.groups), "one peer a group"
        seat = _Seat(peer=peer, policy=policy, owed=len(peer.groups), heard_s=self._attended_s)
        self.restarts += self._lives[peer.groups.start] > 0
        self._settle(peer.groups, [seat])
        self._update(seat)

    def note(self, text: str) -> None:
        """Keeps a message for `take_notices`. Call from the thread that calls `poll`."""
        self._notices.append(text)

    def take_notices(self) -> list[str]:
        """Returns messages for the user about peers, each once, of which the newest 16 are kept.

        Any thread may call this, but only one at a time.
        """
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def cpu_seconds(self) -> float:
        """Returns the CPU seconds of all peers so far, also of those that were replaced.

        Any thread may call this; while a peer is being replaced, a result may be off by what it used.
        """
        return self._retired_cpu_seconds + sum(seat.peer.cpu_seconds() for seat in self._seats)

    def pids(self) -> list[int]:
        """Returns the process ids of the peers, in the order of their groups. Any thread may call this."""
        return [seat.peer.pid for seat in self._seats]

    def close(self, patience_s: float = CLOSING_S) -> None:
        """Ends every peer, within two seconds after these, and closes every descriptor.

        A notice tells if environments took longer to close. A second call does nothing. Call it while no
        other thread uses the pool.
        """
        if self._closed:
            return
        self._closed = True
        self._epoll.close()
        peers = [seat.peer for seat in self._seats]
        for peer in peers:
            peer.leave(patience_s)
        # Ask all that are left again before any of them is waited for again.
        left = [peer for peer in peers if not peer.gone()]
        for peer in left:
            peer.leave()
        if left:
            self.note(
                f"{len(left)} of {len(peers)} processes were ended before their environments had closed, "
                f"which may take {patience_s:g} s"
            )
        for peer in peers:
            peer.close()
        self.slots, self._ready, self._leaving = [], [], []
        self._streams = [None] * self.num_groups
        self._doorbells, self._watched = {}, {}

    def __enter__(self) -> ActorPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Whoever interrupts waits for the end.
        self.close(1.0 if isinstance(error, KeyboardInterrupt) else CLOSING_S)

    def _attend(self, timeout_s: float) -> None:
        """Handles one batch of events; groups with a new timestep are appended to `_ready`."""
        if self._closed:
            raise SeedbedError("the actor pool is closed")
        if self._failure is not None:
            raise self._failure
        if self._leaving:
            timeout_s = min(timeout_s, 0.005)
        others = []
        for fd, _ in self._epoll.poll(timeout_s):
            stream = self._doorbells.get(fd)
            if stream is None:
                others.append((fd, self._watched[fd]))
            else:
                self._arrived(stream)
        try:
            for fd, seat in others:
                # The number of a descriptor may have been reused meanwhile.
                if self._watched.get(fd) is seat:
                    seat.peer.descriptors[fd]()
                    self._update(seat)
            for seat in list(self._leaving):
                self._update(seat)
            self._look()
        except SeedbedError as error:
            self._failure = error
            raise

    def _arrived(self, stream: _Stream) -> None:
        """Takes the next timestep of a group, or the first one of a later life; ignores anything else."""
        slot = stream.slot
        life, step = slot.life, slot.step
        if life != stream.life:
            if life < stream.life or step != 1:
                return
            stream.life = self._lives[stream.group] = life
        elif step != stream.step + 1:
            return
        stream.step = step
        seat = stream.seat
        seat.heard_s = self._attended_s
        if not stream.awaiting:
            stream.awaiting = True
            seat.owed -= 1
        elif stream.group in self._ready:
            return
        self.slots[stream.group] = slot
        self._ready.append(stream.group)

    def _look(self) -> None:
        """Tells policies, about once a second, of silence and of ends that nothing announced."""
        longest_s = _LOOK * self.timeout_s
        passed_s = time.monotonic() - self._looked
        if passed_s < min(_LOOK_S, longest_s):
            return
        self._looked += passed_s
        self._attended_s += min(passed_s, longest_s)
        for seat in self._seats:
            if seat not in self._leaving:
                if seat.peer.beats != seat.beats:
                    seat.beats, seat.heard_s = seat.peer.beats, self._attended_s
                seat.policy.silent(self._attended_s - seat.heard_s if seat.owed else 0.0)
                self._update(seat)
        self._look_for_absence()

    def _look_for_absence(self) -> None:
        if any(seat.peer.present for seat in self._seats if seat not in self._leaving):
            self._absent_since = None
        elif self._absent_since is None:
            self._absent_since = self._attended_s
        elif (absent_s := self._attended_s - self._absent_since) >= _ABSENCE_S:
            self._absent_since = math.inf
            self.note(f"no actor has been here for {absent_s:.0f} s; the run waits for one")

    def _update(self, seat: _Seat) -> None:
        """Follows a peer that may have changed: greets it, watches what it shows, or lets it go."""
        peer = seat.peer
        if peer.spec is not None and not seat.greeted:
            self._greet(seat, peer.spec)
        if (how := peer.ended()) is not None:
            self._detach(seat)
            if seat in self._leaving:
                self._leaving.remove(seat)
            seat.policy.ended(how)
            # If no other peer has come, nobody has the groups now.
            if seat in self._seats:
                self._settle(peer.groups, [])
        elif not peer.descriptors:
            if seat not in self._leaving:
                self._detach(seat)
                self._leaving.append(seat)
        else:
            for fd in seat.watched - peer.descriptors.keys():
                self._unwatch(fd)
            for fd in peer.descriptors.keys() - seat.watched:
                self._epoll.register(fd, select.EPOLLIN)
                self._watched[fd] = seat
            seat.watched = set(peer.descriptors)
        self._count_members()

    def _greet(self, seat: _Seat, spec: EnvSpec) -> None:
        """Gives a peer the layout, and listens to its doorbells."""
        peer, seat.greeted = seat.peer, True
        if self.layout is None:
            self.layout = slot_layout(spec, self.group_size)
            self.slots = [blank_slot(self.layout) for _ in range(self.num_groups)]
        peer.share(self.layout)
        # Nothing if the peer has refused the layout.
        for group, slot, bells in zip(peer.groups, peer.slots, peer.bells, strict=False):
            stream = _Stream(
                group=group, seat=seat, slot=slot, bells=bells, life=self._lives[group]
            )
            self._streams[group] = self._doorbells[bells[0]] = stream
            # The doorbells are edge-triggered: each ring is an event, and the counter need not be read.
            self._epoll.register(bells[0], select.EPOLLIN | select.EPOLLET)
        seat.heard_s = self._attended_s

    def _detach(self, seat: _Seat) -> None:
        """Forgets the streams and descriptors of a peer. They must not have been closed yet."""
        for group in seat.peer.groups:
            stream = self._streams[group]
            if stream is not None:
                del self._doorbells[stream.bells[0]]
                self._epoll.unregister(stream.bells[0])
                self._streams[group] = None
        self._ready = [group for group in self._ready if group not in seat.peer.groups]
        for fd in seat.watched:
            self._unwatch(fd)
        seat.watched = set()

    def _unwatch(self, fd: int) -> None:
        del self._watched[fd]
        self._epoll.unregister(fd)

    def _settle(self, groups: range, seats: list[_Seat]) -> None:
        """Puts seats in the place of the one that had these groups, and keeps its CPU seconds."""
        gone = [seat for seat in self._seats if seat.peer.groups == groups]
        self._retired_cpu_seconds += sum(seat.peer.cpu_seconds() for seat in gone)
        stay = [seat for seat in self._seats if seat not in gone]
        self._seats = sorted([*stay, *seats], key=lambda seat: seat.peer.groups.start)
        self._count_members()

    def _count_members(self) -> None:
        members = tuple(group for seat in self._seats for group in seat.peer.present)
        if members != self.members:
            self.members = members
