"""A run on several machines, and the measures of a fault: who is touched, how much, and for how long."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from accounts import Account, Terms, settle
from machines import RECORDS, RUNS, Link, Machine, Process, World, wait_until
from recording import RECORD, RESET

from seedbed.exit_status import ExitStatus

HOSTS = 3
ENVS = 4  # of a host: two groups of two
UNROLL, GROUPS = 8, 16
RUN = f"{RUNS}/run"
KEY = f"{RECORDS}/actor.key"
_LEARN = f"""
    --agent recording_agent:RecordingAgent --agent.unroll {UNROLL} --agent.batch 2 --agent.actions 1000
    --listen 0.0.0.0:0 --run {RUN} --envs-per-actor {ENVS} --stream-groups {GROUPS} --evaluate-every 0
    --log-every-s 1 --steps 1_000_000_000 --checkpoint-every-s 3 --actor-timeout-s 6
""".split()
_JOIN = ("--processes", "1", "--allow", "recording")
# The visitor's machine would have cores of its own.
_BESIDE = ("chrt", "--idle", "0")
_USUAL_S = 4.0  # for which usual rates, and those during a fault, are measured at least
_TRIES = 3
_LEAST = 0.8  # of its usual rate that a host keeps which a fault does not touch


class Records:
    """The records of one machine's environments, as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._read = folder, dict[str, int]()
        self.times, self.lives = np.zeros(0), 0  # of all timesteps, monotonic; lives begun by order
        self.last: dict[str, np.ndarray] = {}  # times of each environment

    def refresh(self) -> None:
        """Reads what is new."""
        if not self._folder.exists():
            return
        for path in self._folder.iterdir():
            if len(path.name) != 6:
                continue
            at = self._read.get(path.name, 0)
            new = np.fromfile(path, RECORD, offset=at)
            if new.size:
                self.lives += int((new["kind"] == RESET).sum()) + (at == 0)
                self._read[path.name] = at + new.nbytes
                self.times = np.concatenate([self.times, new["time"]])
                former = self.last.get(path.name, np.zeros(0))
                self.last[path.name] = np.concatenate([former, new["time"]])[-200:]

    def rate(self, since: float, until: float) -> float:
        """Returns timesteps a second, of all environments."""
        self.refresh()
        return float(((self.times >= since) & (self.times < until)).sum()) / (until - since)

    def all_step_since(self, since: float) -> float | None:
        """Returns when the last of `ENVS` environments had made two timesteps since then; None if not yet."""
        self.refresh()
        seconds = [
            times[times > since][1] for times in self.last.values() if (times > since).sum() > 1
        ]
        return sorted(seconds)[ENVS - 1] if len(seconds) >= ENVS else None


class Host:
    """A machine with actors, its link to the learner, and what its environments record."""

    def __init__(self, drill: Drill, number: int) -> None:
        self._drill, self.number, self.name = drill, number, f"host{number}"
        self.records, self._usual = Records(drill.world.records / self.name), list[float]()
        self.machine = Machine(drill.world, self.name)
        self.link = self._connect()

    def boot(self) -> None:
        """Starts the machine again, without actors."""
        self.link.close()
        self.machine = Machine(self._drill.world, self.name)
        self.link = self._connect()

    def _connect(self) -> Link:
        return Link(self._drill.world, self._drill.machine, self.machine, self.number + 1)

    def usual(self, since: float, until: float) -> float:
        """Returns the usual rate: the median of those without a fault, of which this is the newest."""
        self._usual.append(self.records.rate(since, until))
        return float(np.median(self._usual[-5:]))

    def start(self) -> None:
        """Starts the actors."""
        self.process = self.machine.seedbed(self.name, "actor", RUN, *_JOIN)


