"""MJCF files that tasks name: where they are, and which version of them is there now."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import gymnasium

from seedbed.envs.device.packaged import is_packaged, packaged_file
from seedbed.types import SeedbedError

_ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
"""Folder of the MJCF files that Gymnasium installs."""
_OWN = Path(__file__).with_name("targets")
"""Folder of our own MJCF files."""


class Version(NamedTuple):
    """A file as it is now: what is kept of it is not that of the file before it was edited."""

    path: Path  # absolute: the working directory may change
    mtime_ns: int
    size: int  # bytes

    @classmethod
    def of(cls, path: Path) -> Version:
        """Returns the version of a file that exists. Files that it includes are not looked at."""
        found = path.stat()
        return cls(path.absolute(), found.st_mtime_ns, found.st_size)


def users_file(name: object) -> Path | None:
    """Returns the absolute path of a file, which may be missing; None if its name is Gymnasium's or ours."""
    if not isinstance(name, str) or is_packaged(name):
        return None
    path = Path(name).expanduser()
    return path.absolute() if path.is_absolute() or name.startswith(".") else None


def mjcf_file(name: str) -> Path:
    """Returns a file's path. A name that is neither absolute nor begins with `.` is Gymnasium's or ours.

    One that begins with `playground/` or `dm_control/` is in a package of that project's files. Raises
    SeedbedError if there is no such file.
    """
    if is_packaged(name):
        return packaged_file(name)
    path = users_file(name)
    if path is None:
        path = _OWN / name if (_OWN / name).is_file() else _ASSETS / name
    if not path.is_file():
        raise SeedbedError(f"there is no MJCF file {path}; give an absolute path, or one in ./")
    return path
