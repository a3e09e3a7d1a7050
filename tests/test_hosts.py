"""Hosts: who runs what, how a host is met, what becomes of its roles, and who may ask it for what."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedbed import cli
from seedbed.actors.waiting import await_run
from seedbed.config import resolve
from seedbed.config.saved import from_json, to_json
from seedbed.exit_status import ExitStatus
from seedbed.launch import joining
from seedbed.paramserver import command, hosting, launching, remote_host
from seedbed.paramserver import role as role_module
from seedbed.paramserver.cluster import Cluster
from seedbed.paramserver.directory import JOB, SAVE, Address, Directory, this_machine
from seedbed.paramserver.hosts import Hosts, _Placed
from seedbed.paramserver.keeper import Keeper
from seedbed.paramserver.launching import RoleSpec
from seedbed.paramserver.placement import HERE, KINDS, Machine, Wish, place
from seedbed.paramserver.registration import Entrance, Registrar, Registration
from seedbed.paramserver.role import Role
from seedbed.run.folder import ROLES, RunFolder, TakenOver
from seedbed.run.options import ParamServerConfig
from seedbed.run.trust import Trust
from seedbed.streams.addresses import Listening
from seedbed.streams.credentials import ADDRESS, KEY, PRIVATE, ensure_credentials
from seedbed.streams.credentials import FOLDER as CREDENTIALS
from seedbed.streams.messages import HELLO_BYTES
from seedbed.types import SeedbedError
from waiting import wait_for


def wishes(parameters: int, replay: int, learners: int) -> list[Wish]:
    counts = {"parameters": parameters, "replay": replay, "learners": learners}
    cores = {"parameters": 0.5, "replay": 0.5, "learners": 2.0}
    return [
        Wish(f"{kind.rstrip('s')}-{i}", kind, cores[kind])
        for kind in KINDS
        for i in range(counts[kind])
    ]


def where(machines: list[Machine], wanted: list[Wish]) -> dict[str, list[str]]:
    found = place(wanted, machines, {})
    return {
        each.name: sorted(name for name, (_, at) in found.items() if at == each.name)
        for each in machines
    }


def test_two_hosts_share_all_roles_and_the_coordinator_has_none():
    machines = [Machine(HERE, 4), Machine("host-1", 4), Machine("host-2", 4)]
    assert where(machines, wishes(2, 2, 2)) == {
        HERE: [],
        "host-1": ["learner-0", "parameter-0", "replay-0"],
        "host-2": ["learner-1", "parameter-1", "replay-1"],
    }


def test_uneven_machines_get_learners_by_cores_or_accelerators_and_shards_apart():
    machines = [Machine(HERE, 2), Machine("host-1", 24), Machine("host-2", 8)]
    found = where(machines, wishes(2, 2, 8))
    learners = {name: sum("learner" in role for role in roles) for name, roles in found.items()}
    assert learners == {HERE: 0, "host-1": 6, "host-2": 2}
    for kind in ("parameter", "replay"):
        assert [sum(kind in role for role in found[host]) for host in ("host-1", "host-2")] == [
            1,
            1,
        ]
    with_gpu = [*machines, Machine("host-3", 2, accelerators=1)]
    assert sum("learner" in role for role in where(with_gpu, wishes(2, 2, 3))["host-3"]) == 3


def test_a_host_that_takes_learners_only_leaves_shards_where_the_coordinator_is():
    machines = [Machine(HERE, 2), Machine("host-1", 2, only=("learners",))]
    found = where(machines, wishes(2, 2, 2))
    assert found == {
        HERE: ["learner-1", "parameter-0", "parameter-1", "replay-0", "replay-1"],
        "host-1": ["learner-0"],
    }
    with pytest.raises(ValueError, match="no machine takes replay"):
        place(wishes(0, 1, 0), machines[1:], {})


machine_lists = st.lists(
    st.builds(
        Machine,
        st.uuids().map(str),
        st.floats(0.25, 128),
        st.integers(0, 8),
        st.sets(st.sampled_from(KINDS)).map(lambda kinds: tuple(sorted(kinds))),
    ),
    max_size=6,
    unique_by=lambda each: each.name,
)


@given(machine_lists, st.tuples(*[st.integers(1, 6)] * 3), st.randoms(use_true_random=False))
def test_every_role_has_a_place_that_takes_it_and_keeps_it(machines, counts, chance):
    machines, wanted = [Machine(HERE, 4), *machines], wishes(*counts)
    found = place(wanted, machines, {})
    by_name = {each.name: each for each in machines}
    assert set(found) == {wish.name for wish in wanted}
    assert all(wish.kind in by_name[at].only for wish, at in found.values())
    # The order in which machines and wishes are named is nothing.
    chance.shuffle(machines)
    chance.shuffle(wanted)
    assert place(wanted, machines, {}) == found
    # Shards of a kind lie apart: no machine has two more of them than another that takes them.
    for kind in ("parameters", "replay"):
        takers = [each.name for each in machines if kind in each.only]
        many = [sum(w.kind == kind and at == name for w, at in found.values()) for name in takers]
        assert max(many) - min(many) <= 1
    # When a machine is gone, only its roles move.
    gone = chance.choice(machines[1:] or machines) if len(machines) > 1 else machines[0]
    left = [each for each in machines if each.name in (HERE,) or each is not gone]
    kept = {name: each for name, each in found.items() if any(each[1] == one.name for one in left)}
    after = place([wish for wish in wanted if wish.name not in kept], left, kept)
    assert set(after) == set(found) and all(after[name] == kept[name] for name in kept)


class Machines:
    """Hosts of a run, each a process, and the coordinator's end in this one."""

    def __init__(self, run: Path, patch: pytest.MonkeyPatch) -> None:
        self.run, self._patch = run, patch
        ensure_credentials(run / CREDENTIALS)
        (run / "config.json").write_text(
            json.dumps({"paramserver": {"hosts": 2, "listen": "0.0.0.0"}})
        )
        (run / ROLES).mkdir()
        (run / ROLES / JOB).write_text("{}")
        self.processes: list[subprocess.Popen[str]] = []
        self.hosts = Hosts(run, 2, "127.0.0.1")
        address = json.loads((run / CREDENTIALS / ADDRESS).read_text())["addresses"][0]
        self.apart = [address, "--key", str(run / CREDENTIALS / KEY)]

    def start(self, apart: bool = False) -> subprocess.Popen[str]:
        code = (
            "import sys; from seedbed.paramserver import hosting; hosting._MODULES = ('reporting_role',)\n"
            "from seedbed import cli; sys.exit(cli.main(sys.argv[1:]))"
        )
        path = os.pathsep.join(
            [str(Path(__file__).parent), *(entry for entry in sys.path if entry)]
        )
        self.processes.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    code,
                    "host",
                    *(self.apart if apart else [str(self.run)]),
                ],
                env=os.environ | {"PYTHONPATH": path},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return self.processes[-1]

    def names(self) -> list[str]:
        return sorted(host.name for host in self.hosts.look())

    def process_of(self, name: str) -> psutil.Process:
        address = Directory(self.run).find(name)
        assert address is not None
        return psutil.Process(address.pid)

    def close(self) -> None:
        self.hosts.close()
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def machines(tmp_path, monkeypatch):
    made = Machines(tmp_path, monkeypatch)
    yield made
    made.close()


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_roles_live_and_die_with_their_hosts(machines, monkeypatch):
    """A role of a host that is killed begins on another one, and one of a host that leaves does, too."""
    monkeypatch.setattr(remote_host, "_REFUSED_S", 0.2)
    monkeypatch.setattr(remote_host, "_LEAVE_S", 0.2)
    first, second = machines.start(), machines.start(apart=True)
    told: list[str] = []
    assert machines.hosts.await_all(told.append, lambda: False)
    assert told[:2] == [
        f"0 of 2 hosts have joined; on each: seedbed host {machines.run}",
        f"or, without this folder, with a copy of {machines.run}/listen/actor.key: "
        f"seedbed host {machines.apart[0]} --key actor.key",
    ]
    wished = [Wish("replay-0", "replay", 0.5), Wish("replay-1", "replay", 0.5)]
    machines.hosts.plan(wished)
    specs = [RoleSpec(wish.name, "reporting_role", ("--number", wish.name[-1])) for wish in wished]
    keepers = [
        Keeper(machines.run, spec, 0, launcher=machines.hosts.launcher(spec)) for spec in specs
    ]
    try:
        wait_for(lambda: all(keeper.reported for keeper in keepers))
        at = [machines.hosts.holder(f"replay-{i}") for i in range(2)]
        assert sorted(host.name for host in at) == ["host-1", "host-2"] == machines.names()
        # Kill -9: nobody tells the role, and it ends all the same.
        doomed = machines.process_of("replay-0")
        machines.process_of(at[0].name).kill()
        wait_for(lambda: is_gone(doomed))
        wait_for(lambda: machines.hosts.holder("replay-0") is at[1] and keepers[0].reported)
        wait_for(lambda: keepers[0].connected)
        told += machines.hosts.take_notices()
        assert f"replay-0 begins on {at[1].name}" in told
        assert keepers[1].restarts == 0
        # Another joins, and takes what the one has that is told to leave.
        third = machines.start(apart=True)
        wait_for(lambda: len(machines.names()) == 2)
        leaving = next(each for each in (first, second) if each.poll() is None)
        leaving.send_signal(signal.SIGTERM)
        wait_for(
            lambda: all(machines.hosts.holder(f"replay-{i}") not in (None, at[1]) for i in range(2))
        )
        assert leaving.wait(20) == ExitStatus.STOPPED
        for keeper in keepers:
            keeper.finish()
        for keeper in keepers:
            keeper.close()
        machines.hosts.close()
        assert third.wait(20) == ExitStatus.FINISHED
        assert third.communicate()[0].splitlines()[-1] == "host ended: the run has ended"
    finally:
        for keeper in keepers:
            keeper.kill()


