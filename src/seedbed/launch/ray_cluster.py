"""`seedbed train --cluster ray`: this process trains, and Ray starts a host of its run on each other node.

Ray itself is in a process beside this one (`ray_hosts`), which reads where the run listens from its folder,
as every host does. Nodes need not see that folder.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seedbed.config import flags
from seedbed.config.configuration import TrainConfig
from seedbed.config.flags import TrainArguments
from seedbed.config.settle import Request
from seedbed.exit_status import TemporaryError
from seedbed.launch.cluster import Change, options_for, say
from seedbed.printable import printable
from seedbed.run.folder import CONFIG, RunFolder, default_path
from seedbed.streams.supervisor import start_module
from seedbed.types import SeedbedError

_MODULE = "seedbed.launch.ray_hosts"
# Seconds in which the process beside this one must have ended the hosts.
_END_S = 30.0


def train(
    given: TrainArguments, run: Callable[[Request, Change], tuple[int, dict[str, Any]]]
) -> int:
    """Trains with hosts that Ray starts; returns the exit status.

    `run` trains what a request asks for, with options changed, and returns the exit status and the summary.
    Call from the main thread. Raises SeedbedError if there is no Ray, no cluster of it, or no node.
    """
    if importlib.util.find_spec("ray") is None:
        raise SeedbedError("--cluster ray needs Ray: pip install 'seedbed[ray]'")
    request, rest = given.request, given.rest
    folder = request.run or default_path(request.what or "run")
    if RunFolder(folder).is_training():
        raise TemporaryError(
            f"another process trains into {printable(folder)}: wait for it, stop it, or name another folder"
        )
    resume = (folder / CONFIG).exists()
    with RayHosts(folder.absolute(), _count(given.cluster or "")) as hosts:

        def change(config: TrainConfig) -> TrainConfig:
            more = options_for(config.runtime.runtime, rest, hosts.count + 1)
            return flags.override(config, [*rest, *more], False)

        # A run that goes on keeps its runtime, which the command of its first start names.
        runtime = None if resume else request.runtime
        return run(request._replace(run=folder, resume=resume, runtime=runtime), change)[0]


def _count(cluster: str) -> int:
    """Returns how many hosts `ray:N` asks for, 0 for one on each other node; raises SeedbedError."""
    number = cluster.partition(":")[2]
    if cluster != "ray" and not (number.isdecimal() and int(number)):
        raise SeedbedError(f"--cluster {cluster}: take ray, or ray:N for N hosts")
    return int(number or 0)


class RayHosts:
    """The process with Ray, as a context manager; for the main thread."""

    def __init__(self, run: Path, count: int) -> None:
        """Joins the cluster, and decides which nodes get a host; raises SeedbedError."""
        self._process = start_module(
            _MODULE,
            (str(run), str(count)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # What the terminal sends is for this process, which ends that one.
            start_new_session=True,
        )
        first = self._read()
        if first is None or "hosts" not in first:
            self._process.kill()
            self._process.wait()
            why = "it has failed to start: see above" if first is None else first["error"]
            raise SeedbedError(f"Ray: {why}")
        self.count = int(first["hosts"])
        self._ending = False
        self._thread = threading.Thread(target=self._relay, daemon=True)
        self._thread.start()

    def _read(self) -> dict[str, Any] | None:
        """Returns what the process says next, None once it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def _relay(self) -> None:
        while (said := self._read()) is not None:
            say(f"Ray: {said.get('say') or said.get('error')}")
        if not self._ending:
            say(
                "Ray: it keeps this run's hosts no more; those that are there go on, and training with them"
            )

    def __enter__(self) -> RayHosts:
        return self

    def __exit__(self, *failure: object) -> None:
        """Has all hosts ended, and nothing of the run left in Ray."""
        self._ending = True
        process = self._process
        assert process.stdin is not None
        try:
            process.stdin.write(b"end\n")
            process.stdin.close()
            process.wait(_END_S)
        except (OSError, subprocess.TimeoutExpired):
            say("Ray: it has not ended the run's hosts; they end by themselves in two minutes")
        process.kill()
        process.wait()
        self._thread.join()
