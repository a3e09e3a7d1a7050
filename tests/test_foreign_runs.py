"""Whatever a folder holds: one line or a page, no waiting, nothing that a terminal or a browser obeys."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from saved import strictly
from seedbed import cli
from seedbed.config import resolve
from seedbed.run import lines
from seedbed.run.lines import read_last_line, read_lines
from seedbed.terminal import tell
from seedbed.viewer import report
from seedbed.viewer.live import PlainLog, make_view
from seedbed.viewer.runs import overview
from untrained_run import write_run

OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal or a browser acts on, but for the end of a line and the tabulator."""
HOSTILE = [
    *(
        None,
        True,
        0,
        -1,
        1e308,
        10**18,
        10**59,
        1.5,
        "",
        "text",
        "NaN",
        "Infinity",
        "[/]",
        "\ud800",
    ),
    *("\x1b[31mred\x07", "\u202eevil", "</script><script>", [], {}, [1, "a", None], [[], [[]]]),
    *({"class": "os:system"}, {"class": "builtins:eval", "x": 1}, "os:system"),
]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the device that never trained, with metrics, a history and two checkpoints."""
    config = resolve.train_config("cartpole/ppo")
    run = write_run(tmp_path_factory.mktemp("real") / "run", config, {640: 1.0, 1280: 0.5})
    line: dict[str, Any] = {
        "episode_return_mean": 9.5,
        "rss_mb": 300.0,
        "lag_max": 2,
        "time/waiting": 0.5,
    }
    line |= {f"time/{stage}": 0.1 for stage in ("environment", "inference", "learning")}
    evaluated = {"evaluation/env_steps": 640, "evaluation/episode_return_mean": 12.0}
    text = "".join(
        json.dumps(
            {"env_steps": 320 * n, "wall_s": n * 1.5, **line, **(evaluated if n > 2 else {})}
        )
        + "\n"
        for n in range(1, 5)
    )
    (run / "metrics.jsonl").write_text(text)
    stint = {
        "env_steps": 0,
        "begun": 1.7e9,
        "ended": 1.7e9 + 60,
        "outcome": "finished",
        "failure": "x",
    }
    stint |= {
        "machine": {"cpu": "C", "cores": 2.0, "memory_bytes": 8e9, "system": "L", "python": "3"}
    }
    stint["machine"]["devices"] = {"cpu": 1}
    (run / "history.json").write_text(json.dumps([{**stint, "versions": {"jax": "1"}}]))
    return run


@pytest.fixture
def place(real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a run `whole` and one `broken`, which is to be broken."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "_play", lambda run, episodes: report.Player("<p>played</p>"))
    shutil.copytree(real, tmp_path / "whole")
    shutil.copytree(real, tmp_path / "broken")
    return tmp_path


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replaced(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


BREAKAGES: dict[str, Callable[[Path], object]] = {
    "pipe": pipe,
    "loop": loop,
    "device": device,
    "folder": folder,
    "missing": Path.unlink,
    "empty": replaced(""),
    "brackets": replaced("[" * 100_000 + "]" * 100_000 + "\n"),
    "digits": replaced('{"env_steps": ' + "9" * 400 + "}\n"),
    "texts": replaced(
        '{"env_steps": "many", "wall_s": "long", "rss_mb": [], "evaluation/seeds": 3}\n'
    ),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 10),
}


def require_page(path: Path) -> str:
    page = path.read_text(encoding="utf-8")
    assert not OBEYED.search(page)
    data = re.findall(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert data
    assert all(strictly(each) is not None for each in data)
    return page


def run_command(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    """Runs a command and checks what holds for all: one line of error, and nothing that is obeyed."""
    status = cli.main(list(arguments))
    out, err = capsys.readouterr()
    assert not OBEYED.search(out + err)
    assert "a bug" not in err
    assert "Traceback" not in err
    if status:
        assert err.splitlines()[-1].startswith("seedbed: ")
    return status, out, err


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "history.json", ".lock"])
@pytest.mark.parametrize("how", BREAKAGES)
def test_one_damaged_run_hides_no_other(place, capsys, name, how):
    (place / "broken" / name).touch()
    BREAKAGES[how](place / "broken" / name)
    status, out, _ = run_command(capsys, "list", "--runs", ".")
    assert status == 0
    assert "whole" in out
    assert ("broken" in out) == (how not in ("missing", "folder") or name != "config.json")
    status, _, err = run_command(capsys, "report", "broken", "whole", "-o", "page.html")
    assert status == 0
    page = require_page(place / "page.html")
    assert "whole" in page
    if name == "config.json":
        assert err.startswith("left out: broken")
        assert "Left out: broken" in page
        assert run_command(capsys, "report", "broken")[0] == 1


NAMES = {
    "markup": "a[/]b[bold]",
    "escape": "x\x1b[31m\x1b]0;title\x07",
    "direction": "gpj.\u202eexe",
    "line": "two\nlines",
    "emoji": "pong:100:a",
    "bytes": "raw\udcff\udc80",
    "html": "<img src=x onerror=alert(1)>",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_names_of_folders_are_shown_and_not_obeyed(place, capsys, name):
    (place / name).parent.mkdir(exist_ok=True)
    (place / "broken").rename(place / name)
    assert run_command(capsys, "list", "--runs", ".")[0] == 0
    listed = run_command(capsys, "list", "--runs", ".", "--json")[1]
    rows = strictly(listed)
    assert len(rows) == 2
    assert any(Path(row["run"]).absolute() == (place / name).absolute() for row in rows)
    assert run_command(capsys, "report", name, "whole", "-o", "page.html")[0] == 0
    page = require_page(place / "page.html")
    assert "<img" not in page
    shutil.rmtree(place / name / "checkpoints")
    assert run_command(capsys, "evaluate", name)[0] == 1


def test_values_are_shown_and_not_obeyed(place, capsys):
    path = place / "broken" / "config.json"
    config = json.loads(path.read_text())
    config["name"] = "\x1b[31m[bold]<script>\u202e/ppo"
    config["agent"]["\x1b[0m"] = "\x1b]0;x\x07" + "long" * 1000
    config["agent"]["gamma"] = float("nan")
    path.write_text(json.dumps(config))
    assert run_command(capsys, "list", "--runs", ".")[0] == 0
    assert run_command(capsys, "report", "broken", "whole", "-o", "page.html")[0] == 0
    page = require_page(place / "page.html")
    assert r"\x1b[31m[bold]&lt;script&gt;\u202e" in page
    assert "longlong" in page
    assert "long" * 200 not in page


def test_texts_from_elsewhere_are_shown_and_not_obeyed(capsys, tmp_path):
    tell("a\x1b[31mb\nc\u202e", sys.stdout)
    view = make_view(10, "t\x1b", "r\x07")
    assert isinstance(view, PlainLog)
    with view:
        pass
    assert (
        capsys.readouterr().out == "a\\x1b[31mb\nc\\u202e\ntraining t\\x1b for 10 steps in r\\x07\n"
    )


def test_many_lines_are_read_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MOST_LINES", 100)
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        for n in range(5_000):
            line = {
                "env_steps": n,
                "evaluation/env_steps": n // 500 * 500,
                "text": "x",
                "y": float(n),
            }
            file.write(json.dumps(line) + "\n")
    found = read_lines(path)
    assert 50 <= len(found) <= 201
    assert found[0]["env_steps"] == 0
    assert (
        found[-1]
        == read_last_line(path)
        == {"env_steps": 4999, "evaluation/env_steps": 4500, "y": 4999.0}
    )
    assert {line["evaluation/env_steps"] for line in found} == set(range(0, 5000, 500))
    steps = [line["env_steps"] for line in found]
    assert steps == sorted(steps)
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 200


def test_lines_that_are_all_evaluations_are_bounded_too(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MOST_LINES", 50)
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(
            json.dumps({"env_steps": n, "evaluation/env_steps": n}) + "\n" for n in range(2_000)
        )
    )
    assert len(read_lines(path)) <= 101
    assert read_lines(path)[-1]["env_steps"] == 1999


def test_long_lines_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    long = json.dumps({"env_steps": 2, "x": "y" * (3 << 20)})
    path.write_text('{"env_steps": 1}\n' + long + '\n{"env_steps": 3}\n' + "z" * (2 << 20))
    assert [line["env_steps"] for line in read_lines(path)] == [1, 3]


def test_a_large_file_is_told_before_it_is_read(place, capsys, monkeypatch):
    monkeypatch.setattr(report, "_MUCH_BYTES", 10)
    assert run_command(capsys, "report", "whole")[2].startswith(
        "reading 0 MB of metrics of whole\n"
    )


def mutated(rng: random.Random, value: Any) -> Any:
    """Replaces, removes or adds one value somewhere in JSON."""

    def places(node: Any) -> list[tuple[Any, Any]]:
        keys = (
            list(node)
            if isinstance(node, dict)
            else range(len(node))
            if isinstance(node, list)
            else []
        )
        return [pair for key in keys for pair in [(node, key), *places(node[key])]]

    node, key = rng.choice(places(value))
    if isinstance(node, dict) and rng.random() < 0.3:
        if rng.random() < 0.5:
            del node[key]
        else:
            node[rng.choice(["extra", "\x1b]0;x\x07", "class", "factory"])] = rng.choice(HOSTILE)
    else:
        node[key] = rng.choice(HOSTILE)
    return value


def damage(rng: random.Random, run: Path) -> None:
    named = ("config.json", "metrics.jsonl", "history.json")
    manifests = sorted(run.glob("checkpoints/*/manifest.json"))
    path = rng.choice([*(run / name for name in named), *manifests])
    if rng.random() < 0.3:
        content = bytearray(path.read_bytes())
        for _ in range(rng.choice([1, 3, 20])):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(bytes(content))
    elif path.suffix == ".json":
        path.write_text(json.dumps(mutated(rng, json.loads(path.read_text()))))
    else:
        texts = path.read_text().splitlines()
        at = rng.randrange(len(texts))
        texts[at] = json.dumps(mutated(rng, json.loads(texts[at])))
        path.write_text("\n".join(texts) + "\n")


@pytest.mark.parametrize("seed", range(4))
def test_mutated_runs_end_in_a_page_or_in_one_line(place, real, capsys, monkeypatch, seed):
    rng, ran = random.Random(seed), []
    monkeypatch.setattr(os, "system", lambda *given: ran.append(given))
    for _ in range(25):
        shutil.rmtree(place / "broken")
        shutil.copytree(real, place / "broken")
        damage(rng, place / "broken")
        assert any(row["run"].endswith("whole") and "env_steps" in row for row in overview(place))
        assert run_command(capsys, "list", "--runs", ".")[0] == 0
        assert run_command(capsys, "report", "broken", "whole", "-o", "page.html")[0] == 0
        require_page(place / "page.html")
    assert not ran


@pytest.mark.quick("1")
@pytest.mark.parametrize("seed", range(2))
def test_policies_of_mutated_runs_end_in_a_result_or_in_one_line(
    place, real, capsys, monkeypatch, seed
):
    rng, ran = random.Random(100 + seed), []
    monkeypatch.setattr(os, "system", lambda *given: ran.append(given))
    for _ in range(6):
        shutil.rmtree(place / "broken")
        shutil.copytree(real, place / "broken")
        damage(rng, place / "broken")
        status, out, _ = run_command(capsys, "evaluate", "broken", "--episodes", "2", "--json")
        assert status or strictly(out)["episodes"] == 2
    assert not ran
