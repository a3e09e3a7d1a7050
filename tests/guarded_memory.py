"""Kernels that are run on buffers between pages that nobody may touch."""

from __future__ import annotations

import ctypes
import mmap

from bfloat16_emulation import emulate
from seedbed.llvm import compile_ir, host_has_pairs

_UNTOUCHED = 0xA5


def _guarded(count: int, first: bool) -> tuple[mmap.mmap, int]:
    """Memory of `count` bytes whose neighbour, before the first or after the last, no code may touch."""
    page = mmap.PAGESIZE
    size = -(-count // page) * page
    memory = mmap.mmap(-1, size + 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for border in (address, address + page + size):
        assert libc.mprotect(ctypes.c_void_p(border), ctypes.c_size_t(page), 0) == 0
    start = address + page + (0 if first else size - count)
    ctypes.memset(address + page, _UNTOUCHED, size)
    ctypes.memset(start, 0, count)
    return memory, start


def _is_untouched(memory: mmap.mmap, count: int, first: bool) -> bool:
    """Whether the bytes between a buffer and its farther page are as they were."""
    page = mmap.PAGESIZE
    rest = len(memory) - 2 * page - count
    begin = page + (count if first else 0)
    return memory[begin : begin + rest] == bytes([_UNTOUCHED]) * rest


_RUN = """
define void @run(ptr %data, ptr %dims, i64 %chunk, i64 %chunks) {
  call void @task(ptr %data, ptr %dims, i64 %chunk, i64 %chunks)
  ret void
}
"""


def run_guarded(text: str, sizes: list[int], rows: int) -> bool:
    """Runs a kernel on buffers of `sizes` bytes between forbidden pages; the process ends if it leaves them.

    Their leading axis has `rows`. Returns whether the other bytes of the buffers' pages are as they were.
    """
    if not host_has_pairs() or "tdpbf16ps" in text:
        text = emulate(text)
    run = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2)(
        compile_ir(text + _RUN, "run")
    )
    untouched = True
    for first in (True, False):
        buffers = [_guarded(size, first) for size in sizes]
        data = (ctypes.c_void_p * len(buffers))(*(start for _, start in buffers))
        dims = (ctypes.c_int64 * len(buffers))(*[rows] * len(buffers))
        run(data, dims, 0, 1)
        untouched &= all(
            _is_untouched(memory, size, first)
            for (memory, _), size in zip(buffers, sizes, strict=True)
        )
    return untouched
