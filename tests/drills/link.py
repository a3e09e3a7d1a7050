"""A link between two network namespaces in userspace: `python link.py NAME SEED PID PID`.

It makes a TAP device in the namespace of each process, and passes frames between them. Lines on its standard
input are conditions, as JSON. It prints "ready", and runs until its input ends.
"""

from __future__ import annotations

import dataclasses
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import subprocess
import sys
import time

_TUNSETIFF, _TAP, _NO_HEADER = 0x400454CA, 0x0002, 0x1000
_MOST_WAITING = 1000  # frames; a full queue drops, as a router does
_ETHERNET, _IPV4, _TCP = 14, 0x0800, 6


@dataclasses.dataclass(frozen=True)
class Conditions:
    """How a link is."""

    delay_s: float = 0.0
    jitter_s: float = 0.0  # more delay, by chance for each frame, which changes their order
    loss: float = 0.0  # a frame's probability to be lost
    duplicate: float = 0.0  # a frame's probability to arrive twice
    cut: bool = False  # every frame is lost
    keep: bool = False  # frames of connections that there were before wait until this ends


def connection_of(frame: bytes) -> tuple[bytes, ...] | None:
    """Returns what tells a frame's TCP connection from others, either way; None if it has none."""
    if len(frame) < 34 or int.from_bytes(frame[12:14]) != _IPV4 or frame[23] != _TCP:
        return None
    ports = _ETHERNET + 4 * (frame[14] & 15)
    ends = (frame[26:30] + frame[ports : ports + 2], frame[30:34] + frame[ports + 2 : ports + 4])
    return tuple(sorted(ends))


class Link:
    """The frames on their way."""

    def __init__(self, seed: int) -> None:
        self._chance, self._order = random.Random(seed), itertools.count()
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._known: set[tuple[bytes, ...]] = set()  # connections that there are
        self._old: set[tuple[bytes, ...]] = set()  # those whose frames are kept
        self._kept: list[tuple[int, bytes]] = []
        self._conditions = Conditions()

    def change(self, conditions: Conditions) -> None:
        """Sets new conditions; frames that were kept go on if they are not to be any more."""
        self._old = self._known.copy() if conditions.keep else set()
        if not conditions.keep:
            now_s = time.monotonic()
            for to, frame in self._kept:
                heapq.heappush(self._waiting, (now_s, next(self._order), to, frame))
            self._kept.clear()
        self._conditions = conditions

    def take(self, to: int, frame: bytes) -> None:
        """Takes a frame for the device `to`."""
        now, chance = self._conditions, self._chance
        if now.cut or chance.random() < now.loss or len(self._waiting) >= _MOST_WAITING:
            return
        connection = connection_of(frame)
        if connection is not None:
            if connection in self._old:
                self._kept.append((to, frame))
                return
            self._known.add(connection)
        for _ in range(1 + (chance.random() < now.duplicate)):
            at_s = time.monotonic() + now.delay_s + chance.uniform(0.0, now.jitter_s)
            heapq.heappush(self._waiting, (at_s, next(self._order), to, frame))

    def deliver(self) -> float | None:
        """Writes the frames that have arrived; returns the seconds until the next one, if there is one."""
        while self._waiting:
            until_s = self._waiting[0][0] - time.monotonic()
            if until_s > 0:
                return until_s
            _, _, to, frame = heapq.heappop(self._waiting)
            try:
                os.write(to, frame)
            except OSError:  # the device is down
                continue
        return None


def make_tap(name: str, pid: str) -> int:
    """Makes a TAP device in the network of a process, and returns its descriptor."""
    here = f"to{pid}"
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", here.encode(), _TAP | _NO_HEADER))
    subprocess.run(["ip", "link", "set", here, "netns", pid, "name", name], check=True)
    return tap


def main() -> None:
    """Passes frames on until the input ends."""
    name, seed, *pids = sys.argv[1:]
    one, other = (make_tap(name, pid) for pid in pids)
    link, there = Link(int(seed)), {one: other, other: one}
    print("ready", flush=True)
    while True:
        for ready in select.select([sys.stdin, one, other], [], [], link.deliver())[0]:
            if ready is sys.stdin:
                line = sys.stdin.readline()
                if not line:
                    return
                link.change(Conditions(**json.loads(line)))
                continue
            try:
                frame = os.read(ready, 1 << 16)
            except OSError:
                continue
            link.take(there[ready], frame)


if __name__ == "__main__":
    main()
