"""A search: its space, its trials, and what is left of them when it is killed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from documented import ROOT, blocks
from seedbed import cli
from seedbed.agents.ppo import Ppo
from seedbed.config.configuration import TrainConfig
from seedbed.config.resolve import train_config
from seedbed.envs.device.robots.go1 import Go1Joystick
from seedbed.machine import CORES, usable_cores
from seedbed.run.history import read_history
from seedbed.run.options import FusedConfig
from seedbed.tuning import command, cores
from seedbed.tuning.page import write_page
from seedbed.tuning.space import (
    Choice,
    Range,
    Space,
    applied,
    read_space,
    require_space,
    start_of,
    value_of,
)
from seedbed.tuning.study import Study, opened
from seedbed.types import SeedbedError, StorageError
from waiting import wait_for

CONFIG = train_config("cartpole/ppo")
SPACE: Space = {
    "agent.learning_rate": Range(1e-4, 1e-1, True),
    "agent.epochs": Range(1, 8),
    "agent.hidden_sizes": Choice(([32, 32], [64, 64])),
    "keep_checkpoints": Choice((3, 8)),
}


def written(path: Path, data: object) -> Path:
    file = path / "space.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return file


def test_a_space_is_read_and_put_into_a_configuration(tmp_path):
    given = {
        "agent.learning-rate": {"low": 1e-4, "high": 1e-1, "log": True},
        "agent.epochs": {"low": 1, "high": 8},
        "agent.hidden_sizes": [[32, 32], [64, 64]],
        "keep_checkpoints": [3, 8],
    }
    space = read_space(written(tmp_path, given))
    assert space == SPACE
    require_space(CONFIG, space)
    point = {"agent.learning_rate": 0.01, "agent.hidden_sizes": [32, 32], "envs": 8}
    found = applied(CONFIG, point)
    assert found.agent == dataclasses.replace(
        CONFIG.agent, learning_rate=0.01, hidden_sizes=(32, 32)
    )  # type: ignore[type-var]
    assert found.runtime.envs == 8  # type: ignore[attr-defined]
    start = start_of(CONFIG, {"agent.learning_rate": SPACE["agent.learning_rate"]})
    assert start == {"agent.learning_rate": CONFIG.agent.learning_rate}  # type: ignore[attr-defined]
    assert start_of(CONFIG, {"agent.learning_rate": Range(0.5, 0.6)}) is None
    # What the space writes in another way is the same value.
    whole = dataclasses.replace(CONFIG, agent=dataclasses.replace(CONFIG.agent, clip=1.0))  # type: ignore[type-var]
    assert start_of(whole, {"agent.clip": Choice((10, 1))}) == {"agent.clip": "1"}


def test_options_of_an_option_may_vary():
    """The weights of a robot's reward are what is most often searched."""
    config = TrainConfig(Go1Joystick(), Ppo(), FusedConfig())
    name = "env.scales.feet_clearance"
    space = {name: Range(-4.0, -0.5), "env.action_scale": Range(0.1, 1.0)}
    require_space(config, space)
    found = applied(config, {name: -3.0, "env.action_scale": 0.3}).env
    assert (found.scales.feet_clearance, found.action_scale) == (-3.0, 0.3)
    assert found.scales.orientation == Go1Joystick().scales.orientation
    assert start_of(config, space)[name] == Go1Joystick().scales.feet_clearance
    with pytest.raises(SeedbedError, match="feet_clearence"):
        applied(config, {"env.scales.feet_clearence": -3.0})


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ("{", "space.json is not JSON"),
        ({}, "names no options"),
        ({"agent.clip": 0.2}, r"agent.clip is 0.2: give \{"),
        ({"agent.clip": [0.2]}, r"agent.clip is \[0.2\]: give"),
        ({"agent.clip": {"low": 1, "high": 1}}, "from 1 to 1 is no range of numbers"),
        ({"agent.clip": {"low": 0, "high": 1, "log": True}}, "a low bound above 0"),
        ({"agent.clip": {"low": 0, "high": 1, "lgo": True}}, "a range has no option 'lgo'"),
        ({"agent.learning_rat": [1, 2]}, "learning_rat.*did you mean learning_rate"),
        ({"env.gravity": [1, 2]}, "gravity"),
        ({"learning_rate": [1, 2]}, "'learning_rate'; did you mean agent.learning_rate"),
        ({"agent.clip": {"low": -2, "high": -1}}, "agent.clip=-2 of the space: Ppo.clip is -2"),
        ({"steps": [0, -1]}, "steps"),
        ({"agent.clip": {"low": 1, "high": 3}}, "whole numbers to agent.clip.*write 1.0 and 3.0"),
        ({"agent.epochs": {"low": 1.0, "high": 8.0}}, "real numbers to agent.epochs, which is"),
    ],
)
def test_a_space_that_cannot_be_is_refused_in_one_line(tmp_path, data, complaint):
    with pytest.raises(SeedbedError, match=complaint) as error:
        require_space(CONFIG, read_space(written(tmp_path, data)))
    assert "\n" not in str(error.value)


