"""Processes that train as one learner (`jax.distributed`): how they find one another, agree and part.

Process 0 leads: it alone has the run's folder, and its commands say what all do next. Commands, and who is to
leave, pass through JAX's coordination service, where a process that waits still sees its signals. Gradients
pass through collectives, which are not encrypted.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed, xla_bridge
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib import _jax  # type: ignore[attr-defined]

from seedbed.exit_status import PeerLost
from seedbed.run.devices import start_jax
from seedbed.run.leaves import array_of, like, shape_and_dtype
from seedbed.run.member import Member
from seedbed.types import SeedbedError, Tree


class Command(NamedTuple):
    """An order of the leader, which tells all processes what to do next."""

    what: Literal["step", "show", "mark", "save", "end"]
    """An iteration or an update; show the whole state; note, and save, what a checkpoint needs; the end."""
    env_steps: int = 0  # of the run by now, as far as the command needs them


# Seconds without a sign of life after which JAX takes a process for dead, and ends the others.
_DEAD_S = 20
# Seconds for the others to come, and for them to compile.
_JOIN_S = 120
_COMPILED_S = 1800
# Seconds for which the leader waits, at the end, until all know it.
_END_S = 5.0
# Seconds between two looks at what is not urgent.
_LOOK_S = 1.0
# Seconds after which somebody's leave ends the round: who stops a job tells one process after the other.
_LEAVE_S = 3.0
# Commands that are kept behind the newest one: somebody may not have read them yet. Nobody is further behind,
# as updates, saves and the whole state wait for everybody.
_KEPT = 16
_COLLECTIVE = re.compile(r"gloo|nccl|collective|all-reduce|coordination|unavailable", re.IGNORECASE)


class Group:
    """The processes that train as one learner, as one of them sees them.

    One thread at a time may call each method, and any thread `command`.
    """

    joined: ClassVar[Group | None] = None
    """That of this process; None if it trains alone."""

    def __init__(self, member: Member) -> None:
        """Joins the others and starts JAX, which must not have started.

        Raises PeerLost if the others do not come within two minutes.
        """
        self.member = member
        self._commands, self._commanding = 0, threading.Lock()
        self._reports, self._reported = 0, set[int]()
        self.look: Callable[[], object] = lambda: None
        """Is called about once a second while this process waits for others to go on; it may raise."""
        self._programs = 0
        self.lacks = False  # whether a process is known to do nothing more
        self._looked_s, self._leaving_s = 0.0, float("inf")
        # SIGTERM is the session's: JAX would take it.
        jax.config.update("jax_enable_preemption_service", False)
        os.environ["NCCL_SOCKET_IFNAME"] = f"={member.interface}"  # else it is a prefix of names
        try:
            jax.distributed.initialize(
                member.address,
                member.of,
                member.number,
                cluster_detection_method="deactivate",
                initialization_timeout=_JOIN_S,
                coordinator_bind_address=member.address,
                heartbeat_timeout_seconds=_DEAD_S,
            )
        except RuntimeError as error:
            raise PeerLost(
                f"the {member.of} processes that train as one did not all come in {_JOIN_S} s: {error}"
            ) from error
        self._client: Any = distributed.global_state.client
        # By itself, JAX takes whatever interface the machine's name belongs to.
        collectives = _jax.make_gloo_tcp_collectives(self._client, interface=member.interface)
        make = functools.partial(xla_bridge.make_cpu_client, collectives)
        xla_bridge.register_backend_factory("cpu", make, fail_quietly=False)
        # All have to: each tells the others which devices it has.
        start_jax()
        Group.joined = self

    @property
    def leads(self) -> bool:
        """Whether this process leads."""
        return self.member.number == 0

    def command(self, command: Command) -> None:
        """Tells all others what to do next. For the leader; any thread may call this."""
        with self._commanding:
            text = f"{command.what} {command.env_steps}"
            self._client.key_value_set(f"command/{self._commands}", text)
            self._client.key_value_delete(f"command/{self._commands - _KEPT}")
            self._commands += 1

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Ends the work of all others at the end of the block, however that comes. For the leader."""
        try:
            yield
        finally:
            # Others may be gone, which is no failure of what was done here.
            with contextlib.suppress(PeerLost, jax.errors.JaxRuntimeError):
                self.command(Command("end"))
                self.meet("ended", _END_S, looks=False)

    def commands(self) -> Iterator[Command]:
        """Yields the leader's commands, but for the end. For the others.

        Raises PeerLost if the leader is gone.
        """
        while True:
            if time.monotonic() > self._looked_s + _LOOK_S:
                self._looked_s = time.monotonic()
                self.look()
            command = self.next_command(_LOOK_S)
            if command is None:
                continue
            if command.what == "end":
                return
            yield command

    def next_command(self, timeout_s: float) -> Command | None:
        """Returns the leader's next command, None if it does not come in time; 0 s is no wait.

        For the others. Raises PeerLost if the leader is gone.
        """
        text = self._read(f"command/{self._commands}", timeout_s)
        if text is None:
            return None
        self._commands += 1
        what, env_steps = text.split()
        command = Command(what, int(env_steps))  # type: ignore[arg-type]
        if command.what == "end":
            self.meet("ended", _END_S, looks=False)
        return command

    def report(self) -> None:
        """Tells the leader that this process is ready for the next update. For the others."""
        self._client.key_value_set(f"ready/{self._reports}/{self.member.number}", "")
        self._reports += 1

    def are_ready(self) -> bool:
        """Waits a second at most until the others are ready for the next update; returns whether they are.

        For the leader.
        """
        for number in range(1, self.member.of):
            if number not in self._reported:
                if self._read(f"ready/{self._reports}/{number}") is None:
                    return False
                self._reported.add(number)
        self._client.key_value_delete(f"ready/{self._reports}/")
        self._reports, self._reported = self._reports + 1, set()
        return True

    def count(self, steps: int) -> None:
        """Tells the leader how many transitions count of this process by now. For the others."""
        self._client.key_value_set(f"count/{self.member.number}", str(steps), allow_overwrite=True)

    def counts(self) -> list[int]:
        """Returns what the others have told last of their transitions, [] until all have told some.

        For the leader; any thread may call this.
        """
        told = self._client.key_value_dir_get("count/")
        return [int(count) for _, count in told] if len(told) == self.member.of - 1 else []

    def fail(self, why: str) -> None:
        """Tells the leader that this process has failed, and waits until it has ended. For the others."""
        self._client.key_value_set(f"failed/{self.member.number}", why, allow_overwrite=True)
        with contextlib.suppress(PeerLost):
            for _ in self.commands():
                pass

    def leave(self) -> None:
        """Asks the leader to save, and to go on without this process. For the others."""
        self._client.key_value_set(f"leaves/{self.member.number}", "", allow_overwrite=True)

    def require_all(self) -> None:
        """Raises PeerLost if another process is to leave, and SeedbedError if one has failed.

        For the leader, which is about to go on.
        """
        now_s = time.monotonic()
        if now_s > self._looked_s + _LOOK_S:
            self._looked_s = now_s
            self._require_none_failed()
            if self._client.key_value_dir_get("leaves/"):
                self._leaving_s = min(self._leaving_s, now_s)
        if now_s > self._leaving_s + _LEAVE_S:
            raise PeerLost("a process of this learner is told to leave")

    def _require_none_failed(self) -> None:
        if self.leads and (failed := self._client.key_value_dir_get("failed/")):
            self.lacks = True
            number = failed[0][0].rpartition("/")[2]
            raise SeedbedError(f"process {number} of this learner has failed: {failed[0][1]}")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raises PeerLost, where what is computed with the others fails as they are gone."""
        try:
            yield
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            text = str(error).partition("\n")[0]
            if not _COLLECTIVE.search(text):
                raise
            raise PeerLost(f"another process of this learner is gone ({text})") from error

    def meet(self, where: str, timeout_s: float = _COMPILED_S, looks: bool = True) -> None:
        """Waits until all are here; each place is met once.

        Signals are seen meanwhile, as they are not in a barrier of JAX's, unless `looks` is False: what a
        signal asks for is to be finished here. Raises PeerLost if others do not come, and SeedbedError if one
        has failed.
        """
        until_s = time.monotonic() + timeout_s
        self.arrive(where)
        for number in range(self.member.of):
            while self._read(f"{where}/{number}") is None:
                if looks:
                    self.look()
                self._require_none_failed()
                if time.monotonic() > until_s:
                    self.lacks = True
                    raise PeerLost(f"process {number} of this learner has not come ({where})")

    def arrive(self, where: str) -> None:
        """Tells the others that this process is at a place, and does not wait. Any thread may call this."""
        self._client.key_value_set(f"{where}/{self.member.number}", "")

    def _read(self, key: str, timeout_s: float = _LOOK_S) -> str | None:
        """Returns a key's value, None if it is not set in time; raises PeerLost if none can tell.

        What is waited for stays with the service until it comes, so nobody waits many times a second.
        """
        try:
            if not timeout_s:
                return str(self._client.key_value_try_get(key))
            return str(self._client.blocking_key_value_get(key, math.ceil(1000 * timeout_s)))
        except jax.errors.JaxRuntimeError as error:
            if re.search("DEADLINE_EXCEEDED|NOT_FOUND", str(error)):
                return None
            raise PeerLost(f"the process that leads is gone ({error})") from error

    def jit(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Compiles a function as `jax.jit`, for operands of one shape; the first call waits for the others.

        Collectives wait for half a minute only, and a program may take longer to compile. All processes call
        this in the same order, and what it returns.
        """
        traced, compiled = jax.jit(function, **options), list[Any]()
        self._programs += 1
        where = f"program-{self._programs}"

        def call(*operands: Any) -> Any:
            if not compiled:
                compiled.append(traced.lower(*operands).compile())
                self.meet(where)
            return compiled[0](*operands)

        return call

    def spread(self, tree: Tree) -> Tree:
        """Returns the leader's tree of arrays, bit for bit. Others give its shapes. All call it, once."""
        leaves, structure = jax.tree.flatten(tree)
        shapes = [shape_and_dtype(leaf) for leaf in leaves]
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes]
        packed = np.zeros(sum(sizes), np.uint8)
        if self.leads:
            own = [np.asarray(array_of(leaf)).tobytes() for leaf in leaves]
            packed = np.frombuffer(b"".join(own), np.uint8)
        self.meet("spread")
        with self.together():
            everything = self._sum(packed)
        parts = np.split(everything, np.cumsum(sizes)[:-1])
        found = [
            like(np.frombuffer(part.tobytes(), dtype).reshape(shape), leaf)
            for part, (shape, dtype), leaf in zip(parts, shapes, leaves, strict=True)
        ]
        return structure.unflatten(found)

    def _sum(self, mine: np.ndarray) -> np.ndarray:
        """Returns the sum of a uint8 array [n] over the processes."""
        firsts: dict[int, Any] = {}
        for device in jax.devices():
            firsts.setdefault(device.process_index, device)
        mesh = Mesh(np.array(list(firsts.values())), ("process",))
        rows = NamedSharding(mesh, P("process"))
        every = jax.make_array_from_process_local_data(rows, mine[None], (len(firsts), *mine.shape))
        total = jax.jit(lambda x: jnp.sum(x, 0, np.uint8), out_shardings=NamedSharding(mesh, P()))
        return np.asarray(total(every))


