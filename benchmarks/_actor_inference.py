"""Acting in the actors, as IMPALA does; central_or_actor.py starts it. It is there to be compared with.

    python _actor_inference.py learner NETWORK FOLDER ENVS CADENCE
    python _actor_inference.py actor NETWORK FOLDER ENVS CADENCE PORT NUMBER

NETWORK are the agent's options in JSON, FOLDER has the credentials, and ENVS is the number of environments
of an actor. An actor holds the parameters. It acts on all its environments at once, and sends unrolls: single
frames, actions, rewards, log-probabilities of the actions (V-trace needs no more of the logits), and the
memory before row 0. The learner makes the updates of the central runtime, with the central runtime's code.

With CADENCE `update` it sends the parameters to each actor after each update. With `unroll` it sends them
when an actor asks, which an actor does at the start of each unroll, as in Espeholt et al. (2018); the actor
goes on with the old ones until they come. The learner's queue is that of the central runtime. An actor goes
on while one unroll of its own has no room there; sockets alone would let it run far ahead. Messages are
framed, checked, compressed and encrypted by the code of the streams (actors/wire.py, streams/connection.py).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from _reports import answer_questions, carried
from seedbed.actors.slots import SlotLayout
from seedbed.actors.wire import Kind, StepCodec
from seedbed.central.inference import Inference, act_output
from seedbed.central.learning import Learner, LearnerLoop
from seedbed.central.unrolls import UnrollQueue, UnrollSink
from seedbed.central.updater import LocalUpdater
from seedbed.config import resolve
from seedbed.envs.host.atari import AtariEnv
from seedbed.run.measures import Stopwatch
from seedbed.run.memory import set_up_malloc
from seedbed.run.options import GROUPS
from seedbed.run.programs import keep_programs
from seedbed.run.stacking import FrameTrajectory, stacked_spec
from seedbed.streams.connection import Connection
from seedbed.streams.credentials import KEY, ActorKey, learner_context
from seedbed.streams.messages import frame
from seedbed.types import Agent, ArraySpec, Discrete, EnvSpec, Tree, bind, on_policy

PRESET = "pong"
STEPS = 1_000_000_000  # of the run; as many as the other side is told
ASK = Kind.ANEW  # the message of an actor that wants the newest parameters
TAKEN = Kind.ANSWER  # the learner's: an unroll is in the queue
AHEAD = 1  # unrolls of an actor that may wait for room in the queue while it goes on


class Setting:
    """What learner and actors agree about."""

    def __init__(self, network: str, envs: str) -> None:
        """Reads the arguments of the command line, and asks an environment for its spec."""
        config = resolve.train_config(PRESET)
        assert isinstance(config.env, AtariEnv)
        self.env, self.envs = config.env, int(envs)
        options = {
            n: tuple(v) if isinstance(v, list) else v for n, v in json.loads(network).items()
        }
        host = self.env.make(1, 0)
        self.spec = host.spec
        host.close()
        agent = dataclasses.replace(config.agent, **options)  # type: ignore[type-var]
        self.agent: Agent = bind(agent, stacked_spec(self.spec, self.env.frame_stack))
        experience = on_policy(self.agent)
        assert experience is not None
        self.experience, self.size = experience, self.envs // GROUPS

    def sink(self, queue: Any, groups: int) -> UnrollSink:
        """Makes what cuts steps into unrolls."""
        stack = self.env.frame_stack
        output = act_output(self.agent, self.spec, stack, self.size)
        return UnrollSink(queue, self.experience, self.spec, stack, output, groups)


def codec_of(tree: Tree) -> StepCodec:
    """Makes a codec for trees of arrays like this one: the codec of streams, with other arrays."""
    arrays = [ArraySpec(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(tree)]
    unused = ArraySpec((), "int32")  # the action of a slot
    layout = SlotLayout(EnvSpec((), Discrete(1)), 1, (*arrays, unused), (), success_at=0, size=0)
    return StepCodec(layout)


def unpacked(codec: StepCodec, body: memoryview, like: Tree) -> tuple[int, Tree]:
    """Reads a message of arrays; returns its number, and a copy in the structure of `like`."""
    _, number, arrays = codec.read_step(body)
    leaves = [np.array(leaf) for leaf in codec.leaves(arrays)]
    return number, jax.tree.unflatten(jax.tree.structure(like), leaves)


class BellQueue(UnrollQueue):
    """The queue of the central runtime, which rings when it has room."""

    bell = -1  # the descriptor of an eventfd

    def take(self, timeout_s: float) -> list[FrameTrajectory]:
        taken = super().take(timeout_s)
        os.eventfd_write(self.bell, 1)
        return taken

    @property
    def full(self) -> bool:
        """Whether `put` would wait. Only for the thread that puts."""
        return len(self._items) >= self._capacity


class Link:
    """An actor at the learner: its stream, and the parameters that it has."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.version, self.asks = connection, -1, False


