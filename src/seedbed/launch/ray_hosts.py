"""The process with Ray beside a run's coordinator, and the actors that it places: a program.

A directory actor knows where the run's coordinator is, as long as the coordinator's side tells it. One actor
a node is the parent of a host, or of a rank where all learn as one, which it starts again; Ray starts the
actor again, elsewhere if the node is gone. All are detached: a coordinator that is killed and started again
finds them. Once nobody has told the directory anything for two minutes, it removes them all, and itself. Ray
carries nothing but that.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from seedbed.files import load_json, write_json
from seedbed.launch.ranks import PARENT
from seedbed.launch.ray_cluster import LOOK_S, Ranks, bundles_of, no_cluster, require_alike
from seedbed.machine import CORES
from seedbed.printable import printable
from seedbed.streams.beside import Parent
from seedbed.streams.credentials import ADDRESS, FOLDER, KEY, put_key
from seedbed.streams.supervisor import exit_text, last_line, start_module
from seedbed.types import SeedbedError

# An extra: this module is imported only where it is installed.
ray: Any = importlib.import_module("ray")
_strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
_NAMESPACE = "seedbed"
_TELL_S = 2.0
_ALONE_S = 120.0
# Seconds between two starts of a host: at first, and the most, after some that ended early.
_FIRST_RETRY_S, _LONGEST_RETRY_S, _EARLY_S = 1.0, 30.0, 30.0
# Seconds after which it is told again that Ray has not placed all hosts.
_PATIENCE_S = 15.0
# Seconds in which a folder that another machine has written is seen: NFS remembers what was not there.
_SEEN_S = 4.0
# Seconds in which a host must have ended.
_END_S = 8.0
_TAIL_BYTES = 4096


class Told(NamedTuple):
    """A run, as the directory knows it."""

    key: str = ""  # the content of its key file
    address: str = ""  # the content of the file that says where its coordinator is
    ranks: Ranks = Ranks()  # what is started in place of hosts


class Directory:
    """An actor that says where a run's coordinator is."""

    def __init__(self, name: str, hosts: int) -> None:
        self._name, self._hosts = name, hosts
        self._told, self._told_s = Told(), time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def tell(self, told: Told) -> None:
        """Takes what hosts need."""
        self._told, self._told_s = told, time.monotonic()

    def told(self) -> Told:
        """Returns what was told last."""
        return self._told

    def hosts(self) -> int:
        """Returns how many hosts the run has."""
        return self._hosts

    def _watch(self) -> None:
        while time.monotonic() < self._told_s + _ALONE_S:
            time.sleep(_TELL_S)
        me = ray.get_runtime_context().current_actor
        remove(self._name, self._hosts)
        ray.kill(me, no_restart=True)


class HostParent:
    """An actor that keeps one host of a run on its node."""

    def __init__(self, name: str, number: int, cores: int, of: int) -> None:
        """Begins to keep the host of this number; with that of the coordinator there are `of` processes."""
        self._name, self._number, self._cores, self._of = name, number, cores, of
        self._status: dict[str, Any] = {"node": os.uname().nodename, "last": ""}
        self._ending = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._prefix = f"{name}-{number}-"
        self._folder: Path | None = None
        # The kernel ends the host with the thread that has started it, so this one stays.
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """Returns the machine, and how its last host ended."""
        return self._status

    def end(self) -> None:
        """Ends the host, and leaves nothing of it."""
        self._ending.set()
        if (child := self._child) is not None:
            child.terminate()
            try:
                child.wait(_END_S)
            except subprocess.TimeoutExpired:
                child.kill()
        self._thread.join(_END_S)
        self._clear()

    def _clear(self) -> None:
        """Removes the folder of the last host, and those of parents on this node that were killed."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        for path in Path(tempfile.gettempdir()).glob(f"{self._prefix}*"):
            pid = path.name.removeprefix(self._prefix).partition("-")[0]
            dead = pid.isdecimal() and not psutil.pid_exists(int(pid))
            # Others may make what they like in a folder for all users.
            if dead and not path.is_symlink() and path.lstat().st_uid == os.geteuid():
                shutil.rmtree(path, ignore_errors=True)

    def _keep(self) -> None:
        retry_s = _FIRST_RETRY_S
        while not self._ending.is_set():
            begun_s = time.monotonic()
            try:
                self._clear()
                self._folder = Path(tempfile.mkdtemp(prefix=f"{self._prefix}{os.getpid()}-"))
                if (ranks := self._fetch(self._folder)) is None:
                    self._ending.wait(_TELL_S)
                    continue
                self._run(self._folder, ranks)
            except OSError as error:
                # Of a disk that is full, for instance: this thread is all that starts a host here.
                self._status["last"] = f"could not be started ({error.strerror or error})"
            early = time.monotonic() < begun_s + _EARLY_S
            retry_s = min(2 * retry_s, _LONGEST_RETRY_S) if early else _FIRST_RETRY_S
            self._ending.wait(retry_s)

    def _fetch(self, folder: Path) -> Ranks | None:
        """Writes what the directory knows into the host's folder; returns what to start, None if unknown."""
        try:
            directory = ray.get_actor(self._name, _NAMESPACE)
            told: Told = ray.get(directory.told.remote(), timeout=10)
            if told.key:
                put_key(folder, told.key)
                write_json(folder / FOLDER / ADDRESS, json.loads(told.address))
            return told.ranks if told.key or told.ranks.words else None
        except (ray.exceptions.RayError, ValueError, OSError, SeedbedError):
            return None

    def _run(self, folder: Path, ranks: Ranks) -> None:
        """Starts a host, and tells it where the coordinator is until it ends; or a rank."""
        with (folder / "log.txt").open("w+b") as log:
            # Ray gives every worker so many threads as it has CPUs, which is none of a host's concern.
            settings: dict[str, str | None] = {"OMP_NUM_THREADS": None}
            # Who may begin actors may run any code here already.
            words = ("host", str(folder), "--cores", str(self._cores), "--trust-run")
            words = ranks.words or (*words, "--parent", str(os.getpid()))
            if ranks.words:
                if not _sees(ranks.settled, ranks.start):
                    raise FileNotFoundError(errno.ENOENT, f"it does not see {_folder_of(ranks)}")
                # Modules of the user's own are found from there.
                with contextlib.suppress(OSError):
                    os.chdir(ranks.folder)
                number, of = str(self._number + 1), str(self._of)
                settings |= {"RANK": number, "WORLD_SIZE": of, "LOCAL_WORLD_SIZE": "1"}
                settings |= {CORES: str(self._cores), PARENT: str(os.getpid())}
            child = self._child = start_module("seedbed", words, settings, stdout=log, stderr=log)
            while child.poll() is None:
                now = self._fetch(folder)
                if now is not None and (now.words, now.folder) != (ranks.words, ranks.folder):
                    child.terminate()  # the command was started again with other options
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_TELL_S)
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            words = log.read().decode(errors="replace")
            self._status["last"] = f"{exit_text(child.returncode)} ({last_line(words)})"