@pytest.mark.slow
def test_a_host_without_the_folder_is_sent_what_its_roles_begin_with(machines):
    roles, directory = machines.run / ROLES, Directory(machines.run)
    (roles / JOB).write_text('{"job": 1}')
    (roles / "replay-0").mkdir()
    save = os.urandom(1_300_000)
    (roles / "replay-0" / SAVE).write_bytes(save)
    other = Address(3, 1, "elsewhere", "", (("192.0.2.1", 4711),))
    directory.announce("replay-1", other)
    for _ in range(2):
        machines.start(apart=True)
    assert machines.hosts.await_all(lambda text: None, lambda: False)
    machines.hosts.plan([Wish(f"replay-{i}", "replay", 0.5) for i in range(2)])
    spec = RoleSpec("replay-0", "reporting_role", ("--number", "0"))
    keeper = Keeper(machines.run, spec, 0, launcher=machines.hosts.launcher(spec))
    wait_for(lambda: keeper.reported)
    assert machines.hosts.keeps_apart("replay-0")
    process = machines.process_of("replay-0")
    words = process.cmdline()
    own = Path(words[words.index("--run") + 1])
    assert own != machines.run and own.stat().st_mode & 0o077 == 0
    assert (own / ROLES / JOB).read_text() == '{"job": 1}'
    assert (own / ROLES / "replay-0" / SAVE).read_bytes() == save
    wait_for(lambda: Directory(own).find("replay-1") == other)
    # What the machine has learned since is newer than what the coordinator has.
    (own / ROLES / "replay-0" / SAVE).write_bytes(b"newer")
    process.kill()
    wait_for(lambda: keeper.restarts and keeper.reported)
    assert (own / ROLES / "replay-0" / SAVE).read_bytes() == b"newer"
    told = directory.find("replay-0")
    assert told is not None and told.number == 2
    # Nobody else has told it this code, and nobody else can write it; it is foreign all the same.
    _, trust = Trust.reading(own, own / ROLES / JOB)
    with pytest.raises(SeedbedError, match="another machine has sent it: .* --trust-run"):
        trust.require("code:function")
    keeper.finish()
    keeper.close()
    machines.hosts.close()
    for host in machines.processes:
        assert host.wait(20) == ExitStatus.FINISHED
    assert not own.exists()


