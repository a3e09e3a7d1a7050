"""The documentation builds, links lead somewhere, code runs, and nothing public lacks a sentence."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import yaml
from sphinx.cmd.build import build_main

import generate
import seedbed.types
from described import AGENTS, ENVIRONMENTS, SECTIONS, undescribed
from documented import ROOT, blocks, python_blocks, run_page
from seedbed import cli
from seedbed.actors import command as actor_command
from seedbed.cloning import command as clone_command
from seedbed.config import flags, resolve, settle
from seedbed.exporting import extra
from seedbed.launch import joining, key
from seedbed.plan import command as plan_command
from seedbed.plan.hosts import read_hosts, require_fit
from seedbed.play import command as play_command
from seedbed.run import bucket
from seedbed.tuning import command as tune_command
from seedbed.types import SeedbedError
from seedbed.viewer import evaluate, report

SOURCE = ROOT / "src" / "seedbed"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*DOCS, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
RUN = [page for page in PAGES if python_blocks(page)]
# Commands name what a reader has: a folder of a run, a module, an address.
PLACEHOLDERS = (
    "my_module:MyTask",
    "my_package:make_env",
    "my_package:MyAgent",
    "mountain_car:Car",
    "q_learning:QLearning",
)


DECLARING = {
    "evaluate": evaluate,
    "key": key,
    "actor": actor_command,
    "host": joining,
    "report": report,
    "export": extra,
    "play": play_command,
}

# The site


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path, capsys):
    """And takes no script, style, font or picture from elsewhere, so that it works from file://."""
    built = tmp_path / "site"
    # In this process, which has imported JAX already.
    status = build_main(["-n", "-W", "--keep-going", "-q", str(ROOT / "docs"), str(built)])
    assert status == 0, capsys.readouterr().err
    loading = re.compile(
        r'<(?:script|link|img|iframe|source|object)\b[^>]*?(?:src|href|data)="([^"]*)'
    )
    pages = sorted(built.rglob("*.html"))
    assert len(pages) > len(DOCS)
    for page in pages:
        elsewhere = [
            url for url in loading.findall(page.read_text()) if re.match(r"(\w+:)?//", url)
        ]
        assert not elsewhere, (page, elsewhere)
    for style in built.rglob("*.css"):
        assert not re.search(r"(url\(\s*['\"]?|@import\s+['\"])(\w+:)?//", style.read_text()), style
    # Search reads its index as a script, because a page from file:// may fetch nothing.
    assert "vectorize" in (built / "searchindex.js").read_text()
    assert "searchindex.js" in (built / "search.html").read_text()
    # Where a server has the pages, results show text of them.
    assert "SHOW_SEARCH_SUMMARY: true" in (built / "_static/documentation_options.js").read_text()
    # The notebook is not a page; the link to it leads to a copy.
    (copied,) = re.findall(r'href="(_downloads/[^"]*)"', (built / "quickstart.html").read_text())
    assert (built / copied).read_bytes() == (ROOT / "examples/quickstart.ipynb").read_bytes()


