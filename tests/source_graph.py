"""Which module of the package imports which."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "seedbed"


def imports_of(tree: ast.AST, module: str, modules: set[str]) -> set[str]:
    """Lists the seedbed modules that a module imports, also inside functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[: -node.level] if module else []
                base = ".".join(["seedbed", *parent, *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner.removeprefix("seedbed.") in modules else base)
    names = {name for name in found if name == "seedbed" or name.startswith("seedbed.")}
    return {name.removeprefix("seedbed").removeprefix(".") or "__init__" for name in names}


@functools.lru_cache(maxsize=1)
def read_modules(source: Path) -> dict[str, tuple[Path, ast.Module]]:
    modules = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)
        modules[name] = (path, ast.parse(path.read_text()))
    return modules


def import_graph(modules: dict[str, tuple[Path, ast.Module]]) -> dict[str, set[str]]:
    graph = {}
    for name, (path, tree) in modules.items():
        package = f"{name}.__init__" if path.name == "__init__.py" else name
        graph[name] = imports_of(tree, package, set(modules)) - {name}
    return graph
