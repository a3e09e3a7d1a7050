"""Every exit status of the table, reached by a real program."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from seedbed import strict_json
from seedbed.envs.host import registry
from seedbed.envs.host.gym import FactoryEnv
from seedbed.exit_status import ExitStatus, TemporaryError, status_of
from seedbed.run.folder import RunFolder
from seedbed.types import SeedbedError, StorageError, UsageError

PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
COUNTING = "train counting_environment:make --agent counting_agent:CountingAgent --envs-per-actor 4"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def seedbed(arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "seedbed", *arguments.split()]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)


@pytest.mark.quick("--version*")
@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ("--version", ExitStatus.FINISHED, "seedbed 0"),
        ("train pnog", ExitStatus.FAILED, "did you mean pong?"),
        ("trian", ExitStatus.USAGE, "did you mean train?"),
        ("actor nowhere --give-up-after 0.01", ExitStatus.TRY_AGAIN, "did not begin within"),
        ("host nowhere --give-up-after 0.01", ExitStatus.TRY_AGAIN, "did not begin within"),
    ],
)
def test_commands_that_end_by_themselves(arguments, status, text):
    done = seedbed(arguments)
    assert done.returncode == status and text in done.stdout + done.stderr


@pytest.mark.slow
def test_what_another_process_has_may_be_free_later(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = seedbed(f"{COUNTING} --listen {address} --run {tmp_path / 'listening'}")
    assert done.returncode == ExitStatus.TRY_AGAIN, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"seedbed: cannot listen at {address}")
    elsewhere = seedbed(f"{COUNTING} --listen 192.0.2.1:0 --run {tmp_path / 'elsewhere'}")
    assert elsewhere.returncode == ExitStatus.FAILED, elsewhere.stderr
    first = RunFolder.create(tmp_path / "run")
    try:
        done = seedbed(f"{COUNTING} --run {tmp_path / 'run'}")
    finally:
        first.close()
    assert done.returncode == ExitStatus.TRY_AGAIN
    assert "another process trains into" in done.stderr


@pytest.mark.parametrize("command", ["actor", "host"])
def test_what_joins_a_run_and_is_stopped(tmp_path, command):
    process = subprocess.Popen(
        [sys.executable, "-m", "seedbed", command, str(tmp_path / "run")],
        env=ENVIRONMENT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith("waiting for the run")
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert (process.returncode, rest) == (ExitStatus.STOPPED, f"{command} ended: stopped\n")


ROLE = """
import errno
from pathlib import Path
from seedbed.streams.credentials import ensure_credentials
from seedbed.paramserver import role
from seedbed.paramserver.ledger import BookError
from seedbed.exit_status import TrainingDiverged
from seedbed.types import SeedbedError

run = Path({run!r})
role.Role.serve.__defaults__ = (0.5,)  # what it waits for a first coordinator

class Idle:
    def tick(self, now_s):
        return {more}

    def close(self):
        pass

def serve():
    ensure_credentials(run / role.CREDENTIALS)
    return role.Role(run, "learner-0", 1), Idle(), None

def fail(error):
    raise error

role.run_role(lambda: {make})
"""


@pytest.mark.quick("*Diverged*")
@pytest.mark.parametrize(
    ("make", "more", "status"),
    [
        ("serve()", False, ExitStatus.FINISHED),
        ("serve()", True, ExitStatus.ALONE),
        ("fail(BookError('it goes on under another number'))", True, ExitStatus.FAILED),
        ("fail(RuntimeError('nobody foresaw this'))", True, ExitStatus.FAILED),
        ("fail(TrainingDiverged('the loss is nan'))", True, ExitStatus.DIVERGED),
        ("fail(OSError(errno.ENOSPC, 'No space left on device'))", True, ExitStatus.NO_ROOM),
        ("fail(SeedbedError('no such ROM: install it'))", True, ExitStatus.REFUSED),
    ],
)
def test_roles(tmp_path, make, more, status):
    code = ROLE.format(run=str(tmp_path), make=make, more=more)
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status, done.stderr


def test_an_actor_process_whose_learner_has_gone_ends_though_its_environment_is_busy():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = registry.to_json(FactoryEnv("counting_environment:make_never", kwargs=(("hang", True),)))
    launcher = {"env": env, "num_envs": 1, "seed": 0, "niceness": 0, "allow": None}
    process = subprocess.Popen(
        [sys.executable, "-m", "seedbed.actors.actor", "--fd", str(theirs.fileno())],
        env=ENVIRONMENT, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()],
    )  # fmt: skip
    assert process.stdin is not None
    with process.stdin as job:
        job.write(strict_json.dumps({**launcher, "actor": 0, "lives": [0]}).encode())
    theirs.close()
    ours.close()
    try:
        assert process.wait(60) == ExitStatus.ALONE
    finally:
        process.kill()
        process.wait()


def test_errors_have_the_status_that_says_whether_to_try_again():
    full = SeedbedError("x cannot be written")
    full.__cause__ = OSError(28, "No space left on device")
    expected = {
        TemporaryError("x"): ExitStatus.TRY_AGAIN,
        StorageError("x"): ExitStatus.TRY_AGAIN,
        OSError(28, "No space left on device"): ExitStatus.TRY_AGAIN,
        full: ExitStatus.TRY_AGAIN,
        OSError(13, "Permission denied"): ExitStatus.FAILED,
        SeedbedError("x"): ExitStatus.FAILED,
        ValueError("x"): ExitStatus.FAILED,
        UsageError("x"): ExitStatus.USAGE,
        KeyboardInterrupt(): ExitStatus.GIVEN_UP,
    }
    assert {error: status_of(error) for error in expected} == expected


def test_the_page_has_every_status_and_no_other():
    text = PAGE.read_text().partition("## The command line")[0]
    told = re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE)
    assert {name: int(number) for number, name in told} == {
        status.name: status.value for status in ExitStatus
    }


INTERRUPTED = """
import importlib.abc, sys
from seedbed.__main__ import program

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "numpy":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
program()
"""


def test_an_interrupt_while_modules_are_imported_has_no_traceback():
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (ExitStatus.GIVEN_UP, b"", b"")
