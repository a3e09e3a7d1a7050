"""The processes of a job that are one run: their ranks, their options, and the end of the job's time."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seedbed import cli
from seedbed.config.presets import PRESETS
from seedbed.exit_status import ExitStatus, TemporaryError
from seedbed.launch import cluster, job, together
from seedbed.launch.ranks import Rank, cores_of, discover
from seedbed.run.folder import RunFolder
from seedbed.types import SeedbedError, UsageError
from waiting import wait_for

SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "3,1(x2),1",
}


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        (SLURM, Rank(3, 6, 1, 0.0, "17", "17.0.2")),
        (SLURM | {"SLURM_NODEID": "0", "SLURM_PROCID": "1"}, Rank(1, 6, 3, 0.0, "17", "17.0.2")),
        (SLURM | {"SLURM_CPUS_PER_TASK": "8"}, Rank(3, 6, 1, 8.0, "17", "17.0.2")),
        (SLURM | {"SLURM_CPUS_ON_NODE": "32"}, Rank(3, 6, 1, 0.0, "17", "17.0.2", 32)),
        (
            SLURM
            | {"SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "1", "SLURM_RESTART_COUNT": "2"},
            Rank(3, 6, 1, 0.0, "15_1", "17.2.2"),
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a/b"},
            Rank(1, 4, 2, 0.0, "a_b", ""),
        ),
        # So torchrun calls a job without a name: others are called so, too.
        (
            {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"},
            Rank(0, 2, 1, 0.0, "", ""),
        ),
        ({"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2"}, Rank(0, 2, 1, 0.0, "", "")),
        ({"JOB_COMPLETION_INDEX": "2", "COMPLETIONS": "3"}, Rank(2, 3, 1, 0.0, "", "")),
    ],
)
def test_the_rank_of_a_process(environ, rank):
    assert discover(environ, False) == rank


@pytest.mark.parametrize(
    ("given", "together", "usable", "cores"),
    [
        (16.0, 16, 1.0, 1.0),  # srun has not taken over what the job has
        (16.0, 64, 64.0, 16.0),
        (0.0, 32, 8.0, 8.0),  # SLURM has bound the task
        (0.0, 32, 32.0, 8.0),
        (0.0, 4, 32.0, 8.0),  # it binds no tasks, and the job has less than the machine
        (0.0, 0, 8.0, 2.0),  # torchrun in a container, whose quota is that of all
    ],
)
def test_the_cores_of_a_rank(given, together, usable, cores):
    assert cores_of(Rank(0, 4, 4, given, "", "", together), usable) == cores


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({}, "does not tell this process's rank: start it with srun or torchrun"),
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE, the number of processes, is not"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x': it must be a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "this process has rank 2 of 2: ranks are from 0"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "x"}, "SLURM_STEP_TASKS_PER_NODE is 'x'"),
        # A batch script has a rank, too.
        (
            {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"},
            "is of no step of its SLURM job: start it with srun",
        ),
    ],
)
def test_processes_without_a_rank_are_refused(environ, text):
    with pytest.raises(SeedbedError, match=text):
        discover(environ, False)


def test_slurm_alone_is_slurm():
    with pytest.raises(SeedbedError, match="SLURM_JOB_ID is not set: start it in an allocation"):
        discover({"RANK": "0", "WORLD_SIZE": "1"}, True)


def test_the_options_that_let_other_ranks_join():
    fused, central = PRESETS["cartpole/ppo"](), PRESETS["cartpole/impala"]()
    paramserver = PRESETS["cartpole/gorila"]()
    assert job.options_for(fused, [], 3) == job.options_for(central, [], 1) == []
    assert job.options_for(central, [], 3) == ["--listen", "0.0.0.0:0"]
    assert job.options_for(central, ["--listen", "1.2.3.4:5"], 3) == []
    # Those that learn as one are no hosts, also where the run says so and the command does not.
    assert job.options_for(central, ["--learners", "3"], 3) == []
    three = dataclasses.replace(central.runtime, learners=3)
    assert job.options_for(dataclasses.replace(central, runtime=three), [], 3) == []
    found = job.options_for(paramserver, ["--learners", "4"], 3)
    assert found == ["--listen", "0.0.0.0", "--hosts", "2"]


def test_what_hosts_need_is_settled_with_them(capsys):
    """Options that only a run with hosts may have, and a batch for which its own actors are too few."""
    words = [
        "config",
        "cartpole/impala",
        "--advertise",
        "10.0.0.5",
        "--agent.batch",
        "512",
        "--json",
    ]
    assert cli.main(words) == ExitStatus.FAILED
    assert cli.main([*words, "--cluster", "slurm"]) == ExitStatus.FINISHED
    settled = json.loads(capsys.readouterr().out)
    assert settled["central"]["listen"] == "0.0.0.0:0" and settled["agent"]["batch"] == 512


def test_what_rank_0_has_settled_the_others_read(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "start_module", None)
    monkeypatch.setenv("SEEDBED_PARENT", "1")
    path = tmp_path / job.SETTLED
    path.parent.mkdir()
    path.write_text('{"start": "a", "config": {"fused": {}}}')
    assert job.settled(tmp_path) == {"fused": {}}
    (tmp_path / "config.json").write_text('{"central": {}}')
    assert job.settled(tmp_path) == {"central": {}}


def test_a_job_that_is_to_go_on_settles_what_it_would_begin_with(tmp_path, monkeypatch, capfd):
    """Wherever `--resume` stands; without a name there is nothing to begin with."""
    run = tmp_path / "run"
    words = ["--resume", "cartpole/impala", "--run", str(run)]
    monkeypatch.setattr(sys, "argv", ["seedbed", "train", *words])
    assert "central" in job.settled(run)
    monkeypatch.setattr(sys, "argv", ["seedbed", "train", "--resume", "--run", str(run)])
    with pytest.raises(SystemExit):
        job.settled(run)
    assert "is not the folder of a run" in capfd.readouterr().err


def test_the_folder_of_a_job():
    alone, three = Rank(0, 1, 1, 0.0, "", ""), Rank(0, 3, 1, 0.0, "7", "")
    assert job.folder_of(None, three) == Path("runs/job-7")
    assert job.folder_of(Path("x"), alone) == Path("x")
    with pytest.raises(SeedbedError, match="this job has no name: add --run DIR"):
        job.folder_of(None, alone)


def test_an_unknown_cluster_is_refused(capsys):
    assert cli.main(["train", "pong", "--cluster", "slrum"]) == ExitStatus.USAGE
    assert capsys.readouterr().err == "seedbed: --cluster slrum: take slurm, ranks or ray\n"
    assert issubclass(UsageError, SeedbedError)


COORDINATE = """
import json, os, signal, sys, threading
from pathlib import Path
from seedbed.exit_status import StoppedEarly
from seedbed.launch import cluster
from seedbed.launch.ranks import Rank
from seedbed.scheduler import obey_scheduler

