"""Modules that a person has named, such as those of their own environments, and packages of extras."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from seedbed.errors import SeedbedError


def import_named(module: str) -> ModuleType:
    """Imports a module, also from the current folder, which comes last; raises what the import raises.

    The folder is searched from now on only: before a person has named a module, nothing in it is imported,
    as it may be the folder of a stranger's run.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    return importlib.import_module(module)


def is_local(module: str, path: str) -> bool:
    """Returns whether a class, by its module and its path there, is one that no other process can import.

    It is of a script or notebook itself, or inside a function.
    """
    return module == "__main__" or "<locals>" in path


def require_packages(what: str, extra: str, *names: str) -> None:
    """Raises SeedbedError if a package is not installed, which `what` needs and an `extra` of ours brings."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise SeedbedError(f"{what} needs the package {name}: pip install 'seedbed[{extra}]'")
