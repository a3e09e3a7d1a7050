from __future__ import annotations

import dataclasses
import json
import os
import pty
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import seedbed
from seedbed import cli
from seedbed.agents.dqn import Dqn
from seedbed.agents.impala import Impala
from seedbed.agents.sac import Sac
from seedbed.config import flags, resolve
from seedbed.exit_status import ExitStatus, StoppedEarly
from seedbed.run.options import CentralConfig
from seedbed.types import SeedbedError
from untrained_run import write_run

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "80"}


def seedbed_process(*arguments):
    command = [sys.executable, "-m", "seedbed", *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)


def on_a_terminal(*arguments):
    """Runs the command on a pseudo-terminal; returns the exit status and what the screen got."""
    ours, theirs = pty.openpty()
    environment = {**ENVIRONMENT, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-m", "seedbed", *arguments],
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 65536):
            output += chunk
    except OSError:  # Linux: the other side has closed
        pass
    os.close(ours)
    return process.wait(), output.decode()


def raises(error):
    def function(*arguments, **pieces):
        raise error

    return function


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_help_and_list_as_processes():
    found = seedbed_process("--help")
    assert found.returncode == 0
    assert "train PRESET_OR_ENV" in found.stdout
    found = seedbed_process("list", "--json")
    assert found.returncode == 0
    listed = json.loads(found.stdout)
    assert {"pong/impala", "pong/r2d2", "cartpole/impala"} <= set(listed["presets"])
    assert "impala" in listed["agents"]
    assert {"pong", "cartpole"} <= set(listed["environments"])
    assert listed["defaults"][0]["default agent"] == "impala"


@pytest.mark.slow
def test_list_and_errors_on_a_terminal():
    status, screen = on_a_terminal("list")
    assert status == 0
    assert "\x1b[1m" in screen
    assert "pong/impala" in screen
    assert max(len(line) for line in plain(screen).splitlines()) <= 80
    status, screen = on_a_terminal("train", "pnog")
    assert status == 1
    assert plain(screen).splitlines() == [
        "seedbed: no preset or environment 'pnog'; did you mean pong?"
    ]


def test_neither_the_package_nor_list_loads_jax():
    code = (
        "import sys, seedbed, seedbed.cli; assert seedbed.__version__; seedbed.cli.main(['list']);"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True, capture_output=True)


