"""What `seedbed export` needs before anything is loaded: its arguments, and the packages of its extra."""

from __future__ import annotations

import argparse
from pathlib import Path

from seedbed.named import require_packages
from seedbed.run.bucket import run_path
from seedbed.run.trust import declare as declare_trust

DESCRIPTION = "Writes a run's policy as an ONNX model."
EXTRA = ("onnx", "onnxruntime", "safetensors")


def require(*names: str) -> None:
    """Raises SeedbedError if one of these packages is not installed."""
    require_packages("an exported policy", "export", *names)


def declare(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `seedbed export`."""
    parser.add_argument("run", metavar="RUN", type=run_path, help="the folder of a run")
    parser.add_argument(
        "-o", "--output", metavar="DIR", type=Path, required=True, help="new folder"
    )
    robot = "then let it drive a robot in MuJoCo's C code for 20 s, in this scene or its own"
    parser.add_argument("--robot", metavar="SCENE.xml", nargs="?", const="", help=robot)
    parser.add_argument("--newest", action="store_true", help="export the newest checkpoint")
    declare_trust(parser)
    parser.add_argument("--json", action="store_true", help="print the contract")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
