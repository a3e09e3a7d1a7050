"""Checkpoints to write, and a helper that is stopped meanwhile."""

from __future__ import annotations

import contextlib

import numpy as np
import psutil

from seedbed.run.checkpoint_helper import write_checkpoint


def write(folder, step, value=0.0, **options):
    """Writes a checkpoint in this process: same files, no helper to start."""
    array = np.full((4,), value, np.float32)
    leaf = {"name": "w", "dtype": "float32", "shape": [4], "bytes": 16}
    header = {"step": step, "metadata": {"at": step}, "score": None, "keep": 3, "leaves": [leaf]}
    header["claim"] = (1000, "")
    write_checkpoint(folder, {**header, **options}, {"w": array})


TEMPLATE = {"w": np.zeros((4,), np.float32)}


@contextlib.contextmanager
def stopped(process):
    """Stops a process, which must not be left so where a test fails."""
    process.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