class Drill:
    """A learner and hosts on machines of their own. For one thread."""

    def __init__(self, world: World) -> None:
        self.world, self.machine = world, Machine(world, "learner")
        self.terms = Terms(unroll=UNROLL, groups=GROUPS, size=2)
        self.hosts = [Host(self, number) for number in range(HOSTS)]
        self.visitor = Machine(world, "visitor")
        self._visitor_link = Link(world, self.machine, self.visitor, HOSTS + 1)
        self.learner = self.machine.seedbed("learner", "train", "recording:make", *_LEARN)
        published = world.runs / "run/listen/address.json"
        wait_until(published.exists, "the learner's address")
        (world.records / "actor.key").write_bytes(
            (world.runs / "run/listen/actor.key").read_bytes()
        )
        for host in self.hosts:
            host.start()
        # The first batches are compiled for.
        self.all_step(self.all_step(time.monotonic()) + 5.0)
        self.later: list[Callable[[], None]] = []  # what is to be done when all step again

    @property
    def address(self) -> str:
        """The learner's address for the visitor."""
        text = (self.world.runs / "run/listen/address.json").read_text()
        port = text.split(f"{self._visitor_link.addresses[0]}:")[1].split('"')[0]
        return f"{self._visitor_link.addresses[0]}:{port}"

    def visit(self, name: str, *arguments: str, key: str = KEY, program: str = "") -> Process:
        """Starts actors on the visitor's machine, maybe by a changed program."""
        start = ["-c", program] if program else ["-m", "seedbed"]
        command = [sys.executable, *start, "actor", self.address, "--key", key, *_JOIN, *arguments]
        return self.visitor.start(name, [*_BESIDE, *command])

    def visit_run(self) -> Process:
        """Starts a learner on the folder of the run, on the visitor's machine."""
        command = [sys.executable, "-m", "seedbed", "train", "--resume", "--run", RUN]
        return self.visitor.start("second-learner", [*_BESIDE, *command])

    def resume(self, program: str = "") -> Process:
        """Starts a learner on the folder of the run, on the learner's machine."""
        if program:
            command = [sys.executable, "-c", program, "train", "--resume", "--run", RUN]
            return self.machine.start("learner", command)
        return self.machine.seedbed("learner", "train", "--resume", "--run", RUN)

    def all_step(self, since: float, seconds: float = 60.0) -> float:
        """Waits until every environment of every host steps; returns when the last one did."""
        found: list[float] = []

        def done() -> bool:
            times = [host.records.all_step_since(since) for host in self.hosts]
            if None in times:
                return False
            found.append(max(each for each in times if each is not None))
            return True

        wait_until(done, "all environments step", seconds)
        return found[0]

    def end(self) -> Account:
        """Ends the hosts and then the learner; compares what was stepped with what was learned."""
        codes = [host.process.terminate() for host in self.hosts]
        assert codes == [ExitStatus.STOPPED] * HOSTS, codes
        time.sleep(2.0)
        code = self.learner.terminate()
        assert code == ExitStatus.STOPPED, self.learner.said()[-2000:]
        records = self.world.logs / "records"
        shutil.copytree(self.world.records, records)
        return settle(records, self.terms)


class Fault(NamedTuple):
    """A fault, and what it may do."""

    name: str
    cause: Callable[[Drill, Host], Callable[[], None]]
    """Begins it, with a host as its victim; returns what ends it."""
    lasts_s: float = 0.0
    recovery_s: float = 10.0  # at most, until everybody steps
    keeps_lives: bool = True  # also the victim's
    touches: str = "host"  # "host", "all" or "nobody"


class Found(NamedTuple):
    """What a fault has done."""

    recovery_s: float  # from its end, or if it lasts no time from its beginning
    others: float  # rate of the slowest host that is not touched, as a part of the usual one; NaN if all are
    victim: float  # that of the victim while it lasted
    said: dict[str, list[str]]  # lines by log
    tries: int = 1


def endure(drill: Drill, fault: Fault, victim: Host) -> Found:
    """Makes a fault, again while others slow down: a machine that others use slows down by itself.

    Raises AssertionError if they do each time, or if the fault does what it may not.
    """
    found = suffer(drill, fault, victim)
    for tries in range(2, _TRIES + 1):
        if not found.others < _LEAST:
            break
        found = suffer(drill, fault, victim)._replace(tries=tries)
    assert not found.others < _LEAST, f"others slowed down {_TRIES} times: {fault.name}: {found}"
    return found


def suffer(drill: Drill, fault: Fault, victim: Host) -> Found:
    """Makes a fault, and measures; raises AssertionError if it does what it may not, TimeoutError."""
    begun = time.monotonic()
    time.sleep(_USUAL_S)
    usual = {host.name: host.usual(begun, begun + _USUAL_S) for host in drill.hosts}
    lives = {host.name: host.records.lives for host in drill.hosts}
    logs = sorted(drill.world.logs.iterdir())
    sizes = {log.name: log.stat().st_size for log in logs}
    caused = time.monotonic()
    end = fault.cause(drill, victim)
    time.sleep(max(0.0, caused + fault.lasts_s - time.monotonic()))
    until = time.monotonic()
    end()
    ended = time.monotonic() if fault.lasts_s else caused
    stepped = drill.all_step(ended, 90.0)
    while drill.later:
        drill.later.pop()()
    until = max(until, stepped, caused + _USUAL_S)
    time.sleep(max(0.0, until - time.monotonic()) + 0.2)
    parts = {
        host.name: host.records.rate(caused, until) / max(usual[host.name], 1.0)
        for host in drill.hosts
    }
    changed = {host.name for host in drill.hosts if host.records.lives != lives[host.name]}
    touched = {
        "host": {victim.name},
        "all": {host.name for host in drill.hosts},
        "nobody": set[str](),
    }[fault.touches]
    said = {}
    for log in sorted(drill.world.logs.glob("*.log")):
        new = log.read_bytes()[sizes.get(log.name, 0) :].decode(errors="replace")
        said[log.stem] = [line for line in new.splitlines() if line and " | " not in line]
    found = Found(
        recovery_s=stepped - ended,
        others=min([parts[name] for name in parts if name not in touched], default=float("nan")),
        victim=victim.records.rate(caused, max(ended, caused + _USUAL_S))
        / max(usual[victim.name], 1.0),
        said=said,
    )
    where = f"{fault.name}: {found}"
    assert not changed - (set() if fault.keeps_lives else touched), (
        f"lives of {changed} ended: {where}"
    )
    assert found.recovery_s < fault.recovery_s, f"slow recovery: {where}"
    return found
