"""The process of a trial: `seedbed train`, which stops and saves when the search that started it is gone."""

from __future__ import annotations

import os
import runpy
import signal
import threading


def main() -> None:
    """Runs the command of this process's arguments; its stdin ends with the search."""
    threading.Thread(target=_follow, name="search", daemon=True).start()
    runpy.run_module("seedbed", run_name="__main__", alter_sys=True)


def _follow() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
