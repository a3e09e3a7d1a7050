"""Runs that listen, and the command that joins them, from the command line."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from central_runs import checkpoints, gone
from described import undescribed
from saved import lines
from seedbed.actors import command, host
from seedbed.actors.actor import _Groups
from seedbed.actors.host import ANY, HostOptions, _require_allowed
from seedbed.actors.link import RunFinished
from seedbed.actors.process import Launcher
from seedbed.actors.waiting import await_run
from seedbed.agents.impala import Impala
from seedbed.agents.ppo import Ppo
from seedbed.central import listening as listening_module
from seedbed.central.listening import advertised
from seedbed.cli import main
from seedbed.envs.factories import require_defined
from seedbed.envs.host import registry
from seedbed.envs.host.gym import FactoryEnv, GymEnv
from seedbed.envs.host.pickled import MAKE
from seedbed.exit_status import ExitStatus, TemporaryError
from seedbed.run.folder import RunFolder, TakenOver
from seedbed.run.options import CentralConfig
from seedbed.streams import credentials
from seedbed.streams.credentials import ActorKey
from seedbed.types import SeedbedError
from waiting import wait_for


class Interface(NamedTuple):
    """What psutil tells of an address."""

    family: int
    address: str


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def run_seedbed(
    output: Path, arguments: str, path: str = "", python: str = sys.executable
) -> subprocess.Popen[bytes]:
    """Starts a command, whose output is appended to a file; `path` is searched for modules first."""
    with output.open("ab") as file:
        return subprocess.Popen(
            [python, "-m", "seedbed", *shlex.split(arguments)],
            stdout=file,
            stderr=file,
            env={**ENVIRONMENT, "PYTHONPATH": f"{path}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"},
        )


def listening(run: Path, steps: int, how: str) -> str:
    """The command line of a learner that listens."""
    return (
        f"train {how} --run {run} --steps {steps} --listen 127.0.0.1:0 --envs-per-actor 4 "
        "--stream-groups 4 --checkpoint-every-s 0.5 --log-every-s 0.2 --evaluate-every 0 "
        "--evaluate-episodes 1 --agent.actions 1000"
    )


NEW = "counting_environment:make_slow --agent counting_agent:CountingAgent"


@pytest.fixture
def started():
    """Processes that are ended after the test."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_actors_join_a_run_find_it_again_after_a_kill_and_leave_at_its_end(
    run_folder, tmp_path, started
):
    learner_log, actor_log = tmp_path / "learner.log", tmp_path / "actor.log"
    learner = run_seedbed(learner_log, listening(run_folder, 10**9, NEW))
    started.append(learner)
    wait_for(lambda: (run_folder / "listen" / "address.json").exists(), learner)
    first = json.loads((run_folder / "listen" / "address.json").read_text())
    assert first["term"] == 1 and not first["insecure"]
    actor = run_seedbed(actor_log, f"actor {run_folder} --processes 1 --allow counting_environment")
    started.append(actor)
    wait_for(lambda: len(checkpoints(run_folder)) >= 2, learner)
    (secret,) = [(run_folder / "listen" / name).stat() for name in ["private.pem"]]
    assert secret.st_mode & 0o777 == 0o600
    line = lines(run_folder)[-1]
    assert not undescribed(line)
    assert line["streams/streams"] == 2 and line["streams/hosts"] == 1 and line["episodes"] > 0
    children = psutil.Process(learner.pid).children(recursive=True)
    learner.kill()
    learner.wait()
    wait_for(lambda: gone([child.pid for child in children if "ingest" in str(child)]), actor)
    newest = max(int(path.name) for path in checkpoints(run_folder))
    stopped = run_seedbed(learner_log, f"train --resume --run {run_folder} --steps 1_000_000_000")
    started.append(stopped)
    wait_for(lambda: "connected to the learner, term 2" in actor_log.read_text(), stopped)
    wait_for(lambda: max(int(path.name) for path in checkpoints(run_folder)) > newest, stopped)
    stopped.terminate()
    assert stopped.wait(30) == ExitStatus.STOPPED, learner_log.read_text()
    wait_for(lambda: "the run was stopped after" in actor_log.read_text(), actor)
    newest = max(int(path.name) for path in checkpoints(run_folder))
    again = run_seedbed(learner_log, f"train --resume --run {run_folder} --steps {newest + 1000}")
    started.append(again)
    assert again.wait(90) == ExitStatus.FINISHED, learner_log.read_text()
    assert actor.wait(30) == ExitStatus.FINISHED, actor_log.read_text()
    said = actor_log.read_text()
    assert all(f"connected to the learner, term {term}" in said for term in (1, 2, 3))
    assert "lost the learner" in said and "the run has ended after" in said
    assert newest + 1000 <= lines(run_folder)[-1]["env_steps"] <= newest + 1100
    second = json.loads((run_folder / "listen" / "address.json").read_text())
    assert second.pop("ended").startswith("the run has ended after")
    assert second == {**first, "term": 3}, "the port is the old one"