@pytest.mark.slow
def test_a_thread_in_jax_does_not_abort_a_program_that_has_given_up():
    """Python unwinds such a thread through C++ when it ends, which is an abort."""
    code = """
import sys, threading, time
import jax
import jax.numpy as jnp
from seedbed import cli

def gives_up():
    x, begun = jnp.ones((500, 500)), threading.Event()
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, y: jnp.tanh(y @ x), x))
    work(x)

    def learn():
        while True:
            begun.set()
            work(x)

    threading.Thread(target=learn, daemon=True).start()
    begun.wait()
    time.sleep(0.1)
    return 130

jax.config.update("jax_cpu_enable_async_dispatch", False)
cli.main = gives_up
sys.exit(cli.program())
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["trian"], 2, "unknown command 'trian'; did you mean train?"),
        (["train"], 2, "name what to train first"),
        (["train", "--steps", "5"], 2, "name what to train first"),
        (["train", "pnog"], 1, "did you mean pong?"),
        (["train", "pong", "extra"], 2, "unexpected argument 'extra'"),
        (["train", "pong", "--stepz", "3"], 2, "unknown option --stepz; did you mean --steps?"),
        (["train", "pong", "--env.stickines", "3"], 2, "did you mean --env.stickiness?"),
        (["train", "pong", "--agent.learnin-rate=3"], 2, "did you mean --agent.learning-rate?"),
        (["train", "pong", "--learning-rate", "3"], 2, "did you mean --agent.learning-rate?"),
        (
            ["train", "pong", "--seeds", "2"],
            2,
            "--seeds is an option of another runtime (fused)",
        ),
        (
            ["train", "ant", "--actors", "2"],
            2,
            "--actors is an option of another runtime (central, paramserver)",
        ),
        (
            ["train", "pong", "--runtime", "paramserver", "--learner-devices", "0"],
            2,
            "--learner-devices is an option of another runtime (central)",
        ),
        (
            ["train", "pong/dqn", "--paramserver.actors", "2"],
            2,
            "--paramserver.actors is an option of another runtime (paramserver)",
        ),
        (["train", "pong", "--runtime", "gorila"], 1, "no runtime 'gorila'; did you mean"),
        (["train", "ant", "--runtime", "central"], 1, "it trains with --runtime fused"),
        (["train", "pong", "--runtime", "fused"], 1, "it trains with --runtime central or"),
        (["host", "nowhere", "--give-up-after", "-1"], 1, "--give-up-after is -1.0: it must be"),
        (["train", "pong", "--agent.spec", "3"], 2, "unknown option --agent.spec"),
        (["train", "pong", "--env.game", "breakout"], 2, "unknown option --env.game"),
        (["train", "CartPole-v1", "--env.id", "x"], 2, "CartPole-v1 takes no option 'id'"),
        (["train", "CartPole-v1", "--agent", "sac"], 1, "choose ppo or impala or dqn or r2d2"),
        (["train", "CartPole-v1", "--env.frame-stack", "0", "--run", "r"], 1, "frame_stack is 0"),
        (["train", "pong", "--steps", "many"], 2, "--steps: give a whole number, not 'many'"),
        (["train", "pong", "--max-minutes", "x"], 2, "--max-minutes: give a number, not 'x'"),
        (["train", "pong", "--steps", "2.5e0"], 2, "Error parsing --steps"),
        (["train", "pong", "--steps", "0"], 1, "steps is 0: it must be 1 or more"),
        (["train", "pong", "--run"], 2, "--run needs a value"),
        (["train", "pong", "--resume"], 2, "--resume needs the folder of the run"),
        (["train", "--resume", "--run", "nowhere"], 1, "nowhere is not the folder of a run"),
        (["evaluate"], 2, "the following arguments are required: RUN"),
        (["evaluate", "nowhere"], 1, "nowhere is not the folder of a run"),
        (["evaluate", "nowhere", "--episodes", "x"], 2, "invalid int value: 'x'"),
        (["list", "--jsn"], 2, "unrecognized arguments: --jsn"),
        (["bench", "nosuch"], 2, "no benchmark 'nosuch'; did you mean"),
    ],
)
def test_errors_are_one_line(arguments, status, message, capsys):
    assert cli.main(arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert message in captured.err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--debug"]])
def test_benchmarks_are_listed_and_not_run(arguments, capsys, monkeypatch):
    monkeypatch.setattr(cli.subprocess, "run", raises(AssertionError("it ran one")))
    assert cli.main(["bench", *arguments]) == 0
    listed = capsys.readouterr().out.splitlines()
    folder = Path(__file__).parents[1] / "benchmarks"
    names = {path.stem for path in folder.glob("[!_]*.py")}
    assert {line.split()[0] for line in listed if line[:2] == "  " and line[2] != " "} == names
    assert all(len(line) <= 80 for line in listed)


WORDS = {
    "actor": "nosuch --give-up-after 0.01",
    "host": "nosuch --give-up-after 0.01",
    "export": "nosuch -o x",
    "tune": "nosuch --space nosuch",
    "clone": "nosuch nosuch",
    "list": "--runs nosuch",
}


def test_every_command_understands_debug(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = set(re.findall(r"^  (\w+)", cli.USAGE, re.MULTILINE)) - {"Trains"}
    assert commands > WORDS.keys()
    for command in commands:
        cli.main([command, *WORDS.get(command, "nosuch").split(), "--debug"])
        told = capsys.readouterr().err.splitlines()
        assert not told or "--debug" not in told[-1], command


@pytest.mark.parametrize(("debug", "lines"), [([], 1), (["--debug"], 3)])
def test_tracebacks_only_with_debug(debug, lines, capsys, monkeypatch):
    for error, text in ((ValueError("odd"), "odd"), (SeedbedError("bad\nTraceback: x"), "bad")):
        monkeypatch.setattr("seedbed.config.settle.train_config", raises(error))
        assert cli.main(["train", "pong", *debug]) == 1
        err = capsys.readouterr().err
        assert (len(err.splitlines()) == 1) == (lines == 1)
        assert ("Traceback" in err) == bool(debug)
        assert text in err


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """Replaces training by a fake that records how it was called, and works in `tmp_path`."""
    from seedbed.central import train as central

    calls = []

    def train(*, env, agent, config, run, view, callback, weights):
        calls.append(types.SimpleNamespace(env=env, agent=agent, config=config, run=run))
        view.message("training")
        view.update({"env_steps": config.steps, "wall_s": 1.0})
        (run.path / "metrics.jsonl").write_text("{}\n")
        return {"interrupted": False, "run": str(run.path), "evaluation/episode_return_mean": 18.5}

    monkeypatch.setattr(central, "train", train)
    monkeypatch.chdir(tmp_path)
    return calls


def test_train_overrides_and_resumes(trained, capsys, tmp_path):
    arguments = "train cartpole/impala --run r --steps 2e6 --seed 3 --actors=1 --envs-per-actor 8 "
    arguments += "--agent.learning-rate 3e-4 --central.evaluate-every 0 --env.frame_stack 2"
    assert cli.main(arguments.split()) == 0
    call = trained[0]
    assert call.config.steps == 2_000_000
    assert (call.config.seed, call.config.actors, call.config.envs_per_actor) == (3, 1, 8)
    assert call.config.evaluate_every == 0
    assert call.agent.learning_rate == 3e-4
    assert call.agent.spec is None
    assert call.env.frame_stack == 2
    assert type(call.agent) is type(resolve.train_config("cartpole/impala").agent)
    out = capsys.readouterr().out
    assert (
        "trained with a mean return of 18.50 in evaluation; play it with: seedbed evaluate r" in out
    )
    assert json.loads((tmp_path / "r" / "config.json").read_text())["name"] == "cartpole/impala"

    assert cli.main(["train", "cartpole/impala", "--run", "r"]) == 1
    assert "continue it with --resume" in capsys.readouterr().err
    assert cli.main(["train", "--resume", "--run", "r", "--steps", "3e6"]) == 0
    assert trained[1].agent == call.agent
    assert trained[1].config == dataclasses.replace(call.config, steps=3_000_000)
    assert cli.main(["train", "cartpole/impala", "--resume", "--run", "r"]) == 0
    assert trained[2].config.steps == 3_000_000  # overrides become the run's own
    assert cli.main(["train", "cartpole/impala", "--resume", "--run", "r"]) == 0
    assert cli.main(["train", "--agent", "impala", "--resume", "--run", "r"]) == 0
    capsys.readouterr()
    for other in ("pong", "cartpole --agent my:Agent", "--agent my:Agent"):
        assert cli.main(f"train {other} --resume --run r".split()) == 1
        assert f"r trains cartpole/impala, not {other}" in capsys.readouterr().err
    assert len(trained) == 5


def test_a_refused_resume_changes_nothing(trained, capsys, monkeypatch, tmp_path):
    from seedbed.central import train as central

    arguments = ["train", "cartpole/impala", "--run", "r", "--steps", "10"]
    assert cli.main(arguments) == 0
    before = (tmp_path / "r" / "config.json").read_bytes()
    monkeypatch.setattr(central, "train", raises(SeedbedError("is of another agent")))
    resume = ["train", "--resume", "--run", "r", "--agent.recurrent", "--steps", "20"]
    assert cli.main(resume) == 1
    assert capsys.readouterr().err == "seedbed: is of another agent\n"
    assert (tmp_path / "r" / "config.json").read_bytes() == before

    def train_and_fail(*, run, **pieces):
        (run.checkpoints / "000000000015").mkdir(parents=True)
        raise SeedbedError("no room")

    monkeypatch.setattr(central, "train", train_and_fail)
    assert cli.main(resume) == 1
    saved = json.loads((tmp_path / "r" / "config.json").read_text())
    assert saved["agent"]["recurrent"]  # as the newest checkpoint was trained


def test_modules_are_found_where_the_user_is(trained, monkeypatch, tmp_path):
    (tmp_path / "my_local_agent.py").write_text(
        "from seedbed.agents.impala import Impala\nclass Mine(Impala): pass\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["train", "CartPole-v1", "--run", "r", "--agent", "my_local_agent:Mine"]) == 0
    assert type(trained[0].agent).__name__ == "Mine"
    assert cli.main(["train", "--resume", "--run", "r"]) == 0
    named = ["train", "CartPole-v1", "--agent", "my_local_agent:Mine", "--resume", "--run", "r"]
    assert cli.main(named) == 0


def test_train_names_its_folder_and_says_how_to_go_on(trained, capsys, monkeypatch):
    from seedbed.central import train as central

    monkeypatch.setattr(
        central, "train", lambda **given: {"interrupted": True, "run": str(given["run"].path)}
    )
    assert cli.main(["train", "cartpole/impala"]) == ExitStatus.STOPPED
    out = capsys.readouterr().out
    assert re.search(
        r"go on with: seedbed train --resume --run runs/cartpole-impala-\d{8}-\d{6}", out
    )


def test_actors_are_those_that_the_container_allows_and_stay_so(trained, monkeypatch, tmp_path):
    monkeypatch.setattr("seedbed.run.options.usable_cores", lambda: 2.5)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert cli.main(["train", "cartpole/impala", "--run", "r", "--actors", "0"]) == 0
    assert json.loads((tmp_path / "r" / "config.json").read_text())["central"]["actors"] == 2
    monkeypatch.setattr("seedbed.run.options.usable_cores", lambda: 0.5)
    assert cli.main(["train", "--resume", "--run", "r"]) == 0
    assert trained[1].config.actors == 2
    assert cli.main(["train", "--resume", "--run", "r", "--actors", "0"]) == 0
    assert trained[2].config.actors == 1


def test_environments_of_replay_make_enough_steps_each(monkeypatch):
    """With 64 cores' worth of them, none would end an episode of 1,000 steps."""
    monkeypatch.setattr("seedbed.run.options.usable_cores", lambda: 64)
    config = CentralConfig(steps=500_000, envs_per_actor=8)
    counts = [config.fitted(agent).actors for agent in (Sac(), Dqn(), Impala())]
    assert counts == [12, 12, 64]
    assert dataclasses.replace(config, actors=64).fitted(Sac()).actors == 64
    assert dataclasses.replace(config, steps=1).fitted(Sac()).actors == 1


