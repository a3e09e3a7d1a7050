"""Runs the command line for `python -m seedbed`."""

import sys

from seedbed.cli import program

if __name__ == "__main__":
    sys.exit(program())
