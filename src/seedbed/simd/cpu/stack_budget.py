"""The place of a kernel's own memory: a little is on the stack, the rest on the heap.

Kernels run on XLA's threads and on the threads that call them. The threads of XLA's pool have stacks of
8 MiB. Another thread has the stack that its creator asked for, or the default of the system: usually 8
MiB, but 2 MiB with glibc if `ulimit -s` is unlimited.
"""

from __future__ import annotations

from collections.abc import Sequence

ALIGN = 64
MOST_STACK = 1 << 20
"""The most bytes of stack that a kernel may take: half of the smallest default stack of a thread."""
STACK = 128 << 10
"""The most bytes of stack for its arrays. The rest is for spilled registers; only LLVM knows their size."""


class Room:
    """A kernel's own memory: at most STACK bytes are on the stack, the rest is in one block of the heap."""

    bool_bits = 32  # as many as a float has, so that a mask of lanes is one comparison

    def __init__(self) -> None:
        """Starts with no memory taken."""
        self.stack, self.heap = 0, 0  # bytes taken

    def take(self, size: int) -> int | None:
        """Takes `size` bytes, rounded up to a multiple of ALIGN.

        Returns None if they are on the stack, else their offset in bytes in the block of the heap.
        """
        size = aligned(size)
        if self.stack + size <= STACK:
            self.stack += size
            return None
        self.heap += size
        return self.heap - size

    def place(self, size: int, array: str) -> str:
        """Takes `size` bytes for an array of LLVM type `array`; returns the instruction for its address."""
        offset = self.take(size)
        if offset is None:
            return f"alloca {array}, align {ALIGN}"
        return f"getelementptr i8, ptr %memory, i64 {offset}"

    def table(self, name: str, size: int, constants: str) -> tuple[str, str]:
        """Returns the definition of a constant array of `size` bytes, and the operand for its address."""
        del size
        return f"{name} = internal constant {constants}, align {ALIGN}", name


def aligned(size: int) -> int:
    """Returns a size in bytes, rounded up to a multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN


# If there is no memory, the process aborts, as it would on a full stack.
RESERVE = """
declare ptr @aligned_alloc(i64, i64)
declare void @abort()
define internal noalias ptr @reserve(i64 %bytes) nounwind noinline {
  %memory = call ptr @aligned_alloc(i64 64, i64 %bytes)
  %failed = icmp eq ptr %memory, null
  br i1 %failed, label %stop, label %done
stop:
  call void @abort()
  unreachable
done:
  ret ptr %memory
}
"""
"""IR of `ptr @reserve(i64 bytes)`, which returns memory of the heap. `@free` frees it."""


PROBE = """
%depth = call ptr @llvm.stacksave.p0()
%probed = icmp eq ptr {first}, null
br i1 %probed, label %probe, label %work
probe:
store ptr %depth, ptr {second}
ret void"""
"""IR of the end of a function's first block; the block `work` follows.

If its argument `first` is null, the function only stores its stack pointer at its argument `second`, and
returns.
"""


def stack_use(buffers: int, functions: Sequence[str]) -> str:
    """Returns the IR of `i64 @stack_use(ptr null)`, which returns the bytes of stack that a task takes.

    The task has `buffers` buffers. `@stack_use` calls `functions`, which have four arguments and begin
    with PROBE. Its caller must pass the null: if it were a constant in the IR, LLVM would make
    specialised copies of the functions.
    """
    # 24 bytes for each buffer: pointers to the buffer, to its rows and to its place in a tile
    lines, used = [], f"{24 * buffers}"
    for name in functions:
        lines += [
            f"call void @{name}(ptr %null, ptr %slot, ptr %null, ptr %null)",
            f"%{name}.end = load ptr, ptr %slot",
            f"%{name}.bottom = ptrtoint ptr %{name}.end to i64",
            f"%{name}.depth = sub i64 %top, %{name}.bottom",
            f"%{name}.used = add i64 {used}, %{name}.depth",
        ]
        used = f"%{name}.used"
    body = "\n".join(lines)
    return f"""
declare ptr @llvm.stacksave.p0()
define i64 @stack_use(ptr %null) nounwind {{
%slot = alloca ptr
%here = call ptr @llvm.stacksave.p0()
%top = ptrtoint ptr %here to i64
{body}
ret i64 {used}
}}
"""
