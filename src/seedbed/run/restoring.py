"""Reads checkpoints back: to go on with a run, to play its policy, or to begin another with its weights."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from seedbed import strict_json
from seedbed.exit_status import TemporaryError
from seedbed.files import load_json
from seedbed.printable import pasted, printable, resume_command
from seedbed.run.checkpoint_helper import ARRAYS, MANIFEST, defect, list_steps, name_of, read_best
from seedbed.run.folder import CONFIG, METRICS, RunFolder
from seedbed.run.leaves import like, named_leaves, shape_and_dtype
from seedbed.run.lines import read_last_line
from seedbed.run.task import task_of
from seedbed.types import SeedbedError, Tree

Warn = Callable[[str], None]
Restored = tuple[int, Tree, dict[str, Any]]
_Loaded = TypeVar("_Loaded")
_LATE_S = 600.0


def beginning_anew(run: RunFolder) -> str:
    """Returns what to tell of a run that has no checkpoint and so starts from the beginning; "" of a new one.

    Raises SeedbedError if it has learned, and its checkpoints are away.
    """
    last = read_last_line(run.path / METRICS)
    # The first checkpoint is made at once: a learner that was killed early has left the folder, empty.
    away = not run.checkpoints.is_dir() or last.get("wall_s", 0.0) > _LATE_S
    if last.get("learner_steps") and away:
        raise SeedbedError(
            f"{printable(run.checkpoints)} has no checkpoint, though the run has got to step "
            f"{last.get('env_steps', 0):,}: bring them back (is their disk mounted?), or start a new run"
        )
    return "the run has no checkpoint yet: starting from the beginning" if last else ""


def restore(folder: Path, template: Tree, warn: Warn = lambda text: None) -> Restored:
    """Returns (step, tree, metadata) of the newest whole checkpoint, from which training continues.

    The tree has the structure, dtypes and shapes of `template`, whose leaves may be abstract. Its leaves are
    numpy arrays, except PRNG keys, which are JAX arrays. Newer checkpoints are damaged: they are reported to
    `warn` and renamed to `damaged-*`, so that they do not count among those to keep. Only the process that
    trains into the folder may call this. Raises SeedbedError if no checkpoint is whole, or if the newest
    whole one is that of `seedbed clone` or does not fit `template`.
    """
    path, damaged = _newest_whole(folder, warn)
    if "cloned" in load_json(path / MANIFEST)["metadata"]:
        raise SeedbedError(
            f"{printable(folder.parent)} is a clone, which has not trained: begin a run with its weights: "
            f"seedbed train NAME --from {pasted(folder.parent)}"
        )
    restored = _load(path, template)
    for other in damaged:
        aside = other.with_name(f"damaged-{other.name}")
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            other.rename(aside)
    return restored


def restore_best(
    folder: Path, template: Tree, warn: Warn = lambda text: None, part: str = ""
) -> Restored:
    """Returns (step, tree, metadata) of the checkpoint with the best evaluation.

    If none was evaluated, or the best one is damaged, this takes the newest whole one. `part` names a field
    of the saved tree, such as `learner.params`; the result and `template` are then of that field. Nothing in
    the folder changes, and a run may train into it meanwhile. Leaves and errors are those of `restore`.
    """
    return _of_best(folder, warn, lambda path: _load(path, template, part))


def best_leaves(
    folder: Path, warn: Warn, part: str = ""
) -> tuple[int, dict[str, np.ndarray], dict[str, Any]]:
    """Returns (step, leaves, metadata) of the checkpoint with the best evaluation, as `restore_best` does.

    The leaves have their names below `part`; keys of random numbers are arrays of their data.
    """

    def load(path: Path) -> tuple[int, dict[str, np.ndarray], dict[str, Any]]:
        manifest, within = load_json(path / MANIFEST), f"{part}." if part else ""
        arrays = _stored(path, manifest)
        return (
            manifest["step"],
            {name.removeprefix(within): arrays[name] for name in arrays if name.startswith(within)},
            manifest["metadata"],
        )

    return _of_best(folder, warn, load)


def _of_best(folder: Path, warn: Warn, load: Callable[[Path], _Loaded]) -> _Loaded:
    """Returns what `load` makes of the best checkpoint; of the newest, if there is none or it is damaged."""
    best = read_best(folder)
    if best is not None:
        path = folder / name_of(best["step"])
        if (reason := _defect(path)) is None:
            try:
                return load(path)
            except Exception:
                if path.exists():
                    raise
        # The run that trains may have removed it in the meantime, because another one is better.
        if not path.exists():
            return _of_best(folder, warn, load)
        warn(f"the best checkpoint {printable(path)} is damaged ({reason}): using the newest")
    return _of_newest(folder, warn, load)


def restore_newest(
    folder: Path, template: Tree, warn: Warn = lambda text: None, part: str = ""
) -> Restored:
    """Returns (step, tree, metadata) of the newest whole checkpoint; the rest is as in `restore_best`."""
    return _of_newest(folder, warn, lambda path: _load(path, template, part))


def _of_newest(folder: Path, warn: Warn, load: Callable[[Path], _Loaded]) -> _Loaded:
    """Returns what `load` makes of the newest whole checkpoint."""
    path, _ = _newest_whole(folder, warn)
    try:
        return load(path)
    except Exception:
        # The run that trains may have removed it in the meantime, because there are newer ones.
        if path.exists():
            raise
    return _of_newest(folder, warn, load)


def _defect(path: Path) -> str | None:
    """Returns the defect of a checkpoint; raises TemporaryError if it cannot be read, but may be whole."""
    try:
        return defect(path)
    except OSError as error:
        # The run that trains may have removed it in the meantime.
        with contextlib.suppress(OSError):
            if path not in path.parent.iterdir():
                return "it is gone"
        raise TemporaryError(
            f"{printable(path)} cannot be read ({error.strerror or error}): try again when it can, or move "
            "it away to go on from the one before"
        ) from error


def _newest_whole(folder: Path, warn: Warn) -> tuple[Path, list[Path]]:
    """Returns the newest whole checkpoint and the newer ones, which are damaged; warns of those.

    Raises SeedbedError if no checkpoint is whole, and TemporaryError if the disk or the system refuses to
    read one, which may be whole.
    """
    damaged: list[Path] = []
    for step in reversed(list_steps(folder)):
        path = folder / name_of(step)
        if (reason := _defect(path)) is None:
            return path, damaged
        warn(f"checkpoint {printable(path)} is damaged ({reason}): using the one before")
        damaged.append(path)
    if damaged:
        raise SeedbedError(
            f"no whole checkpoint in {printable(folder)}: use another run, or start a new one"
        )
    raise SeedbedError(
        f"{printable(folder)} has no checkpoint yet: wait for the first, or train with: "
        f"{resume_command(folder.parent)}"
    )


def warn_of_newer(folder: Path, warn: Callable[[str], None], step: int) -> None:
    """Warns if there is a whole checkpoint after the best one, as there is where a run was stopped."""
    best, newer = read_best(folder), []
    for other in list_steps(folder):
        with contextlib.suppress(TemporaryError):
            newer += [other] if other > step and _defect(folder / name_of(other)) is None else []
    if newer and best is not None and best["step"] == step:
        warn(
            f"the checkpoint of step {step:,} has the best evaluation; that of step {newer[-1]:,} is newer: "
            "--newest (in Python newest=True) takes it"
        )


def task_number(run: RunFolder) -> int:
    """Returns a number that changes with the task of a run, as `task_of` has it; 0 if nothing tells it."""
    if not (run.path / CONFIG).exists():
        return 0
    return zlib.crc32(
        strict_json.dumps(task_of({"env": {}} | run.read_config()), sort=True).encode()
    )


def warn_of_other_task(run: RunFolder, warn: Callable[[str], None]) -> None:
    """Warns if the best checkpoint was evaluated in an environment with other options than the run's now."""
    best, task = read_best(run.checkpoints), task_number(run)
    if best is not None and best.get("task", task) != task:
        warn(
            f"the best evaluation, of step {best['step']:,}, was in an environment with other options: the "
            "next one takes its place, whatever its score"
        )


