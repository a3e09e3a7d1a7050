"""Files and folders that are on the disk, and not only in memory, when a function returns."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from seedbed import strict_json

# Bytes of the header, and the checksum (CRC-32) of everything after these two numbers.
_LENGTHS = struct.Struct("<QI")
_MOST_JSON_BYTES = 16_000_000


def sync(path: Path) -> None:
    """Waits until a file's data, or a folder's list of names, is on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unfinished(path: Path) -> Path:
    """Returns where `write_json` writes a file before it has its name, and leaves it if it is killed."""
    return path.with_name(f".{path.name}.new")


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file atomically; it is on the disk when this returns. Raises OSError.

    Only its owner can write the file, whatever the umask is: `run.trust` relies on that.
    """
    temporary = unfinished(path)
    try:
        temporary.unlink(missing_ok=True)
        temporary.touch(0o644, exist_ok=False)
        temporary.write_text(strict_json.dumps(value, indent=2) + "\n")
        sync(temporary)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def copy_once(file: Path, place: Path) -> None:
    """Copies a file atomically to a place that has none yet, and makes its folders. Raises OSError."""
    if not place.exists():
        place.parent.mkdir(0o755, parents=True, exist_ok=True)
        shutil.copyfile(file, unfinished(place))
        sync(unfinished(place))
        unfinished(place).replace(place)


def copy_folder_once(folder: Path, place: Path, without: Sequence[str] = ()) -> None:
    """Copies a folder, but for what has some names, to a place that has none yet. Raises OSError."""
    if not place.exists():
        shutil.rmtree(unfinished(place), ignore_errors=True)
        shutil.copytree(folder, unfinished(place), ignore=shutil.ignore_patterns(*without))
        unfinished(place).replace(place)


def files_below(folder: Path, refused: Callable[[OSError], None] | None = None) -> Iterator[Path]:
    """Yields the files under a folder, which may go meanwhile; `refused` gets the error of a folder."""
    for below, _, names in os.walk(folder, onerror=refused):
        yield from (path for path in (Path(below) / name for name in names) if path.is_file())


def load_json(path: Path) -> Any:
    """Returns the value of a JSON file that anybody may have written.

    Raises OSError as `open_regular` does, and ValueError as `strict_json.loads` does or if the file has more
    than 16 MB.
    """
    with open_regular(path) as file:
        return json_of(file)


def json_of(file: BinaryIO) -> Any:
    """Returns the value of an open JSON file; raises as `load_json` does."""
    content = file.read(_MOST_JSON_BYTES + 1)
    if len(content) > _MOST_JSON_BYTES:
        raise ValueError(f"it has more than {_MOST_JSON_BYTES / 1e6:.0f} MB")
    return strict_json.loads(content)


def open_regular(path: Path, folder: int | None = None) -> BinaryIO:
    """Opens a file to read it; raises OSError for a pipe, a device or a folder, which could keep a reader.

    A relative path begins in the open `folder`, if one is given.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = os.open(path, flags, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def write_arrays(
    path: Path, magic: bytes, header: dict[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Replaces a file of arrays atomically; it is on the disk when this returns.

    `magic` begins it, and `header` is kept as JSON. Arrays must be contiguous. Raises OSError.
    """
    described = [[key, str(leaf.dtype), leaf.shape] for key, leaf in arrays.items()]
    text = strict_json.dumps({**header, "arrays": described}).encode()
    checksum = zlib.crc32(text)
    for leaf in arrays.values():
        checksum = zlib.crc32(_bytes_of(leaf), checksum)
    aside = path.with_name(path.name + ".part")
    try:
        with aside.open("wb") as file:
            file.write(magic + _LENGTHS.pack(len(text), checksum) + text)
            for leaf in arrays.values():
                file.write(_bytes_of(leaf))
        sync(aside)
        aside.rename(path)
        sync(path.parent)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def read_arrays(path: Path, magic: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the header and the arrays of a file that `write_arrays` wrote; the arrays cannot be written.

    Raises OSError as `open_regular` does, or ValueError if it is damaged.
    """
    with open_regular(path) as file:
        data = file.read()
    start = len(magic) + _LENGTHS.size
    if len(data) < start or not data.startswith(magic):
        raise ValueError(f"{path.name} does not begin with {magic.decode()!r}")
    length, checksum = _LENGTHS.unpack_from(data, len(magic))
    if zlib.crc32(memoryview(data)[start:]) != checksum:
        raise ValueError(f"{path.name} does not have its checksum")
    header = strict_json.loads(data[start : start + length])
    start += length
    arrays: dict[str, np.ndarray] = {}
    try:
        for key, dtype, shape in header["arrays"]:
            count = int(np.prod(shape, dtype=np.int64))
            arrays[key] = np.frombuffer(data, dtype, count, start).reshape(shape)
            start += arrays[key].nbytes
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{path.name} does not tell its arrays") from error
    return header, arrays


def _bytes_of(leaf: np.ndarray) -> memoryview:
    return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data
