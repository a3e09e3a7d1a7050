"""Addresses as people write them: HOST or HOST:PORT, with an IPv6 address in brackets."""

from __future__ import annotations

import re
import socket
from typing import NamedTuple

from seedbed.types import SeedbedError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses that other machines cannot reach."""


def listening_address(text: str) -> tuple[str, int]:
    """Splits HOST:PORT of `--listen`; the host is "" for every address. Raises SeedbedError."""
    host, port = split_address(text)
    if port is None:
        raise SeedbedError(
            f"listen is {text!r}: give HOST:PORT, such as 0.0.0.0:4711, or :0 for any port"
        )
    return host, port


class Listening(NamedTuple):
    """The place where a process listens: an address, "" for all, and one of these ports, 0 for any."""

    host: str
    ports: range = range(1)


def listening_ports(text: str) -> Listening:
    """Splits HOST or HOST:FIRST-LAST of `--listen`, where each process has a port. Raises SeedbedError."""
    found = re.fullmatch(r"(.*):(\d+)-(\d+)", text)
    if found is None:
        host, port = split_address(text)
        if port is None:
            return Listening(host)
    else:
        host, first, last = split_address(found[1])[0], int(found[2]), int(found[3])
        if 0 < first <= last < 1 << 16:
            return Listening(host, range(first, last + 1))
    raise SeedbedError(
        f"listen is {text!r}: give an address, such as 0.0.0.0, or 0.0.0.0:47000-47099 for ports that a "
        "firewall leaves open; each process has a port of its own"
    )


def split_address(text: str) -> tuple[str, int | None]:
    """Splits HOST or HOST:PORT, where the host may be [an IPv6 address]; raises SeedbedError."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, ""
    host = host.removeprefix("[").removesuffix("]")
    if (colon and port and not (port.isdigit() and int(port) < 1 << 16)) or " " in text:
        raise SeedbedError(f"{text!r} is no address: give HOST:PORT, with a port from 0 to 65535")
    return host, int(port) if port else None


def joined_address(host: str, port: int) -> str:
    """Returns HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind_listener(host: str, port: int, former_port: int) -> socket.socket:
    """Returns a socket of TCP that is bound to a port, or if it is 0, to any: `former_port` if it is free.

    The host is "" for every address of this machine. Raises OSError.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address[0], port or former_port, *address[2:]))
    except OSError:
        if port:
            raise
        listener.bind(address)
    return listener