_TASK_METRIC = re.compile(r"env\.(\w+\.)*metrics\.")


def _load(path: Path, template: Tree, part: str = "") -> Restored:
    manifest = load_json(path / MANIFEST)
    every, within = {leaf["name"]: leaf for leaf in manifest["leaves"]}, f"{part}." if part else ""
    stored = {name: every[name] for name in every if f"{name}.".startswith(within)}
    named = named_leaves(template, part)
    wanted = dict(named)
    # Another version of a task may count more or less; a metric that is not stored begins at zero.
    if names := sorted(n for n in wanted.keys() ^ stored.keys() if not _TASK_METRIC.match(n)):
        raise SeedbedError(
            f"checkpoint {printable(path)} is of another agent or version: {names[0]} (of {len(names)} "
            "such parts) is "
            f"only in {'the agent' if names[0] in wanted else 'the checkpoint'}; use those that trained it"
        )
    for name, leaf in named:
        if name not in stored:
            continue
        have = (tuple(stored[name]["shape"]), stored[name]["dtype"])
        want = shape_and_dtype(leaf)
        if have != want:
            raise SeedbedError(
                f"checkpoint {printable(path)} is of another agent: {name} is {have[1]}{list(have[0])} "
                "there and "
                f"{want[1]}{list(want[0])} in the agent; resume with the run's own agent"
            )
    arrays = _stored(path, manifest)
    leaves = []
    for name, leaf in named:
        shape, dtype = shape_and_dtype(leaf)
        array = arrays.get(name, np.zeros(shape, np.dtype(dtype)))
        leaves.append(like(array, leaf))
    tree = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(template), leaves)
    return manifest["step"], tree, manifest["metadata"]


def _stored(path: Path, manifest: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns all arrays of a checkpoint by name; those without elements are not in its files."""
    everything = [leaf["name"] for leaf in manifest["leaves"] if math.prod(leaf["shape"])]
    arrays = _read_arrays(path, everything)  # orbax reads whole trees only
    found = {}
    for leaf in manifest["leaves"]:
        name, shape, dtype = leaf["name"], leaf["shape"], np.dtype(leaf["dtype"])
        array = np.asarray(arrays.get(name, np.zeros(shape, dtype)))
        found[name] = array.astype(dtype, copy=False).reshape(shape)
    return found


def _read_arrays(path: Path, names: list[str]) -> dict[str, Any]:
    # Imported here because it takes half a second, and only restoring needs it.
    import orbax.checkpoint as ocp

    if not names:
        return {}
    # Of several processes that train as one learner, the one that leads reads: orbax would wait for all.
    several = jax.process_count() > 1
    alone = ocp.options.MultiprocessingOptions(
        active_processes={0} if several else None,
        barrier_sync_key_prefix="leader" if several else None,
    )
    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone).restore(
        (path / ARRAYS).absolute(), args=ocp.args.PyTreeRestore(restore_args=as_numpy)
    )
