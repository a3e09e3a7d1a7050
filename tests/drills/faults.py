"""The faults of the drill: how each is made, and what it may do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psutil
from drill import Drill, Fault, Host, Records
from machines import Process, wait_until

_OLD_VERSION = """
from seedbed.streams import handshake
handshake.SEEDBED = "0.0.1"
from seedbed.cli import program
raise SystemExit(program())
"""
# As on a file system whose locks reach other machines late: it has them once the other learner has ended.
_WITHOUT_LOCKS = """
import fcntl, threading
lock = fcntl.flock
def flock(descriptor, operation):
    try:
        lock(descriptor, operation)
    except BlockingIOError:
        threading.Thread(target=lock, args=(descriptor, fcntl.LOCK_EX), daemon=True).start()
fcntl.flock = flock
from seedbed.cli import program
raise SystemExit(program())
"""


def nothing() -> None:
    """Ends a fault that ends by itself."""


def actor_of(host: Host) -> psutil.Process:
    """Returns the process that steps the environments of a host."""
    return host.process.child.children()[0]


def ingest_of(drill: Drill) -> psutil.Process:
    """Returns the process of the learner in which streams end."""
    for process in drill.learner.child.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "seedbed.actors.ingest" in process.cmdline():
                return process
    raise LookupError("the learner has no ingest process")


def kill_actor(drill: Drill, host: Host) -> Callable[[], None]:
    """Kills the process that steps environments."""
    actor_of(host).kill()
    return nothing


def stop_actor(drill: Drill, host: Host) -> Callable[[], None]:
    """Stops it for a while."""
    actor = actor_of(host)
    actor.suspend()
    return actor.resume


def hang_actor(drill: Drill, host: Host) -> Callable[[], None]:
    """Stops it for good."""
    actor_of(host).suspend()
    return nothing


def kill_host(drill: Drill, host: Host) -> Callable[[], None]:
    """Kills the supervisor; somebody starts it again."""
    host.process.kill()
    host.start()
    return nothing


def stop_host(drill: Drill, host: Host) -> Callable[[], None]:
    """Stops the supervisor for a while."""
    host.process.suspend()
    return host.process.resume


def power_off(drill: Drill, host: Host) -> Callable[[], None]:
    """Ends a machine at once; it starts again."""
    host.machine.power_off()
    host.boot()
    host.start()
    return nothing


def condition(**conditions: float) -> Callable[[Drill, Host], Callable[[], None]]:
    """Sets conditions of the host's link for a while."""

    def cause(drill: Drill, host: Host) -> Callable[[], None]:
        host.link.set(**conditions)
        return host.link.set

    return cause


def limit_link(drill: Drill, host: Host) -> Callable[[], None]:
    """Limits the host's link for a while."""
    host.link.limit("1mbit")
    return lambda: host.link.limit("")


def set_clock(who: str, ahead_s: float) -> Callable[[Drill, Host], Callable[[], None]]:
    """Sets a machine's clock, and sets it right again."""

    def cause(drill: Drill, host: Host) -> Callable[[], None]:
        machine, process = (
            (drill.machine, drill.learner) if who == "learner" else (host.machine, host.process)
        )
        assert "libfaketime" in process.child.environ()["LD_PRELOAD"]
        machine.set_clock(ahead_s)
        return lambda: machine.set_clock(0.0)

    return cause


def cut_with_wrong_clock(drill: Drill, host: Host) -> Callable[[], None]:
    """Sets a host's clock back and cuts its link, so that it has to come back with that clock."""
    host.machine.set_clock(-43_200.0)
    host.link.set(cut=True)

    drill.later.append(lambda: host.machine.set_clock(0.0))
    return host.link.set


def fill_disk(drill: Drill, host: Host) -> Callable[[], None]:
    """Fills the disk of the run's folder for a while."""
    ballast = drill.world.runs / "ballast"
    with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass
    return ballast.unlink


def refused(process: Process, message: str) -> None:
    """Waits until a command has failed; raises AssertionError if it has not said why."""
    wait_until(lambda: process.code() is not None, "a refused command ends", 30)
    assert process.code() not in (None, 0), process.said()
    assert message in process.said(), process.said()


def wrong_key(drill: Drill, host: Host) -> Callable[[], None]:
    """Comes with the key of another run, which has the same certificate."""
    key = drill.world.records / "wrong.key"
    text = (drill.world.records / "actor.key").read_text()
    secret = text.split('"secret": "')[1][:8]
    key.write_text(text.replace(secret, secret[::-1]))
    refused(drill.visit("wrong-key", key="/srv/wrong.key"), "the key is not this run's")
    return nothing


def old_version(drill: Drill, host: Host) -> Callable[[], None]:
    """Comes with an older package."""
    refused(drill.visit("old-version", program=_OLD_VERSION), "seedbed is 0.0.1 here")
    return nothing


