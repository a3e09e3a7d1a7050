"""The learner's side of its local actors: one epoll over every doorbell and every socket."""

from __future__ import annotations

import collections
import json
import math
import select
import time
from collections.abc import Callable
from os import eventfd_write
from types import TracebackType
from typing import Any

from seedbed.actors.actor import MESSAGE_BYTES
from seedbed.actors.process import ActorProcess, end, exit_text
from seedbed.actors.slots import Layout, Slot, blank_slot, make_layout, spec_from_json
from seedbed.envs.host import registry
from seedbed.types import EnvSpec, HostEnvConfig, SeedbedError

MAX_DEATHS = 5
"""The number of early deaths of one actor in a row after which the pool fails; see `SETTLED_STEPS`."""
SETTLED_STEPS = 100
"""A death is early if no group of the actor has published this many timesteps."""
TIMEOUT_S = 120.0
"""Seconds of silence after which an actor that owes a step is replaced."""
# The share of the timeout after which a silent actor is reported in a notice.
_NOTICE = 0.25
# The time between two looks at the actors counts as at most this share of the timeout.
_LOOK = 0.125
_MAX_NOTICES = 16
_LINE_CHARACTERS = 300  # of an actor's last line that a message quotes
_LOOK_S = 1.0  # from one look at the actors to the next, at least
_PATIENCE_S = 1.0  # for actors to exit by themselves, and again after SIGTERM


