"""A host that costs nothing: it sends recorded timesteps as fast as their answers come.

    python _stream_client.py KEY PORT RECORDING.npz STREAMS FIRST_STREAM TLS PACE_S

Each stream begins elsewhere in the recording, and sends PACE_S seconds after each answer. Runs until it is
killed.
"""

from __future__ import annotations

import collections
import json
import secrets
import select
import sys
import time
from pathlib import Path

import numpy as np

from seedbed.actors.link import Identity, Link, Stage
from seedbed.actors.lives import Act
from seedbed.actors.slots import slot_layout, spec_from_json, spec_to_json
from seedbed.actors.wire import Beat, Kind, StepCodec, beat_frame
from seedbed.streams.credentials import ActorKey


class Stream:
    """One stream, and its place in the recording."""

    def __init__(self, link: Link, at: int) -> None:
        self.link, self.at, self.sent_s = link, at, 0.0
        self.waits: list[float] = []


def main() -> None:
    """Connects, and serves until it is killed."""
    key, port, recording, streams, first, tls, pace = sys.argv[1:]
    with np.load(recording) as content:
        rows = {name: content[name] for name in content.files if name != "spec"}
        spec = spec_from_json(json.loads(str(content["spec"])))
    length, size = rows["reward"].shape
    leaves = [rows[name] for name in ("observation", "reward", "terminated", "truncated", "first")]
    codec, actor_key = StepCodec(slot_layout(spec, size)), ActorKey.read(Path(key))
    identity = Identity(
        key=actor_key,
        context=actor_key.context() if tls == "1" else None,
        instance=secrets.token_hex(16),
    )
    epoll, watched = select.epoll(), {}
    for number in range(int(streams)):
        link = Link(identity, number, lambda: [("127.0.0.1", int(port))])
        link.end.timestep(opening=True)
        stream = Stream(link, (int(first) + number) * 37 % length)
        link.connect()
        assert link.connection is not None
        watched[link.connection.fileno()] = stream
        epoll.register(link.connection.fileno(), link.connection.events)

    def send(stream: Stream) -> None:
        link = stream.link
        assert link.connection is not None
        stream.at = (stream.at + 1) % length
        stream.sent_s = time.perf_counter()
        link.connection.send(
            codec.step(link.end.life, link.end.step, [x[stream.at] for x in leaves])
        )

    due: collections.deque[tuple[float, Stream]] = collections.deque()
    next_beat_s, pace_s = time.monotonic() + 1, float(pace)
    while True:
        while due and due[0][0] <= time.monotonic():
            send(due.popleft()[1])
        until_s = min(due[0][0] if due else next_beat_s, next_beat_s) - time.monotonic()
        for fd, events in epoll.poll(max(0.0, until_s)):
            stream = watched[fd]
            link, connection = stream.link, stream.link.connection
            assert connection is not None
            if events & select.EPOLLOUT:
                connection.flush()
            for kind, body in connection.receive():
                if kind is Kind.ANSWER:
                    life, step, _ = codec.read_answer(body)
                    if link.end.answer(life, step) is Act.STEP:
                        stream.waits.append(time.perf_counter() - stream.sent_s)
                        link.end.timestep(opening=False)
                        if pace_s:
                            due.append((time.monotonic() + pace_s, stream))
                        else:
                            send(stream)
                elif (begin := link.take(kind, body)) is not None:
                    if link.end.begin(begin) is Act.SEND:
                        send(stream)
                elif link.stage is Stage.SPEC:
                    link.ready(codec, spec_to_json(spec), {})
            epoll.modify(fd, connection.events)
        if time.monotonic() > next_beat_s:
            next_beat_s += 1
            cpu_s = time.process_time() / len(watched)
            for stream in watched.values():
                waits, stream.waits = sorted(stream.waits), []
                connection = stream.link.connection
                if waits and connection is not None and connection.idle:
                    p50, p99 = waits[len(waits) // 2], waits[int(0.99 * len(waits))]
                    connection.send(beat_frame(Beat(0, cpu_s, p50, p99)))


if __name__ == "__main__":
    main()
