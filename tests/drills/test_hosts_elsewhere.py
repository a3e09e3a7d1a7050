"""Gorila with all its roles on two hosts, and a coordinator on a third machine (`machines.py`)."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from machines import RECORDS, RUNS, Link, Machine, Process, World, missing, wait_until
from watched_run import Watched, start_of

from gorila_runs import require_no_gaps, saved_items
from seedbed.exit_status import ExitStatus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"drills need {missing()}"),
]
ROLES = [f"{kind}-{i}" for kind in ("parameters", "replay", "learner") for i in range(2)]
COUNTING = (
    "counting_environment:make_slow --agent counting_agent:CountingReplayAgent --runtime paramserver "
    "--envs-per-actor 4 --agent.capacity 100000 --agent.min-size 20 --steps 1_000_000"
)
CARTPOLE = "cartpole/gorila --steps 10_000_000"
BACK_S, NODE_BACK_S = 30.0, 60.0
apart = pytest.mark.parametrize("apart", [False, True], ids=["a folder", "no folder"])


class Trio(Watched):
    """Three machines and a run on them. For one thread."""

    def __init__(self, world: World, train: str, apart: bool) -> None:
        """`apart` says that hosts do not see the run's folder, and have only its key."""
        super().__init__(world.runs / "run")
        self.world, self.apart = world, apart
        self.machines = [Machine(world, name) for name in ("coordinator", "one", "two")]
        here, one, two = self.machines
        pairs = [(here, one), (here, two), (one, two)]
        self.links = [Link(world, *pair, number) for number, pair in enumerate(pairs, 1)]
        for link in self.links:
            link.set(delay_s=0.001)
        options = (
            "--hosts 2 --listen 0.0.0.0:47100-47140 --evaluate-every 0 --log-every-s 0.5 "
            "--checkpoint-every-s 20"
        )
        arguments = [*train.split(), *options.split(), "--run", f"{RUNS}/run"]
        self.train = here.seedbed("train", "train", *arguments)
        if apart:
            key = self.run / "listen" / "actor.key"
            wait_until(key.exists, "the key", 60)
            (world.records / "key").write_text(key.read_text())
            for machine in (one, two):
                machine.call(f"mount -t tmpfs nothing {RUNS}")
        self.hosts = [self.join(each) for each in (one, two)]
        self.moves(120)

    def join(self, machine: Machine) -> Process:
        name = f"host-{machine.name}"
        if not self.apart:
            return machine.seedbed(name, "host", f"{RUNS}/run")
        link = self.links[self.machines.index(machine) - 1]
        own = self.own(machine)
        own.mkdir(exist_ok=True)
        at = ["host", f"{link.addresses[0]}:47100", "--key", f"{RECORDS}/key", "--trust-run"]
        return machine.seedbed(name, *at, TMPDIR=f"{RECORDS}/{own.name}")

    def own(self, machine: Machine) -> Path:
        """Returns where a host of this machine has its own folder, if it does not see the run's."""
        return self.world.records / f"tmp-{machine.name}"

    def items(self) -> list[tuple[int, int, int]]:
        """Returns the items of replay, as they are saved, after the hosts' machines were switched off."""
        if not self.apart:
            return saved_items(self.run)
        found: list[tuple[int, int, int]] = []
        for number in range(2):
            name = f"replay-{number}"
            roots = [path for each in self.machines for path in self.own(each).glob("*/roles")]
            here = [
                path for path in (self.run / "roles", *roots) if (path / name / "replay").exists()
            ]
            newest = max(here, key=lambda path: start_of(path / name))
            found += saved_items(newest.parent, [number])
        return found

    def places(self) -> dict[str, list[str]]:
        """Returns the roles on each machine, by the addresses that they have told."""
        found: dict[str, list[str]] = {each.name: [] for each in self.machines}
        links = self.links
        mine = {
            "coordinator": {links[0].addresses[0], links[1].addresses[0]},
            "one": {links[0].addresses[1], links[2].addresses[0]},
            "two": {links[1].addresses[1], links[2].addresses[1]},
        }
        for role in ROLES:
            told = json.loads((self.run / "roles" / role / "address.json").read_text())
            addresses = {host for host, _ in told["hosts"]}
            (at,) = [name for name, own in mine.items() if addresses & own]
            found[at].append(role)
        return found

    def received(self, machine: Machine) -> int:
        """Returns the bytes that have come to a machine over its links."""
        rows = Path(f"/proc/{machine.network}/net/dev").read_text().splitlines()
        return sum(int(row.split()[1]) for row in rows if row.strip().startswith("link"))


@apart
def test_no_bytes_of_roles_pass_through_the_coordinator(tmp_path, apart):
    with World(tmp_path) as world:
        trio = Trio(world, CARTPOLE, apart)
        assert trio.places()["coordinator"] == []
        assert sorted(trio.places().values()) == [[], *sorted([ROLES[::2], ROLES[1::2]])]
        before = [trio.received(each) for each in trio.machines]
        time.sleep(20)
        after = [trio.received(each) for each in trio.machines]
        grown = [now - was for now, was in zip(after, before, strict=True)]
        # It sends about as much as it gets, and each byte that is sent is received once.
        share = 2 * grown[0] / sum(grown)
        print(grown, f"bytes; the coordinator's part is {share:.4f}")
        assert sum(grown) > 5e6 and share < 0.02
        assert trio.train.terminate() == ExitStatus.STOPPED, trio.train.said()
        for host in trio.hosts:
            wait_until(lambda host=host: host.code() is not None, "a host's end", 30)
            assert host.code() == ExitStatus.FINISHED, host.said()


@apart
def test_a_host_and_a_machine_that_are_lost(tmp_path, apart):
    with World(tmp_path) as world:
        trio = Trio(world, COUNTING, apart)
        # The host is killed: its machine lives, and another host comes there.
        host_s = trio.back(trio.places()["one"], trio.hosts[0].kill, BACK_S)
        trio.hosts[0] = trio.join(trio.machines[1])
        wait_until(lambda: "host-3 has joined" in trio.train.said(), "the next host", 30)
        # The machine is off: nobody says so.
        machine_s = trio.back(trio.places()["two"], trio.machines[2].power_off, NODE_BACK_S)
        print(f"back after {host_s:.1f} s (a host killed), {machine_s:.1f} s (a machine off)")
        assert host_s < BACK_S and machine_s < NODE_BACK_S
        assert trio.places()["two"] == []
        saved = len(list((trio.run / "checkpoints").iterdir()))
        newer = lambda: len(list((trio.run / "checkpoints").iterdir())) > saved  # noqa: E731
        wait_until(newer, "a checkpoint", 60)
        if apart:
            trio.machines[1].power_off()
        assert trio.train.terminate() == ExitStatus.STOPPED, trio.train.said()
        items = trio.items()
        print(len(items), "items saved")
        assert len(items) > 100
        require_no_gaps(items, whole=False)