BARE = """
import sys
from pathlib import Path

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused}:
            raise ImportError(f"an actor needs no {{name}}")

sys.meta_path.insert(0, Refuse())
"""
# Of the packages of requirements.lock; actors may have these only.
ALLOWED = {
    *("ale-py", "gymnasium", "lz4", "numpy", "psutil"),
    *("cloudpickle", "Farama-Notifications", "typing_extensions"),  # of gymnasium
}


@pytest.mark.slow
@pytest.mark.parametrize("command", ["actor {} --processes 1", "host {} --cores 1"])
def test_an_actor_needs_no_more_than_its_requirements(run_folder, tmp_path, started, command):
    root = Path(__file__).parent.parent
    needed = {
        line.split(">=")[0]
        for line in (root / "requirements-actor.txt").read_text().splitlines()
        if not line.startswith("#")
    }
    assert needed <= ALLOWED
    names = {line.split("==")[0] for line in (root / "requirements.lock").read_text().splitlines()}
    packages = importlib.metadata.packages_distributions()
    refused = {
        module
        for module, distributions in packages.items()
        if set(distributions) & names and not set(distributions) & ALLOWED
    }
    assert {"jax", "flax", "tyro", "rich", "mujoco", "cryptography"} <= refused
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(BARE.format(refused=sorted(refused)))
    learner = run_seedbed(
        tmp_path / "learner.log",
        f"train pong --agent counting_agent:CountingAgent --run {run_folder} --listen 127.0.0.1:0 "
        "--envs-per-actor 2 --stream-groups 2 --steps 1_000_000 --log-every-s 0.2 --agent.actions 6",
    )
    started.append(learner)
    wait_for(lambda: (run_folder / "listen" / "address.json").exists(), learner)
    log = tmp_path / "actor.log"
    actor = run_seedbed(log, command.format(run_folder), path=str(tmp_path / "bare"))
    started.append(actor)
    wait_for(lambda: "connected" in log.read_text(), actor)
    (stepper,) = psutil.Process(actor.pid).children()
    for process in (psutil.Process(actor.pid), stepper):
        assert process.memory_info().rss < 70e6
    wait_for((run_folder / "metrics.jsonl").exists, learner)
    wait_for(lambda: any(line["env_steps"] for line in lines(run_folder)), learner)