def test_trials_do_not_measure_the_machine(tmp_path):
    space = {"actors": ["auto", 2], "agent.learning_rate": [1e-3, 1e-4]}
    with pytest.raises(SeedbedError, match="trials share the machine"):
        require_space(train_config("cartpole/impala"), read_space(written(tmp_path, space)))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["cartpole/ppo"], "--space"),
        (["--space", "F"], "name what to tune first"),
        (["cartpole/ppo", "--space", "F", "--trials", "0"], "--trials is 0"),
        (["cartpole/ppo", "--space", "F", "--run", "r"], "leave out --run"),
        (["cartpole/impala", "--space", "F", "--actors", "auto"], "trials share the machine"),
        (["cartpole/ppo", "--space", "F", "--agent.clop", "1"], "clop"),
        (["cartpole/ppo", "--space", "no.json"], "no.json cannot be read"),
        (["cartpole/ppo", "--space", "F", "--trial", "4"], "--trial; did you mean --trials?"),
    ],
)
def test_wrong_words_get_one_line(words, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["tune", *words]) in (1, 2)
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_trials_go_on_in_another_search_and_scores_decide(tmp_path):
    study = Study(tmp_path, CONFIG, SPACE)
    first, second = study.next(4), study.next(4)
    assert first is not None and second is not None
    assert json.loads(first.file.read_text())["agent"]["learning_rate"] == pytest.approx(
        3e-4, rel=20
    )
    other = Study(tmp_path, CONFIG, SPACE)
    third = other.next(4)
    assert third is not None and {first.number, second.number, third.number} == {0, 1, 2}
    # As when its process is killed: the lock is all that ends.
    second.release()
    adopted = other.next(4)
    assert adopted is not None and adopted.number == second.number and adopted.run == second.run
    assert not study.report(first, 100, 7.0)
    study.end(first, "COMPLETE", 9.0)
    other.end(adopted, "FAIL", reason="Ppo.batch is <odd>")
    other.end(third, "COMPLETE", 11.0)
    last = study.next(4)
    assert last is not None and study.next(4) is None
    study.report(last, 100, 1.0)
    study.end(last, "PRUNED")
    best = study.best()
    assert best is not None and best.number == third.number
    assert study.values_of(best).keys() == SPACE.keys()
    write_page(study, tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text()
    assert "seedbed train cartpole/ppo" in page and "&lt;odd&gt;" in page and "given up" in page
    assert page.count("<circle") == 3 * len(SPACE)
    with pytest.raises(SeedbedError, match="has a search of another space: give"):
        Study(tmp_path, CONFIG, {"keep_checkpoints": SPACE["keep_checkpoints"]})


def test_a_trial_that_ends_while_another_search_looks_is_not_begun_again(tmp_path, monkeypatch):
    study, other = Study(tmp_path, CONFIG, SPACE), Study(tmp_path, CONFIG, SPACE)
    first = study.next(1)
    assert first is not None
    listed, looked = other.trials("RUNNING"), other.trials
    study.end(first, "COMPLETE", 9.0)
    answers = iter([listed])
    monkeypatch.setattr(other, "trials", lambda *states: next(answers, None) or looked(*states))
    assert other.next(1) is None and not other._mine


def test_a_first_trial_that_still_runs_has_not_failed(tmp_path):
    study = Study(tmp_path, CONFIG, SPACE)
    first, *others = (study.next(9) for _ in range(4))
    for trial in others:
        study.end(trial, "FAIL", reason="odd")
    with pytest.raises(SeedbedError, match="the first 4 trials failed, the last with: odd"):
        study.end(first, "FAIL", reason="diverged")


def test_new_searches_are_their_users_own_whatever_the_umask(tmp_path):
    before = os.umask(0o002)
    try:
        trial = Study(tmp_path / "study", CONFIG, SPACE).next(1)
    finally:
        os.umask(before)
    assert trial is not None
    for path in (trial.file, *list(trial.file.parents)[:2]):
        assert not path.stat().st_mode & 0o022


@pytest.mark.parametrize(
    ("dimension", "stored", "value"),
    [
        (Range(0.9, 0.99999), 0.999964, 0.99996),
        (Range(0.9, 0.99999), 0.9999899999, 0.99999),
        (Range(0.99994, 0.99996), 0.9999412345, 0.99994123),
        (Range(0.0, 1.0), 0.123456, 0.1235),
        (Range(0.0, 1000.0), 0.000123456, 0.0001235),
        (Range(-1.0, 1.0), 0.0, 0.0),
        (Range(0.00001, 0.099999, True), 0.0999989, 0.099999),
        (Range(1, 8), 3, 3),
    ],
)
def test_values_have_few_digits_and_stay_within_their_bounds(dimension, stored, value):
    assert value_of(dimension, stored) == value


def test_trials_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: {1, 2, 5, 7})
    monkeypatch.setattr(cores, "usable_cores", lambda: 3.0)  # a container's quota
    assert cores.shares(2) == [({1, 5}, 1.5), ({2, 7}, 1.5)]
    assert cores.shares(5) == [({core}, 1.0) for core in (1, 2, 5, 7, 1)]


