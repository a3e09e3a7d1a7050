"""Addresses as people write them: HOST or HOST:PORT, with an IPv6 address in brackets."""

from __future__ import annotations

import re
import socket
from typing import NamedTuple

from seedbed.types import SeedbedError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses that other machines cannot reach."""
EVERY = ("", "::")
"""Hosts that stand for every address of this machine."""


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
    host = bare_host(host)
    if (colon and port and not (port.isdigit() and int(port) < 1 << 16)) or " " in text:
        raise SeedbedError(f"{text!r} is no address: give HOST:PORT, with a port from 0 to 65535")
    return host, int(port) if port else None


def bare_host(host: str) -> str:
    """Returns a host without the brackets of an IPv6 address; raises SeedbedError if they are missing."""
    bracketed = host.startswith("[") and host.endswith("]")
    if ":" in host and not bracketed:
        raise SeedbedError(
            f"{host!r} is no host: put an IPv6 address in brackets, as in [2001:db8::5]:4711"
        )
    return host[1:-1] if bracketed else host


def joined_address(host: str, port: int) -> str:
    """Returns HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind_listener(host: str, port: int, former_port: int) -> socket.socket:
    """Returns a socket of TCP that is bound to a port, or if it is 0, to any: `former_port` if it is free.

    The host is "" or "::" for every address of this machine, of IPv4 and, if it has that, of IPv6. Raises
    OSError.
    """
    both = host in EVERY and socket.has_dualstack_ipv6()
    family, kind, protocol, _, address = socket.getaddrinfo(
        "::" if both else host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if both:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        listener.bind((address[0], port or former_port, *address[2:]))
    except OSError:
        if port:
            raise
        listener.bind(address)
    return listener