@pytest.mark.slow
def test_a_host_that_was_given_up_comes_back(machines, monkeypatch):
    """Also one that sees the folder, from which its coordinator has removed it."""
    monkeypatch.setattr(remote_host, "_GONE_S", 0.5)
    for apart in (False, True):
        name = machines.hosts._directory.take_number("host") + 1
        process = machines.start(apart)
        wait_for(lambda name=name: machines.names() == [f"host-{name}"])
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: machines.names() == [])
        assert not (machines.run / ROLES / f"host-{name}").exists()
        process.send_signal(signal.SIGCONT)
        wait_for(lambda name=name: machines.names() == [f"host-{name}"])
        process.kill()
        wait_for(lambda: machines.names() == [])


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("", False),
        ("192.0.2.1:4711: no answer; 127.0.0.1:4711: Connection refused", False),
        ("192.0.2.1:4711: Network is unreachable; OWN:4711: Connection refused", False),
        ("192.0.2.1:4711: no answer; 203.0.113.7:4711: Connection refused", True),
        ("[2001:db8::1]:4711: Connection refused; one:4711: Name not known", True),
        ("[Errno 111] Connection refused", True),  # of a socket of this machine
    ],
)
def test_which_refusals_say_that_a_process_is_gone(why, said):
    own = socket.gethostbyname("localhost")
    for found in psutil.net_if_addrs().values():
        own = next((each.address for each in found if each.family == socket.AF_INET), own)
    assert remote_host.refused(why.replace("OWN", own)) == said


