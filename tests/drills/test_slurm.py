"""docs/clusters.md followed on a SLURM of two nodes (`slurm.py`)."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import wait_until
from slurm import Slurm, missing

from seedbed.exit_status import ExitStatus

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clusters.md"
ENDLESS = "cartpole/impala --steps 100000000 --evaluate-every 0 --log-every-s 1"
ONE = "cartpole/impala --learners 2 --actors 1"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=f"SLURM needs {missing()}"),
]


def line(number: int) -> list[str]:
    """Returns the words of one of the page's commands."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return shlex.split(blocks[number].splitlines()[0], comments=True)


def submitted(number: int, what: str, *options: str) -> str:
    """Returns one of the page's commands with other options of sbatch and another thing to train."""
    program, *given, script, _ = line(number)
    names = [option.partition("=")[0] for option in options]
    kept = [option for option in given if option.partition("=")[0] not in names]
    assert program == "sbatch" and (ROOT / script).exists()
    return " ".join([program, *kept, *options, str(ROOT / script), what])


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_job_is_left(slurm) -> Iterator[None]:
    yield
    slurm.call("scancel --user=root")
    wait_until(lambda: not slurm.call("squeue -h").strip(), "an empty queue", 60)


def steps(slurm: Slurm, run: str) -> int:
    path = slurm.work / "runs" / run / "metrics.jsonl"
    lines = path.read_text().splitlines(True) if path.exists() else []
    whole = [each for each in lines if each.endswith("\n")]
    return int(json.loads(whole[-1])["env_steps"]) if whole else 0


def test_the_first_line_of_the_page_trains_cartpole(slurm):
    command = line(0)
    assert command[:3] == ["srun", "--nodes=2", "--ntasks=4"]
    status, said = slurm.run(" ".join(command), 400)
    assert status == ExitStatus.FINISHED, said
    (score,) = re.findall(r"trained with a mean return of ([\d.]+) in evaluation", said)
    print(score, re.findall(r"\n(\d+m?\d*s) \|", said)[-1])
    assert float(score) >= 475, said
    assert said.count("connected to the learner") == 3
    assert len(re.findall(r"rank [123] ended: ", said)) == 3, said


def test_gorila_has_its_roles_on_the_ranks(slurm):
    command = (
        "srun --nodes=2 --ntasks=3 seedbed train cartpole/gorila --cluster slurm --steps 20000"
    )
    status, said = slurm.run(f"{command} --run gorila --evaluate-every 0", 300)
    assert status == ExitStatus.FINISHED, said
    assert "host-1 has joined" in said and "host-2 has joined" in said
    assert len(re.findall(r"rank [12] ended: the run has ended", said)) == 2, said


@pytest.mark.parametrize(
    ("what", "run"),
    [("cartpole/ppo --steps 100000", "fused"), (f"{ONE} --steps 50000", "central")],
)
def test_tasks_of_two_nodes_learn_as_one(slurm, what, run):
    command = f"srun --nodes=2 --ntasks=2 seedbed train {what} --cluster slurm --run {run}"
    status, said = slurm.run(command, 300)
    assert status == ExitStatus.FAILED, said
    assert "name the interface of a network that you trust" in said
    status, said = slurm.run(f"{command} --trusted-interface lo", 300)
    assert status == ExitStatus.FINISHED, said
    assert "training as one learner, divided among 2 processes" in said
    assert "rank 1 ended: the run has ended" in said


def test_a_job_of_one_learner_is_stopped_saved_and_queued_again(slurm):
    job = slurm.submit(
        submitted(
            1,
            f"{ENDLESS} --learners 2 --actors 1 --trusted-interface lo",
            *("--nodes=2", "--ntasks=2", "--time=2", "--signal=USR2@40"),
        )
    )
    asked = f"job {job} is queued again; it goes on from step "
    wait_until(lambda: asked in slurm.said(job), "the first turn's end", 180)
    (step,) = re.findall(rf"{asked}([\d,]+)", slurm.said(job))
    assert int(step.replace(",", "")) > 0
    wait_until(lambda: slurm.begins(job), "the second turn's begin", 60)
    wait_until(lambda: f"going on from step {step}" in slurm.said(job), "the second turn", 90)
    # scancel is one stop of all processes, and saves.
    wait_until(lambda: steps(slurm, f"job-{job}") > int(step.replace(",", "")), "more steps", 90)
    slurm.call(f"scancel {job}")
    wait_until(lambda: "stopped and saved" in slurm.said(job), "the save", 40)


def test_two_jobs_and_an_array_at_once(slurm):
    two = [slurm.submit(submitted(1, ENDLESS, "--nodes=1", "--ntasks=2")) for _ in range(2)]
    array = slurm.submit(submitted(2, "cartpole/ppo --steps 60000", "--array=0-1"))
    runs = [*(f"job-{job}" for job in two), *(f"job-{array}_{task}" for task in range(2))]
    wait_until(lambda: all(steps(slurm, run) > 0 for run in runs), "steps of all", 240)
    seeds = [
        json.loads((slurm.work / "runs" / run / "config.json").read_text())["fused"]["seed"]
        for run in runs[2:]
    ]
    assert seeds == [0, 1]
    # scancel is one stop of all processes, and saves.
    slurm.call(f"scancel {two[0]} {two[1]}")
    for job in two:
        wait_until(lambda job=job: "stopped and saved" in slurm.said(job), "the save", 40)
        assert list((slurm.work / "runs" / f"job-{job}" / "checkpoints").iterdir())


def test_a_job_goes_on_when_its_time_is_over(slurm):
    job = slurm.submit(
        submitted(1, ENDLESS, "--nodes=1", "--ntasks=2", "--time=1", "--signal=USR2@30")
    )
    asked = f"job {job} is queued again; it goes on from step "
    wait_until(lambda: asked in slurm.said(job), "the first turn's end", 120)
    (step,) = re.findall(rf"{asked}([\d,]+)", slurm.said(job))
    assert int(step.replace(",", "")) > 0
    wait_until(lambda: slurm.begins(job), "the second turn's begin", 60)
    wait_until(lambda: f"going on from step {step}" in slurm.said(job), "the second turn", 90)
    wait_until(lambda: slurm.said(job).count(asked) == 2, "the second turn's end", 120)
    second = re.findall(rf"{asked}([\d,]+)", slurm.said(job))[1]
    assert int(second.replace(",", "")) > int(step.replace(",", ""))


def test_a_rank_and_a_node_that_are_lost(slurm):
    job = slurm.submit(submitted(1, ENDLESS, "--nodes=2", "--ntasks=3"))
    run = f"job-{job}"
    wait_until(lambda: steps(slurm, run) > 0, "steps", 120)
    ranks = slurm.processes("bin/seedbed")
    # Rank 0 has started other processes of its own.
    ranks = sorted(ranks, key=lambda each: int(each.environ().get("SLURM_PROCID", "0")))
    ranks[-1].kill()
    wait_until(lambda: "Killed" in slurm.said(job), "srun's word of it", 30)
    before = steps(slurm, run)
    wait_until(lambda: steps(slurm, run) > before + 1000, "more steps", 60)
    slurm.end_node("n1")
    wait_until(lambda: "stopped and saved" in slurm.said(job), "SLURM's SIGTERM", 120)
    wait_until(lambda: slurm.state(job) == "PENDING", "the queue", 60)
    told = json.loads((slurm.work / "runs" / run / "listen" / "job.json").read_text())
    assert (told["ended"], told["status"]) == ("the run was stopped", ExitStatus.STOPPED)
    assert list((slurm.work / "runs" / run / "checkpoints").iterdir())
