"""A learner, three hosts and their links, with one fault after another: what each costs, and who notices.

It needs no root. Every timestep is compared with the one that must come (`Checker`), so that nothing is lost,
repeated or taken for another's within a life; a fault may cost its victims their lives, as the table says.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import psutil
import pytest

from actor_pools import counting
from hosts import Net, Proxy

HOSTS, GROUPS_OF_HOST = 3, 2


class Fault(NamedTuple):
    """What is done to a host, or to the ingest process if that is what it names."""

    name: str
    new_lives: bool | None  # whether the victim's groups get new lives; None if either may be
    recovery_s: float  # until they have stepped again
    others_go_on: bool = True


FAULTS = (
    Fault("kill the actor process", True, 5),
    Fault("kill the host", True, 8),
    Fault("stop the host for 2 s", False, 10),
    Fault("stop the host for 7 s", False, 15),
    Fault("stop the actor process for 2 s", False, 8),
    Fault("cut the link", False, 10),
    Fault("stall the link for 2 s", False, 10),
    Fault("stall the link for 7 s", False, 17),
    Fault("kill the ingest process", True, 15, others_go_on=False),
)


class Drill:
    """The parts, and how faults are made."""

    def __init__(self, net: Net) -> None:
        self.net, self.learner = net, net.learner
        port = net.port()
        self.proxies = [Proxy(port) for _ in range(HOSTS)]
        for proxy in self.proxies:
            net.start_host(proxy.port)
        self.groups_of: list[set[int]] = []
        self.learner.run(lambda: len(self.stepping(10)) == HOSTS * GROUPS_OF_HOST)

    def stepping(self, steps: int) -> set[int]:
        """The groups that have made so many steps in their lives."""
        return {g for g, done in enumerate(self.learner.steps) if done >= steps}

    def turn_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.learner.turn(0.02)

    def totals(self) -> np.ndarray:
        """Timesteps by group since the start, over all lives."""
        return np.array(self.learner.totals)

    def cause(self, fault: Fault, victim: int) -> Callable[[], None]:
        """Begins a fault; returns what ends it."""
        host, proxy = self.net.hosts[victim], self.proxies[victim]
        actor = (psutil.Process(host.pid).children() or [None])[0]
        if fault.name == "kill the actor process":
            assert actor is not None
            actor.kill()
        elif fault.name == "kill the host":
            host.kill()
            host.wait()
            return lambda: self.restart(victim)
        elif fault.name.startswith("stop the host"):
            host.send_signal(signal.SIGSTOP)
            return lambda: host.send_signal(signal.SIGCONT)
        elif fault.name.startswith("stop the actor"):
            assert actor is not None
            actor.suspend()
            return actor.resume
        elif fault.name == "cut the link":
            proxy.cut()
        elif fault.name.startswith("stall"):
            proxy.stall()
            return proxy.heal
        else:
            os.kill(self.net.pool.pids()[0], signal.SIGKILL)
        return lambda: None

    def restart(self, victim: int) -> None:
        """Starts a host in the place of one that was killed."""
        self.net.start_host(self.proxies[victim].port)
        self.net.hosts[victim] = self.net.hosts.pop()

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.__exit__()


def suffer(drill: Drill, fault: Fault, victim: int, timed: bool) -> float:
    """Makes a fault, checks who notices, and returns the seconds until everybody steps again.

    `timed` also checks that time, and that the others kept their pace: not on a machine that others use.
    """
    learner, active = drill.learner, HOSTS * GROUPS_OF_HOST
    lives = dict(learner.lives)
    drill.turn_for(1.0)
    before, begun = drill.totals(), time.monotonic()
    drill.turn_for(1.0)
    usual = drill.totals() - before
    end = drill.cause(fault, victim)
    lasting = float(fault.name.split()[-2]) if fault.name.endswith(" s") else 0.5
    before, begun = drill.totals(), time.monotonic()
    drill.turn_for(lasting)
    during = (drill.totals() - before) / (time.monotonic() - begun)
    end()
    ended = time.monotonic()
    before = drill.totals()
    moved = lambda: int(((drill.totals() - before) > 5).sum())  # noqa: E731
    learner.run(lambda: moved() >= active)
    recovery_s = time.monotonic() - ended
    changed = {g for g in lives if learner.lives[g] != lives[g]}
    new = {g for g in learner.lives if g not in lives}
    if fault.new_lives is False:
        assert not changed and not new, f"{fault.name}: lives ended"
    elif fault.new_lives and fault.others_go_on:
        assert len(changed | new) == GROUPS_OF_HOST, f"{fault.name}: {changed} {new}"
    if timed and fault.others_go_on:
        # The groups that are not the victim's kept on; those of the victim are the slowest.
        rates = np.sort(during / np.maximum(usual, 1))[-(active - GROUPS_OF_HOST) :]
        assert rates.min() > 0.3, f"{fault.name}: the others slowed to {rates}"
    assert not timed or recovery_s < fault.recovery_s, f"{fault.name}: {recovery_s:.1f} s"
    return recovery_s


def drill(tmp_path, faults: tuple[Fault, ...], seed: int, timed: bool) -> dict[str, float]:
    chance, found = random.Random(seed), {}
    net = Net(tmp_path, counting(sleep_s=0.002), groups=16)
    parts = None
    try:
        parts = Drill(net)
        for fault in chance.sample(faults, len(faults)):
            found[fault.name] = suffer(parts, fault, chance.randrange(HOSTS), timed)
        checkers = [checker for group in net.learner.checkers for checker in group]
        assert sum(checker.opened for checker in checkers) > 20
        return found
    finally:
        if parts is not None:
            parts.close()
        net.close()


@pytest.mark.slow
def test_one_fault_after_another(tmp_path):
    """The quick ones, in random order."""
    quick = tuple(f for f in FAULTS if "7 s" not in f.name)
    drill(tmp_path, quick, seed=random.randrange(1 << 30), timed=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(20))
def test_every_fault_with_many_seeds(tmp_path, seed):
    found = drill(tmp_path, FAULTS, seed, timed=True)
    print({name: round(seconds, 1) for name, seconds in found.items()})