def slug(heading: str) -> str:
    """Returns the anchor of a heading, as GitHub and MyST make it."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page as it is, which GitHub shows too: without what the site puts in."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"(?:\]\(|(?:href|src)=\")([^)\s\"]+)(?:\s+\"[^\"]*\")?[)\"]", text):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {target}"


def test_functions_that_pages_name_are_there():
    named = {
        (path, name)
        for page in DOCS
        for path, name in re.findall(r"`([\w/]+\.py):(\w+)`", page.read_text())
    }
    assert len(named) > 30
    for path, name in named:
        tree = ast.parse((SOURCE / path).read_text())
        kinds = (ast.FunctionDef, ast.ClassDef)
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, kinds)}, (
            path,
            name,
        )


# Code


def test_code_of_pages_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with jax.numpy_rank_promotion("allow"):
        wrong = [text for page in RUN for text in run_page(page, "fast")]
    assert not wrong
    quick = [block for page in RUN for block in python_blocks(page) if not block.slow]
    assert sum("not run" not in block.marks for block in quick) >= 6


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_slow_code_of_pages_runs(tmp_path, page):
    """In a process without what the tests set up for themselves."""
    ours = ("XLA_FLAGS", "JAX_NUMPY_RANK_PROMOTION")
    paths = [ROOT / "src", ROOT / "tests", ROOT / "examples"]
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    command = [sys.executable, str(ROOT / "tests" / "documented.py"), "all", str(page)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def commands() -> list[tuple[Path, tuple[str, ...]]]:
    """Returns the folder and the words of each `seedbed` and `make` command in a block of a page, each once.

    A page begins in the repository, and `cd` counts. Commands of results that differ by seeds are one.
    """
    found = set()
    for page in PAGES:
        folder = ROOT
        for block in blocks(page):
            if block.language == "sh":
                for line in block.code.splitlines():
                    words = shlex.split(re.sub(r"--seed \d+", "--seed 0", line), comments=True)
                    if words and words[0] == "cd":
                        folder = folder / words[1]
                    if words and words[0] in ("seedbed", "make"):
                        found.add((folder, tuple(words)))
    return sorted(found)


def parsed(words: tuple[str, ...]) -> None:
    """Understands a command as the program would, but does nothing; raises an error of the user's."""
    if words[0] == "make":
        targets = (ROOT / "Makefile").read_text()
        assert all(f"\n{target}:" in targets for target in words[1:]), words
        return
    name, arguments = words[1], list(words[2:])
    if name == "train":
        given = flags.split_train_arguments(arguments)
        asked = given.request
        if asked.what and not asked.resume and asked.what not in PLACEHOLDERS:
            agent = None if asked.agent in PLACEHOLDERS else asked.agent
            config = resolve.train_config(asked.what, agent, asked.env)
            if asked.runtime:
                config = settle.in_runtime(config, asked.runtime)
            if given.rest and not given.help:
                flags.override(config, given.rest, show_help=False)
    elif name in DECLARING:
        parser = cli._Parser(prog=name)
        DECLARING[name].declare(parser)
        parser.parse_args(arguments)
    elif name == "clone":
        parser = cli._Parser(prog=name)
        clone_command.declare(parser)
        own, rest = parser.parse_known_args(arguments)
        parsed(("seedbed", "train", own.name, *rest))
    elif name == "plan":
        parser = cli._Parser(prog=name)
        plan_command.declare(parser)
        parsed(("seedbed", "train", *parser.parse_known_args(arguments)[1]))
    elif name == "tune":
        parser = cli._Parser(prog=name)
        tune_command.declare(parser)
        parsed(("seedbed", "train", *parser.parse_known_args(arguments)[1]))
    elif name == "bench":
        assert not arguments or (ROOT / "benchmarks" / f"{arguments[0]}.py").exists(), words
    elif name == "config":
        assert cli.main(["config", *arguments]) == 0, words
    elif name == "check":
        assert len(arguments) == 1, words
    else:
        assert name == "list", words


def test_the_plans_of_the_page_fit_its_machines(tmp_path):
    """The machines are those of the page's file, for each command that takes it."""
    page = ROOT / "docs" / "plan.md"
    hosts = tmp_path / "hosts.toml"
    (hosts_block,) = [block for block in blocks(page) if block.language == "toml"]
    hosts.write_text(hosts_block.code)
    kinds, planned = read_hosts(hosts), 0
    for block in blocks(page):
        for line in block.code.splitlines() if block.language == "sh" else ():
            words = shlex.split(line, comments=True)
            if "--hosts" in words:
                parser = cli._Parser(prog="plan")
                plan_command.declare(parser)
                given = flags.split_train_arguments(parser.parse_known_args(words[2:])[1])
                config = resolve.train_config(given.request.what)
                require_fit(kinds, flags.override(config, given.rest, False).runtime)
                planned += 1
    assert planned == 2


def commands_of_clusters() -> list[tuple[str, ...]]:
    """Returns the commands of the files for schedulers, with words in the place of what a shell fills in."""
    found: list[tuple[str, ...]] = []
    for path in sorted((ROOT / "examples" / "cluster").iterdir()):
        text = path.read_text()
        if path.suffix == ".yaml":
            (container,) = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"]
            found.append(tuple(container["command"]))
        for line in text.splitlines() if path.suffix != ".yaml" else ():
            if "seedbed " in line and not line.startswith("#"):
                line = line[line.index("seedbed ") :].removesuffix(" &")
                line = re.sub(r'"\$\{@:-(.*?)\}"', r"\1", line).replace("$#", "2")
                line = re.sub(r'"\$SLURM_\w+"', "1", line)
                line = line.replace('"$run"', "RUN").replace('"$what"', "pong")
                found.append(tuple(shlex.split(line)))
    return found


