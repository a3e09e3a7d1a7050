"""Imports modules that a person has named, such as those of their own agents and environments."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType


def import_named(module: str) -> ModuleType:
    """Imports a module, also from the current folder, which comes last; raises what the import raises.

    The folder is searched from now on only: before a person has named a module, nothing in it is imported,
    as it may be the folder of a stranger's run.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    return importlib.import_module(module)
