"""What processes of a benchmark tell when they are asked, and what a socket has carried."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from _training import CommandError

# Of Linux' struct tcp_info: the bytes that the other end has acknowledged, and those that it has sent.
_BYTES = struct.Struct("<QQ")
_AT, _INFO_BYTES = 120, 256


def answer_questions(report: Callable[[], dict[str, Any]]) -> None:
    """Starts a thread that prints a report, as JSON, for each line of stdin, and ends the process with it."""

    def serve() -> None:
        for _ in sys.stdin:
            print(json.dumps(report()), flush=True)
        os._exit(0)

    threading.Thread(target=serve, daemon=True).start()


def next_line(process: subprocess.Popen[str]) -> str:
    """Waits for the next line that a process prints; raises CommandError if it has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise CommandError(f"{process.args} ended with {process.wait()}: see what it said above")
    return line


def ask(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Asks a process that runs `answer_questions`, and waits for what it tells."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(next_line(process))


def carried(descriptor: int) -> tuple[int, int]:
    """Returns the bytes that a TCP socket has sent and received: TLS is in them, headers of IP are not."""
    with socket.socket(fileno=os.dup(descriptor)) as stream:
        info = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    return _BYTES.unpack_from(info, _AT)