def remove(name: str, hosts: int) -> None:
    """Removes the hosts of a run, and what was reserved for them."""
    found: list[Any] = []
    for number in range(hosts):
        with contextlib.suppress(ValueError):
            found.append(ray.get_actor(f"{name}/host-{number}", _NAMESPACE))
    # Those that Ray has not placed do not answer, and have left nothing.
    ray.wait([each.end.remote() for each in found], num_returns=len(found), timeout=3 * _END_S)
    for each in found:
        ray.kill(each, no_restart=True)
    with contextlib.suppress(ValueError):
        ray.util.remove_placement_group(ray.util.get_placement_group(name))


class _Cluster:
    """Ray, as the coordinator's side uses it. For one thread."""

    def __init__(self, wanted: int, ranks: Ranks) -> None:
        """Joins the cluster; decides which nodes have hosts. Raises ConnectionError or ValueError."""
        ray.init(
            address=os.environ.get("RAY_ADDRESS") or "auto",
            namespace=_NAMESPACE,
            log_to_driver=False,
            logging_level="ERROR",
        )
        self.me = me = ray.get_runtime_context().get_node_id()
        self.bundles = bundles_of(ray.nodes(), me, wanted)
        if ranks.words:
            _require_folder(ranks)
            require_alike(ray.nodes(), me, self.bundles)

    def begin(self, name: str, tell: Callable[[str], None]) -> None:
        """Places the actors of a run, or finds those that are there."""
        count = len(self.bundles)
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            there: Any = ray.get_actor(name, _NAMESPACE)
            if (former := ray.get(there.hosts.remote(), timeout=10)) != count:
                remove(name, former)
                ray.kill(there, no_restart=True)
        lasting = {"lifetime": "detached", "namespace": _NAMESPACE, "max_restarts": -1}
        self.directory: Any = (
            ray.remote(Directory)
            .options(name=name, num_cpus=0, get_if_exists=True, **lasting)
            .remote(name, count)
        )
        try:
            group = ray.util.get_placement_group(name)
            tell("the hosts of this run are there")
        except ValueError:
            others = [each for each in ray.nodes() if each["Alive"] and each["NodeID"] != self.me]
            # Ray would take this node, too, if it has as many CPUs: nothing is reserved for this command.
            elsewhere = {"ray.io/node-id": f"!{self.me}"} if len(others) >= count else {}
            group = ray.util.placement_group(
                self.bundles,
                strategy="STRICT_SPREAD",
                name=name,
                lifetime="detached",
                bundle_label_selector=[elsewhere] * count,
            )
        self.group = group
        self.hosts: list[Any] = [
            ray.remote(HostParent)
            .options(
                name=f"{name}/host-{number}",
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                get_if_exists=True,
                scheduling_strategy=_strategies.PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=number
                ),
                **lasting,
            )
            .remote(name, number, int(bundle["CPU"]), count + 1)
            for number, bundle in enumerate(self.bundles)
        ]

    def missing(self) -> str:
        """Returns what Ray lacks for the hosts, "" if nothing."""
        if ray.util.placement_group_table(self.group)["state"] == "CREATED":
            return ""
        wanted = ", ".join(_text(each) for each in self.bundles)
        free = _text({k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")})
        return f"hosts on different nodes need {wanted}; free in the whole cluster: {free}"


def _require_folder(ranks: Ranks) -> None:
    """Raises ValueError if a node does not see the run's folder; those that do not answer may."""
    affinity = _strategies.NodeAffinitySchedulingStrategy
    asked = {
        ray.remote(_sees)
        .options(num_cpus=0, scheduling_strategy=affinity(each["NodeID"], soft=False))
        .remote(ranks.settled, ranks.start): each["NodeManagerHostname"]
        for each in ray.nodes()
        if each["Alive"] and each["Resources"].get("CPU", 0) >= 1
    }
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=LOOK_S)
    blind: set[str] = set()
    for answer in answered:
        with contextlib.suppress(ray.exceptions.RayError):
            blind |= set() if ray.get(answer) else {asked[answer]}
    if blind:
        raise ValueError(
            f"{', '.join(sorted(blind))} does not see {_folder_of(ranks)}, in which all nodes that learn as "
            "one find one another: name a folder that all of them see with --run"
        )


def _sees(path: str, start: str) -> bool:
    """Returns whether a file tells of this start, within a few seconds."""
    until_s = time.monotonic() + _SEEN_S
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError, ValueError, KeyError):
            if load_json(Path(path))["start"] == start:
                return True
        time.sleep(0.5)
    return False