def test_what_a_host_has_learned_is_not_replaced_after_a_start_that_failed(tmp_path):
    provided: list[bool] = []
    failures = [None, ConnectionError(), OSError(), None]

    class Host:
        shares = False

        def provide(self, name: str, has_save: bool) -> None:
            provided.append(has_save)

        def start(self, *_: Any) -> None:
            if (failure := failures.pop(0)) is not None:
                raise failure

    one: Any = Host()
    where: list[Any] = [one]
    hosts: Any = SimpleNamespace(host_of=lambda name: where[0], require_claim=lambda: None)
    here: Any = SimpleNamespace(start=lambda anew: "here")
    role = RoleSpec("parameters-0", "module")
    placed = _Placed(hosts, Directory(tmp_path), here, role)
    placed.start(True)
    for failure in (ConnectionError, OSError):
        with pytest.raises(failure):
            placed.start(False)
    placed.start(False)
    # What the coordinator has is older, as long as the role was nowhere else.
    assert provided == [False, True, True, True]
    where[0] = None
    assert placed.start(False) == "here"
    where[0], failures[:] = one, [None]
    placed.start(False)
    assert provided[4:] == [False]


@pytest.mark.slow
def test_two_hosts_that_are_lost_together_do_not_end_the_run(machines, monkeypatch):
    monkeypatch.setattr(remote_host, "_REFUSED_S", 1.0)
    doomed = [machines.start() for _ in range(2)]
    assert machines.hosts.await_all(lambda text: None, lambda: False)
    machines.hosts.plan([Wish(f"replay-{i}", "replay", 0.5) for i in range(2)])
    specs = [RoleSpec(f"replay-{i}", "reporting_role", ("--number", str(i))) for i in range(2)]
    keepers = [
        Keeper(machines.run, spec, 0, launcher=machines.hosts.launcher(spec)) for spec in specs
    ]
    wait_for(lambda: all(keeper.reported for keeper in keepers))
    # While the roles of the first are about to begin on the second.
    for each in doomed:
        each.kill()
        time.sleep(0.8)
    wait_for(lambda: all(keeper.restarts and keeper.reported for keeper in keepers))
    assert all(keeper.failure is None and keeper.pid is not None for keeper in keepers)
    for keeper in keepers:
        keeper.finish()
    for keeper in keepers:
        keeper.close()


