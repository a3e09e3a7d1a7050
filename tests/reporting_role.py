"""A role that does nothing but report; a program."""

from __future__ import annotations

from typing import Any

from seedbed.paramserver.role import Role, end_on_signals, parse, run_role
from seedbed.streams.addresses import Listening
from seedbed.streams.messages import Message
from seedbed.streams.server import Client


class Reporting:
    """Work of which there is none."""

    def greet(self, client: Client, said: dict[str, Any]) -> dict[str, Any]:
        return {}

    def take(self, client: Client, message: Message) -> None:
        raise AssertionError(message)

    def leave(self, client: Client) -> None: ...

    def tick(self, now_s: float) -> bool:
        return True

    def report(self) -> dict[str, Any]:
        return {"is": "here"}

    def close(self) -> None: ...


def main() -> None:
    given = parse("A role of a test")

    def make() -> tuple[Role, Reporting, Listening | None]:
        role = Role(given.run, f"replay-{given.number}", given.start)
        end_on_signals(role)
        return role, Reporting(), Listening("")

    run_role(make)


if __name__ == "__main__":
    main()