def test_an_interruption_before_training_says_so(trained, capsys, monkeypatch, tmp_path):
    from seedbed.central import train as central

    nothing = "interrupted before training began: there was nothing to save"
    monkeypatch.setattr(central, "train", raises(StoppedEarly()))
    assert cli.main(["train", "cartpole/impala", "--run", "r"]) == ExitStatus.STOPPED
    captured = capsys.readouterr()
    assert captured.err == f"seedbed: {nothing}\n"
    assert "saved" not in captured.out.replace(nothing, "")
    assert not (tmp_path / "r").exists()


def test_a_failed_start_leaves_no_folder(trained, capsys, monkeypatch, tmp_path):
    from seedbed.central import train as central

    monkeypatch.setattr(central, "train", raises(SeedbedError("no such ROM: install it")))
    assert cli.main(["train", "cartpole/impala", "--run", "r"]) == 1
    assert capsys.readouterr().err == "seedbed: no such ROM: install it\n"
    assert not (tmp_path / "r").exists()


@pytest.fixture
def run_with_checkpoint(tmp_path):
    """A run of CartPole with the checkpoint of an untrained agent."""
    return write_run(tmp_path / "run", resolve.train_config("cartpole/impala"))


@pytest.mark.slow
def test_the_newest_checkpoint_plays_if_it_is_asked_for(tmp_path, monkeypatch, capsys):
    """As where a run was stopped after its last evaluation."""
    from seedbed.run import evaluation

    result = {"episode_return_mean": 1.0, "episode_return_std": 0.0, "episodes": 1}
    monkeypatch.setattr(evaluation, "evaluate", lambda **options: dict(result))
    scores = {500: -10.5, 900: None}
    run = str(write_run(tmp_path / "run", resolve.train_config("cartpole/impala"), scores))
    assert cli.main(["evaluate", run, "--json"]) == 0
    found = capsys.readouterr()
    assert json.loads(found.out)["env_steps"] == 500
    assert "step 500 has the best evaluation; that of step 900 is newer: --newest" in found.err
    assert cli.main(["evaluate", run, "--newest", "--json"]) == 0
    found = capsys.readouterr()
    assert json.loads(found.out)["env_steps"] == 900 and not found.err