@pytest.mark.slow
def test_a_host_that_is_stopped_with_the_whole_run_keeps_its_roles(machines, monkeypatch):
    monkeypatch.setattr(remote_host, "_LEAVE_S", 0.0)
    stopping = [False]
    machines.hosts._stopping = lambda: stopping[0]
    leaving = machines.start()
    machines.start()
    assert machines.hosts.await_all(lambda text: None, lambda: False)
    machines.hosts.plan([Wish("replay-0", "replay", 0.5)])
    spec = RoleSpec("replay-0", "reporting_role", ("--number", "0"))
    keeper = Keeper(machines.run, spec, 0, launcher=machines.hosts.launcher(spec))
    wait_for(lambda: keeper.reported)
    (process,) = [
        each for each in machines.processes
        if each.pid == machines.process_of(machines.hosts.holder("replay-0").name).pid
    ]  # fmt: skip
    stopping[0] = True
    process.send_signal(signal.SIGTERM)
    time.sleep(1.0)
    assert keeper.restarts == 0 and process.poll() is None and leaving in machines.processes
    # The coordinator ends the role, and the host has nothing to stay for.
    keeper.finish()
    keeper.close()
    assert process.wait(20) == ExitStatus.STOPPED


def test_a_coordinator_finds_the_roles_of_the_one_before(machines):
    for _ in range(2):
        machines.start()
    assert machines.hosts.await_all(lambda text: None, lambda: False)
    spec = RoleSpec("replay-0", "reporting_role", ("--number", "0"))
    machines.hosts.plan([Wish("replay-0", "replay", 0.5)])
    keeper = Keeper(machines.run, spec, 0, launcher=machines.hosts.launcher(spec))
    wait_for(lambda: keeper.reported)
    pid = machines.process_of("replay-0").pid
    # The first coordinator is killed, as far as the hosts can tell.
    keeper._closed.set()
    for host in machines.hosts.look():
        host.keeper.kill()
    after = Hosts(machines.run, 2, "127.0.0.1")
    after.find_former(lambda: False)
    after.plan([Wish("replay-0", "replay", 0.5)])
    adopted = Keeper(machines.run, spec, 0, launcher=after.launcher(spec))
    wait_for(lambda: adopted.reported)
    assert machines.process_of("replay-0").pid == pid and adopted.restarts == 0
    assert after.end_all() == 1
    wait_for(lambda: adopted.restarts == 1)
    adopted.finish()
    adopted.close()
    after.close()


@pytest.mark.slow
def test_a_coordinator_that_was_superseded_leaves_everything_to_the_next(machines):
    for _ in range(2):
        machines.start()
    assert machines.hosts.await_all(lambda text: None, lambda: False)
    spec = RoleSpec("replay-0", "reporting_role", ("--number", "0"))
    machines.hosts.plan([Wish("replay-0", "replay", 0.5)])
    former = Keeper(machines.run, spec, 0, launcher=machines.hosts.launcher(spec))
    wait_for(lambda: former.reported)
    after = Hosts(machines.run, 2, "127.0.0.1")
    after.find_former(lambda: False)
    after.plan([Wish("replay-0", "replay", 0.5)])
    keeper = Keeper(machines.run, spec, 0, launcher=after.launcher(spec))
    wait_for(lambda: keeper.reported)

    def require_claim() -> None:
        raise TakenOver("another")

    machines.hosts.require_claim = require_claim
    # Only the next one starts a role again that has ended.
    machines.process_of("replay-0").kill()
    wait_for(lambda: keeper.restarts == 1 and keeper.reported and former.failure)
    assert isinstance(former.failure, TakenOver)
    process = machines.process_of("replay-0")
    cluster = Cluster.__new__(Cluster)
    cluster._hosts, cluster._copies = machines.hosts, SimpleNamespace(close=lambda: None)
    cluster.parameters, cluster.replay, cluster.learners = [], [former], []
    cluster.close()
    machines.hosts.close()
    time.sleep(0.5)
    assert process.is_running() and all(each.poll() is None for each in machines.processes)
    assert sorted(Directory(machines.run).names()) == ["host-1", "host-2", "replay-0"]
    assert keeper.restarts == 1 and keeper.failure is None
    keeper.finish()
    keeper.close()
    after.close()


