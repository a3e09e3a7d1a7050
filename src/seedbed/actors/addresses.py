"""Addresses as people write them: HOST or HOST:PORT, with an IPv6 address in brackets."""

from __future__ import annotations

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


def split_address(text: str) -> tuple[str, int | None]:
    """Splits HOST or HOST:PORT, where the host may be [an IPv6 address]; raises SeedbedError."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, ""
    host = host.removeprefix("[").removesuffix("]")
    if (colon and port and not (port.isdigit() and int(port) < 1 << 16)) or " " in text:
        raise SeedbedError(f"{text!r} is no address: give HOST:PORT, with a port from 0 to 65535")
    return host, int(port) if port else None
