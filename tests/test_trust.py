"""Code that a run's folder names is imported only if nobody else could have written that folder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import seedbed
from seedbed import api, cli, policy, strict_json
from seedbed.config import resolve
from seedbed.config.presets import PRESETS
from seedbed.config.saved import from_json, saved_config, to_json
from seedbed.envs.device import changes, probes, wrappers
from seedbed.envs.host import registry
from seedbed.envs.host.gym import FactoryEnv, GymEnv
from seedbed.paramserver.job import Job
from seedbed.run.checking import check_agent
from seedbed.run.encoding import decode_shapes, encode_shapes
from seedbed.run.folder import RunFolder
from seedbed.run.options import ParamServerConfig
from seedbed.run.stacking import stacked_spec
from seedbed.run.trust import AGENTS, MOVED, OWN, Trust, Untrusted
from seedbed.streams.credentials import ELSEWHERE
from seedbed.types import SeedbedError, bind
from untrained_run import write_run

CARTPOLE = resolve.train_config("cartpole/impala")
TINY = dataclasses.replace(CARTPOLE.agent, hidden_sizes=(8,))
CODE = """
from pathlib import Path
Path("ran").touch()
import gymnasium
def make():
    return gymnasium.make("CartPole-v1")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run whose environment is made by a module beside it, in the current folder."""
    (tmp_path / "stranger.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    run = write_run(tmp_path / "run", dataclasses.replace(CARTPOLE, agent=TINY))
    change(
        run, lambda config: config.update(env={"kind": "FactoryEnv", "factory": "stranger:make"})
    )
    yield run
    sys.modules.pop("stranger", None)


def change(run: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((run / "config.json").read_text())
    edit(config)
    (run / "config.json").write_text(json.dumps(config))


def foreign(run: Path) -> Path:
    run.chmod(0o777)
    return run


COMMANDS = {
    "evaluate": ["evaluate", "run", "--episodes", "1"],
    "export": ["export", "run", "-o", "policy"],
    "resume": ["train", "--resume", "--run", "run"],
}


@pytest.mark.quick("export", "resume")
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_foreign_run_imports_nothing_and_says_why(run, capsys, command):
    foreign(run)
    assert cli.main(command) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    for part in (
        "run/config.json names the code stranger:make",
        "others can write run",
        "--trust-run",
    ):
        assert part in told
    assert not Path("ran").exists()
    assert not Path("policy").exists()


def test_a_foreign_run_is_not_loaded(run):
    with pytest.raises(Untrusted, match="stranger:make, which is not imported because others can"):
        seedbed.load(foreign(run))
    assert not Path("ran").exists()


@pytest.mark.quick("trusted")
@pytest.mark.parametrize("how", ["own", "trusted"])
def test_code_of_an_own_or_a_trusted_run_is_imported_and_told(run, capsys, how):
    arguments = ["evaluate", "run", "--episodes", "1"]
    if how == "trusted":
        foreign(run)
        arguments.append("--trust-run")
    assert cli.main(arguments) == 0
    told = capsys.readouterr().err
    assert "importing stranger:make, which run/config.json names" in told
    assert Path("ran").exists()


class Outer:
    class Inner:
        pass


def test_classes_that_cannot_be_imported_are_told_with_their_remedy(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    _, trust = Trust.reading(tmp_path, tmp_path / "config.json")
    assert trust.load(f"{__name__}:Outer.Inner") is Outer.Inner
    for name, other in (("__main__:Car", "my_module:Car"), (f"{__name__}:f.<locals>.Car", ":Car")):
        with pytest.raises(SeedbedError, match=f"or of a function: open.*such as .*{other}$"):
            trust.load(name)


def test_who_has_written_a_file_is_told_by_what_was_read(tmp_path):
    """A stranger's folder, in whose place the user's own is afterwards."""
    for name, mode in (("foreign", 0o777), ("own", 0o755)):
        (tmp_path / name / "roles").mkdir(mode, parents=True)
        (tmp_path / name / "roles").chmod(mode)
        for file in ("config.json", "roles/job.json"):
            (tmp_path / name / file).write_text(json.dumps({"of": name}))
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent" / "config.json").write_text(json.dumps({"of": "sent"}))
    (tmp_path / "sent" / ELSEWHERE).touch()
    (tmp_path / "foreign").chmod(0o755)
    run = tmp_path / "run"
    for target, file, reason in (
        ("foreign", "roles/job.json", "others can write .*run/roles "),
        ("own", "config.json", ""),
        ("own", "roles/job.json", ""),
        ("sent", "config.json", "another machine has sent it"),
    ):
        run.symlink_to(tmp_path / target)
        content, trust = Trust.reading(run, run / file)
        assert content == {"of": target}
        run.unlink()
        run.symlink_to(tmp_path / "own")
        with pytest.raises(Untrusted, match=reason) if reason else contextlib.nullcontext():
            trust.require("code:function")
        run.unlink()
    with pytest.raises(Untrusted, match="nobody has looked"):
        Trust(run, run / "config.json").require("code:function")


def test_a_report_shows_a_foreign_run_without_its_code(run, capsys):
    foreign(run)
    assert cli.main(["report", "run", "-o", "page.html"]) == 0
    assert "no episodes of run are shown: run/config.json names the code" in capsys.readouterr().err
    assert "stranger:make" in Path("page.html").read_text()
    assert cli.main(["list", "--runs", "."]) == 0
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "name",
    [
        "stranger:make/impala",
        "cartpole/stranger:Agent",
        "stranger:Task-v0/impala",
        "x/stranger:y/z",
    ],
)
def test_the_name_of_a_foreign_run_imports_nothing(run, name):
    """An export tells the command that trains a run, which begins with its name."""
    before = dataclasses.asdict(CARTPOLE.env)
    change(run, lambda config: config.update(name=name, env={"kind": "GymEnv", **before}))
    assert cli.main(["export", str(foreign(run)), "-o", "policy"]) == 0
    card = Path("policy", "README.md").read_text()
    assert "| command | trained from Python |" in card
    assert cli.main(["report", str(run), "-o", "page.html"]) == 0
    assert cli.main(["list", "--runs", "."]) == 0
    assert not Path("ran").exists()


def test_a_model_card_begins_no_markup_of_a_stranger(run):
    env = {"kind": "GymEnv", **dataclasses.asdict(CARTPOLE.env)}
    name = "<script>`|\n# [x](y) \x1b/impala"
    change(run, lambda config: config.update(name=name, env=env))
    assert cli.main(["export", "run", "-o", "policy"]) == 0
    title = Path("policy", "README.md").read_text().splitlines()[0]
    assert title == r"# &lt;script&gt;\`\|\\x0a# \[x\](y) \\x1b/impala"


@pytest.mark.parametrize("part", ["run", "config.json"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_whoever_else_could_have_written_it_makes_it_foreign(run, part, mode):
    path = run if part == "run" else run / part
    path.chmod(path.stat().st_mode & 0o755 | mode)
    with pytest.raises(Untrusted, match=f"others can write .*{part} "):
        saved_config(RunFolder.read(run))


def test_a_run_of_another_user_is_foreign(run, monkeypatch):
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(Untrusted, match=f"belongs to the user {user}, and you are {user + 1}"):
        saved_config(RunFolder.read(run))


def test_new_runs_are_their_users_own_whatever_the_umask(tmp_path):
    before = os.umask(0o002)
    try:
        folder = RunFolder.create(tmp_path / "run")
        folder.write_config({})
        folder.close()
    finally:
        os.umask(before)
    assert not (folder.path.stat().st_mode | (folder.path / "config.json").stat().st_mode) & 0o022


@pytest.mark.parametrize("name", ["os:system", "builtins:eval", "pathlib:Path"])
def test_an_own_run_makes_no_agent_of_what_is_none(run, name):
    change(run, lambda config: config.update(agent={"class": name}))
    with pytest.raises(SeedbedError, match="names .*, which is no (class|dataclass)"):
        api.restore(run)


def test_nothing_is_imported_from_the_current_folder_before_somebody_names_code(tmp_path):
    """A page of a stranger's folder is written there: what JAX or Rich try to import must not be found."""
    program = "import sys; from seedbed import cli; cli.main(['list']); print(sys.path)"
    found = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(tmp_path) not in found.stdout.splitlines()[-1]