def test_each_learner_of_this_machine_gets_one_of_its_gpus(tmp_path, monkeypatch):
    started: list[str | None] = []

    def start(module: str, arguments: Any, settings: dict[str, str], **_: Any) -> Any:
        started.append(settings.get(launching.VISIBLE))
        return subprocess.Popen(["true"])

    monkeypatch.setattr(launching, "start_module", start)
    for gpus in ("2,5", "2", ""):
        monkeypatch.setenv(launching.VISIBLE, gpus)
        for name in ("learner-0", "learner-1", "learner-2", "parameters-1"):
            launching.Here(tmp_path, RoleSpec(name, "module")).start(anew=True).end()
    # With one, or none, all of them have what this process has.
    assert started == ["2", "5", "2", None, *[None] * 8]


def test_a_host_with_very_many_addresses_tells_as_many_as_a_hello_holds(tmp_path, monkeypatch):
    names = [f"[2001:db8:1111:2222:3333:4444:5555:{i}]:47000" for i in range(6000, 6200)]
    monkeypatch.setattr(role_module, "advertised", lambda *_: names)
    ensure_credentials(tmp_path / CREDENTIALS)
    role = Role(tmp_path, "host-1", 1)
    work = SimpleNamespace(tick=lambda now_s: False, close=lambda: None)
    role.serve(work, Listening("127.0.0.1"))
    assert role.address is not None and 30 < len(role.address.hosts) < 40
    said = {"role": "host", "name": "host-1", "address": role.address._asdict(), "proof": "f" * 64}
    assert len(json.dumps(said)) < HELLO_BYTES - 500


def test_each_learner_of_a_host_gets_one_of_its_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv(launching.VISIBLE, "2,5")
    assert launching.accelerators() == ["2", "5"]
    ensure_credentials(tmp_path / CREDENTIALS)
    role = Role(tmp_path, "host-1", 1)
    work = hosting.Hosting(role, tmp_path, hosting.facts(KINDS), ())
    started: list[str | None] = []

    def start(module: str, arguments: Any, settings: dict[str, str], **_: Any) -> Any:
        started.append(settings.get(launching.VISIBLE))
        return subprocess.Popen(["sleep", "60"])

    monkeypatch.setattr(launching, "start_module", start)
    module = "seedbed.paramserver.learner"
    fields: dict[str, Any] = {"module": module, "arguments": ["--number", "0"], "start": 1}
    for name in ("learner-0", "parameters-0", "learner-1", "learner-2"):
        assert work._start(name, fields) == {"errno": 0}
    work._end("learner-1")
    work._start("learner-3", fields)
    assert started == ["2", None, "5", "2", "5"]
    for name in list(work._children):
        work._end(name)
    monkeypatch.setenv(launching.VISIBLE, "")
    assert launching.accelerators() == [] and work._accelerator() is None


def test_a_key_that_is_made_beforehand_is_that_of_the_run(tmp_path, capsys):
    run = tmp_path / "run"
    assert cli.main(["key", str(run)]) == 0
    key = (run / CREDENTIALS / KEY).read_text()
    assert f"{run}/listen/actor.key; on other machines: seedbed host" in capsys.readouterr().out
    assert cli.main(["key", str(run)]) == 0
    begun = RunFolder.create(run)
    begun.write_config({})
    ensure_credentials(begun.listen)
    assert (run / CREDENTIALS / KEY).read_text() == key
    begun.close()
    (run / CREDENTIALS / KEY).unlink()
    assert cli.main(["key", str(run)]) == 1
    assert "has begun without listening" in capsys.readouterr().err


