"""`seedbed train --cluster ray`: this process trains, and Ray starts a host of its run on each other node.

Ray itself is in a process beside this one (`ray_hosts`), which reads where the run listens from its folder,
as every host does. Nodes need not see that folder, unless all are to train as one learner: then Ray starts
this command on each, as another rank (`together`), and ranks find one another in the folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seedbed.config import flags
from seedbed.config.configuration import TrainConfig
from seedbed.config.flags import TrainArguments
from seedbed.config.settle import Request
from seedbed.launch import as_one, cluster, together
from seedbed.launch.cluster import Change, say
from seedbed.launch.job import (
    SETTLED,
    folder_of,
    options_for,
    require_idle,
    settled,
    write_for_ranks,
)
from seedbed.launch.ranks import Rank
from seedbed.named import require_packages
from seedbed.run.folder import CONFIG, new_folder
from seedbed.run.member import Member
from seedbed.streams.beside import Beside
from seedbed.types import SeedbedError, UsageError

# Seconds in which a cluster must have let that process in.
_JOIN_S = 30.0
_MODULE = "seedbed.launch.ray_hosts"
# Seconds in which the process beside this one must have ended the hosts.
_END_S = 30.0
LOOK_S = 15.0
"""Seconds in which nodes must have said whether they see the run's folder, where they have to."""


class Ranks(NamedTuple):
    """The command that Ray starts on each other node where all train as one learner."""

    words: tuple[str, ...] = ()  # of the command; none: a host is started
    folder: str = ""  # in which the command was given
    settled: str = ""  # the file of `SETTLED`, which every node must see
    start: str = ""  # of the command, which the file tells


_HOSTS = Ranks()


def train(
    given: TrainArguments, run: Callable[[Request, Change], tuple[int, dict[str, Any]]]
) -> int:
    """Trains with hosts that Ray starts; returns the exit status.

    `run` trains what a request asks for, with options changed, and returns the exit status and the summary.
    Call from the main thread, after `obey_scheduler`. Raises SeedbedError if there is no Ray, no cluster of
    it, no node, or one that does not see the folder and has to.
    """
    if Member.of_environment(os.environ) is not None:
        return cluster.train(given._replace(cluster="ranks"), run)
    wanted = _count(given.cluster or "")
    require_packages("--cluster ray", "ray", "ray")
    request = given.request
    config = settled(request.run)
    if as_one.learners_of(config, flags.given(given.rest, "--learners")) != 1:
        return _learn_as_one(given, config, wanted)
    folder = request.run or new_folder(str(request.what or "run"))
    require_idle(folder)
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
        more = options_for(config, given.rest, hosts.count + 1)
        return flags.override(config, [*given.rest, *more], False)

    # A run that goes on keeps what it has been, which the command of its first start names.
    own = dict.fromkeys(("runtime", "start", "file")) if resume else {}
    return run(given.request._replace(run=folder, resume=resume, **own), change)[0]


def _learn_as_one(given: TrainArguments, config: dict[str, Any], wanted: int) -> int:
    """Trains as rank 0 of those that Ray starts, one on each node; returns the exit status."""
    asked = flags.given(given.rest, "--learners")
    rank = Rank(0, (wanted or 1) + 1, 1, 0.0, "", "")
    folder = folder_of(given.request.run, rank).absolute()
    interface = as_one.interface_of(rank, given.interface)
    with _settled_in(folder, config) as start:
        learners = ("--learners", asked) if asked else ()
        # Of what the command asks for, the others need to know no more than its configuration.
        words = ("--run", str(folder), "--cluster", "ranks", "--trusted-interface", interface[0])
        words = ("train", "--resume", *words, *learners, "--trust-run")
        ranks = Ranks(words, str(Path.cwd()), str(folder / SETTLED), start)
        with RayHosts(folder, wanted, ranks) as hosts:
            rank = rank._replace(of=hosts.count + 1)
            as_one.learn_as_one(config, rank, asked)
            # Ray says what it lacks while it does not place all.
            parts = as_one.parts_of(config)
            return cluster.supervise(rank, folder, interface, parts, settle_s=math.inf)


@contextlib.contextmanager
def _settled_in(run: Path, config: dict[str, Any]) -> Iterator[str]:
    """Writes a configuration where the other ranks find it; yields what tells this start from others.

    Raises TemporaryError if another process trains into the folder, or is about to.
    """
    path, start, made = run / SETTLED, secrets.token_hex(16), not run.exists()
    require_idle(run)
    with together.only(run, "ray") or contextlib.nullcontext():
        write_for_ranks(run, SETTLED, {"start": start, "config": config})
        try:
            yield start
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
                if made:  # nothing is left of a run that was refused
                    together.lock_of(run, "ray").unlink()
                    path.parent.rmdir()
                    run.rmdir()


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


def require_alike(
    nodes: Sequence[dict[str, Any]], me: str, bundles: Sequence[dict[str, float]]
) -> None:
    """Raises ValueError if this process, which learns as well, lacks the GPUs that others have, or has some.

    The arguments are those of `bundles_of`, and its result.
    """
    mine = any(each["NodeID"] == me and each["Resources"].get("GPU") for each in nodes)
    others = sum(
        each["Alive"] and each["NodeID"] != me and each["Resources"].get("CPU", 0) >= 1
        for each in nodes
    )
    if mine and len(bundles) > others:
        raise ValueError(
            f"{len(bundles)} ranks beside this one need as many other nodes, as they have GPUs of their own: "
            f"there are {others}"
        )
    if any(bool(each.get("GPU")) != mine for each in bundles):
        raise ValueError(
            "this node learns as well, and it or another one has no GPUs: give the command on a node that is "
            "as the others"
        )


def no_cluster(why: str) -> str:
    """Returns what a user is told where there is no cluster to join."""
    address = os.environ.get("RAY_ADDRESS")
    at = f" at RAY_ADDRESS={address}" if address else ""
    return (
        f"no cluster{at} ({why}): start one with ray start --head, or name another in RAY_ADDRESS"
    )


class RayHosts:
    """The process with Ray, as a context manager; for the main thread."""

    def __init__(self, run: Path, count: int, ranks: Ranks = _HOSTS) -> None:
        """Joins the cluster, and decides which nodes get a host, or a rank; raises SeedbedError."""
        lost = (
            "it keeps this run's hosts no more; those that are there go on, and training with them"
        )
        arguments = (str(run), str(count), json.dumps(ranks))
        self._beside = Beside(_MODULE, arguments, _tell, lost)
        # Ray itself tries for minutes, and then aborts.
        patience_s = _JOIN_S + LOOK_S * bool(ranks.words)
        said = self._beside.first(patience_s)
        if said is None:
            said = {"error": no_cluster(f"it has not answered within {patience_s:.0f} s")}
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
