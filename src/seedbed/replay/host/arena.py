"""Memory in segments that can be backed by files, at addresses that never change.

A segment is the unit that is opened and closed. If there is a folder, each open segment is a file of its own,
mapped at the segment's address. Bytes that were written to a file are never changed, so an index that names
the file stays valid. A segment that is closed and opened again gets a new file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from seedbed.printable import printable
from seedbed.types import SeedbedError

# The values on Linux.
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
SUFFIX = ".segment"


class Files:
    """A folder of segment files.

    `notices` gets a message when a file cannot be made; any thread may remove messages from it. The
    constructor makes the folder, and raises SeedbedError if it cannot.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notices: deque[str] = deque()
        self._failed = self._discarded = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            present = [path.stem.split("-") for path in folder.glob(f"*-*{SUFFIX}")]
        except OSError as error:
            raise SeedbedError(
                f"the replay cannot be kept in {printable(folder)} ({error.strerror}): mend the folder, "
                "or do not "
                "save the replay"
            ) from error
        self._serial = max((int(serial) + 1 for _, serial in present), default=0)

    def create(self, kind: str, size: int) -> str:
        """Makes a file of `size` bytes and returns its name in the folder; raises OSError if it cannot.

        All bytes are allocated now: a full disk is an OSError here, not a signal (SIGBUS) on a later write.
        The first failure after a success leaves a notice. One thread at a time may call this.
        """
        file = f"{kind}-{self._serial:08d}{SUFFIX}"
        path = self.folder / file
        try:
            _allocate_file(path, size)
        except OSError as error:
            if not self._failed:
                self._tell(error)
            self._failed = True
            raise
        self._failed = False
        self._serial += 1
        return file

    def discard(self, file: str, error: OSError) -> None:
        """Removes a file that was made but cannot be mapped because of `error`.

        The first call leaves a notice. One thread at a time may call this.
        """
        with contextlib.suppress(OSError):
            (self.folder / file).unlink()
        if not self._discarded:
            self._tell(error)
        self._discarded = True

    def _tell(self, error: OSError) -> None:
        self.notices.append(
            f"{self.folder}: {error.strerror}: the replay keeps what comes in memory only; it "
            "cannot be saved until files can be made there again"
        )


class Arena:
    """An array of `num_segments` segments, each with parts of `part_bytes` bytes (whole pages).

    `views` has one uint8 array for each part. It covers that part of all segments in order, and of one extra
    segment at the end, which is for constants and is never opened or saved. Without a folder, a closed
    segment keeps its memory, which is used when it is opened again. The constructor raises SeedbedError if
    the addresses are refused.
    """

    def __init__(
        self, kind: str, num_segments: int, part_bytes: Sequence[int], files: Files | None
    ) -> None:
        assert not any(size % mmap.PAGESIZE for size in part_bytes), part_bytes
        self._kind, self._files = kind, files
        self.part_bytes = tuple(part_bytes)
        memory = [_reserve(kind, size * (num_segments + 1)) for size in part_bytes]
        if files is None:
            for part in memory:
                # Kernels without huge pages, such as those of PREEMPT_RT, refuse the advice.
                with contextlib.suppress(OSError):
                    part.madvise(mmap.MADV_HUGEPAGE)
        self.views = [np.frombuffer(part, np.uint8) for part in memory]
        self.files: list[str | None] = [None] * num_segments
        self._mapped = np.zeros(num_segments, bool)

    @property
    def segment_bytes(self) -> int:
        """Returns the size of a segment in bytes."""
        return sum(self.part_bytes)

    def open(self, segment: int) -> None:
        """Gives a closed segment memory: a new file, or plain memory if no file can be made or mapped.

        Call under the storage's lock.
        """
        if self._files is None:
            return
        try:
            file = self.create()
        except OSError:  # `Files` has left a notice
            return
        try:
            self._map(segment, file)
        except OSError as error:
            self._files.discard(file, error)

    def create(self) -> str:
        """Makes a file of a segment's size and returns its name; raises OSError if it cannot.

        Call under the storage's lock.
        """
        assert self._files is not None
        return self._files.create(self._kind, self.segment_bytes)

    def attach(self, segment: int, file: str) -> None:
        """Maps an earlier file at a closed segment; raises OSError if it is missing or has another size.

        Call under the storage's lock, or before other threads use the replay.
        """
        assert self._files is not None
        size = (self._files.folder / file).stat().st_size
        if size != self.segment_bytes:
            raise OSError(errno.EINVAL, f"{file} has {size} bytes, not {self.segment_bytes}")
        self._map(segment, file)

    def close(self, segment: int, kept: frozenset[str]) -> None:
        """Unmaps a segment's file, and deletes the file unless its name is in `kept`.

        Call under the storage's lock, or before other threads use the replay.
        """
        file = self.files[segment]
        if self._mapped[segment]:
            for part in range(len(self.part_bytes)):
                self._place(segment, part, _PRIVATE, -1, 0)
            self._mapped[segment] = False
        if file is not None and file not in kept and self._files is not None:
            # If the file cannot be deleted now, a later save deletes it.
            with contextlib.suppress(OSError):
                (self._files.folder / file).unlink(missing_ok=True)
        self.files[segment] = None

    def write(self, segment: int, file: str) -> None:
        """Copies a segment, as it is now, into a file made by `create`; raises OSError if it cannot.

        Any thread may call this without the storage's lock; the segment must stay open meanwhile.
        """
        assert self._files is not None
        with (self._files.folder / file).open("r+b") as opened:
            for view, size in zip(self.views, self.part_bytes, strict=True):
                opened.write(view[segment * size : (segment + 1) * size].data)

    def _map(self, segment: int, file: str) -> None:
        assert self._files is not None
        descriptor = os.open(self._files.folder / file, os.O_RDWR)
        part = offset = 0
        try:
            for part, size in enumerate(self.part_bytes):
                self._place(segment, part, mmap.MAP_SHARED, descriptor, offset)
                offset += size
        except OSError:
            for mapped in range(part):
                self._place(segment, mapped, _PRIVATE, -1, 0)
            raise
        finally:
            os.close(descriptor)
        self.files[segment], self._mapped[segment] = file, True

    def _place(self, segment: int, part: int, flags: int, descriptor: int, offset: int) -> None:
        """Replaces the mapping of one part of a segment, at its fixed address. Raises OSError."""
        size = self.part_bytes[part]
        address = self.views[part].ctypes.data + segment * size
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        found = _LIBC.mmap(address, size, protection, flags | _MAP_FIXED, descriptor, offset)
        if found != address:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def _reserve(kind: str, size: int) -> mmap.mmap:
    """Returns private memory that takes room only as it is written; raises SeedbedError if it is refused."""
    try:
        return mmap.mmap(-1, size, flags=_PRIVATE)
    except OSError as error:
        raise SeedbedError(
            f"replay needs {size / 1e9:.1f} GB of addresses for {kind}, which the system refuses "
            f"({error.strerror}): lower --agent.capacity, or raise the limit (ulimit -v; with sysctl "
            "vm.overcommit_memory=2 also what is not used yet counts)"
        ) from error


def _allocate_file(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