@pytest.mark.slow
def test_actors_stop_at_a_signal_and_the_learner_goes_on(run_folder, tmp_path, started):
    learner_log = tmp_path / "learner.log"
    learner = run_seedbed(learner_log, listening(run_folder, 10**9, NEW))
    started.append(learner)
    wait_for(lambda: (run_folder / "listen" / "address.json").exists(), learner)
    key = tmp_path / "key"
    shutil.copy(run_folder / "listen" / "actor.key", key)
    (address,) = json.loads((run_folder / "listen" / "address.json").read_text())["addresses"]
    log = tmp_path / "actor.log"
    refused = run_seedbed(log, f"actor {address} --key {key} --processes 1")
    assert refused.wait(30) == ExitStatus.FAILED
    assert "allow it with --allow counting_environment" in log.read_text()
    odd = run_seedbed(
        log, f"actor {address} --key {key} --envs 3 --allow counting_environment --processes 1"
    )
    assert odd.wait(30) == ExitStatus.FAILED
    assert "groups of 2: give a multiple with --envs" in log.read_text()
    actor = run_seedbed(
        log, f"actor {address} --key {key} --processes 1 --allow counting_environment"
    )
    started.append(actor)
    wait_for(lambda: "connected to the learner" in log.read_text(), actor)
    here = "actors of 127.0.0.1 are here (2 groups, 4 environments)"
    wait_for(lambda: here in learner_log.read_text(), learner)
    actors = [child.pid for child in psutil.Process(actor.pid).children(recursive=True)]
    actor.send_signal(signal.SIGTERM)
    assert actor.wait(20) == ExitStatus.STOPPED
    assert gone(actors) and learner.poll() is None
    assert "have left: give a multiple" not in learner_log.read_text()
    left = "actors of 127.0.0.1 have left (2 groups, 4 environments)"
    wait_for(lambda: left in learner_log.read_text(), learner)
    learner.send_signal(signal.SIGTERM)
    assert learner.wait(20) == ExitStatus.STOPPED


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("nowhere --give-up-after 1e-3", "did not begin within 0.001 s (there is no such folder)"),
        ("{tmp} --give-up-after 1e-3", "did not begin within 0.001 s (it has no config.json)"),
        ("nowhere --give-up-after -1", "--give-up-after is -1.0"),
        ("nowhere --give-up-after nan", "--give-up-after is nan"),
        ("host:99999", "neither the folder of a run nor HOST:PORT"),
        ("2001:db8::5", "put an IPv6 address in brackets"),
        ("host:4711", "an address needs the run's key"),
        ("host:4711 --key {tmp}/missing", "cannot be read: No such file"),
        ("host:4711 --key {tmp}/junk", "is not the key of a run"),
        ("host:4711 --insecure --key {tmp}/junk", "--insecure is for a learner on this machine"),
        ("{tmp}/silent", "does not listen: start it with seedbed train"),
        ("{tmp}/gorila", "has --runtime paramserver, whose learners have actors of their own"),
        ("{tmp} --processes -1", "--processes is -1"),
        ("{tmp} --python {tmp}/python", "python cannot be started ([Errno 2]"),
        ("{tmp} --python /bin/false", "--python /bin/false cannot import seedbed"),
        ("", "required"),
    ],
)
def test_wrong_command_lines_of_actors_have_one_line(tmp_path, capsys, request, arguments, text):
    (tmp_path / "junk").write_text("{}")
    runs = {"silent": {"central": {"listen": ""}}, "gorila": {"paramserver": {"listen": ":0"}}}
    for name, config in runs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in handlers.items():
        request.addfinalizer(functools.partial(signal.signal, number, handler))
    status = main(["actor", *shlex.split(arguments.format(tmp=tmp_path))])
    later = "did not begin" in text
    assert status in ([ExitStatus.TRY_AGAIN] if later else [ExitStatus.FAILED, ExitStatus.USAGE])
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_an_actor_goes_on_in_another_python(tmp_path):
    """Which is this one again, in a script that notes how it is called."""
    other, noted = tmp_path / "python", tmp_path / "noted"
    other.write_text(f'#!/bin/sh\necho "$@" >> {noted}\nexec {sys.executable} "$@"\n')
    other.chmod(0o700)
    log = tmp_path / "log"
    started = run_seedbed(log, f"actor nowhere --pyth {other} --give-up-after 1e-3 --envs=2")
    assert started.wait(60) == ExitStatus.TRY_AGAIN
    _, again = noted.read_text().splitlines()
    assert again == "-P -m seedbed actor nowhere --give-up-after 1e-3 --envs=2"
    assert "did not begin within 0.001 s" in log.read_text()


def test_actors_wait_for_a_run_that_has_not_begun(tmp_path):
    run, said = tmp_path / "runs" / "new", []
    steps = [
        lambda: run.mkdir(parents=True),
        lambda: (run / "config.json").write_text(json.dumps({"central": {"listen": ":0"}})),
        lambda: credentials.ensure_credentials(run / "listen"),
    ]

    def tell(text: str) -> None:
        said.append(text)
        steps.pop(0)()

    assert await_run(run, command._missing, 30.0, tell, lambda: False)
    lacks = ("there is no such folder", "it has no config.json", "it has no listen/actor.key")
    assert said == [f"waiting for the run {run} to begin: {each}" for each in lacks]
    assert not await_run(run / "x", command._missing, 30.0, said.append, lambda: len(said) > 3)


