"""`seedbed train --cluster ray`: this process trains, and Ray starts a host of its run on each other node.

Ray itself is in a process beside this one (`ray_hosts`), which reads where the run listens from its folder,
as every host does. Nodes need not see that folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from seedbed.config import flags
from seedbed.config.configuration import TrainConfig
from seedbed.config.flags import TrainArguments
from seedbed.config.settle import Request
from seedbed.exit_status import TemporaryError
from seedbed.launch.cluster import Change, options_for, say
from seedbed.named import require_packages
from seedbed.printable import printable
from seedbed.run.folder import CONFIG, RunFolder, new_folder
from seedbed.streams.beside import Beside
from seedbed.types import SeedbedError, UsageError

# Seconds in which a cluster must have let that process in.
_JOIN_S = 30.0
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
    wanted = _count(given.cluster or "")
    require_packages("--cluster ray", "ray", "ray")
    request = given.request
    folder = request.run or new_folder(str(request.what or "run"))
    if RunFolder(folder).is_training():
        raise TemporaryError(
            f"another process trains into {printable(folder)}: wait for it, stop it, or name another folder"
        )
    try:
        with RayHosts(folder.absolute(), wanted) as hosts:
            return _train_with(hosts, given, folder, run)
    finally:
        # Nothing is left of a run that was refused.
        if request.run is None:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _train_with(
    hosts: RayHosts,
    given: TrainArguments,
    folder: Path,
    run: Callable[[Request, Change], tuple[int, dict[str, Any]]],
) -> int:
    """Trains into a folder with hosts that Ray has started; returns the exit status."""
    resume = (folder / CONFIG).exists()

    def change(config: TrainConfig) -> TrainConfig:
        learners = int(flags.given(given.rest, "--learners") or 1)
        if learners > 1 and config.runtime.runtime == "central":
            raise SeedbedError(
                "--learners: Ray's hosts have actors only; take --cluster ranks or slurm, or leave it out"
            )
        more = options_for(
            config.runtime.runtime, given.rest, hosts.count + 1, "leave out --cluster"
        )
        return flags.override(config, [*given.rest, *more], False)

    # A run that goes on keeps what it has been, which the command of its first start names.
    own = dict.fromkeys(("runtime", "start", "file")) if resume else {}
    return run(given.request._replace(run=folder, resume=resume, **own), change)[0]


def _count(cluster: str) -> int:
    """Returns how many hosts `ray:N` asks for, 0 for one on each other node; raises UsageError."""
    number = cluster.partition(":")[2]
    if cluster != "ray" and not (number.isdecimal() and int(number)):
        raise UsageError(f"--cluster {cluster}: take ray, or ray:N for N hosts")
    return int(number or 0)


def bundles_of(nodes: Sequence[dict[str, Any]], me: str, wanted: int) -> list[dict[str, float]]:
    """Returns what each host takes of a node of Ray's: all of it, but for a CPU where the coordinator is.

    `nodes` are as `ray.nodes` has them, `me` is the id of this process's, and `wanted` how many hosts there
    shall be, 0 for one on each other node. Raises ValueError if there is no node for any.
    """
    alive = [each for each in nodes if each["Alive"] and each["Resources"].get("CPU", 0) >= 1]
    others = [each for each in alive if each["NodeID"] != me] or alive
    chosen = alive if wanted > len(others) else others
    found: list[dict[str, float]] = []
    for each in chosen:
        has, shared = each["Resources"], each["NodeID"] == me
        gpus = {"GPU": float(has["GPU"])} if has.get("GPU") else {}
        found.append({"CPU": float(max(1, int(has["CPU"]) - shared))} | gpus)
    if not found and not wanted:
        raise ValueError("no node of the cluster has a CPU for us: add one, or name ray:N")
    found.sort(key=lambda bundle: -bundle["CPU"])
    # Nodes that an autoscaler adds are taken to be like the smallest that is there.
    missing = (wanted or len(found)) - len(found)
    found += [found[-1] if found else {"CPU": 1.0}] * missing
    return found[: wanted or len(found)]


def no_cluster(why: str) -> str:
    """Returns what a user is told where there is no cluster to join."""
    address = os.environ.get("RAY_ADDRESS")
    at = f" at RAY_ADDRESS={address}" if address else ""
    return (
        f"no cluster{at} ({why}): start one with ray start --head, or name another in RAY_ADDRESS"
    )


class RayHosts:
    """The process with Ray, as a context manager; for the main thread."""

    def __init__(self, run: Path, count: int) -> None:
        """Joins the cluster, and decides which nodes get a host; raises SeedbedError."""
        lost = (
            "it keeps this run's hosts no more; those that are there go on, and training with them"
        )
        self._beside = Beside(_MODULE, (str(run), str(count)), _tell, lost)
        # Ray itself tries for minutes, and then aborts.
        said = self._beside.first(_JOIN_S)
        if said is None:
            said = {"error": no_cluster(f"it has not answered within {_JOIN_S:.0f} s")}
        if "hosts" not in said:
            raise SeedbedError(f"Ray: {said.get('error', 'it has failed to start: see above')}")
        self.count = int(said["hosts"])

    def __enter__(self) -> RayHosts:
        return self

    def __exit__(self, *failure: object) -> None:
        """Has all hosts ended, and nothing of the run left in Ray."""
        if self._beside.end(_END_S) is None:
            _tell("it has not ended the run's hosts; they end by themselves in two minutes")


def _tell(text: str) -> None:
    say(f"Ray: {text}")
