"""A link between two network namespaces in userspace: `python link.py PID DELAY_S LOSS SEED`.

It makes a TAP device here and another one in the namespace of a process, and passes frames between them, late
by `DELAY_S` seconds and, with the probability `LOSS`, not at all. It prints "ready", and runs until killed.
"""

from __future__ import annotations

import collections
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time

_TUNSETIFF, _TAP, _NO_HEADER = 0x400454CA, 0x0002, 0x1000
_MOST_WAITING = 1000  # frames; a full queue drops, as a router does


def make_tap(name: str) -> int:
    """Makes a TAP device, and returns its descriptor."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", name.encode(), _TAP | _NO_HEADER))
    return tap


def main() -> None:
    """Passes frames on for ever."""
    pid, delay_s, loss, seed = sys.argv[1], *map(float, sys.argv[2:4]), int(sys.argv[4])
    here, there = make_tap("here"), make_tap("there")
    subprocess.run(["ip", "link", "set", "there", "netns", pid], check=True)
    print("ready", flush=True)
    chance, waiting = random.Random(seed), collections.deque()
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, tap, frame = waiting.popleft()
            try:
                os.write(tap, frame)
            except OSError:  # the device is down
                continue
        until = max(0.0, waiting[0][0] - now) if waiting else 1.0
        for tap in select.select([here, there], [], [], until)[0]:
            try:
                frame = os.read(tap, 1 << 16)
            except OSError:
                continue
            if len(waiting) < _MOST_WAITING and chance.random() >= loss:
                waiting.append((time.monotonic() + delay_s, there if tap == here else here, frame))


if __name__ == "__main__":
    main()
