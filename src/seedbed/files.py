"""Files and folders that are on the disk, and not only in memory, when a function returns."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

# Bytes of the header, and the checksum (CRC-32) of everything after these two numbers.
_LENGTHS = struct.Struct("<QI")


def sync(path: Path) -> None:
    """Waits until a file's data, or a folder's list of names, is on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file atomically; it is on the disk when this returns. Raises OSError."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(json.dumps(value, indent=2) + "\n")
        sync(temporary)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_arrays(
    path: Path, magic: bytes, header: dict[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Replaces a file of arrays atomically; it is on the disk when this returns.

    `magic` begins it, and `header` is kept as JSON. Arrays must be contiguous. Raises OSError.
    """
    described = [[key, str(leaf.dtype), leaf.shape] for key, leaf in arrays.items()]
    text = json.dumps({**header, "arrays": described}).encode()
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

    Raises OSError, or ValueError if it is damaged.
    """
    data = path.read_bytes()
    start = len(magic) + _LENGTHS.size
    if len(data) < start or not data.startswith(magic):
        raise ValueError(f"{path.name} does not begin with {magic.decode()!r}")
    length, checksum = _LENGTHS.unpack_from(data, len(magic))
    if zlib.crc32(memoryview(data)[start:]) != checksum:
        raise ValueError(f"{path.name} does not have its checksum")
    header = json.loads(data[start : start + length])
    start += length
    arrays: dict[str, np.ndarray] = {}
    for key, dtype, shape in header["arrays"]:
        count = int(np.prod(shape, dtype=np.int64))
        arrays[key] = np.frombuffer(data, dtype, count, start).reshape(shape)
        start += arrays[key].nbytes
    return header, arrays


def _bytes_of(leaf: np.ndarray) -> memoryview:
    return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data
