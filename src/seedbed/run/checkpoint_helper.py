"""The helper process that writes checkpoints: `python -m seedbed.run.checkpoint_helper`.

It reads requests from standard input (length of the header, JSON header, raw leaves) and answers each with a
line of JSON, `{"error": null}` or the reason of a failure. A checkpoint appears under its name only when
every byte of it is on the disk. The functions that only read are for any process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import struct
import sys
import zlib
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from seedbed import strict_json
from seedbed.files import files_below, load_json, sync, write_json
from seedbed.streams.supervisor import own_output

LENGTH = struct.Struct("<Q")
"""The format of the length of a request's header: the number of bytes, in 8 bytes, little-endian."""
MANIFEST = "manifest.json"
ARRAYS = "arrays"
BEST = "best.json"
TERMS = "terms"
"""The folder, in a run's, whose files are the numbers of the starts of its learners."""
_UNREAD = {
    getattr(errno, f"E{name}")
    for name in ["IO", "STALE", "TIMEDOUT", "REMOTEIO", "ACCES", "PERM", "NOMEM", "MFILE", "NFILE"]
}
"""Errors that say nothing of a file's content."""


class Claim(NamedTuple):
    """A start of a learner on a run's folder."""

    term: int  # its number; 0 is no claim
    token: str  # random, and the content of the term's file: a folder that is made anew has terms of its own


UNCLAIMED = Claim(0, "")
"""That of a process that is no learner, or of a folder that has had none."""


def name_of(step: int) -> str:
    """Returns the name of the folder of a step's checkpoint; the names sort by step."""
    return f"{step:012d}"


def list_steps(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints in a folder, smallest first, whether they are whole or damaged."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def newest_claim(run: Path) -> Claim:
    """Returns the latest start of a learner on a run's folder. Raises OSError."""
    terms = run / TERMS
    if not terms.is_dir():
        return UNCLAIMED
    # Digits of other scripts are no numbers.
    named = [path for path in terms.iterdir() if path.name.isascii() and path.name.isdigit()]
    newest = max(named, key=lambda path: int(path.name), default=None)
    return UNCLAIMED if newest is None else Claim(int(newest.name), newest.read_text())


def successor(run: Path, claim: Claim) -> int:
    """Returns the term of the learner that has taken over a run since a claim; 0 if nobody has.

    It is 0, too, while the folder cannot be read, and if it is gone.
    """
    try:
        newest = newest_claim(run)
    except OSError:
        return 0
    taken = newest.term > claim.term or (newest.term == claim.term and newest != claim)
    return newest.term if taken else 0


def _require_claim(run: Path, claim: Claim) -> None:
    """Raises RuntimeError if another learner has the run, for which this one is not to write."""
    if newer := successor(run, claim):
        raise RuntimeError(
            f"another learner has taken over the run (term {newer}; this one is of term {claim.term}): end "
            "this one"
        )


def file_table(folder: Path) -> dict[str, list[int]]:
    """Returns the size in bytes and the CRC-32 of each file under a folder, by its path; raises OSError."""
    table = {}
    for path in sorted(files_below(folder, _raised)):
        content = path.read_bytes()
        table[path.relative_to(folder).as_posix()] = [len(content), zlib.crc32(content)]
    return table


def _raised(error: OSError) -> None:
    raise error


def read_best(folder: Path) -> dict[str, Any] | None:
    """Returns `step` and `score` of the best checkpoint, or None if none was scored or it is not there."""
    try:
        return _best(folder)
    except OSError:
        return None


def _best(folder: Path) -> dict[str, Any] | None:
    """Returns what `read_best` does. Raises OSError if it cannot be read for a reason that passes."""
    try:
        best = load_json(folder / BEST)
        numbers = type(best["step"]) is int and type(best["score"]) in (int, float)
        return best if numbers and (folder / name_of(best["step"]) / MANIFEST).is_file() else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, OSError) and error.errno in _UNREAD:
            raise
        return None


def defect(path: Path) -> str | None:
    """Returns the defect of a checkpoint as a text, or None if its files agree with its manifest.

    Reads every file. Raises OSError if one cannot be read for a reason that is none of the checkpoint's.
    """
    try:
        manifest = load_json(path / MANIFEST)
        if not _is_manifest(manifest):
            return f"{MANIFEST} lacks a part"
        found = file_table(path)
        for name, (size, checksum) in manifest["files"].items():
            if name not in found:
                return f"{name} is missing"
            if found[name][0] != size:
                return f"{name} has {found[name][0]} bytes instead of {size}"
            if found[name][1] != checksum:
                return f"{name} has changed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno in _UNREAD:
            raise
        return f"{MANIFEST} cannot be read: {type(error).__name__}"
    return None


def _is_manifest(manifest: dict[str, Any]) -> bool:
    """Returns whether a manifest has the parts that restoring reads; raises KeyError or TypeError if not."""
    leaves = all(
        isinstance(leaf["name"], str)
        and isinstance(leaf["dtype"], str)
        and all(type(size) is int and size >= 0 for size in leaf["shape"])
        for leaf in manifest["leaves"]
    )
    return leaves and type(manifest["step"]) is int and isinstance(manifest["metadata"], dict)