class Station:
    """The learner's end of all streams: a thread that takes unrolls and sends parameters."""

    def __init__(self, setting: Setting, folder: Path, cadence: str, queue: BellQueue) -> None:
        self._queue, self._eager = queue, cadence == "update"
        self._context = learner_context(folder)
        self._unroll = setting.sink(queue, 1)._open[0].unroll
        self._codec = codec_of(self._unroll)
        self._params: StepCodec | None = None
        self._newest, self._frame = -1, b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._bell = queue.bell = os.eventfd(0)
        self._epoll = select.epoll()
        self._waiting: collections.deque[tuple[Link, FrameTrajectory]] = collections.deque()
        for descriptor in (self._listener.fileno(), self._bell):
            self._epoll.register(descriptor, select.EPOLLIN)
        self._links: dict[int, Link] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.shipped, self._packing_s = 0, 0.0

    def start(self) -> None:
        self._thread.start()

    def cpu_seconds(self) -> float:
        """Returns the CPU seconds of the thread, and of packing parameters. Any thread may call this."""
        clock = time.pthread_getcpuclockid(self._thread.ident or 0)
        return time.clock_gettime(clock) + self._packing_s

    def publish(self, params: Tree, version: int) -> None:
        """Takes the parameters of a finished update, as `Inference.publish` does."""
        begun = time.thread_time()
        params = jax.tree.map(np.asarray, params)
        if self._params is None:
            self._params = codec_of(params)
        packed = self._params.step(1, version + 1, jax.tree.leaves(params))
        self._newest, self._frame = version, packed
        os.eventfd_write(self._bell, 1)
        self._packing_s += time.thread_time() - begun

    def _run(self) -> None:
        # An actor that has gone ends the thread: the parent ends the turn.
        with contextlib.suppress(ConnectionError):
            while True:
                self._turn()

    def _turn(self) -> None:
        for descriptor, events in self._epoll.poll():
            if descriptor == self._bell:
                os.eventfd_read(self._bell)
            elif descriptor in self._links:
                self._serve(self._links[descriptor], events)
            else:
                stream, _ = self._listener.accept()
                connection = Connection(stream, self._context, Kind, server=True)
                connection.limit = self._codec.limit
                self._links[connection.fileno()] = Link(connection)
                self._epoll.register(connection.fileno(), connection.events)
        while self._waiting and not self._queue.full:
            link, unroll = self._waiting.popleft()
            self._queue.put(unroll)
            link.connection.send(frame(TAKEN))
        for descriptor, link in self._links.items():
            self._ship(link)
            self._epoll.modify(descriptor, link.connection.events)

    def _serve(self, link: Link, events: int) -> None:
        if events & select.EPOLLOUT:
            link.connection.flush()
        for kind, body in link.connection.receive():
            if kind is ASK:
                link.asks = True
                continue
            _, unroll = unpacked(self._codec, body, self._unroll)
            self._waiting.append((link, unroll))

    def _ship(self, link: Link) -> None:
        """Sends the newest parameters if they are due, and those before have been sent."""
        connection, version = link.connection, self._newest
        due = self._eager or link.asks or link.version < 0
        if due and link.version < version and connection.encrypted and connection.idle:
            link.version, link.asks = version, False
            connection.send(self._frame)
            self.shipped += 1


def learn(network: str, folder: str, envs: str, cadence: str) -> None:
    """Learns from what actors send until the parent goes; prints the port."""
    setting = Setting(network, envs)
    agent, batch = setting.agent, setting.experience.batch // setting.size
    queue = BellQueue(2 * batch, batch, STEPS, env_steps=0, steps=STEPS)
    station = Station(setting, Path(folder), cadence, queue)
    init_key, learn_key = jax.random.split(jax.random.key(0))
    devices = jax.devices()[:1]
    updater = LocalUpdater(agent, agent.init(init_key), devices)
    learner = Learner(agent, setting.env.frame_stack, devices, learn_key, updater)
    loop = LearnerLoop(learner, [station], queue)  # type: ignore[list-item]
    station.start()
    print(station.port, flush=True)
    answer_questions(
        lambda: {
            "learned": queue.env_steps,
            "updates": loop.updates,
            "shipped": station.shipped,
            "cpu_s": time.process_time(),
            "wire_s": station.cpu_seconds(),
            "waiting_s": loop.waiting.read(),
            "lag": loop.metrics.get("lag_mean", 0.0),
        }
    )
    loop.run(threading.Event())