def _folder_of(ranks: Ranks) -> str:
    return printable(Path(ranks.settled).parents[1])


def _text(resources: dict[str, float]) -> str:
    return " and ".join(f"{count:g} {kind}" for kind, count in sorted(resources.items())) or "none"


def _known(run: Path, ranks: Ranks) -> tuple[str, Told] | None:
    """Returns a run's name in Ray and what its hosts must know, None if the run does not listen yet."""
    if ranks.words:
        return _name_of(str(run)), Told(ranks=ranks)
    key, address = run / FOLDER / KEY, run / FOLDER / ADDRESS
    if not (key.exists() and address.exists()):
        return None
    secret = key.read_text()
    return _name_of(secret), Told(secret, json.dumps(load_json(address)))


def _name_of(text: str) -> str:
    return f"seedbed-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _serve(cluster: _Cluster, run: Path, ranks: Ranks, parent: Parent) -> None:
    """Tells the directory where the run is, and the user of what happens, until the end.

    Hosts stay if the coordinator was killed.
    """
    say, name, begun = parent.say, "", False
    seen: dict[Any, str] = {}  # how the last host of a node has ended, as far as it was told
    told, patient_s = "", time.monotonic() + _PATIENCE_S
    while not parent.ending.wait(_TELL_S if name else 0.2):
        if (known := _known(run, ranks)) is None:
            continue
        name, now = known
        try:
            if not begun:
                cluster.begin(name, lambda text: say(say=text))
            ray.get(cluster.directory.tell.remote(now), timeout=20)
            begun = True
        except (ray.exceptions.RayError, ValueError) as error:
            # The directory may have removed itself, with all hosts, while this machine was suspended.
            if begun:
                say(say=f"it does not answer ({type(error).__name__}): tried again")
            begun = False
            continue
        if time.monotonic() > patient_s:
            patient_s = time.monotonic() + _PATIENCE_S
            if (lacks := cluster.missing()) and lacks != told:
                say(say=lacks)
            told = lacks
        asked = {host.status.remote(): number for number, host in enumerate(cluster.hosts)}
        # Those that are not placed do not answer.
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=1)
        for answer in answered:
            with contextlib.suppress(ray.exceptions.RayError):
                status, number = ray.get(answer), asked[answer]
                last = status["last"]
                # A parent that Ray has started anew knows of none.
                if last and seen.get(number, "") != last:
                    say(say=f"host {number} on {status['node']} {last}; started again")
                seen[number] = last
    if name and not parent.gone:
        with contextlib.suppress(ray.exceptions.RayError):
            remove(name, len(cluster.bundles))
            ray.kill(cluster.directory, no_restart=True)


def main() -> None:
    """Serves the coordinator of a run that has started this process."""
    run, wanted, ranks = Path(sys.argv[1]), int(sys.argv[2]), Ranks(*json.loads(sys.argv[3]))
    parent = Parent()
    try:
        cluster = _Cluster(wanted, ranks)
    except ConnectionError as error:
        parent.say(error=no_cluster(str(error).splitlines()[0]))
        return
    except ValueError as error:
        parent.say(error=str(error))
        return
    parent.say(hosts=len(cluster.bundles))
    parent.listen()
    _serve(cluster, run, ranks, parent)


if __name__ == "__main__":
    main()
