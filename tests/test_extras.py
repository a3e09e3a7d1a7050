"""What `pip install seedbed[...]` brings exists, is used, and has a line in docs/architecture.md."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from importlib.metadata import metadata
from itertools import chain
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
INDEX = "https://pypi.org/simple"
# What is imported by another dependency.
INDIRECT = {"filelock"}
# What is imported only where it is there already: in a notebook, for a user of that library, to read Minari's
# files, to take an environment by value (Gymnasium needs it), or by what an extra needs itself.
PRESENT = {"IPython", "stable_baselines3", "h5py", "cloudpickle", "fsspec"}
# Extras whose packages are no imports: JAX's own, models of robots and of dm_control, and what is for work on
# Seedbed.
APART = {"cuda", "cuda12", "dm", "robots", "dev", "drills", "s3", "gs"}
# Packages whose module has a name of its own.
MODULES = {"orbax-checkpoint": "orbax"}
WEB = ROOT / "src" / "seedbed" / "viewer" / "web"
# The library inside each bundle.
BUNDLED = {"three": "replay.js", "uplot": "report.js"}


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


def imports(node: ast.AST) -> Iterator[str]:
    """Lists the packages that a module imports anywhere, but for type checkers alone."""
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            for each in node.orelse:
                yield from imports(each)
            return
        case ast.Import(names=aliases):
            yield from (alias.name.partition(".")[0] for alias in aliases)
        case ast.ImportFrom(module=str(module), level=0):
            yield module.partition(".")[0]
        case ast.Call(
            func=ast.Name(id="import_module"), args=[ast.Constant(value=str(module)), *_]
        ):
            yield module.partition(".")[0]
        case ast.Call(
            func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module)), *_]
        ):
            yield module.partition(".")[0]
    for child in ast.iter_child_nodes(node):
        yield from imports(child)


def undeclared(imported: set[str], declared: set[str]) -> set[str]:
    """Returns what is imported, and is neither of Python nor declared."""
    return imported - declared - sys.stdlib_module_names - PRESENT - {"seedbed"}


@pytest.mark.slow
def test_dependencies_are_what_is_imported():
    files = (ROOT / "src" / "seedbed").rglob("*.py")
    imported = {name for path in files for name in imports(ast.parse(path.read_text()))}
    extras = [each for extra, names_ in EXTRAS.items() if extra not in APART for each in names_]
    needed = names([*PROJECT["dependencies"], *extras])
    plain = {name.partition("[")[0] for name in needed}
    modules = {MODULES.get(name, name.replace("-", "_")) for name in plain}
    assert modules - INDIRECT <= imported
    assert undeclared(imported, modules) == set()


def test_an_import_that_nobody_declared_is_found():
    text = (
        "def f():\n    import ml_dtypes.a, os\nif TYPE_CHECKING:\n    import b\nelse:\n    import c"
    )
    text += "\nfrom d.e import g\nfrom . import h\nimportlib.import_module('i.j')\nimport numpy, seedbed.k"
    found = set(imports(ast.parse(text)))
    assert undeclared(found, {"numpy"}) == {"ml_dtypes", "c", "d", "i"}


def test_the_metadata_name_the_licences_of_what_is_bundled():
    package = json.loads((WEB / "package.json").read_text())
    assert set(package["devDependencies"]) - {"esbuild"} == set(BUNDLED)
    assert PROJECT["license"] == "Apache-2.0 AND MIT"
    files = {path for pattern in PROJECT["license-files"] for path in ROOT.glob(pattern)}
    assert files == {ROOT / "LICENSE", *(ROOT / "licenses" / f"{name}.txt" for name in BUNDLED)}
    for name, bundle in BUNDLED.items():
        licence = (ROOT / "licenses" / f"{name}.txt").read_text()
        assert "MIT" in licence and licence in (WEB / bundle).read_text()


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


def test_what_is_pinned_installs_on_the_oldest_python():
    """Python 3.11 means 3.11.0, too: Debian 12 has 3.11.2, and would not install a pin that wants more."""
    oldest = PROJECT["requires-python"].removeprefix(">=") + ".0"
    pins = [line.split("==")[0] for line in (ROOT / "requirements.lock").read_text().splitlines()]
    wanted = {pin: metadata(pin).get("Requires-Python") or "" for pin in pins}
    late = {pin: spec for pin, spec in wanted.items() if oldest not in SpecifierSet(spec)}
    assert not late and len(wanted) > 100