class Uplink:
    """An actor's stream, as the queue that its unrolls go to, and the place that parameters come from."""

    def __init__(self, setting: Setting, folder: Path, port: int, cadence: str) -> None:
        context = ActorKey.read(folder / KEY).context()
        stream = socket.create_connection(("127.0.0.1", port))
        self.connection = Connection(stream, context, Kind, server=False)
        self._asks = cadence == "unroll"
        self._like = jax.eval_shape(setting.agent.init, jax.random.key(0)).params
        self._params, self._codec = codec_of(self._like), None
        self.connection.limit = self._params.limit
        self.ended, self.waited = False, Stopwatch()
        self._sent = self._taken = 0

    def put(self, unroll: FrameTrajectory) -> bool:
        """Sends an unroll, and asks for parameters if they do not come by themselves. Does not wait."""
        if self._codec is None:
            self._codec = codec_of(unroll)
        self._sent += 1
        self.connection.send(self._codec.step(1, self._sent, jax.tree.leaves(unroll)))
        if self._asks:
            self.connection.send(frame(ASK))
        return True

    @property
    def busy(self) -> bool:
        """Whether the actor has to wait for the learner."""
        return not self.connection.idle or self._sent - self._taken > AHEAD

    def receive(self, inference: Inference, wait: bool) -> bool:
        """Takes what has come, after waiting for something if `wait`; returns whether parameters came."""
        poll, newest = select.poll(), None
        poll.register(self.connection.fileno(), self.connection.events)
        poll.poll(None if wait else 0)
        self.connection.flush()
        for kind, body in self.connection.receive():
            if kind is TAKEN:
                self._taken += 1
            else:
                newest = unpacked(self._params, body, self._like)
        if newest is not None:
            version, params = newest
            inference.publish(params, version - 1)
        return newest is not None


class Spent:
    """CPU seconds of this process by what they were for."""

    def __init__(self) -> None:
        self.seconds = {"environment": 0.0, "inference": 0.0, "wire": 0.0}
        self._at = time.process_time()

    def on(self, name: str) -> None:
        """Counts the CPU time since the last call as spent on `name`."""
        now = time.process_time()
        self.seconds[name] += now - self._at
        self._at = now


class Actor:
    """Environments and the parameters that act on them. For the main thread, but for `report`."""

    def __init__(self, setting: Setting, number: int, uplink: Uplink) -> None:
        self._setting, self._uplink, self.spent = setting, uplink, Spent()
        self._host = setting.env.make(setting.envs, seed=1000 + number)
        envs = number * setting.envs + np.arange(setting.envs).reshape(GROUPS, setting.size)
        self._inference = Inference(
            setting.agent,
            setting.spec,
            setting.env.frame_stack,
            jax.devices()[0],
            envs,
            2 * setting.envs,
            jax.random.key(number + 1),
        )
        self._sink = setting.sink(uplink, GROUPS)
        self._waits: list[float] = []
        self._steps = 0

    def run(self) -> None:
        """Acts for ever."""
        uplink, inference = self._uplink, self._inference
        while not uplink.receive(inference, wait=True):
            pass
        inference.compile(self._setting.spec)
        timestep = self._host.reset()
        self.spent = spent = Spent()
        while True:
            spent.on("environment")
            action = self._act(timestep)
            spent.on("inference")
            self._sink.flush()
            uplink.receive(inference, wait=False)
            uplink.waited.start()
            while uplink.busy:
                uplink.receive(inference, wait=True)
            uplink.waited.stop()
            spent.on("wire")
            timestep = self._host.step(action)
            self._steps += self._setting.envs

    def _act(self, timestep: Tree) -> np.ndarray:
        """Chooses the actions `[B]` of a timestep `[B, ...]`, and keeps the step."""
        complete_s = time.monotonic()
        shape = (GROUPS, self._setting.size)
        rows = jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), timestep)
        for group in range(GROUPS):
            row = jax.tree.map(lambda leaf, at=group: leaf[at], rows)
            self._sink.arrive(group, 0, row)
        output = self._inference.act(rows, list(range(GROUPS)))
        action = np.array(output.action).reshape(-1)
        self._waits.append(time.monotonic() - complete_s)
        self._sink.add(range(GROUPS), [0] * GROUPS, rows, output)
        return action

    def report(self) -> dict[str, Any]:
        """Returns counts since the start, and the waits since the last report. Any thread may call this."""
        waits, self._waits = self._waits, []
        sent, received = carried(self._uplink.connection.fileno())
        return {
            "steps": self._steps,
            "sent_bytes": sent,
            "received_bytes": received,
            **{f"{name}_s": seconds for name, seconds in self.spent.seconds.items()},
            "blocked_s": self._uplink.waited.read(),
            "waits": waits,
        }


def one_thread() -> None:
    """Makes JAX start with one thread, as on a machine of one core; it may run on any core afterwards."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    jax.devices()
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def play(network: str, folder: str, envs: str, cadence: str, port: str, number: str) -> None:
    """Acts and sends until the parent goes."""
    one_thread()
    setting = Setting(network, envs)
    actor = Actor(setting, int(number), Uplink(setting, Path(folder), int(port), cadence))
    answer_questions(actor.report)
    actor.run()


def main(role: str, arguments: Sequence[str]) -> None:
    """Sets up JAX as the central runtime does, and plays the role."""
    set_up_malloc()
    keep_programs()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    {"learner": learn, "actor": play}[role](*arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