def write_job(run: Path, gradient: Any) -> None:
    host = CARTPOLE.env.make(1, 0)
    host.close()
    Job(GymEnv("CartPole-v1"), bind(TINY, host.spec), host.spec, ParamServerConfig(), ()).write(run)
    path = run / "roles" / "job.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"gradient": gradient}))


def call(name: str, *arguments: Any) -> dict[str, Any]:
    return {"named": name, "of": list(arguments)}


def test_a_job_calls_no_function(run):
    letters = [
        call("builtins:chr", call("builtins:len", {"list": [None] * ord(c)})) for c in "id>ran"
    ]
    text = functools.reduce(lambda a, c: call("operator:add", a, c), letters)
    write_job(run, call("os:system", text))
    for trusted in (False, True):
        with pytest.raises(SeedbedError, match="os:system, which is no class"):
            Job.read(run, trusted=trusted)
    write_job(run, call("subprocess:Popen", {"list": ["touch", "ran"]}))
    with pytest.raises(SeedbedError, match="which is no such NamedTuple"):
        Job.read(run)
    (run / "roles").chmod(0o775)
    with pytest.raises(
        Untrusted, match="subprocess:Popen, which is not imported because others can"
    ):
        Job.read(run)
    assert not Path("ran").exists()


def test_roles_are_told_that_the_user_trusts_the_run(tmp_path):
    from seedbed.paramserver.beginning import roles_of

    host = CARTPOLE.env.make(1, 0)
    host.close()
    job = Job(
        GymEnv("CartPole-v1"), bind(TINY, host.spec), host.spec, ParamServerConfig(), (), True
    )
    roles = [role for kind in roles_of(job, tmp_path, None).values() for role in kind]
    assert roles
    assert all("--trust-run" in role.arguments for role in roles)