def changed_spec(drill: Drill, host: Host) -> Callable[[], None]:
    """Comes, steps, and has other environments after its process was replaced."""
    folder, begun = drill.world.records / "visitor", time.monotonic()
    records, visitor = Records(folder), drill.visit("changed-spec")
    wait_until(lambda: records.all_step_since(begun) is not None, "the visitor steps", 30)
    (folder / "width").write_text("5")
    visitor.child.children()[0].kill()
    refused(visitor, "")
    (folder / "width").unlink()
    return nothing


def second_learner(drill: Drill, host: Host) -> Callable[[], None]:
    """Starts a learner on the folder of one that runs."""
    refused(drill.visit_run(), "another process trains into")
    return nothing


def kill_ingest(drill: Drill, host: Host) -> Callable[[], None]:
    """Kills the process in which streams end."""
    ingest_of(drill).kill()
    return nothing


def hang_ingest(drill: Drill, host: Host) -> Callable[[], None]:
    """Stops it for good."""
    ingest_of(drill).suspend()
    return nothing


def stop_ingest(drill: Drill, host: Host) -> Callable[[], None]:
    """Stops it for a while."""
    ingest = ingest_of(drill)
    ingest.suspend()
    return ingest.resume


def stop_learner(drill: Drill, host: Host) -> Callable[[], None]:
    """Stops the learner itself, not its ingest process, for a while."""
    drill.learner.suspend()
    return drill.learner.resume


def kill_learner(drill: Drill, host: Host) -> Callable[[], None]:
    """Kills the learner; somebody starts it again."""
    killed = time.monotonic()
    drill.learner.kill()
    drill.learner = drill.resume()
    drill.terms.deaths.append((killed - 1.0, killed + 1.0))
    return nothing


def partition_learner(drill: Drill, host: Host) -> Callable[[], None]:
    """Stops the learner's machine, starts another learner on the folder, and lets the first one go on."""
    stopped, former = time.monotonic(), drill.learner
    tree = former.tree()
    for process in tree:
        process.suspend()
    drill.learner = drill.resume(_WITHOUT_LOCKS)
    drill.all_step(time.monotonic() + 0.5, 60.0)
    for process in tree[1:]:
        process.resume()
    former.resume()
    refused(former, "another learner has taken over the run")
    drill.terms.deaths.append((stopped - 1.0, stopped + 1.0))
    return nothing


FAULTS = (
    Fault("kill -9 of an actor process", kill_actor, recovery_s=5, keeps_lives=False),
    Fault("an actor process stops for 3 s", stop_actor, 3),
    Fault("an actor process hangs", hang_actor, recovery_s=15, keeps_lives=False),
    Fault("kill -9 of a host's supervisor", kill_host, recovery_s=5, keeps_lives=False),
    Fault("a host's supervisor stops for 8 s", stop_host, 8),
    Fault("a host loses power", power_off, recovery_s=10, keeps_lives=False),
    Fault("a link is cut for 3 s", condition(cut=True), 3),
    Fault("a link is cut for 12 s", condition(cut=True), 12),
    Fault("5 % of frames are lost", condition(loss=0.05), 6),
    Fault("200 ms of delay", condition(delay_s=0.2), 6),
    Fault("1 Mbit/s", limit_link, 6),
    Fault("frames repeated and reordered", condition(duplicate=0.2, jitter_s=0.05), 6),
    Fault("old connections' frames come after the new ones'", condition(keep=True), 9),
    Fault("a host's clock jumps an hour back", set_clock("host", -3600), 3),
    Fault("a host's clock is 12 hours late, and its link is cut", cut_with_wrong_clock, 7),
    Fault(
        # Not back: the library fakes the clock, but not the kernel's idea of when a wait on it ends.
        "the learner's clock jumps an hour ahead",
        set_clock("learner", 3600),
        3,
        touches="nobody",
    ),
    Fault("the learner's disk is full", fill_disk, 8, touches="nobody"),
    Fault("an actor with a wrong key", wrong_key, touches="nobody"),
    Fault("an actor of an old version", old_version, touches="nobody"),
    Fault("an actor that changes its spec", changed_spec, touches="nobody"),
    Fault("a second learner on the folder", second_learner, touches="nobody"),
    Fault("kill -9 of the ingest process", kill_ingest, keeps_lives=False, touches="all"),
    Fault("the ingest process stops for 3 s", stop_ingest, 3, touches="all"),
    Fault("the ingest process hangs", hang_ingest, recovery_s=25, keeps_lives=False, touches="all"),
    Fault("the learner stops for 8 s", stop_learner, 8, touches="all"),
    Fault("kill -9 of the learner", kill_learner, recovery_s=30, keeps_lives=False, touches="all"),
    Fault(
        "a learner cut off from its run comes back after another has it",
        partition_learner,
        recovery_s=60,
        keeps_lives=False,
        touches="all",
    ),
)