obey_scheduler()
run, steps = Path(sys.argv[1]), int(sys.argv[2])
stopped = threading.Event()

def train(resume):
    if steps:
        signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    print("resume" if resume else "begin", flush=True)
    (run / "config.json").touch()
    while not stopped.wait(0.01):
        pass
    if steps == 0:
        raise StoppedEarly
    return 143, {"env_steps": steps}

sys.exit(cluster.coordinate(Rank(0, 1, 1, 0.0, "5", "5.0"), run, train, cluster.say))
"""


class Turns:
    """The turns of a job, whose scheduler is a script."""

    def __init__(self, folder: Path, answer: int) -> None:
        self.run, self._asked = folder / "run", folder / "asked"
        self.meanwhile = folder / "meanwhile"  # what hosts are told while SLURM is asked
        bin_ = folder / "bin"
        bin_.mkdir()
        script = bin_ / "scontrol"
        script.write_text(
            f'#!/bin/sh\necho "$@" >> {self._asked}\ncp {self.run}/listen/job.json {self.meanwhile}\n'
            f"echo no >&2\nexit {answer}\n"
        )
        script.chmod(0o755)
        self._path = f"{bin_}:{os.environ['PATH']}" if answer < 9 else str(bin_ / "none")
        self.run.mkdir()

    def turn(self, number: int, steps: int) -> tuple[int, str, str]:
        """Begins a turn, sends a signal, and returns the status and what was said."""
        python = [entry for entry in sys.path if entry]
        process = subprocess.Popen(
            [sys.executable, "-c", COORDINATE, str(self.run), str(steps)],
            env=os.environ | {"PATH": self._path, "SLURM_JOB_ID": "5", "PYTHONPATH": os.pathsep.join(python)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        return process.returncode, first.strip(), said

    def told(self) -> job.Job:
        found = job.Job.read(self.run)
        assert found is not None
        return found

    def asked(self) -> list[str]:
        return self._asked.read_text().splitlines() if self._asked.exists() else []


@pytest.mark.slow
def test_a_job_whose_time_ends_asks_for_another_turn_until_turns_bring_nothing(tmp_path):
    job = Turns(tmp_path, 0)
    status, first, said = job.turn(signal.SIGUSR2, 100)
    assert (status, first, job.asked()) == (ExitStatus.STOPPED, "begin", ["requeue 5"])
    assert "the job's time is nearly over (SIGUSR2): saving" in said
    assert "job 5 is queued again; it goes on from step 100" in said
    told = job.told()
    assert told[:1] + told[2:] == ("5.0", "the job is queued again", ExitStatus.STOPPED, 100, 0)
    for times in (1, 2, 3):
        status, first, said = job.turn(signal.SIGUSR2, 100)
        assert (status, first, len(job.asked())) == (ExitStatus.STOPPED, "resume", 1 + times)
    status, _, said = job.turn(signal.SIGUSR2, 100)
    assert status == ExitStatus.FAILED and len(job.asked()) == 4
    assert "queued again 3 times without a step more than 100: not again" in said
    # With steps, it may have as many as it needs.
    assert job.turn(signal.SIGUSR2, 101)[0] == ExitStatus.STOPPED and len(job.asked()) == 5


@pytest.mark.slow
def test_a_turn_that_ends_before_training_is_one_without_a_step(tmp_path):
    job = Turns(tmp_path, 0)
    for times in range(1, 4):
        status, _, said = job.turn(signal.SIGUSR2, 0)
        assert (status, len(job.asked())) == (ExitStatus.STOPPED, times), said
    status, _, said = job.turn(signal.SIGUSR2, 0)
    assert (status, len(job.asked())) == (ExitStatus.FAILED, 3), said


def test_a_second_rank_0_leaves_the_first_alone(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    run = RunFolder.resume(tmp_path)
    first = job.Job("", "a")
    first.write(tmp_path)
    with pytest.raises(
        TemporaryError, match="another process trains into .*: wait for it, stop it"
    ):
        cluster.coordinate(Rank(0, 2, 1, 0.0, "", ""), tmp_path, lambda resume: (0, {}), print)
    assert job.Job.read(tmp_path) == first
    run.close()


def test_a_rank_0_that_is_refused_between_two_rounds_leaves_the_first_alone(tmp_path):
    """Nobody trains then, and nobody has the lock of the folder."""
    first = job.Job("", "a")
    first.write(tmp_path)
    lock = together.only(tmp_path, 0)
    assert lock is not None
    with pytest.raises(TemporaryError, match="another process is rank 0 of"):
        cluster.coordinate(Rank(0, 2, 1, 0.0, "", ""), tmp_path, lambda resume: (0, {}), print)
    assert job.Job.read(tmp_path) == first
    lock.close()


def test_what_a_module_prints_is_no_part_of_a_configuration(tmp_path, monkeypatch):
    """Nor is anything imported that lies in the folder where the job was started."""
    (tmp_path / "noisy.py").write_text(
        "import gymnasium\nprint('hello')\n"
        "def make():\n    print('{')\n    return gymnasium.make('CartPole-v1')\n"
    )
    (tmp_path / "argparse.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["seedbed", "train", "noisy:make", "--agent", "impala"])
    settled = job.settled(tmp_path / "run")
    assert settled["env"]["factory"] == "noisy:make"

    def killed(*_: Any, **__: Any) -> subprocess.Popen[bytes]:
        code = "import os; os.kill(os.getpid(), 9)"
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)

    monkeypatch.setattr(job, "start_module", killed)
    with pytest.raises(SystemExit) as ended:
        job.settled(tmp_path / "run")
    assert ended.value.code == ExitStatus.TRY_AGAIN


@pytest.mark.slow
def test_a_stop_is_no_turn(tmp_path):
    job = Turns(tmp_path, 0)
    status, _, said = job.turn(signal.SIGTERM, 100)
    assert (status, said, job.asked()) == (ExitStatus.STOPPED, "", [])


@pytest.mark.quick("1")
@pytest.mark.parametrize("answer", [1, 9])
def test_without_a_scheduler_that_agrees_the_script_is_told_to_try_again(tmp_path, answer):
    job = Turns(tmp_path, answer)
    status, _, said = job.turn(signal.SIGUSR2, 5)
    assert status == ExitStatus.TRY_AGAIN and "status 75 tells the script to" in said
    assert ("scontrol requeue 5: no" in said) == (answer == 1)
    if answer == 1:
        # A host that ends meanwhile ends with this, and srun returns the greatest status of all ranks.
        assert json.loads(job.meanwhile.read_text())["status"] == ExitStatus.TRY_AGAIN


HOST = """
import sys
from pathlib import Path
from seedbed.launch import cluster, joining
from seedbed.exit_status import TemporaryError, status_of
from seedbed.launch.ranks import Rank
from seedbed.scheduler import obey_scheduler

