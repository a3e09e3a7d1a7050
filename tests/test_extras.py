"""What `pip install seedbed[...]` brings exists, is used, and has a line in docs/architecture.md."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import urllib.request
from importlib.metadata import metadata
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
INDEX = "https://pypi.org/simple"
# What is imported by another dependency.
INDIRECT = {"filelock"}
# Packages whose module has a name of its own.
MODULES = {"orbax-checkpoint": "orbax"}


def names(requirements: list[str]) -> list[str]:
    """Returns the names of requirements with their extras, without bounds and markers."""
    found = [re.match(r"[\w.-]+(?:\[[\w,-]+\])?", each) for each in requirements]
    return [name[0] for name in found if name]


def tables() -> list[list[list[str]]]:
    """Returns the tables of the page's section on dependencies: the names in each cell but the last."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("\n## Dependencies\n")[2].partition("\n## ")[0]
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        _, _, *rows = (row.strip("| ").split(" | ") for row in table.splitlines())
        assert all(len(reason) > 3 for *_, reason in rows)
        found.append([re.findall("`([^`]+)`", " ".join(cells)) for *cells, _ in rows])
    return found


def test_every_dependency_has_a_line_that_says_what_it_is_for():
    runtime, extras, dev = tables()
    assert sorted(chain(*runtime)) == sorted(names(PROJECT["dependencies"]))
    declared = [
        [extra, name] for extra in EXTRAS if extra != "dev" for name in names(EXTRAS[extra])
    ]
    assert sorted(extras) == sorted(declared)
    assert sorted(chain(*dev)) == sorted(names(EXTRAS["dev"]))


def test_every_dependency_is_imported():
    files = (ROOT / "src" / "seedbed").rglob("*.py")
    pattern = r"(?:^\s*(?:from|import) |import_module\(\")(\w+)"
    imported = {name for path in files for name in re.findall(pattern, path.read_text(), re.M)}
    needed = names([*PROJECT["dependencies"], *EXTRAS["video"], *EXTRAS["export"]])
    plain = {name.partition("[")[0] for name in needed} - INDIRECT
    assert {MODULES.get(name, name.replace("-", "_")) for name in plain} <= imported


def test_jax_has_the_extras_that_ours_ask_for():
    asked = {name: re.findall(r"^jax\[(\w+)\]", " ".join(EXTRAS[name])) for name in EXTRAS}
    asked = {name: wanted for name, wanted in asked.items() if wanted}
    assert asked == {"cuda": ["cuda13"], "cuda12": ["cuda12"]}
    offered = metadata("jax").get_all("Provides-Extra") or []
    assert {wanted for found in asked.values() for wanted in found} <= set(offered)


@pytest.mark.slow
@pytest.mark.parametrize("cuda", ["cuda", "cuda12"])
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_wheels_of_all_that_it_needs_are_there(python, cuda):
    """For a Python that need not be here. An index changes: this may fail without a change of ours."""
    try:
        urllib.request.urlopen(f"{INDEX}/pip/", timeout=30).close()
    except OSError as error:
        pytest.skip(f"{INDEX} cannot be reached: {error}")
    command = [
        *(sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--quiet"),
        *("--no-config", "--default-index", INDEX, "--no-python-downloads"),
        *("--python-version", python, "--python-platform", "x86_64-manylinux_2_28"),
        *("--only-binary", ":all:", "--no-header", "--no-annotate"),
        *("--extra", cuda, "--extra", "video", "--extra", "export"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"jax", "mujoco", "onnx"} <= set(re.findall(r"^([\w-]+)==", done.stdout, re.MULTILINE))