def test_what_the_door_is_told_that_cannot_be(tmp_path):
    """The key lets a client in; what it says is checked all the same."""
    ensure_credentials(tmp_path / CREDENTIALS)
    joined: list[str] = []
    door = Registrar(tmp_path, "127.0.0.1", 1, joined.append)
    host, port = door.addresses[0].split(":")
    registration = Registration(tmp_path, Entrance(lambda: [(host, int(port))]), False)
    said = {"address": Address(1, 2, "machine", "socket", ())._asdict()}
    for name, fields in (
        ("../../x", said),
        ("replay-0", said),
        ("host-1", {"address": {"number": 1}}),
        ("host-1", {"address": {**said["address"], "hosts": [["a", "b"]]}}),
        ("host-1", {}),
    ):
        with pytest.raises(SeedbedError, match="coordinator refuses this process"):
            registration._call(lambda caller: False, name=name, **fields)
    with pytest.raises(SeedbedError, match="door is for hosts, not for a 'learner'"):
        registration._call(lambda caller: False, name="", role="learner")
    assert joined == [] and Directory(tmp_path).names() == []
    named = registration.register(lambda caller: False)
    assert named is not None and named.private == (tmp_path / CREDENTIALS / PRIVATE).read_text()
    assert registration._call(lambda caller: False, name=named.name, **said) == {}
    assert joined == [named.name] == Directory(tmp_path).names()
    door.close()


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "host-", "replay-0", None])
def test_a_host_takes_no_name_that_is_none(tmp_path, monkeypatch, name):
    """Its folder, which it removes at the end, has this name."""
    said = {"name": name, "listen": "", "private": ""}
    monkeypatch.setattr(Registration, "_call", lambda *_, **__: said)
    with pytest.raises(SeedbedError, match="the coordinator names this host .*: check the address"):
        Registration(tmp_path, Entrance(list), False).register(lambda caller: False)


def test_what_a_host_is_asked_that_cannot_be(tmp_path):
    ensure_credentials(tmp_path / CREDENTIALS)
    role = Role(tmp_path, "host-1", 1)
    work = hosting.Hosting(role, tmp_path, hosting.facts(KINDS), ())
    thread = threading.Thread(target=role.serve, args=(work, None))
    thread.start()
    keeper = Keeper(tmp_path, RoleSpec("host-1", ""), 0)
    wait_for(lambda: keeper.reported)
    asked: list[dict[str, Any]] = [
        {"role": "../../x", "module": "seedbed.paramserver.shard", "arguments": []},
        {"role": "", "module": "seedbed.paramserver.shard", "arguments": ["--number", "0"]},
        {"role": "replay-0", "module": "os", "arguments": ["--number", "0"]},
        {"role": "replay-0", "module": "seedbed.paramserver.shard", "arguments": [1]},
        # Whether the folder is trusted, and which it is, is for who has started the host to say.
        *(
            {
                "role": "replay-0",
                "module": "seedbed.paramserver.shard",
                "arguments": ["--number", "0", word],
            }
            for word in ("--trust-ru", "--run=/", "--save", "--parent=1")
        ),
    ]
    for fields in asked:

        def ask(keeper: Keeper, fields: dict[str, Any] = fields) -> Any:
            return keeper.ask(hosting.Kind.START, hosting.Kind.STARTED, **fields)

        with pytest.raises((SeedbedError, ConnectionError)):
            keeper.request(ask).result(10)
        keeper.kill()
        keeper = Keeper(tmp_path, RoleSpec("host-1", ""), 0)
        wait_for(lambda keeper=keeper: keeper.reported)
    assert work.report()["roles"] == {}
    keeper.kill()
    role.finish()
    thread.join()


