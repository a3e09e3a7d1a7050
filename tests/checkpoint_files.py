"""Checkpoints to write, and a helper that is stopped meanwhile."""

from __future__ import annotations

import contextlib

import numpy as np
import psutil

from seedbed.run.checkpoint_helper import write_checkpoint
from seedbed.run.leaves import named_leaves
from waiting import wait_for


def write_tree(folder, step, tree, **options):
    """Writes a checkpoint in this process: same files, no helper to start."""
    arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(tree)}
    leaves = [
        {"name": name, "dtype": str(array.dtype), "shape": array.shape, "bytes": array.nbytes}
        for name, array in arrays.items()
    ]
    header = {"step": step, "metadata": {"at": step}, "score": None, "keep": 3, "leaves": leaves}
    header["claim"], header["task"] = (1000, ""), 0
    write_checkpoint(folder, {**header, **options}, arrays)


def write(folder, step, value=0.0, **options):
    """Writes a checkpoint of one array."""
    write_tree(folder, step, {"w": np.full((4,), value, np.float32)}, **options)


TEMPLATE = {"w": np.zeros((4,), np.float32)}


def suspend(process):
    """Stops a process, and returns when it does not run any more.

    The signal alone is not enough: a process that waits for its input may still read what comes next.
    """
    process.suspend()
    wait_for(lambda: process.status() == psutil.STATUS_STOPPED)


@contextlib.contextmanager
def stopped(process):
    """Stops a process, which must not be left so where a test fails."""
    try:
        suspend(process)
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