def test_a_share_is_of_what_runs_within_it_only():
    before, (share, _) = usable_cores(), cores.shares(2)
    whole = os.sched_getaffinity(0)
    with cores.within(share):
        assert os.sched_getaffinity(0) == share.cores
        assert usable_cores() == min(len(share.cores), share.size)
        assert float(os.environ[CORES]) == share.size
    assert usable_cores() == before and os.sched_getaffinity(0) == whole and CORES not in os.environ


def test_sizes_of_a_trial_follow_from_its_own_options(tmp_path, monkeypatch):
    """Half the batch of a synchronous agent needs half the environments."""
    monkeypatch.setenv(CORES, "1")
    found = options("Pendulum-v1", "--agent", "ppo")
    space: Space = {"agent.batch": Choice((found.config.agent.batch // 2,))}  # type: ignore[attr-defined]
    require_space(opened(found.config, found.plain), space)
    study = Study(tmp_path, found.config, space, found.plain, cores.Share(size=1.0))
    trial = study.next(9)
    assert trial is not None, [record.user_attrs for record in study.trials()]
    asked = json.loads(trial.file.read_text())
    whole: object = found.config.runtime
    sizes = [
        each["actors"] * each["envs_per_actor"]
        for each in (asked["central"], dataclasses.asdict(whole))  # type: ignore[call-overload]
    ]
    assert 2 * sizes[0] == sizes[1]
    assert asked["central"]["evaluate_every"] == found.config.runtime.steps // 8


def test_evaluations_are_no_rarer_than_a_rule_that_waits_for_them():
    found = options("cartpole/ppo", "--until-stale", "20000", "--evaluate-every", "10000")
    assert found.config.runtime.evaluate_every == 10_000
    rare = options("cartpole/gorila", "--until-stale", "50000")
    assert rare.config.runtime.evaluate_every == 50_000


def test_a_journal_goes_on_after_a_full_disk(tmp_path):
    study = Study(tmp_path, CONFIG, SPACE)
    first, second = study.next(9), study.next(9)
    assert first is not None and second is not None
    study.end(first, "COMPLETE", 3.0)
    bounds = resource.getrlimit(resource.RLIMIT_FSIZE)
    room = (tmp_path / "journal.log").stat().st_size + 9  # for a part of a line
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, bounds[1]))
    try:
        with pytest.raises(
            StorageError, match="journal.log cannot be written .File too large.: make room"
        ):
            study.end(second, "COMPLETE", 4.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, bounds)
    text = (tmp_path / "journal.log").read_text()
    assert text.endswith("\n")
    # So may one be that an earlier version has left, or a machine that lost its power.
    (tmp_path / "journal.log").write_text(text + '{"op_code": 5, "tri')
    again = Study(tmp_path, CONFIG, SPACE)
    assert [record.state.name for record in again.trials()] == ["COMPLETE", "RUNNING"]
    third = again.next(9)
    assert third is not None and Study(tmp_path, CONFIG, SPACE).best().value == 3.0


def test_searches_that_begin_together_draw_other_points(tmp_path):
    searches = [Study(tmp_path, CONFIG, SPACE) for _ in range(3)]
    trials = [search.next(9) for search in searches]
    rates = {json.loads(each.file.read_text())["agent"]["learning_rate"] for each in trials if each}
    assert len(rates) == 3


class Process:
    """A process of a trial, as a test would have it."""

    def __init__(self, status: int | None = None, ends: bool = False) -> None:
        self.returncode, self.ends, self.sent = status, ends, list[int]()

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        self.sent.append(number)
        self.returncode = 143 if self.ends else self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            self.sent.append(signal.SIGKILL)

    def wait(self) -> None:
        pass


def job_of(study: Study, monkeypatch, *processes: Process) -> command._Job:
    waiting = iter(processes)
    monkeypatch.setattr(command, "start_module", lambda *given, **more: next(waiting))
    monkeypatch.setattr(command, "_AGAIN_S", -1.0)
    trial = study.next(9)
    assert trial is not None
    return command._Job(trial, cores.WHOLE, True)


def wrote(job: command._Job, *evaluations: tuple[int, float]) -> None:
    job.trial.run.mkdir(exist_ok=True)
    with (job.trial.run / "metrics.jsonl").open("a") as file:
        for step, score in evaluations:
            line = {"evaluation/env_steps": step, "evaluation/episode_return_mean": score}
            file.write(json.dumps(line) + "\n")


def test_trials_that_fall_behind_are_given_up_at_the_same_evaluation(tmp_path, monkeypatch):
    often = dataclasses.replace(CONFIG.runtime, evaluate_every=1000)
    study = Study(tmp_path, dataclasses.replace(CONFIG, runtime=often), SPACE)
    for number in range(6):
        job = job_of(study, monkeypatch, Process(0))
        # Trials evaluate at slightly different steps, and two lines may come at once.
        wrote(job, (1000 + number, 50.0), (2010 + number, 90.0 + number))
        command._look(study, job)
        assert not job.asked and command._end(study, job)
    slow = job_of(study, monkeypatch, process := Process())
    wrote(slow, (1020, 3.0))
    command._look(study, slow)
    command._look(study, slow)
    assert process.sent == [signal.SIGTERM] and slow.pruned
    process.returncode = 143
    assert command._end(study, slow)
    over = job_of(study, monkeypatch, done := Process())
    wrote(over, (study.config.runtime.steps + 5, 3.0))
    command._look(study, over)
    assert not done.sent, "one that has all its steps is not given up"
    done.returncode = 0
    assert command._end(study, over)
    states = [record.state.name for record in study.trials()]
    assert states == ["COMPLETE"] * 6 + ["PRUNED", "COMPLETE"]


def test_a_short_trial_is_over_at_its_own_last_step(tmp_path, monkeypatch):
    often = dataclasses.replace(CONFIG.runtime, evaluate_every=1000)
    space: Space = {"steps": Choice((1000,)), "agent.epochs": Range(1, 8)}
    study = Study(tmp_path, dataclasses.replace(CONFIG, runtime=often), space)
    for number in range(7):
        job = job_of(study, monkeypatch, process := Process(0 if number < 6 else None))
        wrote(job, (1001, 90.0 if number < 6 else 3.0))
        command._look(study, job)
        assert not process.sent and study.steps_of(job.trial) == 1000
        process.returncode = 0
        assert command._end(study, job)


def test_only_new_lines_are_read_until_a_run_writes_its_metrics_anew(tmp_path, monkeypatch):
    read: list[dict[str, float]] = []
    lines = command.whole_lines

    def counted(file):
        for line in lines(file):
            read.append(line[1])
            yield line

    monkeypatch.setattr(command, "whole_lines", counted)
    job = job_of(Study(tmp_path, CONFIG, SPACE), monkeypatch, Process())
    wrote(job, (1000, 1.0), (2000, 2.0))
    assert job.look() == [(1000, 1.0), (2000, 2.0)] and not job.look()
    wrote(job, (3000, 3.0))
    metrics = job.trial.run / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"evaluation/env_steps": ')
    assert job.look() == [(3000, 3.0)] and len(read) == 3
    metrics.rename(metrics.with_suffix(".old"))
    wrote(job, (1000, 1.0), (2500, 4.0))
    assert not job.look() and job.score == 4.0


def test_a_search_that_fails_lets_its_trials_save(tmp_path, monkeypatch):
    process, trials = Process(ends=True), []
    monkeypatch.setattr(command, "start_module", lambda *given, **more: process)

    def next_or_fail(study, most):
        if trials:
            raise SeedbedError("odd")
        trials.append(following(study, most))
        return trials[0]

    following = Study.next
    monkeypatch.setattr(Study, "next", next_or_fail)
    file = written(tmp_path, {"agent.epochs": {"low": 1, "high": 8}})
    asked = options("cartpole/ppo", "--jobs", "2", "--study", str(tmp_path / "study"))
    with pytest.raises(SeedbedError, match="odd"):
        command.tune(asked._replace(space=file), print)
    assert process.sent == [signal.SIGTERM]


def test_a_search_needs_a_folder():
    with pytest.raises(SeedbedError, match="--study is s3://b/x: a search needs a folder"):
        options("cartpole/ppo", "--study", "s3://b/x")


def test_trials_may_have_one_evaluation_at_the_end(tmp_path, monkeypatch):
    study = Study(tmp_path, CONFIG, SPACE)
    assert study.config.runtime.evaluate_every == 0
    job = job_of(study, monkeypatch, Process(0))
    wrote(job, (CONFIG.runtime.steps + 7, 50.0))
    command._look(study, job)
    assert study.trials()[0].intermediate_values == {1: 50.0}


def options(*words: str) -> command.Options:
    parser = argparse.ArgumentParser()
    command.declare(parser)
    return command.options_of(*parser.parse_known_args(["--space", "F", *words]))


def test_a_search_is_the_same_one_with_other_cores(tmp_path, monkeypatch):
    actors = []
    for count in (8.0, 4.0):
        monkeypatch.setattr("seedbed.run.options.usable_cores", lambda count=count: count)
        found = options("cartpole/impala")
        actors.append(found.config.runtime.actors)  # type: ignore[attr-defined]
        Study(tmp_path, found.config, SPACE, found.plain)
    assert actors == [8, 4]
    for other in (["--actors", "8"], ["--from", str(tmp_path)]):
        found = options("cartpole/impala", *other)
        with pytest.raises(SeedbedError, match="has a search of another config: give"):
            Study(tmp_path, found.config, SPACE, found.plain)


@pytest.mark.parametrize("status", [143, 130, 75, -signal.SIGTERM])
def test_a_trial_that_was_asked_to_stop_goes_on_later(tmp_path, monkeypatch, status):
    study = Study(tmp_path, CONFIG, SPACE)
    # Its run was not free at first; a second process is started, and gets the signal.
    job = job_of(study, monkeypatch, Process(75), last := Process())
    assert not job.ended() and not job.ended()
    job.stop()
    job.stop()
    assert last.sent == [signal.SIGTERM]
    last.returncode = status
    assert job.ended() and not command._end(study, job)
    again = Study(tmp_path, CONFIG, SPACE).next(1)
    assert again is not None and again.number == job.trial.number


def test_a_trial_that_was_over_when_its_search_was_killed_keeps_its_score(tmp_path, monkeypatch):
    job = job_of(Study(tmp_path, CONFIG, SPACE), monkeypatch, Process())
    line = {"env_steps": 900, "evaluation/env_steps": 900, "evaluation/episode_return_mean": 7.0}
    job.trial.run.mkdir()
    (job.trial.run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    job.trial.release()
    study = Study(tmp_path, CONFIG, SPACE)
    again = job_of(study, monkeypatch, Process(0))
    assert again.trial.number == job.trial.number
    wrote(again, (900, 8.0))
    command._look(study, again)
    assert command._end(study, again)
    assert [record.value for record in study.trials("COMPLETE")] == [8.0]


def test_a_run_that_never_becomes_free_fails(tmp_path, monkeypatch):
    study = Study(tmp_path, CONFIG, SPACE)
    job = job_of(study, monkeypatch, *(Process(75) for _ in range(99)))
    job.log.write_text("seedbed: no room\n")
    while not job.ended():
        pass
    assert command._end(study, job)
    assert study.trials("FAIL")[0].user_attrs["reason"] == "seedbed: no room"


WORDS = ["tune", "cartpole/ppo", "--steps", "60000", "--evaluate-episodes", "4", "--jobs", "1"]


def search(folder: Path, *words: str) -> subprocess.Popen[str]:
    file = written(folder, {"agent.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}})
    return subprocess.Popen(
        [sys.executable, "-m", "seedbed", *WORDS, "--space", str(file), "--study", "study", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_a_search_that_is_stopped_goes_on_with_the_same_command(tmp_path, sent):
    run = tmp_path / "study" / "trials" / "0000"
    killed = search(tmp_path, "--trials", "2")
    wait_for((run / "metrics.jsonl").exists, killed)
    killed.send_signal(sent)
    said, _ = killed.communicate(timeout=30)
    if sent == signal.SIGTERM:
        assert killed.returncode == 143 and "go on with the same command" in said
    # The trial's process sees that its search is gone: it saves and ends.
    wait_for(lambda: "outcome" in read_history(run)[-1], seconds=30)
    said, _ = (again := search(tmp_path, "--trials", "2")).communicate(timeout=120)
    assert again.returncode == 0, said
    assert "searching in study" in said and "seedbed train cartpole/ppo" in said
    assert (
        "(2 of 2)" in said
        and "--log-every-s" not in said
        and "best: " in said
        and "seedbed train cartpole/ppo" in said
    )
    assert [stint["outcome"] for stint in read_history(run)] == ["interrupted", "finished"]
    assert (tmp_path / "study" / "index.html").is_file()


@pytest.mark.slow
def test_trials_that_all_fail_end_the_search(tmp_path, capsys):
    # Each is fine for the preset's batch, and not for each other's.
    data = {"agent.minibatches": [16, 32], "agent.batch": [8, 24]}
    words = [*WORDS, "--trials", "9", "--space", str(written(tmp_path, data))]
    for number in (3, 4):  # also where they had all failed before
        assert cli.main([*words, "--study", str(tmp_path / "study")]) == 1
        said = capsys.readouterr().err
        assert f"the first {number} trials failed, the last with: " in said


@pytest.mark.slow
def test_what_the_page_shows(tmp_path, monkeypatch, capsys):
    shown = {block.language: block.code for block in blocks(ROOT / "docs" / "tune.md")}
    monkeypatch.chdir(tmp_path)
    written(tmp_path, shown["json"])
    assert cli.main(shown["sh"].split()[1:]) == 0
    said = capsys.readouterr().out
    assert "(3 of 3)" in said and "runs/tune-cartpole-ppo/index.html" in said