obey_scheduler()
cluster._LOOK_S = 0.05

def serve(options, tell, stop):
    print("serving", flush=True)
    if sys.argv[3] == "let go":
        return "the run has ended"
    raise TemporaryError("nobody has come")

if sys.argv[3]:
    joining.serve = serve
rank = Rank(1, 2, 1, 1.0, "5", sys.argv[2])
try:
    sys.exit(cluster.host(rank, Path(sys.argv[1]), False, cluster.say))
except TemporaryError as error:
    sys.exit(status_of(error))
"""


@pytest.mark.quick("5.0")
@pytest.mark.parametrize("start", ["5.0", ""])
def test_a_host_ends_with_rank_0_of_its_own_start_of_the_job(tmp_path, start):
    """Also if the run has never begun; the notice that time is nearly over is not for it.

    Where the launcher does not tell starts apart, what is there at the host's own start is of an earlier one.
    """
    job.Job("4.0" if start else "", "a", "the run was stopped", 143).write(tmp_path)
    python = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        [sys.executable, "-c", HOST, str(tmp_path), start, ""],
        env=os.environ | {"PYTHONPATH": python}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline().startswith("rank 1: waiting for the run")
    process.send_signal(signal.SIGUSR2)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    job.Job(start, "b", "rank 0 has failed", 1).write(tmp_path)
    wait_for(lambda: process.poll() is not None)
    assert process.returncode == ExitStatus.FAILED
    assert process.stderr.read() == "rank 1 ended: rank 0 has failed\n"
    process.stderr.close()


@pytest.mark.quick("stopped later")
@pytest.mark.parametrize(
    ("serve", "former", "later", "status"),
    [
        ("let go", None, ("the run was stopped", 143), 143),
        ("let go", None, ("the run has ended", 0), 0),
        ("alone", ("the run has ended", 0), None, 0),
        ("alone", ("the run was stopped", 143), None, 75),
    ],
    ids=["stopped later", "ended later", "ended before", "stopped before"],
)
def test_a_host_ends_as_the_run_has_ended(tmp_path, serve, former, later, status):
    """Rank 0 tells how, after it has let its hosts go; or before this host began."""
    if former is not None:
        job.Job("", "a", *former).write(tmp_path)
    python = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        [sys.executable, "-c", HOST, str(tmp_path), "", serve],
        env=os.environ | {"PYTHONPATH": python}, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == b"serving\n"
    process.stdout.close()
    if later is not None:
        job.Job("", "b", *later).write(tmp_path)
    assert process.wait(60) == status