def named(data: Any, key: str) -> set[str]:
    if isinstance(data, dict):
        own = {data[key]} if key in data else set()
        return own.union(*(named(child, key) for child in data.values()))
    return set().union(*(named(child, key) for child in data)) if isinstance(data, list) else set()


@pytest.mark.parametrize("preset", PRESETS)
def test_the_table_has_what_presets_are_made_of(preset):
    config = resolve.train_config(preset)
    assert named(to_json(config), "class") <= OWN
    trust = Trust(Path("run"), Path("run/config.json"))
    assert from_json(strict_json.loads(strict_json.dumps(to_json(config))), trust)


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", ["cartpole/gorila", "cartpole/dqn", "half_cheetah/sac", "pong/r2d2"]
)
def test_the_table_has_what_gradients_are_made_of(preset):
    config: Any = resolve.train_config(preset)
    spec = policy.forms_of(config.env).spec
    bound = bind(config.agent, stacked_spec(spec, getattr(config.env, "frame_stack", 1)))
    shapes = encode_shapes(check_agent(bound))
    assert named(shapes, "named") <= OWN
    again = decode_shapes(shapes, Trust(Path("run"), Path("run/roles/job.json")))
    assert jax.tree.structure(again) == jax.tree.structure(check_agent(bound))


@pytest.mark.parametrize("module", [changes, probes, wrappers], ids=lambda each: each.__name__)
def test_the_table_has_the_wrappers_and_the_probes(module):
    there = {
        f"{module.__name__}:{name}"
        for name, kind in vars(module).items()
        if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
    }
    assert there and there <= OWN


def test_the_table_names_what_is_there():
    trust = Trust(Path("run"), Path("run/config.json"))
    assert {trust.load(name).__qualname__ for name in OWN} == {
        name.partition(":")[2] for name in OWN
    }
    assert set(AGENTS.values()) <= OWN


@pytest.mark.parametrize(
    ("env", "code"),
    [
        (GymEnv("CartPole-v1"), ""),
        (GymEnv("nobody-knows-it"), ""),
        (GymEnv("stranger:Task-v0"), "stranger:Task-v0"),
        (GymEnv("GymV21Environment-v0"), "GymV21Environment-v0"),
        (FactoryEnv("stranger:make"), "stranger:make"),
        (resolve.train_config("pong").env, ""),
    ],
)
def test_environments_that_are_code_of_users(env, code):
    assert registry.code_of(env) == code


def test_what_has_moved_is_found(tmp_path):
    trust = Trust(tmp_path, tmp_path / "config.json", given=False)
    for name in MOVED:
        assert trust.load(name) is ParamServerConfig
