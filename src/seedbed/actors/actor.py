"""The actor process: it steps groups of environments for a learner on the same machine.

It imports no JAX. It is started with one end of a socket pair. It reads its job as JSON from stdin, sends
the spec of its environments, receives the shared memory and two doorbells (eventfds) for each group, and then
steps each group whose actions have arrived. If the learner dies, the socket hangs up and the actor exits.
"""

from __future__ import annotations

import argparse
import collections
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, Self

import numpy as np

from seedbed import strict_json, trees
from seedbed.actors.slots import UNTOLD, Slot, SlotLayout, slot_layout, spec_to_json
from seedbed.envs.factories import require_defined
from seedbed.envs.host import registry
from seedbed.envs.host.contract import HostEnv
from seedbed.envs.host.gym import FactoryEnv
from seedbed.envs.host.pickled import called
from seedbed.exit_status import ExitStatus
from seedbed.types import SeedbedError, Timestep, Tree

MESSAGE_BYTES = 1 << 17
"""The largest message in bytes. A message is sent whole or not at all."""
FDS = 250
"""The most descriptors that are sent in one message."""
CLOSING_S = 10.0
"""The seconds that environments have to close at the end of a run or an evaluation."""
_POLLRDHUP = getattr(select, "POLLRDHUP", 0x2000)


def main() -> None:
    """Serves the learner at the other end of the socket `--fd`, until it hangs up.

    An error is sent to the learner. Call from the main thread only: it sets signal handlers.
    """
    parser = argparse.ArgumentParser(description="An actor process; started by the learner.")
    parser.add_argument("--fd", type=int, required=True, help="an inherited Unix socket")
    fd = parser.parse_args().fd
    # A terminal sends these signals to the learner too, which then closes the socket.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A process that an environment starts must not keep the socket open.
    os.set_inheritable(fd, False)
    connection = socket.socket(fileno=fd)
    threading.Thread(target=_leave_with_learner, args=(fd,), daemon=True).start()
    job = strict_json.loads(sys.stdin.buffer.read())
    os.nice(job["niceness"])
    with _Groups(job) as groups:
        # An error is sent before the environments are closed, which may fail or hang.
        try:
            _serve(connection, groups)
        except ConnectionError:
            return
        except SeedbedError as error:
            where = f"{error} (actor {job['actor']}, group {groups.current})"
            _send_error(connection, where, error.__cause__)
        # A bug: report it, so that the learner does not start the actor again.
        except Exception as error:
            _send_error(connection, str(error) or type(error).__name__, error)


def _leave_with_learner(fd: int) -> None:
    """Ends the process some time after the learner has hung up, even if an environment is still busy.

    A learner that lives ends it a little sooner, and tells. It runs in a thread of its own.
    """
    poll = select.poll()
    poll.register(fd, _POLLRDHUP)
    poll.poll()
    time.sleep(CLOSING_S + 1)
    os._exit(ExitStatus.ALONE)


