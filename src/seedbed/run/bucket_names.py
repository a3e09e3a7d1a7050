"""The names of a run's files, as its bucket has them: which belong there, and the order in which they go."""

from __future__ import annotations

from pathlib import PurePosixPath

from seedbed.run.checkpoint_helper import TERMS
from seedbed.run.folder import CHECKPOINTS as _FOLDER
from seedbed.run.folder import CONFIG
from seedbed.streams.credentials import FOLDER as LISTEN

CHECKPOINTS = f"{_FOLDER}/"
"""How the paths of checkpoints begin."""
BEFORE = (CONFIG, "replay/", "roles/")
"""How paths begin of what a checkpoint is for and learns from, which must not come after it."""
INDEX = ".index"
"""The end of the file that a save of a replay ends with; its other files grow between saves."""
_LEFT_OUT = (LISTEN, TERMS)
_ROLE_FILES = ("address.json", "log.txt")


def order(path: str) -> tuple[bool, bool, bool, str]:
    """Has replays go before their checkpoints, indices after what they name, and metrics last."""
    first, second = path.startswith(BEFORE), path.startswith(CHECKPOINTS)
    return not first, not second, path.endswith(INDEX), path


def belongs(path: str) -> bool:
    """Returns whether a file of a run's folder, or a name in a bucket, is one that both have.

    Anybody may have written a bucket: a name must not lead out of the folder, nor to what stays here.
    """
    parts = path.split("/")
    hidden = any(not part or part.startswith(".") for part in parts)
    return not hidden and parts[0] not in _LEFT_OUT and parts[-1] not in _ROLE_FILES


def parent_of(path: str) -> str:
    """Returns the folder of a path."""
    return str(PurePosixPath(path).parent)


def is_checkpoint(path: str) -> bool:
    """Returns whether a file is part of a checkpoint."""
    return path.startswith(CHECKPOINTS) and step_of(path).isdigit()


def step_of(path: str) -> str:
    """Returns the name of the checkpoint of which a file is part."""
    return path.split("/")[1]


def saved_at(index: str) -> str:
    """Returns the name of the checkpoint to which an index belongs: the middle of NUMBER.NAME.index."""
    return PurePosixPath(index).name.removesuffix(INDEX).partition(".")[2]


def replays_of(paths: list[str]) -> set[str]:
    """Returns the folders in which one of some files is the index of a replay."""
    return {parent_of(path) for path in paths if path.endswith(INDEX)}