class ActorPool:
    """A pool of actor processes and their groups; group g has the environments `[g * group_size, ...)`.

    One thread at a time may use it; any thread may call `take_notices`, `cpu_seconds` and `pids` and read
    `restarts`. An actor that dies is started again as its next incarnation, with new memory and without a
    seed. Its groups yield nothing until then, and their slot objects are replaced. An actor that owes a step
    or its start, and gives no sign for `timeout_s` seconds, is killed and replaced in the same way; before
    the first actor has said hello, `wait_spec` raises instead. Only time in which the pool is attended to
    counts. `niceness` is that of the processes, as in nice(1). The constructor starts the actors, and raises
    SeedbedError if it cannot, or if the numbers do not fit.
    """

    def __init__(
        self,
        env: HostEnvConfig,
        *,
        actors: int,
        envs_per_actor: int,
        seed: int,
        groups: int = 2,
        niceness: int = 0,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if actors < 1 or groups < 1 or envs_per_actor < groups or envs_per_actor % groups:
            raise SeedbedError(
                f"{actors} actors with {envs_per_actor} environments in {groups} groups do not "
                "work; take at least one actor, and environments per actor that the groups divide"
            )
        self.num_groups = actors * groups
        self.group_size = envs_per_actor // groups
        self.num_envs = actors * envs_per_actor
        self.slots: list[Slot] = []  # by group; empty until the spec is known
        self.restarts = 0  # actors started again so far
        self._groups = groups
        self._job = {
            "env": registry.to_json(env),
            "num_envs": self.group_size,
            "groups": groups,
            "seed": seed,
            "niceness": niceness,
        }
        self._layout: Layout | None = None
        self._failure: str | None = None
        self._notices: collections.deque[str] = collections.deque(maxlen=_MAX_NOTICES)
        self._closed = False
        self._retired_cpu_seconds = 0.0
        self._reported = [0] * self.num_groups  # by group: the last step that has arrived
        self._awaiting = [False] * self.num_groups  # by group: a step has arrived without a reply
        self._ready: list[int] = []
        self._deaths = [0] * actors  # by actor: early deaths in a row
        self._dying: list[int] = []  # actors that are killed but not yet reaped
        self._epoll = select.epoll()
        self._timeout_s = timeout_s
        self._looked = time.monotonic()
        # A clock that advances only a little while this process is stopped or busy elsewhere.
        self._attended_s = 0.0
        # By actor: the last sign of it on that clock; infinity if the actor owes nothing.
        self._silent_since = [math.inf] * actors
        self._suspects: set[int] = set()  # silent actors that a notice has reported
        self._hung: set[int] = set()  # actors that were killed because they were silent
        self._doorbells: dict[int, int] = {}  # descriptor -> group
        self._calls: dict[int, Callable[[], None]] = {}  # other descriptor -> its handler
        self._actors: list[ActorProcess] = []
        try:
            for actor in range(actors):
                self._actors.append(self._launch(actor, 0))
        except BaseException:
            self.close()
            raise

    @property
    def spec(self) -> EnvSpec:
        """Waits for the spec like `wait_spec` and returns it. One thread at a time may read it."""
        spec = self.wait_spec(lambda: False)
        assert spec is not None
        return spec

    def wait_spec(self, stop: Callable[[], bool]) -> EnvSpec | None:
        """Waits for the first actor to say hello and returns the spec; returns None if `stop` returns True.

        `stop` is called about every 0.1 s. Raises SeedbedError if no actor answers within the pool's
        `timeout_s`, and in the cases in which `poll` does. One thread at a time may call this.
        """
        begun_s = self._attended_s
        while self._layout is None:
            if stop():
                return None
            if self._attended_s - begun_s >= self._timeout_s:
                raise SeedbedError(
                    f"no actor answered within {self._timeout_s:g} s of its start (where making "
                    "environments takes longer, raise --actor-timeout-s)"
                    + _quote(self._actors[0].last_words())
                )
            self._attend(0.1)
        return self._layout.spec

    def poll(self, timeout_s: float) -> list[int]:
        """Returns the groups with a new timestep, oldest first; waits up to `timeout_s` seconds for one.

        Each timestep is returned once. Raises SeedbedError if the pool is closed, if an actor has reported an
        error, or if an actor dies too often. One thread at a time may call this.
        """
        deadline = time.monotonic() + timeout_s
        self._attend(0.0 if self._ready else timeout_s)
        while not self._ready and (remaining := deadline - time.monotonic()) > 0:
            self._attend(remaining)
        ready, self._ready = self._ready, []
        if len(ready) > 1:
            ready.sort(key=lambda group: self.slots[group].published_ns)
        return ready

    def reply(self, group: int, incarnation: int | None = None) -> bool:
        """Hands over the action in the group's slot; returns whether there was a step to answer.

        It does nothing if the group is not waiting, or if its actor's life is not `incarnation` any more.
        Call from the thread that calls `poll`.
        """
        slot = self.slots[group]
        if not self._awaiting[group] or (
            incarnation is not None and incarnation != slot.incarnation
        ):
            return False
        self._awaiting[group] = False
        slot.answer()
        actor, local = divmod(group, self._groups)
        self._silent_since[actor] = min(self._silent_since[actor], self._attended_s)
        eventfd_write(self._actors[actor].bells[local][1], 1)
        return True

    def take_notices(self) -> list[str]:
        """Returns messages for the user about actors, each once, of which the newest 16 are kept.

        Any thread may call this, but only one at a time.
        """
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def cpu_seconds(self) -> float:
        """Returns the CPU seconds of all actors in all their lives, each up to its last timestep.

        Any thread may call this; while an actor is being replaced, a result may be off by that life.
        """
        return self._retired_cpu_seconds + sum(actor.cpu_seconds() for actor in self._actors)

    def pids(self) -> list[int]:
        """Returns the process ids of the actors' current lives, by actor. Any thread may call this."""
        return [actor.popen.pid for actor in self._actors]

    def close(self) -> None:
        """Ends every actor, within about two seconds, and closes every descriptor.

        A second call does nothing. Call it while no other thread uses the pool.
        """
        if self._closed:
            return
        self._closed = True
        self._epoll.close()
        for actor in self._actors:
            # An actor exits when its connection hangs up. One without slots has nothing to clean up yet.
            actor.connection.close()
            if not actor.slots:
                actor.popen.terminate()
        end([actor.popen for actor in self._actors], _PATIENCE_S)
        for actor in self._actors:
            self._retired_cpu_seconds += actor.cpu_seconds()
            actor.release()
        self.slots, self._ready, self._calls, self._doorbells = [], [], {}, {}

    def __enter__(self) -> ActorPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _launch(self, actor: int, incarnation: int) -> ActorProcess:
        process = ActorProcess({**self._job, "actor": actor, "incarnation": incarnation})
        for fd, call in (
            (process.connection.fileno(), lambda: self._message(actor)),
            (process.output, lambda: self._output(actor)),
        ):
            self._epoll.register(fd, select.EPOLLIN)
            self._calls[fd] = call
        self._heard(actor)
        return process

    def _attend(self, timeout_s: float) -> None:
        """Handles one batch of events; groups with a new timestep are appended to `_ready`."""
        if self._closed:
            raise SeedbedError("the actor pool is closed")
        if self._failure is not None:
            raise SeedbedError(self._failure)
        if self._dying:
            timeout_s = min(timeout_s, 0.005)
        others = []
        for fd, _ in self._epoll.poll(timeout_s):
            group = self._doorbells.get(fd)
            if group is None:
                others.append(self._calls[fd])
            else:
                self._arrived(group)
        # These come last, and look again: the number of a descriptor may be reused meanwhile.
        for call in others:
            call()
        self._look()
        if self._dying:
            self._reap()

    def _look(self) -> None:
        """Finds, about once a second, actors that hang, and dead ones whose children keep the socket open."""
        longest_s = _LOOK * self._timeout_s
        passed_s = time.monotonic() - self._looked
        if passed_s < min(_LOOK_S, longest_s):
            return
        self._looked += passed_s
        self._attended_s += min(passed_s, longest_s)
        for actor, process in enumerate(self._actors):
            silent_s = self._attended_s - self._silent_since[actor]
            if actor in self._dying:
                continue
            # It is dead, but a child of it holds the socket open.
            if process.popen.poll() is not None:
                self._hung_up(actor)
            elif silent_s >= self._timeout_s and self._layout is not None:
                self._hung.add(actor)
                self._hung_up(actor)
            elif silent_s >= _NOTICE * self._timeout_s and actor not in self._suspects:
                self._suspects.add(actor)
                self._notices.append(
                    f"actor {actor} has given no sign for {silent_s:.0f} s; it is replaced after "
                    f"{self._timeout_s:g} s (--actor-timeout-s)"
                )

    def _heard(self, actor: int) -> None:
        """Notes a sign of life of an actor: its silence counts from now if it owes another step."""
        first = actor * self._groups
        owes = not all(self._awaiting[first : first + self._groups])
        self._silent_since[actor] = self._attended_s if owes else math.inf
        self._suspects.discard(actor)

    def _arrived(self, group: int) -> None:
        actor, local = divmod(group, self._groups)
        process = self._actors[actor]
        slot = process.slots[local]
        if slot.step != self._reported[group] + 1 or slot.incarnation != process.incarnation:
            return
        self._reported[group] += 1
        self._awaiting[group] = True
        self.slots[group] = slot
        self._ready.append(group)
        self._heard(actor)

    def _message(self, actor: int) -> None:
        if actor in self._dying:
            return
        process = self._actors[actor]
        try:
            data = process.connection.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._hung_up(actor)
            return
        message = json.loads(data)
        if "error" in message:
            self._fail(message["error"])
        self._greet(actor, spec_from_json(message["spec"]))

    def _greet(self, actor: int, spec: EnvSpec) -> None:
        """Completes the handshake of an actor that has said hello."""
        process = self._actors[actor]
        if self._layout is None:
            self._layout = make_layout(spec, self.group_size)
            self.slots = [blank_slot(self._layout) for _ in range(self.num_groups)]
        elif spec != self._layout.spec:
            self._fail(
                f"actor {actor} has another environment spec, {spec}, than the first, "
                f"{self._layout.spec}"
            )
        try:
            process.share(self._layout, self._groups)
        except (BlockingIOError, ConnectionError):
            self._hung_up(actor)
            return
        for local, (bell, _) in enumerate(process.bells):
            # The doorbells are edge-triggered: each ring is an event, and the counter need not be read.
            self._epoll.register(bell, select.EPOLLIN | select.EPOLLET)
            self._doorbells[bell] = actor * self._groups + local
        self._heard(actor)

    def _output(self, actor: int) -> None:
        process = self._actors[actor]
        if process.output in self._calls and not process.drain():
            self._forget(process.output)

    def _forget(self, fd: int) -> None:
        if self._calls.pop(fd, None) or self._doorbells.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _hung_up(self, actor: int) -> None:
        """Kills an actor and forgets its groups and descriptors; `_reap` reaps it later, without waiting."""
        process = self._actors[actor]
        process.popen.kill()
        for group in range(actor * self._groups, (actor + 1) * self._groups):
            self._awaiting[group] = False
            self._reported[group] = 0
        mine = range(actor * self._groups, (actor + 1) * self._groups)
        self._ready = [group for group in self._ready if group not in mine]
        self._forget(process.connection.fileno())
        self._forget(process.output)
        for bell, _ in process.bells:
            self._forget(bell)
        self._dying.append(actor)

    def _reap(self) -> None:
        for actor in list(self._dying):
            process = self._actors[actor]
            status = process.popen.poll()
            if status is None:
                continue
            self._dying.remove(actor)
            settled = any(slot.step >= SETTLED_STEPS for slot in process.slots)
            self._deaths[actor] = 0 if settled else self._deaths[actor] + 1
            self._retired_cpu_seconds += process.cpu_seconds()
            words = process.last_words()
            steps = max((slot.step for slot in process.slots), default=0)
            process.release()
            end = exit_text(status)
            if actor in self._hung:
                end = (
                    f"was killed, as it gave no sign for {self._timeout_s:g} s (--actor-timeout-s),"
                )
                self._hung.remove(actor)
            if self._deaths[actor] >= MAX_DEATHS:
                self._fail(
                    f"actor {actor} ({self._name()}) died {MAX_DEATHS} times in a row before its "
                    f"step {SETTLED_STEPS}; the last time it {end}{_quote(words)}"
                )
            self.restarts += 1
            said = f" ({_last_line(words)})" if words else ""
            self._notices.append(f"actor {actor} {end} after {steps} steps{said}; started again")
            self._actors[actor] = self._launch(actor, process.incarnation + 1)

    def _name(self) -> str:
        env: dict[str, Any] = self._job["env"]  # type: ignore[assignment]
        return " ".join(str(env[key]) for key in ("kind", "game", "id", "factory") if key in env)

    def _fail(self, text: str) -> None:
        self._failure = text
        raise SeedbedError(text)


def _quote(words: str) -> str:
    """Returns a quotation: an output's last line first, as users see one line only, and then all of it."""
    return f"; its last words: {_last_line(words)}\n{words}" if words else "; it wrote nothing"


def _last_line(words: str) -> str:
    return words.splitlines()[-1].strip()[-_LINE_CHARACTERS:]
