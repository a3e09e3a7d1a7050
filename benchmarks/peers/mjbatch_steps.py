"""Steps of a model in mjbatch, MuJoCo's C code on a pool of threads; runs in its own environment.

    python mjbatch_steps.py MODEL.xml THREADS HOLD

Each line on the standard input names a file of numpy with qpos, qvel and act [B, ...], controls [B, T, nu],
each held for HOLD steps, and the number of a solver. The answer is a line of JSON: the seconds that the steps
took, and the mean number of contacts at their end. The solver runs until it has converged.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import mujoco
import numpy as np
from mjbatch import Batch


def steps(model: Any, threads: int, hold: int, given: Any) -> dict[str, float]:
    """Steps a batch, and returns the seconds and the contacts."""
    model.opt.solver = int(given["solver"])
    batch = Batch(model, len(given["qpos"]), threads)
    ctrl = batch.bind("ctrl")
    batch.step(nstep=1)  # its threads have begun
    for name in ("qpos", "qvel", "act"):
        if given[name].shape[1]:
            batch.bind(name)[:] = given[name]
    begin = time.perf_counter()
    for controls in given["ctrl"].swapaxes(0, 1):
        ctrl[:] = controls
        batch.step(nstep=hold)
    seconds = time.perf_counter() - begin
    data, found = mujoco.MjData(model), []
    for row in batch.bind("qpos"):
        data.qpos[:] = row
        mujoco.mj_fwdPosition(model, data)
        found.append(data.ncon)
    return {"seconds": seconds, "contacts": float(np.mean(found))}


def main() -> None:
    """Answers until its standard input ends."""
    path, threads, hold = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    model = mujoco.MjModel.from_xml_path(path)
    model.opt.iterations, model.opt.tolerance = 100, 1e-8
    model.opt.ls_iterations, model.opt.ls_tolerance = 50, 0.01
    for line in sys.stdin:
        print(json.dumps(steps(model, threads, hold, np.load(line.strip()))), flush=True)


if __name__ == "__main__":
    main()
