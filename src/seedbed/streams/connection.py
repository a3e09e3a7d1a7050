"""A connection that carries frames, with TLS and without ever waiting."""

from __future__ import annotations

import collections
import enum
import os
import select
import socket
import ssl
import time
from collections.abc import Iterator

from seedbed.streams.credentials import NAME
from seedbed.streams.messages import (
    HEADER_BYTES,
    HELLO_BYTES,
    Header,
    ProtocolError,
    read_header,
    require_checksum,
)

# Frames that one call of `receive` takes, at most.
_MOST_FRAMES = 64
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Connection:
    """One end of a stream. It never waits: call `receive` and `flush` when its descriptor is ready.

    `limit` is the largest body that is taken; it begins small, and is raised as the other end proves itself.
    Memory is taken for a body only when its header has been checked. For one thread.
    """

    def __init__(
        self,
        stream: socket.socket,
        context: ssl.SSLContext | None,
        kinds: type[enum.IntEnum],
        *,
        server: bool,
    ) -> None:
        """Takes over a socket, which may still be connecting; `context` None means plaintext.

        `kinds` are the kinds of messages that it may carry besides those of the handshake.
        """
        stream.setblocking(False)
        if stream.family != socket.AF_UNIX:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._context, self._server = stream, context, server
        self._kinds = kinds
        self._connected = self._shaken = False
        self.limit = HELLO_BYTES
        self.heard_s = time.monotonic()  # when bytes arrived last
        self.received_bytes = self.sent_bytes = 0
        self._header: Header | None = None
        self._buffer = bytearray(HEADER_BYTES)
        self._filled = 0
        self._unsent: collections.deque[memoryview] = collections.deque()
        # A socket that connects is ready when it can be written.
        self._handshake_writes = not server or context is None

    def fileno(self) -> int:
        """Returns the descriptor, -1 when closed."""
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """The events of epoll to wait for: room to write only if something waits to be sent."""
        writes = self._unsent if self._shaken else self._handshake_writes
        return select.EPOLLIN | (select.EPOLLOUT if writes else 0)

    @property
    def idle(self) -> bool:
        """Whether everything was sent."""
        return not self._unsent

    @property
    def connected(self) -> bool:
        """Whether the other end's machine has answered."""
        return self._connected

    @property
    def encrypted(self) -> bool:
        """Whether the handshake of TLS is done; also True in plaintext."""
        return self._shaken

    def receive(self) -> Iterator[tuple[enum.IntEnum, memoryview]]:
        """Yields the messages that have arrived; a body is valid until the next one is asked for.

        Raises ConnectionError if the stream has ended, ProtocolError if the other end breaks the protocol.
        """
        if not self._shake_hands():
            return
        for _ in range(_MOST_FRAMES):
            message = self._next()
            if message is None:
                return
            yield message
            # What the socket has still makes it readable again; what TLS has taken out of it does not.
            if not self._decrypted():
                return
        raise ProtocolError(f"more than {_MOST_FRAMES} messages came at once")

    def _decrypted(self) -> int:
        """Returns how many bytes TLS has that nobody has read."""
        return self._socket.pending() if isinstance(self._socket, ssl.SSLSocket) else 0

    def _shake_hands(self) -> bool:
        """Goes on with connecting and the handshake of TLS; returns whether both are done."""
        if self._shaken:
            return True
        if not self._connected and not self._connect():
            return False
        if self._context is None:
            self._shaken = True
            self.flush()
            return True
        assert isinstance(self._socket, ssl.SSLSocket)
        try:
            self._socket.do_handshake()
        except ssl.SSLWantReadError:
            self._handshake_writes = False
            return False
        except (ssl.SSLWantWriteError, BlockingIOError):
            self._handshake_writes = True
            return False
        except ssl.SSLCertVerificationError as error:
            raise ProtocolError(
                "the learner has another certificate than the key, which is that of another run perhaps "
                f"({error.verify_message})"
            ) from None
        except (ssl.SSLError, OSError, ValueError) as error:
            raise ConnectionError(f"no TLS: {error}") from None
        self._shaken = True
        self.flush()
        return True

    def _connect(self) -> bool:
        """Returns whether the socket is connected, and then begins TLS; raises ConnectionError."""
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise ConnectionError(os.strerror(error))
        try:
            self._socket.getpeername()
        except OSError:
            return False
        self._connected = True
        if self._socket.family != socket.AF_UNIX:
            _keep_alive(self._socket)
        if self._context is not None:
            # Not before: wrapping asks the socket for data, which one that still connects refuses.
            try:
                self._socket = self._context.wrap_socket(
                    self._socket,
                    server_side=self._server,
                    server_hostname=None if self._server else NAME,
                    do_handshake_on_connect=False,
                )
            except (ssl.SSLError, OSError, ValueError) as failure:
                raise ConnectionError(f"no TLS: {failure}") from None
        return True

    def _next(self) -> tuple[enum.IntEnum, memoryview] | None:
        """Returns the next whole message, or None if it is not there yet."""
        if self._header is None:
            if not self._fill(HEADER_BYTES):
                return None
            self._header = read_header(self._buffer, self.limit, self._kinds)
            self._filled = 0
            if len(self._buffer) < self._header.length:
                self._buffer = bytearray(self._header.length)
        header = self._header
        if not self._fill(header.length):
            return None
        self._header, self._filled = None, 0
        body = memoryview(self._buffer)[: header.length]
        require_checksum(header, body)
        return header.kind, body

    def _fill(self, count: int) -> bool:
        """Reads until the buffer has `count` bytes; returns False if they are not there yet."""
        while self._filled < count:
            try:
                got = self._socket.recv_into(memoryview(self._buffer)[self._filled : count])
            except _NOT_NOW:
                return False
            except (ssl.SSLError, OSError, ValueError) as error:
                raise ConnectionError(str(error)) from None
            if not got:
                raise ConnectionError("the other end has hung up")
            self._filled += got
            self.received_bytes += got
            self.heard_s = time.monotonic()
        return True

    def send(self, frame: bytes) -> None:
        """Sends a frame, now as far as possible and the rest with `flush`; raises ConnectionError."""
        self._unsent.append(memoryview(frame))
        self.sent_bytes += len(frame)
        self.flush()

    def flush(self) -> None:
        """Sends what waits, as far as possible; raises ConnectionError if the stream has ended."""
        while self._shaken and self._unsent:
            first = self._unsent[0]
            try:
                sent = self._socket.send(first)
            except _NOT_NOW:
                return
            except (ssl.SSLError, OSError, ValueError) as error:
                raise ConnectionError(str(error)) from None
            if sent == len(first):
                self._unsent.popleft()
            else:
                self._unsent[0] = first[sent:]

    def close(self) -> None:
        """Ends the stream. A second call does nothing."""
        self._socket.close()


def _keep_alive(stream: socket.socket) -> None:
    """Lets the kernel end a stream whose other machine has not answered for about five seconds."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000)
