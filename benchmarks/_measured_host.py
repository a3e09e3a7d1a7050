"""`seedbed actor` with a clock in it: central_or_actor.py starts it for central inference.

    python _measured_host.py RUN PROCESSES

It is the supervisor of `seedbed actor` itself, which also notes how long each timestep waited for its action.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from _reports import answer_questions, carried
from seedbed.actors.host import Host, HostOptions
from seedbed.streams.credentials import ADDRESS, FOLDER, KEY, ActorKey


class MeasuredHost(Host):
    """A host that knows how long its environments have waited for their actions."""

    waits: list[float]  # seconds, since the last report

    def _answer(self, group: Any, body: memoryview) -> None:
        """Passes on actions; a wait lasts from when an actor process published until its doorbell rings."""
        before, pool = group.steps, self._pool
        assert pool is not None
        published_ns = pool.slots[group.link.number].published_ns
        super()._answer(group, body)
        if group.steps > before:
            self.waits.append(1e-9 * (time.monotonic_ns() - published_ns))

    def report(self) -> dict[str, Any]:
        """Returns counts since the start, and the waits since the last report."""
        waits, self.waits = self.waits, []
        connections = [group.link.connection for group in self._groups]
        pairs = [carried(each.fileno()) for each in connections if each is not None]
        pool = self._pool
        return {
            "steps": 0 if pool is None else pool.group_size * sum(g.steps for g in self._groups),
            "sent_bytes": sum(sent for sent, _ in pairs),
            "received_bytes": sum(received for _, received in pairs),
            "playing": sum(group.steps > 0 for group in self._groups),
            "streams": len(pairs),
            "wire_s": time.process_time(),
            "environment_s": 0.0 if pool is None else pool.cpu_seconds(),
            "waits": waits,
        }


def main() -> None:
    """Serves the run until the parent goes."""
    listening = Path(sys.argv[1]) / FOLDER
    (address,) = json.loads((listening / ADDRESS).read_text())["addresses"]
    where, _, port = address.rpartition(":")
    host = MeasuredHost(
        ActorKey.read(listening / KEY),
        lambda: [(where, int(port))],
        HostOptions(processes=int(sys.argv[2])),
        False,
        lambda text: print(text, file=sys.stderr, flush=True),
    )
    host.waits = []
    answer_questions(host.report)
    host.run(lambda: False)
    os._exit(0)


if __name__ == "__main__":
    main()
