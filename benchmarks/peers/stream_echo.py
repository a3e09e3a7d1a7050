"""Messages a second over TLS, answered one by one: our connections against gRPC's asyncio streams.

    python stream_echo.py grpc|seedbed KEY_FOLDER --bytes 7000 --streams 4 --seconds 3

Starts a server process and sends from this one: random bytes up, 280 bytes back. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from seedbed.actors.wire import Kind
from seedbed.streams.connection import Connection
from seedbed.streams.credentials import KEY, NAME, PRIVATE, ActorKey, learner_context
from seedbed.streams.messages import frame

ANSWER = bytes(280)
LIMIT = 1 << 24


def serve_seedbed(folder: Path) -> None:
    """Answers every frame, until it is killed."""
    context, epoll = learner_context(folder), select.epoll()
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    epoll.register(listener, select.EPOLLIN)
    connections: dict[int, Connection] = {}
    while True:
        for fd, events in epoll.poll():
            if fd == listener.fileno():
                connection = Connection(listener.accept()[0], context, Kind, server=True)
                connection.limit = LIMIT
                connections[connection.fileno()] = connection
                epoll.register(connection.fileno(), connection.events)
                continue
            connection = connections[fd]
            try:
                if events & select.EPOLLOUT:
                    connection.flush()
                for _ in connection.receive():
                    connection.send(frame(Kind.ANSWER, ANSWER))
                epoll.modify(fd, connection.events)
            except ConnectionError:
                epoll.unregister(fd)
                connections.pop(fd).close()


def send_seedbed(port: int, folder: Path, size: int, streams: int, seconds: float) -> list[float]:
    """Sends frames of `size` bytes over every stream as answers come; returns the latencies."""
    context, epoll, message = (
        ActorKey.read(folder / KEY).context(),
        select.epoll(),
        os.urandom(size),
    )
    sent, waits = {}, []
    connections = {}
    for _ in range(streams):
        connection = Connection(
            socket.create_connection(("127.0.0.1", port)), context, Kind, server=False
        )
        connection.limit = LIMIT
        connections[connection.fileno()] = connection
        sent[connection.fileno()] = time.perf_counter()
        connection.send(frame(Kind.STEP, message))
        epoll.register(connection.fileno(), connection.events)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for fd, events in epoll.poll(1.0):
            connection = connections[fd]
            if events & select.EPOLLOUT:
                connection.flush()
            for _ in connection.receive():
                now = time.perf_counter()
                waits.append(now - sent[fd])
                sent[fd] = now
                connection.send(frame(Kind.STEP, message))
            epoll.modify(fd, connection.events)
    return waits


def serve_grpc(folder: Path) -> None:
    """Answers every message, until it is killed."""
    import grpc

    async def answer(_: Any, context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            await context.write(ANSWER)

    async def serve() -> None:
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", LIMIT)])
        handler = grpc.stream_stream_rpc_method_handler(answer)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("Echo", {"Stream": handler}),)
        )
        pair = (folder / PRIVATE).read_bytes(), ActorKey.read(folder / KEY).certificate.encode()
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
        await server.start()
        print(port, flush=True)
        await server.wait_for_termination()

    asyncio.run(serve())


def send_grpc(port: int, folder: Path, size: int, streams: int, seconds: float) -> list[float]:
    """Sends messages of `size` bytes over every stream as answers come; returns the latencies."""
    import grpc

    message, waits = os.urandom(size), []
    until = time.perf_counter() + seconds

    async def stream(channel: Any) -> None:
        call = channel.stream_stream("/Echo/Stream")()
        while time.perf_counter() < until:
            begun = time.perf_counter()
            await call.write(message)
            await call.read()
            waits.append(time.perf_counter() - begun)

    async def send() -> None:
        certificate = ActorKey.read(folder / KEY).certificate.encode()
        credentials = grpc.ssl_channel_credentials(certificate)
        options = [("grpc.ssl_target_name_override", NAME)]
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
            await asyncio.gather(*(stream(channel) for _ in range(streams)))

    asyncio.run(send())
    return waits


def main() -> None:
    """Serves, or starts a server and measures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=("grpc", "seedbed"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bytes", type=int, default=7000)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--serve", action="store_true")
    args = parser.parse_args()
    if args.serve:
        (serve_grpc if args.side == "grpc" else serve_seedbed)(args.folder)
        return
    import psutil

    send = send_grpc if args.side == "grpc" else send_seedbed
    command = [sys.executable, __file__, args.side, str(args.folder), "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port, process = int(server.stdout.readline()), psutil.Process(server.pid)
        try:
            send(port, args.folder, args.bytes, args.streams, 0.5)
            theirs, ours = sum(process.cpu_times()[:2]), time.process_time()
            waits = send(port, args.folder, args.bytes, args.streams, args.seconds)
            theirs, ours = sum(process.cpu_times()[:2]) - theirs, time.process_time() - ours
        finally:
            server.kill()
    count = len(waits)
    print(
        json.dumps(
            {
                "messages_per_s": count / args.seconds,
                "server_us": 1e6 * theirs / count,
                "client_us": 1e6 * ours / count,
                "p50_ms": 1e3 * statistics.median(waits),
                "p99_ms": 1e3 * sorted(waits)[int(0.99 * count)],
            }
        )
    )


if __name__ == "__main__":
    main()
