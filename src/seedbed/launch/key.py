"""`seedbed key`: the key of a run that has not begun. It imports no JAX."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from seedbed.printable import pasted, printable
from seedbed.run.folder import CONFIG, RunFolder
from seedbed.streams.credentials import FOLDER, KEY, ensure_credentials
from seedbed.types import SeedbedError

DESCRIPTION = """Makes the key of a run before it begins, so that other machines can have it when they start.
The run then takes it: seedbed train ... --run RUN."""


def declare(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command to a parser."""
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of the run, to be made")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def make(run: Path) -> str:
    """Makes a run's key if it has none; returns a line that says where it is. Raises SeedbedError."""
    key = run / FOLDER / KEY
    if not (run / CONFIG).exists():
        # As `train` will: it refuses a folder with anything else.
        with contextlib.closing(RunFolder.create(run)):
            ensure_credentials(run / FOLDER)
    elif not key.exists():
        raise SeedbedError(
            f"the run {printable(run)} has begun without listening: give it --listen, and it makes a key"
        )
    else:
        ensure_credentials(run / FOLDER)
    return f"{printable(key)}; on other machines: seedbed host ADDRESS --key {pasted(KEY)}"