def test_a_run_begins_in_a_folder_with_its_key_and_a_failed_start_leaves_that(run_folder):
    run_folder.mkdir()
    key = credentials.ensure_credentials(run_folder / "listen")
    run = RunFolder.create(run_folder)
    run.write_config({})
    run.discard_untrained()
    assert [path.name for path in run_folder.iterdir()] == ["listen"]
    assert credentials.ensure_credentials(run_folder / "listen") == key
    RunFolder.create(run_folder).close()


def test_a_host_that_was_away_when_the_run_ended_ends_with_it(run_folder):
    run, told = RunFolder.create(run_folder), []
    credentials.ensure_credentials(run.listen)
    address = run.listen / credentials.ADDRESS
    content = {"term": run.term, "addresses": ["127.0.0.1:9"], "insecure": False}
    address.write_text(json.dumps(content))
    find = command.Published(address, False, told.append)
    assert find() == [("127.0.0.1", 9)]
    listening_module.announce_end(run, "the run has ended after 7 steps")
    with pytest.raises(RunFinished, match="the run has ended after 7 steps"):
        find()
    key = credentials.ensure_credentials(run.listen)
    away = host.Host(key, find, host.HostOptions(1), False, told.append)
    assert away.run(lambda: False) == "the run has ended after 7 steps" and told == []
    # One that comes later waits for the run to be resumed.
    late = command.Published(address, False, told.append)
    assert late() == [] and late() == []
    assert told == ["the run has ended after 7 steps: waiting for its next start, with --resume"]
    address.write_text(json.dumps({**content, "term": 2}))
    assert late() == [("127.0.0.1", 9)]
    # A learner of an earlier term does not end the run of the next.
    listening_module.announce_end(run, "the run has ended")
    assert late() == [("127.0.0.1", 9)]
    run.close()


