"""`seedbed actor`: actor processes of this machine for a learner that listens, maybe on another one.

The supervisor steps no environment. It keeps a pool of actor processes, as a learner does, and passes on what
they publish, a stream for each group. It imports no JAX.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import secrets
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

from seedbed import trees
from seedbed.actors.link import Identity, Link, Refusal, RunFinished, Stage
from seedbed.actors.lives import Act
from seedbed.actors.local import local_pool
from seedbed.actors.pool import ActorPool
from seedbed.actors.process import Launcher
from seedbed.actors.slots import spec_to_json
from seedbed.actors.waiting import GIVE_UP_S
from seedbed.actors.wire import BEAT_S, Beat, Kind, StepCodec, beat_frame
from seedbed.envs.host import registry, versions
from seedbed.envs.host.contract import HostEnvConfig
from seedbed.envs.host.gym import GymEnv
from seedbed.envs.host.pickled import is_pickled
from seedbed.exit_status import TemporaryError
from seedbed.streams.credentials import ActorKey
from seedbed.streams.loop import EventLoop
from seedbed.streams.messages import ProtocolError, frame, pack
from seedbed.types import SeedbedError

ANY = "*"
"""In place of a module, in `HostOptions.allow`: all of them."""
GROUPS = 2
"""Groups of environments in an actor process: one steps while the other waits for actions."""
# Seconds until it is told that a learner cannot be reached, and until it is told again.
_TELL_S, _TELL_AGAIN_S = 10.0, 60.0


@dataclasses.dataclass(frozen=True)
class HostOptions:
    """The choices of the person who starts actors."""

    processes: int  # actor processes
    envs: int = 0  # environments of a process; 0 is two groups of the learner's size
    allow: tuple[str, ...] = ()  # modules whose environments may be made
    give_up_after_s: float = GIVE_UP_S  # without a learner


class _Group:
    """A group of the host: its stream, and how it fares."""

    def __init__(self, link: Link, serve: Callable[[_Group, int], None]) -> None:
        """`serve` is called with the group and the events that its stream is ready for."""
        self.link, self.serve = link, functools.partial(serve, self)
        self.steps = 0  # timesteps that were answered
        self.sent_s = 0.0  # when the timestep that waits for its answer was sent
        self.latencies: list[float] = []  # since the last beat


class Host:
    """The supervisor: the streams, and the processes behind them. For one thread."""

    def __init__(
        self,
        key: ActorKey,
        addresses: Callable[[], Sequence[tuple[str, int]]],
        options: HostOptions,
        insecure: bool,
        tell: Callable[[str], None],
    ) -> None:
        """`addresses` returns where the learner may be; `tell` is called with messages for the user."""
        self._options, self._tell, self._addresses = options, tell, addresses
        self._identity = Identity(
            key=key,
            context=None if insecure else key.context(),
            instance=secrets.token_hex(16),
        )
        self._loop = EventLoop()
        self._groups = [_Group(Link(self._identity, 0, addresses), self._serve)]
        self._pool: ActorPool | None = None
        self._welcome: dict[str, Any] = {}  # what the environments were made for
        self._env: HostEnvConfig | None = None
        self._codec: StepCodec | None = None
        self._next_beat_s, self._next_tell_s = 0.0, time.monotonic() + _TELL_S
        self._connected, self._waiting = False, 0
        self._found_s = time.monotonic()  # when there was a learner last

    def run(self, stop: Callable[[], bool]) -> str | None:
        """Serves the learner until its run ends or `stop` does; returns how it ended, None after `stop`.

        Raises SeedbedError if the learner refuses this host or if the environments cannot work, and
        TemporaryError if there was no learner for too long.
        """
        try:
            while not stop():
                # Not after `stop`: a signal to the whole process group ends the actor processes, too.
                self._tell_notices()
                self._turn()
            self._say_goodbye("")
            return None
        except RunFinished as finish:
            return str(finish)
        except Refusal as refusal:
            raise SeedbedError(f"the learner refuses this actor: {refusal}") from None
        except SeedbedError as error:
            self._say_goodbye(str(error).splitlines()[0])
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Ends the streams and the actor processes."""
        for group in self._groups:
            group.link.drop("")
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self._loop.close()

    def _tell_notices(self) -> None:
        for notice in self._pool.take_notices() if self._pool is not None else ():
            self._tell(notice)

    def _turn(self) -> None:
        """Handles one batch of events."""
        now_s = time.monotonic()
        for group in self._groups:
            if group.link.stage is Stage.RETRY and now_s >= group.link.retry_at_s:
                group.link.connect()
                self._watch(group)
        if now_s >= self._next_beat_s:
            self._beat(now_s)
        retries = [g.link.retry_at_s for g in self._groups if g.link.stage is Stage.RETRY]
        until_s = min([self._next_beat_s, *retries])
        self._loop.turn(until_s - time.monotonic())
        if self._pool is not None:
            self._attend(self._pool)

    def _watch(self, group: _Group) -> None:
        """Waits for what a group's stream needs next."""
        if (connection := group.link.connection) is not None:
            self._loop.watch(connection.fileno(), group.serve, connection.events)

    def _drop(self, group: _Group, why: str, full: bool = False) -> None:
        if group.link.connection is not None:
            self._loop.forget(group.link.connection.fileno())
        group.link.drop(why, full)

    def _serve(self, group: _Group, events: int) -> None:
        link = group.link
        assert link.connection is not None
        try:
            if events & select.EPOLLOUT:
                link.connection.flush()
            for kind, body in link.connection.receive():
                if kind is Kind.ANSWER and link.codec is not None:
                    self._answer(group, body)
                elif (begin := link.take(kind, body)) is not None:
                    self._do(group, link.end.begin(begin))
                elif link.stage is Stage.SPEC:
                    self._welcomed(group)
            self._watch(group)
        except (ProtocolError, ConnectionError) as error:
            full = isinstance(error, ProtocolError) and error.code == "full"
            self._drop(group, str(error), full)

    def _welcomed(self, group: _Group) -> None:
        """Makes the environments that the learner wants, if they are not there; says READY if they are."""
        welcome = group.link.welcome
        assert welcome is not None
        wanted = {name: welcome[name] for name in ("env", "num_envs")}
        if self._pool is None:
            self._make(welcome)
        elif wanted != {name: self._welcome[name] for name in wanted}:
            raise TemporaryError("the learner trains another run now: start the actor again")
        self._say_ready(group)

    def _make(self, welcome: dict[str, Any]) -> None:
        """Starts the actor processes, and the streams of their other groups."""
        env = registry.from_json(welcome["env"])
        _require_allowed(env, self._options.allow)
        size = welcome["num_envs"]
        groups, rest = divmod(self._options.envs or GROUPS * size, size)
        if rest or not groups:
            raise SeedbedError(
                f"{self._options.envs} environments a process do not divide into the learner's groups of "
                f"{size}: give a multiple with --envs"
            )
        self._welcome, self._env = welcome, env
        launcher = Launcher(
            env=env,
            envs_per_group=size,
            groups=groups,
            seed=welcome["seed"],
            allow=None if ANY in self._options.allow else self._options.allow,
        )
        self._pool = local_pool(
            launcher, actors=self._options.processes, timeout_s=welcome["timeout_s"]
        )
        self._loop.watch(self._pool.fileno(), lambda events: None)  # `_attend` polls it
        for number in range(1, self._pool.num_groups):
            link = Link(self._identity, number, self._addresses)
            self._groups.append(_Group(link, self._serve))
        self._tell(
            f"actor processes: {self._options.processes}, each with {groups} x {size} environments"
        )

    def _say_ready(self, group: _Group) -> None:
        pool = self._pool
        if pool is None or pool.layout is None or self._env is None:
            return
        if self._codec is None:
            self._codec = StepCodec(pool.layout)
        group.link.ready(self._codec, spec_to_json(pool.layout.spec), versions.of(self._env))

    def _attend(self, pool: ActorPool) -> None:
        """Passes on what the actor processes have published."""
        known = pool.layout is not None
        ready = pool.poll(0.0)
        if pool.layout is not None and not known:
            for group in self._groups:
                if group.link.stage is Stage.SPEC:
                    self._say_ready(group)
                    self._watch(group)
        for number in ready:
            group = self._groups[number]
            self._do(group, group.link.end.timestep(opening=pool.slots[number].step == 1))

    def _do(self, group: _Group, act: Act) -> None:
        """Does what a group's end says."""
        link, pool = group.link, self._pool
        assert pool is not None
        try:
            if act is Act.SEND and link.connection is not None and link.codec is not None:
                slot = pool.slots[link.number]
                leaves = trees.leaves(slot.timestep)
                group.sent_s = time.monotonic()
                link.connection.send(link.codec.step(link.end.life, link.end.step, leaves))
            elif act is Act.ANEW and link.connection is not None:
                link.connection.send(frame(Kind.ANEW))
            elif act is Act.RESET:
                pool.reset(link.number)
            self._watch(group)
        except ConnectionError as error:
            self._drop(group, str(error))

    def _answer(self, group: _Group, body: memoryview) -> None:
        link, pool = group.link, self._pool
        assert link.codec is not None and pool is not None
        life, step, action = link.codec.read_answer(body)
        if link.end.answer(life, step) is not Act.STEP:
            return
        for view, leaf in zip(
            trees.leaves(pool.slots[link.number].action), trees.leaves(action), strict=True
        ):
            view[...] = leaf
        group.steps += 1
        group.latencies.append(time.monotonic() - group.sent_s)
        pool.reply(link.number)

    def _beat(self, now_s: float) -> None:
        """Tells the learner that this host lives, and gives up streams that tell nothing."""
        self._next_beat_s = now_s + BEAT_S
        share_s = 0.0 if self._pool is None else self._pool.cpu_seconds() / len(self._groups)
        share_s += time.process_time() / len(self._groups)
        for group in self._groups:
            link, connection = group.link, group.link.connection
            if connection is None:
                continue
            patience_s = link.patience_s
            if now_s > connection.heard_s + patience_s:
                self._drop(group, f"the learner gave no sign for {patience_s:.0f} s")
            elif link.stage not in (Stage.CHALLENGE, Stage.RETRY) and connection.idle:
                waits, group.latencies = sorted(group.latencies), []
                beat = Beat(
                    steps=group.steps,
                    cpu_seconds=share_s,
                    p50_s=waits[len(waits) // 2] if waits else 0.0,
                    p99_s=waits[int(0.99 * len(waits))] if waits else 0.0,
                )
                try:
                    connection.send(beat_frame(beat))
                    self._watch(group)
                except ConnectionError as error:
                    self._drop(group, str(error))
        self._tell_of_the_learner(now_s)

    def _tell_of_the_learner(self, now_s: float) -> None:
        """Says when the learner is found, lost, or cannot be reached for long.

        Raises TemporaryError if it has been away for too long.
        """
        streaming = sum(group.link.stage is Stage.STEPS for group in self._groups)
        if streaming and not self._connected:
            self._connected = True
            self._tell(f"connected to the learner, term {self._identity.term}")
        elif not streaming and self._connected:
            self._connected, self._next_tell_s = False, now_s + _TELL_S
            errors = collections.Counter(group.link.last_error for group in self._groups)
            # Groups may have tried to connect again since.
            why, self._identity.stopped = self._identity.stopped, ""
            self._tell(f"lost the learner ({why or errors.most_common(1)[0][0]}); looking for it")
        waiting = sum(group.link.waits_for_place for group in self._groups)
        if waiting > self._waiting:
            self._tell(f"the run is full: {waiting} of {len(self._groups)} groups wait for a place")
        self._waiting = waiting
        making = any(group.link.stage in (Stage.SPEC, Stage.BEGIN) for group in self._groups)
        if streaming or waiting or making:
            self._found_s = now_s
            return
        # Each group may have tried another address.
        errors = sorted({group.link.last_error for group in self._groups} - {""})
        limit_s = self._options.give_up_after_s
        if now_s > self._found_s + limit_s:
            raise TemporaryError(
                f"no learner for {limit_s:g} s ({'; '.join(errors) or 'connecting'}): its run has ended, or "
                "is elsewhere; start the actor again, or let it wait longer with --give-up-after"
            )
        if now_s > self._next_tell_s:
            self._next_tell_s = now_s + _TELL_AGAIN_S
            self._tell(f"no learner yet: {'; '.join(errors) or 'connecting'}")

    def _say_goodbye(self, text: str) -> None:
        """Tells the learner that this host leaves, and why if there is a reason; its places are free then."""
        for group in self._groups:
            link = group.link
            if link.connection is not None and link.stage in (Stage.SPEC, Stage.BEGIN, Stage.STEPS):
                with contextlib.suppress(ConnectionError):
                    link.connection.send(pack(Kind.LEAVE, {"text": text[:500]}))
                return


def _require_allowed(env: HostEnvConfig, allow: tuple[str, ...]) -> None:
    """Raises SeedbedError if a learner sends code, or asks for code of this machine that is not allowed."""
    if is_pickled(env):
        raise SeedbedError(
            "the learner sends an environment as pickled code, which no host runs: put it into a module on "
            "both machines, such as my_env.py, and allow that with --allow my_env"
        )
    name = registry.code_of(env)
    module = name.partition(":")[0]
    # An id without a module is one that a package of this machine registers.
    installed = isinstance(env, GymEnv) and ":" not in env.id
    if name and not installed and module not in allow and ANY not in allow:
        raise SeedbedError(
            f"the learner asks for the environment {name}, which is code of the module {module}: allow it "
            f"with --allow {module}"
        )
