"""Runs the command line: the program `seedbed`, and `python -m seedbed`."""

import os
import sys


def program() -> int:
    """Runs the program; returns its exit status, or ends the process with it after a signal."""
    try:
        from seedbed import cli
    except KeyboardInterrupt:
        # Ctrl-C while modules are imported. ExitStatus may be one of them.
        os._exit(130)
    return cli.program()


if __name__ == "__main__":
    sys.exit(program())
