"""A flood of connections from nobody: `python _flood_client.py PORT CONNECTIONS`.

It keeps hundreds of connections at once. A third of them sends nothing, a third the beginning of a TLS
handshake, a third noise. It prints JSON when the last one was made, and lets the rest go.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import select
import socket
import ssl
import sys
import time

_MOST = 900  # at once
_LONGEST_S = 300.0


def hello() -> bytes:
    """Returns the first flight of a TLS handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    handshake = context.wrap_bio(incoming, outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        handshake.do_handshake()
    return outgoing.read()


def main() -> None:
    """Floods."""
    port, wanted = map(int, sys.argv[1:])
    first_words = (b"", hello(), os.urandom(300))
    epoll, begun, made, ended = select.epoll(), time.monotonic(), 0, 0
    connecting: dict[int, socket.socket] = {}
    standing: collections.OrderedDict[int, socket.socket] = collections.OrderedDict()
    while made < wanted and time.monotonic() < begun + _LONGEST_S:
        while len(connecting) + len(standing) >= _MOST and standing:
            standing.popitem(last=False)[1].close()
        while len(connecting) + len(standing) < _MOST:
            each = socket.socket()
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))
            connecting[each.fileno()] = each
            epoll.register(each, select.EPOLLOUT)
        for fd, _ in epoll.poll(0.1):
            if fd in connecting:
                each = connecting.pop(fd)
                made += 1
                try:
                    each.send(first_words[made % 3])
                except OSError:
                    ended += 1
                    each.close()
                    continue
                standing[fd] = each
                epoll.modify(fd, select.EPOLLIN | select.EPOLLRDHUP)
            elif fd in standing:
                ended += 1
                standing.pop(fd).close()
    seconds = time.monotonic() - begun
    print(json.dumps({"connections": made, "ended_by_learner": ended, "seconds": seconds}))


if __name__ == "__main__":
    main()
