"""Runs whose folder is kept in a bucket: `--run s3://...`, `gs://...`, any address that fsspec knows. No JAX.

A run trains into a folder of this machine, below the cache; a process beside it (`run.mirror`) copies what is
new to the bucket. Whoever names the address gets such a folder with what the bucket has.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from seedbed import cache
from seedbed.exit_status import ExitStatus, TemporaryError
from seedbed.files import load_json, write_json
from seedbed.printable import printable, resume_command
from seedbed.streams.beside import Beside
from seedbed.terminal import tell
from seedbed.types import SeedbedError

MODULE = "seedbed.run.mirror"
_FETCH_S = 3600.0
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://.+")


def is_address(where: str) -> bool:
    """Returns whether a run is named by an address of a bucket, and not by a folder."""
    return _ADDRESS.fullmatch(where) is not None


def folder_of(address: str) -> Path:
    """Returns the folder of this machine for a run in a bucket, which may be missing."""
    address = address.rstrip("/")
    digest = hashlib.sha256(address.encode()).hexdigest()[:12]
    name = re.sub(r"[^\w.-]", "-", address.rpartition("/")[2])
    return cache.directory("runs") / f"{name}-{digest}"


def address_file(folder: Path) -> Path:
    """Returns the file, beside a run's folder, that names its bucket."""
    return folder.with_name(f"{folder.name}.bucket.json")


def address_of(folder: Path) -> str:
    """Returns the address of a run's bucket; "" if the run is in a folder only.

    Only folders of the cache have one. A file beside another folder may be anybody's, who could send the run
    anywhere.
    """
    try:
        cached = folder.parent.resolve() == cache.directory("runs").resolve()
        return str(load_json(address_file(folder))["address"]) if cached else ""
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return ""


def name_of(folder: Path) -> str:
    """Returns how a run is named on any machine: by its bucket, if it has one."""
    return address_of(folder) or str(folder)


def run_path(where: str) -> Path:
    """Returns the folder of a run that is named by its folder or by an address, with what a bucket has.

    Raises SeedbedError if the bucket refuses, TemporaryError if it may not do so later.
    """
    if not is_address(where):
        path = Path(where)
        # What is beside the working directory has no name with ".".
        return path if path.name else path.absolute()
    folder = folder_of(where)
    try:
        cache.prepared(folder.parent)
        write_json(address_file(folder), {"address": where.rstrip("/")})
    except (OSError, RuntimeError) as error:
        raise SeedbedError(
            f"{printable(folder.parent)} cannot be written ({error}): name another folder with SEEDBED_CACHE"
        ) from error
    beside = Beside(MODULE, ("fetch", str(folder)), lambda text: None, "")
    said = beside.first(_FETCH_S)
    if said is None or "ready" not in said:
        raise _refusal(said, f"{where}: ", "its copy has not come")
    beside.end(None)
    if aside := said.get("aside"):
        tell(
            f"seedbed: another machine has gone on with {printable(where)}: what was not sent from here "
            f"is in {printable(Path(aside))}",
            sys.stderr,
        )
    return folder


def _refusal(said: dict[str, Any] | None, before: str, unsaid: str) -> SeedbedError:
    """Returns the error of a process that has said why it does not begin, if it has."""
    said = said or {"error": unsaid, "again": True}
    kind = TemporaryError if said.get("again", False) else SeedbedError
    return kind(f"{before}{said.get('error', unsaid)}")


@contextlib.contextmanager
def kept(folder: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Has what is new in a run's folder copied to its bucket, if it has one, until the end of the block.

    Call with the folder locked, and its term taken. Raises SeedbedError if the bucket refuses, or if another
    process has taken the run at the end, and TemporaryError if another has it now, or if the bucket lacks
    something at the end: the folder has it then.
    """
    if not address_of(folder):
        yield
        return
    lost = f"the copy to the bucket has ended; the run is in {printable(folder)}"
    beside = Beside(MODULE, ("keep", str(folder)), tell, lost)
    said = beside.first(_FETCH_S)
    if said is None or "ready" not in said:
        raise _refusal(said, "", lost)
    failed = True
    try:
        yield
        failed = False
    finally:
        status = beside.end(None)
        if status == ExitStatus.REFUSED and not failed:
            raise SeedbedError(
                f"another process has taken {name_of(folder)}, which has none of what is new in "
                f"{printable(folder)}: copy that folder to keep it"
            )
        if status and not failed:
            raise TemporaryError(
                f"the bucket lacks what is new in {printable(folder)}; when it can be written again, go on "
                f"with: {resume_command(name_of(folder))}"
            )