def test_evaluate_and_load(run_with_checkpoint, monkeypatch, capsys):
    from seedbed.run import evaluation

    calls = []

    def evaluate(*, env, agent, params, episodes, seed, actor_timeout_s, tell):
        calls.append((env, agent, episodes, seed))
        assert actor_timeout_s == 120.0
        found = evaluation.summary_of(np.array([19.0, 22.0]), np.array([1000, 1401]))
        return found | {"episodes": episodes}

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    run = str(run_with_checkpoint)
    assert cli.main(["evaluate", run, "--episodes", "7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "episode_return_mean": 20.5,
        "episode_return_std": 1.5,
        "episode_return_min": 19.0,
        "episode_return_max": 22.0,
        "episode_length_mean": 1200.5,
        "episodes": 7,
        "env_steps": 640,
    }
    assert calls[0][1].spec is not None
    assert cli.main(["evaluate", run, "--env", "CartPole-v0", "--seed", "5"]) == 0
    told = "return 20.50 ± 1.50 (19.00 to 22.00) over 100 episodes of 1,200 steps\n"
    assert capsys.readouterr().out == told
    assert calls[1][0].id == "CartPole-v0"
    assert cli.main(["evaluate", run, "--env", "acrobot"]) == 1
    assert "does not fit the policy" in capsys.readouterr().err
    assert cli.main(["evaluate", run, "--env", "acrobto"]) == 1
    assert "did you mean acrobot" in capsys.readouterr().err
    assert cli.main(["evaluate", run, "--episodes", "0"]) == 1
    assert "episodes is 0" in capsys.readouterr().err
    policy = seedbed.load(run)
    assert policy.act(np.array([0.0, 0.1, 0.0, 0.1])) in (0, 1)


def test_episodes_are_drawn_before_the_score_and_of_the_same_checkpoint(
    run_with_checkpoint, tmp_path, monkeypatch, capsys
):
    """A run under way may have a better checkpoint after a minute."""
    from seedbed.run import evaluation
    from seedbed.viewer import record

    played = []
    result = {"episode_return_mean": 1.0, "episode_return_std": 0.0, "episodes": 1}
    monkeypatch.setattr(
        evaluation, "evaluate", lambda **options: played.append(options["params"]) or dict(result)
    )
    command = [
        "evaluate",
        str(run_with_checkpoint),
        "--html",
        str(tmp_path / "page.html"),
        "--json",
    ]
    assert cli.main(command) == 1 and not played
    assert "CartPole-v1 has no MuJoCo model to draw" in capsys.readouterr().err
    shown = []
    monkeypatch.setattr(
        record, "show", lambda run, trained, **options: shown.append(trained.params)
    )
    assert cli.main(command) == 0
    assert played[0] is shown[0]


@dataclasses.dataclass(frozen=True)
class Custom:
    """An agent that knows nothing of tyro."""

    spec: object = None
    flag: bool = False
    rate: float = 0.5
    sizes: tuple[int, ...] = (1, 2)


def test_options_of_an_agent_of_ones_own(capsys):
    config = dataclasses.replace(
        resolve.train_config("cartpole/impala"), agent=Custom(), name="cartpole/x"
    )
    changed = flags.override(config, ["--agent.flag", "--agent.sizes", "3", "4"], False)
    assert changed.agent == Custom(flag=True, sizes=(3, 4))
    assert type(changed.agent) is Custom
    with pytest.raises(SystemExit):
        flags.override(config, [], True)
    assert "agent.spec" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "target", "rest"),
    [
        ("pong --steps 5", "pong", ("--steps", "5")),
        ("--steps 5 pong", "pong", ("--steps", "5")),
        ("--seed=5 pong --resume", "pong", ("--seed", "5")),
        ("--agent impala --run d pong", "pong", ()),
        ("pong --learner-devices 0 1", "pong", ("--learner-devices", "0", "1")),
        ("pong --agent.x -3", "pong", ("--agent.x", "-3")),
        ("--resume --run r --inference-devices 0 1", None, ("--inference-devices", "0", "1")),
        ("--inference-devices 0 1 pong", "pong", ("--inference-devices", "0", "1")),
        ("--agent.recurrent pong", "pong", ("--agent.recurrent",)),
        ("--env.no-fire_reset --resume pong", "pong", ("--env.no-fire_reset",)),
        (
            "--agent.optimizer adam --agent.recurrent pnog",
            "pnog",
            ("--agent.optimizer", "adam", "--agent.recurrent"),
        ),
        ("--agent.recurrent 5", None, ("--agent.recurrent", "5")),
        ("--agent.optimizer adam", None, ("--agent.optimizer", "adam")),
    ],
)
def test_splitting_arguments(line, target, rest):
    found = flags.split_train_arguments(line.split())
    assert (found.request.what, found.rest) == (target, rest)
