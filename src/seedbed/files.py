"""Files and folders that are on the disk, and not only in memory, when a function returns."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Waits until a file's data, or a folder's list of names, is on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file atomically; it is on the disk when this returns. Raises OSError."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(json.dumps(value, indent=2) + "\n")
        sync(temporary)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)