def test_commands_of_pages_are_understood(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    # No bucket is asked for what it has.
    monkeypatch.setattr(bucket, "is_address", lambda where: False)
    found = [*commands(), *((ROOT, words) for words in commands_of_clusters())]
    assert len(found) > 40 and len(commands_of_clusters()) == 8
    for folder, words in found:
        monkeypatch.chdir(folder)
        try:
            parsed(words)
        except SeedbedError as error:
            # A package that an environment needs.
            assert re.search("lacks a package|no module 'gymnax'", str(error)), words


def test_benchmarks_that_pages_name_are_there():
    found = [
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"`seedbed bench (\w+)", page.read_text())
    ]
    assert len(found) > 20
    for page, name in found:
        assert (ROOT / "benchmarks" / f"{name}.py").exists(), (page, name)


# What needs a sentence


def test_every_option_has_a_sentence():
    parts = generate.configured()
    assert len(parts) > 20
    for kind, _, left_out in parts.values():
        rows = list(generate.option_rows(kind, left_out))
        assert rows, kind
        for name, _, sentence in rows:
            assert re.match(r"[A-Z0-9].{8}", sentence), (kind.__name__, name, sentence)


def literals(folder: Path) -> set[str]:
    """Returns the keys of dict literals in the files of a folder."""
    return {
        key.value
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    }


def test_every_metric_of_agents_and_tasks_has_a_sentence():
    assert literals(SOURCE / "agents") == set(AGENTS)
    tasks = literals(SOURCE / "envs" / "device")
    rewards = {f"env/{name}" for name in tasks if re.match("reward_|.*_penalty", name)}
    of_targets = literals(SOURCE / "envs" / "device" / "targets") - {"mocap_pos"}
    rewards |= {f"env/{name}" for name in of_targets}
    assert rewards | {"env/solver_error"} == set(ENVIRONMENTS)
    for _, _, described in SECTIONS:
        for name, sentence in described.items():
            assert sentence[0].isupper() and sentence[-1] == "." and len(sentence) > 15, name


def test_what_no_sentence_is_about_is_found():
    assert undescribed(["wall_s", "cluster/steps/learner-3", "loss/mine"]) == {"loss/mine"}


@pytest.mark.parametrize("module", generate.PUBLIC, ids=lambda module: module.__name__)
def test_every_public_name_has_an_entry_with_shapes(module):
    written = generate.api(module)
    for name in generate.public_names(module):
        thing = getattr(module, name)
        assert re.search(rf"\{{py:\w+\}} {module.__name__}\.{name}\b", written), name
        check_entry(thing)


def test_the_fields_of_the_contract_have_a_sentence():
    for name in generate.public_names(seedbed.types):
        kind = getattr(seedbed.types, name)
        fields = getattr(kind, "_fields", ()) or getattr(kind, "__dataclass_fields__", ())
        assert not set(fields) - set(generate.sentences(kind)) if fields else kind.__doc__, name


def check_entry(thing) -> None:
    """Checks that a docstring names every parameter, and that each field has a shape, a type or a unit."""
    text = generate.docstring(thing)
    assert len(text) > 40, thing
    if not isinstance(thing, type):
        for name in inspect.signature(thing).parameters:
            assert re.search(rf"\b{name}\b", text), (thing.__name__, name)
        assert re.search(r"\[|`\w+`|shape", text), thing.__name__
        return
    said = generate.sentences(thing)
    if not dataclasses.is_dataclass(thing) and not hasattr(thing, "_fields"):
        methods = [each for name, each in vars(thing).items() if not name.startswith("_")]
        assert methods and all(len(generate.docstring(each)) > 40 for each in methods), thing
        return
    fields = getattr(thing, "_fields", None) or [f.name for f in dataclasses.fields(thing)]
    for name in fields:
        assert said.get(name), (thing.__name__, name)
        if generate._kind(thing, name) in ("Array", "np.ndarray"):
            stated = r"\[.*\]|^(bool|int32|float|s$)"
            assert re.search(stated, said[name]), (thing.__name__, name, said[name])


# Errors


def messages() -> str:
    """Returns the texts in the source, with `...` for what is put into them, and a zero byte between."""
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "..." for p in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\0".join(found)


@pytest.mark.slow
def test_troubleshooting_quotes_messages_that_there_are():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| (`+) ?(.*?) ?\1", page, re.MULTILINE)
    assert len(quoted) > 70
    known = messages()
    missing = [
        quote
        for _, quote in quoted
        if not re.search("[^\0]*".join(map(re.escape, quote.strip(".").split("..."))), known)
    ]
    assert not missing