def _send_error(connection: socket.socket, text: str, cause: BaseException | None) -> None:
    if cause is not None:
        text += "\n" + "".join(traceback.format_exception(cause))[-8000:]
    try:
        _send(connection, {"error": text[-MESSAGE_BYTES // 4 :]})
    # The learner has gone.
    except OSError:
        return


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    data = strict_json.dumps(message).encode()
    if len(data) > MESSAGE_BYTES:
        raise SeedbedError(
            f"the environment's spec is too large to send: {len(data)} bytes of JSON"
        )
    connection.send(data)


def _serve(connection: socket.socket, groups: _Groups) -> None:
    groups.build()
    _send(connection, {"spec": spec_to_json(groups.hosts[0].spec)})
    memory_fd, *bells = receive_fds(connection, 1 + 2 * groups.count)
    groups.attach(memory_fd, bells)
    # The learner already answers the first group while the others are built.
    while len(groups.hosts) < groups.count:
        groups.build()
    groups.run(connection)


def receive_fds(connection: socket.socket, count: int) -> list[int]:
    """Receives `count` descriptors, in one message or several; raises ConnectionError after a hang-up."""
    fds: list[int] = []
    while len(fds) < count:
        message, more, _, _ = socket.recv_fds(connection, 16, FDS)
        if not message:
            raise ConnectionResetError("the learner has hung up")
        fds += more
    return fds


class _Groups:
    """The environments of this process and the slots that they publish to. Only the main thread uses it."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.hosts: list[HostEnv] = []
        # The group that is being worked on, for error messages.
        self.current = 0
        self.count = len(job["lives"])
        self._job = job
        self._slots: list[Slot] = []
        self._layout: SlotLayout | None = None
        self._arrived: list[int] = []  # doorbells of observations, by group
        self._answered: list[int] = []  # doorbells of actions, by group

    def build(self) -> None:
        """Makes the environments of the next group; publishes their first timestep if memory is attached.

        Raises SeedbedError if the spec differs from that of the first group.
        """
        job, index = self._job, len(self.hosts)
        self.current = index
        # A later life of a group gets no seed: the moment of a restart cannot be repeated anyway.
        seed = None
        if job["lives"][index] == 0:
            key = (job["actor"], index)
            seed = int(np.random.SeedSequence(job["seed"], spawn_key=key).generate_state(1)[0])
        env = registry.from_json(job["env"])
        if job["allow"] is not None and isinstance(env, FactoryEnv):
            require_defined(env.factory, job["allow"])
        host = env.make(job["num_envs"], seed)
        self.hosts.append(host)
        if self._layout is not None:
            if host.spec != self._layout.spec:
                raise SeedbedError(
                    f"environment {called(job['env'])!r} has a spec that changes: first "
                    f"{self._layout.spec}, then {host.spec}"
                )
            self._publish(index, host.reset())

    def attach(self, memory_fd: int, bells: list[int]) -> None:
        """Maps the shared memory and publishes the first timesteps of the groups that are built.

        `bells` are the descriptors of two doorbells for each group: of observations, and of actions.
        """
        layout = slot_layout(self.hosts[0].spec, self._job["num_envs"])
        memory = mmap.mmap(memory_fd, layout.size * self.count)
        self._slots = [Slot(layout, memory, i * layout.size) for i in range(self.count)]
        self._arrived, self._answered = bells[::2], bells[1::2]
        self._layout = layout
        for index, host in enumerate(self.hosts):
            self._publish(index, host.reset())

    def run(self, connection: socket.socket) -> None:
        """Steps groups in the order in which their actions arrive, until the learner hangs up."""
        groups = {fd: index for index, fd in enumerate(self._answered)}
        epoll = select.epoll()
        epoll.register(connection, select.EPOLLIN)
        # The doorbells are edge-triggered, so that their counters need not be read.
        for fd in self._answered:
            epoll.register(fd, select.EPOLLIN | select.EPOLLET)
        queue: collections.deque[int] = collections.deque()
        while True:
            for fd, _ in epoll.poll(0 if queue else -1):
                if fd not in groups:
                    return
                queue.append(groups[fd])
            index = self.current = queue.popleft()
            slot = self._slots[index]
            if slot.answered:
                self._publish(index, self.hosts[index].step(slot.action.copy()))
            elif (life := slot.life_due) is not None:
                slot.open(life)
                self._publish(index, self.hosts[index].reset())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, failure: object, trace: object) -> None:
        """Closes the environments of all groups; failures of that are only printed."""
        for host in self.hosts:
            try:
                host.close()
            except Exception as error:
                sys.stderr.write(f"{error}\n")

    def _publish(self, index: int, timestep: Timestep) -> None:
        slot, leaves = self._slots[index], trees.leaves(timestep)
        if not slot.fits(leaves):
            _refuse(leaves, slot.layout, f"{called(self._job['env'])!r}, step {slot.step}")
        # Not every kind of environment tells of success.
        slot.publish(leaves, getattr(self.hosts[index], "success", UNTOLD))
        os.eventfd_write(self._arrived[index], 1)


def _refuse(leaves: list[Any], layout: SlotLayout, name: str) -> None:
    """Raises SeedbedError, which says what is wrong with a timestep that does not fit a slot."""
    observation = _paths(layout.spec.observation, "observation")
    names = [*observation, "reward", "terminated", "truncated", "first"]
    if len(leaves) != len(names):
        raise SeedbedError(
            f"environment {name}: returned {len(leaves)} arrays, expected {len(names)}: "
            + ", ".join(names)
        )
    for path, leaf, expected in zip(names, leaves, layout.arrays, strict=False):
        got = (getattr(leaf, "shape", None), str(getattr(leaf, "dtype", type(leaf).__name__)))
        if got != (expected.shape, expected.dtype):
            raise SeedbedError(
                f"environment {name}: {path} is {got[1]} {got[0]}, "
                f"expected {expected.dtype} {expected.shape}"
            )
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            index = int(np.argwhere(~np.isfinite(leaf))[0][0])
            raise SeedbedError(
                f"environment {name}, index {index}: {path} is not finite: {leaf[index]}"
            )
    raise SeedbedError(f"environment {name}: returned something other than numpy arrays")


def _paths(tree: Tree, path: str) -> list[str]:
    if isinstance(tree, dict):
        return [name for key in sorted(tree) for name in _paths(tree[key], f"{path}[{key!r}]")]
    if isinstance(tree, tuple | list):
        return [name for i, child in enumerate(tree) for name in _paths(child, f"{path}[{i}]")]
    return [path]


if __name__ == "__main__":
    main()