def test_a_host_of_a_folder_that_another_run_has_now_is_to_be_started_again(tmp_path):
    """As a service does; the folder may also be a link to the newest run."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        credentials.ensure_credentials(tmp_path / name / "listen")
    run = tmp_path / "current"
    run.symlink_to("first")
    key = credentials.ActorKey.read(run / "listen" / credentials.KEY)
    find = command.Published(run / "listen" / credentials.ADDRESS, False, print, key)
    assert find() == []
    run.unlink()
    assert find() == []
    run.symlink_to("second")
    with pytest.raises(TemporaryError, match="another run is now in .*current: start this host"):
        find()


def test_a_host_gives_up_when_there_is_no_learner_for_long(tmp_path):
    key = credentials.ensure_credentials(tmp_path / "listen")
    options = host.HostOptions(1, give_up_after_s=0.0)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        where = nobody.getsockname()
        waiting = host.Host(key, lambda: [where], options, False, lambda text: None)
        with pytest.raises(
            SeedbedError, match="no learner for 0 s .*its run has ended, or is else"
        ):
            waiting.run(lambda: False)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"listen": "here"}, "give HOST:PORT"),
        ({"listen": "a b:1"}, "is no address"),
        ({"listen": "h:70000"}, "is no address"),
        ({"listen": ":0", "insecure": True}, "insecure is for --listen at a loopback address"),
        ({"insecure": True}, "insecure is for --listen at a loopback address"),
        ({"listen": ":0", "advertise": ("x:y",)}, "is no address"),
        ({"advertise": ("x",)}, "name --listen, or"),
        ({"stream_groups": 8}, "stream_groups 8: name --listen, or"),
        ({"listen": ":0", "stream_groups": 0}, "stream_groups is 0"),
    ],
)
def test_wrong_options_of_learners_are_named(options, text):
    with pytest.raises(SeedbedError, match=text):
        CentralConfig(**options)


def test_a_host_keeps_to_the_address_of_a_folder_that_is_gone(tmp_path):
    folder, told = tmp_path / "run" / credentials.FOLDER, []
    folder.mkdir(parents=True)
    find = command.Published(folder / credentials.ADDRESS, False, told.append)
    assert find() == [] and told == []
    for name in ("one", "other"):
        folder.mkdir(parents=True, exist_ok=True)
        content = {"term": 1, "addresses": [f"{name}:7"], "insecure": False}
        (folder / credentials.ADDRESS).write_text(json.dumps(content))
        assert find() == [(name, 7)]
        for broken in ([1], [":5"], ["h:99999999999"], ["h:0"], "h:7", None):
            content["addresses"] = broken
            (folder / credentials.ADDRESS).write_text(json.dumps(content))
            assert find() == [(name, 7)]
        (said,) = told
        assert "cannot be read" in said
        told.clear()
        find._missed = False
        shutil.rmtree(folder.parent)
        for _ in range(3):
            assert find() == [(name, 7)]
        (said,) = told
        assert f"{folder} is gone" in said and f"still looking for its learner at {name}:7" in said
        told.clear()


def test_a_host_that_finds_no_learner_tells_every_minute_what_it_tries(tmp_path):
    key, told = credentials.ensure_credentials(tmp_path / "listen"), []
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = nobody.getsockname()
        waiting = host.Host(key, lambda: [address], host.HostOptions(1), False, told.append)
        begun = time.monotonic()
        while not waiting._groups[0].link.last_error:
            waiting._turn()
        for second in range(200):
            waiting._tell_of_the_learner(begun + second)
        waiting.close()
    assert told == [f"no learner yet: 127.0.0.1:{address[1]}: Connection refused"] * 4


def test_an_actor_whose_learner_trains_another_run_may_be_started_again(run_folder):
    run_folder.mkdir()
    key = credentials.ensure_credentials(run_folder / "listen")
    one = host.Host(key, list, host.HostOptions(1), False, print)
    link = types.SimpleNamespace(welcome={"env": {"kind": "gym"}, "num_envs": 4})
    one._pool, one._welcome = types.SimpleNamespace(close=lambda: None), {"env": {}, "num_envs": 4}
    with pytest.raises(TemporaryError, match="trains another run now: start the actor again"):
        one._welcomed(types.SimpleNamespace(link=link))
    one.close()


def test_what_a_run_listens_with():
    config = CentralConfig(listen=":0").fitted(Impala(batch=32))
    assert (config.actors, config.groups) == (0, 64)
    assert CentralConfig(listen=":0", actors=1).fitted(Impala(batch=32)).groups == 66
    with pytest.raises(SeedbedError, match="--listen is for agents that learn while others act"):
        CentralConfig(listen=":0").fitted(Ppo())
    assert advertised("10.1.2.3", 7, ()) == ["10.1.2.3:7"]
    assert advertised("", 7, ("a", "b:8", "[::2]")) == ["a:7", "b:8", "[::2]:7"]
    every = advertised("", 7, ())
    assert every[-1] == "127.0.0.1:7" and len(every) >= 2


def test_addresses_of_ipv6_are_told_only_where_they_are_listened_at(monkeypatch):
    found = [
        types.SimpleNamespace(family=socket.AF_INET, address="10.1.2.3"),
        types.SimpleNamespace(family=socket.AF_INET6, address="2001:db8::5"),
    ]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": found})
    both = ["10.1.2.3:7", "[2001:db8::5]:7"]
    assert advertised("", 7, ())[:-2] == advertised("::", 7, ())[:-2] == both
    assert advertised("0.0.0.0", 7, ())[:-2] == ["10.1.2.3:7"]


@pytest.mark.slow
def test_a_learner_that_another_has_taken_over_ends_and_writes_nothing(
    run_folder, tmp_path, started
):
    log = tmp_path / "learner.log"
    learner = run_seedbed(log, f"{listening(run_folder, 10**9, NEW)} --actors 1")
    started.append(learner)
    wait_for(lambda: len(checkpoints(run_folder)) > 1 and lines(run_folder), learner)
    # As a learner does that the first one's lock does not reach.
    (run_folder / "terms" / "000002").touch()
    assert learner.wait(30) == ExitStatus.FAILED
    assert "another learner has taken over the run" in log.read_text().splitlines()[-1]
    taken_s = (run_folder / "terms" / "000002").stat().st_mtime
    files = [path for path in run_folder.rglob("*") if path.is_file()]
    assert run_folder / "config.json" in files
    # What was being written then may have ended a moment later.
    assert not [path for path in files if path.stat().st_mtime > taken_s + 0.5]


def test_addresses_are_published_again_when_they_change_and_not_for_another_learner(
    run_folder, monkeypatch
):
    announcers: list[Callable[[int], None]] = []
    monkeypatch.setattr(
        listening_module, "RemoteActors", lambda *given: announcers.append(given[2])
    )
    interfaces = {"eth0": [Interface(socket.AF_INET, "10.1.1.1")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    run, told = RunFolder.create(run_folder), []
    config = CentralConfig(listen=":0").fitted(Impala(batch=32))
    listening_module.listen(None, FactoryEnv("a:b"), config, run, told.append)
    (announce,) = announcers

    def published() -> list[str]:
        return json.loads((run.listen / credentials.ADDRESS).read_text())["addresses"]

    announce(7)
    announce(7)
    assert published()[:2] == ["10.1.1.1:7", f"{socket.gethostname()}:7"]
    assert len([text for text in told if "listening at" in text]) == 1
    interfaces["eth1"] = [Interface(socket.AF_INET, "10.1.1.2")]
    announce(7)
    assert published()[:2] == ["10.1.1.1:7", "10.1.1.2:7"]
    (run.path / "terms" / "000002").write_text("another")
    interfaces["eth2"] = [Interface(socket.AF_INET, "10.1.1.3")]
    with pytest.raises(TakenOver, match="term 2; this one is of term 1"):
        announce(7)
    assert len(published()) == 4
    run.close()


def test_only_allowed_modules_are_imported():
    _require_allowed(GymEnv("CartPole-v1"), ())
    for env in (FactoryEnv("os.path:join"), GymEnv("os:Evil-v0")):
        with pytest.raises(SeedbedError, match="--allow os"):
            _require_allowed(env, ("other",))
    _require_allowed(FactoryEnv("os.path:join"), ("os.path",))
    # Another package of this machine registers it.
    _require_allowed(GymEnv("GymV21Environment-v0"), ())
    with pytest.raises(SeedbedError, match="--allow os"):
        _require_allowed(FactoryEnv("os"), ())


@pytest.mark.parametrize("name", ["make", "os:make"])
def test_a_host_never_reads_pickled_code(name):
    env = FactoryEnv(MAKE, kwargs={"name": name, "pickled": ""})
    with pytest.raises(SeedbedError, match="pickled code, which no host runs"):
        _require_allowed(env, ("os", "'os", MAKE.partition(":")[0], ANY))


def test_a_module_that_is_allowed_does_not_allow_what_it_imports():
    with pytest.raises(SeedbedError, match="os is a module; name it before the colon"):
        FactoryEnv("counting_environment:os.getcwd").make(1, 0)
    require_defined("counting_environment:make", ("other", "counting_environment"))
    require_defined("seedbed.testing.counting:CountingEnvironment", ("seedbed.testing",))
    job = {"num_envs": 1, "seed": 0, "actor": 0, "lives": [0], "allow": ["counting_environment"]}
    imported = FactoryEnv("counting_environment:CountingEnvironment")
    with pytest.raises(SeedbedError, match="is defined in seedbed.testing.counting, which --allow"):
        _Groups({**job, "env": registry.to_json(imported)}).build()


@pytest.mark.parametrize(("allow", "passed"), [(("a",), ("a",)), (("a", ANY), None)])
def test_actor_processes_know_what_is_allowed(tmp_path, monkeypatch, allow, passed):
    launched: list[Launcher] = []

    def pool(launcher: Launcher, **_: object) -> None:
        launched.append(launcher)
        raise SeedbedError("no more is needed")

    monkeypatch.setattr(host, "local_pool", pool)
    credentials.ensure_credentials(tmp_path)
    options = HostOptions(1, allow=allow)
    key = ActorKey.read(tmp_path / credentials.KEY)
    served = host.Host(key, list, options, True, print)
    env = registry.to_json(FactoryEnv("a:make"))
    with pytest.raises(SeedbedError, match="no more"):
        served._make({"env": env, "num_envs": 1, "seed": 0, "timeout_s": 1.0})
    served.close()
    assert launched[0].allow == passed


def test_credentials_are_kept_and_only_the_user_reads_them(tmp_path):
    folder = tmp_path / "listen"
    first = credentials.ensure_credentials(folder)
    assert credentials.ensure_credentials(folder) == first
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / credentials.KEY).stat().st_mode & 0o777 == 0o600
    assert "PRIVATE" not in (folder / credentials.KEY).read_text()
    (folder / credentials.KEY).write_text("{")
    with pytest.raises(SeedbedError, match="is not the key of a run"):
        credentials.ensure_credentials(folder)
