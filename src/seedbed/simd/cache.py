"""Machine code on disk, found again by the program it was made from.

The directory is its owner's alone (0700; one that others may write to is not used), since what is in it
will be run. A file carries a checksum, so that one that is torn or altered is as good as none, and appears
by renaming, so that processes may write at once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import tempfile
import time
import warnings
from pathlib import Path

LARGEST = 256 << 20
"""Bytes that the directory may hold; what was not used for longest goes first."""
_MAGIC = b"seedbed kernel 1\n"
_ABANDONED = 3600.0  # seconds after which a file that was never finished is removed


def directory(kind: str = "kernels") -> Path:
    """Where machine code of a kind is kept: below $SEEDBED_CACHE, or else ~/.cache/seedbed."""
    root = os.environ.get("SEEDBED_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "seedbed") / kind


def load(key: str) -> bytes | None:
    """Machine code that was kept under `key`, or None; using it makes it last longer."""
    try:
        path = prepared(directory()) / _name(key)
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:
        _complain(str(error))
        return None
    head, code = data[: len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
    if head != _MAGIC + _checksum(key, code):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return code


def save(key: str, code: bytes) -> None:
    """Keep machine code under `key`; where that fails, say so once and go on."""
    try:
        folder = prepared(directory())
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as file:
            part = Path(file.name)
            try:
                file.write(_MAGIC + _checksum(key, code) + code)
                file.close()
                part.replace(folder / _name(key))
            except BaseException:
                part.unlink(missing_ok=True)
                raise
        _shrink(folder)
    except (OSError, RuntimeError) as error:
        _complain(str(error))


def _name(key: str) -> str:
    return f"{hashlib.sha256(key.encode()).hexdigest()}.kernel"


def _checksum(key: str, code: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + code).digest()


def prepared(folder: Path) -> Path:
    """The directory, made and closed to others.

    Raises RuntimeError where someone else could have put machine code into it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.stat()
    if state.st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user")
    if stat.S_IMODE(state.st_mode) & 0o077:
        if state.st_mode & 0o022:
            raise RuntimeError(f"others may write to {folder}; close it with chmod 700")
        folder.chmod(0o700)
    return folder


def _shrink(folder: Path) -> None:
    """Remove what was used least lately, until the rest fits, and what was never finished."""
    files = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process may be at it too
            state = path.stat()
            if path.suffix == ".part" and time.time() - state.st_mtime > _ABANDONED:
                path.unlink()
            elif path.suffix == ".kernel":
                files.append((state.st_mtime, state.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= LARGEST:
            break
        path.unlink(missing_ok=True)
        total -= size


@functools.cache
def _complain(reason: str) -> None:
    warnings.warn(
        f"machine code is not kept for the next start: {reason}; set SEEDBED_CACHE to a directory "
        "of your own",
        RuntimeWarning,
        stacklevel=2,
    )
