"""A run's folder with the checkpoint of an agent that has learned nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from seedbed.config import configuration
from seedbed.config.saved import to_json
from seedbed.envs.host.contract import is_on_device
from seedbed.run.checkpoint_helper import write_checkpoint
from seedbed.run.folder import RunFolder
from seedbed.run.restoring import task_number
from seedbed.run.stacking import stacked_spec
from seedbed.types import bind


def write_run(
    path: Path, config: configuration.TrainConfig, scores: dict[int, float | None] | None = None
) -> Path:
    """Writes the folder, with a checkpoint for each step of `scores`; by default 640 with a score of 1."""
    run = RunFolder.create(path)
    run.write_config(to_json(config))
    run.close()
    env: Any = config.env
    if is_on_device(env):
        spec, within = env.spec, "learner."
    else:
        host = env.make(1, 0)
        host.close()
        spec, within = stacked_spec(host.spec, env.frame_stack), ""
    state = jax.jit(bind(config.agent, spec).init)(jax.random.key(0))
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    arrays = {
        within + jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in flat
    }
    leaves = [
        {"name": name, "dtype": str(array.dtype), "shape": array.shape, "bytes": array.nbytes}
        for name, array in arrays.items()
    ]
    for step, score in ({640: 1.0} if scores is None else scores).items():
        header = {"step": step, "metadata": {}, "score": score, "keep": 3, "leaves": leaves}
        header["claim"], header["task"] = run.claim, task_number(run)
        write_checkpoint(run.checkpoints, header, arrays)
    return path
