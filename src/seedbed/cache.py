"""Keeps machine code on disk, under a key that describes the program it was made from.

Only the owner may use the directory (mode 0700; a directory that others may write to is refused), because its
contents are executed. Each file carries a checksum, so that a torn or altered file counts as missing. A file
is written under a temporary name and then renamed, so that several processes may write at once.
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
"""Most bytes of machine code in the directory; the least recently used files are removed first."""
_MAGIC = b"seedbed kernel 1\n"
_ABANDONED = 3600.0  # seconds after which an unfinished file is removed


def directory(kind: str = "kernels") -> Path:
    """Returns the directory for code of a kind, below $SEEDBED_CACHE or else ~/.cache/seedbed."""
    root = os.environ.get("SEEDBED_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "seedbed") / kind


def load(key: str) -> bytes | None:
    """Returns the machine code stored under `key`, or None if there is none or its file is damaged.

    Marks the file as used, so that it is removed later. If the directory cannot be used, warns and returns
    None; the same reason is warned of once.
    """
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
    """Stores machine code under `key`. If that fails, warns (once for the same reason) and returns."""
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
    """Makes the directory if it is missing, closes it to other users (mode 0700), and returns it.

    Raises RuntimeError if another user could have put machine code into it: the directory belongs to another
    user, or others may write to it.
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
    """Removes abandoned files, and the least recently used files until the rest fits into LARGEST."""
    files = []
    for path in folder.iterdir():
        # Another process may remove files at the same time.
        with contextlib.suppress(FileNotFoundError):
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