@pytest.mark.slow
def test_a_host_ends_when_the_run_is_removed(machines, monkeypatch):
    process = machines.start()
    assert process.stdout is not None
    assert "waiting for its coordinator" in process.stdout.readline()
    wait_for(lambda: Directory(machines.run).find("host-1") is not None)
    shutil.rmtree(machines.run)
    assert process.wait(20) == ExitStatus.FINISHED
    assert process.stdout.read() == f"host ended: {machines.run} is gone\n"
    machines.run.mkdir()


def test_a_host_that_ended_long_ago_is_forgotten(tmp_path, monkeypatch):
    directory, run = Directory(tmp_path), tmp_path
    ensure_credentials(run / CREDENTIALS)
    (run / ROLES / "host-1").mkdir(parents=True)
    directory.announce("host-1", Address(1, os.getpid(), this_machine(), "seedbed-gone", ()))
    monkeypatch.setattr(remote_host, "_REFUSED_S", 0.1)
    found = Hosts(run, 1, "127.0.0.1")
    assert list(found._hosts) == ["host-1"]
    wait_for(lambda: found.look() or not found._hosts)
    assert not (run / ROLES / "host-1").exists() and found.take_notices() == []
    found.close()


def test_hosts_wait_for_a_run_that_has_not_begun(tmp_path):
    said: list[str] = []
    run = tmp_path / "runs" / "new"
    steps = [
        lambda: run.mkdir(parents=True),
        lambda: (run / "config.json").write_text(json.dumps({"paramserver": {"hosts": 1}})),
        lambda: (
            ensure_credentials(run / CREDENTIALS) and (run / CREDENTIALS / ADDRESS).write_text("{}")
        ),
    ]

    def tell(text: str) -> None:
        said.append(text.rpartition(": ")[2])
        steps.pop(0)()

    assert await_run(run, command._missing, 30.0, tell, lambda: False)
    assert said == [
        "there is no such folder",
        "it has no config.json",
        "its coordinator has not told yet where it is",
    ]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"fused": {}}, "trains in one process, and takes no hosts"),
        ({"central": {"listen": ""}}, "does not listen: start it with"),
        ({"paramserver": {"hosts": 0}}, "takes no hosts: start it with --hosts N"),
        (
            {"paramserver": {"hosts": 1}},
            "did not begin within 0.01 s .its coordinator has not told",
        ),
        ({"unknown": {}}, "did not begin within 0.01 s .config.json cannot be read"),
    ],
)
def test_a_host_that_cannot_join_is_told_why(tmp_path, config, text):
    (tmp_path / "config.json").write_text(json.dumps(config))
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(SeedbedError, match=text):
            joining.serve(
                joining.Options(str(tmp_path), 1.0, give_up_after_s=0.01), lambda text: None
            )
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_an_older_start_does_not_replace_the_address_of_a_newer_one(tmp_path):
    directory = Directory(tmp_path)
    (tmp_path / "roles" / "x").mkdir(parents=True)
    newer = Address(3, 4, "here", "name", ())
    directory.announce("x", newer)
    directory.announce("x", newer._replace(number=2, pid=5))
    assert directory.find("x") == newer
    directory.announce("x", newer._replace(number=4))
    assert directory.find("x") == newer._replace(number=4)


def test_runs_with_places_for_learners_of_other_machines_go_on_with_hosts(tmp_path):
    """`remote_learners` is what earlier versions have saved."""
    config = resolve.train_config("cartpole/gorila")
    saved = to_json(config)
    saved["paramserver"] |= {"remote_learners": 1, "listen": "0.0.0.0"}
    del saved["paramserver"]["hosts"]
    read = from_json(saved, Trust(tmp_path, tmp_path / "config.json", False))
    assert isinstance(read.runtime, ParamServerConfig)
    assert read.runtime.hosts == 1 and read.agent == config.agent
