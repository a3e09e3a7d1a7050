"""Where a kernel's own memory is: a little on the stack, the rest on the heap.

Kernels run on XLA's threads and on those that call them. Stacks of its pool are 8 MiB. Others are as they
were asked for, or as the system makes them: 2 MiB with glibc if `ulimit -s` is unlimited, usually 8 MiB.
"""

from __future__ import annotations

from collections.abc import Sequence

ALIGN = 64
MOST_STACK = 512 << 10
"""Bytes of the stack that a kernel may take: a quarter of the smallest that threads have by default."""
STACK = 128 << 10
"""The same for its arrays; the rest is for what registers do not hold, which only LLVM knows."""


class Room:
    """Memory of a kernel's own: on the stack as long as there is room, then in one block of the heap."""

    def __init__(self) -> None:
        """All is free."""
        self.stack, self.heap = 0, 0  # bytes taken

    def take(self, size: int) -> int | None:
        """Take `size` bytes: None if they are to be on the stack, else their offset in the block."""
        size = aligned(size)
        if self.stack + size <= STACK:
            self.stack += size
            return None
        self.heap += size
        return self.heap - size


def aligned(size: int) -> int:
    """Size of memory after which the next may begin."""
    return -(-size // ALIGN) * ALIGN


# Without memory the process ends, as it would on a full stack.
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
"""IR of `ptr @reserve(i64 bytes)`, memory of the heap that `@free` gives back."""


PROBE = """
%depth = call ptr @llvm.stacksave.p0()
%probed = icmp eq ptr {first}, null
br i1 %probed, label %probe, label %work
probe:
store ptr %depth, ptr {second}
ret void"""
"""IR of the end of a function's first block, before its block `work`.

Where its first argument is null, the function only stores how deep its stack is, at the second.
"""


def stack_use(buffers: int, functions: Sequence[str]) -> str:
    """IR of `i64 @stack_use(ptr null)`, the bytes of the stack that a task of so many buffers takes.

    It asks the functions, which have four arguments and begin with PROBE. The null must not be a constant,
    for which LLVM would make copies of them.
    """
    lines, used = [], f"{24 * buffers}"  # the address, the rows and the place in a tile
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