def write_checkpoint(folder: Path, header: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Writes the arrays, by name, as the checkpoint of `header["step"]`, and removes old checkpoints.

    `header` also holds `leaves`, `metadata`, `keep`, `score`, `task` and `claim`, the learner's. Raises
    RuntimeError if another one has the run. The last `keep` checkpoints stay, and the best: the one with the
    highest score in the newest task. A new score of the best checkpoint replaces its old one. No other
    process may write into the folder at the same time. If this raises, the earlier checkpoints stay whole.
    """
    folder.mkdir(exist_ok=True)
    step, score, task = header["step"], header["score"], header["task"]
    final = folder / name_of(step)
    leaves = [{**leaf, "crc": _checksum(arrays[leaf["name"]])} for leaf in header["leaves"]]
    manifest = {
        "step": step,
        "metadata": header["metadata"],
        "leaves": leaves,
        "term": header["claim"][0],
    }
    claim = Claim(*header["claim"])
    _require_claim(folder.parent, claim)
    remove_leftovers(folder)
    held = _held(final)
    # The arrays may be on the disk already, if their score or more metadata comes later.
    if held is None or held["leaves"] != strict_json.loads(strict_json.dumps(leaves)):
        # A run that goes on with other rates of exploration has the parameters that were evaluated.
        if held is not None and _updates(held) == _updates(manifest) != -1:
            manifest["metadata"] = {**held["metadata"], **header["metadata"]}
        _write(final, manifest, arrays, claim)
    elif (known := {**held["metadata"], **header["metadata"]}) != held["metadata"]:
        write_json(final / MANIFEST, {**held, "metadata": known})
    best = _best(folder)
    if score is not None and (
        best is None
        or best.get("task", task) != task
        or best["step"] == step
        or score > best["score"]
    ):
        best = {"step": step, "score": score, "task": task}
        write_json(folder / BEST, best)
    for old in list_steps(folder)[: -header["keep"]]:
        if best is None or old != best["step"]:
            shutil.rmtree(_rename_away(folder / name_of(old)), ignore_errors=True)


def _checksum(array: Any) -> int:
    return zlib.crc32(array.tobytes())


def _updates(manifest: dict[str, Any]) -> int:
    """Returns how often the parameters of a checkpoint were updated, -1 if it does not say."""
    return manifest["metadata"].get("start", {}).get("updates", -1)


def _held(final: Path) -> dict[str, Any] | None:
    """Returns the manifest of a checkpoint, or None if the checkpoint is missing or damaged."""
    return None if defect(final) is not None else load_json(final / MANIFEST)


def _write(final: Path, manifest: dict[str, Any], arrays: dict[str, Any], claim: Claim) -> None:
    """Writes a checkpoint beside its place, syncs it, and renames it to `final`."""
    import orbax.checkpoint as ocp

    temporary = final.with_name(f".writing-{final.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        # Orbax refuses empty arrays; the manifest describes them fully.
        full = {name: array for name, array in arrays.items() if array.size}
        if full:
            ocp.PyTreeCheckpointer().save((temporary / ARRAYS).absolute(), full)
        write_json(temporary / MANIFEST, {**manifest, "files": file_table(temporary)})
        _sync_tree(temporary)
        # Again, because all this may have taken long.
        _require_claim(final.parent.parent, claim)
        former = _rename_away(final)
        temporary.rename(final)
        sync(final.parent)
    except BaseException:
        # No more than its own: others may be of a learner that has taken over.
        with contextlib.suppress(OSError):
            _put_back(_former(final))
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(former, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Removes half-written and half-removed checkpoints, which a failure or a kill has left.

    A whole checkpoint that was renamed to make way for a new one is put back if the new one is not there. No
    other process may write into the folder at the same time.
    """
    for former in folder.glob(".removing-*"):
        # One that cannot be read may be whole: it stays.
        with contextlib.suppress(OSError):
            _put_back(former)
            shutil.rmtree(former, ignore_errors=True)
    for path in folder.glob(".writing-*"):
        shutil.rmtree(path, ignore_errors=True)


def _former(final: Path) -> Path:
    """Returns where a checkpoint goes that makes way for another."""
    return final.with_name(f".removing-{final.name}")


def _put_back(former: Path) -> None:
    """Renames a whole checkpoint back that has made way for one that is not there."""
    final = former.with_name(former.name.removeprefix(".removing-"))
    if former.exists() and not final.exists() and defect(former) is None:
        former.rename(final)


def _rename_away(path: Path) -> Path:
    """Renames a checkpoint that is to be removed, so that no reader finds half of it; returns the new path.

    The checkpoint may be missing; then there is nothing at that path.
    """
    doomed = _former(path)
    shutil.rmtree(doomed, ignore_errors=True)
    if path.exists():
        path.rename(doomed)
    return doomed


def _sync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            sync(Path(root) / name)
        sync(Path(root))


def _read_request(source: BinaryIO) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Returns the header and the arrays of a request, or None if the input ends before it is complete."""
    import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
    import numpy as np

    size = source.read(LENGTH.size)
    if len(size) < LENGTH.size:
        return None
    header = strict_json.loads(source.read(LENGTH.unpack(size)[0]))
    arrays = {}
    for leaf in header["leaves"]:
        content = source.read(leaf["bytes"])
        if len(content) < leaf["bytes"]:  # the trainer died while sending
            return None
        array = np.frombuffer(content, np.dtype(leaf["dtype"]))
        arrays[leaf["name"]] = array.reshape(leaf["shape"])
    return header, arrays


def main(folder: Path) -> None:
    """Serves requests for checkpoints in `folder` until standard input ends. Signals are the trainer's."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)  # training has priority
    answers = own_output()
    while (request := _read_request(sys.stdin.buffer)) is not None:
        try:
            write_checkpoint(folder, *request)
            answer = {"error": None}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(strict_json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
