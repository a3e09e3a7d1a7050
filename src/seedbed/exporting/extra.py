"""What `seedbed export` needs before anything is loaded: its arguments, and the packages of its extra."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from seedbed.run.bucket import run_path
from seedbed.run.trust import declare as declare_trust
from seedbed.types import SeedbedError

DESCRIPTION = "Writes a run's policy as an ONNX model."
EXTRA = ("onnx", "onnxruntime", "safetensors")


def require_packages(*names: str) -> None:
    """Raises SeedbedError if one of these packages is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise SeedbedError(
                f"exported policies need the package {name}: pip install 'seedbed[export]'"
            )


def declare(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `seedbed export`."""
    parser.add_argument("run", metavar="RUN", type=run_path, help="the folder of a run")
    parser.add_argument(
        "-o", "--output", metavar="DIR", type=Path, required=True, help="new folder"
    )
    parser.add_argument("--newest", action="store_true", help="export the newest checkpoint")
    declare_trust(parser)
    parser.add_argument("--json", action="store_true", help="print the contract")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
