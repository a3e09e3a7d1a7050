"""The list of runs: `seedbed list --runs`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from seedbed import cli
from seedbed.run.folder import RunFolder
from seedbed.run.lines import read_last_line, read_lines


def write(
    path: Path, lines: list[dict[str, Any]], outcome: str | None = None, steps: int = 100
) -> Path:
    path.mkdir(parents=True)
    config = {"name": "ant/ppo", "env": {}, "agent": {}, "fused": {"steps": steps, "seed": 0}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if outcome is not None:
        (path / "history.json").write_text(json.dumps([{"outcome": outcome}] if outcome else [{}]))
    return path


@pytest.fixture
def runs(tmp_path):
    line = {"env_steps": 50, "episode_return_mean": 12.345}
    write(tmp_path / "failed", [line], "failed")
    write(tmp_path / "nested" / "killed", [line], "")
    done = {"env_steps": 104, "evaluation/episode_return_mean": 5140.2, "episode_return_mean": 1.0}
    write(tmp_path / "done", [done], "finished")
    write(tmp_path / "old", [done])
    write(tmp_path / "new", [])
    (tmp_path / "notes").mkdir()
    (tmp_path / ".hidden").mkdir()
    write(tmp_path / ".hidden" / "run", [line])
    write(tmp_path / "done" / "checkpoints" / "no-run", [line])
    (write(tmp_path / "torn", []) / "config.json").write_text("{")
    os.utime(tmp_path / "done" / "metrics.jsonl", (0, time.time() - 3 * 3600))
    return tmp_path


def test_runs_are_listed_in_80_columns(runs):
    running = RunFolder.resume(write(runs / ("a-long-name-of-a-preset" * 3), []))
    command = [sys.executable, "-m", "seedbed", "list", "--runs", str(runs)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    running.close()
    rows = [line.split() for line in done.stdout.splitlines()]
    found = {row[0]: row[1:] for row in rows}
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert found["failed"][:5] == ["failed", "50", "of", "100", "12.35*"]
    assert re.fullmatch(r"\d+s", found["failed"][5])
    assert found["nested/killed"][:1] == ["interrupted"]
    assert found["done"] == ["finished", "104", "of", "100", "5,140", "3h"]
    assert found["old"][0] == "finished" and found["new"][:1] == ["interrupted"]
    assert found["torn"] == ["damaged", "-", "-", "-"]
    assert any(row[1:2] == ["running"] for row in rows)
    assert not {"notes", ".hidden/run", "done/checkpoints/no-run"} & set(found)


def test_the_list_as_json_and_of_one_run(runs, capsys):
    assert cli.main(["list", "--runs", str(runs), "--json"]) == 0
    listed = {Path(each["run"]).name: each for each in json.loads(capsys.readouterr().out)}
    assert listed["done"]["evaluation"] == 5140.2 and listed["done"]["steps"] == 100
    assert listed["torn"] == {"run": str(runs / "torn"), "state": "damaged"}
    assert cli.main(["list", "--runs", str(runs / "failed")]) == 0
    assert re.search(r"^failed +failed", capsys.readouterr().out, re.MULTILINE)


def test_places_without_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["list", "--runs"]) == 1
    assert capsys.readouterr().err == (
        "seedbed: there is no folder runs: name the one with the runs\n"
    )
    (tmp_path / "runs").mkdir()
    assert cli.main(["list", "--runs"]) == 0
    assert capsys.readouterr().out == "no runs in runs\n"


def test_listing_runs_loads_no_jax(runs):
    code = "import sys; from seedbed import cli; cli.main(['list', '--runs', sys.argv[1]])\n"
    code += "assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, runs], check=True, stdout=subprocess.DEVNULL)


def test_lines_that_a_resumed_run_has_done_again_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    steps = [10, 20, 30, 40, 20, 30]
    lines = [json.dumps({"env_steps": n, "at": i}) for i, n in enumerate(steps)]
    path.write_text("\n".join([*lines[:2], "torn {", "[1]", *lines[2:], '{"env_steps": 40}']))
    assert [(line["env_steps"], line["at"]) for line in read_lines(path)] == [
        (10, 0),
        (20, 1),
        (20, 4),
        (30, 5),
    ]
    assert read_last_line(path) == {"env_steps": 30, "at": 5}
    assert read_lines(tmp_path / "none") == [] and read_last_line(tmp_path / "none") == {}


def test_the_last_line_of_a_long_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"env_steps": n, "x": "y" * 100}) + "\n" for n in range(5000))
    )
    assert read_last_line(path)["env_steps"] == 4999
    # That of a large population.
    path.write_text(
        "".join(json.dumps({"env_steps": n, "x": "y" * 200_000}) + "\n" for n in (1, 2))
    )
    assert read_last_line(path) == {"env_steps": 2}