def joined() -> Group:
    """Returns that of this process, which must have joined one."""
    assert Group.joined is not None, "devices of other processes come from a group"
    return Group.joined


def placed(value: Any, sharding: NamedSharding) -> Any:
    """Returns an array that every process of the sharding has, placed as that says."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    data = np.asarray(array_of(value))
    return like(jax.make_array_from_callback(data.shape, sharding, data.__getitem__), value)


def here(tree: Tree) -> Tree:
    """Returns what this process has of a tree: all of what each has, and its part of what is divided."""
    return jax.tree.map(_here, tree)


def _here(value: Any) -> Any:
    if not isinstance(value, jax.Array) or value.is_fully_addressable:
        return value
    if value.is_fully_replicated:
        return value.addressable_data(0)
    parts = sorted(value.addressable_shards, key=lambda part: _start(part.index))
    axis = next(i for i, rows in enumerate(parts[0].index) if rows != slice(None))
    return np.concatenate([np.asarray(part.data) for part in parts], axis)


def _start(index: tuple[slice, ...]) -> int:
    return max((rows.start or 0 for rows in index), default=0)


def whole(tree: Tree) -> Tree:
    """Returns all of a tree whose arrays are divided among processes, on this process. All call it."""
    divided = [leaf.sharding for leaf in jax.tree.leaves(tree) if not leaf.is_fully_addressable]
    if not divided:
        return tree
    gathered = jax.block_until_ready(_gather(divided[0].mesh)(tree))
    return jax.tree.map(lambda leaf: like(array_of(leaf).addressable_data(0), leaf), gathered)


@functools.cache
def _gather(mesh: Mesh) -> Callable[[Tree], Tree]:
    """Returns a function that gives all processes all of a tree; it is compiled once."""
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))
