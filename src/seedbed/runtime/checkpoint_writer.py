"""The helper process that writes checkpoints: `python -m seedbed.runtime.checkpoint_writer`.

It reads requests from standard input (length, JSON header, raw leaves) and answers each with a line
of JSON. A checkpoint appears under its name only when every byte of it is on the disk.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import sys
import zlib
from pathlib import Path
from typing import Any, BinaryIO

LENGTH = struct.Struct("<Q")
MANIFEST = "manifest.json"
ARRAYS = "arrays"
BEST = "best.json"


def name_of(step: int) -> str:
    """Names the folder of a step's checkpoint, so that names sort by step."""
    return f"{step:012d}"


def list_steps(folder: Path) -> list[int]:
    """Lists the steps of the checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file atomically."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("w") as file:
            json.dump(value, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def file_table(folder: Path) -> dict[str, list[int]]:
    """Maps each file under a folder to its size and CRC-32."""
    table = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            table[path.relative_to(folder).as_posix()] = [len(content), zlib.crc32(content)]
    return table


def read_best(folder: Path) -> dict[str, Any] | None:
    """Reads which checkpoint is the best, or None where none was scored."""
    try:
        best = json.loads((folder / BEST).read_text())
        return best if (folder / name_of(best["step"]) / MANIFEST).is_file() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def defect(path: Path) -> str | None:
    """Says what is wrong with a checkpoint; None where its files agree with its manifest."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        found = file_table(path)
        for name, (size, checksum) in manifest["files"].items():
            if name not in found:
                return f"{name} is missing"
            if found[name][0] != size:
                return f"{name} has {found[name][0]} bytes instead of {size}"
            if found[name][1] != checksum:
                return f"{name} has changed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read: {type(error).__name__}"
    return None


def write_checkpoint(folder: Path, header: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Makes arrays by name the checkpoint of `header["step"]`, notes its score, and drops old ones."""
    folder.mkdir(parents=True, exist_ok=True)
    step, score = header["step"], header["score"]
    final = folder / name_of(step)
    leaves = [{**leaf, "crc": _checksum(arrays[leaf["name"]])} for leaf in header["leaves"]]
    manifest = {"step": step, "metadata": header["metadata"], "leaves": leaves}
    held = _held(final)
    # The arrays may be there already, as when their score, or more metadata, comes later.
    if held is None or held["leaves"] != json.loads(json.dumps(leaves)):
        _write(final, manifest, arrays)
    elif (known := {**held["metadata"], **header["metadata"]}) != held["metadata"]:
        write_json(final / MANIFEST, {**held, "metadata": known})
    best = read_best(folder)
    if score is not None and (best is None or score > best["score"] or best["step"] == step):
        best = {"step": step, "score": score}
        write_json(folder / BEST, best)
    for old in list_steps(folder)[: -header["keep"]]:
        if best is None or old != best["step"]:
            shutil.rmtree(_rename_away(folder / name_of(old)), ignore_errors=True)


def _checksum(array: Any) -> int:
    return zlib.crc32(array.tobytes())


def _held(final: Path) -> dict[str, Any] | None:
    """Reads the manifest of a checkpoint; returns None if it is missing or damaged."""
    return None if defect(final) is not None else json.loads((final / MANIFEST).read_text())


def _write(final: Path, manifest: dict[str, Any], arrays: dict[str, Any]) -> None:
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
        former = _rename_away(final)
        temporary.rename(final)
        _sync_folder(final.parent)
    except BaseException:
        remove_leftovers(final.parent)
        raise
    shutil.rmtree(former, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Removes half-written and half-removed checkpoints, which a failure or a kill has left.

    A whole checkpoint that was renamed for a successor is put back if the successor is not there. No other
    process may write into the folder meanwhile.
    """
    for former in folder.glob(".removing-*"):
        final = folder / former.name.removeprefix(".removing-")
        if not final.exists() and defect(former) is None:
            former.rename(final)
    for pattern in (".writing-*", ".removing-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _rename_away(path: Path) -> Path:
    """Renames what is to be removed, so that no reader meets half of it."""
    doomed = path.with_name(f".removing-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    if path.exists():
        path.rename(doomed)
    return doomed


def _sync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            with (Path(root) / name).open("rb") as file:
                os.fsync(file.fileno())
        _sync_folder(Path(root))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_request(source: BinaryIO) -> tuple[dict[str, Any], dict[str, Any]] | None:
    import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
    import numpy as np

    size = source.read(LENGTH.size)
    if len(size) < LENGTH.size:
        return None
    header = json.loads(source.read(LENGTH.unpack(size)[0]))
    arrays = {}
    for leaf in header["leaves"]:
        content = source.read(leaf["bytes"])
        if len(content) < leaf["bytes"]:  # the trainer died while sending
            return None
        array = np.frombuffer(content, np.dtype(leaf["dtype"]))
        arrays[leaf["name"]] = array.reshape(leaf["shape"])
    return header, arrays


def main(folder: Path) -> None:
    """Serves requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)  # training comes first
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not reach the trainer
    remove_leftovers(folder)
    while (request := _read_request(sys.stdin.buffer)) is not None:
        try:
            write_checkpoint(folder, *request)
            answer = {"error": None}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
