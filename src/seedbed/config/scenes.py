"""The copy of a task's MJCF files in its run's folder, as they may be edited or moved after the training."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from seedbed.envs.device.mjcf_files import users_file
from seedbed.printable import printable
from seedbed.run.folder import SCENE, SCENES


def with_copy(encoded: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Returns an encoded configuration that names a copy of its MJCF file, and the files to copy, by place.

    The file itself is the last. If it is none of a user's, the configuration stays, and nothing is copied.
    """
    path = users_file(_task(encoded).get("xml_file"))
    files = {} if path is None else _files(path)
    if not files:
        return encoded, {}
    digest = hashlib.sha256()
    for name, each in sorted(files.items()):
        digest.update(f"{name} {each.stat().st_size}\n".encode() + each.read_bytes())
    places = {f"{SCENES}/{digest.hexdigest()[:12]}/{name}": each for name, each in files.items()}
    return {**encoded, SCENE: [*places][-1]}, places


def use_copy(encoded: dict[str, Any], run: Path) -> None:
    """Lets the task of an encoded configuration have the copy of its MJCF file in the folder of its run.

    Says so on stderr if the file itself is another one now.
    """
    place = encoded.get(SCENE)
    if not isinstance(place, str) or not (run / place).is_file():
        return
    task, copy = _task(encoded), (run / place).absolute()
    original = users_file(task.get("xml_file"))
    task["xml_file"] = str(copy)
    if original is None or not original.is_file() or original == copy:
        return
    if changed := _changed(original, run / Path(*Path(place).parts[:2])):
        _tell(
            f"{printable(', '.join(changed))} changed since {printable(run)} was trained, which goes on with "
            f"its copy, {printable(copy)}; to train the robot as it is now: a new run, with --from"
        )


def _changed(original: Path, folder: Path) -> list[str]:
    """Returns which files are others now, of those that a file needs, than their copies in a folder."""
    files = _files(original)
    same = [
        (folder / name).is_file() and (folder / name).read_bytes() == each.read_bytes()
        for name, each in files.items()
    ]
    changed = [name for name, is_same in zip(files, same, strict=True) if not is_same]
    return changed if files else [original.name]  # which MuJoCo cannot read any more


@functools.cache
def _tell(text: str) -> None:
    """Tells on stderr, once in a process."""
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")


def _task(encoded: dict[str, Any]) -> dict[str, Any]:
    """Returns the encoded task inside of all wrappers."""
    while isinstance(child := encoded.get("env"), dict):
        encoded = child
    return encoded


def _files(path: Path) -> dict[str, Path]:
    """Returns an MJCF file, the last, and those that it needs, by place; {} if MuJoCo cannot read one."""
    mujoco: Any = importlib.import_module("mujoco")  # a package without types
    try:
        needed = mujoco.mju_getXMLDependencies(str(path))
    except mujoco.FatalError:
        return {}
    found = [Path(os.path.normpath(each)) for each in needed]
    found = [each for each in found if each.is_file()]
    above = os.path.commonpath([each.parent for each in found])
    return {each.relative_to(above).as_posix(): each for each in found}
