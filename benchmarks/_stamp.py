"""Says of a figure when, where and by what it was taken."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from seedbed.machine import cpu_name

_HERE = Path(__file__).parent


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=_HERE, capture_output=True, text=True)
    except OSError:
        return ""  # there is no git
    return done.stdout.strip()


def _commit() -> str:
    changed = _git("status", "--porcelain", "--", "../src", ".")
    return (_git("rev-parse", "--short", "HEAD") or "unknown") + " with changes" * bool(changed)


# As the program begins: its own work is the load later, and sources may change meanwhile.
_COMMIT, _LOAD = _commit(), os.getloadavg()[0]


def stamp() -> dict[str, Any]:
    """Returns date, commit, machine and command; the commit says if sources had changed since."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _COMMIT,
        "machine": {
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "load_before": _LOAD,
            "python": platform.python_version(),
        },
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Writes a result with its stamp, in a folder that is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**result, "stamp": stamp()}, indent=1) + "\n")
