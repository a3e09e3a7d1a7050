"""The floors, the budgets and the bans, enforced by reading the source."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from source_graph import SOURCE, import_graph, read_modules

FLOORS = (
    {
        *(
            "types",
            "trees",
            "files",
            "cache",
            "llvm",
            "ffi",
            "machine",
            "compression",
            "nearest",
            "jaxprs",
        ),
        *(
            "strict_json",
            "printable",
            "named",
            "exit_status",
            "arguments",
            "errors",
            "spaces",
            "version",
            "scheduler",
            "terminal",
        ),
    },
    {"simd", "ops", "nets", "replay", "streams"},
    {"physics", "agents"},
    {"envs", "actors"},
    {"run"},
    {"central", "fused", "paramserver"},
    {"config"},
    {"policy"},
    {"viewer", "exporting", "starting", "cloning", "testing", "launch", "play", "plan"},
    {"api"},
    {"tuning", "listing", "cli"},
    {"__init__", "__main__"},
)
# Siblings on a floor that may import each other.
LISTED = {
    ("trees", "types"),
    ("errors", "printable"),
    ("types", "errors"),
    ("types", "spaces"),
    ("spaces", "errors"),
    ("nearest", "errors"),
    ("arguments", "errors"),
    ("arguments", "printable"),
    ("files", "strict_json"),
    ("compression", "types"),
    ("exit_status", "types"),
    ("machine", "types"),
    ("named", "errors"),
    ("terminal", "printable"),
    ("ffi", "cache"),
    ("ffi", "llvm"),
    ("replay", "ops"),
    ("actors", "envs"),
    ("paramserver", "central"),
    ("starting", "exporting"),
    ("play", "viewer"),
    ("cli", "listing"),
    ("cli", "tuning"),
}
# The floors inside simd: the stages of the compiler, and on top what JAX sees. Siblings are blind here, too.
STAGES = (
    {"ir"},
    {"frontend", "schedule"},
    {"cpu"},
    {"gpu", "wasm"},
    {"store"},
    {"accumulate"},
    {"derivative"},
    {"primitive"},
    {"vectorize"},
    {"inspect"},
    {"__init__"},
)
MAX_FILE, MAX_FUNCTION, MAX_ARGUMENTS = 400, 60, 8
BANNED = re.compile(r"\b(TODO|FIXME|XXX)\b")


def floor_violations(source: Path) -> Iterator[str]:
    yield from violations(import_graph(read_modules(source)), FLOORS, LISTED)


def stage_violations(source: Path) -> Iterator[str]:
    graph = import_graph(read_modules(source))
    inside = {name: name.removeprefix("simd.") for name in graph if name.startswith("simd.")}
    inside["simd"] = "__init__"
    stages = {
        short: {inside[other] for other in graph.get(name, ()) if other in inside}
        for name, short in inside.items()
    }
    yield from violations(stages, STAGES, set())


def violations(
    graph: dict[str, set[str]], floors: Sequence[set[str]], listed: set[tuple[str, str]]
) -> Iterator[str]:
    """Lists the imports that go up, and those of siblings that are not listed."""
    floor_of = {name: floor for floor, names in enumerate(floors) for name in names}
    for name, imported in graph.items():
        part = name.split(".")[0]
        if part not in floor_of:
            yield f"{name}: {part} has no floor; list it in tests/test_layers.py"
            continue
        for other in sorted(imported):
            target = other.split(".")[0]
            if target == part or target not in floor_of:
                continue
            mine, theirs = floor_of[part], floor_of[target]
            if theirs > mine or (theirs == mine and (part, target) not in listed):
                yield f"{name} (floor {mine}) imports {other} (floor {theirs})"


def import_cycles(source: Path) -> Iterator[str]:
    graph = import_graph(read_modules(source))
    # The package's own __init__ loads its api lazily, which is no cycle.
    graph["__init__"] = set()
    yield from cycles(graph)


def package_cycles(source: Path) -> Iterator[str]:
    """Lists the circles of folders of which each imports a module of the next."""
    modules = read_modules(source)
    folder = {
        name: name if path.name == "__init__.py" else name.rpartition(".")[0]
        for name, (path, _) in modules.items()
    }
    graph: dict[str, set[str]] = {}
    for name, imported in import_graph(modules).items():
        here = folder[name]
        there = {folder[other] for other in imported if other in folder}
        # The package's own folder has its lowest and its highest modules: `FLOORS` orders those.
        if here not in ("", "__init__"):
            graph.setdefault(here, set()).update(there - {here, "", "__init__"})
    yield from cycles(graph)


def cycles(graph: dict[str, set[str]]) -> Iterator[str]:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> Iterator[str]:
        if name in path:
            yield " -> ".join((*path[path.index(name) :], name))
        elif name not in done:
            for other in sorted(graph.get(name, ())):
                yield from visit(other, (*path, name))
            done.add(name)

    for name in sorted(graph):
        yield from visit(name, ())


def budget_violations(source: Path) -> Iterator[str]:
    for name, (path, tree) in read_modules(source).items():
        text = path.read_text()
        lines = len(text.splitlines())
        if lines > MAX_FILE:
            yield f"{name}: {lines} lines (at most {MAX_FILE})"
        for number, line in enumerate(text.splitlines(), 1):
            if BANNED.search(line):
                yield f"{name}:{number}: {line.strip()}"
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION:
                yield f"{name}.{node.name}: {length} lines (at most {MAX_FUNCTION})"
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len([argument for argument in given if argument.arg not in ("self", "cls")])
            if count > MAX_ARGUMENTS:
                yield f"{name}.{node.name}: {count} arguments (at most {MAX_ARGUMENTS})"


def style_violations(source: Path) -> Iterator[str]:
    """Lists starred literals, and docstrings of public things that are a single word."""
    for name, (_, tree) in read_modules(source).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List):
                yield f"{name}:{node.lineno}: *{ast.unparse(node.value)}; write its elements plainly"
        for thing in public_things(tree):
            text = ast.get_docstring(thing)
            if text is not None and len(text.split()) == 1:
                yield f"{name}:{thing.lineno}: {thing.name} has the docstring {text!r}; say what it does"


def public_things(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Lists the public functions and classes of a module, and the public members of its public classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not child.name.startswith("_"):
                yield child
                if isinstance(child, ast.ClassDef):
                    yield from public_things(child)
        elif isinstance(child, ast.stmt):
            yield from public_things(child)


def test_house():
    """One test, so that one process reads the package once."""
    checks = (floor_violations, stage_violations, import_cycles, package_cycles, budget_violations)
    assert [each for check in (*checks, style_violations) for each in check(SOURCE)] == []


def write(source: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return source


@pytest.mark.parametrize(
    ("files", "complaints"),
    [
        ({"ops/a.py": "from seedbed.agents import impala"}, 1),
        ({"ops/a.py": "def f():\n    import seedbed.central.train"}, 1),
        ({"ops/a.py": "from seedbed.nets import torsos"}, 1),
        ({"replay/a.py": "from seedbed.ops import returns"}, 0),
        ({"nets/a.py": "from seedbed.simd import cpu"}, 1),
        ({"nets/a.py": "from seedbed import ffi", "ffi.py": ""}, 0),
        ({"actors/a.py": "import seedbed.envs.host.gym"}, 0),
        ({"envs/a.py": "import seedbed.actors.slots"}, 1),
        ({"central/a.py": "from seedbed.fused import train"}, 1),
        ({"run/a.py": "from seedbed.central import train"}, 1),
        ({"ops/a.py": "from ..agents import impala"}, 1),
        ({"ops/__init__.py": "from ..central import train"}, 1),
        ({"run/a.py": "import seedbed"}, 1),
        ({"types.py": "from seedbed import cli", "cli.py": ""}, 1),
        ({"helpers/a.py": ""}, 1),
        (
            {
                "config/a.py": "from seedbed.envs import host\nfrom seedbed import types",
                "types.py": "",
            },
            0,
        ),
    ],
)
def test_floors_are_checked(tmp_path, files, complaints):
    assert len(list(floor_violations(write(tmp_path, files)))) == complaints


@pytest.mark.parametrize(
    ("files", "complaints"),
    [
        ({"simd/cpu/a.py": "from seedbed.simd.ir import b", "simd/ir/b.py": ""}, 0),
        ({"simd/ir/a.py": "from seedbed.simd.cpu import b", "simd/cpu/b.py": ""}, 1),
        ({"simd/frontend/a.py": "from ..schedule import b", "simd/schedule/b.py": ""}, 1),
        ({"simd/cpu/a.py": "def f():\n    from seedbed.simd import vectorize"}, 1),
        ({"simd/inspect.py": "from seedbed.simd import vectorize", "simd/vectorize.py": ""}, 0),
        (
            {"simd/__init__.py": "from seedbed.simd.inspect import inspect", "simd/inspect.py": ""},
            0,
        ),
        ({"simd/ir/a.py": "from seedbed import types", "types.py": ""}, 0),
        ({"simd/helpers/a.py": ""}, 1),
    ],
)
def test_stages_are_checked(tmp_path, files, complaints):
    files = {"simd/__init__.py": "", "simd/ir/__init__.py": "", "simd/cpu/__init__.py": "", **files}
    files = {"simd/schedule/__init__.py": "", **files}
    assert len(list(stage_violations(write(tmp_path, files)))) == complaints


def test_cycles_of_packages_are_found(tmp_path):
    files = {
        "ops/__init__.py": "",
        "ops/a.py": "from seedbed.ops.inner import b",
        "ops/c.py": "",
        "ops/inner/__init__.py": "",
        "ops/inner/b.py": "from seedbed.ops import c",
        "types.py": "from seedbed.ops import a",
    }
    assert list(import_cycles(write(tmp_path, files))) == []
    assert list(package_cycles(tmp_path)) == ["ops -> ops.inner -> ops"]


def test_cycles_are_found(tmp_path):
    files = {
        "ops/a.py": "from seedbed.ops import b",
        "ops/b.py": "def f():\n    from . import c",
        "ops/c.py": "from seedbed.ops.a import g",
        "ops/d.py": "from seedbed.ops import a",
    }
    assert list(import_cycles(write(tmp_path, files))) == ["ops.a -> ops.b -> ops.c -> ops.a"]


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        ("x = 1\n" * MAX_FILE, 0),
        ("x = 1\n" * (MAX_FILE + 1), 1),
        ("def f():\n" + "    x = 1\n" * (MAX_FUNCTION - 1), 0),
        ("def f():\n" + "    x = 1\n" * MAX_FUNCTION, 1),
        ("def f(a, b, c, d, e, f, g, h): ...", 0),
        ("def f(a, b, c, d, e, f, *, g, h, i): ...", 1),
        ("x = 1  # TO" + "DO: later", 1),
    ],
)
def test_budgets_are_checked(tmp_path, text, complaints):
    assert len(list(budget_violations(write(tmp_path, {"ops/a.py": text})))) == complaints


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        ("f(*(a, b), c)", 1),
        ("x = [*[a, b], c]", 1),
        ("x = (*(a, *(b, c)), d)", 2),
        ("def f(x):\n    return {*(1, 2)}", 1),
        ("f(*x, *g(a, b), *(y for y in x), *x[1:], **{'a': 1})", 0),
        ("a, *(b, c) = x", 1),
        ("for x in *a, *b: ...", 0),
        ("def f():\n    'None.'", 1),
        ("async def f():\n    'Waits.'", 1),
        ("def f():\n    'Returns an empty list.'", 0),
        ("def f(): ...", 0),
        ("def _f():\n    'None.'", 0),
        ("class A:\n    'Rows.'", 1),
        ("class A:\n    def f(self):\n        'Closes.'", 1),
        ("class A:\n    class B:\n        'Rows.'", 1),
        ("class A:\n    def _f(self):\n        'Closes.'", 0),
        ("class _A:\n    def f(self):\n        'Closes.'", 0),
        ("def f():\n    def g():\n        'None.'", 0),
        ("if x:\n    def f():\n        'None.'", 1),
        ("'Layers.'", 0),
    ],
)
def test_style_is_checked(tmp_path, text, complaints):
    assert len(list(style_violations(write(tmp_path, {"ops/a.py": text})))) == complaints


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_scripts_import_what_there_is(folder):
    for path in sorted((SOURCE.parents[1] / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("seedbed"):
                module = importlib.import_module(node.module)
                for name in node.names:
                    there = hasattr(module, name.name)
                    assert there or importlib.util.find_spec(f"{node.module}.{name.name}"), (
                        f"{path.name}:{node.lineno}: {node.module} has no {name.name}"
                    )


def test_each_mend_has_its_test():
    """`mends.tsv` names the test that shows each fault that readers found in November 2026 mended."""
    tests = Path(__file__).parent
    rows = [line.split("\t") for line in (tests / "mends.tsv").read_text().splitlines()[1:]]
    assert len(rows) > 100
    for reading, finding, what, test in rows:
        file, name = test.split("::")
        source = (tests.parent / file).read_text()
        assert f"def {name}(" in source, f"{reading} {finding}, {what}: {test} is gone"
